/*
 * Attention over samples whose rows are on several ranks: all ranks' calls together give what one
 * rank computes. Tolerances as in test_ops.c: 2e-6, backward 1e-5.
 */
#include <string.h>
#include "fixture.h"
#include "reference.h"

struct spread {
    struct fixture *f;
    struct mb_attention_shape whole, own; /* own: with the rows of a rank */
    size_t n;                             /* ranks */
    struct mb_dropout dropout;
    struct tensor qkv, out, d_out; /* of whole samples */
};

static size_t width_of(const struct mb_attention_shape *s)
{
    return (s->n_heads + 2 * s->n_groups) * s->head_dim;
}

static struct mb_stretches stretches_of(const struct spread *s, size_t rank)
{
    const size_t half = s->own.seq / 2;
    return (struct mb_stretches){rank * half, (2 * s->n - 1 - rank) * half};
}

/* Row i of a rank, in the whole. */
static size_t row_of(const struct spread *s, size_t rank, size_t i)
{
    const size_t half = s->own.seq / 2, k = i % s->own.seq;
    const struct mb_stretches at = stretches_of(s, rank);
    return i / s->own.seq * s->whole.seq + (k < half ? at.first + k : at.second + k - half);
}

/* The rank's rows of a whole tensor, on the device. */
static struct tensor take(struct spread *s, size_t rank, const struct tensor *whole, size_t width)
{
    const size_t rows = s->own.n_samples * s->own.seq;
    struct tensor t = tensor_new(s->f, rows * width, 0);
    for (size_t i = 0; i < rows; i++)
        for (size_t c = 0; c < width; c++)
            t.host[i * width + c] = (float)whole->ref[row_of(s, rank, i) * width + c];
    tensor_upload(s->f, &t);
    return t;
}

/* And back: host of the whole. */
static void put(struct spread *s, size_t rank, struct tensor *part, struct tensor *whole,
                size_t width)
{
    const float *from = tensor_download(s->f, part);
    for (size_t i = 0; i < s->own.n_samples * s->own.seq; i++)
        memcpy(whole->host + row_of(s, rank, i) * width, from + i * width, width * sizeof(*from));
}

static double value(void *arg)
{
    struct spread *s = arg;
    ref_attention(&s->whole, s->qkv.ref, s->out.ref, &s->dropout);
    return tensor_contract(s->out.ref, &s->d_out);
}

static struct tensor keys_values_of(struct spread *s, struct tensor *qkv)
{
    struct tensor kv =
        tensor_new(s->f, s->own.n_samples * s->own.seq * 2 * s->own.n_groups * s->own.head_dim, 1);
    struct mb_keys_values a = {.shape = s->own, .qkv = qkv->dev, .kv = kv.dev};
    RUN_OP(s->f, keys_values_take, a);
    return kv;
}

enum { RANKS_MAX = 3 };

static void check(struct spread *s)
{
    struct fixture *f = s->f;
    const size_t width = width_of(&s->own), out_width = s->own.n_heads * s->own.head_dim;
    struct tensor qkv[RANKS_MAX], kv[RANKS_MAX], d_kv[RANKS_MAX], d_qkv[RANKS_MAX];
    struct tensor d_whole = tensor_new(f, s->qkv.n, 0);
    struct tensor scratch = tensor_new(f, f->dev.ops->attention_scratch(&s->own), 0);
    for (size_t r = 0; r < s->n; r++) {
        qkv[r] = take(s, r, &s->qkv, width);
        kv[r] = keys_values_of(s, &qkv[r]);
        d_kv[r] = tensor_new(f, kv[r].n, 0);
        d_qkv[r] = tensor_new(f, qkv[r].n, 1); /* overwritten, not added to */
    }
    for (size_t r = 0; r < s->n; r++) {
        struct tensor out = tensor_new(f, s->out.n / s->n, 1),
                      d_out = take(s, r, &s->d_out, out_width);
        struct tensor log_sum = tensor_new(f, s->own.n_samples * s->own.n_heads * s->own.seq, 1);
        struct tensor share = tensor_new(f, kv[0].n, 1);
        struct mb_attention_part part = {.shape = s->own,
                                         .queries = stretches_of(s, r),
                                         .qkv = qkv[r].dev,
                                         .scratch = scratch.dev,
                                         .all_heads = s->whole.n_heads,
                                         .all_seq = s->whole.seq,
                                         .dropout = s->dropout};
        for (size_t t = 0; t < 2 * s->n; t++) { /* forward, own keys first; backward, own last */
            const size_t from = (r + t + (t < s->n ? 0 : 1)) % s->n;
            part.keys = stretches_of(s, from);
            part.kv = kv[from].dev;
            struct mb_attention_part_forward a = {
                .part = part, .out = out.dev, .log_sum = log_sum.dev, .joins = t > 0};
            struct mb_attention_part_backward b = {.part = part,
                                                   .out = out.dev,
                                                   .log_sum = log_sum.dev,
                                                   .d_out = d_out.dev,
                                                   .d_qkv = d_qkv[r].dev,
                                                   .d_kv = share.dev,
                                                   .joins = t > s->n};
            if (t < s->n) {
                RUN_OP(f, attention_part_forward, a);
                continue;
            }
            RUN_OP(f, attention_part_backward, b);
            f->dev.ops->axpy(f->dev.ctx, f->dev.stream, d_kv[from].dev, share.dev, share.n, 1);
        }
        put(s, r, &out, &s->out, out_width);
    }
    for (size_t r = 0; r < s->n; r++) {
        struct mb_keys_values a = {.shape = s->own, .qkv = d_qkv[r].dev, .kv = d_kv[r].dev};
        RUN_OP(f, keys_values_put, a);
        put(s, r, &d_qkv[r], &d_whole, width);
    }
    value(s);
    assert_close("attention in parts", s->out.host, s->out.ref, s->out.n, 2e-6);
    assert_gradient("attention in parts, d_qkv", d_whole.host, s->qkv.ref, s->qkv.n, value, s,
                    1e-5);
}

/* The last is more than one block of queries, whose ends lie in the middle of a stretch. */
static void test_parts(void **state)
{
    static const struct {
        struct mb_attention_shape shape;
        size_t n;
    } CASES[] = {{{1, 4, 1, 1, 1}, 2},  {{2, 12, 2, 2, 3}, 2}, {{2, 12, 3, 1, 2}, 3},
                 {{1, 18, 4, 2, 4}, 3}, {{1, 8, 2, 1, 5}, 1},  {{1, 152, 1, 1, 1}, 2}};
    fixture_needs(*state, MB_FEATURE_SPREAD_SAMPLES);
    for (size_t k = 0; k < 2 * COUNT(CASES); k++) {
        void *own = NULL; /* many tensors: each case has a fixture */
        assert_int_equal(fixture_setup(&own), 0);
        struct spread s = {.f = own, .whole = CASES[k / 2].shape, .n = CASES[k / 2].n};
        const size_t rows = s.whole.n_samples * s.whole.seq;
        s.own = s.whole;
        s.own.seq /= s.n;
        s.dropout = (struct mb_dropout){.seed = 5,
                                        .iteration = 2,
                                        .site = 9,
                                        .first_element = 13,
                                        .probability = k % 2 ? 0.25f : 0};
        s.qkv = tensor_new(s.f, rows * width_of(&s.whole), 2);
        s.out = tensor_new(s.f, rows * s.whole.n_heads * s.whole.head_dim, 0);
        s.d_out = tensor_new(s.f, s.out.n, 1);
        check(&s);
        assert_int_equal(fixture_teardown(&own), 0);
    }
}

/* The queries' gradient is not what keys_values_put writes. */
static void test_put_leaves_queries_alone(void **state)
{
    struct fixture *f = *state;
    const struct mb_attention_shape shape = {2, 3, 4, 2, 2};
    fixture_needs(f, MB_FEATURE_SPREAD_SAMPLES);
    struct tensor qkv = tensor_new(f, 6 * width_of(&shape), 1), kv = tensor_new(f, 6 * 8, 1);
    struct mb_keys_values a = {.shape = shape, .qkv = qkv.dev, .kv = kv.dev};
    RUN_OP(f, keys_values_put, a);
    for (size_t i = 0; i < 6 * 2; i++) /* per group: two queries, a key, a value */
        memcpy(qkv.ref + i * 8 + 4, kv.ref + i * 4, 4 * sizeof(*kv.ref));
    assert_tensor(f, "keys and values put", &qkv, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FIXTURE_TEST(test_parts),
        FIXTURE_TEST(test_put_leaves_queries_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
