/*
 * The three random streams that decide Megatron-LM's data order, bit for bit: numpy's legacy
 * RandomState (MT19937), torch.randperm on the CPU (MT19937), numpy's default_rng (PCG64).
 * Sources: Matsumoto and Nishimura, "Mersenne Twister" (1998); O'Neill, "PCG" (2014), XSL-RR
 * 128/64; Lemire, "Fast random integer generation in an interval" (2019); how numpy and torch draw
 * from them is fixed by vectors in tests/integration/data. Pure: no shared state, any thread.
 */
#ifndef MOBULA_WORKER_DATA_RANDOM_H
#define MOBULA_WORKER_DATA_RANDOM_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum { MB_MT_N = 624 };

struct mb_mt19937 {
    uint32_t state[MB_MT_N];
    unsigned next; /* index of the next word; MB_MT_N: twist first */
};

void mb_mt19937_seed(struct mb_mt19937 *mt, uint32_t seed);
uint32_t mb_mt19937_u32(struct mb_mt19937 *mt);

/* numpy.random.RandomState.shuffle of a one-dimensional array. */
void mb_shuffle_u32(struct mb_mt19937 *mt, uint32_t *a, size_t n);
void mb_shuffle_i32(struct mb_mt19937 *mt, int32_t *a, size_t n);

/* torch.randperm(n, generator=torch.Generator().manual_seed(seed)). n must be below
 * MB_RANDPERM_MAX, beyond which torch draws 64-bit words: MB_EUNSUPPORTED then. */
enum { MB_RANDPERM_MAX = 214748364 };
int mb_randperm(uint32_t seed, uint64_t n, uint32_t *out, struct mb_err *err);

/* numpy.random.default_rng(0).integers(low, high, size=n, dtype=int32); low < high. */
void mb_default_rng0_integers(int32_t low, int32_t high, int32_t *out, size_t n);

#endif
