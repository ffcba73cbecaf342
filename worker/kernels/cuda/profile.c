/*
 * What profilers see: NVTX ranges on the CUDA backend's time line, and where they begin and stop to
 * record (nsys --capture-range=cudaProfilerApi, ncu --profile-from-start off). Without a profiler
 * each call is a test of a pointer.
 */
#include <cuda_profiler_api.h>
#include <nvtx3/nvToolsExt.h>
#include "worker/kernels/cuda/cuda.h"

void mb_cuda_range_begin(struct mb_context *ctx, const char *name)
{
    (void)ctx;
    nvtxRangePushA(name);
}

void mb_cuda_range_end(struct mb_context *ctx)
{
    (void)ctx;
    nvtxRangePop();
}

int mb_cuda_profiler(struct mb_context *ctx, int on, struct mb_err *err)
{
    const cudaError_t e = on ? cudaProfilerStart() : cudaProfilerStop();
    (void)ctx;
    return e == cudaSuccess ? 0
                            : mb_err_set(err, MB_EIO, "the profiler did not %s: %s (CUDA error %d)",
                                         on ? "start" : "stop", cudaGetErrorString(e), (int)e);
}
