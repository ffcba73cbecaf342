/*
 * The CUDA backend's inside, shared by its C and CUDA files. Operations are one file each, with the
 * names of the CPU backend; context.c has life, memory and movement, blas.c the matrix products.
 *
 * Everything is enqueued on the stream's CUDA stream. Sums over rows are formed in a fixed order,
 * through partial sums in the stream's workspace: no atomics on floating point numbers, so that a
 * run gives the same bits again.
 */
#ifndef MOBULA_WORKER_KERNELS_CUDA_CUDA_H
#define MOBULA_WORKER_KERNELS_CUDA_CUDA_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "worker/kernels/blocks.h"
#include "worker/kernels/collective.h"
#include "worker/kernels/cuda/blas.h"
#include "worker/kernels/cuda/dnn.h"
#include "worker/kernels/op.h"

enum {
    MB_CUDA_WORKSPACE_BYTES = 64 << 20, /* of a stream: matrix products and partial sums */
    MB_CUDA_LOGITS_BYTES = 1 << 30      /* bound of the logits that exist at a time */
};

/* What a kernel found wrong with its input: the smallest (row << 32 | id), all ones if nothing. */
struct mb_cuda_faults {
    unsigned long long token, label;
};

struct mb_context {
    int index, n_sm, capability;             /* 90 is 9.0 */
    size_t shared_bytes, shared_block_bytes; /* of a multiprocessor; most that a block can have */
    int is_hopper; /* kernels for it are used; MOBULA_CUDA_HOPPER=0 leaves them out */
    char name[64], describe[256];
    struct mb_cuda_blas *blas;
    struct mb_cuda_dnn *dnn; /* NULL: attention by our own kernels only */
    struct mb_blocks blocks;
};

struct mb_stream {
    cudaStream_t cuda;
    void *workspace;               /* MB_CUDA_WORKSPACE_BYTES */
    struct mb_cuda_faults *faults; /* device memory */
    struct mb_cuda_faults *seen;   /* pinned host memory */
    size_t token_vocab, label_vocab;
    struct mb_err err;        /* first failure since the last synchronize() */
    struct mb_err err_before; /* while operations are captured: that of what runs */
};

/* Keeps the stream's first failure; what names the operation. */
void mb_cuda_note(struct mb_stream *stream, cudaError_t code, const char *what);
/* The failure of the launch before, if there is one. */
void mb_cuda_launched(struct mb_stream *stream, const char *what);

int mb_cuda_open(int device_index, struct mb_context **out, struct mb_err *err);
void mb_cuda_close(struct mb_context *ctx);
const char *mb_cuda_describe(struct mb_context *ctx);
int mb_cuda_alloc(struct mb_context *ctx, size_t size_bytes, void **out, struct mb_err *err);
void mb_cuda_free(struct mb_context *ctx, void *p);
void mb_cuda_allocated(struct mb_context *ctx, size_t *now_bytes, size_t *most_bytes,
                       size_t *n_blocks);
void mb_cuda_memory(struct mb_context *ctx, size_t *used_bytes, size_t *total_bytes);
int mb_cuda_stream_create(struct mb_context *ctx, struct mb_stream **out, struct mb_err *err);
void mb_cuda_stream_destroy(struct mb_context *ctx, struct mb_stream *stream);
int mb_cuda_synchronize(struct mb_context *ctx, struct mb_stream *stream, struct mb_err *err);
void mb_cuda_copy_in(struct mb_context *ctx, struct mb_stream *stream, void *dst, const void *host,
                     size_t size_bytes);
void mb_cuda_copy_out(struct mb_context *ctx, struct mb_stream *stream, void *host, const void *src,
                      size_t size_bytes);
void mb_cuda_zero(struct mb_context *ctx, struct mb_stream *stream, void *dst, size_t size_bytes);

int mb_cuda_graph_begin(struct mb_context *ctx, struct mb_stream *stream, struct mb_err *err);
struct mb_graph *mb_cuda_graph_end(struct mb_context *ctx, struct mb_stream *stream,
                                   struct mb_err *err);
void mb_cuda_graph_run(struct mb_context *ctx, struct mb_stream *stream, struct mb_graph *g);
void mb_cuda_graph_destroy(struct mb_context *ctx, struct mb_graph *g);

void mb_cuda_range_begin(struct mb_context *ctx, const char *name);
void mb_cuda_range_end(struct mb_context *ctx);
int mb_cuda_profiler(struct mb_context *ctx, int on, struct mb_err *err);

extern const struct mb_collectives mb_cuda_collectives; /* nccl.c */

/* cudaSuccess if this library has code for the current device. */
cudaError_t mb_cuda_has_code(void);

size_t mb_cuda_attention_scratch(const struct mb_attention_shape *shape);
size_t mb_cuda_cross_entropy_scratch(size_t n_tokens, size_t hidden, size_t vocab);
void mb_cuda_embedding_forward(struct mb_context *ctx, struct mb_stream *stream,
                               const struct mb_embedding_forward *a);
void mb_cuda_embedding_backward(struct mb_context *ctx, struct mb_stream *stream,
                                const struct mb_embedding_backward *a);
void mb_cuda_layernorm_forward(struct mb_context *ctx, struct mb_stream *stream,
                               const struct mb_layernorm_forward *a);
void mb_cuda_layernorm_backward(struct mb_context *ctx, struct mb_stream *stream,
                                const struct mb_layernorm_backward *a);
void mb_cuda_rmsnorm_forward(struct mb_context *ctx, struct mb_stream *stream,
                             const struct mb_rmsnorm_forward *a);
void mb_cuda_rmsnorm_backward(struct mb_context *ctx, struct mb_stream *stream,
                              const struct mb_rmsnorm_backward *a);
void mb_cuda_swiglu_forward(struct mb_context *ctx, struct mb_stream *stream,
                            const struct mb_swiglu_forward *a);
void mb_cuda_swiglu_backward(struct mb_context *ctx, struct mb_stream *stream,
                             const struct mb_swiglu_backward *a);
void mb_cuda_rope(struct mb_context *ctx, struct mb_stream *stream, const struct mb_rope *a);
void mb_cuda_linear_forward(struct mb_context *ctx, struct mb_stream *stream,
                            const struct mb_linear_forward *a);
void mb_cuda_linear_backward(struct mb_context *ctx, struct mb_stream *stream,
                             const struct mb_linear_backward *a);
int mb_cuda_fp8_check(struct mb_context *ctx, struct mb_err *err);
void mb_cuda_fp8_amax(struct mb_context *ctx, struct mb_stream *stream,
                      const struct mb_fp8_amax *a);
void mb_cuda_fp8_quantize(struct mb_context *ctx, struct mb_stream *stream,
                          const struct mb_fp8_quantize *a);
void mb_cuda_fp8_linear_forward(struct mb_context *ctx, struct mb_stream *stream,
                                const struct mb_fp8_linear_forward *a);
void mb_cuda_fp8_linear_backward(struct mb_context *ctx, struct mb_stream *stream,
                                 const struct mb_fp8_linear_backward *a);
void mb_cuda_gelu_forward(struct mb_context *ctx, struct mb_stream *stream,
                          const struct mb_gelu *a);
void mb_cuda_gelu_backward(struct mb_context *ctx, struct mb_stream *stream,
                           const struct mb_gelu *a);
void mb_cuda_dropout_add(struct mb_context *ctx, struct mb_stream *stream,
                         const struct mb_dropout_add *a);
void mb_cuda_attention_forward(struct mb_context *ctx, struct mb_stream *stream,
                               const struct mb_attention_forward *a);
void mb_cuda_attention_backward(struct mb_context *ctx, struct mb_stream *stream,
                                const struct mb_attention_backward *a);
void mb_cuda_cross_entropy(struct mb_context *ctx, struct mb_stream *stream,
                           const struct mb_cross_entropy *a);
void mb_cuda_adamw(struct mb_context *ctx, struct mb_stream *stream, const struct mb_adamw *a);
void mb_cuda_sgd(struct mb_context *ctx, struct mb_stream *stream, const struct mb_sgd *a);
void mb_cuda_count_zeros(struct mb_context *ctx, struct mb_stream *stream, const float *x, size_t n,
                         double *n_zeros);
void mb_cuda_to_bf16(struct mb_context *ctx, struct mb_stream *stream, uint16_t *out,
                     const float *x, size_t n);
void mb_cuda_from_bf16(struct mb_context *ctx, struct mb_stream *stream, float *out,
                       const uint16_t *x, size_t n);
void mb_cuda_squared_norm(struct mb_context *ctx, struct mb_stream *stream, const float *x,
                          size_t n, double *sum);
void mb_cuda_scale(struct mb_context *ctx, struct mb_stream *stream, float *x, size_t n, float a);
void mb_cuda_axpy(struct mb_context *ctx, struct mb_stream *stream, float *y, const float *x,
                  size_t n, float a);
void mb_cuda_split(struct mb_context *ctx, struct mb_stream *stream, uint16_t *upper,
                   uint16_t *lower, const float *x, size_t n);
void mb_cuda_join(struct mb_context *ctx, struct mb_stream *stream, float *x, const uint16_t *upper,
                  const uint16_t *lower, size_t n);

void mb_cuda_narrow(struct mb_context *ctx, struct mb_stream *stream, uint16_t *out, const float *x,
                    size_t n);

/* sum[c] += the sum over rows of x[., c]; x [n_rows, n_columns] (column_sum.cu). */
void mb_cuda_column_sum(struct mb_context *ctx, struct mb_stream *stream, const void *x,
                        size_t n_rows, size_t n_columns, enum mb_dtype dtype, float *sum);
enum { MB_CUDA_SUMS_MAX = 3 };

struct mb_cuda_sums {
    float *out[MB_CUDA_SUMS_MAX];
    int n;
};

/* out[k][c] += the sum of the n_parts partial sums at parts[.][k][c] (column_sum.cu). */
void mb_cuda_add_parts(struct mb_stream *stream, const float *parts, size_t n_parts,
                       size_t n_columns, const struct mb_cuda_sums *sums);

/* Attention in bf16 and fp16 on matrix units; 0 where the shape is not theirs (attention_mma.cu).
 */
int mb_cuda_attention_mma_fits(const struct mb_attention_shape *shape, enum mb_dtype dtype,
                               const void *qkv, const void *out);
/* The same on Hopper, for heads of 64 channels among those that fit above (attention_hopper.cu). */
int mb_cuda_attention_hopper_fits(const struct mb_context *ctx,
                                  const struct mb_attention_shape *shape);

#ifdef __cplusplus
}
#endif

#endif
