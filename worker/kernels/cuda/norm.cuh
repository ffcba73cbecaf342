/*
 * LayerNorm and RMSNorm of rows of any length and place: a warp a row, read again from cache
 * between the passes, and the gradient of the parameters by a kernel that walks down the columns.
 * RMSNorm is LayerNorm without a mean and a bias: CENTRED is false and their pointers are NULL.
 */
#ifndef MOBULA_WORKER_KERNELS_CUDA_NORM_CUH
#define MOBULA_WORKER_KERNELS_CUDA_NORM_CUH

#include "worker/kernels/cuda/device.cuh"

enum { THREADS = 256, WARPS = THREADS / WARP, COLUMN_ROWS = 8 };

template <class T, bool CENTRED>
__global__ void any_forward_kernel(const T *x, const float *weight, const float *bias, T *out,
                                   float *mean_out, float *rstd_out, size_t n_rows, size_t hidden,
                                   float eps)
{
    const size_t row = blockIdx.x * (size_t)WARPS + threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    if (row >= n_rows)
        return;
    x += row * hidden;
    float mean = 0, squares = 0;
    if constexpr (CENTRED) {
        float sum = 0;
        for (size_t i = lane; i < hidden; i += WARP)
            sum += to_float(x[i]);
        mean = warp_sum(sum) / (float)hidden;
    }
    for (size_t i = lane; i < hidden; i += WARP) {
        const float d = to_float(x[i]) - mean;
        squares += d * d;
    }
    const float rstd = 1.0f / sqrtf(warp_sum(squares) / (float)hidden + eps);
    for (size_t i = lane; i < hidden; i += WARP) {
        float o = (to_float(x[i]) - mean) * rstd * weight[i];
        if constexpr (CENTRED)
            o += bias[i];
        out[row * hidden + i] = from_float<T>(o);
    }
    if (lane == 0) {
        if constexpr (CENTRED)
            mean_out[row] = mean;
        rstd_out[row] = rstd;
    }
}

template <class T, bool CENTRED>
__global__ void any_backward_kernel(const T *x, const float *weight, const float *mean_in,
                                    const float *rstd_in, const T *d_out, T *d_x, size_t n_rows,
                                    size_t hidden)
{
    const size_t row = blockIdx.x * (size_t)WARPS + threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    if (row >= n_rows)
        return;
    const float mean = CENTRED ? mean_in[row] : 0, rstd = rstd_in[row];
    float sum_g = 0, sum_gx = 0;
    for (size_t i = lane; i < hidden; i += WARP) {
        const size_t at = row * hidden + i;
        const float g = to_float(d_out[at]) * weight[i];
        sum_g += g;
        sum_gx += g * (to_float(x[at]) - mean) * rstd;
    }
    const float mean_g = CENTRED ? warp_sum(sum_g) / (float)hidden : 0;
    const float mean_gx = warp_sum(sum_gx) / (float)hidden;
    for (size_t i = lane; i < hidden; i += WARP) {
        const size_t at = row * hidden + i;
        const float xh = (to_float(x[at]) - mean) * rstd, g = to_float(d_out[at]) * weight[i];
        d_x[at] = from_float<T>(to_float(d_x[at]) + rstd * (g - mean_g - xh * mean_gx));
    }
}

template <class T, bool CENTRED>
__global__ void any_columns_kernel(const T *x, const float *mean, const float *rstd, const T *d_out,
                                   float *d_weight, float *d_bias, size_t n_rows, size_t hidden)
{
    __shared__ float shared[CENTRED ? 2 : 1][COLUMN_ROWS][WARP];
    const size_t column = blockIdx.x * (size_t)WARP + threadIdx.x;
    float sum_weight = 0, sum_bias = 0;
    if (column < hidden)
        for (size_t r = threadIdx.y; r < n_rows; r += COLUMN_ROWS) {
            const float d = to_float(d_out[r * hidden + column]);
            sum_weight +=
                d * (to_float(x[r * hidden + column]) - (CENTRED ? mean[r] : 0)) * rstd[r];
            sum_bias += d;
        }
    shared[0][threadIdx.y][threadIdx.x] = sum_weight;
    if constexpr (CENTRED)
        shared[1][threadIdx.y][threadIdx.x] = sum_bias;
    __syncthreads();
    if (threadIdx.y != 0 || column >= hidden)
        return;
    for (int y = 1; y < COLUMN_ROWS; y++) {
        sum_weight += shared[0][y][threadIdx.x];
        if constexpr (CENTRED)
            sum_bias += shared[1][y][threadIdx.x];
    }
    d_weight[column] += sum_weight;
    if constexpr (CENTRED)
        d_bias[column] += sum_bias;
}

#endif
