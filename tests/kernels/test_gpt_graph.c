/*
 * Passes that are captured and run again give the bits of passes that are not: losses and weights
 * of 20 steps with dropout, of two micro batches each, with a learning rate, a scale of the loss
 * and batches that change from step to step, and evaluations between. On a device without graphs
 * they are the recorder's.
 */
#include "fixture.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "recorder.h"
#include "worker/kernels/philox.h"
#include "worker/model/gpt.h"
#include "worker/model/optimizer.h"

enum { STEPS = 20, SAMPLES = 2, SEQ = 64, TOKENS = SAMPLES * SEQ, VOCAB = 120, MICRO = 2 };
enum { EVALUATE_EVERY = 5, NEVER = -1 };

struct run {
    double losses[STEPS], evaluations[STEPS / EVALUATE_EVERY];
    float *weights;
    size_t n_weights;
    char failure[128];
};

static struct mb_gpt_config small(enum mb_dtype dtype, float dropout)
{
    struct mb_gpt_config c;
    mb_gpt_config_init(&c);
    c.n_layers = 2;
    c.hidden = 128;
    c.n_heads = 2; /* of 64 channels: GPUs take matrix units */
    c.seq = c.max_positions = SEQ;
    c.vocab = VOCAB;
    c.padded_vocab = 128;
    c.hidden_dropout = c.attention_dropout = dropout;
    c.dtype = dtype;
    return c;
}

static struct mb_gpt_config small_llama(enum mb_dtype dtype, float dropout)
{
    struct mb_gpt_config c = small(dtype, dropout);
    c.norm = MB_GPT_RMSNORM;
    c.positions = MB_GPT_ROPE;
    c.swiglu = c.norm_1p = c.untie_output = 1;
    c.linear_bias = c.qkv_bias = 0;
    c.recompute_layers = 1;
    return c;
}

static void draw_batch(int32_t *ids, uint32_t number)
{
    for (size_t i = 0; i <= TOKENS; i++)
        ids[i] = (int32_t)(mb_philox(7, i, number, 0).word[0] % VOCAB);
}

static double take_loss(struct mb_gpt *m)
{
    struct mb_err err = {0};
    double sum, n;
    if (mb_gpt_take_loss(m, &sum, &n, &err) != 0)
        fail_msg("%s", err.text);
    return sum / n;
}

static double evaluate(struct mb_gpt *m, uint32_t number)
{
    int32_t ids[TOKENS + 1];
    struct mb_err err = {0};
    for (uint32_t k = 0; k < MICRO; k++) {
        draw_batch(ids, number + k);
        const struct mb_gpt_batch batch = {.tokens = ids, .labels = ids + 1};
        if (mb_gpt_forward(m, &batch, &err) != 0)
            fail_msg("%s", err.text);
    }
    return take_loss(m);
}

struct seen { /* by mb_gpt_grads_final_cb */
    size_t n_calls;
};

static void count_final(void *arg, size_t begin, size_t end)
{
    struct seen *seen = arg;
    assert_true(begin < end);
    seen->n_calls++;
}

/* tells_from: from this step on the last micro batch's pass says which gradients are final. */
static void train(struct mb_device *dev, const struct mb_gpt_config *c, int tells_from,
                  struct run *out)
{
    struct mb_gpt *m = NULL;
    struct mb_optimizer *o = NULL;
    struct mb_optimizer_config oc;
    struct mb_err err = {0};
    struct seen seen = {0};
    int32_t ids[TOKENS + 1];
    size_t n_params;
    mb_optimizer_config_init(&oc);
    if (mb_gpt_create(dev, c, SAMPLES, &m, &err) != 0)
        fail_msg("%s", err.text);
    const struct mb_param *p = mb_gpt_params(m, &n_params);
    if (mb_optimizer_create(dev, &oc, p, n_params, mb_gpt_master(m), mb_gpt_grads(m), 0,
                            mb_gpt_n_elements(m), &o, &err) != 0)
        fail_msg("%s", err.text);
    for (int i = 0; i < STEPS; i++) {
        const double scale = (c->dtype == MB_DTYPE_F16 ? 1024 : 1) * (i % 3 == 0 ? 2 : 1);
        mb_gpt_zero_grads(m);
        for (uint32_t k = 0; k < MICRO; k++) {
            draw_batch(ids, (uint32_t)i * MICRO + k);
            const struct mb_gpt_batch batch = {.tokens = ids, .labels = ids + 1};
            struct mb_gpt_step step = {.grad_scale = scale / (TOKENS * MICRO),
                                       .iteration = i + 1,
                                       .first_sample = k * SAMPLES,
                                       .is_last = k + 1 == MICRO};
            if (step.is_last && tells_from != NEVER && i >= tells_from) {
                step.grads_final = count_final;
                step.arg = &seen;
            }
            if (mb_gpt_forward_backward(m, &batch, &step, &err) != 0)
                fail_msg("step %d: %s", i, err.text);
        }
        out->losses[i] = take_loss(m);
        mb_optimizer_step(o, 1e-3 / (i + 1), 0.01, 1 / scale);
        mb_gpt_weights_changed(m);
        if ((i + 1) % EVALUATE_EVERY == 0)
            out->evaluations[i / EVALUATE_EVERY] = evaluate(m, 1000 + (uint32_t)i);
    }
    if (tells_from != NEVER)
        assert_int_equal(seen.n_calls, (c->n_layers + 2) * (size_t)(STEPS - tells_from));
    out->n_weights = mb_gpt_n_elements(m);
    out->weights = mb_calloc(out->n_weights, sizeof(float));
    assert_non_null(out->weights);
    mb_master_copy_out(dev, mb_gpt_master(m), 0, out->n_weights, out->weights);
    assert_int_equal(dev->ops->synchronize(dev->ctx, dev->stream, &err), 0);
    const char *failure = mb_gpt_graphs_failure(m);
    snprintf(out->failure, sizeof(out->failure), "%s", failure != NULL ? failure : "");
    mb_optimizer_destroy(o);
    mb_gpt_destroy(m);
}

static void assert_same_bits(struct run *a, struct run *b)
{
    assert_memory_equal(a->losses, b->losses, sizeof(a->losses));
    assert_memory_equal(a->evaluations, b->evaluations, sizeof(a->evaluations));
    assert_int_equal(a->n_weights, b->n_weights);
    assert_memory_equal(a->weights, b->weights, a->n_weights * sizeof(float));
    assert_true(fabs(a->losses[STEPS - 1] - a->losses[0]) > 1e-4); /* weights move */
    mb_free(a->weights);
    mb_free(b->weights);
}

/* Twice, with graphs and without. Of a kind all passes but the first are graphs: of training
 * forward, and backward that sets gradients and that adds to them; clearing them; what follows
 * from new weights, which are there before the first step, too; evaluation. */
static void check(struct fixture *f, struct mb_gpt_config c, int tells_from)
{
    const struct mb_backend *own = f->dev.ops;
    const size_t told = tells_from == NEVER ? 0 : (size_t)(STEPS - tells_from);
    const size_t n_evaluations = STEPS / EVALUATE_EVERY * MICRO;
    struct run plain, captured;
    train(&f->dev, &c, tells_from, &plain);
    f->dev.ops = own->graph_begin != NULL ? recorder_counts(own) : recorder_over(own);
    c.graphs = 1;
    train(&f->dev, &c, tells_from, &captured);
    const size_t n_runs = recorder_runs();
    f->dev.ops = own;
    assert_string_equal(captured.failure, "");
    assert_same_bits(&plain, &captured);
    assert_int_equal(n_runs, (STEPS * MICRO - 1) + (STEPS - 1) + (STEPS - 1 - told) + (STEPS - 1) +
                                 STEPS + (n_evaluations - 1));
}

static void test_same_bits(void **state)
{
    struct fixture *f = *state;
    for (unsigned d = 0; d < 3; d++) {
        const enum mb_dtype dtype = (enum mb_dtype)d;
        if ((f->dev.ops->dtypes >> d & 1) == 0)
            continue;
        check(f, small(dtype, 0.1f), NEVER);
        check(f, small(dtype, 0), NEVER); /* GPUs: cuDNN's attention */
        check(f, small_llama(dtype, 0.1f), NEVER);
        check(f, small_llama(dtype, 0), NEVER);
    }
}

static void test_same_bits_in_fp8(void **state)
{
    struct fixture *f = *state;
    struct mb_err err = {0};
    fixture_needs(f, MB_FEATURE_FP8);
    if (f->dev.ops->fp8_check(f->dev.ctx, &err) != 0)
        skip();
    struct mb_gpt_config c = small_llama(MB_DTYPE_BF16, 0.1f);
    c.fp8 = MB_GPT_FP8_HYBRID;
    check(f, c, NEVER);
}

static void test_a_pass_that_tells_runs_as_it_is(void **state)
{
    check(*state, small(MB_DTYPE_F32, 0.1f), 3);
}

/* What was captured before goes unused, too. */
static void test_a_capture_that_fails(void **state)
{
    struct fixture *f = *state;
    const struct mb_backend *own = f->dev.ops;
    struct mb_gpt_config c = small(MB_DTYPE_F32, 0.1f);
    const int has_own = own->graph_begin != NULL;
    for (size_t at = 1; at <= (has_own ? 1 : 4); at++) {
        struct run plain, failed;
        c.graphs = 0;
        train(&f->dev, &c, NEVER, &plain);
        f->dev.ops = has_own ? recorder_breaks(own) : recorder_over(own);
        recorder_fails_at(at);
        c.graphs = 1;
        train(&f->dev, &c, NEVER, &failed);
        recorder_fails_at(0);
        f->dev.ops = own;
        if (has_own)
            assert_string_not_equal(failed.failure, "");
        else
            assert_string_equal(failed.failure, "the recorder is full");
        assert_same_bits(&plain, &failed);
    }
}

static void test_refused(void **state)
{
    struct fixture *f = *state;
    struct mb_gpt_config c = small(MB_DTYPE_F32, 0);
    const struct mb_backend *own = f->dev.ops;
    if (own->graph_begin == NULL)
        assert_string_equal(mb_gpt_graphs_refused(&f->dev, &c), "this device has none");
    f->dev.ops = own->graph_begin != NULL ? own : recorder_over(own);
    assert_null(mb_gpt_graphs_refused(&f->dev, &c));
    c.n_tensor_parts = 2;
    assert_non_null(strstr(mb_gpt_graphs_refused(&f->dev, &c), "share a model"));
    c.n_tensor_parts = 0;
    c.n_context_parts = 2;
    assert_non_null(strstr(mb_gpt_graphs_refused(&f->dev, &c), "share samples"));
    c.n_context_parts = 0;
    c.batch_positions = 1;
    assert_non_null(strstr(mb_gpt_graphs_refused(&f->dev, &c), "begin anew"));
    f->dev.ops = own;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FIXTURE_TEST(test_same_bits),
        FIXTURE_TEST(test_same_bits_in_fp8),
        FIXTURE_TEST(test_a_pass_that_tells_runs_as_it_is),
        FIXTURE_TEST(test_a_capture_that_fails),
        FIXTURE_TEST(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
