/*
 * 1. The kernel classes all whole blocks of 64 bytes by their low 128 values, then a copy of the
 *    last part block, padded with NUL bytes.
 * 2. Bytes above 127 are decoded; each character sets the bits of all its bytes, those in the next
 *    word too. With AVX-512 all of a block at once, 16 classes a step; what is broken, longer than
 *    three bytes or at the end of the text, and all with less than that, character by character.
 */
#include <string.h>
#include "worker/data/tokenizer/split_masks.h"
#include "worker/data/tokenizer/split_private.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { LETTER = 1, NUMBER = 2, SPACE = 4, LINE_END = 8, BLANK = 16, APOSTROPHE = 32 };

#define L  LETTER
#define N  NUMBER
#define S  SPACE
#define SE (SPACE | LINE_END)
/* Classes of the bytes below 128. */
static const uint8_t ascii[128]
    __attribute__((aligned(64))) = {0, 0, 0,  0, 0, 0, 0,          0, 0, S, SE,
                                    S, S, SE, 0, 0, 0, 0,          0, 0, 0, 0,
                                    0, 0, 0,  0, 0, 0, 0,          0, 0, 0, SPACE | BLANK,
                                    0, 0, 0,  0, 0, 0, APOSTROPHE, 0, 0, 0, 0,
                                    0, 0, 0,  0, N, N, N,          N, N, N, N,
                                    N, N, N,  0, 0, 0, 0,          0, 0, 0, L,
                                    L, L, L,  L, L, L, L,          L, L, L, L,
                                    L, L, L,  L, L, L, L,          L, L, L, L,
                                    L, L, L,  0, 0, 0, 0,          0, 0, L, L,
                                    L, L, L,  L, L, L, L,          L, L, L, L,
                                    L, L, L,  L, L, L, L,          L, L, L, L,
                                    L, L, 0,  0, 0, 0, 0};
#undef L
#undef N
#undef S
#undef SE

static void plain_kernel(const uint8_t *p, size_t n_words, size_t at, struct mb_split_masks *m)
{
    for (size_t w = at; w < at + n_words; w++, p += 64) {
        uint64_t bits[6] = {0};
        uint64_t wide = 0;

        for (unsigned i = 0; i < 64; i++) {
            unsigned class = p[i] < 128 ? ascii[p[i]] : 0;

            wide |= (uint64_t)(p[i] >> 7) << i;
            for (unsigned k = 0; k < 6; k++)
                bits[k] |= (uint64_t)(class >> k & 1) << i;
        }
        m->letter[w] = bits[0];
        m->number[w] = bits[1];
        m->space[w] = bits[2];
        m->line_end[w] = bits[3];
        m->blank[w] = bits[4];
        m->apostrophe[w] = bits[5];
        m->wide[w] = wide;
    }
}

#if defined(__x86_64__)
/* 32 bytes: bits of the classes; letters and digits as unsigned ranges, by a saturating
 * difference that is zero inside. */
__attribute__((target("avx2"))) static inline uint32_t in_range(__m256i v, uint8_t low,
                                                                uint8_t high)
{
    __m256i shifted = _mm256_sub_epi8(v, _mm256_set1_epi8((char)low));
    __m256i above = _mm256_subs_epu8(shifted, _mm256_set1_epi8((char)(high - low)));

    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(above, _mm256_setzero_si256()));
}

__attribute__((target("avx2"))) static inline uint32_t equals(__m256i v, uint8_t byte)
{
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(v, _mm256_set1_epi8((char)byte)));
}

__attribute__((target("avx2"))) static void avx2_kernel(const uint8_t *p, size_t n_words, size_t at,
                                                        struct mb_split_masks *m)
{
    for (size_t w = at; w < at + n_words; w++, p += 64) {
        __m256i v[2] = {_mm256_loadu_si256((const void *)p),
                        _mm256_loadu_si256((const void *)(p + 32))};
        uint64_t bits[7] = {0};

        for (unsigned i = 0; i < 2; i++) {
            __m256i lower = _mm256_or_si256(v[i], _mm256_set1_epi8(0x20));
            unsigned shift = 32 * i;
            uint32_t blank = equals(v[i], ' ');

            bits[0] |= (uint64_t)in_range(lower, 'a', 'z') << shift;
            bits[1] |= (uint64_t)in_range(v[i], '0', '9') << shift;
            bits[2] |= (uint64_t)(blank | in_range(v[i], '\t', '\r')) << shift;
            bits[3] |= (uint64_t)(equals(v[i], '\n') | equals(v[i], '\r')) << shift;
            bits[4] |= (uint64_t)blank << shift;
            bits[5] |= (uint64_t)equals(v[i], '\'') << shift;
            bits[6] |= (uint64_t)(uint32_t)_mm256_movemask_epi8(v[i]) << shift;
        }
        m->letter[w] = bits[0] & ~bits[6];
        m->number[w] = bits[1];
        m->space[w] = bits[2];
        m->line_end[w] = bits[3];
        m->blank[w] = bits[4];
        m->apostrophe[w] = bits[5];
        m->wide[w] = bits[6];
    }
}

__attribute__((target("avx512f,avx512bw,avx512vbmi"))) static void
avx512_kernel(const uint8_t *p, size_t n_words, size_t at, struct mb_split_masks *m)
{
    __m512i low = _mm512_load_si512(ascii);
    __m512i high = _mm512_load_si512(ascii + 64);

    for (size_t w = at; w < at + n_words; w++, p += 64) {
        __m512i v = _mm512_loadu_si512(p);
        __mmask64 wide = _mm512_movepi8_mask(v);
        __m512i class = _mm512_maskz_permutex2var_epi8(~wide, low, v, high);

        m->letter[w] = _mm512_test_epi8_mask(class, _mm512_set1_epi8(LETTER));
        m->number[w] = _mm512_test_epi8_mask(class, _mm512_set1_epi8(NUMBER));
        m->space[w] = _mm512_test_epi8_mask(class, _mm512_set1_epi8(SPACE));
        m->line_end[w] = _mm512_test_epi8_mask(class, _mm512_set1_epi8(LINE_END));
        m->blank[w] = _mm512_test_epi8_mask(class, _mm512_set1_epi8(BLANK));
        m->apostrophe[w] = _mm512_test_epi8_mask(class, _mm512_set1_epi8(APOSTROPHE));
        m->wide[w] = wide;
    }
}
#endif

enum mb_split_kernel mb_split_kernel_best(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("bmi2"))
        return MB_KERNEL_AVX512;
    if (__builtin_cpu_supports("avx2"))
        return MB_KERNEL_AVX2;
#endif
    return MB_KERNEL_PLAIN;
}

static void run_kernel(enum mb_split_kernel kernel, const uint8_t *p, size_t n_words, size_t at,
                       struct mb_split_masks *m)
{
#if defined(__x86_64__)
    if (kernel == MB_KERNEL_AVX512) {
        avx512_kernel(p, n_words, at, m);
        return;
    }
    if (kernel == MB_KERNEL_AVX2) {
        avx2_kernel(p, n_words, at, m);
        return;
    }
#endif
    (void)kernel;
    plain_kernel(p, n_words, at, m);
}

/* The characters above 127 that begin in word w; `before` of its bytes belong to one that began in
 * the word before. Returns how many bytes of the next word are taken. */
static unsigned add_wide(const struct mb_class_table *t, const uint8_t *p, const uint8_t *end,
                         unsigned before, size_t w, size_t n_words, struct mb_split_masks *m)
{
    uint64_t left = m->wide[w] >> before << before;
    uint64_t letters = 0;
    uint64_t numbers = 0;
    uint64_t spaces = 0;
    uint64_t tails = 0;
    unsigned over = 0;
    unsigned class = 0;

    while (left != 0) {
        unsigned at = (unsigned)__builtin_ctzll(left);
        size_t length;
        uint64_t bits;

        class = mb_split_usual_class(t, p + at, end, &length);
        bits = (((uint64_t)1 << length) - 1) << at;
        over = at + (unsigned)length > 64 ? at + (unsigned)length - 64 : 0;
        tails |= bits & (bits << 1);
        letters |= class >= MB_CHAR_LU ? bits : 0;
        numbers |= class == MB_CHAR_NUMBER ? bits : 0;
        spaces |= class == MB_CHAR_SPACE ? bits : 0;
        left &= ~bits;
    }
    m->letter[w] |= letters;
    m->number[w] |= numbers;
    m->space[w] |= spaces;
    m->tail[w] |= tails;
    if (over > 0 && w + 1 < n_words) {
        uint64_t rest = ((uint64_t)1 << over) - 1;

        m->tail[w + 1] |= rest;
        m->letter[w + 1] |= class >= MB_CHAR_LU ? rest : 0;
        m->number[w + 1] |= class == MB_CHAR_NUMBER ? rest : 0;
        m->space[w + 1] |= class == MB_CHAR_SPACE ? rest : 0;
    }
    return over;
}

#if defined(__x86_64__)
#define WIDE                                                                                       \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,bmi2")))

/* The characters that begin in a word: their first bytes as bits, and of each, in order, its first
 * three bytes. */
struct leads {
    uint64_t at, of_three;
    __m512i first, second, third;
};

/* 0: something there is broken, rare or longer than three bytes. */
WIDE static inline int find_leads(const uint8_t *p, uint64_t wide, unsigned before,
                                  struct leads *out)
{
    __m512i one = _mm512_loadu_si512(p);
    __m512i two = _mm512_loadu_si512(p + 1);
    __m512i three = _mm512_loadu_si512(p + 2);
    __m512i tail_limit = _mm512_set1_epi8((char)0xc0);
    uint64_t tail = _mm512_mask_cmplt_epu8_mask(wide, one, tail_limit);
    uint64_t lead = wide & ~tail;
    uint64_t of_three = _mm512_cmpge_epu8_mask(one, _mm512_set1_epi8((char)0xe0));
    uint64_t e0 = _mm512_cmpeq_epi8_mask(one, _mm512_set1_epi8((char)0xe0));
    uint64_t ed = _mm512_cmpeq_epi8_mask(one, _mm512_set1_epi8((char)0xed));
    uint64_t low = _mm512_cmplt_epu8_mask(two, _mm512_set1_epi8((char)0xa0));
    /* Bytes 0x80 to 0xbf are the lowest as signed ones. */
    uint64_t then_tail = _mm512_cmplt_epi8_mask(two, tail_limit);
    uint64_t then_two = then_tail & _mm512_cmplt_epi8_mask(three, tail_limit);
    uint64_t demanded = lead << 1 | of_three << 2 | (((uint64_t)1 << before) - 1);
    uint64_t wrong = (tail ^ demanded) | (of_three & ~then_two) | (lead & ~then_tail) |
                     _mm512_cmpge_epu8_mask(one, _mm512_set1_epi8((char)0xf0)) |
                     _mm512_mask_cmplt_epu8_mask(lead, one, _mm512_set1_epi8((char)0xc2)) |
                     (e0 & low) | (ed & ~low);

    if (wrong != 0)
        return 0;
    out->at = lead;
    out->of_three = of_three;
    out->first = _mm512_maskz_compress_epi8(lead, one);
    out->second = _mm512_maskz_compress_epi8(lead, two);
    out->third = _mm512_maskz_compress_epi8(lead, three);
    return 1;
}

/* The classes of 16 characters of two or three bytes. */
WIDE static inline __m512i classes_of(const struct mb_class_table *t, __m128i first, __m128i second,
                                      __m128i third)
{
    __m512i tail_bits = _mm512_set1_epi32(0x3f);
    __m512i a = _mm512_cvtepu8_epi32(first);
    __m512i b = _mm512_and_si512(_mm512_cvtepu8_epi32(second), tail_bits);
    __m512i c = _mm512_and_si512(_mm512_cvtepu8_epi32(third), tail_bits);
    __mmask16 is_three = _mm512_cmpge_epu32_mask(a, _mm512_set1_epi32(0xe0));
    __m512i two =
        _mm512_or_si512(_mm512_slli_epi32(_mm512_and_si512(a, _mm512_set1_epi32(0x1f)), 6), b);
    __m512i three = _mm512_or_si512(_mm512_slli_epi32(two, 6), c);
    __m512i point = _mm512_mask_mov_epi32(two, is_three, three);
    __m512i pair = _mm512_i32gather_epi32(_mm512_srli_epi32(point, 1), t->packed, 1);
    __m512i shift = _mm512_slli_epi32(_mm512_and_si512(point, _mm512_set1_epi32(1)), 2);

    return _mm512_and_si512(_mm512_srlv_epi32(pair, shift), _mm512_set1_epi32(15));
}

/* Bits of first bytes, and of the bytes behind them of the same characters. */
static inline uint64_t with_tails(uint64_t first, uint64_t tail)
{
    uint64_t second = first << 1 & tail;

    return first | second | (second << 1 & tail);
}

/* add_wide for 64 bytes at once, where 66 may be read; -1: what is there needs add_wide. */
WIDE static int add_wide_block(const struct mb_class_table *t, const uint8_t *p, unsigned before,
                               size_t w, size_t n_words, struct mb_split_masks *m)
{
    struct leads l;
    uint64_t letters, numbers, spaces, tail;
    uint32_t bits[3] = {0};
    unsigned n, over;

    if (!find_leads(p, m->wide[w], before, &l))
        return -1;
    n = (unsigned)__builtin_popcountll(l.at);
    for (unsigned half = 0; 16 * half < n; half++) {
        __m512i class = half == 0 ? classes_of(t, _mm512_castsi512_si128(l.first),
                                               _mm512_castsi512_si128(l.second),
                                               _mm512_castsi512_si128(l.third))
                                  : classes_of(t, _mm512_extracti32x4_epi32(l.first, 1),
                                               _mm512_extracti32x4_epi32(l.second, 1),
                                               _mm512_extracti32x4_epi32(l.third, 1));
        unsigned shift = 16 * half;

        bits[0] |= (uint32_t)_mm512_cmpge_epu32_mask(class, _mm512_set1_epi32(MB_CHAR_LU)) << shift;
        bits[1] |= (uint32_t)_mm512_cmpeq_epi32_mask(class, _mm512_set1_epi32(MB_CHAR_NUMBER))
                   << shift;
        bits[2] |= (uint32_t)_mm512_cmpeq_epi32_mask(class, _mm512_set1_epi32(MB_CHAR_SPACE))
                   << shift;
    }
    tail = m->wide[w] & ~l.at;
    tail = tail >> before << before;
    letters = _pdep_u64(bits[0], l.at);
    numbers = _pdep_u64(bits[1], l.at);
    spaces = _pdep_u64(bits[2], l.at);
    m->tail[w] |= tail;
    m->letter[w] |= with_tails(letters, tail);
    m->number[w] |= with_tails(numbers, tail);
    m->space[w] |= with_tails(spaces, tail);
    over = (unsigned)(l.at >> 63) + (unsigned)(l.of_three >> 63) + (unsigned)(l.of_three >> 62 & 1);
    if (over > 0 && w + 1 < n_words) {
        uint64_t rest = ((uint64_t)1 << over) - 1;
        unsigned last = 63u - (unsigned)__builtin_clzll(l.at);

        m->tail[w + 1] |= rest;
        m->letter[w + 1] |= (letters >> last & 1) != 0 ? rest : 0;
        m->number[w + 1] |= (numbers >> last & 1) != 0 ? rest : 0;
        m->space[w + 1] |= (spaces >> last & 1) != 0 ? rest : 0;
    }
    return (int)over;
}
#endif

/* Word w of the window at p. */
static unsigned add_word(const struct mb_class_table *t, enum mb_split_kernel kernel,
                         const uint8_t *p, const uint8_t *end, unsigned before, size_t w,
                         size_t n_words, struct mb_split_masks *m)
{
#if defined(__x86_64__)
    if (kernel == MB_KERNEL_AVX512 && end - (p + 64 * w) >= 64 + 2) {
        int over = add_wide_block(t, p + 64 * w, before, w, n_words, m);

        if (over >= 0)
            return (unsigned)over;
    }
#endif
    (void)kernel;
    return add_wide(t, p + 64 * w, end, before, w, n_words, m);
}

void mb_split_masks_make(const struct mb_class_table *t, enum mb_split_kernel kernel,
                         const uint8_t *p, size_t n, const uint8_t *end, struct mb_split_masks *m)
{
    enum mb_split_kernel best = mb_split_kernel_best();
    size_t whole = n / 64;
    size_t n_words = (n + 63) / 64;
    unsigned over = 0;

    if (kernel > best)
        kernel = best;
    run_kernel(kernel, p, whole, 0, m);
    if (n_words > whole) {
        uint8_t part[64] = {0};

        memcpy(part, p + 64 * whole, n - 64 * whole);
        run_kernel(kernel, part, 1, whole, m);
    }
    memset(m->tail, 0, n_words * sizeof(*m->tail));
    for (size_t w = 0; w < n_words; w++) {
        if (m->wide[w] != 0 || over != 0)
            over = add_word(t, kernel, p, end, over, w, n_words, m);
    }
}
