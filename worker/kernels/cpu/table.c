/* The table of one instruction set. What has a dtype goes where that is computed. */
#include "worker/kernels/cpu/half.h"

#define DISPATCH(op, args, place)                                                                  \
    static void op(struct mb_context *ctx, struct mb_stream *stream, const struct args *a)         \
    {                                                                                              \
        if (a->place == MB_DTYPE_F16)                                                              \
            MB_CPU(half_##op)(ctx, stream, a);                                                     \
        else                                                                                       \
            MB_CPU(op)(ctx, stream, a);                                                            \
    }
MB_HALF_OPERATIONS(DISPATCH)
#undef DISPATCH

const struct mb_backend MB_CPU(table) = {
    .abi = MB_BACKEND_ABI,
    .name = "cpu",
    .dtypes = 1u << MB_DTYPE_F32 | 1u << MB_DTYPE_F16,
    .features = MB_FEATURE_RMSNORM | MB_FEATURE_SWIGLU | MB_FEATURE_ROPE | MB_FEATURE_NO_POSITIONS |
                MB_FEATURE_SPREAD_SAMPLES,
    .open = mb_cpu_open,
    .close = mb_cpu_close,
    .describe = mb_cpu_describe,
    .alloc = mb_cpu_alloc,
    .free = mb_cpu_free,
    .allocated = mb_cpu_allocated,
    .stream_create = mb_cpu_stream_create,
    .stream_destroy = mb_cpu_stream_destroy,
    .synchronize = mb_cpu_synchronize,
    .attention_scratch = MB_CPU(attention_scratch),
    .cross_entropy_scratch = MB_CPU(cross_entropy_scratch),
    .copy_in = mb_cpu_copy,
    .copy_out = mb_cpu_copy,
    .zero = mb_cpu_zero,
    .embedding_forward = embedding_forward,
    .embedding_backward = embedding_backward,
    .layernorm_forward = layernorm_forward,
    .layernorm_backward = layernorm_backward,
    .rmsnorm_forward = rmsnorm_forward,
    .rmsnorm_backward = rmsnorm_backward,
    .linear_forward = linear_forward,
    .linear_backward = linear_backward,
    .gelu_forward = gelu_forward,
    .gelu_backward = gelu_backward,
    .swiglu_forward = swiglu_forward,
    .swiglu_backward = swiglu_backward,
    .rope = rope,
    .dropout_add = dropout_add,
    .attention_forward = attention_forward,
    .attention_backward = attention_backward,
    .attention_part_forward = attention_part_forward,
    .attention_part_backward = attention_part_backward,
    .keys_values_take = keys_values_take,
    .keys_values_put = keys_values_put,
    .cross_entropy = cross_entropy,
    .adamw = MB_CPU(adamw),
    .sgd = MB_CPU(sgd),
    .count_zeros = MB_CPU(count_zeros),
    .squared_norm = MB_CPU(squared_norm),
    .scale = MB_CPU(scale),
    .axpy = MB_CPU(axpy),
    .split = MB_CPU(split),
    .join = MB_CPU(join),
    .narrow = MB_CPU(narrow),
    .to_bf16 = MB_CPU(to_bf16),
    .from_bf16 = MB_CPU(from_bf16),
};
