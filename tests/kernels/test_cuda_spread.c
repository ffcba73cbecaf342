/*
 * Attention over samples whose rows are on several ranks: the calls of one rank, with the keys and
 * values of all, on two backends beside each other (twin.h).
 */
#include <stdio.h>
#include <string.h>
#include "twin.h"

enum { RANKS_MAX = 4 };

static const struct {
    struct mb_attention_shape shape; /* samples, rows of one here, heads, groups, head_dim */
    size_t n, rank;
    float dropout;
} CASES[] = {{{2, 64, 3, 3, 64}, 2, 0, 0},      {{1, 130, 4, 2, 64}, 2, 1, 0.2f},
             {{2, 34, 4, 1, 128}, 3, 1, 0.1f},  {{1, 2, 1, 1, 64}, 2, 0, 0},
             {{1, 40, 3, 3, 80}, 4, 2, 0},      {{2, 18, 4, 2, 24}, 3, 0, 0.5f},
             {{1, 70, 2, 2, 256}, 2, 1, 0},     {{1, 1000, 2, 2, 64}, 2, 0, 0},
             {{1, 514, 4, 2, 128}, 2, 1, 0},    {{3, 256, 2, 1, 64}, 4, 3, 0.1f},
             {{2, 96, 2, 2, 64}, 1, 0, 0.3f},   {{4095, 2, 16, 8, 8}, 2, 1, 0},
             {{1, 1000, 3, 3, 64}, 3, 1, 0},    {{2, 386, 4, 2, 64}, 4, 1, 0.1f},
             {{1, 250, 8, 2, 128}, 3, 1, 0.2f}, {{2, 640, 2, 1, 64}, 4, 2, 0},
             {{1, 6, 2, 2, 128}, 3, 2, 0},      {{1, 768, 2, 1, 128}, 3, 0, 0}};

static struct mb_stretches stretches_of(size_t n, size_t rank, size_t seq)
{
    return (struct mb_stretches){rank * seq / 2, (2 * n - 1 - rank) * seq / 2};
}

static void check_put(struct twin *t, const struct mb_attention_shape *s, const struct pair *d_qkv,
                      const struct pair *d_kv)
{
    struct mb_keys_values a = {.shape = *s, .qkv = d_qkv->cpu, .kv = d_kv->cpu}, b = a;
    b.qkv = d_qkv->gpu;
    b.kv = d_kv->gpu;
    b.dtype = t->dtype;
    RUN(t, keys_values_put, a, b);
    assert_pair(t, "parts, d_qkv", d_qkv, twin_bound(t, 1e-5, 1e-2));
}

static void check_parts(struct twin *t, size_t k)
{
    const struct mb_attention_shape *s = &CASES[k].shape;
    const size_t n = CASES[k].n, rank = CASES[k].rank, rows = s->n_samples * s->seq;
    const size_t n_kv = rows * 2 * s->n_groups * s->head_dim;
    const size_t n_out = rows * s->n_heads * s->head_dim;
    if (twin_is_slow(t, n_kv + n_out))
        return;
    printf(" %zu samples, %zu rows, %zu heads, %zu groups, %zu channels, rank %zu of %zu, "
           "dropout %g\n",
           s->n_samples, s->seq, s->n_heads, s->n_groups, s->head_dim, rank, n,
           (double)CASES[k].dropout);
    struct pair qkv = pair_input(t, n_kv + n_out, 2), kv[RANKS_MAX] = {pair_output(t, n_kv)};
    for (size_t i = 1; i < n; i++)
        kv[i] = pair_input(t, n_kv, 2);
    struct mb_keys_values own = {.shape = *s, .qkv = qkv.cpu, .kv = kv[0].cpu}, own_gpu = own;
    own_gpu.qkv = qkv.gpu;
    own_gpu.kv = kv[0].gpu;
    own_gpu.dtype = t->dtype;
    RUN(t, keys_values_take, own, own_gpu);
    assert_pair(t, "parts, keys and values", &kv[0], 1e-9);

    struct pair out = pair_output(t, n_out), log_sum = pair_output_f32(t, rows * s->n_heads);
    struct pair d_out = pair_input(t, n_out, 1), d_qkv = pair_output(t, qkv.n);
    struct mb_attention_part cpu = {
        .shape = *s,
        .queries = stretches_of(n, rank, s->seq),
        .qkv = qkv.cpu,
        .scratch = twin_memory(&t->cpu, sizeof(float) * t->cpu.ops->attention_scratch(s)),
        .all_heads = s->n_heads + 1, /* of a tensor parallel group, say */
        .all_seq = n * s->seq,
        .dropout = {.seed = t->seed,
                    .iteration = 4,
                    .site = 3,
                    .first_element = k,
                    .probability = CASES[k].dropout}};
    struct mb_attention_part gpu = cpu;
    gpu.qkv = qkv.gpu;
    gpu.scratch = twin_memory(&t->gpu, sizeof(float) * t->gpu.ops->attention_scratch(s));
    gpu.dtype = t->dtype;
    for (size_t turn = 0; turn < n; turn++) {
        cpu.keys = gpu.keys = stretches_of(n, (rank + n - turn) % n, s->seq);
        cpu.kv = kv[turn].cpu;
        gpu.kv = kv[turn].gpu;
        struct mb_attention_part_forward a = {cpu, out.cpu, log_sum.cpu, turn > 0};
        struct mb_attention_part_forward b = {gpu, out.gpu, log_sum.gpu, turn > 0};
        RUN(t, attention_part_forward, a, b);
        assert_pair(t, "parts, out", &out, twin_bound(t, 2e-6, 5e-3));
        assert_pair_from(t, "parts, log_sum", &log_sum, twin_bound(t, 2e-6, 1e-4), 1);
    }
    struct pair own_d_kv = {0};
    for (size_t call = 1; call <= n; call++) { /* the own keys are last */
        struct pair d_kv = pair_output_f32(t, n_kv);
        const size_t turn = call % n;
        cpu.keys = gpu.keys = stretches_of(n, (rank + n - turn) % n, s->seq);
        cpu.kv = kv[turn].cpu;
        gpu.kv = kv[turn].gpu;
        struct mb_attention_part_backward a = {.part = cpu,
                                               .out = out.cpu,
                                               .d_out = d_out.cpu,
                                               .log_sum = log_sum.cpu,
                                               .d_qkv = d_qkv.cpu,
                                               .d_kv = d_kv.cpu,
                                               .joins = call > 1};
        struct mb_attention_part_backward b = {.part = gpu,
                                               .out = out.gpu,
                                               .d_out = d_out.gpu,
                                               .log_sum = log_sum.gpu,
                                               .d_qkv = d_qkv.gpu,
                                               .d_kv = d_kv.gpu,
                                               .joins = call > 1};
        RUN(t, attention_part_backward, a, b);
        assert_pair(t, "parts, d_kv", &d_kv, twin_bound(t, 1e-5, 1e-2));
        own_d_kv = d_kv;
    }
    check_put(t, s, &d_qkv, &own_d_kv);
}

static void test_parts(void **state)
{
    struct twin *t = *state;
    assert_true(t->gpu.ops->features & MB_FEATURE_SPREAD_SAMPLES);
    twin_in_all(t, check_parts, COUNT(CASES));
}

static void test_too_large(void **state)
{
    struct twin *t = *state;
    struct mb_err err = {0};
    if (twin_is_cpu(t))
        skip(); /* it takes all */
    const struct mb_attention_part wide = {.shape = {1, 2, 1, 1, 264}};
    struct mb_attention_part_forward a = {.part = wide};
    t->gpu.ops->attention_part_forward(t->gpu.ctx, t->gpu.stream, &a);
    assert_int_equal(t->gpu.ops->synchronize(t->gpu.ctx, t->gpu.stream, &err), MB_EUNSUPPORTED);
    assert_non_null(strstr(err.text, "a head of 264 channels"));
    struct mb_attention_part_backward b = {.part = wide};
    t->gpu.ops->attention_part_backward(t->gpu.ctx, t->gpu.stream, &b);
    assert_int_equal(t->gpu.ops->synchronize(t->gpu.ctx, t->gpu.stream, &err), MB_EUNSUPPORTED);
    assert_non_null(strstr(err.text, "a head of 264 channels"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TWIN_TEST(test_parts),
        TWIN_TEST(test_too_large),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
