/* Which NCCL is taken: none, one that is too old, one that fits. LD_LIBRARY_PATH leads to a stub of
 * it; no GPU is needed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include "worker/kernels/collective.h"
#include "worker/kernels/op.h"

static const struct mb_collectives *collectives(void)
{
    const struct mb_backend *(*table)(void);
    void *library = dlopen(MOBULA_CUDA_BACKEND, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        fail_msg("%s", dlerror());
    void *symbol = dlsym(library, "mb_backend_table");
    assert_non_null(symbol);
    memcpy(&table, &symbol, sizeof(table));
    assert_int_equal(table()->abi, MB_BACKEND_ABI);
    return table()->collectives;
}

static void versions(void **state)
{
    (void)state;
    const struct mb_collectives *c = collectives();
    char text[32];
    int number = 0;
    struct mb_err err = {0};
    uint8_t id[MB_COLLECTIVE_ID_BYTES];
    setenv("STUB_NCCL_VERSION", "21405", 1);
    assert_int_equal(c->version(&number, text, &err), MB_EUNSUPPORTED);
    assert_string_equal(err.text, "NCCL 2.14.5 is too old: NCCL 2.18.0 or newer is needed");
    assert_int_equal(c->new_id(id, &err), MB_EUNSUPPORTED);
    setenv("STUB_NCCL_VERSION", "22809", 1); /* a failure has changed nothing */
    assert_int_equal(c->version(&number, text, &err), 0);
    assert_int_equal(number, 22809);
    assert_string_equal(text, "NCCL 2.28.9");
    c->destroy(NULL, 0);
    c->destroy(NULL, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(versions)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
