/* Pickles as data, stored zips, files of torch.save. The real torch is in
 * tests/integration/worker/test_torch_file.py, hostile bytes are in tests/fuzz/fuzz_torch_file.c.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "stored_zip.h"
#include "worker/checkpoint/megatron/pickle.h"
#include "worker/checkpoint/megatron/torch_convert.h"
#include "worker/checkpoint/megatron/zip.h"

/* {'iteration': 20, 'args': Namespace(a=1, b=[None]), 'm': 2 x 4 fp32, 't': its columns 1 and 2} */
#define STORAGE                                                                                    \
    "(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0"                                         \
    "0X\x03\0\0\0cpuK\x08tQ"
#define TENSOR(from, shape, strides)                                                               \
    "ctorch._utils\n_rebuild_tensor_v2\n(" STORAGE from shape strides "\x89"                       \
    "NtR"
static const char PICKLE[] =
    "\x80\x02}(X\x09\0\0\0iterationK\x14X\x04\0\0\0argscargparse\nNamespace\n)\x81}(X\x01\0\0\0"
    "aK\x01X\x01\0\0\0b]Naub"
    "X\x01\0\0\0m" TENSOR("K\0", "K\x02K\x04\x86", "K\x04K\x01\x86") "X\x01\0\0\0t" TENSOR(
        "K\x01", "K\x02K\x02\x86", "K\x01K\x04\x86") "u.";

static void a_pickle_is_data(void **state)
{
    (void)state;
    static const char text[] =
        "\x80\x02(K\x05J\xff\xff\xff\xff\x8a\x03\0\0\x80\x8a\x09\1\1\1\1\1\1\1\1\1"
        "G\x3f\xf8\0\0\0\0\0\0\x88NX\x02\0\0\0hi}q\x01K\x01h\x01st.";
    struct mb_pickle *p;
    struct mb_err err = {0};
    assert_int_equal(mb_pickle_parse("p", text, sizeof text - 1, MB_PICKLE_OF_TORCH_SAVE, &p, &err),
                     0);
    const struct mb_pickle_value *root = mb_pickle_root(p);
    assert_int_equal(root->kind, MB_PICKLE_TUPLE);
    assert_int_equal(root->n_items, 9);
    assert_int_equal(root->items[0]->number, 5);
    assert_int_equal(root->items[1]->number, -1);
    assert_int_equal(root->items[2]->number, -8388608);
    assert_int_equal(root->items[3]->kind, MB_PICKLE_LONG);
    assert_true(root->items[4]->real == 1.5);
    assert_int_equal(root->items[5]->kind, MB_PICKLE_BOOL);
    assert_int_equal(root->items[6]->kind, MB_PICKLE_NONE);
    assert_true(mb_pickle_is(root->items[7], MB_PICKLE_TEXT, "hi"));
    assert_int_equal(root->items[8]->n_items, 2);
    assert_ptr_equal(root->items[8]->items[1], root->items[8]); /* it has itself in it */
    mb_pickle_close(p);
}

static void the_last_of_equal_keys_counts(void **state)
{
    (void)state;
    static const char text[] = "\x80\x02}(X\x01\0\0\0aK\x01X\x01\0\0\0aK\x02u.";
    struct mb_pickle *p;
    struct mb_err err = {0};
    assert_int_equal(mb_pickle_parse("p", text, sizeof text - 1, MB_PICKLE_OF_TORCH_SAVE, &p, &err),
                     0);
    assert_int_equal(mb_pickle_get(mb_pickle_root(p), "a")->number, 2);
    assert_null(mb_pickle_get(mb_pickle_root(p), "b"));
    assert_null(mb_pickle_get(NULL, "a"));
    mb_pickle_close(p);
}

/* Joining what is above a mark, before anything was ever pushed. */
static void nothing_can_be_joined(void **state)
{
    (void)state;
    struct mb_pickle *p;
    struct mb_err err = {0};
    assert_int_equal(mb_pickle_parse("p", "\x80\x02(t.", 5, MB_PICKLE_OF_TORCH_SAVE, &p, &err), 0);
    assert_int_equal(mb_pickle_root(p)->n_items, 0);
    mb_pickle_close(p);
    assert_int_equal(mb_pickle_parse("p", "\x80\x02(e.", 5, MB_PICKLE_OF_TORCH_SAVE, &p, &err),
                     MB_ECORRUPT);
    assert_int_equal(mb_pickle_parse("p", "\x80\x02(u.", 5, MB_PICKLE_OF_TORCH_SAVE, &p, &err),
                     MB_ECORRUPT);
}

/* Every beginning of a pickle is refused. */
static void a_cut_pickle_is_refused(void **state)
{
    (void)state;
    for (size_t n = 0; n < sizeof PICKLE - 2; n++) {
        struct mb_pickle *p;
        struct mb_err err = {0};
        char *part = malloc(n + 1); /* so that a sanitizer sees the end */
        assert_non_null(part);
        memcpy(part, PICKLE, n);
        assert_int_equal(mb_pickle_parse("p", part, n, MB_PICKLE_OF_TORCH_SAVE, &p, &err),
                         MB_ECORRUPT);
        free(part);
    }
}

static void names_are_a_list(void **state)
{
    (void)state;
    assert_true(mb_pickle_name_is_listed("torch\nSize", 10));
    assert_true(mb_pickle_name_is_listed("megatron.core.enums\nModelType", 29));
    assert_false(mb_pickle_name_is_listed("torch\nSiz", 9));
    assert_false(mb_pickle_name_is_listed("os\nsystem", 9));
    assert_false(mb_pickle_name_is_listed("megatron", 8));
    assert_false(mb_pickle_name_is_listed("", 0));
}

static int open_sample(int is_wide, struct mb_torch_file **f, struct mb_err *err)
{
    static const float numbers[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    struct stored_zip z = {0};
    stored_zip_put(&z, "a/data.pkl", PICKLE, sizeof PICKLE - 1, is_wide);
    stored_zip_put(&z, "a/byteorder", "little", 6, is_wide);
    stored_zip_put(&z, "a/data/0", numbers, sizeof numbers, is_wide);
    stored_zip_end(&z, is_wide);
    const int fd = stored_zip_fd(z.bytes.data, z.bytes.len);
    stored_zip_close(&z);
    return mb_torch_open_fd("sample", fd, f, err);
}

static void check_sample(struct mb_torch_file *f)
{
    static const float want[4] = {1, 5, 2, 6};
    float got[4];
    struct mb_err err = {0};
    assert_int_equal(mb_torch_n_tensors(f), 2);
    assert_int_equal(mb_torch_iteration(f), 20);
    assert_int_equal(mb_torch_bytes(f), 48);
    assert_string_equal(mb_torch_args(f), "{\"a\":1,\"b\":[null]}");
    const struct mb_torch_tensor *m = mb_torch_tensor(f, 0), *t = mb_torch_tensor(f, 1);
    assert_string_equal(m->name, "m");
    assert_int_equal(m->run, 8);
    assert_string_equal(t->name, "t");
    assert_int_equal(t->run, 1);
    assert_int_equal(mb_torch_read(f, t, 0, 4, got, &err), 0);
    assert_memory_equal(got, want, sizeof want);
    assert_int_equal(mb_torch_read(f, t, 1, 2, got, &err), 0);
    assert_memory_equal(got, want + 1, 8);
    assert_int_equal(mb_torch_read(f, m, 5, 2, got, &err), 0);
    assert_true(got[0] == 5 && got[1] == 6);
}

static void a_file_is_read(void **state)
{
    (void)state;
    for (int is_wide = 0; is_wide < 2; is_wide++) {
        struct mb_torch_file *f;
        struct mb_err err = {0};
        assert_int_equal(open_sample(is_wide, &f, &err), 0);
        check_sample(f);
        mb_torch_close(f);
    }
}

static void zips_that_contradict_themselves_are_refused(void **state)
{
    (void)state;
    struct mb_zip *zip;
    struct mb_err err = {0};
    struct stored_zip twice = {0}, empty = {0};
    stored_zip_put(&twice, "a/b", "x", 1, 0);
    stored_zip_put(&twice, "a/b", "y", 1, 0);
    stored_zip_end(&twice, 0);
    assert_int_equal(
        mb_zip_open_fd("z", stored_zip_fd(twice.bytes.data, twice.bytes.len), &zip, &err),
        MB_ECORRUPT);
    assert_non_null(strstr(err.text, "two entries have one name"));
    stored_zip_end(&empty, 0);
    assert_int_equal(
        mb_zip_open_fd("z", stored_zip_fd(empty.bytes.data, empty.bytes.len), &zip, &err),
        MB_ECORRUPT);
    stored_zip_close(&twice);
    stored_zip_close(&empty);
}

/* Whatever bit is flipped: refused, or read, and never beyond the file. */
static void any_flipped_bit_is_borne(void **state)
{
    (void)state;
    static const float numbers[8];
    struct stored_zip z = {0};
    stored_zip_put(&z, "a/data.pkl", PICKLE, sizeof PICKLE - 1, 1);
    stored_zip_put(&z, "a/data/0", numbers, sizeof numbers, 0);
    stored_zip_end(&z, 1);
    for (size_t i = 0; i < z.bytes.len * 8; i++) {
        struct mb_torch_file *f;
        struct mb_err err = {0};
        float got[64];
        z.bytes.data[i / 8] ^= (uint8_t)(1u << i % 8);
        if (mb_torch_open_fd("z", stored_zip_fd(z.bytes.data, z.bytes.len), &f, &err) == 0) {
            for (size_t k = 0; k < mb_torch_n_tensors(f); k++) {
                const struct mb_torch_tensor *t = mb_torch_tensor(f, k);
                const size_t n = t->n < 32 ? (size_t)t->n : 32;
                assert_int_equal(mb_torch_read(f, t, 0, n, got, &err), 0);
            }
            mb_torch_close(f);
        }
        z.bytes.data[i / 8] ^= (uint8_t)(1u << i % 8);
    }
    stored_zip_close(&z);
}

static int convert_sample(const char *target, struct mb_err *err)
{
    struct mb_torch_file *f;
    int rc = open_sample(0, &f, err);
    if (rc != 0) {
        return rc;
    }
    rc = mb_torch_to_safetensors(f, target, err);
    mb_torch_close(f);
    return rc;
}

static void a_conversion_is_whole_or_nothing(void **state)
{
    (void)state;
    char dir[] = "/tmp/mobula-torch-XXXXXX";
    struct mb_err err = {0};
    struct mb_st_reader *r;
    float got[4];
    assert_non_null(mkdtemp(dir));
    char *target = mb_path_join(dir, "a.safetensors");
    char *partial = mb_path_join(dir, "a.safetensors.mobula-convert");
    assert_int_equal(mb_fs_write_atomic(partial, "rest", 4, 0644, &err), 0); /* of a killed one */
    assert_int_equal(convert_sample(target, &err), 0);
    assert_false(mb_fs_exists(partial));
    assert_int_equal(convert_sample(target, &err), MB_EEXIST);
    assert_int_equal(mb_st_open(target, &r, &err), 0);
    assert_string_equal(mb_st_metadata(r, "iteration"), "20");
    assert_int_equal(mb_st_read(r, mb_st_find(r, "t"), 0, got, sizeof got, &err), 0);
    assert_true(got[0] == 1 && got[1] == 5 && got[2] == 2 && got[3] == 6);
    mb_st_close(r);

    int rc = MB_ENOMEM;
    for (unsigned long nth = 1; rc != 0; nth++) {
        unlink(target);
        struct mb_torch_file *f;
        rc = open_sample(0, &f, &err);
        assert_int_equal(rc, 0);
        mb_alloc_fail_nth(nth);
        rc = mb_torch_to_safetensors(f, target, &err);
        const int did_fail = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        mb_torch_close(f);
        assert_int_equal(rc, did_fail ? MB_ENOMEM : 0);
        assert_int_equal(mb_fs_exists(target), rc == 0);
        assert_false(mb_fs_exists(partial));
    }
    assert_int_equal(mb_fs_remove_tree(dir, &err), 0);
    mb_free(target);
    mb_free(partial);
}

static void a_way_back_is_whole_or_nothing(void **state)
{
    (void)state;
    char dir[] = "/tmp/mobula-torch-XXXXXX";
    struct mb_err err = {0};
    struct mb_st_reader *r;
    assert_non_null(mkdtemp(dir));
    char *source = mb_path_join(dir, "a.safetensors"), *target = mb_path_join(dir, "a.pt");
    char *partial = mb_path_join(dir, "a.pt.mobula-convert");
    assert_int_equal(convert_sample(source, &err), 0);
    int rc = MB_ENOMEM;
    for (unsigned long nth = 1; rc != 0; nth++) {
        assert_int_equal(mb_st_open(source, &r, &err), 0);
        mb_alloc_fail_nth(nth);
        rc = mb_torch_from_safetensors(r, target, &err);
        const int did_fail = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        mb_st_close(r);
        assert_int_equal(rc, did_fail ? MB_ENOMEM : 0);
        assert_int_equal(mb_fs_exists(target), rc == 0);
        assert_false(mb_fs_exists(partial));
    }
    struct mb_torch_file *f;
    float got[4];
    assert_int_equal(mb_torch_open(target, &f, &err), 0);
    assert_int_equal(mb_torch_iteration(f), 20);
    assert_string_equal(mb_torch_args(f), "{\"a\":1,\"b\":[null]}");
    assert_string_equal(mb_torch_tensor(f, 1)->name, "t");
    assert_int_equal(mb_torch_read(f, mb_torch_tensor(f, 1), 0, 4, got, &err), 0);
    assert_true(got[0] == 1 && got[1] == 5 && got[2] == 2 && got[3] == 6);
    mb_torch_close(f);
    assert_int_equal(mb_fs_remove_tree(dir, &err), 0);
    mb_free(source);
    mb_free(target);
    mb_free(partial);
}

static void opening_bears_every_failed_allocation(void **state)
{
    (void)state;
    static const float numbers[8];
    struct stored_zip z = {0};
    stored_zip_put(&z, "a/data.pkl", PICKLE, sizeof PICKLE - 1, 0);
    stored_zip_put(&z, "a/data/0", numbers, sizeof numbers, 0);
    stored_zip_end(&z, 0);
    int did_fail = 1;
    for (unsigned long nth = 1; did_fail; nth++) {
        struct mb_torch_file *f = NULL;
        struct mb_err err = {0};
        const int fd = stored_zip_fd(z.bytes.data, z.bytes.len);
        mb_alloc_fail_nth(nth);
        int rc = mb_torch_open_fd("z", fd, &f, &err);
        did_fail = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        assert_int_equal(rc, did_fail ? MB_ENOMEM : 0);
        mb_torch_close(rc == 0 ? f : NULL);
    }
    stored_zip_close(&z);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_pickle_is_data),
        cmocka_unit_test(the_last_of_equal_keys_counts),
        cmocka_unit_test(nothing_can_be_joined),
        cmocka_unit_test(a_cut_pickle_is_refused),
        cmocka_unit_test(names_are_a_list),
        cmocka_unit_test(a_file_is_read),
        cmocka_unit_test(zips_that_contradict_themselves_are_refused),
        cmocka_unit_test(any_flipped_bit_is_borne),
        cmocka_unit_test(a_conversion_is_whole_or_nothing),
        cmocka_unit_test(a_way_back_is_whole_or_nothing),
        cmocka_unit_test(opening_bears_every_failed_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
