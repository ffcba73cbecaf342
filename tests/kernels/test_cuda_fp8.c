/*
 * Operations of matrices in fp8. Conversions are compared bit by bit with a reference that follows
 * the formats' definition, in double; products with sums formed in double of what the bytes stand
 * for. Bounds of the relative error: 4e-3 for results in bf16 (its rounding is 2e-3 of an element),
 * 3e-4 for gradients of weights in fp32: multiprocessors form sums of some products in fewer
 * digits. Outputs are poisoned with all ones, which is a NaN in bf16, fp32 and both formats, and
 * what lies behind them must stay.
 */
#include "twin.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/half.h"

enum { GUARD = 64, POISON = 0xff };

static const char *const FORMATS[] = {"none", "e4m3", "e5m2"};

static int left_out(const struct twin *t)
{
    struct mb_err err = {0};
    if ((t->gpu.ops->features & MB_FEATURE_FP8) == 0) {
        printf("  the backend has no operations in fp8\n");
        return 1;
    }
    if (t->gpu.ops->fp8_check(t->gpu.ctx, &err) == 0)
        return 0;
    printf("  %s\n", err.text);
    return 1;
}

/* ---- the formats ---- */

static int mantissa_bits(enum mb_fp8_format f)
{
    return f == MB_FP8_E4M3 ? 3 : 2;
}

static int bias_of(enum mb_fp8_format f)
{
    return f == MB_FP8_E4M3 ? 7 : 15;
}

static double largest(enum mb_fp8_format f)
{
    return f == MB_FP8_E4M3 ? 448 : 57344;
}

static double from_fp8(enum mb_fp8_format f, uint8_t x)
{
    const int bits = mantissa_bits(f), exponent = (x & 127) >> bits, rest = x & ((1 << bits) - 1);
    const int is_nan = f == MB_FP8_E4M3 ? (x & 127) == 127 : exponent == 31 && rest != 0;
    const double magnitude = exponent > 0 ? ldexp(rest + (1 << bits), exponent - bias_of(f) - bits)
                                          : ldexp(rest, 1 - bias_of(f) - bits);
    return is_nan ? NAN : x >> 7 ? -magnitude : magnitude;
}

/* To nearest even, of the numbers that there are; finite and not beyond the largest. */
static uint8_t to_fp8(enum mb_fp8_format f, double x)
{
    const int bits = mantissa_bits(f), least = 1 - bias_of(f);
    int exponent;
    frexp(x, &exponent);
    exponent = exponent - 1 < least || x == 0 ? least : exponent - 1;
    const double steps = nearbyint(ldexp(fabs(x), bits - exponent));
    /* Steps of the smallest exponent are codes; of each further one there are 2^bits more. */
    const int code = (int)steps + ((exponent - least) << bits);
    return (uint8_t)(code | (signbit(x) ? 128 : 0));
}

/* s of the contract in op.h. */
static int shift_of(enum mb_fp8_format f, double amax, int margin)
{
    if (amax == 0)
        return 0;
    int s = (int)floor(log2(largest(f) / amax));
    while (ldexp(amax, s) > largest(f))
        s--;
    while (ldexp(amax, s + 1) <= largest(f))
        s++;
    s -= margin;
    return s < -126 ? -126 : s > 126 ? 126 : s;
}

/* ---- matrices on the GPU ---- */

struct both {
    struct mb_fp8_matrix m;
    size_t n_rows, n_columns;
};

static void poison(struct twin *t, void *p, size_t n)
{
    uint8_t *host = mb_calloc(n, 1);
    assert_non_null(host);
    memset(host, POISON, n);
    t->gpu.ops->copy_in(t->gpu.ctx, t->gpu.stream, p, host, n);
    twin_synchronize(t);
    mb_free(host);
}

static void *poisoned(struct twin *t, size_t n)
{
    void *p = twin_memory(&t->gpu, n);
    poison(t, p, n);
    return p;
}

static void *download(struct twin *t, const void *p, size_t n)
{
    void *host = mb_calloc(n, 1);
    assert_non_null(host);
    t->gpu.ops->copy_out(t->gpu.ctx, t->gpu.stream, host, p, n);
    twin_synchronize(t);
    return host;
}

static struct both quantize(struct twin *t, const struct pair *x, size_t n_rows, size_t n_columns,
                            enum mb_fp8_format format, int margin)
{
    const size_t n = n_rows * n_columns + GUARD;
    struct both b = {{.rows = poisoned(t, n),
                      .columns = poisoned(t, n),
                      .scale = poisoned(t, sizeof(struct mb_fp8_scale)),
                      .format = format},
                     n_rows,
                     n_columns};
    t->gpu.ops->zero(t->gpu.ctx, t->gpu.stream, b.m.scale, sizeof(float));
    struct mb_fp8_amax amax = {.x = x->gpu, .amax = &b.m.scale->amax, .n = n_rows * n_columns};
    t->gpu.ops->fp8_amax(t->gpu.ctx, t->gpu.stream, &amax);
    struct mb_fp8_quantize a = {
        .x = x->gpu, .out = b.m, .n_rows = n_rows, .n_columns = n_columns, .margin = margin};
    t->gpu.ops->fp8_quantize(t->gpu.ctx, t->gpu.stream, &a);
    return b;
}

/* What the bytes stand for, [n_rows, n_columns]. */
static double *numbers(struct twin *t, const struct both *b)
{
    const size_t n = b->n_rows * b->n_columns;
    uint8_t *rows = download(t, b->m.rows, n);
    struct mb_fp8_scale *scale = download(t, b->m.scale, sizeof(*scale));
    double *out = mb_calloc(n, sizeof(*out));
    assert_non_null(out);
    for (size_t i = 0; i < n; i++)
        out[i] = from_fp8(b->m.format, rows[i]) * (double)scale->inverse;
    mb_free(rows);
    mb_free(scale);
    return out;
}

static void upload_bf16(struct twin *t, const struct pair *p)
{
    uint16_t *narrow = mb_calloc(p->n, sizeof(*narrow));
    assert_non_null(narrow);
    for (size_t i = 0; i < p->n; i++) {
        narrow[i] = mb_float_bf16(p->cpu[i]);
        p->cpu[i] = mb_bf16_float(narrow[i]);
    }
    t->gpu.ops->copy_in(t->gpu.ctx, t->gpu.stream, p->gpu, narrow, p->n * sizeof(*narrow));
    twin_synchronize(t);
    mb_free(narrow);
}

/* ---- conversions ---- */

static void check_quantize(struct twin *t, const struct pair *x, size_t n_rows, size_t n_columns,
                           enum mb_fp8_format format, int margin, const char *what)
{
    const size_t n = n_rows * n_columns;
    double amax = 0;
    for (size_t i = 0; i < n; i++)
        amax = fmax(amax, fabs((double)x->cpu[i]));
    struct both b = quantize(t, x, n_rows, n_columns, format, margin);
    uint8_t *rows = download(t, b.m.rows, n + GUARD),
            *columns = download(t, b.m.columns, n + GUARD);
    struct mb_fp8_scale *scale = download(t, b.m.scale, sizeof(*scale));
    const int s = shift_of(format, amax, margin);
    printf("  %zu x %zu in %s, %s: amax %g, 2^%d\n", n_rows, n_columns, FORMATS[format], what, amax,
           s);
    assert_true((double)scale->amax == amax);
    assert_true((double)scale->inverse == ldexp(1, -s));
    for (size_t r = 0; r < n_rows; r++)
        for (size_t c = 0; c < n_columns; c++) {
            const uint8_t want = to_fp8(format, ldexp((double)x->cpu[r * n_columns + c], s));
            if (rows[r * n_columns + c] != want || columns[c * n_rows + r] != want)
                fail_msg("row %zu, column %zu: %g is %02x by row and %02x by column, not %02x", r,
                         c, (double)x->cpu[r * n_columns + c], rows[r * n_columns + c],
                         columns[c * n_rows + r], want);
        }
    for (size_t i = n; i < n + GUARD; i++)
        assert_true(rows[i] == POISON && columns[i] == POISON);
    mb_free(rows);
    mb_free(columns);
    mb_free(scale);
}

static const size_t SHAPES[][2] = {{128, 64}, {16, 16},   {144, 80},  {16, 4096},
                                   {272, 48}, {2000, 16}, {400, 1040}};

static void test_quantize(void **state)
{
    struct twin *t = *state;
    static const struct {
        double scale; /* of the largest */
        int octaves;  /* below it, over which numbers are spread */
        const char *what;
    } KINDS[] = {{3, 0, "alike"},    {1e-3, 40, "over 40 octaves"},
                 {3e38, 0, "huge"},  {1e-38, 8, "denormal"},
                 {1e-36, 0, "tiny"}, {0, 0, "zeros"}};
    if (left_out(t))
        skip();
    t->dtype = MB_DTYPE_BF16;
    for (size_t k = 0; k < COUNT(SHAPES); k++)
        for (size_t i = 0; i < COUNT(KINDS); i++) {
            struct pair x = pair_input(t, SHAPES[k][0] * SHAPES[k][1], KINDS[i].scale);
            for (size_t j = 0; j < x.n; j++)
                x.cpu[j] = (float)ldexp((double)x.cpu[j], -(int)(twin_unit(t) * KINDS[i].octaves));
            upload_bf16(t, &x);
            for (int f = MB_FP8_E4M3; f <= MB_FP8_E5M2; f++)
                check_quantize(t, &x, SHAPES[k][0], SHAPES[k][1], (enum mb_fp8_format)f,
                               k % 2 == 0 ? 0 : 3, KINDS[i].what);
        }
}

/* All numbers that bf16 has between the least and the largest of a format, so every tie, too. */
static void test_every_number(void **state)
{
    struct twin *t = *state;
    if (left_out(t))
        skip();
    t->dtype = MB_DTYPE_BF16;
    for (int f = MB_FP8_E4M3; f <= MB_FP8_E5M2; f++) {
        struct pair x = pair_input(t, 65536, 1);
        for (size_t i = 0; i < x.n; i++) {
            const float v = mb_bf16_float((uint16_t)i);
            x.cpu[i] = fabs((double)v) <= largest((enum mb_fp8_format)f) ? v : 0;
        }
        upload_bf16(t, &x);
        check_quantize(t, &x, 256, 256, (enum mb_fp8_format)f, 0, "every number of bf16");
    }
}

static void test_amax(void **state)
{
    struct twin *t = *state;
    static const size_t LENGTHS[] = {1, 7, 8, 9, 255, 4096, 100003, 3000000};
    if (left_out(t))
        skip();
    t->dtype = MB_DTYPE_BF16;
    for (size_t k = 0; k < COUNT(LENGTHS); k++) {
        const size_t n = LENGTHS[k], places[] = {0, n / 2, n - 1};
        for (size_t i = 0; i < COUNT(places); i++) {
            const float extremes[] = {-5, INFINITY, NAN};
            for (size_t e = 0; e < COUNT(extremes); e++) {
                struct pair x = pair_input(t, n, 1);
                float *amax = twin_memory(&t->gpu, sizeof(*amax));
                x.cpu[places[i]] = extremes[e];
                upload_bf16(t, &x);
                struct mb_fp8_amax a = {.x = x.gpu, .amax = amax, .n = n};
                t->gpu.ops->zero(t->gpu.ctx, t->gpu.stream, amax, sizeof(*amax));
                t->gpu.ops->fp8_amax(t->gpu.ctx, t->gpu.stream, &a);
                float *got = download(t, amax, sizeof(*amax));
                if (isnan(extremes[e]))
                    assert_true(isnan(*got));
                else
                    assert_true(*got == fabsf(extremes[e]));
                mb_free(got);
                t->gpu.ops->free(t->gpu.ctx, amax);
                t->gpu.ops->free(t->gpu.ctx, x.gpu);
                t->cpu.ops->free(t->cpu.ctx, x.cpu);
            }
        }
    }
}

/* ---- what other operations form on their way ---- */

static void assert_amax(struct twin *t, const char *what, const struct pair *out, const float *amax)
{
    float *numbers_out = pair_download(t, out, 1), *got = download(t, amax, sizeof(*got)), want = 0;
    for (size_t i = 0; i < out->n; i++)
        want = fmaxf(want, fabsf(numbers_out[i]));
    printf("  %-28s %zu numbers: %g\n", what, out->n, (double)*got);
    assert_true(*got == want && want > 0);
    mb_free(numbers_out);
    mb_free(got);
}

static float *fresh_amax(struct twin *t)
{
    float *amax = twin_memory(&t->gpu, sizeof(*amax));
    t->gpu.ops->zero(t->gpu.ctx, t->gpu.stream, amax, sizeof(*amax));
    return amax;
}

static void test_amax_on_the_way(void **state)
{
    struct twin *t = *state;
    static const size_t WIDTHS[][2] = {{300, 4096}, {65, 512}, {7, 33}, {40, 1600}, {5, 12000}};
    if (left_out(t))
        skip();
    t->dtype = MB_DTYPE_BF16;
    for (size_t k = 0; k < COUNT(WIDTHS); k++) {
        const size_t rows = WIDTHS[k][0], n = WIDTHS[k][1];
        struct pair x = pair_input(t, rows * n, 3), w = pair_input_f32(t, n, 1),
                    out = pair_output(t, rows * n), rstd = pair_output_f32(t, rows),
                    d_out = pair_input(t, rows * n, 1), d_x = pair_input(t, rows * n, 1),
                    d_w = pair_input_f32(t, n, 1), wide = pair_input(t, 2 * rows * n, 3),
                    d_wide = pair_output(t, 2 * rows * n);
        float *amax[4];
        for (size_t i = 0; i < COUNT(amax); i++)
            amax[i] = fresh_amax(t);
        struct mb_rmsnorm_forward a = {.x = x.gpu,
                                       .weight = w.gpu,
                                       .out = out.gpu,
                                       .rstd = rstd.gpu,
                                       .amax = amax[0],
                                       .n_rows = rows,
                                       .hidden = n,
                                       .eps = 1e-5f,
                                       .dtype = t->dtype};
        t->gpu.ops->rmsnorm_forward(t->gpu.ctx, t->gpu.stream, &a);
        assert_amax(t, "rmsnorm", &out, amax[0]);
        struct mb_rmsnorm_backward b = {.x = x.gpu,
                                        .weight = w.gpu,
                                        .rstd = rstd.gpu,
                                        .d_out = d_out.gpu,
                                        .d_x = d_x.gpu,
                                        .d_weight = d_w.gpu,
                                        .amax = amax[1],
                                        .n_rows = rows,
                                        .hidden = n,
                                        .dtype = t->dtype};
        t->gpu.ops->rmsnorm_backward(t->gpu.ctx, t->gpu.stream, &b);
        assert_amax(t, "rmsnorm d_x", &d_x, amax[1]);
        struct mb_swiglu_forward c = {.x = wide.gpu,
                                      .out = out.gpu,
                                      .amax = amax[2],
                                      .n_rows = rows,
                                      .n = n,
                                      .dtype = t->dtype};
        t->gpu.ops->swiglu_forward(t->gpu.ctx, t->gpu.stream, &c);
        assert_amax(t, "swiglu", &out, amax[2]);
        struct mb_swiglu_backward d = {.x = wide.gpu,
                                       .d_out = d_out.gpu,
                                       .d_x = d_wide.gpu,
                                       .amax = amax[3],
                                       .n_rows = rows,
                                       .n = n,
                                       .dtype = t->dtype};
        t->gpu.ops->swiglu_backward(t->gpu.ctx, t->gpu.stream, &d);
        assert_amax(t, "swiglu gradient", &d_wide, amax[3]);
    }
}

/* ---- products ---- */

/* out [m, n] = a [m, k] b [n, k]^T, where a's and b's elements are so far apart. */
static double *product(const double *a, size_t a_row, size_t a_column, const double *b,
                       size_t b_row, size_t b_column, size_t m, size_t n, size_t k)
{
    double *out = mb_calloc(m * n, sizeof(*out));
    assert_non_null(out);
    for (size_t i = 0; i < m; i++)
        for (size_t p = 0; p < k; p++) {
            const double x = a[i * a_row + p * a_column];
            for (size_t j = 0; j < n; j++)
                out[i * n + j] += x * b[j * b_row + p * b_column];
        }
    return out;
}

/* The oracle's result is p's on the CPU. */
static void assert_result(struct twin *t, const char *what, const struct pair *p, double *want,
                          double bound)
{
    for (size_t i = 0; i < p->n; i++)
        p->cpu[i] = (float)want[i];
    mb_free(want);
    assert_pair(t, what, p, bound);
}

static const struct {
    size_t rows, n_in, n_out;
    int bias, residual, sets;
    enum mb_fp8_format gradient;
    double spread; /* of the gradient's numbers: as those of a trainer, small */
} LINEARS[] = {
    {256, 512, 768, 0, 0, 1, MB_FP8_E5M2, 1e-6},  {16, 16, 16, 1, 0, 0, MB_FP8_E4M3, 1},
    {48, 80, 112, 0, 1, 0, MB_FP8_E5M2, 1e-3},    {512, 1024, 272, 1, 1, 1, MB_FP8_E4M3, 1},
    {1024, 256, 256, 1, 0, 0, MB_FP8_E5M2, 1e-9}, {64, 4096, 128, 0, 0, 1, MB_FP8_E5M2, 1}};

static void check_linear(struct twin *t, size_t c)
{
    const size_t m = LINEARS[c].rows, k = LINEARS[c].n_in, n = LINEARS[c].n_out;
    struct pair x = pair_input(t, m * k, 1), w = pair_input(t, n * k, 2 / sqrt((double)k)),
                bias = pair_input(t, n, 1), residual = pair_input(t, m * n, 1),
                out = pair_output(t, m * n), d_out = pair_input(t, m * n, LINEARS[c].spread),
                d_x = pair_output(t, m * k), d_b = pair_input_f32(t, n, LINEARS[c].spread),
                d_w = LINEARS[c].sets ? pair_output_f32(t, n * k)
                                      : pair_input_f32(t, n * k, LINEARS[c].spread);
    struct both x8 = quantize(t, &x, m, k, MB_FP8_E4M3, 0),
                w8 = quantize(t, &w, n, k, MB_FP8_E4M3, 0),
                d8 = quantize(t, &d_out, m, n, LINEARS[c].gradient, 0);
    double *nx = numbers(t, &x8), *nw = numbers(t, &w8), *nd = numbers(t, &d8);
    struct mb_fp8_linear_forward a = {.x = x8.m,
                                      .weight = w8.m,
                                      .bias = LINEARS[c].bias ? bias.gpu : NULL,
                                      .residual = LINEARS[c].residual ? residual.gpu : NULL,
                                      .out = out.gpu,
                                      .n_rows = m,
                                      .n_in = k,
                                      .n_out = n};
    a.x.columns = a.weight.columns = NULL;
    t->gpu.ops->fp8_linear_forward(t->gpu.ctx, t->gpu.stream, &a);
    double *want = product(nx, k, 1, nw, k, 1, m, n, k);
    for (size_t i = 0; i < m * n; i++)
        want[i] += (LINEARS[c].bias ? (double)bias.cpu[i % n] : 0) +
                   (LINEARS[c].residual ? (double)residual.cpu[i] : 0);
    assert_result(t, "linear in fp8", &out, want, 4e-3);
    struct mb_fp8_linear_backward b = {.x = x8.m,
                                       .weight = w8.m,
                                       .d_out = d8.m,
                                       .bf16_d_out = d_out.gpu,
                                       .d_x = d_x.gpu,
                                       .d_weight = d_w.gpu,
                                       .sets_d_weight = LINEARS[c].sets,
                                       .d_bias = LINEARS[c].bias ? d_b.gpu : NULL,
                                       .n_rows = m,
                                       .n_in = k,
                                       .n_out = n};
    b.x.rows = b.weight.rows = NULL;
    t->gpu.ops->fp8_linear_backward(t->gpu.ctx, t->gpu.stream, &b);
    assert_result(t, "d_x in fp8", &d_x, product(nd, n, 1, nw, 1, k, m, k, n), 4e-3);
    want = product(nd, 1, n, nx, 1, k, n, k, m);
    for (size_t i = 0; i < n * k && !LINEARS[c].sets; i++)
        want[i] += (double)d_w.cpu[i];
    assert_result(t, "d_weight in fp8", &d_w, want, 3e-4);
    want = mb_calloc(n, sizeof(*want));
    for (size_t i = 0; i < n; i++)
        want[i] = (double)d_b.cpu[i];
    for (size_t i = 0; i < m * n && LINEARS[c].bias; i++)
        want[i % n] += (double)d_out.cpu[i];
    assert_result(t, "bias gradient", &d_b, want, 1e-5);
    mb_free(nx);
    mb_free(nw);
    mb_free(nd);
}

static void test_linear(void **state)
{
    struct twin *t = *state;
    if (left_out(t))
        skip();
    t->dtype = MB_DTYPE_BF16;
    for (size_t c = 0; c < COUNT(LINEARS); c++)
        check_linear(t, c);
}

/* One number that is none, or infinite, and all of a product are NaN. */
static void test_what_is_not_finite_is_seen(void **state)
{
    struct twin *t = *state;
    const float extremes[] = {NAN, INFINITY, -INFINITY};
    if (left_out(t))
        skip();
    t->dtype = MB_DTYPE_BF16;
    for (size_t e = 0; e < COUNT(extremes); e++) {
        struct pair x = pair_input(t, 64 * 32, 1), w = pair_input(t, 48 * 32, 1),
                    out = pair_input(t, 64 * 48, 1);
        x.cpu[1000] = extremes[e];
        upload_bf16(t, &x);
        struct both x8 = quantize(t, &x, 64, 32, MB_FP8_E4M3, 0),
                    w8 = quantize(t, &w, 48, 32, MB_FP8_E4M3, 0);
        struct mb_fp8_linear_forward a = {
            .x = x8.m, .weight = w8.m, .out = out.gpu, .n_rows = 64, .n_in = 32, .n_out = 48};
        t->gpu.ops->fp8_linear_forward(t->gpu.ctx, t->gpu.stream, &a);
        float *got = pair_download(t, &out, 1);
        for (size_t i = 0; i < out.n; i++)
            assert_true(isnan(got[i]));
        mb_free(got);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TWIN_TEST(test_quantize), TWIN_TEST(test_every_number),
        TWIN_TEST(test_amax),     TWIN_TEST(test_amax_on_the_way),
        TWIN_TEST(test_linear),   TWIN_TEST(test_what_is_not_finite_is_seen)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
