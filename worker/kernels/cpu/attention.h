/* What attention of whole samples and attention of parts of them have in common. */
#ifndef MOBULA_WORKER_KERNELS_CPU_ATTENTION_H
#define MOBULA_WORKER_KERNELS_CPU_ATTENTION_H

#include <float.h>
#include <math.h>
#include <stddef.h>
#include "worker/kernels/cpu/vector.h"

enum { MB_ATTENTION_BLOCK = 64 }; /* query rows */

/* row[0..n) from scores to probabilities; returns the log of the denominator. */
static inline float mb_softmax_row(float *row, size_t n, float scale)
{
    float max = -FLT_MAX, sum = 0;
#pragma omp simd reduction(max : max)
    for (size_t j = 0; j < n; j++)
        max = row[j] > max ? row[j] : max;
#pragma omp simd reduction(+ : sum)
    for (size_t j = 0; j < n; j++) {
        float e = mb_expf(scale * (row[j] - max));
        row[j] = e;
        sum += e;
    }
    float inverse = 1 / sum;
#pragma omp simd
    for (size_t j = 0; j < n; j++)
        row[j] *= inverse;
    return scale * max + logf(sum);
}

static inline float mb_dot(const float *x, const float *y, size_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++)
        sum += x[i] * y[i];
    return sum;
}

#endif
