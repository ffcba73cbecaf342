# System packages, found through pkg-config and published as imported targets that rooms link by name.
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
find_package(OpenSSL REQUIRED)

pkg_check_modules(UV REQUIRED IMPORTED_TARGET libuv)
pkg_check_modules(PBC REQUIRED IMPORTED_TARGET libprotobuf-c)
pkg_check_modules(JANSSON REQUIRED IMPORTED_TARGET jansson)
pkg_check_modules(SQLITE REQUIRED IMPORTED_TARGET sqlite3)
pkg_check_modules(HIREDIS REQUIRED IMPORTED_TARGET hiredis)
pkg_check_modules(MHD REQUIRED IMPORTED_TARGET libmicrohttpd)

# Debian's libwslay-dev carries no pkg-config file.
find_library(MOBULA_WSLAY_LIB wslay REQUIRED)
add_library(PkgConfig::WSLAY INTERFACE IMPORTED)
target_link_libraries(PkgConfig::WSLAY INTERFACE ${MOBULA_WSLAY_LIB})

pkg_check_modules(CURL REQUIRED IMPORTED_TARGET libcurl)
pkg_check_modules(YAML REQUIRED IMPORTED_TARGET yaml-0.1)
pkg_check_modules(EXPAT REQUIRED IMPORTED_TARGET expat)
pkg_check_modules(ZLIB REQUIRED IMPORTED_TARGET zlib)
pkg_check_modules(ISAL REQUIRED IMPORTED_TARGET libisal)
pkg_check_modules(LZMA REQUIRED IMPORTED_TARGET liblzma)
pkg_check_modules(ZSTD REQUIRED IMPORTED_TARGET libzstd)
pkg_check_modules(ARCHIVE REQUIRED IMPORTED_TARGET libarchive)
pkg_check_modules(EVENT REQUIRED IMPORTED_TARGET libevent_openssl libevent)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(BLAS REQUIRED IMPORTED_TARGET openblas)
find_program(PROTOC_C protoc-c REQUIRED)

include(cmake/Grpc.cmake)

if(MOBULA_TESTS)
    pkg_check_modules(CMOCKA REQUIRED IMPORTED_TARGET cmocka)
endif()
