/*
 * Products by cuBLASLt.
 *  1. open: libcublasLt by its name, as the loader finds it (LD_LIBRARY_PATH), then in the places
 *     where toolkits put it; a failure names what was looked for.
 *  2. run: look the product's shape up; a new one gets descriptors and an algorithm. The shape
 *     includes how the pointers are aligned, since algorithms differ in what they need.
 *  3. tuning: the library's guesses run once each, the fastest go on in turns, several rounds, so
 * that all of them see the same clocks; the smallest time of a round decides. A product that adds
 * to D is tuned into a buffer of its own; without memory for that the first guess stays. What was
 * chosen is kept for the next start (tuning.h), which takes it if the library still agrees.
 */
#include "worker/kernels/cuda/blas.h"

#include <cublasLt.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"
#include "worker/kernels/cuda/cuda.h"
#include "worker/kernels/tuning.h"

enum { MAX_GUESSES = 32, FINALISTS = 8, ROUNDS = 3, RUNS = 4 };

/* Smaller products are not worth their tuning: they are bound by their launch. */
static const double TUNED_FLOP = 1e9;

/* The functions used, as the header declares them. */
#define FUNCTIONS(F)                                                                               \
    F(Create)                                                                                      \
    F(Destroy)                                                                                     \
    F(GetVersion)                                                                                  \
    F(MatmulDescCreate)                                                                            \
    F(MatmulDescDestroy)                                                                           \
    F(MatmulDescSetAttribute)                                                                      \
    F(MatrixLayoutCreate)                                                                          \
    F(MatrixLayoutDestroy)                                                                         \
    F(MatmulPreferenceCreate)                                                                      \
    F(MatmulPreferenceDestroy)                                                                     \
    F(MatmulPreferenceSetAttribute)                                                                \
    F(MatmulAlgoGetHeuristic)                                                                      \
    F(MatmulAlgoCheck)                                                                             \
    F(Matmul)

struct shape {
    size_t m, n, k;
    int transpose_a, transpose_b, has_c, has_bias;
    enum mb_dtype dtype, d_dtype;
    enum mb_cuda_epilogue epilogue;
    enum mb_fp8_format fp8_a, fp8_b;
    int is_fast;
    uint32_t align_a, align_b, align_c, align_d;
};

struct plan {
    struct shape shape;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d; /* in cuBLASLt's order: its A is our B */
    cublasLtMatmulAlgo_t algo;
};

struct mb_cuda_blas {
    void *library;
    cublasLtHandle_t handle;
    int tunes;
    struct mb_tuning *tuning; /* algorithms by shape; NULL: nothing is tuned */
    struct plan *plans;
    size_t n_plans, cap_plans;
#define DECLARE(name) __typeof__(cublasLt##name) *name;
    FUNCTIONS(DECLARE)
#undef DECLARE
};

static void *open_library(void)
{
    static const char *const NAMES[] = {
        "libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.13",
        "/usr/local/cuda/targets/x86_64-linux/lib/libcublasLt.so.13"};
    void *library = NULL;
    for (size_t i = 0; i < sizeof(NAMES) / sizeof(NAMES[0]) && library == NULL; i++)
        library = dlopen(NAMES[i], RTLD_NOW | RTLD_LOCAL);
    return library;
}

static int look_up(struct mb_cuda_blas *b, struct mb_err *err)
{
    void *symbol;
#define LOOK_UP(name)                                                                              \
    symbol = dlsym(b->library, "cublasLt" #name);                                                  \
    if (symbol == NULL)                                                                            \
        return mb_err_set(err, MB_EUNSUPPORTED, "libcublasLt.so.13 has no cublasLt" #name);        \
    memcpy(&b->name, &symbol, sizeof(symbol));
    FUNCTIONS(LOOK_UP)
#undef LOOK_UP
    return 0;
}

int mb_cuda_blas_open(const char *device, struct mb_cuda_blas **out, struct mb_err *err)
{
    const char *text = getenv("MOBULA_CUDA_TUNE");
    int64_t tunes = 1;
    int rc = text != NULL ? mb_parse_i64(text, 0, 1, "MOBULA_CUDA_TUNE", &tunes, err) : 0;
    if (rc != 0)
        return rc;
    struct mb_cuda_blas *b = mb_calloc(1, sizeof(*b));
    if (b == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory opening cuBLASLt");
    b->tunes = tunes == 1;
    b->library = open_library();
    rc = b->library != NULL
             ? look_up(b, err)
             : mb_err_set(err, MB_EUNSUPPORTED,
                          "libcublasLt.so.13 (cuBLAS of CUDA 13) is neither in the library path "
                          "nor in /usr/local/cuda");
    if (rc == 0) {
        cublasStatus_t status = b->Create(&b->handle);
        if (status != CUBLAS_STATUS_SUCCESS)
            rc = mb_err_set(err, MB_EUNSUPPORTED, "cuBLASLt does not start (status %d)",
                            (int)status);
    }
    if (rc == 0 && b->tunes)
        rc = mb_tuning_open(device, b->GetVersion(), sizeof(struct shape),
                            sizeof(cublasLtMatmulAlgo_t), &b->tuning, err);
    if (rc != 0) {
        mb_cuda_blas_close(b);
        return rc;
    }
    *out = b;
    return 0;
}

static void end_plan(struct mb_cuda_blas *b, struct plan *p)
{
    if (p->d != NULL)
        b->MatrixLayoutDestroy(p->d);
    if (p->b != NULL)
        b->MatrixLayoutDestroy(p->b);
    if (p->a != NULL)
        b->MatrixLayoutDestroy(p->a);
    if (p->desc != NULL)
        b->MatmulDescDestroy(p->desc);
}

void mb_cuda_blas_close(struct mb_cuda_blas *b)
{
    if (b == NULL)
        return;
    for (size_t i = 0; i < b->n_plans; i++)
        end_plan(b, &b->plans[i]);
    if (b->handle != NULL)
        b->Destroy(b->handle);
    if (b->library != NULL)
        dlclose(b->library);
    mb_tuning_close(b->tuning);
    mb_free(b->plans);
    mb_free(b);
}

size_t mb_cuda_blas_version(const struct mb_cuda_blas *b)
{
    return b->GetVersion();
}

/* ---- plans ---- */

static uint32_t alignment(const void *p)
{
    uintptr_t v = (uintptr_t)p | 256;
    return (uint32_t)(v & (~v + 1));
}

static cudaDataType_t type_of(enum mb_dtype dtype)
{
    return dtype == MB_DTYPE_BF16 ? CUDA_R_16BF : dtype == MB_DTYPE_F16 ? CUDA_R_16F : CUDA_R_32F;
}

/* Of an operand. */
static cudaDataType_t operand_type(enum mb_fp8_format fp8, enum mb_dtype dtype)
{
    return fp8 == MB_FP8_E4M3   ? CUDA_R_8F_E4M3
           : fp8 == MB_FP8_E5M2 ? CUDA_R_8F_E5M2
                                : type_of(dtype);
}

static const char *type_name(enum mb_fp8_format fp8, enum mb_dtype dtype)
{
    if (fp8 != MB_FP8_NONE)
        return "fp8";
    return dtype == MB_DTYPE_BF16 ? "bf16" : dtype == MB_DTYPE_F16 ? "fp16" : "fp32";
}

static struct shape shape_of(const struct mb_cuda_product *p)
{
    struct shape s;
    memset(&s, 0, sizeof(s)); /* shapes are compared as bytes */
    s.m = p->m;
    s.n = p->n;
    s.k = p->k;
    s.transpose_a = p->transpose_a;
    s.transpose_b = p->transpose_b;
    s.has_c = p->c == NULL ? 0 : (p->c == p->d ? 1 : 2);
    s.has_bias = p->bias != NULL;
    s.fp8_a = p->fp8_a;
    s.fp8_b = p->fp8_b;
    s.is_fast = p->is_fast;
    s.dtype = p->dtype;
    s.d_dtype = p->d_dtype;
    s.epilogue = p->epilogue;
    s.align_a = alignment(p->b);
    s.align_b = alignment(p->a);
    s.align_c = alignment(p->c);
    s.align_d = alignment(p->d);
    return s;
}

static cublasLtEpilogue_t epilogue_of(enum mb_cuda_epilogue e)
{
    switch (e) {
    case MB_CUDA_BIAS:
        return CUBLASLT_EPILOGUE_BIAS;
    case MB_CUDA_GELU_BIAS:
        return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case MB_CUDA_DGELU:
        return CUBLASLT_EPILOGUE_DGELU;
    case MB_CUDA_PLAIN:
        break;
    }
    return CUBLASLT_EPILOGUE_DEFAULT;
}

#define TRY(call)                                                                                  \
    do {                                                                                           \
        cublasStatus_t status_ = (call);                                                           \
        if (status_ != CUBLAS_STATUS_SUCCESS)                                                      \
            return status_;                                                                        \
    } while (0)

static cublasStatus_t set(const struct mb_cuda_blas *b, const struct plan *plan,
                          cublasLtMatmulDescAttributes_t what, const void *value, size_t size)
{
    return b->MatmulDescSetAttribute(plan->desc, what, value, size);
}

/* Descriptors of a shape, in cuBLASLt's column-major view: D^T = op(B)^T op(A)^T. */
static cublasStatus_t describe(const struct mb_cuda_blas *b, struct plan *plan)
{
    const struct shape *s = &plan->shape;
    const cublasOperation_t op_a = s->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t op_b = s->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasLtEpilogue_t epilogue = epilogue_of(s->epilogue);
    const cudaDataType_t d_type = type_of(s->d_dtype);
    const int64_t n = (int64_t)s->n;
    const int8_t fast = (int8_t)s->is_fast;
    TRY(b->MatmulDescCreate(&plan->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    TRY(set(b, plan, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof(op_a)));
    TRY(set(b, plan, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof(op_b)));
    TRY(set(b, plan, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue)));
    if (s->fp8_a != MB_FP8_NONE)
        TRY(set(b, plan, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof(fast)));
    if (s->has_bias)
        TRY(set(b, plan, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &d_type, sizeof(d_type)));
    if (s->epilogue == MB_CUDA_GELU_BIAS || s->epilogue == MB_CUDA_DGELU) {
        TRY(set(b, plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &n, sizeof(n)));
        TRY(set(b, plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, &d_type, sizeof(d_type)));
    }
    if (s->transpose_b)
        TRY(b->MatrixLayoutCreate(&plan->a, operand_type(s->fp8_b, s->dtype), s->k, s->n,
                                  (int64_t)s->k));
    else
        TRY(b->MatrixLayoutCreate(&plan->a, operand_type(s->fp8_b, s->dtype), s->n, s->k, n));
    if (s->transpose_a)
        TRY(b->MatrixLayoutCreate(&plan->b, operand_type(s->fp8_a, s->dtype), s->m, s->k,
                                  (int64_t)s->m));
    else
        TRY(b->MatrixLayoutCreate(&plan->b, operand_type(s->fp8_a, s->dtype), s->k, s->m,
                                  (int64_t)s->k));
    return b->MatrixLayoutCreate(&plan->d, d_type, s->n, s->m, n);
}

static cublasStatus_t set_pointers(const struct mb_cuda_blas *b, const struct plan *plan,
                                   const struct mb_cuda_product *p)
{
    if (p->bias != NULL)
        TRY(set(b, plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p->bias, sizeof(p->bias)));
    if (p->aux != NULL)
        TRY(set(b, plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &p->aux, sizeof(p->aux)));
    if (p->fp8_a == MB_FP8_NONE)
        return CUBLAS_STATUS_SUCCESS;
    TRY(set(b, plan, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &p->inverse_b, sizeof(p->inverse_b)));
    TRY(set(b, plan, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &p->inverse_a, sizeof(p->inverse_a)));
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t guess(const struct mb_cuda_blas *b, const struct plan *plan, int wanted,
                            cublasLtMatmulHeuristicResult_t *guesses, int *n)
{
    const struct shape *s = &plan->shape;
    const size_t workspace = MB_CUDA_WORKSPACE_BYTES;
    cublasLtMatmulPreference_t pref;
    TRY(b->MatmulPreferenceCreate(&pref));
    const struct {
        cublasLtMatmulPreferenceAttributes_t what;
        const void *value;
        size_t size;
    } attributes[] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace)},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &s->align_a, sizeof(s->align_a)},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &s->align_b, sizeof(s->align_b)},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &s->align_c, sizeof(s->align_c)},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &s->align_d, sizeof(s->align_d)}};
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    for (size_t i = 0; i < sizeof(attributes) / sizeof(attributes[0]); i++)
        if (status == CUBLAS_STATUS_SUCCESS)
            status = b->MatmulPreferenceSetAttribute(pref, attributes[i].what, attributes[i].value,
                                                     attributes[i].size);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = b->MatmulAlgoGetHeuristic(b->handle, plan->desc, plan->a, plan->b, plan->d,
                                           plan->d, pref, wanted, guesses, n);
    b->MatmulPreferenceDestroy(pref);
    return status == CUBLAS_STATUS_SUCCESS && *n == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : status;
}

static cublasStatus_t multiply(const struct mb_cuda_blas *b, struct mb_stream *stream,
                               const struct plan *plan, const cublasLtMatmulAlgo_t *algo,
                               const struct mb_cuda_product *p, void *d)
{
    const float one = 1, beta = p->c != NULL ? 1 : 0;
    return b->Matmul(b->handle, plan->desc, &one, p->b, plan->a, p->a, plan->b, &beta,
                     p->c != NULL ? p->c : d, plan->d, d, plan->d, algo, stream->workspace,
                     MB_CUDA_WORKSPACE_BYTES, stream->cuda);
}

/* ---- tuning ---- */

static const float REFUSED_MS = 1e30f; /* longer than any product */

/* Milliseconds of n products; a guess that refuses is infinitely slow. */
static float time_guess(const struct mb_cuda_blas *b, struct mb_stream *stream,
                        const struct plan *plan, const cublasLtMatmulAlgo_t *algo,
                        const struct mb_cuda_product *p, void *d, int n, cudaEvent_t from,
                        cudaEvent_t to)
{
    float ms = 0;
    cudaEventRecord(from, stream->cuda);
    for (int i = 0; i < n; i++)
        if (multiply(b, stream, plan, algo, p, d) != CUBLAS_STATUS_SUCCESS)
            return REFUSED_MS;
    cudaEventRecord(to, stream->cuda);
    if (cudaEventSynchronize(to) != cudaSuccess ||
        cudaEventElapsedTime(&ms, from, to) != cudaSuccess)
        return REFUSED_MS;
    return ms;
}

struct trial {
    int guess;
    float ms; /* of one product, the least seen */
};

static int compare_trials(const void *a, const void *b)
{
    const struct trial *x = a, *y = b;
    return x->ms != y->ms ? (x->ms > y->ms) - (x->ms < y->ms)
                          : (x->guess > y->guess) - (x->guess < y->guess);
}

/* The guess that was fastest; -1: none could be timed, for want of memory or by a fault. */
static int fastest(const struct mb_cuda_blas *b, struct mb_stream *stream, const struct plan *plan,
                   const cublasLtMatmulHeuristicResult_t *guesses, int n,
                   const struct mb_cuda_product *p)
{
    struct trial t[MAX_GUESSES];
    int n_left = n;
    void *own = NULL;
    cudaEvent_t from = NULL, to = NULL;
    if (p->c == p->d && cudaMalloc(&own, p->m * p->n * mb_dtype_size(p->d_dtype)) != cudaSuccess) {
        cudaGetLastError();
        return -1;
    }
    for (int i = 0; i < n; i++)
        t[i] = (struct trial){i, REFUSED_MS};
    if (cudaEventCreate(&from) != cudaSuccess || cudaEventCreate(&to) != cudaSuccess)
        goto out;
    for (int round = 0; round <= ROUNDS; round++) {
        const int runs = round == 0 ? 1 : RUNS;
        for (int i = 0; i < n_left; i++) {
            const cublasLtMatmulAlgo_t *algo = &guesses[t[i].guess].algo;
            void *d = own != NULL ? own : p->d;
            if (round == 0) /* loads its code */
                time_guess(b, stream, plan, algo, p, d, 1, from, to);
            float ms = time_guess(b, stream, plan, algo, p, d, runs, from, to);
            if (ms < REFUSED_MS)
                ms /= (float)runs;
            t[i].ms = round <= 1 || ms < t[i].ms ? ms : t[i].ms;
        }
        qsort(t, (size_t)n_left, sizeof(t[0]), compare_trials);
        if (n_left > FINALISTS)
            n_left = FINALISTS;
    }
out:
    if (to != NULL)
        cudaEventDestroy(to);
    if (from != NULL)
        cudaEventDestroy(from);
    cudaFree(own);
    return t[0].ms < REFUSED_MS ? t[0].guess : -1;
}

/* 1: an earlier start has chosen for this shape, and the library can still do so. */
static int was_chosen(const struct mb_cuda_blas *b, struct plan *plan)
{
    cublasLtMatmulHeuristicResult_t result;
    const void *kept = mb_tuning_find(b->tuning, &plan->shape);
    if (kept == NULL)
        return 0;
    memcpy(&plan->algo, kept, sizeof(plan->algo));
    memset(&result, 0, sizeof(result));
    return b->MatmulAlgoCheck(b->handle, plan->desc, plan->a, plan->b, plan->d, plan->d,
                              &plan->algo, &result) == CUBLAS_STATUS_SUCCESS &&
           result.workspaceSize <= MB_CUDA_WORKSPACE_BYTES;
}

static cublasStatus_t choose(const struct mb_cuda_blas *b, struct mb_stream *stream,
                             struct plan *plan, const struct mb_cuda_product *p)
{
    cublasLtMatmulHeuristicResult_t guesses[MAX_GUESSES];
    const double flop = 2.0 * (double)p->m * (double)p->n * (double)p->k;
    const int tunes = b->tunes && p->dtype != MB_DTYPE_F32 && flop >= TUNED_FLOP;
    int n = 0;
    TRY(set_pointers(b, plan, p));
    if (tunes && was_chosen(b, plan))
        return CUBLAS_STATUS_SUCCESS;
    TRY(guess(b, plan, tunes ? MAX_GUESSES : 1, guesses, &n));
    const int best = n > 1 ? fastest(b, stream, plan, guesses, n, p) : 0;
    plan->algo = guesses[best < 0 ? 0 : best].algo;
    if (tunes && best >= 0) /* what was not measured is chosen anew by the next start */
        mb_tuning_add(b->tuning, &plan->shape, &plan->algo);
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- running ---- */

static struct plan *find(struct mb_cuda_blas *b, const struct shape *s)
{
    for (size_t i = 0; i < b->n_plans; i++)
        if (memcmp(&b->plans[i].shape, s, sizeof(*s)) == 0)
            return &b->plans[i];
    return NULL;
}

static struct plan *new_plan(struct mb_cuda_blas *b, struct mb_stream *stream,
                             const struct shape *s, const struct mb_cuda_product *p)
{
    if (b->n_plans == b->cap_plans) {
        size_t cap = b->cap_plans ? 2 * b->cap_plans : 32;
        struct plan *plans = mb_reallocarray(b->plans, cap, sizeof(*plans));
        if (plans == NULL) {
            if (stream->err.code == 0)
                mb_err_set(&stream->err, MB_ENOMEM, "out of memory for a matrix product's plan");
            return NULL;
        }
        b->plans = plans;
        b->cap_plans = cap;
    }
    struct plan *plan = &b->plans[b->n_plans];
    memset(plan, 0, sizeof(*plan));
    plan->shape = *s;
    cublasStatus_t status = describe(b, plan);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = choose(b, stream, plan, p);
    if (status == CUBLAS_STATUS_SUCCESS) {
        b->n_plans++;
        return plan;
    }
    end_plan(b, plan);
    if (stream->err.code == 0)
        mb_err_set(&stream->err, MB_EUNSUPPORTED,
                   "cuBLASLt has no product of [%zu, %zu] and [%zu, %zu] in %s (status %d)", p->m,
                   p->k, p->k, p->n, type_name(p->fp8_a, p->dtype), (int)status);
    return NULL;
}

void mb_cuda_blas_run(struct mb_cuda_blas *b, struct mb_stream *stream,
                      const struct mb_cuda_product *p)
{
    const struct shape s = shape_of(p);
    struct plan *plan = find(b, &s);
    if (plan == NULL)
        plan = new_plan(b, stream, &s, p);
    if (plan == NULL)
        return;
    cublasStatus_t status = set_pointers(b, plan, p);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = multiply(b, stream, plan, &plan->algo, p, p->d);
    if (status != CUBLAS_STATUS_SUCCESS && stream->err.code == 0)
        mb_err_set(&stream->err, MB_EIO,
                   "cuBLASLt refuses a product of [%zu, %zu] and [%zu, %zu] "
                   "(status %d)",
                   p->m, p->k, p->k, p->n, (int)status);
}
