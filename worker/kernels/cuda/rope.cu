/*
 * Rotary positions, in place, a block a row of qkv: a row is, per query group, its query heads and
 * then one key, which are turned, and a value, which is passed over. A thread turns 16 bytes of
 * first and of second channels where heads allow it, else one pair.
 */
#include "worker/kernels/cuda/device.cuh"

enum { THREADS = 128 };

template <class T, int W>
__global__ void rope_kernel(T *qkv, const float *cosine, const float *sine, size_t seq,
                            size_t n_groups, size_t turned, size_t head_dim, size_t half,
                            float sign)
{
    typedef neighbours<T, W> packed;
    const size_t row = blockIdx.x, per_head = half / W;
    const size_t n = n_groups * turned * per_head, at = row % seq * half;
    qkv += row * n_groups * (turned + 1) * head_dim;
    for (size_t i = threadIdx.x; i < n; i += THREADS) {
        const size_t head = i / per_head, c = i % per_head * W;
        T *first = qkv + (head / turned * (turned + 1) + head % turned) * head_dim + c;
        packed a = *(const packed *)first, b = *(const packed *)(first + half), x, y;
        for (int k = 0; k < W; k++) {
            const float cos = to_float(from_float<T>(cosine[at + c + k]));
            const float sin = sign * to_float(from_float<T>(sine[at + c + k]));
            const float p = to_float(a.v[k]), q = to_float(b.v[k]);
            x.v[k] = from_float<T>(p * cos - q * sin);
            y.v[k] = from_float<T>(q * cos + p * sin);
        }
        *(packed *)first = x;
        *(packed *)(first + half) = y;
    }
}

template <class T> static void run(struct mb_stream *stream, const struct mb_rope *a)
{
    constexpr int N = vec<T>::N;
    const struct mb_attention_shape *s = &a->shape;
    const size_t turned = s->n_heads / s->n_groups + 1, half = a->rotary_dim / 2;
    const float sign = a->inverse ? -1.0f : 1.0f;
    const unsigned rows = (unsigned)(s->n_samples * s->seq);
    if (half % N == 0 && s->head_dim % N == 0 && is_aligned(a->qkv))
        rope_kernel<T, N><<<rows, THREADS, 0, stream->cuda>>>(
            (T *)a->qkv, a->cosine, a->sine, s->seq, s->n_groups, turned, s->head_dim, half, sign);
    else
        rope_kernel<T, 1><<<rows, THREADS, 0, stream->cuda>>>(
            (T *)a->qkv, a->cosine, a->sine, s->seq, s->n_groups, turned, s->head_dim, half, sign);
    mb_cuda_launched(stream, "rotary positions");
}

void mb_cuda_rope(struct mb_context *ctx, struct mb_stream *stream, const struct mb_rope *a)
{
    (void)ctx;
    with_type(a->dtype, [&](auto t) { run<decltype(t)>(stream, a); });
}
