/* .npy files: headers as numpy writes them, hostile ones, files of another length or kind. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "worker/data/npy.h"

static char dir[64];

static int setup(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/mobula-npy-XXXXXX");
    assert_non_null(mkdtemp(dir));
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    return mb_fs_remove_tree(dir, NULL);
}

/* Of numpy 2.4: numpy.save of zeros of such a shape. */
static void test_headers_are_numpys(void **state)
{
    static const struct {
        struct mb_npy_shape shape;
        const char *text;
    } cases[] = {
        {{MB_NPY_I32, 1, {7, 1}}, "{'descr': '<i4', 'fortran_order': False, 'shape': (7,), }"},
        {{MB_NPY_U32, 1, {123456789, 1}},
         "{'descr': '<u4', 'fortran_order': False, 'shape': (123456789,), }"},
        {{MB_NPY_I32, 2, {1001, 2}},
         "{'descr': '<i4', 'fortran_order': False, 'shape': (1001, 2), }"},
        {{MB_NPY_I16, 1, {0, 1}}, "{'descr': '<i2', 'fortran_order': False, 'shape': (0,), }"},
        {{MB_NPY_I64, 1, {1UL << 40, 1}},
         "{'descr': '<i8', 'fortran_order': False, 'shape': (1099511627776,), }"}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char made[MB_NPY_MADE_MAX];
        size_t n = mb_npy_header_make(&cases[i].shape, made);
        size_t n_text = strlen(cases[i].text);
        struct mb_npy_shape back;
        size_t header = 0;

        assert_int_equal(n, 128);
        assert_memory_equal(made, "\x93NUMPY\1\0\x76\0", 10);
        assert_memory_equal(made + 10, cases[i].text, n_text);
        assert_int_equal(strspn(made + 10 + n_text, " "), 128 - 10 - n_text - 1);
        assert_int_equal(made[127], '\n');
        assert_int_equal(mb_npy_header_parse(made, n, &back, &header, NULL), 0);
        assert_int_equal(header, n);
        assert_memory_equal(&back, &cases[i].shape, sizeof back);
    }
}

static int parse(const char *dict, struct mb_npy_shape *s, struct mb_err *err)
{
    char bytes[512];
    size_t header = 0;
    int n = snprintf(bytes + 10, sizeof bytes - 10, "%s", dict);

    memcpy(bytes, "\x93NUMPY\1\0", 8);
    bytes[8] = (char)n;
    bytes[9] = (char)(n >> 8);
    return mb_npy_header_parse(bytes, (size_t)n + 10, s, &header, err);
}

static void test_what_is_no_header(void **state)
{
    static const struct {
        const char *dict, *text;
    } cases[] = {
        {"[1, 2, 3]  \n", "no dict"},
        {"{'descr': '<i4', 'fortran_order': False, 'shape': (7,), }",
         "does not end with a newline"},
        {"{'descr': '<i4', 'fortran_order': False, 'shape': (7,), } x\n", "does not end with"},
        {"{'descr': '<i4', 'fortran_order': False, 'shape': (7,)\n", "dict does not end"},
        {"{'descr': '<i4', 'fortran_order': False}\n", "lacks"},
        {"{'descr': '<i4', 'descr': '<i4', 'shape': (7,), }\n", "each once"},
        {"{'descr': '|O', 'fortran_order': False, 'shape': (7,), }\n", "descr is none of"},
        {"{'descr': '>i4', 'fortran_order': False, 'shape': (7,), }\n", "descr is none of"},
        {"{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (7,), }\n", "descr is none"},
        {"{'descr': '<i4', 'fortran_order': True, 'shape': (7,), }\n",
         "fortran_order is not False"},
        {"{'descr': '<i4', 'fortran_order': False, 'shape': (), }\n", "shape is not"},
        {"{'descr': '<i4', 'fortran_order': False, 'shape': (-7,), }\n", "shape is not"},
        {"{'descr': '<i4', 'fortran_order': False, 'shape': (1, 2, 3), }\n", "shape is not"},
        {"{'descr': '<i4', 'fortran_order': False, 'shape': (7), }\n", "shape is not"},
        {"{'descr': '<i4', 'fortran_order': False, 'shape': (18446744073709551616,), }\n",
         "shape is not"},
        {"{'descr': '<i4', 'fortran_order': False, 'shape': (7,), 'more': 1, }\n", "each once"}};
    struct mb_npy_shape s = {MB_NPY_I16, 9, {9, 9}};

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct mb_err err = {0};

        assert_int_equal(parse(cases[i].dict, &s, &err), MB_ECORRUPT);
        if (strstr(err.text, cases[i].text) == NULL) {
            fail_msg("%s: '%s' is not in: %s", cases[i].dict, cases[i].text, err.text);
        }
        assert_int_equal(s.n_dims, 9); /* untouched */
    }
    assert_int_equal(parse("{ 'shape':(3, 2 ,) ,'fortran_order':False,'descr':'<i8'}\n", &s, NULL),
                     0);
    assert_true(s.type == MB_NPY_I64 && s.n_dims == 2 && s.dims[0] == 3 && s.dims[1] == 2);
}

static void test_versions_and_lengths(void **state)
{
    static const char dict[] = "{'descr': '<i4', 'fortran_order': False, 'shape': (7,), }\n";
    char bytes[128] = "\x93NUMPY\2\0";
    const uint32_t length = sizeof dict - 1;
    struct mb_npy_shape s;
    size_t header = 0;

    (void)state;
    memcpy(bytes + 8, &length, sizeof length);
    memcpy(bytes + 12, dict, length);
    for (char version = 0; version < 6; version++) {
        bytes[6] = version;
        assert_int_equal(mb_npy_header_parse(bytes, 12 + length, &s, &header, NULL),
                         version == 2 || version == 3 ? 0 : MB_ECORRUPT);
    }
    bytes[6] = 2;
    for (size_t n = 0; n < 12 + length; n++) {
        assert_int_equal(mb_npy_header_parse(bytes, n, &s, &header, NULL), MB_ECORRUPT);
    }
    memset(bytes + 8, 0xff, 4);
    assert_int_equal(mb_npy_header_parse(bytes, sizeof bytes, &s, &header, NULL), MB_ECORRUPT);
}

static void expect(const char *path, const struct mb_npy_shape *want, int code, const char *text)
{
    int32_t out[16];
    struct mb_err err = {0};

    assert_int_equal(mb_npy_read(path, want, out, &err), code);
    if (strstr(err.text, text) == NULL || strstr(err.text, path) == NULL) {
        fail_msg("'%s' is not in: %s", text, err.text);
    }
}

static void test_files(void **state)
{
    const struct mb_npy_shape shape = {MB_NPY_I32, 2, {3, 2}};
    const struct mb_npy_shape other = {MB_NPY_I32, 1, {6, 1}};
    const int32_t elements[6] = {1, -2, 3, 4, 5, 1 << 30};
    int32_t back[6];
    char path[96];

    (void)state;
    snprintf(path, sizeof path, "%s/a.npy", dir);
    expect(path, &shape, MB_ENOENT, "No such file");
    assert_int_equal(mb_npy_write(path, &shape, elements, NULL), 0);
    assert_int_equal(mb_npy_write(path, &shape, elements, NULL), 0); /* again */
    assert_int_equal(mb_npy_read(path, &shape, back, NULL), 0);
    assert_memory_equal(back, elements, sizeof back);
    expect(path, &other, MB_ECORRUPT, "it has <i4 of 3 x 2, not <i4 of 6 x 1");
    assert_int_equal(truncate(path, 128 + 23), 0);
    expect(path, &shape, MB_ECORRUPT, "it has 23 bytes of elements, not 24");
    assert_int_equal(truncate(path, 128 + 25), 0);
    expect(path, &shape, MB_ECORRUPT, "it has 25 bytes of elements, not 24");
    assert_int_equal(truncate(path, 0), 0);
    expect(path, &shape, MB_ECORRUPT, "does not begin");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    expect(path, &shape, MB_ECORRUPT, "no regular file");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0700), 0);
    expect(path, &shape, MB_ECORRUPT, "no regular file");
    assert_int_not_equal(mb_npy_write(path, &shape, elements, NULL), 0);
    assert_int_equal(rmdir(path), 0);
    assert_int_equal(rmdir(dir), 0); /* nothing is left beside it */
    assert_int_not_equal(mb_npy_write(path, &shape, elements, NULL), 0);
    assert_int_equal(mkdir(dir, 0700), 0);
    mb_alloc_fail_nth(1);
    assert_int_equal(mb_npy_write(path, &shape, elements, NULL), MB_ENOMEM);
    mb_alloc_fail_nth(0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_headers_are_numpys),
        cmocka_unit_test(test_what_is_no_header),
        cmocka_unit_test(test_versions_and_lengths),
        cmocka_unit_test(test_files),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
