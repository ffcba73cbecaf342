/*
 * Loading OpenBLAS.
 *  1. Read MOBULA_CPU_THREADS. A wrong value is an error, not a default.
 *  2. Tell OpenBLAS the number through its environment. It starts its threads while it is being
 * loaded, which is why it is loaded here and not linked.
 *  3. dlopen and look up the functions; a failure names the package to install.
 */
#include "worker/kernels/cpu/blas.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/str.h"

#define OPENBLAS_SONAME "libopenblas.so.0"

static void *symbol(void *library, const char *name, struct mb_err *err)
{
    void *p = dlsym(library, name);
    if (p == NULL)
        mb_err_set(err, MB_EUNSUPPORTED, "%s has no %s: it is not OpenBLAS", OPENBLAS_SONAME, name);
    return p;
}

static int thread_count(int *out, struct mb_err *err)
{
    const char *text = getenv("MOBULA_CPU_THREADS");
    int64_t n = 1;
    if (text != NULL) {
        int rc = mb_parse_i64(text, 1, 1024, "MOBULA_CPU_THREADS", &n, err);
        if (rc != 0)
            return rc;
    }
    *out = (int)n;
    return 0;
}

int mb_blas_open(struct mb_blas *out, struct mb_err *err)
{
    struct mb_blas b = {0};
    int rc = thread_count(&b.n_threads, err);
    if (rc != 0)
        return rc;
    char threads[16];
    snprintf(threads, sizeof(threads), "%d", b.n_threads);
    if (setenv("OPENBLAS_NUM_THREADS", threads, 1) != 0)
        return mb_err_set(err, MB_ENOMEM, "out of memory preparing %s", OPENBLAS_SONAME);

    b.library = dlopen(OPENBLAS_SONAME, RTLD_NOW | RTLD_LOCAL);
    if (b.library == NULL)
        return mb_err_set(err, MB_EUNSUPPORTED, "%s; install the package libopenblas0", dlerror());
    void *sgemm = symbol(b.library, "cblas_sgemm", err);
    void *corename = sgemm ? symbol(b.library, "openblas_get_corename", err) : NULL;
    void *set_threads = corename ? symbol(b.library, "openblas_set_num_threads", err) : NULL;
    if (set_threads == NULL) {
        mb_blas_close(&b);
        return MB_EUNSUPPORTED;
    }
    __typeof__(openblas_set_num_threads) *set_num_threads;
    memcpy(&b.sgemm, &sgemm, sizeof(b.sgemm));
    memcpy(&b.corename, &corename, sizeof(b.corename));
    memcpy(&set_num_threads, &set_threads, sizeof(set_num_threads));
    set_num_threads(b.n_threads);
    *out = b;
    return 0;
}

void mb_blas_close(struct mb_blas *b)
{
    if (b->library != NULL)
        dlclose(b->library);
    *b = (struct mb_blas){0};
}
