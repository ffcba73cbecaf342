/*
 * The optimizer against Adam in double. Tolerance after ten steps: 2e-6 of the largest weight, and
 * the same for the states.
 */
#include "fixture.h"

#include <math.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/kernels/split.h"
#include "worker/model/optimizer.h"

/* 2-D, 1-D, 2-D, 1-D, 1-D; gaps behind the second and the fourth. */
enum { N_ELEMENTS = 128, N_PARAMS = 5 };
static const struct mb_param PARAMS[N_PARAMS] = {
    {.name = "a.weight", .shape = {4, 8}, .n_dims = 2, .offset = 0, .n = 32},
    {.name = "a.bias", .shape = {9, 1}, .n_dims = 1, .offset = 32, .n = 9, .no_weight_decay = 1},
    {.name = "b.weight", .shape = {4, 4}, .n_dims = 2, .offset = 48, .n = 16},
    {.name = "b.bias", .shape = {17, 1}, .n_dims = 1, .offset = 64, .n = 17, .no_weight_decay = 1},
    {.name = "norm.weight",
     .shape = {32, 1},
     .n_dims = 1,
     .offset = 96,
     .n = 32,
     .no_weight_decay = 1},
};

static struct mb_optimizer *optimizer_of(struct fixture *f, const struct mb_master *w,
                                         struct tensor *g, size_t begin, size_t end)
{
    struct mb_optimizer_config c;
    struct mb_optimizer *o = NULL;
    struct mb_err err = {0};
    mb_optimizer_config_init(&c);
    c.beta2 = 0.95;
    if (mb_optimizer_create(&f->dev, &c, PARAMS, N_PARAMS, w, g->dev, begin, end, &o, &err) != 0)
        fail_msg("%s", err.text);
    return o;
}

static struct mb_optimizer *optimizer_new(struct fixture *f, struct tensor *w, struct tensor *g,
                                          size_t begin, size_t end)
{
    return optimizer_of(f, &(struct mb_master){.whole = w->dev}, g, begin, end);
}

static int decayed(size_t i)
{
    return i < 32 || (i >= 48 && i < 64);
}

static void reference_step(struct tensor *w, const struct tensor *g, double *m, double *v, int t,
                           double lr, double wd, double coefficient)
{
    for (size_t i = 0; i < w->n; i++) {
        double grad = g->ref[i] * coefficient;
        m[i] = 0.9 * m[i] + 0.1 * grad;
        v[i] = 0.95 * v[i] + 0.05 * grad * grad;
        double update = m[i] / (1 - pow(0.9, t)) / (sqrt(v[i] / (1 - pow(0.95, t))) + 1e-8);
        w->ref[i] -= lr * (update + (decayed(i) ? wd : 0) * w->ref[i]);
    }
}

/* Fresh gradients for step t; gaps stay zero. */
static void draw_gradients(struct fixture *f, struct tensor *g)
{
    for (size_t p = 0; p < N_PARAMS; p++)
        for (size_t i = PARAMS[p].offset; i < PARAMS[p].offset + PARAMS[p].n; i++) {
            g->host[i] = (float)(random_unit(f) - 0.5);
            g->ref[i] = (double)g->host[i];
        }
    f->dev.ops->copy_in(f->dev.ctx, f->dev.stream, g->dev, g->host, g->n * sizeof(float));
}

static void test_reference(void **state)
{
    struct fixture *f = *state;
    struct tensor w = tensor_new(f, N_ELEMENTS, 1), g = tensor_new(f, N_ELEMENTS, 0);
    double m[N_ELEMENTS] = {0}, v[N_ELEMENTS] = {0};
    struct mb_optimizer *o = optimizer_new(f, &w, &g, 0, N_ELEMENTS);
    for (int t = 1; t <= 10; t++) {
        double lr = 1e-2 / t, coefficient = t % 2 ? 1 : 0.25;
        draw_gradients(f, &g);
        reference_step(&w, &g, m, v, t, lr, 0.1, coefficient);
        mb_optimizer_step(o, lr, 0.1, coefficient);
    }
    assert_close("weights", tensor_download(f, &w), w.ref, w.n, 2e-6);
    struct tensor s = tensor_new(f, N_ELEMENTS, 0);
    f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, s.host, mb_optimizer_exp_avg(o),
                         sizeof(float) * s.n);
    synchronize(f);
    assert_close("exp_avg", s.host, m, s.n, 2e-6);
    f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, s.host, mb_optimizer_exp_avg_sq(o),
                         sizeof(float) * s.n);
    synchronize(f);
    assert_close("exp_avg_sq", s.host, v, s.n, 2e-6);
    assert_int_equal(mb_optimizer_steps(o), 10);
    mb_optimizer_destroy(o);
}

/* Two shards that cut a parameter give bit for bit what one optimizer gives; so does a step count
 * and a state carried over to another optimizer. */
static void test_shards(void **state)
{
    struct fixture *f = *state;
    struct tensor w = tensor_new(f, N_ELEMENTS, 1), g = tensor_new(f, N_ELEMENTS, 0);
    struct tensor copy = tensor_new(f, N_ELEMENTS, 0);
    f->dev.ops->copy_in(f->dev.ctx, f->dev.stream, copy.dev, w.host, N_ELEMENTS * sizeof(float));
    struct mb_optimizer *whole = optimizer_new(f, &w, &g, 0, N_ELEMENTS);
    struct mb_optimizer *low = optimizer_new(f, &copy, &g, 0, 50);
    struct mb_optimizer *high = optimizer_new(f, &copy, &g, 50, N_ELEMENTS);
    for (int t = 1; t <= 3; t++) {
        double all, a, b;
        draw_gradients(f, &g);
        assert_int_equal(mb_optimizer_squared_norm(whole, &all, NULL), 0);
        assert_int_equal(mb_optimizer_squared_norm(low, &a, NULL), 0);
        assert_int_equal(mb_optimizer_squared_norm(high, &b, NULL), 0);
        assert_true(fabs(all - a - b) < 1e-12 * all);
        mb_optimizer_step(whole, 1e-2, 0.1, 0.5);
        mb_optimizer_step(low, 1e-2, 0.1, 0.5);
        if (t == 2) { /* as a checkpoint does */
            struct mb_optimizer *next = optimizer_new(f, &copy, &g, 50, N_ELEMENTS);
            float states[2][N_ELEMENTS - 50];
            const size_t size = sizeof(states[0]);
            f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, states[0], mb_optimizer_exp_avg(high),
                                 size);
            f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, states[1],
                                 mb_optimizer_exp_avg_sq(high), size);
            synchronize(f);
            f->dev.ops->copy_in(f->dev.ctx, f->dev.stream, mb_optimizer_exp_avg(next), states[0],
                                size);
            f->dev.ops->copy_in(f->dev.ctx, f->dev.stream, mb_optimizer_exp_avg_sq(next), states[1],
                                size);
            mb_optimizer_set_steps(next, mb_optimizer_steps(high));
            mb_optimizer_destroy(high);
            high = next;
        }
        mb_optimizer_step(high, 1e-2, 0.1, 0.5);
    }
    tensor_download(f, &w);
    assert_memory_equal(w.host, tensor_download(f, &copy), N_ELEMENTS * sizeof(float));
    mb_optimizer_destroy(whole);
    mb_optimizer_destroy(low);
    mb_optimizer_destroy(high);
}

/* Some parameters have a learning rate of their own: bit for bit what an optimizer of that rate
 * gives them; whole and cut into shards. */
static void test_decoupled(void **state)
{
    struct fixture *f = *state;
    struct mb_param params[N_PARAMS];
    memcpy(params, PARAMS, sizeof(params));
    params[0].is_embedding_or_output = params[N_PARAMS - 1].is_embedding_or_output = 1;
    struct mb_optimizer_config c;
    struct mb_optimizer *low = NULL, *high = NULL;
    struct tensor w = tensor_new(f, N_ELEMENTS, 1), g = tensor_new(f, N_ELEMENTS, 0);
    struct tensor slow = tensor_new(f, N_ELEMENTS, 0), fast = tensor_new(f, N_ELEMENTS, 0);
    const struct mb_master master = {.whole = w.dev};
    const size_t size = N_ELEMENTS * sizeof(float);
    f->dev.ops->copy_in(f->dev.ctx, f->dev.stream, slow.dev, w.host, size);
    f->dev.ops->copy_in(f->dev.ctx, f->dev.stream, fast.dev, w.host, size);
    mb_optimizer_config_init(&c);
    c.beta2 = 0.95;
    c.decoupled = 1;
    assert_int_equal(
        mb_optimizer_create(&f->dev, &c, params, N_PARAMS, &master, g.dev, 0, 50, &low, NULL), 0);
    assert_int_equal(mb_optimizer_create(&f->dev, &c, params, N_PARAMS, &master, g.dev, 50,
                                         N_ELEMENTS, &high, NULL),
                     0);
    struct mb_optimizer *one = optimizer_new(f, &slow, &g, 0, N_ELEMENTS);
    struct mb_optimizer *other = optimizer_new(f, &fast, &g, 0, N_ELEMENTS);
    for (int t = 1; t <= 3; t++) {
        draw_gradients(f, &g);
        mb_optimizer_step_decoupled(low, 1e-2, 3e-2, 0.1, 0.5);
        mb_optimizer_step_decoupled(high, 1e-2, 3e-2, 0.1, 0.5);
        mb_optimizer_step(one, 1e-2, 0.1, 0.5);
        mb_optimizer_step(other, 3e-2, 0.1, 0.5);
    }
    assert_int_equal(mb_optimizer_steps(low), 3);
    tensor_download(f, &w);
    tensor_download(f, &slow);
    tensor_download(f, &fast);
    for (size_t k = 0; k < N_PARAMS; k++) {
        const struct tensor *want = params[k].is_embedding_or_output ? &fast : &slow;
        assert_memory_equal(w.host + params[k].offset, want->host + params[k].offset,
                            params[k].n * sizeof(float));
    }
    mb_optimizer_destroy(low);
    mb_optimizer_destroy(high);
    mb_optimizer_destroy(one);
    mb_optimizer_destroy(other);
}

static void *device_memory(struct fixture *f, size_t size_bytes)
{
    void *p = NULL;
    assert_int_equal(f->dev.ops->alloc(f->dev.ctx, size_bytes, &p, NULL), 0);
    return p;
}

/* Weights in halves, whole or cut into shards at an odd place, are bit for bit those that are not,
 * at every step; what products read is their upper half; the states are the same bits, too. */
static void test_halves(void **state)
{
    struct fixture *f = *state;
    const size_t size = N_ELEMENTS * sizeof(float);
    struct tensor w = tensor_new(f, N_ELEMENTS, 1), g = tensor_new(f, N_ELEMENTS, 0);
    struct mb_master halves[2];
    struct mb_optimizer *whole = optimizer_new(f, &w, &g, 0, N_ELEMENTS), *parts[3];
    for (int i = 0; i < 2; i++) {
        halves[i] = (struct mb_master){
            .upper = device_memory(f, N_ELEMENTS * sizeof(uint16_t)),
            .lower = device_memory(f, N_ELEMENTS * sizeof(uint16_t)),
            .window = device_memory(f, MB_MASTER_WINDOW * sizeof(float)),
        };
        mb_master_copy_in(&f->dev, &halves[i], 0, N_ELEMENTS, w.host);
    }
    parts[0] = optimizer_of(f, &halves[0], &g, 0, N_ELEMENTS);
    parts[1] = optimizer_of(f, &halves[1], &g, 0, 53);
    parts[2] = optimizer_of(f, &halves[1], &g, 53, N_ELEMENTS);
    for (int t = 1; t <= 50; t++) {
        draw_gradients(f, &g);
        mb_optimizer_step(whole, 1e-2, 0.1, 0.5);
        for (int i = 0; i < 3; i++)
            mb_optimizer_step(parts[i], 1e-2, 0.1, 0.5);
        tensor_download(f, &w);
        for (int i = 0; i < 2; i++) {
            float joined[N_ELEMENTS];
            uint16_t upper[N_ELEMENTS];
            mb_master_copy_out(&f->dev, &halves[i], 0, N_ELEMENTS, joined);
            f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, upper, halves[i].upper, sizeof(upper));
            synchronize(f);
            assert_memory_equal(joined, w.host, size);
            for (size_t e = 0; e < N_ELEMENTS; e++)
                assert_int_equal(upper[e], mb_split_upper(w.host[e]));
        }
    }
    struct tensor a = tensor_new(f, N_ELEMENTS, 0), b = tensor_new(f, N_ELEMENTS, 0);
    f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, a.host, mb_optimizer_exp_avg_sq(whole), size);
    f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, b.host, mb_optimizer_exp_avg_sq(parts[0]),
                         size);
    synchronize(f);
    assert_memory_equal(a.host, b.host, size);
    mb_optimizer_destroy(whole);
    for (int i = 0; i < 3; i++)
        mb_optimizer_destroy(parts[i]);
}

/* SGD with momentum against torch.optim.SGD's rule in double, whole, in halves and in two shards;
 * the last two bit for bit. */
static void test_sgd(void **state)
{
    struct fixture *f = *state;
    struct tensor w = tensor_new(f, N_ELEMENTS, 1), g = tensor_new(f, N_ELEMENTS, 0);
    double b[N_ELEMENTS] = {0};
    float joined[N_ELEMENTS];
    struct mb_err err = {0};
    const struct mb_master whole = {.whole = w.dev};
    struct mb_master halves = {.upper = device_memory(f, N_ELEMENTS * sizeof(uint16_t)),
                               .lower = device_memory(f, N_ELEMENTS * sizeof(uint16_t)),
                               .window = device_memory(f, MB_MASTER_WINDOW * sizeof(float))};
    struct mb_optimizer_config c;
    struct mb_optimizer *o[3];
    mb_optimizer_config_init(&c);
    c.rule = MB_OPTIMIZER_SGD;
    c.sgd_momentum = 0.8;
    mb_master_copy_in(&f->dev, &halves, 0, N_ELEMENTS, w.host);
    const struct {
        const struct mb_master *weights;
        size_t begin, end;
    } made[] = {{&whole, 0, N_ELEMENTS}, {&halves, 0, 53}, {&halves, 53, N_ELEMENTS}};
    for (int i = 0; i < 3; i++)
        if (mb_optimizer_create(&f->dev, &c, PARAMS, N_PARAMS, made[i].weights, g.dev,
                                made[i].begin, made[i].end, &o[i], &err) != 0)
            fail_msg("%s", err.text);
    assert_null(mb_optimizer_exp_avg_sq(o[0]));
    for (int t = 1; t <= 10; t++) {
        const double lr = 1e-1 / t, coefficient = t % 2 ? 1 : 0.25;
        draw_gradients(f, &g);
        for (size_t i = 0; i < N_ELEMENTS; i++) {
            b[i] = 0.8 * b[i] + g.ref[i] * coefficient + (decayed(i) ? 0.1 : 0) * w.ref[i];
            w.ref[i] -= lr * b[i];
        }
        for (int i = 0; i < 3; i++)
            mb_optimizer_step(o[i], lr, 0.1, coefficient);
    }
    assert_close("weights", tensor_download(f, &w), w.ref, w.n, 2e-6);
    mb_master_copy_out(&f->dev, &halves, 0, N_ELEMENTS, joined);
    synchronize(f);
    assert_memory_equal(joined, w.host, sizeof(joined));
    struct tensor s = tensor_new(f, N_ELEMENTS, 0);
    f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, s.host, mb_optimizer_exp_avg(o[0]),
                         sizeof(float) * s.n);
    synchronize(f);
    assert_close("momentum", s.host, b, s.n, 2e-6);
    for (int i = 0; i < 3; i++)
        mb_optimizer_destroy(o[i]);
}

static void test_clip(void **state)
{
    (void)state;
    assert_true(mb_optimizer_clip(10, 0) == 1);
    assert_true(mb_optimizer_clip(0.5, 1) == 1);
    assert_true(mb_optimizer_clip(0, 1) == 1);
    assert_true(fabs(mb_optimizer_clip(4, 1) - 1 / 4.000001) < 1e-15);
}

static struct mb_optimizer_config adam(double beta1, double beta2, double eps)
{
    return (struct mb_optimizer_config){.beta1 = beta1, .beta2 = beta2, .eps = eps};
}

static void expect_refused(struct fixture *f, struct mb_optimizer_config c, size_t begin,
                           size_t end, const char *text)
{
    struct mb_optimizer *o = NULL;
    struct mb_err err = {0};
    float x[1] = {0};
    const struct mb_master master = {.whole = x};
    assert_int_equal(
        mb_optimizer_create(&f->dev, &c, PARAMS, N_PARAMS, &master, x, begin, end, &o, &err),
        MB_EINVAL);
    assert_null(o);
    if (strstr(err.text, text) == NULL)
        fail_msg("'%s' does not say '%s'", err.text, text);
}

static void test_refusals(void **state)
{
    struct fixture *f = *state;
    expect_refused(f, adam(1, 0.999, 1e-8), 0, 8, "--adam-beta1 is 1");
    expect_refused(f, adam(0.9, -1, 1e-8), 0, 8, "--adam-beta2 is -1");
    expect_refused(f, adam(0.9, 0.999, 0), 0, 8, "--adam-eps is 0");
    expect_refused(f, adam(0.9, 0.999, 1e-8), 8, 8, "range [8, 8) is empty");
}

/* Every allocation of create fails once: nothing is left behind, nothing half made is returned. */
static void test_allocation_failures(void **state)
{
    struct fixture *f = *state;
    struct tensor w = tensor_new(f, N_ELEMENTS, 1), g = tensor_new(f, N_ELEMENTS, 0);
    const struct mb_master master = {.whole = w.dev};
    struct mb_optimizer_config c;
    mb_optimizer_config_init(&c);
    for (unsigned long nth = 1;; nth++) {
        struct mb_optimizer *o = NULL;
        struct mb_err err = {0};
        mb_alloc_fail_nth(nth);
        int rc = mb_optimizer_create(&f->dev, &c, PARAMS, N_PARAMS, &master, g.dev, 0, N_ELEMENTS,
                                     &o, &err);
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (!failed) {
            assert_int_equal(rc, 0);
            mb_optimizer_destroy(o);
            assert_true(nth > 1);
            break;
        }
        assert_int_equal(rc, MB_ENOMEM);
        assert_null(o);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FIXTURE_TEST(test_reference), FIXTURE_TEST(test_shards),
        FIXTURE_TEST(test_decoupled), FIXTURE_TEST(test_halves),
        FIXTURE_TEST(test_sgd),       cmocka_unit_test(test_clip),
        FIXTURE_TEST(test_refusals),  FIXTURE_TEST(test_allocation_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
