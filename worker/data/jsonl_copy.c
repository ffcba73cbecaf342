/*
 * Any processor: plain text goes 16 bytes at a time, or 8, and stops at whatever is not plain.
 *
 * With AVX-512, 64 bytes at a time: 1. Quotes, backslashes and control characters become bits.
 * 2. Of each run of backslashes every second one, from the first on, begins an escape: adding the
 * first bits of the runs that begin at even places carries through these runs and no others, which
 * tells the two kinds apart. 3. The character behind such a one is looked up in a table; one that
 * has no entry, as the u of \uXXXX, stops the copy in front of its backslash. 4. The backslashes
 * are squeezed out. An escape that the 64 bytes cut in two stops the copy as well.
 */
#include <string.h>
#include "worker/data/jsonl_copy.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

static const uint64_t high_bits = 0x8080808080808080u;
static const uint64_t ones = 0x0101010101010101u;

static const uint8_t escaped[128]
    __attribute__((aligned(64))) = {['"'] = '"',  ['\\'] = '\\', ['/'] = '/',  ['b'] = '\b',
                                    ['f'] = '\f', ['n'] = '\n',  ['r'] = '\r', ['t'] = '\t'};

uint8_t mb_jsonl_escaped(uint8_t c)
{
    return c < 128 ? escaped[c] : 0;
}

const uint8_t *mb_jsonl_plain_end(const uint8_t *p, const uint8_t *end)
{
    while (end - p >= 8) {
        uint64_t w;
        uint64_t quote;
        uint64_t slash;
        uint64_t found;

        memcpy(&w, p, 8);
        quote = w ^ ones * '"';
        slash = w ^ ones * '\\';
        /* The lowest byte marked is right; marks above it may be false. */
        found = ((quote - ones) & ~quote) | ((slash - ones) & ~slash) | ((w - ones * 0x20) & ~w);
        found &= high_bits;
        if (found != 0)
            return p + (__builtin_ctzll(found) >> 3);
        p += 8;
    }
    while (p < end && *p != '"' && *p != '\\' && *p >= 0x20)
        p++;
    return p;
}

const uint8_t *mb_jsonl_copy_plain(const uint8_t *p, const uint8_t *end, uint8_t **to)
{
    const uint8_t *stop;

#if defined(__SSE2__)
    while (end - p >= 16) {
        __m128i v = _mm_loadu_si128((const void *)p);
        __m128i control = _mm_cmpeq_epi8(_mm_max_epu8(v, _mm_set1_epi8(0x1f)), _mm_set1_epi8(0x1f));
        __m128i special = _mm_or_si128(_mm_cmpeq_epi8(v, _mm_set1_epi8('"')),
                                       _mm_cmpeq_epi8(v, _mm_set1_epi8('\\')));
        unsigned found = (unsigned)_mm_movemask_epi8(_mm_or_si128(control, special));
        unsigned n = found != 0 ? (unsigned)__builtin_ctz(found) : 16;

        _mm_storeu_si128((void *)*to, v);
        *to += n;
        p += n;
        if (found != 0)
            return p;
    }
#endif
    stop = mb_jsonl_plain_end(p, end);
    if (stop > p)
        memcpy(*to, p, (size_t)(stop - p));
    *to += stop - p;
    return stop;
}

#if defined(__x86_64__)
#define WIDE __attribute__((target("avx512f,avx512bw,avx512vbmi,avx512vbmi2")))

/* The backslashes that begin an escape, where the first byte is inside none. */
static inline uint64_t escape_starts(uint64_t slashes)
{
    const uint64_t even = 0x5555555555555555u;
    uint64_t firsts = slashes & ~(slashes << 1);
    uint64_t sum = slashes + (firsts & even);

    return (slashes & ~sum & even) | (slashes & sum & ~even);
}

WIDE const uint8_t *mb_jsonl_copy_wide(const uint8_t *p, const uint8_t *end, uint8_t **to)
{
    const __m512i low = _mm512_load_si512(escaped);
    const __m512i high = _mm512_load_si512(escaped + 64);

    while (end - p >= 64) {
        __m512i v = _mm512_loadu_si512(p);
        uint64_t slashes = _mm512_cmpeq_epi8_mask(v, _mm512_set1_epi8('\\'));
        uint64_t stops = _mm512_cmpeq_epi8_mask(v, _mm512_set1_epi8('"')) |
                         _mm512_cmplt_epu8_mask(v, _mm512_set1_epi8(0x20));
        uint64_t starts = 0;
        unsigned n;

        if (slashes != 0) {
            uint64_t behind, known;
            __m512i found = _mm512_permutex2var_epi8(low, v, high);

            starts = escape_starts(slashes);
            behind = starts << 1;
            known = _mm512_test_epi8_mask(found, found) & ~_mm512_movepi8_mask(v);
            stops = (stops & ~behind) | (behind & ~known) >> 1 | (starts & (uint64_t)1 << 63);
            v = _mm512_mask_mov_epi8(v, behind, found);
        }
        n = stops != 0 ? (unsigned)__builtin_ctzll(stops) : 64;
        if (n < 64)
            starts |= UINT64_MAX << n;
        _mm512_storeu_si512(*to, starts != 0 ? _mm512_maskz_compress_epi8(~starts, v) : v);
        *to += 64 - __builtin_popcountll(starts);
        p += n;
        if (stops != 0)
            return p;
    }
    return mb_jsonl_copy_plain(p, end, to);
}

int mb_jsonl_has_wide(void)
{
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512vbmi2");
}
#else
const uint8_t *mb_jsonl_copy_wide(const uint8_t *p, const uint8_t *end, uint8_t **to)
{
    return mb_jsonl_copy_plain(p, end, to);
}

int mb_jsonl_has_wide(void)
{
    return 0;
}
#endif

const uint8_t *mb_jsonl_copy(const uint8_t *p, const uint8_t *end, uint8_t **to)
{
    return mb_jsonl_has_wide() ? mb_jsonl_copy_wide(p, end, to) : mb_jsonl_copy_plain(p, end, to);
}
