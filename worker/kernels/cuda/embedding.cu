/*
 * Token and position embedding.
 *
 * Backward sums rows of equal tokens. To do so in one order, a block owns some vocabulary rows: it
 * walks over all tokens, finds its own by ballots and adds their rows one after the other. Tokens
 * stay in the second-level cache. A position's rows are summed over the samples by the threads of
 * its columns.
 */
#include "worker/kernels/cuda/device.cuh"
#include "worker/kernels/split.h"

enum { THREADS = 256, ROWS = 16 }; /* vocabulary rows of a block */

static __device__ void fault(unsigned long long *where, size_t row, int32_t id)
{
    atomicMin(where, (unsigned long long)row << 32 | (uint32_t)id);
}

/* A weight as it is, or in halves; neither: there is none. */
struct table {
    const float *whole;
    const uint16_t *upper, *lower;

    __device__ bool is_there() const
    {
        return whole != NULL || upper != NULL;
    }

    __device__ float at(size_t i) const
    {
        return whole != NULL ? whole[i] : mb_split_join(upper[i], lower[i]);
    }
};

template <class T>
__global__ void embedding_forward_kernel(const int32_t *token, const struct table tokens,
                                         const struct table positions, T *out, size_t seq,
                                         size_t hidden, size_t vocab, size_t first_row,
                                         size_t all_vocab, unsigned long long *faults)
{
    const size_t t = blockIdx.x;
    const int32_t id = token[t];
    const size_t row = (size_t)id - first_row; /* huge below first_row */
    if (id < 0 || (size_t)id >= all_vocab) {
        if (threadIdx.x == 0)
            fault(faults, t, id);
        return;
    }
    if (row >= vocab) {
        for (size_t i = threadIdx.x; i < hidden; i += THREADS)
            out[t * hidden + i] = from_float<T>(0);
        return;
    }
    const size_t w = row * hidden, p = t % seq * hidden;
    const bool has_positions = positions.is_there();
    for (size_t i = threadIdx.x; i < hidden; i += THREADS) {
        const float x = tokens.at(w + i);
        out[t * hidden + i] = from_float<T>(has_positions ? x + positions.at(p + i) : x);
    }
}

template <class T>
__global__ void token_backward_kernel(const int32_t *token, const T *d_out, float *d_weight,
                                      size_t n_tokens, size_t hidden, size_t vocab,
                                      size_t first_row, size_t all_vocab,
                                      unsigned long long *faults)
{
    __shared__ unsigned found[THREADS / WARP];
    const size_t first = (size_t)blockIdx.x * ROWS,
                 end = first + ROWS < vocab ? first + ROWS : vocab;
    for (size_t t0 = 0; t0 < n_tokens; t0 += THREADS) {
        const size_t t = t0 + threadIdx.x;
        const int32_t id = t < n_tokens ? token[t] : 0;
        const size_t id_row = (size_t)id - first_row; /* huge below first_row */
        const bool mine = t < n_tokens && id >= 0 && id_row >= first && id_row < end;
        if (blockIdx.x == 0 && t < n_tokens && (id < 0 || (size_t)id >= all_vocab))
            fault(faults, t, id);
        if (!__syncthreads_or(mine))
            continue;
        const unsigned ballot = __ballot_sync(~0u, mine);
        if (threadIdx.x % WARP == 0)
            found[threadIdx.x / WARP] = ballot;
        __syncthreads();
        for (int w = 0; w < THREADS / WARP; w++)
            for (unsigned left = found[w]; left != 0; left &= left - 1) {
                const size_t row = t0 + (size_t)w * WARP + (size_t)(__ffs((int)left) - 1);
                float *d = d_weight + ((size_t)token[row] - first_row) * hidden;
                for (size_t i = threadIdx.x; i < hidden; i += THREADS)
                    d[i] += to_float(d_out[row * hidden + i]);
            }
        __syncthreads();
    }
}

template <class T>
__global__ void position_backward_kernel(const T *d_out, float *d_weight, size_t n_tokens,
                                         size_t seq, size_t hidden)
{
    const size_t position = blockIdx.x;
    for (size_t i = threadIdx.x; i < hidden; i += THREADS) {
        float sum = 0;
        for (size_t t = position; t < n_tokens; t += seq)
            sum += to_float(d_out[t * hidden + i]);
        d_weight[position * hidden + i] += sum;
    }
}

template <class T> static void forward(struct mb_stream *s, const struct mb_embedding_forward *a)
{
    const struct table tokens = {a->token_weight, a->token_upper, a->token_lower};
    const struct table positions = {a->position_weight, a->position_upper, a->position_lower};
    embedding_forward_kernel<T><<<(unsigned)a->n_tokens, THREADS, 0, s->cuda>>>(
        a->token, tokens, positions, (T *)a->out, a->seq, a->hidden, a->vocab, a->first,
        mb_all_vocab(a->all_vocab, a->vocab), &s->faults->token);
}

template <class T> static void backward(struct mb_stream *s, const struct mb_embedding_backward *a)
{
    const size_t positions = a->seq < a->n_tokens ? a->seq : a->n_tokens;
    token_backward_kernel<T><<<blocks_for(a->vocab, ROWS), THREADS, 0, s->cuda>>>(
        a->token, (const T *)a->d_out, a->d_token_weight, a->n_tokens, a->hidden, a->vocab,
        a->first, mb_all_vocab(a->all_vocab, a->vocab), &s->faults->token);
    if (a->d_position_weight == NULL)
        return;
    position_backward_kernel<T><<<(unsigned)positions, THREADS, 0, s->cuda>>>(
        (const T *)a->d_out, a->d_position_weight, a->n_tokens, a->seq, a->hidden);
}

void mb_cuda_embedding_forward(struct mb_context *ctx, struct mb_stream *stream,
                               const struct mb_embedding_forward *a)
{
    (void)ctx;
    stream->token_vocab = mb_all_vocab(a->all_vocab, a->vocab);
    with_type(a->dtype, [&](auto t) { forward<decltype(t)>(stream, a); });
    mb_cuda_launched(stream, "embedding");
}

void mb_cuda_embedding_backward(struct mb_context *ctx, struct mb_stream *stream,
                                const struct mb_embedding_backward *a)
{
    (void)ctx;
    stream->token_vocab = mb_all_vocab(a->all_vocab, a->vocab);
    with_type(a->dtype, [&](auto t) { backward<decltype(t)>(stream, a); });
    mb_cuda_launched(stream, "embedding gradient");
}
