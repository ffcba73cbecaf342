/*
 * Linear layer of matrices in fp8. cuBLASLt's products of them want both operands with the
 * dimension that is summed over last, so each of the three products takes that copy of its
 * operands: out = x weight^T, sums over n_in: rows of both; d_x = d_out weight, over n_out: rows of
 * d_out, columns of weight; d_weight = d_out^T x, over n_rows: columns of both. Forward takes fast
 * accumulation, as Transformer Engine does: errors of it do not add up over steps.
 */
#include "worker/kernels/cuda/cuda.h"

int mb_cuda_fp8_check(struct mb_context *ctx, struct mb_err *err)
{
    if (ctx->capability >= 89)
        return 0;
    return mb_err_set(err, MB_EUNSUPPORTED,
                      "FP8 needs a device of compute capability 8.9 or higher; %s has %d.%d",
                      ctx->name, ctx->capability / 10, ctx->capability % 10);
}

void mb_cuda_fp8_linear_forward(struct mb_context *ctx, struct mb_stream *stream,
                                const struct mb_fp8_linear_forward *a)
{
    const struct mb_cuda_product p = {.m = a->n_rows,
                                      .n = a->n_out,
                                      .k = a->n_in,
                                      .transpose_b = 1,
                                      .a = a->x.rows,
                                      .b = a->weight.rows,
                                      .c = a->residual,
                                      .bias = a->bias,
                                      .d = a->out,
                                      .dtype = MB_DTYPE_BF16,
                                      .d_dtype = MB_DTYPE_BF16,
                                      .epilogue = a->bias != NULL ? MB_CUDA_BIAS : MB_CUDA_PLAIN,
                                      .fp8_a = a->x.format,
                                      .fp8_b = a->weight.format,
                                      .inverse_a = &a->x.scale->inverse,
                                      .inverse_b = &a->weight.scale->inverse,
                                      .is_fast = 1};
    mb_cuda_blas_run(ctx->blas, stream, &p);
}

void mb_cuda_fp8_linear_backward(struct mb_context *ctx, struct mb_stream *stream,
                                 const struct mb_fp8_linear_backward *a)
{
    const struct mb_cuda_product d_x = {.m = a->n_rows,
                                        .n = a->n_in,
                                        .k = a->n_out,
                                        .transpose_b = 1,
                                        .a = a->d_out.rows,
                                        .b = a->weight.columns,
                                        .d = a->d_x,
                                        .dtype = MB_DTYPE_BF16,
                                        .d_dtype = MB_DTYPE_BF16,
                                        .fp8_a = a->d_out.format,
                                        .fp8_b = a->weight.format,
                                        .inverse_a = &a->d_out.scale->inverse,
                                        .inverse_b = &a->weight.scale->inverse};
    const struct mb_cuda_product d_weight = {.m = a->n_out,
                                             .n = a->n_in,
                                             .k = a->n_rows,
                                             .transpose_b = 1,
                                             .a = a->d_out.columns,
                                             .b = a->x.columns,
                                             .c = a->sets_d_weight ? NULL : a->d_weight,
                                             .d = a->d_weight,
                                             .dtype = MB_DTYPE_BF16,
                                             .d_dtype = MB_DTYPE_F32,
                                             .fp8_a = a->d_out.format,
                                             .fp8_b = a->x.format,
                                             .inverse_a = &a->d_out.scale->inverse,
                                             .inverse_b = &a->x.scale->inverse};
    mb_cuda_blas_run(ctx->blas, stream, &d_x);
    mb_cuda_blas_run(ctx->blas, stream, &d_weight);
    if (a->d_bias != NULL)
        mb_cuda_column_sum(ctx, stream, a->bf16_d_out, a->n_rows, a->n_out, MB_DTYPE_BF16,
                           a->d_bias);
}
