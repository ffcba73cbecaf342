/*
 * Angles in fp32, as Megatron and transformers form them: frequency and product are rounded to fp32
 * before the cosine is taken, so that late positions turn by the same bits.
 */
#include "worker/model/rope.h"

#include <math.h>

/* Llama 3.1's scaling, but for its factor. */
static const double LOW = 1, HIGH = 4, FIRST_LENGTH = 8192;

size_t mb_rope_dim(const struct mb_rope_config *c, size_t head_dim)
{
    return (size_t)((double)head_dim * c->percent);
}

double mb_rope_frequency(const struct mb_rope_config *c, size_t dim, size_t i)
{
    double frequency = pow(c->base, -2.0 * (double)i / (double)dim);
    if (!c->scaling)
        return frequency;
    double wavelength = 2 * 3.14159265358979323846 / frequency;
    if (wavelength > FIRST_LENGTH / LOW)
        return frequency / c->scaling_factor;
    if (wavelength < FIRST_LENGTH / HIGH)
        return frequency;
    double smooth = (FIRST_LENGTH / wavelength - LOW) / (HIGH - LOW);
    return (1 - smooth) * frequency / c->scaling_factor + smooth * frequency;
}

void mb_rope_tables(const struct mb_rope_config *c, size_t dim, size_t n_positions, float *cosine,
                    float *sine)
{
    const size_t half = dim / 2;
    for (size_t i = 0; i < half; i++) {
        float frequency = (float)mb_rope_frequency(c, dim, i);
        for (size_t p = 0; p < n_positions; p++) {
            float angle = (float)((double)p / c->interpolation) * frequency;
            cosine[p * half + i] = (float)cos((double)angle);
            sine[p * half + i] = (float)sin((double)angle);
        }
    }
}
