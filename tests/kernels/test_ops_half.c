/*
 * fp16 on the CPU: how numbers are widened and rounded, all of them; a refused operation writes
 * nothing. That operations in fp16 are those of fp32 on rounded numbers is test_cuda_ops.c's and
 * test_cuda_llama.c's to show, which run on this backend, too; those on samples that are spread
 * over ranks are compared here with those on whole ones.
 */
#include "fixture.h"

#include <string.h>
#include "base/alloc.h"
#include "base/half.h"
#include "worker/kernels/philox.h"

enum { ALL = 65536 };

static void *memory(struct fixture *f, size_t size_bytes)
{
    struct mb_err err = {0};
    void *p = NULL;
    if (f->dev.ops->alloc(f->dev.ctx, size_bytes, &p, &err) != 0)
        fail_msg("%s", err.text);
    return p;
}

/* Every number, through a gradient that is added to zeros. */
static void test_widened(void **state)
{
    struct fixture *f = *state;
    uint16_t *all = memory(f, ALL * sizeof(*all));
    float *sum = memory(f, ALL * sizeof(*sum));
    int32_t *token = memory(f, sizeof(*token));
    for (size_t i = 0; i < ALL; i++)
        all[i] = (uint16_t)i;
    struct mb_embedding_backward a = {.token = token,
                                      .d_out = all,
                                      .d_token_weight = sum,
                                      .n_tokens = 1,
                                      .seq = 1,
                                      .hidden = ALL,
                                      .vocab = 1,
                                      .dtype = MB_DTYPE_F16};
    RUN_OP(f, embedding_backward, a);
    synchronize(f);
    for (size_t i = 0; i < ALL; i++) {
        const float want = mb_f16_float((uint16_t)i);
        if (!(sum[i] == want || (sum[i] != sum[i] && want != want)))
            fail_msg("%04zx is %a, expected %a", i, (double)sum[i], (double)want);
    }
}

static void check_narrowed(struct fixture *f, const float *x, uint16_t *out, size_t n)
{
    f->dev.ops->narrow(f->dev.ctx, f->dev.stream, out, x, n);
    synchronize(f);
    for (size_t i = 0; i < n; i++)
        if (out[i] != mb_float_f16(x[i]))
            fail_msg("%a becomes %04x, expected %04x", (double)x[i], out[i], mb_float_f16(x[i]));
}

/* Every number of fp16, what lies halfway to the next one and beside that, and random bits. */
static void test_narrowed(void **state)
{
    struct fixture *f = *state;
    enum { BESIDE = 5, RANDOM = 1 << 20 };
    float *x = memory(f, RANDOM * sizeof(*x));
    uint16_t *out = memory(f, RANDOM * sizeof(*out));
    for (size_t i = 0; i < ALL; i++) {
        const float here = mb_f16_float((uint16_t)i), next = mb_f16_float((uint16_t)(i + 1));
        const uint32_t half = mb_float_bits(here / 2 + next / 2);
        x[BESIDE * i] = here;
        for (uint32_t k = 0; k < 3; k++)
            x[BESIDE * i + 1 + k] = mb_bits_float(half + k - 1);
        x[BESIDE * i + 4] = mb_bits_float(mb_float_bits(here) + 1);
    }
    check_narrowed(f, x, out, BESIDE * ALL);
    for (size_t i = 0; i < RANDOM; i += 4) {
        const struct mb_philox r = mb_philox(17, i, 0, 0);
        memcpy(x + i, r.word, sizeof(r.word));
    }
    check_narrowed(f, x, out, RANDOM);
    x[0] = 65519.996f;
    x[1] = -65520;
    f->dev.ops->narrow(f->dev.ctx, f->dev.stream, out, x, 2);
    synchronize(f);
    assert_int_equal(out[0], 0x7bff);
    assert_int_equal(out[1], 0xfc00);
}

static void fill(struct fixture *f, uint16_t *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] = mb_float_f16((float)(2 * random_unit(f) - 1));
}

/* Samples of which one rank has both stretches are whole samples. */
static void test_spread(void **state)
{
    struct fixture *f = *state;
    const struct mb_attention_shape s = {
        .n_samples = 2, .seq = 70, .n_heads = 4, .n_groups = 2, .head_dim = 24};
    const size_t rows = s.n_samples * s.seq, n_kv = rows * 2 * s.n_groups * s.head_dim;
    const size_t n_out = rows * s.n_heads * s.head_dim, n = n_out + n_kv;
    uint16_t *qkv = memory(f, 2 * n), *kv = memory(f, 2 * n_kv), *d_out = memory(f, 2 * n_out);
    uint16_t *out[2], *d_qkv[2];
    float *log_sum[2], *d_kv = memory(f, sizeof(float) * n_kv);
    float *scratch = memory(f, sizeof(float) * f->dev.ops->attention_scratch(&s));
    for (size_t i = 0; i < 2; i++) {
        out[i] = memory(f, 2 * n_out);
        d_qkv[i] = memory(f, 2 * n);
        log_sum[i] = memory(f, sizeof(float) * rows * s.n_heads);
        memset(out[i], 0xff, 2 * n_out);
        memset(d_qkv[i], 0xff, 2 * n);
    }
    fill(f, qkv, n);
    fill(f, d_out, n_out);
    struct mb_attention_forward whole = {s, qkv, out[0], log_sum[0], scratch, {0}, MB_DTYPE_F16};
    RUN_OP(f, attention_forward, whole);
    struct mb_keys_values take = {s, qkv, kv, MB_DTYPE_F16};
    RUN_OP(f, keys_values_take, take);
    const struct mb_attention_part part = {.shape = s,
                                           .queries = {0, s.seq / 2},
                                           .keys = {0, s.seq / 2},
                                           .qkv = qkv,
                                           .kv = kv,
                                           .scratch = scratch,
                                           .all_heads = s.n_heads,
                                           .all_seq = s.seq,
                                           .dtype = MB_DTYPE_F16};
    struct mb_attention_part_forward spread = {part, out[1], log_sum[1], 0};
    RUN_OP(f, attention_part_forward, spread);
    synchronize(f);
    assert_memory_equal(out[0], out[1], 2 * n_out);
    assert_memory_equal(log_sum[0], log_sum[1], sizeof(float) * rows * s.n_heads);

    struct mb_attention_backward back = {s,        qkv,     out[0], log_sum[0],  d_out,
                                         d_qkv[0], scratch, {0},    MB_DTYPE_F16};
    RUN_OP(f, attention_backward, back);
    struct mb_attention_part_backward part_back = {part,     out[1], d_out, log_sum[1],
                                                   d_qkv[1], d_kv,   0};
    RUN_OP(f, attention_part_backward, part_back);
    struct mb_keys_values put = {s, d_qkv[1], (void *)d_kv, MB_DTYPE_F16};
    RUN_OP(f, keys_values_put, put);
    synchronize(f);
    assert_memory_equal(d_qkv[0], d_qkv[1], 2 * n);
}

static void test_bad_token(void **state)
{
    struct fixture *f = *state;
    struct mb_err err = {0};
    int32_t *token = memory(f, 2 * sizeof(*token));
    float *weight = memory(f, 4 * sizeof(*weight));
    uint16_t *out = memory(f, 4 * sizeof(*out));
    memset(out, 0xff, 4 * sizeof(*out));
    token[1] = 2;
    struct mb_embedding_forward a = {.token = token,
                                     .token_weight = weight,
                                     .out = out,
                                     .n_tokens = 2,
                                     .seq = 2,
                                     .hidden = 2,
                                     .vocab = 2,
                                     .dtype = MB_DTYPE_F16};
    RUN_OP(f, embedding_forward, a);
    assert_int_equal(f->dev.ops->synchronize(f->dev.ctx, f->dev.stream, &err), MB_EINVAL);
    assert_string_equal(err.text, "token 2 at row 1 is outside the vocabulary of 2");
    assert_int_equal(out[0], 0xffff);
}

/* Operands that no machine has room for. */
static void test_no_room(void **state)
{
    struct fixture *f = *state;
    struct mb_err err = {0};
    uint16_t x = 0;
    struct mb_gelu a = {.x = &x, .out = &x, .n = SIZE_MAX / 64, .dtype = MB_DTYPE_F16};
    RUN_OP(f, gelu_forward, a);
    assert_int_equal(f->dev.ops->synchronize(f->dev.ctx, f->dev.stream, &err), MB_ENOMEM);
    assert_non_null(strstr(err.text, "an operation's operands in fp32: "));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FIXTURE_TEST(test_widened),   FIXTURE_TEST(test_narrowed), FIXTURE_TEST(test_spread),
        FIXTURE_TEST(test_bad_token), FIXTURE_TEST(test_no_room),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
