/*
 * Matrix products by cuBLASLt, which is opened at run time. A product of a shape seen for the first
 * time is tuned: the library's best guesses run on the caller's operands and the fastest stays for
 * the life of the context, and in a file for later ones (worker/kernels/tuning.h).
 * MOBULA_CUDA_TUNE=0 takes the first guess, which makes the bits the same from run to run; fp32 is
 * never tuned.
 *
 * Row-major throughout: D [m, n] = epilogue(op(A) op(B) + bias [n] + beta C), op(A) [m, k], op(B)
 * [k, n]. Threads: that of the context.
 */
#ifndef MOBULA_WORKER_KERNELS_CUDA_BLAS_H
#define MOBULA_WORKER_KERNELS_CUDA_BLAS_H

#include <stddef.h>
#include "base/err.h"
#include "worker/kernels/op.h"

struct mb_cuda_blas;

enum mb_cuda_epilogue {
    MB_CUDA_PLAIN,
    MB_CUDA_BIAS,      /* + bias */
    MB_CUDA_GELU_BIAS, /* aux = op(A) op(B) + bias; D = gelu(aux), tanh form */
    MB_CUDA_DGELU      /* D = op(A) op(B) * gelu'(aux), tanh form */
};

struct mb_cuda_product {
    size_t m, n, k;
    int transpose_a, transpose_b; /* A is stored [k, m], B [n, k] */
    const void *a, *b;            /* of dtype */
    const void *c;                /* [m, n], of D's type; NULL: beta is 0 */
    const void *bias;             /* [n], of D's type */
    void *aux;                    /* [m, n], of D's type */
    void *d;                      /* [m, n], of d_dtype; may be c */
    enum mb_dtype dtype, d_dtype;
    enum mb_cuda_epilogue epilogue;
    /* Not MB_FP8_NONE: A and B are in fp8, whatever dtype says, A not transposed and B so, and
     * stand for themselves times these numbers, in device memory. */
    enum mb_fp8_format fp8_a, fp8_b;
    const float *inverse_a, *inverse_b;
    int is_fast; /* sums over a long dimension may lose digits of fp32; of fp8 only */
};

/* device: its kind, by name. MB_EUNSUPPORTED with one line that says what to install. */
int mb_cuda_blas_open(const char *device, struct mb_cuda_blas **out, struct mb_err *err);
void mb_cuda_blas_close(struct mb_cuda_blas *b); /* NULL is legal */
size_t mb_cuda_blas_version(const struct mb_cuda_blas *b);

/* Enqueues; a refusal is kept in the stream. */
void mb_cuda_blas_run(struct mb_cuda_blas *b, struct mb_stream *stream,
                      const struct mb_cuda_product *p);

#endif
