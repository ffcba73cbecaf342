/* A checkpoint on a local disk is whole, or what is wrong with it is named: any flipped bit of any
 * of its files, any file that is not there. */
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
#include "worker/checkpoint/moments.h"
#include "worker/checkpoint/verify.h"
#include "worker/checkpoint/weights.h"

#define ITER "iter_0000003"

static const char *const FILES[] = {MB_CHECKPOINT_STATE_FILE, MB_CHECKPOINT_MODEL_FILE,
                                    "optim_dp_000_of_001.safetensors"};
enum { N_FILES = 3, STATE = 0, MODEL = 1, OPTIM = 2, N_TENSORS = 2 };

static char dir[] = "/tmp/mobula-verify-XXXXXX";
static char paths[N_FILES][128];

static const struct mb_st_tensor TENSORS[N_TENSORS] = {
    {.name = "a", .dtype = MB_ST_F32, .n_dims = 2, .shape = {3, 4}},
    {.name = "b", .dtype = MB_ST_F32, .n_dims = 1, .shape = {5}}};

static float value(int which, size_t tensor, uint64_t i)
{
    return (float)(1000 * (which + 1) + 100 * (int)tensor + (int)i);
}

static int give(void *arg, int which, size_t tensor, uint64_t from, size_t n, float *out,
                struct mb_err *err)
{
    (void)arg;
    (void)err;
    for (size_t i = 0; i < n; i++) {
        out[i] = value(which, tensor, from + i);
    }
    return 0;
}

static int write_weights(void *arg, const char *path, struct mb_st_tensor *tensors, size_t n,
                         struct mb_err *err)
{
    struct mb_st_writer *w;
    uint64_t size, crc;
    float v[16];
    (void)arg;
    int rc = mb_st_create(path, tensors, n, NULL, 0, &w, err);
    if (rc != 0) {
        return rc;
    }
    for (size_t i = 0; i < n && rc == 0; i++) {
        const size_t bytes = (size_t)(tensors[i].end - tensors[i].begin);
        give(NULL, 2, i, 0, bytes / sizeof *v, v, err);
        rc = mb_st_write(w, v, bytes, err);
    }
    if (rc != 0) {
        mb_st_abandon(w);
        return rc;
    }
    return mb_st_finish(w, &size, &crc, err);
}

static int save(struct mb_err *err)
{
    struct mb_st_tensor tensors[N_TENSORS];
    const struct mb_checkpoint_state s = {.iteration = 3,
                                          .consumed_train_samples = 48,
                                          .optimizer_steps = 3,
                                          .has_optimizer = 1,
                                          .args_json = (char *)"{\"num_layers\":2}"};
    char iter[64];
    memcpy(tensors, TENSORS, sizeof tensors);
    snprintf(iter, sizeof iter, "%s/" ITER, dir);
    int rc = mb_fs_mkdir_p(iter, 0755, err);
    if (rc == 0) {
        rc = mb_moments_write(iter, TENSORS, N_TENSORS, give, NULL, err);
    }
    return rc == 0 ? mb_weights_write(dir, tensors, N_TENSORS, &s, write_weights, NULL, err) : rc;
}

static int make(void **state)
{
    struct mb_err err;
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/mobula-verify-XXXXXX");
    assert_non_null(mkdtemp(dir));
    for (size_t i = 0; i < N_FILES; i++) {
        snprintf(paths[i], sizeof paths[i], "%s/" ITER "/%s", dir, FILES[i]);
    }
    return save(&err);
}

static int clear(void **state)
{
    (void)state;
    return mb_fs_remove_tree(dir, NULL);
}

static int verify(struct mb_verified *v, struct mb_err *err)
{
    return mb_checkpoint_verify(dir, -1, v, err);
}

static void what_is_whole_is_told(void **state)
{
    struct mb_verified v;
    struct mb_err err = {0};
    (void)state;
    assert_int_equal(verify(&v, &err), 0);
    assert_int_equal(v.kind, MB_MODEL_OURS);
    assert_int_equal(v.iteration, 3);
    assert_int_equal(v.n_files, N_FILES);
    assert_int_equal(v.n_without_sums, 0);
    assert_true(v.total_bytes > (12 + 5 + 2 * 32) * sizeof(float));
}

static void flip(FILE *f, long at, int bit)
{
    assert_int_equal(fseek(f, at, SEEK_SET), 0);
    const int c = fgetc(f);
    assert_true(c != EOF);
    assert_int_equal(fseek(f, at, SEEK_SET), 0);
    assert_int_equal(fputc(c ^ 1 << bit, f), c ^ 1 << bit);
    assert_int_equal(fflush(f), 0);
}

static long place_of_seal_name(const char *path)
{
    struct mb_buf text = {0};
    struct mb_err err;
    assert_int_equal(mb_fs_read(path, 1 << 20, &text, &err), 0);
    const char *found = strstr(mb_buf_str(&text), "\"crc64nvme\"");
    assert_non_null(found);
    const long at = found - mb_buf_str(&text) + 1;
    mb_buf_close(&text);
    return at;
}

static void any_flipped_bit_is_named(void **state)
{
    struct mb_verified v;
    struct mb_err err = {0};
    (void)state;
    const long seal = place_of_seal_name(paths[STATE]);
    for (size_t i = 0; i < N_FILES; i++) {
        FILE *f = fopen(paths[i], "r+");
        assert_non_null(f);
        assert_int_equal(fseek(f, 0, SEEK_END), 0);
        const long n = ftell(f);
        for (long bit = 0; bit < 8 * n; bit++) {
            flip(f, bit / 8, (int)(bit % 8));
            const int rc = verify(&v, &err);
            if (i == STATE && bit / 8 >= seal && bit / 8 < seal + 9 && rc == 0) {
                assert_int_equal(v.n_without_sums, 1); /* the field's name: nothing else is lost */
            } else {
                assert_int_equal(rc, MB_ECORRUPT);
                assert_non_null(strstr(err.text, FILES[i]));
            }
            flip(f, bit / 8, (int)(bit % 8));
        }
        fclose(f);
    }
    assert_int_equal(verify(&v, &err), 0);
}

static void any_missing_file_is_named(void **state)
{
    struct mb_verified v;
    (void)state;
    for (size_t i = 0; i < N_FILES; i++) {
        struct mb_err err = {0};
        assert_int_equal(unlink(paths[i]), 0);
        assert_int_equal(verify(&v, &err), MB_ENOENT);
        assert_non_null(strstr(err.text, i == OPTIM ? "optim_dp_" : FILES[i]));
        clear(NULL);
        make(NULL);
    }
}

/* As one of before checksums: header and text without them. */
static void make_older(void)
{
    static const char HEADER[] =
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[3,4],\"data_offsets\":[0,48]},"
        "\"b\":{\"dtype\":\"F32\",\"shape\":[5],\"data_offsets\":[48,68]}}";
    const uint64_t n = sizeof HEADER - 1;
    struct mb_buf bytes = {0}, text = {0};
    struct mb_err err;
    assert_int_equal(mb_buf_add(&bytes, &n, sizeof n), 0);
    assert_int_equal(mb_buf_add(&bytes, HEADER, n), 0);
    for (size_t i = 0; i < 17; i++) {
        const float v = (float)i;
        assert_int_equal(mb_buf_add(&bytes, &v, sizeof v), 0);
    }
    assert_int_equal(mb_fs_write_atomic(paths[MODEL], bytes.data, bytes.len, 0644, &err), 0);
    assert_int_equal(mb_fs_read(paths[STATE], 1 << 20, &text, &err), 0);
    memcpy(text.data + place_of_seal_name(paths[STATE]), "no_sum_of", 9);
    assert_int_equal(mb_fs_write_atomic(paths[STATE], text.data, text.len, 0644, &err), 0);
    mb_buf_close(&bytes);
    mb_buf_close(&text);
}

static void files_without_checksums_are_counted(void **state)
{
    struct mb_verified v;
    struct mb_err err = {0};
    (void)state;
    make_older();
    assert_int_equal(verify(&v, &err), 0);
    assert_int_equal(v.n_files, N_FILES);
    assert_int_equal(v.n_without_sums, 2);
}

static void what_is_no_model_is_said(void **state)
{
    struct mb_verified v;
    struct mb_err err = {0};
    (void)state;
    assert_int_equal(mb_checkpoint_verify(dir, 4, &v, &err), MB_ENOENT);
    assert_non_null(strstr(err.text, "iter_0000004"));
    clear(NULL);
    assert_int_equal(mkdir(dir, 0755), 0);
    assert_int_equal(verify(&v, &err), MB_ENOENT);
    assert_non_null(strstr(err.text, MB_CHECKPOINT_TRACKER));
}

static void every_failing_allocation_is_named(void **state)
{
    int n_borne = 0;
    (void)state;
    for (unsigned long nth = 1;; nth++) {
        struct mb_verified v;
        struct mb_err err = {0};
        mb_alloc_fail_nth(nth);
        const int rc = verify(&v, &err);
        const int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (!failed) {
            assert_int_equal(rc, 0);
            assert_true(n_borne <= 2);
            return;
        }
        n_borne += rc == 0; /* a name by which only Megatron-LM's would be known */
        assert_true(rc == MB_ENOMEM || rc == 0);
    }
}

/* Written, opened and read, with memory gone at each step. */
static int moments_again(struct mb_err *err)
{
    struct mb_st_reader *model = NULL;
    struct mb_moments *m = NULL;
    const struct mb_checkpoint_state s = {.data_parallel_size = 1};
    char iter[64];
    float got[12] = {0};
    snprintf(iter, sizeof iter, "%s/" ITER, dir);
    unlink(paths[OPTIM]);
    int rc = mb_moments_write(iter, TENSORS, N_TENSORS, give, NULL, err);
    if (rc != 0) {
        assert_int_equal(access(paths[OPTIM], F_OK), -1); /* nothing that looks whole */
        return rc;
    }
    rc = mb_st_open(paths[MODEL], &model, err);
    if (rc == 0) {
        rc = mb_moments_open(iter, model, &s, &m, err);
    }
    for (int which = 0; which < 2 && rc == 0; which++) {
        rc = mb_moments_read(m, which, mb_st_find(model, "a"), 0, 12, got, err);
        for (size_t i = 0; i < 12 && rc == 0; i++) {
            assert_true(got[i] == value(which, 0, i));
        }
    }
    mb_moments_close(m);
    mb_st_close(model);
    return rc;
}

static void moments_bear_every_failing_allocation(void **state)
{
    (void)state;
    for (unsigned long nth = 1;; nth++) {
        struct mb_err err = {0};
        mb_alloc_fail_nth(nth);
        const int rc = moments_again(&err);
        const int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
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
        cmocka_unit_test_setup_teardown(what_is_whole_is_told, make, clear),
        cmocka_unit_test_setup_teardown(any_flipped_bit_is_named, make, clear),
        cmocka_unit_test_setup_teardown(any_missing_file_is_named, make, clear),
        cmocka_unit_test_setup_teardown(files_without_checksums_are_counted, make, clear),
        cmocka_unit_test_setup_teardown(what_is_no_model_is_said, make, clear),
        cmocka_unit_test_setup_teardown(every_failing_allocation_is_named, make, clear),
        cmocka_unit_test_setup_teardown(moments_bear_every_failing_allocation, make, clear),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
