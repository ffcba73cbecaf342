/*
 * Sums over the rows of a matrix: each block sums a slice of the rows of its columns, a second
 * kernel adds the slices in order. Partial sums lie in the stream's workspace.
 */
#include "worker/kernels/cuda/device.cuh"

enum { THREADS = 256, MAX_SLICES = 128, PART_ROWS = 32 };

/* A thread sums N neighbouring columns over every blockDim.y-th row of the slice. */
template <class T, int N>
__global__ void column_sum_kernel(const T *x, size_t n_rows, size_t n_columns, size_t slice_rows,
                                  float *parts)
{
    __shared__ float shared[THREADS * N];
    const size_t column = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    const size_t begin = blockIdx.y * slice_rows;
    const size_t end = begin + slice_rows < n_rows ? begin + slice_rows : n_rows;
    float sum[N] = {};
    if (column < n_columns)
#pragma unroll 4
        for (size_t r = begin + threadIdx.y; r < end; r += blockDim.y) {
            if constexpr (N == 1) {
                sum[0] += to_float(x[r * n_columns + column]);
            } else {
                const vec<T> v = load_vec(x + r * n_columns + column);
                for (int i = 0; i < N; i++)
                    sum[i] += to_float(v.v[i]);
            }
        }
    for (int i = 0; i < N; i++)
        shared[(threadIdx.y * blockDim.x + threadIdx.x) * N + i] = sum[i];
    __syncthreads();
    if (threadIdx.y != 0 || column >= n_columns)
        return;
    for (int i = 0; i < N; i++) {
        float total = 0;
        for (unsigned y = 0; y < blockDim.y; y++)
            total += shared[(y * blockDim.x + threadIdx.x) * N + i];
        parts[blockIdx.y * n_columns + column + i] = total;
    }
}

__global__ void add_parts_kernel(const float *parts, size_t n_parts, size_t n_columns,
                                 const __grid_constant__ struct mb_cuda_sums sums)
{
    __shared__ float shared[PART_ROWS][WARP];
    const size_t c = (size_t)blockIdx.x * WARP + threadIdx.x, stride = sums.n * n_columns;
    float total = 0;
    parts += blockIdx.y * n_columns;
    if (c < n_columns)
#pragma unroll 8
        for (size_t i = threadIdx.y; i < n_parts; i += PART_ROWS)
            total += parts[i * stride + c];
    shared[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    for (int i = PART_ROWS / 2; i > 0; i /= 2) {
        if ((int)threadIdx.y < i)
            shared[threadIdx.y][threadIdx.x] += shared[threadIdx.y + i][threadIdx.x];
        __syncthreads();
    }
    if (threadIdx.y == 0 && c < n_columns)
        sums.out[blockIdx.y][c] += shared[0][threadIdx.x];
}

void mb_cuda_add_parts(struct mb_stream *stream, const float *parts, size_t n_parts,
                       size_t n_columns, const struct mb_cuda_sums *sums)
{
    const dim3 blocks(blocks_for(n_columns, WARP), (unsigned)sums->n);
    add_parts_kernel<<<blocks, dim3(WARP, PART_ROWS), 0, stream->cuda>>>(parts, n_parts, n_columns,
                                                                         *sums);
    mb_cuda_launched(stream, "sum over rows");
}

template <class T, int N>
static void run(struct mb_context *ctx, struct mb_stream *stream, const T *x, size_t n_rows,
                size_t n_columns, float *sum)
{
    const dim3 threads(WARP, THREADS / WARP);
    const unsigned blocks = blocks_for(n_columns, (size_t)WARP * N);
    /* Slices so that the device is full, as far as rows and workspace reach. */
    size_t slices = ((size_t)ctx->n_sm * 8 + blocks - 1) / blocks;
    const size_t room = MB_CUDA_WORKSPACE_BYTES / sizeof(float) / n_columns;
    slices = at_most(at_most(at_most(slices, MAX_SLICES), room), blocks_for(n_rows, threads.y));
    const size_t slice_rows = (n_rows + slices - 1) / slices;
    slices = (n_rows + slice_rows - 1) / slice_rows;
    float *parts = (float *)stream->workspace;
    column_sum_kernel<T, N><<<dim3(blocks, (unsigned)slices), threads, 0, stream->cuda>>>(
        x, n_rows, n_columns, slice_rows, parts);
    const struct mb_cuda_sums sums = {{sum}, 1};
    mb_cuda_add_parts(stream, parts, slices, n_columns, &sums);
}

void mb_cuda_column_sum(struct mb_context *ctx, struct mb_stream *stream, const void *x,
                        size_t n_rows, size_t n_columns, enum mb_dtype dtype, float *sum)
{
    const bool vectors = is_aligned(x) && n_columns * mb_dtype_size(dtype) % 16 == 0;
    with_type(dtype, [&](auto t) {
        typedef decltype(t) T;
        if (vectors)
            run<T, vec<T>::N>(ctx, stream, (const T *)x, n_rows, n_columns, sum);
        else
            run<T, 1>(ctx, stream, (const T *)x, n_rows, n_columns, sum);
    });
}
