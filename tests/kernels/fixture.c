#include "fixture.h"

#include <math.h>
#include <stdlib.h>
#include "base/alloc.h"
#include "worker/kernels/philox.h"

int fixture_setup(void **state)
{
    struct fixture *f = mb_calloc(1, sizeof(*f));
    struct mb_err err = {0};
    assert_non_null(f);
    const char *backend = getenv("MOBULA_TEST_BACKEND");
    if (mb_backend_open(backend != NULL ? backend : MOBULA_CPU_BACKEND, 0, &f->dev, &err) != 0)
        fail_msg("%s", err.text);
    *state = f;
    return 0;
}

int fixture_teardown(void **state)
{
    struct fixture *f = *state;
    for (size_t i = 0; i < f->n_blocks; i++)
        mb_free(f->blocks[i]);
    mb_backend_close(&f->dev);
    mb_free(f);
    return 0;
}

void fixture_needs(struct fixture *f, uint32_t feature)
{
    if ((f->dev.ops->features & feature) == 0)
        skip();
}

static void *host_block(struct fixture *f, size_t n, size_t size_bytes)
{
    assert_true(f->n_blocks < sizeof(f->blocks) / sizeof(f->blocks[0]));
    void *p = mb_calloc(n, size_bytes);
    assert_non_null(p);
    f->blocks[f->n_blocks++] = p;
    return p;
}

static void *device_block(struct fixture *f, size_t size_bytes)
{
    void *p = NULL;
    assert_int_equal(f->dev.ops->alloc(f->dev.ctx, size_bytes, &p, NULL), 0);
    return p;
}

double random_unit(struct fixture *f)
{
    return (double)mb_philox(42, f->n_drawn++, 0, 0).word[0] / 4294967296.0;
}

struct tensor tensor_new(struct fixture *f, size_t n, double scale)
{
    struct tensor t = {.n = n,
                       .ref = host_block(f, n, sizeof(double)),
                       .host = host_block(f, n, sizeof(float)),
                       .dev = device_block(f, n * sizeof(float))};
    for (size_t i = 0; i < n; i++) {
        t.host[i] = scale == 0 ? 0 : (float)(scale * (2 * random_unit(f) - 1));
        t.ref[i] = (double)t.host[i];
    }
    tensor_upload(f, &t);
    return t;
}

int32_t *ids_new(struct fixture *f, size_t n, size_t limit, int32_t **dev)
{
    int32_t *host = host_block(f, n, sizeof(int32_t));
    for (size_t i = 0; i < n; i++)
        host[i] = (int32_t)(random_unit(f) * (double)limit);
    *dev = device_block(f, n * sizeof(int32_t));
    f->dev.ops->copy_in(f->dev.ctx, f->dev.stream, *dev, host, n * sizeof(int32_t));
    return host;
}

void synchronize(struct fixture *f)
{
    struct mb_err err = {0};
    if (f->dev.ops->synchronize(f->dev.ctx, f->dev.stream, &err) != 0)
        fail_msg("%s", err.text);
}

void tensor_upload(struct fixture *f, const struct tensor *t)
{
    f->dev.ops->copy_in(f->dev.ctx, f->dev.stream, t->dev, t->host, t->n * sizeof(float));
}

const float *tensor_download(struct fixture *f, struct tensor *t)
{
    f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, t->host, t->dev, t->n * sizeof(float));
    synchronize(f);
    return t->host;
}

double tensor_contract(const double *out, const struct tensor *d_out)
{
    double sum = 0;
    for (size_t i = 0; i < d_out->n; i++)
        sum += out[i] * d_out->ref[i];
    return sum;
}

void assert_close(const char *what, const float *got, const double *want, size_t n,
                  double tolerance)
{
    double scale = 1e-3, worst = 0;
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)got[i] - want[i]);
        scale = fmax(scale, fabs(want[i]));
        if (!(d <= worst)) { /* a NaN is the worst */
            worst = d;
            at = i;
        }
    }
    if (!(worst <= tolerance * scale))
        fail_msg("%s: element %zu of %zu is %.9g, expected %.9g (largest %.3g, tolerance %.1g)",
                 what, at, n, (double)got[at], want[at], scale, tolerance);
}

void assert_gradient(const char *what, const float *got, double *x, size_t n, scalar_fn *fn,
                     void *arg, double tolerance)
{
    const double step = 1e-5;
    double *want = mb_calloc(n, sizeof(*want));
    assert_non_null(want);
    for (size_t i = 0; i < n; i++) {
        double here = x[i];
        x[i] = here + step;
        double above = fn(arg);
        x[i] = here - step;
        want[i] = (above - fn(arg)) / (2 * step);
        x[i] = here;
    }
    assert_close(what, got, want, n, tolerance);
    mb_free(want);
}

void assert_tensor(struct fixture *f, const char *what, struct tensor *t, double tolerance)
{
    assert_close(what, tensor_download(f, t), t->ref, t->n, tolerance);
}

void assert_tensor_gradient(struct fixture *f, const char *what, struct tensor *got,
                            const struct tensor *x, scalar_fn *fn, void *arg, double tolerance)
{
    assert_int_equal(got->n, x->n);
    assert_gradient(what, tensor_download(f, got), x->ref, x->n, fn, arg, tolerance);
}
