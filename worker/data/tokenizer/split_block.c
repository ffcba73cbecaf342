/*
 * The boundaries of a window at once.
 *
 * 1. The text from p on, up to a window of it, becomes masks. 2. The rules of the family give a
 * word of boundary bits for each 64 bytes, from the masks shifted by one. What is rare is done bit
 * by bit: contractions, white space of several bytes, line ends inside white space, long numbers.
 * 3. Where the text goes on behind the window, boundaries near its end, or in white space that
 * touches the end, may be wrong: they are dropped, and the caller goes on from the last one kept.
 * That is right because a piece depends on nothing before it.
 */
#include <string.h>
#include "worker/data/tokenizer/split_masks.h"
#include "worker/data/tokenizer/split_private.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { WORDS = MB_WINDOW_WORDS, LOOK_AHEAD = 8 };

struct window {
    const struct mb_split *split;
    const uint8_t *p;
    size_t n;       /* bytes in the window */
    size_t n_words; /* (n + 63) / 64 */
    int is_last;    /* the text ends with the window */
    struct mb_split_masks m;
    uint64_t loose[WORDS]; /* white space that is not behind others as their line ends */
    uint64_t starts[WORDS];
};

/* Bits moved to the byte after them. */
static inline uint64_t next_of(const uint64_t *x, size_t w)
{
    return x[w] << 1 | (w > 0 ? x[w - 1] >> 63 : 0);
}

/* Bits moved to the byte before them. */
static inline uint64_t last_of(const uint64_t *x, size_t w, size_t n_words)
{
    return x[w] >> 1 | (w + 1 < n_words ? x[w + 1] << 63 : 0);
}

static inline int bit_at(const uint64_t *x, size_t i)
{
    return (int)(x[i / 64] >> (i % 64) & 1);
}

static inline void set_bit(uint64_t *x, size_t i)
{
    x[i / 64] |= (uint64_t)1 << (i % 64);
}

static inline void clear_bit(uint64_t *x, size_t i)
{
    x[i / 64] &= ~((uint64_t)1 << (i % 64));
}

/* The white space characters whose last bytes are `ends` begin pieces. */
static void start_last_spaces(struct window *v, size_t w, uint64_t ends)
{
    uint64_t wide = ends & v->m.tail[w];

    v->starts[w] |= ends & ~wide;
    for (; wide != 0; wide &= wide - 1) {
        size_t i = 64 * w + (size_t)__builtin_ctzll(wide);

        while (bit_at(v->m.tail, i))
            i--;
        set_bit(v->starts, i);
    }
}

/* The end of the text is no boundary inside white space. */
static inline uint64_t not_at_end(const struct window *v, size_t w)
{
    size_t last = v->n - 1;

    return v->is_last && w == last / 64 ? ~((uint64_t)1 << (last % 64)) : ~(uint64_t)0;
}

static void contractions(struct window *v, size_t w, uint64_t candidates, int any_case)
{
    for (; candidates != 0; candidates &= candidates - 1) {
        size_t i = 64 * w + (size_t)__builtin_ctzll(candidates);
        size_t n = mb_split_contraction(v->p + i, v->p + v->n, any_case);

        if (n == 0)
            continue;
        clear_bit(v->starts, i + 1);
        if (i + n < v->n)
            set_bit(v->starts, i + n);
    }
}

static void starts_gpt2(struct window *v)
{
    const struct mb_split_masks *m = &v->m;
    uint64_t before_letter = 0; /* the last byte of the word before was one */
    uint64_t before_number = 0;
    uint64_t before_other = 0;

    for (size_t w = 0; w < v->n_words; w++) {
        uint64_t other = ~(m->letter[w] | m->number[w] | m->space[w]);
        uint64_t runs = (m->letter[w] & ~(m->letter[w] << 1 | before_letter)) |
                        (m->number[w] & ~(m->number[w] << 1 | before_number)) |
                        (other & ~(other << 1 | before_other));
        uint64_t ends = m->space[w] & ~last_of(m->space, w, v->n_words) & not_at_end(v, w);

        before_letter = m->letter[w] >> 63;
        before_number = m->number[w] >> 63;
        before_other = other >> 63;
        v->starts[w] = (runs & ~next_of(m->blank, w)) | (m->space[w] & ~next_of(m->space, w));
        start_last_spaces(v, w, ends);
    }
    for (size_t w = 0; w < v->n_words; w++) {
        if ((m->apostrophe[w] & v->starts[w]) != 0)
            contractions(v, w, m->apostrophe[w] & v->starts[w], 0);
    }
}

/* Every max_digits-th number of a run begins a piece. A run that goes on from before the window is
 * none: windows begin at pieces. */
static void start_numbers(struct window *v, size_t w, uint64_t runs)
{
    const struct mb_split_masks *m = &v->m;

    if (v->split->max_digits == 1) {
        v->starts[w] |= m->number[w] & ~m->tail[w];
        return;
    }
    v->starts[w] |= runs;
    for (; runs != 0; runs &= runs - 1) {
        size_t i = 64 * w + (size_t)__builtin_ctzll(runs);
        unsigned count = 0;

        for (; i < v->n && bit_at(m->number, i); i++) {
            if (bit_at(m->tail, i))
                continue;
            if (count == v->split->max_digits) {
                set_bit(v->starts, i);
                count = 0;
            }
            count++;
        }
    }
}

/* Line end i of white space that goes on with something else: what follows begins a piece if no
 * line end comes in the run any more. Behind the window's end the answer is not used. */
static void start_after_line_end(struct window *v, size_t i)
{
    size_t at = i + 1;
    size_t w = at / 64;
    uint64_t stop = (~v->loose[w] | v->m.line_end[w]) >> (at % 64) << (at % 64);

    while (stop == 0 && ++w < v->n_words)
        stop = ~v->loose[w] | v->m.line_end[w];
    if (stop != 0 && (v->m.line_end[w] & v->loose[w] & stop & -stop) != 0)
        return;
    set_bit(v->starts, at);
}

/* White space without the line ends that belong to others before them. */
static void find_loose(struct window *v)
{
    const struct mb_split_masks *m = &v->m;
    uint64_t before_other = 0;
    unsigned long long carry = 0;

    for (size_t w = 0; w < v->n_words; w++) {
        uint64_t other = ~(m->letter[w] | m->number[w] | m->space[w]);
        uint64_t first = (other << 1 | before_other) & m->line_end[w];
        unsigned long long sum;
        unsigned long long over = __builtin_uaddll_overflow(m->line_end[w], first, &sum);

        /* The sum ripples through the runs of line ends that begin behind others. */
        over |= __builtin_uaddll_overflow(sum, carry, &sum);
        carry = over;
        before_other = other >> 63;
        v->loose[w] = m->space[w] & ~(m->line_end[w] & ~sum);
    }
}

static void starts_words(struct window *v)
{
    const struct mb_split_masks *m = &v->m;
    uint64_t before_other = 0;
    uint64_t before_lead = 0; /* the last byte of the word before is of `lead` */
    unsigned long long carry = 0;

    find_loose(v);
    memset(v->starts, 0, v->n_words * sizeof(*v->starts));
    for (size_t w = 0; w < v->n_words; w++) {
        uint64_t other = ~(m->letter[w] | m->number[w] | m->space[w]);
        /* Others that begin a piece, and all bytes of the first character of such. */
        uint64_t others = other & ~(other << 1 | before_other) & ~next_of(m->blank, w);
        uint64_t tails = m->tail[w] & (others << 1);
        unsigned long long sum;
        uint64_t lead;
        uint64_t soft; /* white space but line ends: letters take the last of it */
        uint64_t ends =
            v->loose[w] & ~last_of(v->loose, w, v->n_words) & ~m->line_end[w] & not_at_end(v, w);
        uint64_t inner;

        carry = __builtin_uaddll_overflow(m->tail[w], tails | carry, &sum) | others >> 63;
        lead = others | (m->tail[w] & ~sum & other);
        soft = next_of(m->space, w) & ~next_of(m->line_end, w);
        v->starts[w] |=
            (m->letter[w] & ~next_of(m->letter, w) & ~soft & ~(lead << 1 | before_lead)) | others |
            (v->loose[w] & ~next_of(v->loose, w));
        start_last_spaces(v, w, ends);
        start_numbers(v, w, m->number[w] & ~next_of(m->number, w));
        inner = m->line_end[w] & v->loose[w] & last_of(v->loose, w, v->n_words) &
                ~last_of(m->line_end, w, v->n_words);
        for (; inner != 0; inner &= inner - 1)
            start_after_line_end(v, 64 * w + (size_t)__builtin_ctzll(inner));
        if (v->split->contractions) {
            uint64_t quotes = m->apostrophe[w] & others & last_of(m->letter, w, v->n_words);

            if (quotes != 0)
                contractions(v, w, quotes, 1);
        }
        before_other = other >> 63;
        before_lead = lead >> 63;
    }
}

/* White space at the very end of the text is one piece. */
static void join_end(struct window *v)
{
    size_t i = v->n;

    while (i > 0 && bit_at(v->loose, i - 1)) {
        i--;
        clear_bit(v->starts, i);
    }
    if (i < v->n)
        set_bit(v->starts, i);
}

/* The last place where a boundary is sure. */
static size_t sure_until(const struct window *v)
{
    size_t i = v->n;

    if (v->is_last)
        return v->n;
    while (i > 0 && bit_at(v->m.space, i - 1))
        i--;
    return i < v->n - LOOK_AHEAD ? i : v->n - LOOK_AHEAD;
}

#if defined(__x86_64__)
/* The places of the bits of n words. */
__attribute__((target("avx512f,avx512bw,avx512vbmi2"))) static size_t
list_wide(const uint64_t *words, size_t n, uint16_t *out)
{
    static const uint8_t places[64] = {
        0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
        22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
        44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
    const uint16_t *start = out;

    for (size_t w = 0; w < n; w++) {
        int count = __builtin_popcountll(words[w]);
        __m512i first = _mm512_set1_epi16((short)(64 * w));
        __m512i at = _mm512_maskz_compress_epi8(words[w], _mm512_loadu_si512(places));

        _mm512_storeu_si512(
            out, _mm512_add_epi16(_mm512_cvtepu8_epi16(_mm512_castsi512_si256(at)), first));
        if (count > 32)
            _mm512_storeu_si512(
                out + 32,
                _mm512_add_epi16(_mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(at, 1)), first));
        out += count;
    }
    return (size_t)(out - start);
}
#endif

static size_t list_plain(const uint64_t *words, size_t n, uint16_t *out)
{
    const uint16_t *start = out;

    for (size_t w = 0; w < n; w++) {
        for (uint64_t bits = words[w]; bits != 0; bits &= bits - 1)
            *out++ = (uint16_t)(64 * w + (size_t)__builtin_ctzll(bits));
    }
    return (size_t)(out - start);
}

static size_t list(struct window *v, enum mb_split_kernel kernel, uint16_t *ends)
{
    size_t sure = sure_until(v);
    size_t n_words = sure / 64 + 1 < v->n_words ? sure / 64 + 1 : v->n_words;
    size_t n;

    v->starts[0] &= ~(uint64_t)1;
    if (sure - 64 * (n_words - 1) < 63)
        v->starts[n_words - 1] &= ((uint64_t)2 << (sure - 64 * (n_words - 1))) - 1;
#if defined(__x86_64__)
    if (kernel == MB_KERNEL_AVX512)
        n = list_wide(v->starts, n_words, ends);
    else
#endif
        n = list_plain(v->starts, n_words, ends);
    (void)kernel;
    if (v->is_last) {
        if (n > 0 && ends[n - 1] == v->n)
            n--;
        ends[n++] = (uint16_t)v->n;
    }
    return n;
}

int mb_split_has_block(enum mb_split_family family)
{
    return family == MB_SPLIT_GPT2 || family == MB_SPLIT_CL100K || family == MB_SPLIT_LLAMA3 ||
           family == MB_SPLIT_QWEN2 || family == MB_SPLIT_TIKTOKEN_V1;
}

size_t mb_split_block(const struct mb_split *s, enum mb_split_kernel kernel, const uint8_t *p,
                      const uint8_t *end, uint16_t ends[MB_WINDOW_ENDS])
{
    struct window v;
    size_t left = (size_t)(end - p);

    v.split = s;
    v.p = p;
    v.is_last = left <= MB_WINDOW_BYTES;
    v.n = v.is_last ? left : MB_WINDOW_BYTES;
    v.n_words = (v.n + 63) / 64;
    if (kernel > mb_split_kernel_best())
        kernel = mb_split_kernel_best();
    mb_split_masks_make(&s->classes, kernel, p, v.n, end, &v.m);
    if (s->family == MB_SPLIT_GPT2)
        starts_gpt2(&v);
    else
        starts_words(&v);
    if (s->whole_end && v.is_last)
        join_end(&v);
    return list(&v, kernel, ends);
}
