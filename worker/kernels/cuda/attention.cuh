/* Where one head of one sample lies; worker/kernels/op.h says how a row of qkv is laid out. */
#ifndef MOBULA_WORKER_KERNELS_CUDA_ATTENTION_CUH
#define MOBULA_WORKER_KERNELS_CUDA_ATTENTION_CUH

#include "worker/kernels/cuda/dropout.cuh"

struct attention {
    size_t seq, n_heads, n_groups, head_dim, ld_qkv, ld_out;
    float scale; /* of the scores: 1 / sqrt(head_dim) */
};

struct attention_head {
    size_t q, k, v; /* elements from the start of qkv to row 0 of the sample */
    size_t out;     /* elements from the start of out to row 0 of the sample */
    size_t index;   /* sample * n_heads + head */
};

static inline struct attention attention_of(const struct mb_attention_shape *s)
{
    struct attention a;
    a.seq = s->seq;
    a.n_heads = s->n_heads;
    a.n_groups = s->n_groups;
    a.head_dim = s->head_dim;
    a.ld_qkv = (s->n_heads + 2 * s->n_groups) * s->head_dim;
    a.ld_out = s->n_heads * s->head_dim;
    a.scale = 1.0f / sqrtf((float)s->head_dim);
    return a;
}

static __device__ __forceinline__ struct attention_head head_at(const struct attention &a,
                                                                size_t sample, size_t head)
{
    const size_t per_group = a.n_heads / a.n_groups, group = head / per_group;
    const size_t row = sample * a.seq * a.ld_qkv + group * (per_group + 2) * a.head_dim;
    struct attention_head h;
    h.index = sample * a.n_heads + head;
    h.q = row + head % per_group * a.head_dim;
    h.k = row + per_group * a.head_dim;
    h.v = h.k + a.head_dim;
    h.out = sample * a.seq * a.ld_out + head * a.head_dim;
    return h;
}

/* The dropout factor of score (i, j) of a head. */
static __device__ __forceinline__ float score_factor(const struct attention &a,
                                                     const struct dropout &d, size_t head_index,
                                                     size_t i, size_t j)
{
    return dropout_at(d, (head_index * a.seq + i) * a.seq + j);
}

#endif
