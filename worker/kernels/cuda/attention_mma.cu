/* Attention on matrix units: what it takes, and bf16. */
#include "worker/kernels/cuda/attention_mma.cuh"

int mb_cuda_attention_mma_fits(const struct mb_attention_shape *shape, enum mb_dtype dtype,
                               const void *qkv, const void *out)
{
    return dtype != MB_DTYPE_F32 && (shape->head_dim == 64 || shape->head_dim == 128) &&
           is_aligned(qkv) && is_aligned(out);
}

void mb_cuda_attention_mma_forward(struct mb_stream *stream, const struct attention_tiles *t)
{
    if (t->dtype == MB_DTYPE_F16)
        mb_cuda_attention_mma_fp16_forward(stream, t);
    else
        mma_forward<bf16>(stream, t);
}

void mb_cuda_attention_mma_backward(struct mb_stream *stream, const struct attention_tiles *t)
{
    if (t->dtype == MB_DTYPE_F16)
        mb_cuda_attention_mma_fp16_backward(stream, t);
    else
        mma_backward<bf16>(stream, t);
}
