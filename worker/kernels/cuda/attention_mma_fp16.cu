/* Attention on matrix units in fp16. */
#include "worker/kernels/cuda/attention_mma.cuh"

void mb_cuda_attention_mma_fp16_forward(struct mb_stream *stream, const struct attention_tiles *t)
{
    mma_forward<fp16>(stream, t);
}

void mb_cuda_attention_mma_fp16_backward(struct mb_stream *stream, const struct attention_tiles *t)
{
    mma_backward<fp16>(stream, t);
}
