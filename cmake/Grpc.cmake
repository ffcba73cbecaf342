# gRPC core, without the C++ and Abseil that its pkg-config and CMake packages drag in.
#
# Rooms link grpc_core, which is the shared library. Programs that wait for calls all day ask for the archive:
# mobula_grpc_archive(TARGET). It costs them a tenth less CPU a call and they start without seventy libraries to relocate
# (docs/adr/0024-grpc-in-the-programs.md). Sanitized programs keep the library, which tests/tsan.supp names.
find_library(MOBULA_GRPC_LIB grpc REQUIRED)
find_library(MOBULA_GPR_LIB gpr REQUIRED)

option(MOBULA_GRPC_ARCHIVE "programs contain gRPC, if all archives of it are installed" ON)
set(grpc_archives)
if(MOBULA_GRPC_ARCHIVE AND NOT MOBULA_SANITIZE)
    # What the library itself takes from outside: the archives of it need the same, and the C++ library.
    pkg_check_modules(MOBULA_GRPC_PC grpc)
    if(NOT MOBULA_GRPC_PC_FOUND)
        message(STATUS "gRPC: no grpc.pc: programs take the shared library, and more CPU a call")
    endif()
    set(grpc_shared ssl crypto z atomic rt stdc++)
    foreach(name IN LISTS MOBULA_GRPC_PC_LIBRARIES)
        if(name IN_LIST grpc_shared)
            continue()
        endif()
        find_library(MOBULA_ARCHIVE_${name} lib${name}.a HINTS ${MOBULA_GRPC_PC_LIBRARY_DIRS})
        if(NOT MOBULA_ARCHIVE_${name})
            message(STATUS "gRPC: no archive of ${name}: programs take the shared library, and more CPU a call")
            set(grpc_archives)
            break()
        endif()
        list(APPEND grpc_archives ${MOBULA_ARCHIVE_${name}})
    endforeach()
    list(REMOVE_DUPLICATES grpc_archives)
endif()

set(wants_archive $<BOOL:$<TARGET_PROPERTY:MOBULA_GRPC_ARCHIVE>>)
add_library(grpc_core INTERFACE)
if(grpc_archives)
    find_package(ZLIB REQUIRED)
    add_library(grpc_archive INTERFACE)
    target_link_libraries(grpc_archive INTERFACE
        "$<LINK_GROUP:RESCAN,${grpc_archives}>" OpenSSL::SSL OpenSSL::Crypto ZLIB::ZLIB stdc++ ${CMAKE_DL_LIBS} m)
    # base/grpc/grpc.c looks it up by name.
    target_link_options(grpc_archive INTERFACE "LINKER:--export-dynamic-symbol=_ZN4absl*SetMutexDeadlockDetectionMode*")
    target_link_libraries(grpc_core INTERFACE
        $<${wants_archive}:grpc_archive> $<$<NOT:${wants_archive}>:${MOBULA_GRPC_LIB}> $<$<NOT:${wants_archive}>:${MOBULA_GPR_LIB}>)
else()
    target_link_libraries(grpc_core INTERFACE ${MOBULA_GRPC_LIB} ${MOBULA_GPR_LIB})
endif()

function(mobula_grpc_archive target)
    set_target_properties(${target} PROPERTIES MOBULA_GRPC_ARCHIVE ON)
endfunction()
