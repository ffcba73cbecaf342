#include "twin.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include "base/alloc.h"
#include "base/half.h"
#include "worker/kernels/philox.h"

static void open_device(const char *path, struct mb_device *dev)
{
    struct mb_err err = {0};
    if (mb_backend_open(path, 0, dev, &err) != 0)
        fail_msg("%s", err.text);
}

int twin_setup(void **state)
{
    struct twin *t = mb_calloc(1, sizeof(*t));
    const char *seed = getenv("MOBULA_TEST_SEED"), *gpu = getenv("MOBULA_TEST_BACKEND");
    const char *cpu = getenv("MOBULA_TEST_CPU_BACKEND"); /* where the tree was built elsewhere */
    assert_non_null(t);
    assert_non_null(gpu);
    if (seed != NULL)
        t->seed = strtoull(seed, NULL, 10);
    else
        assert_int_equal(getrandom(&t->seed, 4, 0), 4);
    printf("MOBULA_TEST_SEED=%llu\n", (unsigned long long)t->seed);
    open_device(cpu != NULL ? cpu : MOBULA_CPU_BACKEND, &t->cpu);
    open_device(gpu, &t->gpu);
    *state = t;
    return 0;
}

int twin_teardown(void **state)
{
    struct twin *t = *state;
    mb_backend_close(&t->cpu); /* frees what it gave */
    mb_backend_close(&t->gpu);
    mb_free(t);
    return 0;
}

double twin_bound(const struct twin *t, double fp32, double bf16)
{
    switch (t->dtype) {
    case MB_DTYPE_F32:
        break;
    case MB_DTYPE_BF16:
        return bf16;
    case MB_DTYPE_F16: /* three more digits */
        return fmax(fp32, bf16 / 8);
    }
    return fp32;
}

int twin_is_cpu(const struct twin *t)
{
    return strcmp(t->gpu.ops->name, t->cpu.ops->name) == 0;
}

int twin_is_slow(const struct twin *t, size_t n)
{
    const char *patience = getenv("MOBULA_TEST_PATIENCE");
    if (patience != NULL && n > strtoull(patience, NULL, 10))
        return 1;
    return twin_is_cpu(t) && n > 250000;
}

static int is_of_share(size_t number)
{
    unsigned long i = 0, n = 1;
    const char *share = getenv("MOBULA_TEST_SHARE");
    if (share != NULL && (sscanf(share, "%lu/%lu", &i, &n) != 2 || i >= n))
        fail_msg("MOBULA_TEST_SHARE is %s: it must be i/n with i below n", share);
    return number % n == i;
}

void twin_in_all(struct twin *t, void (*check)(struct twin *t, size_t k), size_t n_cases)
{
    static const enum mb_dtype DTYPES[] = {MB_DTYPE_F32, MB_DTYPE_BF16, MB_DTYPE_F16};
    for (size_t k = 0; k < n_cases; k++)
        for (size_t i = 0; i < COUNT(DTYPES); i++) {
            t->dtype = DTYPES[i];
            if (t->gpu.ops->dtypes >> t->dtype & 1 &&
                (t->dtype != MB_DTYPE_F32 || !twin_is_cpu(t)) && is_of_share(k * COUNT(DTYPES) + i))
                check(t, k);
        }
}

static uint16_t round_to(enum mb_dtype dtype, float x)
{
    return dtype == MB_DTYPE_F16 ? mb_float_f16(x) : mb_float_bf16(x);
}

static float from(enum mb_dtype dtype, uint16_t h)
{
    return dtype == MB_DTYPE_F16 ? mb_f16_float(h) : mb_bf16_float(h);
}

static const char *name_of(enum mb_dtype dtype)
{
    static const char *const NAMES[] = {"fp32", "bf16", "fp16"};
    return NAMES[dtype];
}

double twin_unit(struct twin *t)
{
    return (double)mb_philox(t->seed, t->n_drawn++, 0, 0).word[0] / 4294967296.0;
}

void *twin_memory(struct mb_device *dev, size_t size_bytes)
{
    struct mb_err err = {0};
    void *p = NULL;
    if (dev->ops->alloc(dev->ctx, size_bytes, &p, &err) != 0)
        fail_msg("%s", err.text);
    return p;
}

static struct pair make(struct twin *t, size_t n, enum mb_dtype dtype)
{
    return (struct pair){.n = n,
                         .dtype = dtype,
                         .cpu = twin_memory(&t->cpu, n * sizeof(float)),
                         .gpu = twin_memory(&t->gpu, n * mb_dtype_size(dtype))};
}

static void upload(struct mb_device *dev, void *to, const void *host, size_t size_bytes)
{
    dev->ops->copy_in(dev->ctx, dev->stream, to, host, size_bytes);
}

static struct pair input(struct twin *t, size_t n, double scale, enum mb_dtype dtype)
{
    struct pair p = make(t, n, dtype);
    uint16_t *narrow = mb_calloc(n, sizeof(*narrow));
    assert_non_null(narrow);
    for (size_t i = 0; i < n; i++) {
        float x = (float)(scale * (2 * twin_unit(t) - 1));
        narrow[i] = round_to(dtype, x);
        p.cpu[i] = dtype != MB_DTYPE_F32 ? from(dtype, narrow[i]) : x; /* the CPU's is ours */
    }
    if (dtype != MB_DTYPE_F32)
        upload(&t->gpu, p.gpu, narrow, n * sizeof(*narrow));
    else
        upload(&t->gpu, p.gpu, p.cpu, n * sizeof(float));
    mb_free(narrow);
    return p;
}

static struct pair output(struct twin *t, size_t n, enum mb_dtype dtype)
{
    struct pair p = make(t, n, dtype);
    memset(p.cpu, 0xff, n * sizeof(float)); /* all ones is a NaN in all dtypes */
    upload(&t->gpu, p.gpu, p.cpu, n * mb_dtype_size(dtype));
    return p;
}

struct pair pair_input(struct twin *t, size_t n, double scale)
{
    return input(t, n, scale, t->dtype);
}

struct pair pair_output(struct twin *t, size_t n)
{
    return output(t, n, t->dtype);
}

struct pair pair_input_f32(struct twin *t, size_t n, double scale)
{
    return input(t, n, scale, MB_DTYPE_F32);
}

struct pair pair_output_f32(struct twin *t, size_t n)
{
    return output(t, n, MB_DTYPE_F32);
}

struct pair pair_zeros_f32(struct twin *t, size_t n)
{
    return input(t, n, 0, MB_DTYPE_F32);
}

void pair_upload_f32(struct twin *t, const struct pair *p)
{
    upload(&t->gpu, p->gpu, p->cpu, p->n * sizeof(float));
}

void pair_ids(struct twin *t, size_t n, size_t limit, int32_t **cpu, int32_t **gpu)
{
    *cpu = twin_memory(&t->cpu, n * sizeof(int32_t));
    *gpu = twin_memory(&t->gpu, n * sizeof(int32_t));
    for (size_t i = 0; i < n; i++)
        (*cpu)[i] = (int32_t)(twin_unit(t) * (double)limit);
    upload(&t->gpu, *gpu, *cpu, n * sizeof(int32_t));
}

void twin_synchronize(struct twin *t)
{
    struct mb_err err = {0};
    if (t->cpu.ops->synchronize(t->cpu.ctx, t->cpu.stream, &err) != 0 ||
        t->gpu.ops->synchronize(t->gpu.ctx, t->gpu.stream, &err) != 0)
        fail_msg("%s", err.text);
}

float *pair_download(struct twin *t, const struct pair *p, int from_gpu)
{
    float *out = mb_calloc(p->n, sizeof(*out));
    uint16_t *narrow = mb_calloc(p->n, sizeof(*narrow));
    assert_true(out != NULL && narrow != NULL);
    if (!from_gpu) {
        memcpy(out, p->cpu, p->n * sizeof(*out));
    } else {
        t->gpu.ops->copy_out(t->gpu.ctx, t->gpu.stream,
                             p->dtype != MB_DTYPE_F32 ? (void *)narrow : (void *)out, p->gpu,
                             p->n * mb_dtype_size(p->dtype));
        twin_synchronize(t);
        for (size_t i = 0; p->dtype != MB_DTYPE_F32 && i < p->n; i++)
            out[i] = from(p->dtype, narrow[i]);
    }
    mb_free(narrow);
    return out;
}

void assert_pair(struct twin *t, const char *what, const struct pair *p, double bound)
{
    assert_pair_from(t, what, p, bound, 0);
}

void assert_pair_from(struct twin *t, const char *what, const struct pair *p, double bound,
                      double least)
{
    twin_synchronize(t);
    float *want = pair_download(t, p, 0), *got = pair_download(t, p, 1);
    double error = 0, norm = 0, worst = 0;
    size_t at = 0;
    for (size_t i = 0; i < p->n; i++) {
        double d = fabs((double)got[i] - (double)want[i]);
        error += d * d;
        norm += (double)want[i] * (double)want[i];
        if (!(d <= worst)) { /* a NaN is the worst */
            worst = d;
            at = i;
        }
    }
    norm = fmax(norm, least * least * (double)p->n);
    error = sqrt(error / (norm > 0 ? norm : 1));
    double typical = sqrt(norm / (double)p->n);
    printf("  %-28s %s relative error %.2e (bound %.0e), worst element %.2e of %.2e, %.1f bounds\n",
           what, name_of(p->dtype), error, bound, worst, typical,
           worst / (bound * (typical + fabs((double)want[at]))));
    if (!(error <= bound) || !(worst <= 8 * bound * (typical + fabs((double)want[at]))))
        fail_msg("%s: relative error %.3e, bound %.1e; element %zu of %zu is %.9g, expected %.9g",
                 what, error, bound, at, p->n, (double)got[at], (double)want[at]);
    mb_free(want);
    mb_free(got);
}
