/*
 * Elementary functions in a form that compilers turn into vector code: no branch, no call, no
 * conversion that traps. NaN stays NaN.
 */
#ifndef MOBULA_WORKER_KERNELS_CPU_VECTOR_H
#define MOBULA_WORKER_KERNELS_CPU_VECTOR_H

#include <stdint.h>
#include <string.h>

/*
 * exp(x) within 2 ulp for x in [-87, 88]; below it is at most exp(-87) = 1.6e-38, above it is
 * exp(88). exp(x) = 2^n exp(r) with n = round(x / ln 2), |r| <= ln(2) / 2, and the Taylor series of
 * exp(r). Adding 1.5 * 2^23 rounds to an integer and leaves that integer in the low bits of the
 * sum.
 */
static inline float mb_expf(float x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23 */
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float z = x * 1.44269504088896341f + shift;
    float n = z - shift;
    float r =
        x - n * 0.693145751953125f; /* ln 2 in two parts; the first has few bits: n * it is exact */
    r -= n * 1.42860682030941723e-6f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &z, sizeof(bits));
    bits = (bits << 23) + 0x3f800000u; /* 2^n; the shift drops the bits of `shift` */
    float two_n;
    memcpy(&two_n, &bits, sizeof(two_n));
    return p * two_n;
}

/* tanh(x), absolute error below 2e-7. */
static inline float mb_tanhf(float x)
{
    return 1.0f - 2.0f / (mb_expf(2.0f * x) + 1.0f);
}

#endif
