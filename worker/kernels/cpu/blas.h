/* OpenBLAS, loaded at run time: one function of it is needed, single precision matrix product. */
#ifndef MOBULA_WORKER_KERNELS_CPU_BLAS_H
#define MOBULA_WORKER_KERNELS_CPU_BLAS_H

#include <cblas.h>
#include <stddef.h>
#include "base/err.h"

struct mb_blas {
    __typeof__(cblas_sgemm) *sgemm;
    __typeof__(openblas_get_corename) *corename;
    int n_threads;
    void *library;
};

/* Threads per product: MOBULA_CPU_THREADS, else 1 (ranks are the parallelism of a CPU run).
 * MB_EINVAL when that is no number in [1, 1024]; MB_EUNSUPPORTED when the library cannot be loaded.
 */
int mb_blas_open(struct mb_blas *out, struct mb_err *err);
void mb_blas_close(struct mb_blas *b);

enum mb_trans { MB_N = CblasNoTrans, MB_T = CblasTrans };

/* C [m, n] = alpha op(A) op(B) + beta C, row-major; ld* are row lengths of the stored matrices. */
static inline void mb_sgemm(const struct mb_blas *blas, enum mb_trans ta, enum mb_trans tb,
                            size_t m, size_t n, size_t k, float alpha, const float *a, size_t lda,
                            const float *b, size_t ldb, float beta, float *c, size_t ldc)
{
    blas->sgemm(CblasRowMajor, (enum CBLAS_TRANSPOSE)ta, (enum CBLAS_TRANSPOSE)tb, (blasint)m,
                (blasint)n, (blasint)k, alpha, a, (blasint)lda, b, (blasint)ldb, beta, c,
                (blasint)ldc);
}

#endif
