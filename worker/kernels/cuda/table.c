/* The exported symbol: the table of the CUDA backend. */
#include "worker/kernels/cuda/cuda.h"

static const struct mb_backend TABLE = {
    .abi = MB_BACKEND_ABI,
    .name = "cuda",
    .dtypes = 1u << MB_DTYPE_F32 | 1u << MB_DTYPE_BF16,
    .features = MB_FEATURE_RMSNORM | MB_FEATURE_SWIGLU | MB_FEATURE_ROPE | MB_FEATURE_NO_POSITIONS,
    .open = mb_cuda_open,
    .close = mb_cuda_close,
    .describe = mb_cuda_describe,
    .alloc = mb_cuda_alloc,
    .free = mb_cuda_free,
    .memory = mb_cuda_memory,
    .stream_create = mb_cuda_stream_create,
    .stream_destroy = mb_cuda_stream_destroy,
    .synchronize = mb_cuda_synchronize,
    .attention_scratch = mb_cuda_attention_scratch,
    .cross_entropy_scratch = mb_cuda_cross_entropy_scratch,
    .copy_in = mb_cuda_copy_in,
    .copy_out = mb_cuda_copy_out,
    .zero = mb_cuda_zero,
    .embedding_forward = mb_cuda_embedding_forward,
    .embedding_backward = mb_cuda_embedding_backward,
    .layernorm_forward = mb_cuda_layernorm_forward,
    .layernorm_backward = mb_cuda_layernorm_backward,
    .rmsnorm_forward = mb_cuda_rmsnorm_forward,
    .rmsnorm_backward = mb_cuda_rmsnorm_backward,
    .linear_forward = mb_cuda_linear_forward,
    .linear_backward = mb_cuda_linear_backward,
    .gelu_forward = mb_cuda_gelu_forward,
    .gelu_backward = mb_cuda_gelu_backward,
    .swiglu_forward = mb_cuda_swiglu_forward,
    .swiglu_backward = mb_cuda_swiglu_backward,
    .rope = mb_cuda_rope,
    .dropout_add = mb_cuda_dropout_add,
    .attention_forward = mb_cuda_attention_forward,
    .attention_backward = mb_cuda_attention_backward,
    .cross_entropy = mb_cuda_cross_entropy,
    .adamw = mb_cuda_adamw,
    .squared_norm = mb_cuda_squared_norm,
    .scale = mb_cuda_scale,
    .axpy = mb_cuda_axpy,
    .split = mb_cuda_split,
    .join = mb_cuda_join,
    .narrow = mb_cuda_narrow,
    .collectives = &mb_cuda_collectives,
};

__attribute__((visibility("default"))) const struct mb_backend *mb_backend_table(void)
{
    return &TABLE;
}
