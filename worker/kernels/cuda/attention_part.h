/* Attention over samples whose rows are on several ranks (attention_part.cu). */
#ifndef MOBULA_WORKER_KERNELS_CUDA_ATTENTION_PART_H
#define MOBULA_WORKER_KERNELS_CUDA_ATTENTION_PART_H

#include "worker/kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

void mb_cuda_attention_part_forward(struct mb_context *ctx, struct mb_stream *stream,
                                    const struct mb_attention_part_forward *a);
void mb_cuda_attention_part_backward(struct mb_context *ctx, struct mb_stream *stream,
                                     const struct mb_attention_part_backward *a);
void mb_cuda_keys_values_take(struct mb_context *ctx, struct mb_stream *stream,
                              const struct mb_keys_values *a);
void mb_cuda_keys_values_put(struct mb_context *ctx, struct mb_stream *stream,
                             const struct mb_keys_values *a);

#ifdef __cplusplus
}
#endif

#endif
