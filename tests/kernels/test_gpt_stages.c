/*
 * A model in stages, of one chunk of layers each or of several: with several micro batches between
 * their forward and backward passes, the stages together give the loss and the gradients of the
 * whole model (within 1e-6 of the largest of the tensor: biases below a chunk's edge are summed in
 * another order).
 */
#include "gpt_reference.h"

#include <string.h>
#include "base/alloc.h"

enum { MICRO = 3, STAGES_MAX = 4, ALL_LAYERS = 4, PARAM_MAX = 512 };

static struct mb_gpt_config model(void)
{
    struct mb_gpt_config c;
    mb_gpt_config_init(&c);
    c.n_layers = ALL_LAYERS;
    c.hidden = HIDDEN;
    c.ffn_hidden = 12;
    c.n_heads = 4;
    c.seq = SEQ;
    c.max_positions = SEQ + 1;
    c.vocab = VOCAB;
    c.padded_vocab = PADDED;
    c.init_std = 0.3f;
    c.hidden_dropout = c.attention_dropout = 0.25f;
    return c;
}

struct stages {
    struct fixture *f;
    size_t n, n_chunks; /* chunk c of stage s is the n * c + s th of all */
    struct mb_gpt *m[STAGES_MAX];
    struct mb_gpt_batch batch[MICRO];
};

static void create(struct stages *s, struct fixture *f, struct mb_gpt_config c, size_t n,
                   size_t n_chunks)
{
    struct mb_err err = {0};
    s->f = f;
    s->n = n;
    s->n_chunks = n_chunks;
    c.n_stages = n;
    c.n_chunks = n_chunks;
    for (size_t i = 0; i < n; i++) {
        c.own_stage = i;
        c.n_in_flight = MICRO * n_chunks;
        if (mb_gpt_create(&f->dev, &c, SAMPLES, &s->m[i], &err) != 0)
            fail_msg("%s", err.text);
    }
}

static void destroy(struct stages *s)
{
    for (size_t i = 0; i < s->n; i++)
        mb_gpt_destroy(s->m[i]);
}

/* As if it were sent. */
static void move(struct stages *s, void *to, const void *from, size_t n)
{
    float host[TOKENS * HIDDEN];
    assert_true(n <= COUNT(host));
    s->f->dev.ops->copy_out(s->f->dev.ctx, s->f->dev.stream, host, from, n * sizeof(*host));
    synchronize(s->f);
    s->f->dev.ops->copy_in(s->f->dev.ctx, s->f->dev.stream, to, host, n * sizeof(*host));
}

static struct mb_gpt_step step_of(size_t k)
{
    return (struct mb_gpt_step){.grad_scale = 0.125 / MICRO,
                                .iteration = 17,
                                .first_sample = k * SAMPLES,
                                .is_last = k + 1 == MICRO};
}

static struct mb_gpt *model_of(const struct stages *s, size_t i)
{
    return s->m[i % s->n];
}

/* Of the i th chunk of all. The last stage has one slot if it has one chunk. */
static struct mb_gpt_place place_of(const struct stages *s, size_t i, size_t k)
{
    const size_t chunk = i / s->n;
    if (s->n_chunks == 1)
        return (struct mb_gpt_place){0, i + 1 < s->n ? k : 0, 0};
    return (struct mb_gpt_place){chunk, MICRO * chunk + k, (i + k) % 2};
}

static void forward(struct stages *s, size_t i, size_t k)
{
    const struct mb_gpt_step step = step_of(k);
    const struct mb_gpt_place at = place_of(s, i, k);
    const int is_at_end = i == 0 || i + 1 == s->n * s->n_chunks;
    if (i > 0) {
        const struct mb_gpt_ports from = mb_gpt_ports(model_of(s, i - 1), place_of(s, i - 1, k)),
                                  to = mb_gpt_ports(model_of(s, i), at);
        move(s, to.in, from.out, to.n);
    }
    assert_int_equal(
        mb_gpt_stage_forward(model_of(s, i), at, is_at_end ? &s->batch[k] : NULL, &step, NULL), 0);
}

/* All forward passes but the last chunk's, then what is left, a micro batch after the other. */
static void train(struct stages *s)
{
    const size_t last = s->n * s->n_chunks - 1;
    for (size_t i = 0; i < s->n; i++)
        mb_gpt_zero_grads(s->m[i]);
    for (size_t k = 0; k < MICRO; k++)
        for (size_t i = 0; i < last; i++)
            forward(s, i, k);
    for (size_t k = 0; k < MICRO; k++) {
        const struct mb_gpt_step step = step_of(k);
        forward(s, last, k);
        mb_gpt_stage_backward(model_of(s, last), place_of(s, last, k), &step);
        for (size_t i = last; i-- > 0;) {
            const struct mb_gpt_place at = place_of(s, i, k);
            const struct mb_gpt_ports from =
                                          mb_gpt_ports(model_of(s, i + 1), place_of(s, i + 1, k)),
                                      to = mb_gpt_ports(model_of(s, i), at);
            move(s, to.gradient, from.gradient, to.n);
            mb_gpt_stage_backward(model_of(s, i), at, &step);
        }
    }
}

/* To be freed. */
static float *flat(struct stages *s, size_t i, int of_grads)
{
    const size_t n = mb_gpt_n_elements(s->m[i]);
    float *host = mb_calloc(n, sizeof(*host));
    assert_non_null(host);
    s->f->dev.ops->copy_out(s->f->dev.ctx, s->f->dev.stream, host,
                            of_grads ? mb_gpt_grads(s->m[i]) : mb_gpt_weights(s->m[i]),
                            n * sizeof(*host));
    synchronize(s->f);
    return host;
}

/* Of a parameter of the whole model: what the stages have. The number of stages that have it. */
static size_t add_stages(struct stages *s, const struct mb_param *p, const float *want_w,
                         float *sum)
{
    size_t n_found = 0;
    for (size_t i = 0; i < s->n; i++) {
        size_t n_own = 0;
        const struct mb_param *own = mb_gpt_params(s->m[i], &n_own);
        float *w = flat(s, i, 0), *g = flat(s, i, 1);
        for (size_t o = 0; o < n_own; o++) {
            if (strcmp(own[o].name, p->name) != 0)
                continue;
            assert_int_equal(own[o].is_copy, n_found > 0);
            n_found++;
            assert_memory_equal(w + own[o].offset, want_w, p->n * sizeof(*w));
            for (size_t e = 0; e < p->n; e++)
                sum[e] += g[own[o].offset + e];
        }
        mb_free(w);
        mb_free(g);
    }
    return n_found;
}

/* Every parameter of the whole model is that of one stage, or the embedding's sum of two. */
static void compare(struct stages *whole, struct stages *s, int is_tied)
{
    size_t n_params = 0;
    const struct mb_param *p = mb_gpt_params(whole->m[0], &n_params);
    float *want_w = flat(whole, 0, 0), *want_g = flat(whole, 0, 1);
    for (size_t k = 0; k < n_params; k++) {
        double want[PARAM_MAX];
        float sum[PARAM_MAX] = {0};
        assert_true(p[k].n <= PARAM_MAX);
        for (size_t e = 0; e < p[k].n; e++)
            want[e] = (double)want_g[p[k].offset + e];
        assert_int_equal(add_stages(s, &p[k], want_w + p[k].offset, sum),
                         k == 0 && is_tied ? 2 : 1);
        assert_close(p[k].name, sum, want, p[k].n, 1e-6);
    }
    mb_free(want_w);
    mb_free(want_g);
}

static void check_stages(struct fixture *f, const struct mb_gpt_config *c, size_t n,
                         size_t n_chunks)
{
    struct stages whole = {0}, s = {0};
    double loss, want, n_tokens;
    int32_t *unused;
    create(&whole, f, *c, 1, 1);
    create(&s, f, *c, n, n_chunks);
    for (size_t k = 0; k < MICRO; k++)
        whole.batch[k] = s.batch[k] =
            (struct mb_gpt_batch){.tokens = ids_new(f, TOKENS, VOCAB, &unused),
                                  .labels = ids_new(f, TOKENS, VOCAB, &unused)};
    for (int times = 0; times < 2; times++) { /* the second sets what the first added to zeros */
        train(&whole);
        train(&s);
        assert_int_equal(mb_gpt_take_loss(whole.m[0], &want, &n_tokens, NULL), 0);
        assert_true(n_tokens == MICRO * TOKENS);
        for (size_t i = 0; i < n; i++) {
            assert_int_equal(mb_gpt_take_loss(s.m[i], &loss, &n_tokens, NULL), 0);
            assert_true(n_tokens == (i + 1 == n ? MICRO * TOKENS : 0));
        }
        assert_true(loss > 0 && loss - want < 1e-6 * want && want - loss < 1e-6 * want);
    }
    compare(&whole, &s, !c->untie_output);
    destroy(&s);
    destroy(&whole);
}

static void test_stages(void **state)
{
    static const size_t SPLITS[][3] = {{2, 1, 4}, {4, 1, 4}, {2, 2, 4}, {2, 2, 8}, {2, 4, 8}};
    for (size_t i = 0; i < COUNT(SPLITS); i++)
        for (int form = 0; form < 3; form++) {
            struct mb_gpt_config c = model();
            c.n_layers = SPLITS[i][2];
            if (form > 0)
                c.hidden_dropout = c.attention_dropout = 0;
            c.untie_output = form == 2;
            c.recompute_layers = form == 1 ? 1 : 0;
            check_stages(*state, &c, SPLITS[i][0], SPLITS[i][1]);
        }
}

/* In whatever order, all of it, and none of it twice. */
struct told {
    size_t begin; /* of what has been told: up to the end */
};

static void tell(void *arg, size_t begin, size_t end)
{
    struct told *t = arg;
    assert_int_equal(end, t->begin);
    assert_true(begin < end);
    t->begin = begin;
}

/* Gradients become final from the end of the buffer to its start, over all chunks of a stage. */
static void test_final_gradients(void **state)
{
    struct fixture *f = *state;
    struct stages s = {0};
    int32_t *unused;
    struct told told[STAGES_MAX];
    const size_t last = 3;
    create(&s, f, model(), 2, 2);
    s.batch[0] = (struct mb_gpt_batch){.tokens = ids_new(f, TOKENS, VOCAB, &unused),
                                       .labels = ids_new(f, TOKENS, VOCAB, &unused)};
    for (size_t i = 0; i < s.n; i++) {
        told[i].begin = mb_gpt_n_elements(s.m[i]);
        mb_gpt_zero_grads(s.m[i]);
    }
    for (size_t i = 0; i <= last; i++)
        forward(&s, i, 0);
    for (size_t i = last + 1; i-- > 0;) {
        struct mb_gpt_step step = step_of(0);
        step.is_last = 1;
        step.grads_final = tell;
        step.arg = &told[i % s.n];
        mb_gpt_stage_backward(model_of(&s, i), place_of(&s, i, 0), &step);
        assert_int_equal(told[i % s.n].begin == 0, i < s.n);
    }
    destroy(&s);
}

static void test_refusals(void **state)
{
    struct fixture *f = *state;
    const struct {
        size_t n_stages, own_stage, n_chunks;
        const char *text;
    } bad[] = {{3, 0, 0, "divisible by the pipeline-model-parallel size"},
               {2, 2, 0, "divisible by the pipeline-model-parallel size"},
               {2, 0, 3, "4 layers on 2 stages cannot be 3 chunks on each"},
               {0, 0, 2, "4 layers on 1 stages cannot be 2 chunks on each"}};
    for (size_t i = 0; i < COUNT(bad); i++) {
        struct mb_gpt_config c = model();
        struct mb_gpt *m = NULL;
        struct mb_err err = {0};
        c.n_stages = bad[i].n_stages;
        c.own_stage = bad[i].own_stage;
        c.n_chunks = bad[i].n_chunks;
        assert_int_equal(mb_gpt_create(&f->dev, &c, 1, &m, &err), MB_EINVAL);
        assert_non_null(strstr(err.text, bad[i].text));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FIXTURE_TEST(test_stages),
        FIXTURE_TEST(test_final_gradients),
        FIXTURE_TEST(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
