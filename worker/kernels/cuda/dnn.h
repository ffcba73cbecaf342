/*
 * Attention by cuDNN 9, which is opened at run time and may be missing: everything here then says
 * no, and the backend's own kernels do the work. It is spoken to by its graph API, which is C; the
 * names and numbers of that API are in dnn_graph.h, so that no header of it is needed.
 *
 * Its gradients add in an order that differs from run to run, so it stays out where bits count
 * (MOBULA_CUDA_TUNE=0). MOBULA_CUDA_CUDNN=0 leaves it out, to compare. Threads: that of the
 * context.
 */
#ifndef MOBULA_WORKER_KERNELS_CUDA_DNN_H
#define MOBULA_WORKER_KERNELS_CUDA_DNN_H

#include <stddef.h>
#include "base/err.h"
#include "worker/kernels/op.h"

struct mb_cuda_dnn;
struct mb_stream;

/* *out is NULL where there is no cuDNN 9, or none is wanted. MB_EINVAL: a variable that is neither
 * 0 nor 1. */
int mb_cuda_dnn_open(struct mb_cuda_dnn **out, struct mb_err *err);
void mb_cuda_dnn_close(struct mb_cuda_dnn *d);
/* 91900 is 9.19.0; 0 for NULL. */
size_t mb_cuda_dnn_version(const struct mb_cuda_dnn *d);

/* 0: nothing was enqueued, the shape or its alignment is not cuDNN's, or d is NULL. The two may be
 * mixed with the backend's own kernels: log_sum means the same. */
int mb_cuda_dnn_attention_forward(struct mb_cuda_dnn *d, struct mb_stream *stream,
                                  const struct mb_attention_forward *a);
int mb_cuda_dnn_attention_backward(struct mb_cuda_dnn *d, struct mb_stream *stream,
                                   const struct mb_attention_backward *a);

#endif
