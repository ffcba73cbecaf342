/*
 * 1. mb_mt19937_seed fills the state with Knuth's recurrence; a draw tempers the next word and
 * every 624 draws the state is twisted.
 * 2. Shuffles and permutations only differ in how they turn a 32-bit word into a bounded number:
 *    numpy masks and rejects, torch takes the remainder, default_rng multiplies (Lemire).
 * 3. A shuffle of what no cache holds waits for memory at every step, so it draws some steps ahead.
 * Nothing here fails but mb_randperm, for an n whose rule is another one.
 */
#include "worker/data/random.h"

void mb_mt19937_seed(struct mb_mt19937 *mt, uint32_t seed)
{
    mt->state[0] = seed;
    for (uint32_t i = 1; i < MB_MT_N; i++) {
        uint32_t before = mt->state[i - 1];
        mt->state[i] = 1812433253u * (before ^ (before >> 30)) + i;
    }
    mt->next = MB_MT_N;
}

static uint32_t twist_word(uint32_t high, uint32_t low, uint32_t far)
{
    uint32_t y = (high & 0x80000000u) | (low & 0x7fffffffu);
    return far ^ (y >> 1) ^ ((0u - (y & 1u)) & 0x9908b0dfu);
}

static void twist(struct mb_mt19937 *mt)
{
    enum { M = 397 };
    uint32_t *s = mt->state;
    for (unsigned i = 0; i < MB_MT_N; i++)
        s[i] = twist_word(s[i], s[(i + 1) % MB_MT_N], s[(i + M) % MB_MT_N]);
    mt->next = 0;
}

uint32_t mb_mt19937_u32(struct mb_mt19937 *mt)
{
    if (mt->next == MB_MT_N)
        twist(mt);
    uint32_t y = mt->state[mt->next++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

/* numpy's legacy interval: a number in [0, max] by masking and rejecting. Beyond 32 bits a word is
 * made of two draws, the high one first. */
static uint64_t interval(struct mb_mt19937 *mt, uint64_t max)
{
    const uint64_t mask = UINT64_MAX >> __builtin_clzll(max | 1);
    uint64_t value;
    do {
        value = mb_mt19937_u32(mt);
        if (max > UINT32_MAX)
            value = value << 32 | mb_mt19937_u32(mt);
        value &= mask;
    } while (value > max);
    return value;
}

void mb_shuffle_u32(struct mb_mt19937 *mt, uint32_t *a, size_t n)
{
    enum { AHEAD = 64 };
    size_t with[AHEAD];
    for (size_t left = n; left > 1;) {
        const size_t steps = left - 1 < AHEAD ? left - 1 : AHEAD;
        for (size_t k = 0; k < steps; k++) {
            with[k] = (size_t)interval(mt, left - 1 - k);
            __builtin_prefetch(&a[with[k]], 1);
        }
        for (size_t k = 0; k < steps; k++) {
            const size_t i = left - 1 - k, j = with[k];
            uint32_t held = a[j];
            a[j] = a[i];
            a[i] = held;
        }
        left -= steps;
    }
}

void mb_shuffle_i32(struct mb_mt19937 *mt, int32_t *a, size_t n)
{
    /* The signed and the unsigned type of one width may alias. */
    mb_shuffle_u32(mt, (uint32_t *)a, n);
}

int mb_randperm(uint32_t seed, uint64_t n, uint32_t *out, struct mb_err *err)
{
    struct mb_mt19937 mt;

    if (n >= MB_RANDPERM_MAX)
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "a permutation of %llu samples is not provided (limit %d); use "
                          "--dataloader-type single",
                          (unsigned long long)n, MB_RANDPERM_MAX - 1);
    mb_mt19937_seed(&mt, seed);
    for (uint64_t i = 0; i < n; i++)
        out[i] = (uint32_t)i;
    for (uint64_t i = 0; i + 1 < n; i++) {
        uint64_t j = i + mb_mt19937_u32(&mt) % (n - i);
        uint32_t held = out[i];
        out[i] = out[j];
        out[j] = held;
    }
    return 0;
}

struct pcg64 {
    unsigned __int128 state;
    unsigned __int128 increment;
    uint32_t kept; /* the high half of the last 64-bit draw, used by the next 32-bit one */
    int has_kept;
};

static unsigned __int128 u128(uint64_t high, uint64_t low)
{
    return (unsigned __int128)high << 64 | low;
}

static uint64_t pcg64_u64(struct pcg64 *g)
{
    g->state = g->state * u128(2549297995355413924u, 4865540595714422341u) + g->increment;
    uint64_t folded = (uint64_t)(g->state >> 64) ^ (uint64_t)g->state;
    unsigned turn = (unsigned)(g->state >> 122);
    return folded >> turn | folded << (-turn & 63u);
}

static uint32_t pcg64_u32(struct pcg64 *g)
{
    if (g->has_kept) {
        g->has_kept = 0;
        return g->kept;
    }
    uint64_t word = pcg64_u64(g);
    g->kept = (uint32_t)(word >> 32);
    g->has_kept = 1;
    return (uint32_t)word;
}

void mb_default_rng0_integers(int32_t low, int32_t high, int32_t *out, size_t n)
{
    /* What numpy's SeedSequence(0) makes of seed 0; only that seed is ever used. */
    struct pcg64 g = {.state = u128(0x1aa1b5345996452du, 0x09585eb7a69561e3u),
                      .increment = u128(0x418ddadb3af71a82u, 0x588133bc447873a9u)};
    uint32_t range = (uint32_t)high - (uint32_t)low; /* how many values */
    uint32_t threshold = (0u - range) % range;

    for (size_t i = 0; i < n; i++) {
        uint64_t product = (uint64_t)pcg64_u32(&g) * range;
        if ((uint32_t)product < range) {
            while ((uint32_t)product < threshold)
                product = (uint64_t)pcg64_u32(&g) * range;
        }
        out[i] = (int32_t)((uint32_t)low + (uint32_t)(product >> 32));
    }
}
