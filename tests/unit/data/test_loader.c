/* Data sets, samplers and loaders: bad input is named, allocation failures clean up. The order
 * itself is compared with numpy in tests/integration/data. */
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
#include "worker/data/index_cache.h"
#include "worker/data/loader.h"
#include "worker/data/random.h"

static char dir[64];
static char small[96]; /* 4 sequences */
static char large[96]; /* 200 sequences */

static void write_data(const char *prefix, int n_sequences)
{
    struct mb_index_writer *w;

    assert_int_equal(mb_index_writer_create(prefix, MB_INDEX_U16, &w, NULL), 0);
    for (int i = 0; i < n_sequences; i++) {
        int32_t ids[20];
        for (int t = 0; t < 20; t++)
            ids[t] = i;
        assert_int_equal(mb_index_writer_add(w, ids, 20, NULL), 0);
        assert_int_equal(mb_index_writer_end_document(w, NULL), 0);
    }
    assert_int_equal(mb_index_writer_commit(w, NULL), 0);
    mb_index_writer_destroy(w);
}

static int setup(void **state)
{
    (void)state;
    snprintf(dir, sizeof(dir), "/tmp/mobula-loader-XXXXXX");
    assert_non_null(mkdtemp(dir));
    snprintf(small, sizeof(small), "%s/small", dir);
    snprintf(large, sizeof(large), "%s/large", dir);
    write_data(small, 4);
    write_data(large, 200);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    return mb_fs_remove_tree(dir, NULL);
}

static struct mb_data_options options_for(const char *const *paths, size_t n)
{
    return (struct mb_data_options){
        .data_path = {paths, n},
        .seq_length = 8,
        .seed = 1234,
        .n_samples = {40, 8, 0},
        .micro_batch_size = 2,
        .dp_size = 1,
        .dataloader_type = MB_SAMPLER_SINGLE,
        .split = "80,20,0",
        .vocab_size = 1000,
        .eod = -1,
    };
}

/* All that a rank does; writes what the cache does not have. */
static int build(const struct mb_data_options *o, struct mb_loader *out[MB_N_SPLITS],
                 struct mb_err *err)
{
    struct mb_data_sources *s = NULL;
    int rc = mb_data_open(o, &s, err);

    if (rc == 0)
        rc = mb_loaders_build(o, s, out, err);
    mb_data_close(s);
    if (rc != 0 || o->cache == NULL)
        return rc;
    rc = mb_loaders_store(out, o->cache, err);
    for (int i = 0; rc != 0 && i < MB_N_SPLITS; i++)
        mb_loader_destroy(out[i]);
    return rc;
}

static void expect_failure(const struct mb_data_options *o, int code, const char *text)
{
    struct mb_loader *out[MB_N_SPLITS];
    struct mb_err err = {0};

    assert_int_equal(build(o, out, &err), code);
    if (strstr(err.text, text) == NULL)
        fail_msg("'%s' is not in: %s", text, err.text);
}

static void test_bad_input_is_named(void **state)
{
    const char *const one[] = {small};
    const char *const mixed[] = {"0.5", small, "half", large};
    const char *const negative[] = {"-1", small, "2", large};
    const char *const missing[] = {"/nonexistent/corpus"};
    struct mb_data_options o = options_for(one, 1);

    (void)state;
    o.split = "969,30,1";
    expect_failure(&o, MB_EINVAL,
                   "split 'valid' is empty: 0 sequences, share 0.03; use --split 100,0,0 "
                   "--eval-iters 0 or more data");
    o.split = "100,0,0";
    expect_failure(&o, MB_EINVAL, "split 'valid' has no share in --split 100,0,0");
    o.split = "0,0,0";
    expect_failure(&o, MB_EINVAL, "no share is positive");
    o.split = "1,2,3,4";
    expect_failure(&o, MB_EINVAL, "more than three numbers");
    o.split = "1.2.3";
    expect_failure(&o, MB_EINVAL, "--split 1.2.3");
    o = options_for(mixed, 4);
    expect_failure(&o, MB_EINVAL, "1 of 2 weights are numbers");
    o = options_for(negative, 4);
    expect_failure(&o, MB_EINVAL, "weight -1");
    o = options_for(missing, 1);
    expect_failure(&o, MB_ENOENT, "/nonexistent/corpus.idx");
    o = options_for(one, 0);
    expect_failure(&o, MB_EINVAL, "a single data source must be provided");
    o = options_for(one, 1);
    o.mock = 1;
    expect_failure(&o, MB_EINVAL, "a single data source must be provided");
    o = options_for(one, 0);
    o.split = NULL;
    o.split_path[MB_SPLIT_TRAIN] = (struct mb_data_paths){one, 1};
    expect_failure(&o, MB_EINVAL, "give --valid-data-path");
    o = options_for(one, 1);
    o.consumed_samples[MB_SPLIT_TRAIN] = 100000;
    o.n_samples[MB_SPLIT_VALID] = 0;
    expect_failure(&o, MB_EINVAL, "no samples left to consume: 100000");
    o.dataloader_type = MB_SAMPLER_CYCLIC;
    o.consumed_samples[MB_SPLIT_TRAIN] = 3;
    expect_failure(&o, MB_EINVAL, "do not end on a whole micro batch");
    o.dp_size = 1000;
    expect_failure(&o, MB_EINVAL, "needs 2000");
}

static void test_token_outside_vocabulary(void **state)
{
    const char *const one[] = {large};
    struct mb_data_options o = options_for(one, 1);
    struct mb_loader *out[MB_N_SPLITS];
    struct mb_err err = {0};
    int rc = 0;

    (void)state;
    o.vocab_size = 50;
    assert_int_equal(build(&o, out, &err), 0);
    for (int i = 0; rc == 0 && i < 20; i++)
        rc = mb_loader_next(out[0], NULL, NULL, NULL, NULL, &err);
    assert_int_equal(rc, MB_ECORRUPT);
    assert_non_null(strstr(err.text, "outside the vocabulary of 50"));
    for (int i = 0; i < MB_N_SPLITS; i++)
        mb_loader_destroy(out[i]);
}

static void test_allocation_failures(void **state)
{
    const char *const blend[] = {"0.5", small, "0.5", large};
    struct mb_data_options o = options_for(blend, 4);

    (void)state;
    for (unsigned long n = 1;; n++) {
        struct mb_loader *out[MB_N_SPLITS] = {NULL};
        struct mb_err err = {0};
        int rc;

        mb_alloc_fail_nth(n);
        rc = build(&o, out, &err);
        if (!mb_alloc_did_fail()) {
            mb_alloc_fail_nth(0);
            assert_int_equal(rc, 0);
            for (int i = 0; i < MB_N_SPLITS; i++)
                mb_loader_destroy(out[i]);
            break;
        }
        assert_int_equal(rc, MB_ENOMEM);
    }
}

/* A cache that is written, then one that is read: memory out at any step changes nothing but that.
 */
static void test_cache_and_allocation_failures(void **state)
{
    const char *const blend[] = {"0.5", small, "0.5", large};
    const struct mb_tokenizer_options tokenizer = {.type = "NullTokenizer", .vocab_size = 999};
    struct mb_data_options o = options_for(blend, 4);
    struct mb_cache_identity identity;
    struct mb_buf notes = {0};
    char place[96];
    struct mb_index_cache cache = {.dir = place, .tokenizer = &identity, .notes = &notes};
    struct mb_loader *out[MB_N_SPLITS];
    uint64_t want;

    (void)state;
    o.n_samples[MB_SPLIT_VALID] = 0;
    snprintf(place, sizeof place, "%s/cache", dir);
    assert_int_equal(mb_cache_identity_make(&tokenizer, &identity, NULL), 0);
    assert_int_equal(build(&o, out, NULL), 0);
    want = mb_loaders_digest(out);
    for (int i = 0; i < MB_N_SPLITS; i++)
        mb_loader_destroy(out[i]);
    o.cache = &cache;
    for (int reads = 0; reads < 2; reads++) {
        for (unsigned long n = 1;; n++) {
            struct mb_err err = {0};
            int rc;

            if (!reads)
                assert_int_equal(mb_fs_remove_tree(place, NULL), 0);
            mb_buf_close(&notes);
            mb_alloc_fail_nth(n);
            rc = build(&o, out, &err);
            if (!mb_alloc_did_fail()) {
                mb_alloc_fail_nth(0);
                assert_int_equal(rc, 0);
                assert_int_equal(want, mb_loaders_digest(out));
                for (int i = 0; i < MB_N_SPLITS; i++)
                    mb_loader_destroy(out[i]);
                break;
            }
            assert_int_equal(rc, MB_ENOMEM);
        }
        assert_null(strstr(mb_buf_str(&notes), "WARNING"));
        assert_non_null(strstr(mb_buf_str(&notes), reads ? "> loaded indices" : "> saved indices"));
        assert_null(strstr(mb_buf_str(&notes), reads ? "> saved indices" : "> loaded indices"));
    }
    mb_buf_close(&notes);
    mb_cache_identity_close(&identity);
}

static void test_rewind(void **state)
{
    const char *const one[] = {large};
    struct mb_data_options o = options_for(one, 1);

    (void)state;
    o.consumed_samples[MB_SPLIT_TRAIN] = 4;
    for (int cyclic = 0; cyclic < 2; cyclic++) {
        struct mb_loader *out[MB_N_SPLITS];
        uint64_t first[6];

        o.dataloader_type = cyclic ? MB_SAMPLER_CYCLIC : MB_SAMPLER_SINGLE;
        assert_int_equal(build(&o, out, NULL), 0);
        for (int i = 0; i < 12; i++) {
            if (i == 6) {
                mb_alloc_fail_nth(1); /* a rewind that fails changes nothing */
                assert_int_equal(mb_loader_rewind(out[0], NULL), MB_ENOMEM);
                assert_int_equal(mb_loader_consumed(out[0]), 16);
                assert_int_equal(mb_loader_rewind(out[0], NULL), 0);
            }
            assert_int_equal(mb_loader_next(out[0], NULL, NULL, NULL, NULL, NULL), 0);
            if (i < 6)
                first[i] = mb_loader_last_samples(out[0])[0];
            else
                assert_int_equal(mb_loader_last_samples(out[0])[0], first[i - 6]);
        }
        for (int i = 0; i < MB_N_SPLITS; i++)
            mb_loader_destroy(out[i]);
    }
}

static void test_sizes(void **state)
{
    struct mb_data_schedule s = {
        .train_iters = 20, .global_batch_size = 16, .eval_interval = 10, .eval_iters = 10};
    uint64_t sizes[MB_N_SPLITS];

    (void)state;
    assert_int_equal(mb_data_sizes(&s, sizes, NULL), 0);
    assert_int_equal(sizes[0], 320);
    assert_int_equal(sizes[1], 480);
    assert_int_equal(sizes[2], 160);
    /* 146484375 samples in batches of 288, as a published job prints it. */
    s = (struct mb_data_schedule){.train_samples = 146484375,
                                  .global_batch_size = 288,
                                  .eval_interval = 1000,
                                  .eval_iters = 40};
    assert_int_equal(mb_data_sizes(&s, sizes, NULL), 0);
    assert_int_equal(sizes[0], 146484375);
    assert_int_equal(sizes[1], 5863680);
    assert_int_equal(sizes[2], 11520);
    s.eval_interval = 0;
    assert_int_equal(mb_data_sizes(&s, sizes, NULL), MB_EINVAL);
    s = (struct mb_data_schedule){.train_iters = UINT64_MAX, .global_batch_size = 2};
    assert_int_equal(mb_data_sizes(&s, sizes, NULL), MB_EINVAL);
}

static void test_randperm_limit(void **state)
{
    struct mb_err err = {0};

    (void)state;
    assert_int_equal(mb_randperm(0, MB_RANDPERM_MAX, NULL, &err), MB_EUNSUPPORTED);
    assert_non_null(strstr(err.text, "--dataloader-type single"));
}

static void test_single_gives_every_sample_once(void **state)
{
    char seen[103] = {0};
    (void)state;
    for (uint32_t rank = 0; rank < 3; rank++) {
        struct mb_sampler_options o = {
            .n_samples = 103, .micro_batch_size = 5, .dp_rank = rank, .dp_size = 3};
        struct mb_sampler *s;
        uint64_t out[5];
        int rc;

        assert_int_equal(mb_sampler_create(&o, &s, NULL), 0);
        while ((rc = mb_sampler_next(s, out, NULL)) == 0) {
            for (int i = 0; i < 5; i++)
                assert_int_equal(seen[out[i]]++, 0);
        }
        assert_int_equal(rc, MB_ESTATE);
        assert_int_equal(mb_sampler_consumed(s), 90);
        mb_sampler_destroy(s);
    }
    for (int i = 0; i < 90; i++)
        assert_int_equal(seen[i], 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bad_input_is_named),
        cmocka_unit_test(test_token_outside_vocabulary),
        cmocka_unit_test(test_allocation_failures),
        cmocka_unit_test(test_cache_and_allocation_failures),
        cmocka_unit_test(test_rewind),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_randperm_limit),
        cmocka_unit_test(test_single_gives_every_sample_once),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
