/*
 * What the files of the CPU backend share.
 *
 * The operations are compiled once per instruction set (CMakeLists.txt); MB_ISA names the set and
 * ends the name of every function and table of that compilation, so that all live in one shared
 * object and entry.c picks the best table that the machine can run.
 */
#ifndef MOBULA_WORKER_KERNELS_CPU_CPU_H
#define MOBULA_WORKER_KERNELS_CPU_CPU_H

#include <stddef.h>
#include <stdint.h>
#include "worker/kernels/blocks.h"
#include "worker/kernels/cpu/blas.h"
#include "worker/kernels/op.h"

struct mb_context {
    struct mb_blas blas;
    char describe[160];
    struct mb_blocks blocks;
    float *room; /* of fp16 operations: their operands in fp32 (half.h); NULL: none yet */
    size_t n_room;
};

struct mb_stream {
    struct mb_err err; /* first failure since the last synchronize() */
};

/* The instruction set of the table that this process gets (entry.c); MB_EINVAL if MOBULA_CPU_ISA is
 * wrong. */
int mb_cpu_isa(const char **name, struct mb_err *err);

/* Life, memory and movement, the same for every instruction set (context.c). */
int mb_cpu_open(int device_index, struct mb_context **out, struct mb_err *err);
void mb_cpu_close(struct mb_context *ctx);
const char *mb_cpu_describe(struct mb_context *ctx);
int mb_cpu_alloc(struct mb_context *ctx, size_t size_bytes, void **out, struct mb_err *err);
void mb_cpu_free(struct mb_context *ctx, void *p);
void mb_cpu_allocated(struct mb_context *ctx, size_t *now_bytes, size_t *most_bytes,
                      size_t *n_blocks);
int mb_cpu_stream_create(struct mb_context *ctx, struct mb_stream **out, struct mb_err *err);
void mb_cpu_stream_destroy(struct mb_context *ctx, struct mb_stream *stream);
int mb_cpu_synchronize(struct mb_context *ctx, struct mb_stream *stream, struct mb_err *err);
void mb_cpu_copy(struct mb_context *ctx, struct mb_stream *stream, void *dst, const void *src,
                 size_t size_bytes);
void mb_cpu_zero(struct mb_context *ctx, struct mb_stream *stream, void *dst, size_t size_bytes);
/* At least n floats that stay until the next call; NULL: refused, the stream has failed. */
float *mb_cpu_room(struct mb_context *ctx, struct mb_stream *stream, size_t n);
/* 0 if every id lies in [0, vocab); else the stream fails with a text that starts with what. */
int mb_cpu_check_ids(struct mb_stream *stream, const char *what, const int32_t *id, size_t n,
                     size_t vocab);

#ifdef MB_ISA
#define MB_CPU_JOIN_(a, b) a##b
#define MB_CPU_JOIN(a, b)  MB_CPU_JOIN_(a, b)
#define MB_CPU(name)       MB_CPU_JOIN(mb_cpu_##name##_, MB_ISA)

extern const struct mb_backend MB_CPU(table);

size_t MB_CPU(attention_scratch)(const struct mb_attention_shape *shape);
size_t MB_CPU(cross_entropy_scratch)(size_t n_tokens, size_t hidden, size_t vocab);
void MB_CPU(embedding_forward)(struct mb_context *ctx, struct mb_stream *stream,
                               const struct mb_embedding_forward *a);
void MB_CPU(embedding_backward)(struct mb_context *ctx, struct mb_stream *stream,
                                const struct mb_embedding_backward *a);
void MB_CPU(layernorm_forward)(struct mb_context *ctx, struct mb_stream *stream,
                               const struct mb_layernorm_forward *a);
void MB_CPU(layernorm_backward)(struct mb_context *ctx, struct mb_stream *stream,
                                const struct mb_layernorm_backward *a);
void MB_CPU(rmsnorm_forward)(struct mb_context *ctx, struct mb_stream *stream,
                             const struct mb_rmsnorm_forward *a);
void MB_CPU(rmsnorm_backward)(struct mb_context *ctx, struct mb_stream *stream,
                              const struct mb_rmsnorm_backward *a);
void MB_CPU(linear_forward)(struct mb_context *ctx, struct mb_stream *stream,
                            const struct mb_linear_forward *a);
void MB_CPU(linear_backward)(struct mb_context *ctx, struct mb_stream *stream,
                             const struct mb_linear_backward *a);
void MB_CPU(gelu_forward)(struct mb_context *ctx, struct mb_stream *stream,
                          const struct mb_gelu *a);
void MB_CPU(gelu_backward)(struct mb_context *ctx, struct mb_stream *stream,
                           const struct mb_gelu *a);
void MB_CPU(swiglu_forward)(struct mb_context *ctx, struct mb_stream *stream,
                            const struct mb_swiglu_forward *a);
void MB_CPU(swiglu_backward)(struct mb_context *ctx, struct mb_stream *stream,
                             const struct mb_swiglu_backward *a);
void MB_CPU(rope)(struct mb_context *ctx, struct mb_stream *stream, const struct mb_rope *a);
void MB_CPU(dropout_add)(struct mb_context *ctx, struct mb_stream *stream,
                         const struct mb_dropout_add *a);
void MB_CPU(attention_forward)(struct mb_context *ctx, struct mb_stream *stream,
                               const struct mb_attention_forward *a);
void MB_CPU(attention_backward)(struct mb_context *ctx, struct mb_stream *stream,
                                const struct mb_attention_backward *a);
void MB_CPU(attention_part_forward)(struct mb_context *ctx, struct mb_stream *stream,
                                    const struct mb_attention_part_forward *a);
void MB_CPU(attention_part_backward)(struct mb_context *ctx, struct mb_stream *stream,
                                     const struct mb_attention_part_backward *a);
void MB_CPU(keys_values_take)(struct mb_context *ctx, struct mb_stream *stream,
                              const struct mb_keys_values *a);
void MB_CPU(keys_values_put)(struct mb_context *ctx, struct mb_stream *stream,
                             const struct mb_keys_values *a);
void MB_CPU(cross_entropy)(struct mb_context *ctx, struct mb_stream *stream,
                           const struct mb_cross_entropy *a);
void MB_CPU(split)(struct mb_context *ctx, struct mb_stream *stream, uint16_t *upper,
                   uint16_t *lower, const float *x, size_t n);
void MB_CPU(join)(struct mb_context *ctx, struct mb_stream *stream, float *x, const uint16_t *upper,
                  const uint16_t *lower, size_t n);
void MB_CPU(adamw)(struct mb_context *ctx, struct mb_stream *stream, const struct mb_adamw *a);
void MB_CPU(sgd)(struct mb_context *ctx, struct mb_stream *stream, const struct mb_sgd *a);
void MB_CPU(count_zeros)(struct mb_context *ctx, struct mb_stream *stream, const float *x, size_t n,
                         double *n_zeros);
void MB_CPU(to_bf16)(struct mb_context *ctx, struct mb_stream *stream, uint16_t *out,
                     const float *x, size_t n);
void MB_CPU(from_bf16)(struct mb_context *ctx, struct mb_stream *stream, float *out,
                       const uint16_t *x, size_t n);
void MB_CPU(squared_norm)(struct mb_context *ctx, struct mb_stream *stream, const float *x,
                          size_t n, double *sum);
void MB_CPU(scale)(struct mb_context *ctx, struct mb_stream *stream, float *x, size_t n, float a);
void MB_CPU(axpy)(struct mb_context *ctx, struct mb_stream *stream, float *y, const float *x,
                  size_t n, float a);

/* factor[i] = 1 / (1 - probability) if element first + i is kept, else 0 (dropout_add.c). */
void MB_CPU(dropout_factors)(const struct mb_dropout *d, uint64_t first, size_t n, float *factor);
#endif

#endif
