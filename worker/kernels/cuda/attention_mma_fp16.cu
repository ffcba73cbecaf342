/* Attention on matrix units in fp16. */
#include "worker/kernels/cuda/attention_mma.cuh"

void mb_cuda_attention_mma_fp16_forward(struct mb_stream *stream,
                                        const struct mb_attention_forward *a)
{
    mma_forward<fp16>(stream, a);
}

void mb_cuda_attention_mma_fp16_backward(struct mb_stream *stream,
                                         const struct mb_attention_backward *a)
{
    mma_backward<fp16>(stream, a);
}
