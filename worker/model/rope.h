/*
 * The angles of rotary positions. Pair i of d channels turns by position * frequency(i), frequency
 * base^(-2i/d). Llama 3.1's scaling leaves fast pairs as they are, slows pairs whose wavelength is
 * beyond the length of the first training by the factor, and goes from one to the other in between
 * (transformers calls it rope_type "llama3"; Megatron has its other numbers fixed). Pure.
 */
#ifndef MOBULA_WORKER_MODEL_ROPE_H
#define MOBULA_WORKER_MODEL_ROPE_H

#include <stddef.h>

struct mb_rope_config {
    double base;           /* 10000 */
    double percent;        /* (0, 1]: share of a head's channels that turn */
    double interpolation;  /* positions are divided by this; 1: no interpolation */
    int scaling;           /* 1: Llama 3.1's */
    double scaling_factor; /* 8 */
};

/* How many channels of a head turn: int(head_dim * percent). */
size_t mb_rope_dim(const struct mb_rope_config *c, size_t head_dim);

/* Radians per position of pair i of dim channels. */
double mb_rope_frequency(const struct mb_rope_config *c, size_t dim, size_t i);

/* cosine and sine [n_positions, dim / 2] of positions 0, 1, ... */
void mb_rope_tables(const struct mb_rope_config *c, size_t dim, size_t n_positions, float *cosine,
                    float *sine);

#endif
