/*
 * Operations in fp16. This machine computes in fp32: operands are widened into the context's
 * memory, the operation runs as in fp32, and what it writes is rounded, to infinity beyond 65504.
 * So fp16 is how things are stored, and within an operation nothing is rounded but as in fp32.
 *
 * That memory grows to what the largest operation needs, in the first pass of a model.
 */
#ifndef MOBULA_WORKER_KERNELS_CPU_HALF_H
#define MOBULA_WORKER_KERNELS_CPU_HALF_H

#include "worker/kernels/cpu/cpu.h"

#ifdef MB_ISA
/* Each operation that has a dtype: its name, its struct, and where the dtype is. */
#define MB_HALF_OPERATIONS(F)                                                                      \
    F(embedding_forward, mb_embedding_forward, dtype)                                              \
    F(embedding_backward, mb_embedding_backward, dtype)                                            \
    F(layernorm_forward, mb_layernorm_forward, dtype)                                              \
    F(layernorm_backward, mb_layernorm_backward, dtype)                                            \
    F(rmsnorm_forward, mb_rmsnorm_forward, dtype)                                                  \
    F(rmsnorm_backward, mb_rmsnorm_backward, dtype)                                                \
    F(linear_forward, mb_linear_forward, dtype)                                                    \
    F(linear_backward, mb_linear_backward, dtype)                                                  \
    F(gelu_forward, mb_gelu, dtype)                                                                \
    F(gelu_backward, mb_gelu, dtype)                                                               \
    F(swiglu_forward, mb_swiglu_forward, dtype)                                                    \
    F(swiglu_backward, mb_swiglu_backward, dtype)                                                  \
    F(rope, mb_rope, dtype)                                                                        \
    F(dropout_add, mb_dropout_add, dtype)                                                          \
    F(attention_forward, mb_attention_forward, dtype)                                              \
    F(attention_backward, mb_attention_backward, dtype)                                            \
    F(attention_part_forward, mb_attention_part_forward, part.dtype)                               \
    F(attention_part_backward, mb_attention_part_backward, part.dtype)                             \
    F(keys_values_take, mb_keys_values, dtype)                                                     \
    F(keys_values_put, mb_keys_values, dtype)                                                      \
    F(cross_entropy, mb_cross_entropy, dtype)

#define MB_HALF_DECLARE(op, args, place)                                                           \
    void MB_CPU(half_##op)(struct mb_context * ctx, struct mb_stream * stream,                     \
                           const struct args *a);
MB_HALF_OPERATIONS(MB_HALF_DECLARE)
#undef MB_HALF_DECLARE

void MB_CPU(narrow)(struct mb_context *ctx, struct mb_stream *stream, uint16_t *out, const float *x,
                    size_t n);
#endif

#endif
