/*
 * Operations that are captured and run again: CUDA graphs. While a thread captures, others go on as
 * they like (thread-local mode): a save copies, NCCL's operations are launched. What the capturing
 * thread must not do meanwhile, such as taking memory, has been done when the operations ran the
 * first time. What fails while they are captured is the capture's failure and not the stream's,
 * since nothing of it has run.
 */
#include <stddef.h>
#include "base/alloc.h"
#include "worker/kernels/cuda/cuda.h"

struct mb_graph {
    cudaGraphExec_t exec;
};

int mb_cuda_graph_begin(struct mb_context *ctx, struct mb_stream *stream, struct mb_err *err)
{
    (void)ctx;
    cudaError_t e = cudaStreamBeginCapture(stream->cuda, cudaStreamCaptureModeThreadLocal);
    if (e != cudaSuccess) {
        cudaGetLastError(); /* it would look like the next launch's */
        return mb_err_set(err, MB_EIO, "capturing a CUDA graph: %s (CUDA error %d)",
                          cudaGetErrorString(e), (int)e);
    }
    stream->err_before = stream->err;
    mb_err_clear(&stream->err);
    return 0;
}

/* NULL: the failure is in the stream. */
static struct mb_graph *make(struct mb_stream *stream, cudaGraph_t captured)
{
    struct mb_graph *g = mb_calloc(1, sizeof(*g));
    if (g == NULL) {
        mb_err_set(&stream->err, MB_ENOMEM, "out of memory for a CUDA graph");
        return NULL;
    }
    cudaError_t e = cudaGraphInstantiate(&g->exec, captured, 0);
    mb_cuda_note(stream, e, "making a CUDA graph");
    if (e == cudaSuccess)
        return g;
    mb_free(g);
    return NULL;
}

struct mb_graph *mb_cuda_graph_end(struct mb_context *ctx, struct mb_stream *stream,
                                   struct mb_err *err)
{
    cudaGraph_t captured = NULL;
    struct mb_graph *g = NULL;
    (void)ctx;
    mb_cuda_note(stream, cudaStreamEndCapture(stream->cuda, &captured), "capturing a CUDA graph");
    if (stream->err.code == 0)
        g = make(stream, captured);
    if (captured != NULL)
        cudaGraphDestroy(captured);
    if (g == NULL) {
        cudaGetLastError();
        *err = stream->err;
    }
    stream->err = stream->err_before;
    return g;
}

void mb_cuda_graph_run(struct mb_context *ctx, struct mb_stream *stream, struct mb_graph *g)
{
    (void)ctx;
    mb_cuda_note(stream, cudaGraphLaunch(g->exec, stream->cuda), "running a CUDA graph");
}

void mb_cuda_graph_destroy(struct mb_context *ctx, struct mb_graph *g)
{
    if (g == NULL)
        return;
    cudaSetDevice(ctx->index);
    if (g->exec != NULL)
        cudaGraphExecDestroy(g->exec);
    mb_free(g);
}
