/* Dropout and the residual sum behind it: a thread has the four elements of one Philox block. */
#include "worker/kernels/cuda/dropout.cuh"

enum { THREADS = 256 };

template <class T, bool DROPS>
__global__ void dropout_add_kernel(const T *x, const T *residual, T *out, size_t n,
                                   const __grid_constant__ struct dropout given)
{
    const struct dropout d = dropout_now(given);
    const uint64_t skip = d.first_element % 4;
    const uint64_t block = blockIdx.x * (uint64_t)THREADS + threadIdx.x;
    uint32_t word[4];
    if (DROPS)
        dropout_words(d, d.first_element / 4 + block, word);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint64_t e = 4 * block + i - skip; /* below skip it wraps to beyond n */
        if (e >= n)
            continue;
        const float kept = to_float(x[e]) * (DROPS ? dropout_factor(d, word[i]) : 1.0f);
        out[e] = from_float<T>(residual != NULL ? to_float(residual[e]) + kept : kept);
    }
}

template <class T> static void run(struct mb_stream *stream, const struct mb_dropout_add *a)
{
    const struct dropout d = dropout_of(&a->dropout);
    const unsigned blocks = blocks_for(a->n + 3, 4 * THREADS);
    const T *x = (const T *)a->x, *residual = (const T *)a->residual;
    if (a->dropout.probability > 0)
        dropout_add_kernel<T, true>
            <<<blocks, THREADS, 0, stream->cuda>>>(x, residual, (T *)a->out, a->n, d);
    else
        dropout_add_kernel<T, false>
            <<<blocks, THREADS, 0, stream->cuda>>>(x, residual, (T *)a->out, a->n, d);
    mb_cuda_launched(stream, "dropout_add");
}

void mb_cuda_dropout_add(struct mb_context *ctx, struct mb_stream *stream,
                         const struct mb_dropout_add *a)
{
    (void)ctx;
    with_type(a->dtype, [&](auto t) { run<decltype(t)>(stream, a); });
}
