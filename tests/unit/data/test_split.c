/* The bit-parallel scanner against the one that goes character by character, with every kernel, on
 * random texts of pools that make each rule likely, longer than a window and cut at every length.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "worker/data/tokenizer/split_masks.h"

static uint64_t state = 0x9e3779b97f4a7c15u;

static uint32_t draw(uint32_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)((state >> 32) * below >> 32);
}

static const char *const pools[][20] = {
    {"a", "B", "c", " ", "'", "s", "1", ".", "\n", NULL},
    {"'", "'s", "'S", "'ll", "'L", "'\xc5\xbf", "'r", "e", "v", " ", "x", "(", NULL},
    {" ", "\n", "\r", "\t", "\xc2\xa0", "\xe3\x80\x80", "a", ".", "\x0b", NULL},
    {"1", "2", "\xc2\xbd", "\xd9\xa3", "\xf0\x9d\x9f\x98", "a", " ", NULL},
    {"\xc3\xa9", "\xe4\xb8\xad", "\xe2\x80\x94", "\xf0\x9f\x99\x82", "a", " ", "\xe0\xa4\xbe",
     NULL},
    {"\xff", "\xc3", "\xe4\xb8", "\x80", "\xf0\x9f", "\xed\xa0\x80", "a", " ", "\xc3\xa9", NULL},
    {" ", "  ", "   ", "\n\n", "\n ", "word", "Word", ".", "...", "12", "12345", NULL},
};
enum { N_POOLS = sizeof(pools) / sizeof(*pools) };

static const enum mb_split_family families[] = {MB_SPLIT_GPT2, MB_SPLIT_CL100K, MB_SPLIT_LLAMA3,
                                                MB_SPLIT_QWEN2, MB_SPLIT_TIKTOKEN_V1};
enum { N_FAMILIES = sizeof(families) / sizeof(*families) };

static struct mb_split *splits[N_FAMILIES];

static int setup(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < N_FAMILIES; i++) {
        if (mb_split_create(families[i], NULL, &splits[i], NULL) != 0)
            return -1;
    }
    return 0;
}

static int teardown(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < N_FAMILIES; i++)
        mb_split_destroy(splits[i]);
    return 0;
}

/* A text of its exact size, so that the sanitizer sees a byte read beyond it. */
static uint8_t *make_text(size_t target, size_t *n)
{
    struct mb_buf b = {0};
    const char *const *pool = pools[draw(N_POOLS)];
    uint8_t *text;
    size_t n_items = 0;

    while (b.len < target) {
        if (draw(200) == 0)
            pool = pools[draw(N_POOLS)];
        for (n_items = 0; pool[n_items] != NULL;)
            n_items++;
        const char *item = pool[draw((uint32_t)n_items)];
        for (uint32_t i = draw(300) == 0 ? draw(700) : 1; i > 0; i--)
            assert_int_equal(mb_buf_puts(&b, item), 0);
    }
    *n = b.len;
    text = mb_alloc(b.len);
    assert_non_null(text);
    if (b.len > 0)
        memcpy(text, b.data, b.len);
    mb_buf_close(&b);
    return text;
}

static void compare(const struct mb_split *s, enum mb_split_kernel kernel, const uint8_t *text,
                    size_t n)
{
    static uint16_t ends[MB_WINDOW_ENDS];
    const uint8_t *end = text + n;
    const uint8_t *p = text;

    while (p < end) {
        size_t count = mb_split_block(s, kernel, p, end, ends);
        const uint8_t *start = p;

        if (count == 0)
            p = mb_split_next(s, p, end);
        for (size_t i = 0; i < count; i++) {
            const uint8_t *want = mb_split_next(s, p, end);

            if (start + ends[i] != want)
                fail_msg("%s, kernel %d, byte %zu of %zu: a piece of %td bytes, not %td",
                         mb_split_family_name(s->family), (int)kernel, (size_t)(p - text), n,
                         start + ends[i] - p, want - p);
            p = want;
        }
    }
}

static void compare_all(const uint8_t *text, size_t n)
{
    for (size_t i = 0; i < N_FAMILIES; i++) {
        for (int kernel = MB_KERNEL_PLAIN; kernel <= MB_KERNEL_AVX512; kernel++)
            compare(splits[i], (enum mb_split_kernel)kernel, text, n);
    }
}

static void test_random_texts(void **unused)
{
    (void)unused;
    for (int round = 0; round < 1500; round++) {
        size_t n;
        uint8_t *text = make_text(draw(round % 10 == 0 ? 20000 : 300), &n);

        compare_all(text, n);
        mb_free(text);
    }
}

static void test_every_length(void **unused)
{
    (void)unused;
    for (size_t n = 0; n < 200; n++) {
        size_t whole;
        uint8_t *text = make_text(n, &whole);
        uint8_t *cut = mb_alloc(n);

        memcpy(cut, text, n);
        compare_all(cut, n);
        mb_free(cut);
        mb_free(text);
    }
}

/* Pieces that end at, before and behind the end of a window. */
static void test_window_ends(void **unused)
{
    static const char *const tails[] = {"'s x",
                                        "\n\n  x",
                                        "  \n",
                                        "12345678",
                                        ".\n\n\n x",
                                        "\xe3\x80\x80\xe3\x80\x80x",
                                        "\xe4\xb8\xad\xe4\xb8\xad'll"};

    (void)unused;
    for (size_t t = 0; t < sizeof(tails) / sizeof(*tails); t++) {
        for (size_t n = MB_WINDOW_BYTES - 24; n < MB_WINDOW_BYTES + 4; n++) {
            size_t whole = n + strlen(tails[t]);
            uint8_t *text = mb_alloc(whole + 40);

            for (size_t i = 0; i < n; i++)
                text[i] = i % 5 == 4 ? ' ' : 'a';
            memcpy(text + n, tails[t], whole - n);
            memset(text + whole, 'z', 40);
            compare_all(text, whole);
            compare_all(text, whole + 40);
            mb_free(text);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_texts),
        cmocka_unit_test(test_every_length),
        cmocka_unit_test(test_window_ends),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
