/* Where one head of one sample lies, worker/kernels/op.h says how a row of qkv is laid out; and
 * what the kernels on matrix units are called with. */
#ifndef MOBULA_WORKER_KERNELS_CUDA_ATTENTION_CUH
#define MOBULA_WORKER_KERNELS_CUDA_ATTENTION_CUH

#include "worker/kernels/cuda/dropout.cuh"

/* Positions in the whole sample: of rows before half from first on, of the others from second. */
struct places {
    size_t half, first, second;
};

struct attention {
    size_t seq; /* rows of a sample in memory */
    size_t n_heads, n_groups, head_dim, ld_qkv, ld_out;
    float scale; /* of the scores: 1 / sqrt(head_dim) */

    /* The rest is for the kernels on matrix units. Keys and values, in qkv or a matrix of their
     * own: the distance of rows and of groups, and where a group's key begins. */
    size_t ld_kv, group_kv, first_kv;
    int n_queries, n_keys;     /* rows of each sample that meet */
    bool is_causal;            /* query i sees the keys [0, i]; else every query every key */
    bool joins;                /* outcomes are added to those that are there */
    size_t all_heads, all_seq; /* dropout's: of whole samples */
    struct places query_places, key_places;
};

struct attention_head {
    size_t q, k,
        v;      /* elements from the start of qkv, or of keys and values, to row 0 of the sample */
    size_t out; /* elements from the start of out to row 0 of the sample */
    size_t index; /* sample * n_heads + head */
    size_t drops; /* sample * all_heads + head */
};

/* Of whole samples. */
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
    a.ld_kv = a.ld_qkv;
    a.first_kv = s->n_heads / s->n_groups * s->head_dim;
    a.group_kv = a.first_kv + 2 * s->head_dim;
    a.n_queries = a.n_keys = (int)s->seq;
    a.is_causal = true;
    a.joins = false;
    a.all_heads = s->n_heads;
    a.all_seq = s->seq;
    a.query_places = a.key_places = {s->seq, 0, 0};
    return a;
}

static __device__ __forceinline__ struct attention_head head_at(const struct attention &a,
                                                                size_t sample, size_t head)
{
    const size_t per_group = a.n_heads / a.n_groups, group = head / per_group;
    const size_t group_q = (per_group + 2) * a.head_dim;
    struct attention_head h;
    h.index = sample * a.n_heads + head;
    h.drops = sample * a.all_heads + head;
    h.q = sample * a.seq * a.ld_qkv + group * group_q + head % per_group * a.head_dim;
    h.k = sample * a.seq * a.ld_kv + group * a.group_kv + a.first_kv;
    h.v = h.k + a.head_dim;
    h.out = sample * a.seq * a.ld_out + head * a.head_dim;
    return h;
}

static __device__ __forceinline__ size_t place_of(const struct places &p, size_t row)
{
    return row < p.half ? p.first + row : p.second + row - p.half;
}

/* Counted from dropout's first element; drops: attention_head's. */
static __device__ __forceinline__ size_t score_element(const struct attention &a, size_t drops,
                                                       size_t i, size_t j)
{
    return (drops * a.all_seq + place_of(a.query_places, i)) * a.all_seq +
           place_of(a.key_places, j);
}

/* The dropout factor of score (i, j) of a head. */
static __device__ __forceinline__ float
score_factor(const struct attention &a, const struct dropout &d, size_t drops, size_t i, size_t j)
{
    return dropout_at(d, score_element(a, drops, i, j));
}

/* ---- on matrix units ---- */

/* Pointers are to the first row that meets. */
struct attention_tiles {
    struct attention a;
    size_t n_samples;
    enum mb_dtype dtype;
    const void *qkv, *kv;
    struct dropout dropout;

    void *out;
    float *log_sum; /* [n_samples, n_heads, seq] */

    const void *d_out;
    const float *log_all; /* log_sum over all keys */
    const float *delta;   /* d_out . out, shaped as log_sum */
    void *d_qkv;          /* of the queries */
    void *d_kv;           /* shaped as kv; NULL: d_kv_sum is written */
    float *d_kv_sum;
};

/* For heads of 64 or 128 channels in bf16 or fp16 at 16-byte boundaries (attention_mma.cu). */
void mb_cuda_attention_mma_forward(struct mb_stream *stream, const struct attention_tiles *t);
void mb_cuda_attention_mma_backward(struct mb_stream *stream, const struct attention_tiles *t);
void mb_cuda_attention_mma_fp16_forward(struct mb_stream *stream, const struct attention_tiles *t);
void mb_cuda_attention_mma_fp16_backward(struct mb_stream *stream, const struct attention_tiles *t);
/* For those of them that mb_cuda_attention_hopper_fits() (attention_hopper.cu). */
void mb_cuda_attention_hopper_forward(struct mb_stream *stream, const struct attention_tiles *t);
void mb_cuda_attention_hopper_backward(struct mb_stream *stream, const struct attention_tiles *t);

/* d_out . out of each row and head into delta, for what the kernels on matrix units take. */
void mb_cuda_attention_delta(struct mb_stream *stream, const struct mb_attention_shape *shape,
                             enum mb_dtype dtype, const void *out, const void *d_out, float *delta);

#endif
