/* The width of an MLP that nobody gave: Megatron-LM's rule. */
#ifndef MOBULA_WORKER_MODEL_FFN_H
#define MOBULA_WORKER_MODEL_FFN_H

#include <stddef.h>

/* 4 * hidden; with SwiGLU 2/3 of that, down to a multiple of 64: 0 for a hidden size below 24. */
static inline size_t mb_gpt_default_ffn(size_t hidden, int swiglu)
{
    return swiglu ? (size_t)((double)(4 * hidden) * 2 / 3 / 64) * 64 : 4 * hidden;
}

#endif
