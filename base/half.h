/* Halves and bfloat16 from and to fp32, to nearest even; what fp16 cannot hold is infinite. */
#ifndef MOBULA_BASE_HALF_H
#define MOBULA_BASE_HALF_H

#include <stdint.h>
#include <string.h>

static inline float mb_bits_float(uint32_t bits)
{
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

static inline uint32_t mb_float_bits(float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    return bits;
}

static inline float mb_bf16_float(uint16_t h)
{
    return mb_bits_float((uint32_t)h << 16);
}

static inline uint16_t mb_float_bf16(float v)
{
    uint32_t bits = mb_float_bits(v);
    if (v != v) {
        return (uint16_t)(bits >> 16 | 0x40); /* stays a NaN */
    }
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float mb_f16_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 0x1f, fraction = h & 0x3ff;
    if (exponent == 0) { /* zero, or fraction * 2^-24 */
        float v = (float)fraction * 5.9604644775390625e-8f;
        return sign != 0 ? -v : v;
    }
    uint32_t bits = exponent == 31 ? 0x7f800000u : (exponent + 112) << 23;
    return mb_bits_float(sign | bits | fraction << 13);
}

static inline uint16_t mb_float_f16(float v)
{
    uint32_t bits = mb_float_bits(v), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) {
        return (uint16_t)(sign | 0x7e00); /* NaN */
    }
    if (size >= 0x477ff000) { /* rounds to 65536 or is beyond */
        return (uint16_t)(sign | 0x7c00);
    }
    if (size <
        0x38800000) { /* below 2^-14: the sum has 2^-24 as its last bit, rounded by the adder */
        float sum = mb_bits_float(size) + 0.5f;
        return (uint16_t)(sign | (mb_float_bits(sum) - 0x3f000000));
    }
    size += 0xfff + (size >> 13 & 1);
    return (uint16_t)(sign | (size - 0x38000000) >> 13);
}

#endif
