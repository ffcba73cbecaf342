/*
 * The operations that Llama's style needs, as test_ops.c has the others: forward against double,
 * backward against central differences. Tolerances, of the tensor's largest element: rmsnorm 2e-6,
 * backward 1e-5   swiglu 1e-6, backward 5e-6   rotary positions 5e-7, backward 1e-6. A backend that
 * lacks one skips its test.
 */
#include "fixture.h"
#include "reference.h"

#include <math.h>
#include <string.h>

/* --- rmsnorm --- */

struct rmsnorm_case {
    struct tensor x, w, out, d_out;
    size_t n_rows, hidden;
};

static double rmsnorm_value(void *arg)
{
    struct rmsnorm_case *c = arg;
    ref_rmsnorm(c->x.ref, c->w.ref, c->out.ref, c->n_rows, c->hidden, 1e-5);
    return tensor_contract(c->out.ref, &c->d_out);
}

static void test_rmsnorm(void **state)
{
    /* With one column the row is +-1 whatever x is, and d_x nothing but rounding. */
    static const size_t shapes[][2] = {{1, 2}, {3, 7}, {5, 32}, {4, 129}};
    struct fixture *f = *state;
    fixture_needs(f, MB_FEATURE_RMSNORM);
    for (size_t k = 0; k < COUNT(shapes); k++) {
        const size_t rows = shapes[k][0], hidden = shapes[k][1];
        struct rmsnorm_case c = {.n_rows = rows, .hidden = hidden};
        c.x = tensor_new(f, rows * hidden, 3);
        c.w = tensor_new(f, hidden, 1);
        c.out = tensor_new(f, rows * hidden, 0);
        c.d_out = tensor_new(f, rows * hidden, 1);
        struct tensor rstd = tensor_new(f, rows, 0), d_x = tensor_new(f, c.x.n, 0),
                      d_w = tensor_new(f, hidden, 0);
        struct mb_rmsnorm_forward a = {.x = c.x.dev,
                                       .weight = c.w.dev,
                                       .out = c.out.dev,
                                       .rstd = rstd.dev,
                                       .n_rows = rows,
                                       .hidden = hidden,
                                       .eps = 1e-5f};
        RUN_OP(f, rmsnorm_forward, a);
        rmsnorm_value(&c);
        assert_tensor(f, "rmsnorm", &c.out, 2e-6);
        struct mb_rmsnorm_backward b = {.x = c.x.dev,
                                        .weight = c.w.dev,
                                        .rstd = rstd.dev,
                                        .d_out = c.d_out.dev,
                                        .d_x = d_x.dev,
                                        .d_weight = d_w.dev,
                                        .n_rows = rows,
                                        .hidden = hidden};
        RUN_OP(f, rmsnorm_backward, b);
        assert_tensor_gradient(f, "rmsnorm d_x", &d_x, &c.x, rmsnorm_value, &c, 1e-5);
        assert_tensor_gradient(f, "rmsnorm d_weight", &d_w, &c.w, rmsnorm_value, &c, 1e-5);
        /* Both are added to. */
        RUN_OP(f, rmsnorm_backward, b);
        float once = d_w.host[0], once_x = d_x.host[0];
        assert_true(fabs((double)(tensor_download(f, &d_w)[0] - 2 * once)) <=
                    1e-6 * fabs((double)once));
        assert_true(fabs((double)(tensor_download(f, &d_x)[0] - 2 * once_x)) <=
                    1e-6 * fabs((double)once_x));
    }
}

/* --- swiglu --- */

struct swiglu_case {
    struct tensor x, out, d_out;
    size_t n_rows, n;
};

static double swiglu_value(void *arg)
{
    struct swiglu_case *c = arg;
    ref_swiglu(c->x.ref, c->out.ref, c->n_rows, c->n);
    return tensor_contract(c->out.ref, &c->d_out);
}

static void test_swiglu(void **state)
{
    static const struct {
        size_t n_rows, n;
        double range; /* beyond 90 exp has left fp32 */
    } cases[] = {{1, 1, 1}, {3, 17, 0.01}, {4, 33, 8}, {2, 130, 300}};
    struct fixture *f = *state;
    fixture_needs(f, MB_FEATURE_SWIGLU);
    for (size_t k = 0; k < COUNT(cases); k++) {
        struct swiglu_case c = {.n_rows = cases[k].n_rows, .n = cases[k].n};
        c.x = tensor_new(f, 2 * c.n_rows * c.n, cases[k].range);
        c.out = tensor_new(f, c.n_rows * c.n, 0);
        c.d_out = tensor_new(f, c.out.n, 1);
        struct tensor d_x = tensor_new(f, c.x.n, 1); /* overwritten, not added to */
        struct mb_swiglu_forward a = {.x = c.x.dev, .out = c.out.dev, .n_rows = c.n_rows, .n = c.n};
        RUN_OP(f, swiglu_forward, a);
        swiglu_value(&c);
        assert_tensor(f, "swiglu", &c.out, 1e-6);
        struct mb_swiglu_backward b = {
            .x = c.x.dev, .d_out = c.d_out.dev, .d_x = d_x.dev, .n_rows = c.n_rows, .n = c.n};
        RUN_OP(f, swiglu_backward, b);
        assert_tensor_gradient(f, "swiglu d_x", &d_x, &c.x, swiglu_value, &c, 5e-6);
    }
}

/* --- rotary positions --- */

struct rope_case {
    struct mb_attention_shape shape;
    struct tensor qkv, angle, d_out;
    size_t rotary_dim;
    double *out;
};

static double rope_value(void *arg)
{
    struct rope_case *c = arg;
    memcpy(c->out, c->qkv.ref, c->qkv.n * sizeof(double));
    ref_rope(&c->shape, c->out, c->angle.ref, c->rotary_dim);
    return tensor_contract(c->out, &c->d_out);
}

static void test_rope(void **state)
{
    static const struct {
        struct mb_attention_shape shape;
        size_t rotary_dim;
    } cases[] = {{{1, 1, 1, 1, 2}, 2},
                 {{2, 5, 2, 2, 6}, 6},
                 {{1, 9, 4, 2, 8}, 4},
                 {{2, 3, 3, 1, 5}, 2},
                 {{1, 4, 1, 1, 70}, 70}};
    struct fixture *f = *state;
    fixture_needs(f, MB_FEATURE_ROPE);
    for (size_t k = 0; k < COUNT(cases); k++) {
        struct rope_case c = {.shape = cases[k].shape, .rotary_dim = cases[k].rotary_dim};
        const struct mb_attention_shape *s = &c.shape;
        const size_t half = c.rotary_dim / 2;
        c.qkv =
            tensor_new(f, s->n_samples * s->seq * (s->n_heads + 2 * s->n_groups) * s->head_dim, 2);
        c.angle = tensor_new(f, s->seq * half, 3);
        c.d_out = tensor_new(f, c.qkv.n, 1);
        struct tensor cosine = tensor_new(f, c.angle.n, 0), sine = tensor_new(f, c.angle.n, 0),
                      out = tensor_new(f, c.qkv.n, 0);
        for (size_t i = 0; i < c.angle.n; i++) {
            cosine.host[i] = (float)cos(c.angle.ref[i]);
            sine.host[i] = (float)sin(c.angle.ref[i]);
        }
        tensor_upload(f, &cosine);
        tensor_upload(f, &sine);
        c.out = out.ref;
        struct mb_rope a = {.shape = *s,
                            .qkv = c.qkv.dev,
                            .cosine = cosine.dev,
                            .sine = sine.dev,
                            .rotary_dim = c.rotary_dim};
        RUN_OP(f, rope, a);
        rope_value(&c);
        assert_close("rope", tensor_download(f, &c.qkv), c.out, c.qkv.n, 5e-7);
        a.qkv = c.d_out.dev;
        a.inverse = 1;
        RUN_OP(f, rope, a);
        assert_tensor_gradient(f, "rope d_qkv", &c.d_out, &c.qkv, rope_value, &c, 1e-6);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FIXTURE_TEST(test_rmsnorm),
        FIXTURE_TEST(test_swiglu),
        FIXTURE_TEST(test_rope),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
