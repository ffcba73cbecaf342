/*
 * Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): four
 * random words as a pure function of a 64-bit key and a 128-bit counter. Initial weights and
 * dropout are drawn from it, by the index of the element and not by the order of the calls. Pure;
 * any thread, any device.
 */
#ifndef MOBULA_WORKER_KERNELS_PHILOX_H
#define MOBULA_WORKER_KERNELS_PHILOX_H

#include <stdint.h>

struct mb_philox {
    uint32_t word[4];
};

static inline struct mb_philox mb_philox(uint64_t key, uint64_t block, uint32_t c2, uint32_t c3)
{
    uint32_t x0 = (uint32_t)block, x1 = (uint32_t)(block >> 32), x2 = c2, x3 = c3;
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)x0 * 0xD2511F53u, p1 = (uint64_t)x2 * 0xCD9E8D57u;
        x0 = (uint32_t)(p1 >> 32) ^ x1 ^ k0;
        x2 = (uint32_t)(p0 >> 32) ^ x3 ^ k1;
        x1 = (uint32_t)p1;
        x3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (struct mb_philox){{x0, x1, x2, x3}};
}

#endif
