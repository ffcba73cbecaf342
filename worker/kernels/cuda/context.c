/*
 * Context, memory, streams and movement of the CUDA backend.
 *
 * Opening: count the devices, choose one, check that this library has code for it, open cuBLASLt.
 * Failure paths, each one line that says what to do:
 *  1. no driver or one that is too old;  2. no device visible, or not that many;  3. a device of
 *     another architecture;  4. a device that another process holds exclusively;  5. no cuBLASLt.
 * Afterwards a fault of the device is kept in the stream until synchronize(). After some faults
 * (an illegal address) CUDA refuses everything: the process has to end.
 * copy_out(), join() and synchronize() come from other threads too: they choose the device first.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"
#include "worker/kernels/cuda/cuda.h"

static int code_of(cudaError_t e)
{
    return e == cudaErrorMemoryAllocation ? MB_ENOMEM : MB_EIO;
}

static int refuse(struct mb_err *err, cudaError_t e, const char *what)
{
    return mb_err_set(err, code_of(e), "%s: %s (CUDA error %d)", what, cudaGetErrorString(e),
                      (int)e);
}

static int count_devices(int *n, struct mb_err *err)
{
    int driver = 0, runtime = 0;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    cudaError_t e = cudaGetDeviceCount(n);
    if (e == cudaErrorInsufficientDriver || e == cudaErrorNoDevice ||
        (e == cudaSuccess && *n == 0)) {
        cudaDriverGetVersion(&driver);
        cudaRuntimeGetVersion(&runtime);
        if (driver == 0)
            return mb_err_set(err, MB_EUNSUPPORTED,
                              "no NVIDIA driver: libcuda.so.1 is not there or finds no GPU");
        if (driver < runtime)
            return mb_err_set(
                err, MB_EUNSUPPORTED,
                "the NVIDIA driver knows CUDA %d.%d, this backend needs %d.%d: install "
                "a newer driver",
                driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "no NVIDIA GPU is visible (CUDA_VISIBLE_DEVICES %s)",
                          visible != NULL ? visible : "is not set");
    }
    return e == cudaSuccess ? 0 : refuse(err, e, "NVIDIA driver");
}

static int check_device(struct mb_context *ctx, struct mb_err *err)
{
    struct cudaDeviceProp prop;
    int64_t hopper = 1;
    const char *text = getenv("MOBULA_CUDA_HOPPER");
    int rc = text != NULL ? mb_parse_i64(text, 0, 1, "MOBULA_CUDA_HOPPER", &hopper, err) : 0;
    if (rc != 0)
        return rc;
    cudaError_t e = cudaGetDeviceProperties(&prop, ctx->index);
    if (e != cudaSuccess)
        return refuse(err, e, "GPU");
    snprintf(ctx->name, sizeof(ctx->name), "%.60s", prop.name);
    ctx->n_sm = prop.multiProcessorCount;
    ctx->capability = 10 * prop.major + prop.minor;
    ctx->shared_bytes = prop.sharedMemPerMultiprocessor;
    ctx->shared_block_bytes = prop.sharedMemPerBlockOptin;
    ctx->is_hopper = MB_CUDA_HAS_90A && prop.major == 9 && hopper == 1;
    e = cudaSetDevice(ctx->index);
    if (e == cudaSuccess)
        e = cudaFree(NULL); /* makes the device's context */
    if (e == cudaErrorDevicesUnavailable || e == cudaErrorDeviceUninitialized)
        return mb_err_set(err, MB_EUNAVAIL,
                          "%s is busy or in exclusive mode: another process holds it", ctx->name);
    if (e != cudaSuccess)
        return refuse(err, e, ctx->name);
    e = mb_cuda_has_code();
    if (e == cudaErrorNoKernelImageForDevice || e == cudaErrorInvalidDeviceFunction)
        return mb_err_set(
            err, MB_EUNSUPPORTED,
            "%s has compute capability %d.%d; this backend has code for " MB_CUDA_ARCHS, ctx->name,
            prop.major, prop.minor);
    return e == cudaSuccess ? 0 : refuse(err, e, ctx->name);
}

static void describe(struct mb_context *ctx)
{
    const size_t blas = mb_cuda_blas_version(ctx->blas), dnn = mb_cuda_dnn_version(ctx->dnn);
    size_t free_bytes = 0, total_bytes = 0;
    char size[16];
    cudaMemGetInfo(&free_bytes, &total_bytes);
    int n = snprintf(ctx->describe, sizeof(ctx->describe),
                     "CUDA, %s, %d multiprocessors, %s, cuBLASLt %zu.%zu.%zu", ctx->name, ctx->n_sm,
                     mb_human_bytes(total_bytes, size), blas / 10000, blas / 100 % 100, blas % 100);
    if (dnn > 0)
        snprintf(ctx->describe + n, sizeof(ctx->describe) - (size_t)n, ", cuDNN %zu.%zu.%zu",
                 dnn / 10000, dnn / 100 % 100, dnn % 100);
}

int mb_cuda_open(int device_index, struct mb_context **out, struct mb_err *err)
{
    int n = 0, rc = count_devices(&n, err);
    if (rc != 0)
        return rc;
    if (device_index < 0 || device_index >= n)
        return mb_err_set(err, MB_EINVAL, "device %d does not exist: %d GPU%s visible",
                          device_index, n, n == 1 ? " is" : "s are");
    struct mb_context *ctx = mb_calloc(1, sizeof(*ctx));
    if (ctx == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory opening the device");
    ctx->index = device_index;
    rc = check_device(ctx, err);
    if (rc == 0)
        rc = mb_cuda_blas_open(ctx->name, &ctx->blas, err);
    if (rc == 0)
        rc = mb_cuda_dnn_open(&ctx->dnn, err);
    if (rc != 0) {
        mb_cuda_close(ctx);
        return rc;
    }
    describe(ctx);
    *out = ctx;
    return 0;
}

static void free_block(void *block)
{
    cudaFree(block);
}

void mb_cuda_close(struct mb_context *ctx)
{
    if (ctx == NULL)
        return;
    mb_blocks_close(&ctx->blocks, free_block);
    mb_cuda_dnn_close(ctx->dnn);
    mb_cuda_blas_close(ctx->blas);
    mb_free(ctx);
}

const char *mb_cuda_describe(struct mb_context *ctx)
{
    return ctx->describe;
}

int mb_cuda_alloc(struct mb_context *ctx, size_t size_bytes, void **out, struct mb_err *err)
{
    char asked[16], have[16];
    size_t free_bytes = 0, total_bytes = 0;
    void *block = NULL;
    int rc = mb_blocks_reserve(&ctx->blocks, size_bytes, err);
    if (rc != 0)
        return rc;
    cudaError_t e = cudaMalloc(&block, size_bytes);
    if (e == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        cudaMemGetInfo(&free_bytes, &total_bytes);
        return mb_err_set(err, MB_ENOMEM,
                          "%s are asked for, %s has %s free; a smaller micro batch "
                          "needs less",
                          mb_human_bytes(size_bytes, asked), ctx->name,
                          mb_human_bytes(free_bytes, have));
    }
    if (e == cudaSuccess)
        e = cudaMemset(block, 0, size_bytes);
    if (e == cudaSuccess)
        e = cudaDeviceSynchronize(); /* our streams do not wait for the default stream */
    if (e != cudaSuccess) {
        cudaFree(block);
        return refuse(err, e, "allocating device memory");
    }
    mb_blocks_add(&ctx->blocks, block, block, size_bytes);
    *out = block;
    return 0;
}

void mb_cuda_free(struct mb_context *ctx, void *p)
{
    void *block = mb_blocks_take(&ctx->blocks, p);
    if (block != NULL)
        cudaFree(block);
}

void mb_cuda_allocated(struct mb_context *ctx, size_t *now_bytes, size_t *most_bytes,
                       size_t *n_blocks)
{
    *now_bytes = ctx->blocks.now_bytes;
    *most_bytes = ctx->blocks.most_bytes;
    *n_blocks = ctx->blocks.n;
}

void mb_cuda_memory(struct mb_context *ctx, size_t *used_bytes, size_t *total_bytes)
{
    size_t free_bytes = 0;
    *used_bytes = *total_bytes = 0;
    cudaSetDevice(ctx->index);
    if (cudaMemGetInfo(&free_bytes, total_bytes) == cudaSuccess)
        *used_bytes = *total_bytes - free_bytes;
}

/* ---- streams ---- */

int mb_cuda_stream_create(struct mb_context *ctx, struct mb_stream **out, struct mb_err *err)
{
    struct mb_stream *s = mb_calloc(1, sizeof(*s));
    if (s == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory creating a stream");
    cudaError_t e = cudaSetDevice(ctx->index);
    if (e == cudaSuccess)
        e = cudaStreamCreateWithFlags(&s->cuda, cudaStreamNonBlocking);
    if (e == cudaSuccess)
        e = cudaMalloc(&s->workspace, MB_CUDA_WORKSPACE_BYTES);
    if (e == cudaSuccess)
        e = cudaMalloc((void **)&s->faults, sizeof(*s->faults));
    if (e == cudaSuccess)
        e = cudaMallocHost((void **)&s->seen, sizeof(*s->seen));
    if (e == cudaSuccess)
        e = cudaMemset(s->faults, 0xff, sizeof(*s->faults));
    if (e == cudaSuccess)
        e = cudaDeviceSynchronize(); /* memory that was set on the default stream is set */
    if (e != cudaSuccess) {
        mb_cuda_stream_destroy(ctx, s);
        return refuse(err, e, "creating a stream");
    }
    *out = s;
    return 0;
}

void mb_cuda_stream_destroy(struct mb_context *ctx, struct mb_stream *stream)
{
    (void)ctx;
    if (stream == NULL)
        return;
    if (stream->cuda != NULL) {
        cudaStreamSynchronize(stream->cuda);
        cudaStreamDestroy(stream->cuda);
    }
    cudaFree(stream->workspace);
    cudaFree(stream->faults);
    cudaFreeHost(stream->seen);
    mb_free(stream);
}

void mb_cuda_note(struct mb_stream *stream, cudaError_t code, const char *what)
{
    if (code != cudaSuccess && stream->err.code == 0)
        refuse(&stream->err, code, what);
}

void mb_cuda_launched(struct mb_stream *stream, const char *what)
{
    mb_cuda_note(stream, cudaGetLastError(), what);
}

static void note_fault(struct mb_stream *stream, unsigned long long fault, const char *what,
                       size_t vocab)
{
    if (fault != ~0ULL && stream->err.code == 0)
        mb_err_set(&stream->err, MB_EINVAL, "%s %d at row %llu is outside the vocabulary of %zu",
                   what, (int)(uint32_t)fault, fault >> 32, vocab);
}

int mb_cuda_synchronize(struct mb_context *ctx, struct mb_stream *stream, struct mb_err *err)
{
    cudaSetDevice(ctx->index);
    mb_cuda_note(stream,
                 cudaMemcpyAsync(stream->seen, stream->faults, sizeof(*stream->seen),
                                 cudaMemcpyDeviceToHost, stream->cuda),
                 "reading the device's faults");
    cudaError_t e = cudaStreamSynchronize(stream->cuda);
    mb_cuda_note(stream, e, "an operation on the device");
    if (e == cudaSuccess && (stream->seen->token & stream->seen->label) != ~0ULL) {
        note_fault(stream, stream->seen->token, "token", stream->token_vocab);
        note_fault(stream, stream->seen->label, "label", stream->label_vocab);
        mb_cuda_note(stream,
                     cudaMemsetAsync(stream->faults, 0xff, sizeof(*stream->faults), stream->cuda),
                     "clearing the device's faults");
    }
    int code = stream->err.code;
    if (code != 0) {
        mb_err_set(err, code, "%s", stream->err.text);
        mb_err_clear(&stream->err);
    }
    return code;
}

/* ---- movement ---- */

/* From pageable memory CUDA returns when it has read it. */
void mb_cuda_copy_in(struct mb_context *ctx, struct mb_stream *stream, void *dst, const void *host,
                     size_t size_bytes)
{
    (void)ctx;
    mb_cuda_note(stream,
                 cudaMemcpyAsync(dst, host, size_bytes, cudaMemcpyHostToDevice, stream->cuda),
                 "copying to the device");
}

void mb_cuda_copy_out(struct mb_context *ctx, struct mb_stream *stream, void *host, const void *src,
                      size_t size_bytes)
{
    cudaSetDevice(ctx->index);
    mb_cuda_note(stream,
                 cudaMemcpyAsync(host, src, size_bytes, cudaMemcpyDeviceToHost, stream->cuda),
                 "copying from the device");
}

void mb_cuda_zero(struct mb_context *ctx, struct mb_stream *stream, void *dst, size_t size_bytes)
{
    (void)ctx;
    mb_cuda_note(stream, cudaMemsetAsync(dst, 0, size_bytes, stream->cuda), "clearing memory");
}
