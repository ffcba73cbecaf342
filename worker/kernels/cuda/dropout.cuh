/*
 * Dropout on the device: the same function of (seed, iteration, site, element) as on the CPU.
 * Element e takes word e % 4 of Philox block e / 4: kept if the word is not below probability *
 * 2^32.
 */
#ifndef MOBULA_WORKER_KERNELS_CUDA_DROPOUT_CUH
#define MOBULA_WORKER_KERNELS_CUDA_DROPOUT_CUH

#include "worker/kernels/cuda/device.cuh"

struct dropout {
    uint64_t seed, first_element;
    uint32_t iteration, site, limit;
    float keep;                 /* factor of a kept element */
    const struct mb_pass *pass; /* as struct mb_dropout's */
    uint64_t sample_elements;
};

static inline struct dropout dropout_of(const struct mb_dropout *d)
{
    struct dropout o;
    o.seed = d->seed;
    o.first_element = d->first_element;
    o.iteration = d->iteration;
    o.site = d->site;
    o.limit = (uint32_t)((double)d->probability * 4294967296.0);
    o.keep = 1.0f / (1.0f - d->probability);
    o.pass = d->pass;
    o.sample_elements = d->sample_elements;
    return o;
}

/* A kernel's argument as it is when the kernel runs. */
static __device__ __forceinline__ struct dropout dropout_now(const struct dropout &given)
{
    struct dropout d = given;
    if (given.pass != NULL) {
        d.iteration = given.pass->iteration;
        d.first_element += given.pass->first_sample * given.sample_elements;
    }
    return d;
}

static __device__ __forceinline__ void philox_round(uint32_t x[4], uint32_t k0, uint32_t k1)
{
    const uint32_t lo0 = x[0] * 0xD2511F53u, hi0 = __umulhi(x[0], 0xD2511F53u);
    const uint32_t lo1 = x[2] * 0xCD9E8D57u, hi1 = __umulhi(x[2], 0xCD9E8D57u);
    x[0] = hi1 ^ x[1] ^ k0;
    x[2] = hi0 ^ x[3] ^ k1;
    x[1] = lo1;
    x[3] = lo0;
}

/* The four words of a block, as worker/kernels/philox.h computes them. */
static __device__ __forceinline__ void dropout_words(const struct dropout &d, uint64_t block,
                                                     uint32_t word[4])
{
    uint32_t k0 = (uint32_t)d.seed, k1 = (uint32_t)(d.seed >> 32);
    word[0] = (uint32_t)block;
    word[1] = (uint32_t)(block >> 32);
    word[2] = d.iteration;
    word[3] = d.site;
#pragma unroll
    for (int i = 0; i < 10; i++) {
        philox_round(word, k0, k1);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

static __device__ __forceinline__ float dropout_factor(const struct dropout &d, uint32_t word)
{
    return word >= d.limit ? d.keep : 0.0f;
}

/* The factor of one element, counted from the tensor's first. */
static __device__ __forceinline__ float dropout_at(const struct dropout &d, uint64_t e)
{
    uint32_t word[4];
    e += d.first_element;
    dropout_words(d, e / 4, word);
    const uint32_t i = (uint32_t)e % 4;
    return dropout_factor(d, i == 0 ? word[0] : i == 1 ? word[1] : i == 2 ? word[2] : word[3]);
}

#endif
