# One interface target carries warnings and sanitizers; every room links it, nothing is set globally.
add_library(mobula_compile INTERFACE)
target_compile_options(mobula_compile INTERFACE
    -Wall -Wextra -Wshadow -Wconversion -Wstrict-prototypes -Wmissing-prototypes -Wvla
    $<$<BOOL:${MOBULA_WERROR}>:-Werror>
    -fno-common -fstack-protector-strong)
target_compile_definitions(mobula_compile INTERFACE _GNU_SOURCE)
if(NOT MOBULA_SANITIZE)
    target_compile_definitions(mobula_compile INTERFACE _FORTIFY_SOURCE=2)
endif()
target_include_directories(mobula_compile INTERFACE ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR})
if(MOBULA_SANITIZE)
    target_compile_options(mobula_compile INTERFACE
        -fsanitize=${MOBULA_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
    target_link_options(mobula_compile INTERFACE -fsanitize=${MOBULA_SANITIZE})
endif()
if(MOBULA_FUZZ)
    # Coverage in the libraries too, or the fuzzer sees nothing of what it feeds.
    target_compile_options(mobula_compile INTERFACE -fsanitize=fuzzer-no-link)
endif()
if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
    target_link_options(mobula_compile INTERFACE -Wl,-z,relro,-z,now)
endif()

# mobula_unit_test(NAME file.c... LIBS targets... LABELS labels...): one cmocka program, registered with ctest.
# Labels: "unit" and "sim" run under every sanitizer too; "integration" needs real peers and runs once.
function(mobula_unit_test name)
    cmake_parse_arguments(T "" "TIMEOUT" "LIBS;LABELS" ${ARGN})
    add_executable(${name} ${T_UNPARSED_ARGUMENTS})
    target_link_libraries(${name} PRIVATE mobula_compile ${T_LIBS} PkgConfig::CMOCKA Threads::Threads)
    add_test(NAME ${name} COMMAND ${name})
    if(NOT T_LABELS)
        set(T_LABELS unit)
    endif()
    if(NOT T_TIMEOUT)
        set(T_TIMEOUT 120)
    endif()
    set_tests_properties(${name} PROPERTIES LABELS "${T_LABELS}" TIMEOUT ${T_TIMEOUT})
    if(MOBULA_SANITIZE MATCHES "thread")
        set_tests_properties(${name} PROPERTIES ENVIRONMENT
            "TSAN_OPTIONS=ignore_noninstrumented_modules=1:suppressions=${PROJECT_SOURCE_DIR}/tests/tsan.supp:halt_on_error=1")
    endif()
endfunction()
