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
#include "base/alloc.h"
#include "base/fs.h"
#include "worker/checkpoint/hf/convert.h"
#include "worker/checkpoint/weights.h"

static char ARGS[] =
    "{\"num_layers\": 4, \"hidden_size\": 16, \"num_attention_heads\": 4, \"kv_channels\": 4,"
    "\"swiglu\": true, \"group_query_attention\": true, \"num_query_groups\": 2,"
    "\"max_position_embeddings\": 8, \"padded_vocab_size\": 24, \"true_vocab_size\": 21,"
    "\"make_vocab_size_divisible_by\": 8, \"ffn_hidden_size\": 32, \"add_bias_linear\": true,"
    "\"untie_embeddings_and_output_weights\": true}";

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

static void write_ours(const char *dir)
{
    struct mb_err err = {0};
    struct mb_megatron_layout l = {0};
    const struct mb_checkpoint_state s = {
        .iteration = 7, .consumed_train_samples = 56, .args_json = ARGS};
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
    free(tensors);
    mb_megatron_layout_close(&l);
    json_decref(args);
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
    assert_int_equal(mb_shards_verify(s, &err), 0);
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
    write_ours(source);
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
    write_ours(source);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_layout_has_every_number),
        cmocka_unit_test(it_is_whole_or_not_there),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
