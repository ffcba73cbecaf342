/* safetensors: what is written reads back, what is damaged is refused with the file's name. */
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
#include "base/buf.h"
#include "base/checksum.h"
#include "base/fs.h"
#include "worker/checkpoint/safetensors.h"

static char dir[] = "/tmp/mobula-st-XXXXXX";
static char path[64];

static int make_dir(void **state)
{
    (void)state;
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/a.safetensors", dir);
    return 0;
}

static int remove_dir(void **state)
{
    (void)state;
    return mb_fs_remove_tree(dir, NULL);
}

static int write_sample(uint64_t *size, uint64_t *crc, struct mb_err *err)
{
    static const float a[6] = {1, 2, 3, 4, 5, 6};
    static const int64_t b[1] = {-7};
    struct mb_st_tensor t[] = {{.name = "w", .dtype = MB_ST_F32, .n_dims = 2, .shape = {2, 3}},
                               {.name = "n", .dtype = MB_ST_I64, .n_dims = 0},
                               {.name = "empty", .dtype = MB_ST_BF16, .n_dims = 1, .shape = {0}}};
    struct mb_st_meta m = {"begin", "12"};
    struct mb_st_writer *w;
    int rc = mb_st_create(path, t, 3, &m, 1, &w, err);
    if (rc != 0) {
        return rc;
    }
    rc = mb_st_write(w, a, sizeof a, err);
    if (rc == 0) {
        rc = mb_st_write(w, b, sizeof b, err);
    }
    if (rc != 0) {
        mb_st_abandon(w);
        return rc;
    }
    return mb_st_finish(w, size, crc, err);
}

static int read_sample(struct mb_err *err)
{
    struct mb_st_reader *r;
    int rc = mb_st_open(path, &r, err);
    if (rc != 0) {
        return rc;
    }
    const struct mb_st_tensor *w = mb_st_find(r, "w"), *n = mb_st_find(r, "n");
    float f[2] = {0};
    int64_t i = 0;
    assert_non_null(w);
    assert_non_null(n);
    assert_null(mb_st_find(r, "x"));
    assert_int_equal(mb_st_n_tensors(r), 3);
    assert_int_equal(w->n_dims, 2);
    assert_true(w->shape[0] == 2 && w->shape[1] == 3 && n->n_dims == 0);
    rc = mb_st_read(r, w, 3 * sizeof(float), f, sizeof f, err);
    if (rc == 0) {
        rc = mb_st_read(r, n, 0, &i, sizeof i, err);
    }
    if (rc == 0) {
        assert_true(f[0] == 4 && f[1] == 5 && i == -7);
        assert_string_equal(mb_st_metadata(r, "begin"), "12");
        assert_null(mb_st_metadata(r, "end"));
    }
    mb_st_close(r);
    return rc;
}

static void what_is_written_reads_back(void **state)
{
    (void)state;
    struct mb_err err;
    struct mb_buf bytes = {0};
    uint64_t size = 0, crc = 0;
    assert_int_equal(write_sample(&size, &crc, &err), 0);
    assert_int_equal(read_sample(&err), 0);
    assert_int_equal(mb_fs_read(path, 1 << 20, &bytes, &err), 0);
    assert_int_equal(bytes.len, size);
    assert_true(mb_crc64nvme(0, bytes.data, bytes.len) == crc);
    assert_int_equal(write_sample(&size, &crc, &err), MB_EEXIST); /* never over an old file */
    assert_int_equal(read_sample(&err), 0);
    mb_buf_close(&bytes);
    unlink(path);
}

static void every_truncation_is_refused(void **state)
{
    (void)state;
    struct mb_err err;
    uint64_t size = 0, crc = 0;
    assert_int_equal(write_sample(&size, &crc, &err), 0);
    for (uint64_t n = size; n-- > 0;) {
        assert_int_equal(truncate(path, (off_t)n), 0);
        struct mb_st_reader *r;
        assert_int_equal(mb_st_open(path, &r, &err), MB_ECORRUPT);
        assert_non_null(strstr(err.text, path));
    }
    unlink(path);
    assert_int_equal(read_sample(&err), MB_ENOENT);
}

static void every_flipped_bit_is_named(void **state)
{
    (void)state;
    struct mb_err err = {0};
    struct mb_buf bytes = {0};
    uint64_t size = 0, crc = 0;
    assert_int_equal(write_sample(&size, &crc, &err), 0);
    assert_int_equal(mb_fs_read(path, 1 << 20, &bytes, &err), 0);
    for (uint64_t bit = 0; bit < 8 * size; bit++) {
        bytes.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_int_equal(mb_fs_replace(path, bytes.data, bytes.len, 0644, &err), 0);
        struct mb_st_reader *r = NULL;
        int rc = mb_st_open(path, &r, &err);
        rc = rc == 0 ? mb_st_verify(r, &err) : rc;
        mb_st_close(r);
        assert_int_equal(rc, MB_ECORRUPT);
        assert_non_null(strstr(err.text, path));
        bytes.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    mb_buf_close(&bytes);
    unlink(path);
}

enum { LARGE_FLOATS = 900001, LARGE_TENSORS = 3 }; /* 10.3 MiB: blocks that belong to two */

static float large_value(size_t tensor, size_t i)
{
    return (float)(tensor * 1000 + i % 977);
}

static void write_large(void)
{
    struct mb_st_tensor t[LARGE_TENSORS] = {{.name = "a"}, {.name = "b"}, {.name = "c"}};
    float *values = mb_alloc(LARGE_FLOATS * sizeof *values);
    struct mb_st_writer *w;
    struct mb_err err;
    struct mb_buf bytes = {0};
    uint64_t size, crc;
    assert_non_null(values);
    for (size_t k = 0; k < LARGE_TENSORS; k++) {
        t[k].dtype = MB_ST_F32;
        t[k].n_dims = 1;
        t[k].shape[0] = LARGE_FLOATS;
    }
    assert_int_equal(mb_st_create(path, t, LARGE_TENSORS, NULL, 0, &w, &err), 0);
    for (size_t k = 0; k < LARGE_TENSORS; k++) {
        for (size_t i = 0; i < LARGE_FLOATS; i++) {
            values[i] = large_value(k, i);
        }
        /* Small pieces and large ones. */
        for (size_t at = 0, n = 7; at < LARGE_FLOATS; at += n, n = n * 5 % 300007 + 1) {
            n = LARGE_FLOATS - at < n ? LARGE_FLOATS - at : n;
            assert_int_equal(mb_st_write(w, values + at, n * sizeof *values, &err), 0);
        }
    }
    assert_int_equal(mb_st_finish(w, &size, &crc, &err), 0);
    assert_int_equal(mb_fs_read(path, 1 << 24, &bytes, &err), 0);
    assert_int_equal(bytes.len, size);
    assert_true(mb_crc64nvme(0, bytes.data, bytes.len) == crc);
    mb_buf_close(&bytes);
    mb_free(values);
}

/* In parts of n floats, from the first or from the last on. */
static int read_large(const char *name, size_t tensor, size_t n, int backwards, struct mb_err *err)
{
    struct mb_st_reader *r;
    float *values = mb_alloc(n * sizeof *values);
    const size_t parts = (LARGE_FLOATS + n - 1) / n;
    assert_non_null(values);
    assert_int_equal(mb_st_open(path, &r, err), 0);
    assert_true(mb_st_has_sums(r));
    int rc = 0;
    for (size_t k = 0; k < parts && rc == 0; k++) {
        const size_t at = (backwards ? parts - 1 - k : k) * n;
        const size_t left = LARGE_FLOATS - at < n ? LARGE_FLOATS - at : n;
        rc = mb_st_read(r, mb_st_find(r, name), at * sizeof *values, values, left * sizeof *values,
                        err);
        for (size_t i = 0; i < left && rc == 0; i++) {
            assert_true(values[i] == large_value(tensor, at + i));
        }
    }
    mb_st_close(r);
    mb_free(values);
    return rc;
}

static void flip(long at_from_end)
{
    FILE *f = fopen(path, "r+");
    assert_non_null(f);
    assert_int_equal(fseek(f, -at_from_end, SEEK_END), 0);
    const int c = fgetc(f);
    assert_int_equal(fseek(f, -at_from_end, SEEK_END), 0);
    assert_int_equal(fputc(c ^ 1, f), c ^ 1);
    assert_int_equal(fclose(f), 0);
}

static void parts_are_compared_with_checksums(void **state)
{
    (void)state;
    static const size_t SIZES[] = {LARGE_FLOATS, 1 << 18, 100003, 4099};
    struct mb_err err = {0};
    write_large();
    for (size_t i = 0; i < sizeof SIZES / sizeof SIZES[0]; i++) {
        for (int backwards = 0; backwards < 2; backwards++) {
            assert_int_equal(read_large("a", 0, SIZES[i], backwards, &err), 0);
            assert_int_equal(read_large("b", 1, SIZES[i], backwards, &err), 0);
            assert_int_equal(read_large("c", 2, SIZES[i], backwards, &err), 0);
        }
    }
    flip(2); /* of c, far from the others */
    for (size_t i = 0; i < sizeof SIZES / sizeof SIZES[0]; i++) {
        assert_int_equal(read_large("a", 0, SIZES[i], 0, &err), 0);
        assert_int_equal(read_large("b", 1, SIZES[i], 1, &err), 0);
        assert_int_equal(read_large("c", 2, SIZES[i], (int)i % 2, &err), MB_ECORRUPT);
        assert_non_null(strstr(err.text, path));
        assert_non_null(strstr(err.text, "tensor c"));
    }
    unlink(path);
}

static void a_file_without_checksums_is_read(void **state)
{
    (void)state;
    static const char header[] = "{\"__metadata__\":{\"format\":\"pt\"},\"w\":{\"dtype\":\"F32\","
                                 "\"shape\":[2],\"data_offsets\":[0,8]}}";
    const float data[2] = {3, 4};
    const uint64_t n = sizeof header - 1;
    struct mb_buf bytes = {0};
    struct mb_err err = {0};
    struct mb_st_reader *r;
    float got[2] = {0};
    assert_int_equal(mb_buf_add(&bytes, &n, sizeof n), 0);
    assert_int_equal(mb_buf_add(&bytes, header, n), 0);
    assert_int_equal(mb_buf_add(&bytes, data, sizeof data), 0);
    assert_int_equal(mb_fs_write_atomic(path, bytes.data, bytes.len, 0644, &err), 0);
    assert_int_equal(mb_st_open(path, &r, &err), 0);
    assert_false(mb_st_has_sums(r));
    assert_int_equal(mb_st_verify(r, &err), 0);
    assert_int_equal(mb_st_read(r, mb_st_find(r, "w"), 0, got, sizeof got, &err), 0);
    assert_memory_equal(got, data, sizeof data);
    mb_st_close(r);
    mb_buf_close(&bytes);
    unlink(path);
}

static void only_regular_files_are_read(void **state)
{
    (void)state;
    struct mb_err err = {0};
    struct mb_st_reader *r;
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(mb_st_open(path, &r, &err), MB_ECORRUPT);
    assert_non_null(strstr(err.text, "it is no regular file"));
    unlink(path);
    assert_int_equal(mb_st_open(dir, &r, &err), MB_ECORRUPT);
}

static void bad_headers_are_refused(void **state)
{
    (void)state;
    static const char *const BAD[] = {
        "",
        "[]",
        "{\"a\":1}",
        "{\"a\":{\"dtype\":\"F33\",\"shape\":[2],\"data_offsets\":[0,8]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":2,\"data_offsets\":[0,8]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[\"2\"],\"data_offsets\":[0,8]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,0]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,2],\"data_offsets\":[0,8]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
        "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
        "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
        "{\"__metadata__\":{\"x\":1},\"a\":{\"dtype\":\"F32\",\"shape\":[2],"
        "\"data_offsets\":[0,8]}}",
        "{\"__metadata__\":[],\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
    };
    struct mb_st_reader *r;
    struct mb_err err;
    for (size_t i = 0; i < sizeof BAD / sizeof BAD[0]; i++) {
        assert_int_equal(mb_st_parse("f.safetensors", BAD[i], strlen(BAD[i]), 8, &r, &err),
                         MB_ECORRUPT);
        assert_non_null(strstr(err.text, "f.safetensors"));
    }
    const char *good = "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}   ";
    assert_int_equal(mb_st_parse("f", good, strlen(good), 8, &r, &err), 0);
    mb_st_close(r);
}

static void unfinished_files_disappear(void **state)
{
    (void)state;
    struct mb_st_tensor t = {.name = "w", .dtype = MB_ST_U8, .n_dims = 1, .shape = {3}};
    struct mb_st_writer *w;
    struct mb_err err;
    uint64_t size, crc;
    assert_int_equal(mb_st_create(path, &t, 1, NULL, 0, &w, &err), 0);
    assert_int_equal(mb_st_write(w, "ab", 2, &err), 0);
    assert_int_equal(mb_st_write(w, "cd", 2, &err), MB_ESTATE);
    assert_int_equal(mb_st_finish(w, &size, &crc, &err), MB_ESTATE);
    assert_int_equal(access(path, F_OK), -1);
    assert_int_equal(mb_st_create(path, &t, 1, NULL, 0, &w, &err), 0);
    mb_st_abandon(w);
    assert_int_equal(access(path, F_OK), -1);
}

static void every_failing_allocation_leaves_nothing(void **state)
{
    (void)state;
    for (unsigned long nth = 1;; nth++) {
        struct mb_err err;
        uint64_t size, crc;
        mb_alloc_fail_nth(nth);
        int rc = write_sample(&size, &crc, &err);
        int failed = mb_alloc_did_fail();
        if (rc == 0) {
            rc = read_sample(&err);
            failed = mb_alloc_did_fail();
        } else {
            assert_int_equal(access(path, F_OK), -1);
        }
        mb_alloc_fail_nth(0);
        unlink(path);
        if (!failed) {
            assert_int_equal(rc, 0);
            return;
        }
        assert_int_equal(rc, MB_ENOMEM);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_written_reads_back),
        cmocka_unit_test(every_truncation_is_refused),
        cmocka_unit_test(every_flipped_bit_is_named),
        cmocka_unit_test(parts_are_compared_with_checksums),
        cmocka_unit_test(a_file_without_checksums_is_read),
        cmocka_unit_test(only_regular_files_are_read),
        cmocka_unit_test(bad_headers_are_refused),
        cmocka_unit_test(unfinished_files_disappear),
        cmocka_unit_test(every_failing_allocation_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
