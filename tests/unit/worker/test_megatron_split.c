/* A checkpoint of ours as one of Megatron-LM's and back, on disk. The real megatron-core is in
 * tests/integration/worker/test_megatron_write.py. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "worker/checkpoint/hf/convert.h"
#include "worker/checkpoint/moments.h"
#include "worker/checkpoint/weights.h"

static char ARGS[] =
    "{\"num_layers\": 4, \"hidden_size\": 16, \"num_attention_heads\": 4, \"kv_channels\": 4,"
    "\"swiglu\": true, \"group_query_attention\": true, \"num_query_groups\": 2,"
    "\"max_position_embeddings\": 8, \"padded_vocab_size\": 24, \"true_vocab_size\": 21,"
    "\"make_vocab_size_divisible_by\": 8, \"ffn_hidden_size\": 32, \"add_bias_linear\": true,"
    "\"untie_embeddings_and_output_weights\": true,"
    "\"lr\": 0.001, \"min_lr\": 0.0001, \"start_weight_decay\": 0.1, \"end_weight_decay\": 0.1,"
    "\"weight_decay\": 0.1, \"adam_beta1\": 0.9, \"adam_beta2\": 0.95, \"adam_eps\": 1e-8,"
    "\"lr_decay_style\": \"cosine\", \"weight_decay_incr_style\": \"constant\"}";

enum { PADDED = 24, HIDDEN = 16 };

/* Another number for each element of each tensor. */
static float value(size_t tensor, uint64_t element)
{
    return (float)(tensor * 4096 + element);
}

static int write_numbers(void *arg, const char *path, struct mb_st_tensor *tensors, size_t n,
                         struct mb_err *err)
{
    struct mb_st_writer *w;
    uint64_t size, crc;
    (void)arg;
    assert_int_equal(mb_st_create(path, tensors, n, NULL, 0, &w, err), 0);
    for (size_t i = 0; i < n; i++) {
        for (uint64_t k = 0; k < (tensors[i].end - tensors[i].begin) / sizeof(float); k++) {
            const float v = value(i, k);
            assert_int_equal(mb_st_write(w, &v, sizeof v, err), 0);
        }
    }
    return mb_st_finish(w, &size, &crc, err);
}

static int give_moment(void *arg, int which, size_t tensor, uint64_t from, size_t n, float *out,
                       struct mb_err *err)
{
    (void)arg;
    (void)err;
    for (size_t i = 0; i < n; i++) {
        out[i] = value(tensor, from + i) + (which == 0 ? 0.25f : 0.5f);
    }
    return 0;
}

static void write_ours(const char *dir, int with_optimizer)
{
    struct mb_err err = {0};
    struct mb_megatron_layout l = {0};
    const struct mb_checkpoint_state s = {.iteration = 7,
                                          .consumed_train_samples = 56,
                                          .optimizer_steps = 7,
                                          .schedule_samples = 56,
                                          .decay_samples = 160,
                                          .has_optimizer = with_optimizer,
                                          .args_json = ARGS};
    json_t *args = json_loads(ARGS, 0, NULL);
    assert_non_null(args);
    assert_int_equal(mb_megatron_sizes("here", args, &l, &err), 0);
    assert_int_equal(mb_megatron_layout_create("here", args, &l, &err), 0);
    struct mb_st_tensor *tensors = calloc(l.n, sizeof *tensors);
    assert_non_null(tensors);
    for (size_t i = 0; i < l.n; i++) {
        tensors[i] = (struct mb_st_tensor){.name = l.tensors[i].name,
                                           .n_dims = l.tensors[i].columns > 0 ? 2 : 1,
                                           .shape = {l.tensors[i].rows, l.tensors[i].columns}};
    }
    assert_int_equal(mb_weights_write(dir, tensors, l.n, &s, write_numbers, NULL, &err), 0);
    if (with_optimizer) {
        char *iter = mb_weights_dir(dir, 7);
        assert_int_equal(mb_moments_write(iter, tensors, l.n, give_moment, NULL, &err), 0);
        mb_free(iter);
    }
    free(tensors);
    mb_megatron_layout_close(&l);
    json_decref(args);
}

static int count(void *arg, struct mb_err *err)
{
    (void)err;
    ++*(size_t *)arg;
    return 0;
}

static int cancel(void *arg, struct mb_err *err)
{
    (void)arg;
    return mb_err_set(err, MB_ECANCELED, "given up");
}

/* All is there again; what pads the vocabulary beyond that is 0. */
static void check(const char *iter_dir, uint64_t tp, uint64_t pp)
{
    struct mb_shards *s;
    struct mb_err err = {0};
    assert_int_equal(mb_shards_open(iter_dir, &s, &err), 0);
    assert_int_equal(mb_shards_n_files(s), tp * pp);
    assert_int_equal(mb_shards_iteration(s), 7);
    assert_int_equal(mb_shards_consumed(s, 0), 56);
    assert_int_equal(mb_shards_layout(s)->padded_vocab, tp == 1 ? PADDED : 32);
    size_t n_heard = 0;
    const struct mb_torch_watch watch = {count, &n_heard}, gives_up = {cancel, NULL};
    assert_int_equal(mb_shards_verify(s, &watch, &err), 0);
    assert_true(n_heard >= mb_shards_n_tensors(s)); /* whoever waits for it hears of each */
    assert_int_equal(mb_shards_verify(s, &gives_up, &err), MB_ECANCELED);
    for (size_t i = 0; i < mb_shards_n_tensors(s); i++) {
        const struct mb_st_tensor *t = mb_shards_tensor(s, i);
        const size_t n = (size_t)(t->end - t->begin) / sizeof(float);
        const int is_of_vocabulary = i == 0 || i == mb_shards_n_tensors(s) - 1;
        float *got = calloc(n, sizeof *got);
        assert_non_null(got);
        assert_int_equal(mb_shards_read(s, t, 0, n, got, &err), 0);
        for (size_t k = 0; k < n; k++) {
            const int pads = is_of_vocabulary && k >= PADDED * HIDDEN;
            assert_true(got[k] == (pads ? 0 : value(i, k)));
        }
        free(got);
    }
    mb_shards_close(s);
}

static void every_layout_has_every_number(void **state)
{
    (void)state;
    char dir[] = "/tmp/mobula-split-XXXXXX";
    struct mb_err err = {0};
    assert_non_null(mkdtemp(dir));
    char *source = mb_path_join(dir, "ours"), *target = mb_path_join(dir, "theirs");
    char *iter = mb_path_join(target, "iter_0000007");
    write_ours(source, 0);
    for (uint64_t tp = 1; tp <= 2; tp++) {
        for (uint64_t pp = 1; pp <= 4; pp *= 2) {
            for (int is_local = 0; is_local < 2; is_local++) {
                const struct mb_convert_options o = {.source = source,
                                                     .target = target,
                                                     .iteration = -1,
                                                     .to = MB_MODEL_MEGATRON,
                                                     .tensor_parallel_size = tp,
                                                     .pipeline_parallel_size = pp,
                                                     .is_local = is_local};
                struct mb_model_facts facts;
                assert_int_equal(mb_model_convert(&o, &facts, &err), 0);
                check(iter, tp, pp);
                assert_int_equal(mb_fs_remove_tree(target, &err), 0);
            }
        }
    }
    assert_int_equal(mb_fs_remove_tree(dir, &err), 0);
    mb_free(source);
    mb_free(target);
    mb_free(iter);
}

static void it_is_whole_or_not_there(void **state)
{
    (void)state;
    char dir[] = "/tmp/mobula-split-XXXXXX";
    struct mb_err err = {0};
    struct mb_model_facts facts;
    assert_non_null(mkdtemp(dir));
    char *source = mb_path_join(dir, "ours"), *target = mb_path_join(dir, "theirs");
    char *partial = mb_path_join(dir, "theirs.mobula-convert");
    const struct mb_convert_options o = {.source = source,
                                         .target = target,
                                         .iteration = -1,
                                         .to = MB_MODEL_MEGATRON,
                                         .tensor_parallel_size = 2,
                                         .pipeline_parallel_size = 2};
    write_ours(source, 0);
    int rc = MB_ENOMEM;
    for (unsigned long nth = 1; rc != 0; nth++) {
        mb_alloc_fail_nth(nth);
        rc = mb_model_convert(&o, &facts, &err);
        const int did_fail = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (rc == 0) { /* one that only clears up may fail */
            break;
        }
        assert_true(did_fail);
        assert_int_equal(rc, MB_ENOMEM);
        assert_false(mb_fs_exists(target));
        assert_int_equal(mb_fs_remove_tree(partial, &err), 0);
    }
    char *iter = mb_path_join(target, "iter_0000007");
    check(iter, 2, 2);
    assert_int_equal(mb_fs_remove_tree(dir, &err), 0);
    mb_free(source);
    mb_free(target);
    mb_free(partial);
    mb_free(iter);
}

/* Opened with its optimizer, and all of the moments of two ranks' parts read. */
static int read_optimizer(const char *iter_dir, struct mb_err *err)
{
    struct mb_shards *s = NULL;
    int rc = mb_shards_open(iter_dir, &s, err);
    if (rc == 0) {
        rc = mb_shards_take_optimizer(s, err);
    }
    for (size_t i = 0; rc == 0 && i < mb_shards_n_tensors(s); i++) {
        const struct mb_st_tensor *t = mb_shards_tensor(s, i);
        float got[2] = {0};
        rc = mb_shards_read_state(s, MB_SHARDS_EXP_AVG, t, 3, 2, got, err);
        if (rc == 0) {
            assert_true(got[0] == value(i, 3) + 0.25f && got[1] == value(i, 4) + 0.25f);
            rc = mb_shards_read_state(s, MB_SHARDS_EXP_AVG_SQ, t, 3, 2, got, err);
        }
        if (rc == 0) {
            assert_true(got[0] == value(i, 3) + 0.5f && got[1] == value(i, 4) + 0.5f);
        }
    }
    if (rc == 0) {
        assert_int_equal(mb_shards_optimizer(s)->steps, 7);
        assert_int_equal(mb_shards_optimizer(s)->schedule_samples, 56);
    }
    mb_shards_close(s);
    return rc;
}

static void the_optimizer_bears_every_failing_allocation(void **state)
{
    (void)state;
    char dir[] = "/tmp/mobula-split-XXXXXX";
    struct mb_err err = {0};
    struct mb_model_facts facts;
    assert_non_null(mkdtemp(dir));
    char *source = mb_path_join(dir, "ours"), *target = mb_path_join(dir, "theirs");
    char *partial = mb_path_join(dir, "theirs.mobula-convert");
    char *iter = mb_path_join(target, "iter_0000007");
    const struct mb_convert_options o = {.source = source,
                                         .target = target,
                                         .iteration = -1,
                                         .to = MB_MODEL_MEGATRON,
                                         .tensor_parallel_size = 2};
    int n_borne = 0; /* a look for a file by whose absence nothing changes, a clearing up */
    write_ours(source, 1);
    for (unsigned long nth = 1;; nth++) {
        mb_alloc_fail_nth(nth);
        const int rc = mb_model_convert(&o, &facts, &err);
        const int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (!failed) {
            assert_int_equal(rc, 0);
            break;
        }
        n_borne += rc == 0;
        assert_true(rc == MB_ENOMEM || rc == 0);
        assert_int_equal(mb_fs_exists(target), rc == 0);
        assert_int_equal(mb_fs_remove_tree(target, &err), 0);
        assert_int_equal(mb_fs_remove_tree(partial, &err), 0);
    }
    for (unsigned long nth = 1;; nth++) {
        mb_alloc_fail_nth(nth);
        const int rc = read_optimizer(iter, &err);
        const int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (!failed) {
            assert_int_equal(rc, 0);
            break;
        }
        n_borne += rc == 0;
        assert_true(rc == MB_ENOMEM || rc == 0);
    }
    assert_in_range(n_borne, 0, 4);
    assert_int_equal(mb_fs_remove_tree(dir, &err), 0);
    mb_free(source);
    mb_free(target);
    mb_free(partial);
    mb_free(iter);
}

/* More ranks than files may be open. */
static void few_descriptors_are_enough(void **state)
{
    (void)state;
    char dir[] = "/tmp/mobula-split-XXXXXX";
    struct mb_err err = {0};
    struct mb_model_facts facts;
    struct rlimit before, few;
    assert_non_null(mkdtemp(dir));
    char *source = mb_path_join(dir, "ours"), *target = mb_path_join(dir, "theirs");
    char *iter = mb_path_join(target, "iter_0000007");
    const struct mb_convert_options o = {.source = source,
                                         .target = target,
                                         .iteration = -1,
                                         .to = MB_MODEL_MEGATRON,
                                         .tensor_parallel_size = 2,
                                         .pipeline_parallel_size = 4};
    write_ours(source, 1);
    assert_int_equal(mb_model_convert(&o, &facts, &err), 0);
    const int next = dup(0);
    assert_true(next >= 0);
    close(next);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    few = before;
    few.rlim_cur = (rlim_t)next + 3;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    check(iter, 2, 4);
    const int rc = read_optimizer(iter, &err);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_string_equal(err.text, "");
    assert_int_equal(rc, 0);
    assert_int_equal(mb_fs_remove_tree(dir, &err), 0);
    mb_free(source);
    mb_free(target);
    mb_free(iter);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_layout_has_every_number),
        cmocka_unit_test(it_is_whole_or_not_there),
        cmocka_unit_test(the_optimizer_bears_every_failing_allocation),
        cmocka_unit_test(few_descriptors_are_enough),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
