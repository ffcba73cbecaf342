/*
 * fp32 in halves, through the backend's operations: all 2^32 patterns of bits. Every number and
 * infinity comes back bit for bit, a NaN quiet and with its payload; the upper half is the nearest
 * bf16, of two equally near the one away from zero. A sanitizer's build takes every 61st block.
 */
#include "fixture.h"

#include <stdio.h>
#include <string.h>
#include "base/half.h"
#include "worker/kernels/master.h"
#include "worker/kernels/split.h"

enum { LOG2_BLOCK = 20, BLOCK = 1 << LOG2_BLOCK };

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { STRIDE = 61 };
#else
enum { STRIDE = 1 };
#endif

static uint32_t x[BLOCK], back[BLOCK];
static uint16_t upper[BLOCK], lower[BLOCK];

static void *device_memory(struct fixture *f, size_t size_bytes)
{
    void *p = NULL;
    assert_int_equal(f->dev.ops->alloc(f->dev.ctx, size_bytes, &p, NULL), 0);
    return p;
}

static uint32_t expected_back(uint32_t bits)
{
    const int is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return is_nan ? bits | 0x00400000u : bits;
}

static uint16_t expected_upper(uint32_t bits)
{
    float v;
    const int is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    if (is_nan)
        return (uint16_t)(bits >> 16 | 0x40);
    if ((bits & 0xffffu) == 0x8000u) /* between two */
        return (uint16_t)((bits >> 16) + 1);
    memcpy(&v, &bits, sizeof(v));
    return mb_float_bf16(v);
}

static void test_all_patterns(void **state)
{
    struct fixture *f = *state;
    const struct mb_backend *ops = f->dev.ops;
    float *dev_x = device_memory(f, sizeof(x)), *dev_back = device_memory(f, sizeof(back));
    uint16_t *dev_upper = device_memory(f, sizeof(upper));
    uint16_t *dev_lower = device_memory(f, sizeof(lower));
    uint64_t n_wrong = 0, n = 0;
    for (uint32_t block = 0; block < 1u << (32 - LOG2_BLOCK); block += STRIDE) {
        for (uint32_t i = 0; i < BLOCK; i++)
            x[i] = block << LOG2_BLOCK | i;
        ops->copy_in(f->dev.ctx, f->dev.stream, dev_x, x, sizeof(x));
        ops->split(f->dev.ctx, f->dev.stream, dev_upper, dev_lower, dev_x, BLOCK);
        ops->join(f->dev.ctx, f->dev.stream, dev_back, dev_upper, dev_lower, BLOCK);
        ops->copy_out(f->dev.ctx, f->dev.stream, upper, dev_upper, sizeof(upper));
        ops->copy_out(f->dev.ctx, f->dev.stream, back, dev_back, sizeof(back));
        synchronize(f);
        for (uint32_t i = 0; i < BLOCK; i++)
            n_wrong += back[i] != expected_back(x[i]) || upper[i] != expected_upper(x[i]);
        n += BLOCK;
    }
    printf("  %llu patterns, %llu wrong\n", (unsigned long long)n, (unsigned long long)n_wrong);
    assert_true(STRIDE > 1 || n == (uint64_t)1 << 32);
    assert_int_equal(n_wrong, 0);
}

/* Through the window in several pieces, to and from the host, at odd places. */
static void test_windows(void **state)
{
    struct fixture *f = *state;
    enum { N = 2 * MB_MASTER_WINDOW + 1001, BEGIN = 7 };
    struct mb_master w = {.upper = device_memory(f, (N + BEGIN) * sizeof(uint16_t)),
                          .lower = device_memory(f, (N + BEGIN) * sizeof(uint16_t)),
                          .window = device_memory(f, MB_MASTER_WINDOW * sizeof(float))};
    struct tensor t = tensor_new(f, N, 1), got = tensor_new(f, N, 0);
    double *sum = device_memory(f, sizeof(*sum)), norm2 = 0, want = 0;
    mb_master_copy_in(&f->dev, &w, BEGIN, N, t.host);
    mb_master_copy_out(&f->dev, &w, BEGIN, N, got.host);
    f->dev.ops->zero(f->dev.ctx, f->dev.stream, sum, sizeof(*sum));
    mb_master_squared_norm(&f->dev, &w, BEGIN, N, sum);
    f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, &norm2, sum, sizeof(norm2));
    synchronize(f);
    assert_memory_equal(got.host, t.host, N * sizeof(float));
    for (size_t i = 0; i < N; i++)
        want += (double)t.host[i] * (double)t.host[i];
    assert_true(norm2 > (1 - 1e-9) * want && norm2 < (1 + 1e-9) * want);
}

/* An embedding in halves is bit for bit the one that is not. */
static void check_embedding(struct fixture *f, int with_positions)
{
    enum { TOKENS = 20, SEQ = 5, HIDDEN = 33, VOCAB = 11 };
    struct tensor wt = tensor_new(f, VOCAB * HIDDEN, 1), wp = tensor_new(f, SEQ * HIDDEN, 1);
    struct tensor want = tensor_new(f, TOKENS * HIDDEN, 0), got = tensor_new(f, TOKENS * HIDDEN, 0);
    uint16_t *halves = device_memory(f, 2 * (wt.n + wp.n) * sizeof(*halves));
    struct mb_embedding_forward a = {.token_weight = wt.dev,
                                     .position_weight = with_positions ? wp.dev : NULL,
                                     .out = want.dev,
                                     .n_tokens = TOKENS,
                                     .seq = SEQ,
                                     .hidden = HIDDEN,
                                     .vocab = VOCAB};
    int32_t *ids;
    ids_new(f, TOKENS, VOCAB, &ids);
    a.token = ids;
    RUN_OP(f, embedding_forward, a);
    f->dev.ops->split(f->dev.ctx, f->dev.stream, halves, halves + wt.n, wt.dev, wt.n);
    f->dev.ops->split(f->dev.ctx, f->dev.stream, halves + 2 * wt.n, halves + 2 * wt.n + wp.n,
                      wp.dev, wp.n);
    a.token_weight = a.position_weight = NULL;
    a.token_upper = halves;
    a.token_lower = halves + wt.n;
    a.position_upper = with_positions ? halves + 2 * wt.n : NULL;
    a.position_lower = with_positions ? halves + 2 * wt.n + wp.n : NULL;
    a.out = got.dev;
    RUN_OP(f, embedding_forward, a);
    tensor_download(f, &want);
    assert_memory_equal(tensor_download(f, &got), want.host, want.n * sizeof(float));
}

static void test_embedding(void **state)
{
    check_embedding(*state, 1);
    check_embedding(*state, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FIXTURE_TEST(test_all_patterns),
        FIXTURE_TEST(test_windows),
        FIXTURE_TEST(test_embedding),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
