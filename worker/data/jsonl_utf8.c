/*
 * 1. 32 bytes at a time: three tables of sixteen, asked for the halves of a byte and of the one
 * before it, have a bit for each way in which two bytes cannot follow one another; a continuation
 * that a lead byte two or three before demands is the only one of these that is right there.
 * 2. The rest goes through the same with zeroes behind, which end a character too early if it has
 * no end. Source: Keiser, Lemire, Validating UTF-8 in less than one instruction per byte, 2021.
 *
 * With AVX-512, 64 bytes at a time as bits: lead bytes moved up by one, two, three places say where
 * tails must be, and where none may be; what else a lead byte rules out is seen beside it.
 */
#include <string.h>
#include "worker/data/jsonl_utf8.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,popcnt")))

/* What is wrong with a byte and the one before it. */
enum {
    SHORT = 1 << 0,      /* a lead byte, then no continuation */
    LONG = 1 << 1,       /* ASCII, then a continuation */
    OVER_3 = 1 << 2,     /* a form longer than needed, of 3 bytes */
    LARGE = 1 << 3,      /* above U+10FFFF */
    SURROGATE = 1 << 4,  /* U+D800 to U+DFFF */
    OVER_2 = 1 << 5,     /* a form longer than needed, of 2 bytes */
    LARGE_OVER = 1 << 6, /* above U+10FFFF, or a form of 4 bytes longer than needed */
    TWO_TAILS = 1 << 7,  /* right behind a lead byte of 3 or 4 bytes */
    ANY = SHORT | LONG | TWO_TAILS
};

/* By the upper half of the first byte, its lower half, the upper half of the second. */
static const uint8_t first_high[16] = {LONG,
                                       LONG,
                                       LONG,
                                       LONG,
                                       LONG,
                                       LONG,
                                       LONG,
                                       LONG,
                                       TWO_TAILS,
                                       TWO_TAILS,
                                       TWO_TAILS,
                                       TWO_TAILS,
                                       SHORT | OVER_2,
                                       SHORT,
                                       SHORT | OVER_3 | SURROGATE,
                                       SHORT | LARGE | LARGE_OVER};
static const uint8_t first_low[16] = {ANY | OVER_3 | OVER_2 | LARGE_OVER,
                                      ANY | OVER_2,
                                      ANY,
                                      ANY,
                                      ANY | LARGE,
                                      ANY | LARGE | LARGE_OVER,
                                      ANY | LARGE | LARGE_OVER,
                                      ANY | LARGE | LARGE_OVER,
                                      ANY | LARGE | LARGE_OVER,
                                      ANY | LARGE | LARGE_OVER,
                                      ANY | LARGE | LARGE_OVER,
                                      ANY | LARGE | LARGE_OVER,
                                      ANY | LARGE | LARGE_OVER,
                                      ANY | LARGE | LARGE_OVER | SURROGATE,
                                      ANY | LARGE | LARGE_OVER,
                                      ANY | LARGE | LARGE_OVER};
static const uint8_t second_high[16] = {SHORT,
                                        SHORT,
                                        SHORT,
                                        SHORT,
                                        SHORT,
                                        SHORT,
                                        SHORT,
                                        SHORT,
                                        LONG | OVER_2 | TWO_TAILS | OVER_3 | LARGE_OVER,
                                        LONG | OVER_2 | TWO_TAILS | OVER_3 | LARGE,
                                        LONG | OVER_2 | TWO_TAILS | SURROGATE | LARGE,
                                        LONG | OVER_2 | TWO_TAILS | SURROGATE | LARGE,
                                        SHORT,
                                        SHORT,
                                        SHORT,
                                        SHORT};

struct check {
    __m256i before; /* the 32 bytes before */
    __m256i wrong;  /* not zero: no UTF-8 */
    uint64_t n_tails;
};

AVX2 static inline __m256i ask(const uint8_t table[16], __m256i halves)
{
    __m128i t = _mm_loadu_si128((const void *)table);

    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), halves);
}

/* The upper or lower half of each byte. */
AVX2 static inline __m256i high_half(__m256i v)
{
    return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15));
}

AVX2 static inline __m256i low_half(__m256i v)
{
    return _mm256_and_si256(v, _mm256_set1_epi8(15));
}

AVX2 static inline void check_32(struct check *c, __m256i v)
{
    /* The bytes 1, 2 and 3 before each. */
    __m256i joint = _mm256_permute2x128_si256(c->before, v, 0x21);
    __m256i one = _mm256_alignr_epi8(v, joint, 15);
    __m256i two = _mm256_alignr_epi8(v, joint, 14);
    __m256i three = _mm256_alignr_epi8(v, joint, 13);
    __m256i found = _mm256_and_si256(
        _mm256_and_si256(ask(first_high, high_half(one)), ask(first_low, low_half(one))),
        ask(second_high, high_half(v)));
    __m256i demanded =
        _mm256_or_si256(_mm256_subs_epu8(two, _mm256_set1_epi8((char)(0xe0 - 0x80))),
                        _mm256_subs_epu8(three, _mm256_set1_epi8((char)(0xf0 - 0x80))));
    __m256i tails = _mm256_cmpgt_epi8(_mm256_set1_epi8((char)0xc0), v);

    demanded = _mm256_and_si256(demanded, _mm256_set1_epi8((char)0x80));
    c->wrong = _mm256_or_si256(c->wrong, _mm256_xor_si256(demanded, found));
    c->n_tails += (uint64_t)__builtin_popcount((unsigned)_mm256_movemask_epi8(tails));
    c->before = v;
}

AVX2 static int check_all(const uint8_t *p, size_t n, uint64_t *n_tails)
{
    struct check c = {_mm256_setzero_si256(), _mm256_setzero_si256(), 0};
    uint8_t last[32] = {0};

    for (; n >= 32; p += 32, n -= 32) {
        __m256i v = _mm256_loadu_si256((const void *)p);

        if (_mm256_movemask_epi8(_mm256_or_si256(v, c.before)) != 0)
            check_32(&c, v);
    }
    if (n > 0)
        memcpy(last, p, n);
    check_32(&c, _mm256_loadu_si256((const void *)last));
    check_32(&c, _mm256_setzero_si256());
    *n_tails = c.n_tails;
    return _mm256_testz_si256(c.wrong, c.wrong);
}

/* ---- AVX-512 ---- */

#define WIDE __attribute__((target("avx512f,avx512bw,popcnt")))

struct check_wide {
    uint64_t demanded; /* of the next block: bytes that must be tails, as bits */
    uint64_t wrong;
    uint64_t n_tails;
};

/* 64 bytes at p, of which the one behind may be read. */
WIDE static inline void check_64(struct check_wide *c, const uint8_t *p)
{
    __m512i v = _mm512_loadu_si512(p);
    uint64_t wide = _mm512_movepi8_mask(v);
    uint64_t tail, lead, three, four, demanded;

    if ((wide | c->demanded) == 0)
        return;
    tail = _mm512_mask_cmplt_epu8_mask(wide, v, _mm512_set1_epi8((char)0xc0));
    lead = wide & ~tail;
    three = _mm512_cmpge_epu8_mask(v, _mm512_set1_epi8((char)0xe0));
    four = _mm512_cmpge_epu8_mask(v, _mm512_set1_epi8((char)0xf0));
    demanded = lead << 1 | three << 2 | four << 3 | c->demanded;
    c->demanded = lead >> 63 | three >> 62 | four >> 61;
    c->n_tails += (uint64_t)__builtin_popcountll(tail);
    c->wrong |=
        (tail ^ demanded) | _mm512_mask_cmplt_epu8_mask(lead, v, _mm512_set1_epi8((char)0xc2));
    if (three != 0) {
        __m512i next = _mm512_loadu_si512(p + 1);
        uint64_t low = _mm512_cmplt_epu8_mask(next, _mm512_set1_epi8((char)0xa0));
        uint64_t lower = _mm512_cmplt_epu8_mask(next, _mm512_set1_epi8((char)0x90));

        c->wrong |= (_mm512_cmpeq_epi8_mask(v, _mm512_set1_epi8((char)0xe0)) & low) |
                    (_mm512_cmpeq_epi8_mask(v, _mm512_set1_epi8((char)0xed)) & ~low) |
                    (_mm512_cmpeq_epi8_mask(v, _mm512_set1_epi8((char)0xf0)) & lower) |
                    (_mm512_cmpeq_epi8_mask(v, _mm512_set1_epi8((char)0xf4)) & ~lower) |
                    _mm512_cmpgt_epu8_mask(v, _mm512_set1_epi8((char)0xf4));
    }
}

WIDE static int check_all_wide(const uint8_t *p, size_t n, uint64_t *n_tails)
{
    struct check_wide c = {0};
    uint8_t last[2 * 64 + 1] = {0};

    for (; n > 64; p += 64, n -= 64)
        check_64(&c, p);
    if (n > 0)
        memcpy(last, p, n);
    check_64(&c, last);
    check_64(&c, last + 64);
    *n_tails = c.n_tails;
    return c.wrong == 0;
}
#endif

enum mb_jsonl_utf8_kernel mb_jsonl_utf8_best(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw"))
        return MB_JSONL_UTF8_AVX512;
    if (__builtin_cpu_supports("avx2"))
        return MB_JSONL_UTF8_AVX2;
#endif
    return MB_JSONL_UTF8_NONE;
}

int mb_jsonl_utf8(enum mb_jsonl_utf8_kernel kernel, const uint8_t *p, size_t n, uint64_t *n_tails)
{
#if defined(__x86_64__)
    if (kernel == MB_JSONL_UTF8_AVX512)
        return check_all_wide(p, n, n_tails);
    if (kernel == MB_JSONL_UTF8_AVX2)
        return check_all(p, n, n_tails);
#endif
    (void)kernel;
    (void)p;
    (void)n;
    (void)n_tails;
    return 0;
}
