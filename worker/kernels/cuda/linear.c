/*
 * Linear layer. In bf16 and fp16 with the tanh form GELU and its gradient are epilogues of the
 * product; else they are passes of their own, which keeps fp32 as exact as the CPU's. The bias
 * gradient is a pass of its own: as an epilogue it costs more than it saves.
 */
#include "worker/kernels/cuda/cuda.h"

static int fuses_gelu(enum mb_dtype dtype, enum mb_gelu_form form, size_t n_columns)
{
    /* The epilogue reads and writes its second matrix in 16 bytes. */
    return dtype != MB_DTYPE_F32 && form == MB_GELU_TANH && n_columns % 8 == 0;
}

void mb_cuda_linear_forward(struct mb_context *ctx, struct mb_stream *stream,
                            const struct mb_linear_forward *a)
{
    struct mb_cuda_product p = {.m = a->n_rows,
                                .n = a->n_out,
                                .k = a->n_in,
                                .transpose_b = 1,
                                .a = a->x,
                                .b = a->weight,
                                .c = a->residual,
                                .bias = a->bias,
                                .d = a->out,
                                .dtype = a->dtype,
                                .d_dtype = a->dtype,
                                .epilogue = a->bias != NULL ? MB_CUDA_BIAS : MB_CUDA_PLAIN};
    const int fuses =
        a->gelu_out != NULL && a->bias != NULL && fuses_gelu(a->dtype, a->form, a->n_out);
    if (fuses) {
        p.epilogue = MB_CUDA_GELU_BIAS;
        p.aux = a->out;
        p.d = a->gelu_out;
    }
    mb_cuda_blas_run(ctx->blas, stream, &p);
    if (a->gelu_out != NULL && !fuses) {
        struct mb_gelu gelu = {.x = a->out,
                               .out = a->gelu_out,
                               .n = a->n_rows * a->n_out,
                               .form = a->form,
                               .dtype = a->dtype};
        mb_cuda_gelu_forward(ctx, stream, &gelu);
    }
}

void mb_cuda_linear_backward(struct mb_context *ctx, struct mb_stream *stream,
                             const struct mb_linear_backward *a)
{
    const int fuses = a->gelu_x != NULL && fuses_gelu(a->dtype, a->form, a->n_in);
    struct mb_cuda_product d_x = {.m = a->n_rows,
                                  .n = a->n_in,
                                  .k = a->n_out,
                                  .a = a->d_out,
                                  .b = a->weight,
                                  .d = a->d_x,
                                  .dtype = a->dtype,
                                  .d_dtype = a->dtype,
                                  .epilogue = fuses ? MB_CUDA_DGELU : MB_CUDA_PLAIN,
                                  .aux = fuses ? (void *)(uintptr_t)a->gelu_x : NULL};
    struct mb_cuda_product d_weight = {.m = a->n_out,
                                       .n = a->n_in,
                                       .k = a->n_rows,
                                       .transpose_a = 1,
                                       .a = a->d_out,
                                       .b = a->x,
                                       .c = a->sets_d_weight ? NULL : a->d_weight,
                                       .d = a->d_weight,
                                       .dtype = a->dtype,
                                       .d_dtype = MB_DTYPE_F32};
    if (a->d_x != NULL)
        mb_cuda_blas_run(ctx->blas, stream, &d_x);
    if (a->d_weight != NULL)
        mb_cuda_blas_run(ctx->blas, stream, &d_weight);
    if (a->d_x != NULL && a->gelu_x != NULL && !fuses) {
        struct mb_gelu gelu = {.x = a->gelu_x,
                               .d_out = a->d_x,
                               .out = a->d_x,
                               .n = a->n_rows * a->n_in,
                               .form = a->form,
                               .dtype = a->dtype};
        mb_cuda_gelu_backward(ctx, stream, &gelu);
    }
    if (a->d_bias != NULL)
        mb_cuda_column_sum(ctx, stream, a->d_out, a->n_rows, a->n_out, a->dtype, a->d_bias);
}
