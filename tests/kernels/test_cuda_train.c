/*
 * Training on the GPU against training on the CPU: 100 steps of one model from one seed, with and
 * without dropout. Losses of fp32 stay within 1e-4 of the CPU's, those of bf16 within 2e-2, those
 * of fp16, whose loss is scaled, within 5e-3, all as shares of the CPU's loss in fp32. A second run
 * gives the same bits. What the CPU refuses, and how much memory is asked for, is told in one line.
 */
#include "twin.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/kernels/philox.h"
#include "worker/model/gpt.h"
#include "worker/model/optimizer.h"

static const double LOSS_SCALE = 4096; /* of fp16 */

enum { STEPS = 100, SAMPLES = 4, SEQ = 96, TOKENS = SAMPLES * SEQ, VOCAB = 500 };

struct run {
    double losses[STEPS];
    float *weights;
    size_t n_weights;
};

static struct mb_gpt_config small(double dropout, enum mb_dtype dtype)
{
    struct mb_gpt_config c;
    mb_gpt_config_init(&c);
    c.n_layers = 3;
    c.hidden = 256;
    c.n_heads = 4; /* of 64 channels: bf16 takes matrix units */
    c.n_groups = 2;
    c.seq = c.max_positions = SEQ;
    c.vocab = VOCAB;
    c.padded_vocab = 512;
    c.hidden_dropout = c.attention_dropout = (float)dropout;
    c.dtype = dtype;
    return c;
}

static struct mb_gpt_config small_llama(void)
{
    struct mb_gpt_config c = small(0, MB_DTYPE_F32);
    c.norm = MB_GPT_RMSNORM;
    c.positions = MB_GPT_ROPE;
    c.swiglu = 1;
    c.linear_bias = c.qkv_bias = 0;
    c.untie_output = 1;
    return c;
}

/* Text that can be learned: a token follows from the one before, but for a random one in eight. */
static void draw_batch(int32_t *ids, uint64_t step)
{
    for (size_t i = 0; i <= TOKENS; i++) {
        struct mb_philox r = mb_philox(99, i, (uint32_t)step, 0);
        int32_t after = i == 0 ? 0 : (int32_t)(((int64_t)ids[i - 1] * 7 + 3) % VOCAB);
        ids[i] = r.word[0] % 8 == 0 ? (int32_t)(r.word[1] % VOCAB) : after;
    }
}

static void train(struct mb_device *dev, const struct mb_gpt_config *c, struct run *out)
{
    struct mb_gpt *m = NULL;
    struct mb_optimizer *o = NULL;
    struct mb_optimizer_config oc;
    struct mb_err err = {0};
    int32_t ids[TOKENS + 1];
    size_t n_params;
    mb_optimizer_config_init(&oc);
    const double scale = c->dtype == MB_DTYPE_F16 ? LOSS_SCALE : 1;
    if (mb_gpt_create(dev, c, SAMPLES, &m, &err) != 0)
        fail_msg("%s", err.text);
    const struct mb_param *p = mb_gpt_params(m, &n_params);
    if (mb_optimizer_create(dev, &oc, p, n_params, mb_gpt_master(m), mb_gpt_grads(m), 0,
                            mb_gpt_n_elements(m), &o, &err) != 0)
        fail_msg("%s", err.text);
    for (int i = 0; i < STEPS; i++) {
        struct mb_gpt_batch batch = {.tokens = ids, .labels = ids + 1};
        struct mb_gpt_step step = {.grad_scale = scale / TOKENS, .iteration = i + 1};
        double sum, n, norm2;
        draw_batch(ids, (uint64_t)i);
        mb_gpt_zero_grads(m);
        if (mb_gpt_forward_backward(m, &batch, &step, &err) != 0 ||
            mb_gpt_take_loss(m, &sum, &n, &err) != 0 ||
            mb_optimizer_squared_norm(o, &norm2, &err) != 0)
            fail_msg("step %d: %s", i, err.text);
        assert_true(isfinite(norm2)); /* nothing overflows */
        mb_optimizer_step(o, 3e-4, 0.01, mb_optimizer_clip(sqrt(norm2) / scale, 1) / scale);
        mb_gpt_weights_changed(m);
        out->losses[i] = sum / n;
    }
    out->n_weights = mb_gpt_n_elements(m);
    out->weights = mb_calloc(out->n_weights, sizeof(float));
    assert_non_null(out->weights);
    mb_master_copy_out(dev, mb_gpt_master(m), 0, out->n_weights, out->weights);
    assert_int_equal(dev->ops->synchronize(dev->ctx, dev->stream, &err), 0);
    mb_optimizer_destroy(o);
    mb_gpt_destroy(m);
}

static void compare(const char *what, const struct run *got, const struct run *want, double bound)
{
    double worst = 0;
    for (int i = 0; i < STEPS; i++) {
        double d = fabs(got->losses[i] - want->losses[i]) / want->losses[i];
        if (!(d <= worst))
            worst = d;
    }
    printf("  %s: loss %.6f to %.6f, CPU's to %.6f, at most %.2e apart (bound %.0e)\n", what,
           got->losses[0], got->losses[STEPS - 1], want->losses[STEPS - 1], worst, bound);
    if (!(worst <= bound))
        fail_msg("%s: losses are %.3e apart, bound %.1e", what, worst, bound);
    assert_true(want->losses[STEPS - 1] < 0.75 * want->losses[0]); /* it learns */
}

static void check_narrow(struct twin *t, struct mb_gpt_config c, enum mb_dtype dtype,
                         const struct run *cpu, const char *what, double bound)
{
    struct run first, again;
    c.dtype = dtype;
    train(&t->gpu, &c, &first);
    train(&t->gpu, &c, &again);
    compare(what, &first, cpu, bound);
    assert_memory_equal(first.losses, again.losses, sizeof(first.losses));
    assert_memory_equal(first.weights, again.weights, first.n_weights * sizeof(float));
    mb_free(first.weights);
    mb_free(again.weights);
}

static void check_training(struct twin *t, struct mb_gpt_config exact)
{
    struct run cpu, fp32;
    train(&t->cpu, &exact, &cpu);
    train(&t->gpu, &exact, &fp32);
    compare("fp32", &fp32, &cpu, 1e-4);
    check_narrow(t, exact, MB_DTYPE_BF16, &cpu, "bf16", 2e-2);
    check_narrow(t, exact, MB_DTYPE_F16, &cpu, "fp16", 5e-3);
    mb_free(cpu.weights);
    mb_free(fp32.weights);
}

static void test_training(void **state)
{
    check_training(*state, small(0, MB_DTYPE_F32));
}

static void test_training_with_dropout(void **state)
{
    check_training(*state, small(0.1, MB_DTYPE_F32));
}

static void test_training_llama(void **state)
{
    check_training(*state, small_llama());
}

static void test_training_layernorm_1p(void **state)
{
    struct mb_gpt_config c = small(0, MB_DTYPE_F32);
    c.norm_1p = 1;
    check_training(*state, c);
}

static void test_cpu_has_no_bf16(void **state)
{
    struct twin *t = *state;
    struct mb_gpt_config c = small(0, MB_DTYPE_BF16);
    struct mb_gpt *m = NULL;
    struct mb_err err = {0};
    assert_int_equal(mb_gpt_create(&t->cpu, &c, 1, &m, &err), MB_EUNSUPPORTED);
    assert_string_equal(err.text, "the cpu backend has no bf16");
}

static void test_out_of_memory(void **state)
{
    struct twin *t = *state;
    struct mb_gpt_config c = small(0, MB_DTYPE_BF16);
    struct mb_gpt *m = NULL;
    struct mb_err err = {0};
    c.hidden = 1 << 16;
    assert_int_equal(mb_gpt_create(&t->gpu, &c, 1, &m, &err), MB_ENOMEM);
    assert_null(m);
    assert_non_null(strstr(err.text, "the model needs "));
    assert_non_null(strstr(err.text, "a smaller micro batch needs less"));
    c.hidden = 256; /* and afterwards all is well */
    assert_int_equal(mb_gpt_create(&t->gpu, &c, 1, &m, &err), 0);
    mb_gpt_destroy(m);
}

int main(void)
{
    /* Timings choose between products of equal value and different bits; runs are compared here. */
    setenv("MOBULA_CUDA_TUNE", "0", 1);
    const struct CMUnitTest tests[] = {
        TWIN_TEST(test_training),        TWIN_TEST(test_training_with_dropout),
        TWIN_TEST(test_training_llama),  TWIN_TEST(test_training_layernorm_1p),
        TWIN_TEST(test_cpu_has_no_bf16), TWIN_TEST(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
