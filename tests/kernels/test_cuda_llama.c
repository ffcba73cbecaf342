/*
 * The operations of Llama's style on the CUDA backend against the CPU's, in fp32, bf16 and fp16, at
 * the shapes that its kernels tell apart; bounds as in test_cuda_ops.c.
 */
#include "twin.h"

/* ---- rmsnorm ---- */

static const size_t NORMS[][2] = {{700, 4096}, {33, 768},  {129, 2048}, {1000, 128}, {7, 33},
                                  {40, 1600},  {17, 8192}, {5, 16384},  {9, 20}};

static void check_rmsnorm(struct twin *t, size_t k)
{
    const size_t rows = NORMS[k][0], h = NORMS[k][1];
    if (twin_is_slow(t, rows * h))
        return;
    struct pair x = pair_input(t, rows * h, 3), w = pair_input_f32(t, h, 1),
                out = pair_output(t, rows * h), rstd = pair_output_f32(t, rows),
                d_out = pair_input(t, rows * h, 1), d_x = pair_input(t, rows * h, 1),
                d_w = pair_input_f32(t, h, 1);
    struct mb_rmsnorm_forward a = {x.cpu, w.cpu, out.cpu, rstd.cpu,    NULL,
                                   rows,  h,     1e-5f,   MB_DTYPE_F32},
                              b = {x.gpu, w.gpu, out.gpu, rstd.gpu, NULL, rows, h, 1e-5f, t->dtype};
    RUN(t, rmsnorm_forward, a, b);
    assert_pair(t, "rmsnorm", &out, twin_bound(t, 2e-6, 4e-3));
    assert_pair(t, "rmsnorm rstd", &rstd, 2e-6);
    struct mb_rmsnorm_backward c = {x.cpu,   w.cpu, rstd.cpu, d_out.cpu, d_x.cpu,
                                    d_w.cpu, NULL,  rows,     h,         MB_DTYPE_F32},
                               d = {x.gpu,   w.gpu, rstd.gpu, d_out.gpu, d_x.gpu,
                                    d_w.gpu, NULL,  rows,     h,         t->dtype};
    RUN(t, rmsnorm_backward, c, d);
    assert_pair(t, "rmsnorm d_x", &d_x, twin_bound(t, 1e-5, 4e-3));
    assert_pair(t, "rmsnorm d_weight", &d_w, 1e-5);
}

static void test_rmsnorm(void **state)
{
    twin_in_all(*state, check_rmsnorm, COUNT(NORMS));
}

/* ---- swiglu ---- */

static const size_t GATED[][2] = {{300, 1024}, {7, 33}, {65, 4}, {3, 14336}};

static void check_swiglu(struct twin *t, size_t k)
{
    const size_t rows = GATED[k][0], n = GATED[k][1];
    if (twin_is_slow(t, rows * n))
        return;
    struct pair x = pair_input(t, rows * 2 * n, 5), out = pair_output(t, rows * n),
                d_out = pair_input(t, rows * n, 1), d_x = pair_output(t, rows * 2 * n);
    struct mb_swiglu_forward a = {x.cpu, out.cpu, NULL, rows, n, MB_DTYPE_F32},
                             b = {x.gpu, out.gpu, NULL, rows, n, t->dtype};
    RUN(t, swiglu_forward, a, b);
    assert_pair(t, "swiglu", &out, twin_bound(t, 2e-6, 4e-3));
    struct mb_swiglu_backward c = {x.cpu, d_out.cpu, d_x.cpu, NULL, rows, n, MB_DTYPE_F32},
                              d = {x.gpu, d_out.gpu, d_x.gpu, NULL, rows, n, t->dtype};
    RUN(t, swiglu_backward, c, d);
    assert_pair(t, "swiglu d_x", &d_x, twin_bound(t, 5e-6, 4e-3));
}

static void test_swiglu(void **state)
{
    twin_in_all(*state, check_swiglu, COUNT(GATED));
}

/* ---- rotary positions ---- */

static const struct {
    struct mb_attention_shape shape; /* samples, seq, heads, groups, head_dim */
    size_t rotary_dim;
} TURNS[] = {{{2, 64, 8, 2, 128}, 128},
             {{1, 33, 4, 4, 64}, 64},
             {{3, 9, 6, 3, 24}, 16},
             {{2, 17, 3, 1, 10}, 6},
             {{1, 5, 2, 2, 80}, 20}};

static void check_rope(struct twin *t, size_t k)
{
    const struct mb_attention_shape *s = &TURNS[k].shape;
    const size_t half = TURNS[k].rotary_dim / 2;
    struct pair qkv = pair_input(
                    t, s->n_samples * s->seq * (s->n_heads + 2 * s->n_groups) * s->head_dim, 1),
                cosine = pair_input_f32(t, s->seq * half, 1),
                sine = pair_input_f32(t, s->seq * half, 1);
    struct mb_rope a = {.shape = *s,
                        .qkv = qkv.cpu,
                        .cosine = cosine.cpu,
                        .sine = sine.cpu,
                        .rotary_dim = 2 * half,
                        .inverse = (int)k % 2},
                   b = a;
    b.qkv = qkv.gpu;
    b.cosine = cosine.gpu;
    b.sine = sine.gpu;
    b.dtype = t->dtype;
    RUN(t, rope, a, b);
    assert_pair(t, "rotary positions", &qkv, twin_bound(t, 1e-6, 4e-3));
}

static void test_rope(void **state)
{
    twin_in_all(*state, check_rope, COUNT(TURNS));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TWIN_TEST(test_rmsnorm),
        TWIN_TEST(test_swiglu),
        TWIN_TEST(test_rope),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
