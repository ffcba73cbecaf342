/*
 * An fp32 number as two halves of 16 bits, without loss: the upper half is the number rounded to
 * bf16, for products to read as it lies, the lower half the last 16 bits of the number.
 *
 * Rounding is to the nearest, and halfway cases go away from zero. Not to even: 65537 numbers round
 * to an even bf16 then, one more than a lower half can tell apart. Away from zero the first bit of
 * the lower half says whether the upper half was rounded up. A NaN keeps its payload and is quiet,
 * as what arithmetic makes of it is; every other number comes back bit for bit. Pure; any thread,
 * any device.
 */
#ifndef MOBULA_WORKER_KERNELS_SPLIT_H
#define MOBULA_WORKER_KERNELS_SPLIT_H

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define MB_SPLIT static __host__ __device__ __forceinline__
#else
#define MB_SPLIT static inline
#endif

MB_SPLIT uint32_t mb_split_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

MB_SPLIT uint16_t mb_split_upper(float x)
{
    const uint32_t bits = mb_split_bits(x);
    const int is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return (uint16_t)(is_nan ? bits >> 16 | 0x40u : (bits + 0x8000u) >> 16);
}

MB_SPLIT uint16_t mb_split_lower(float x)
{
    return (uint16_t)mb_split_bits(x);
}

MB_SPLIT float mb_split_join(uint16_t upper, uint16_t lower)
{
    const int is_nan = (upper & 0x7fff) > 0x7f80; /* is not rounded */
    const uint32_t top = (uint32_t)upper - (is_nan ? 0u : (uint32_t)lower >> 15);
    const uint32_t bits = top << 16 | lower;
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

#undef MB_SPLIT

#endif
