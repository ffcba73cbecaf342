/* The piece cache never gives anything but what was kept under the same bytes, in both widths; what
 * is kept last is found, and what is found again stays when others come. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include "worker/data/tokenizer/piece_cache.h"

static uint64_t state = 0x2545f4914f6cdd1du;

static uint32_t draw(uint32_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)((state >> 32) * below >> 32);
}

/* The ids of a piece follow from its bytes and from whether it is a part, so that no list of them
 * is needed. */
static size_t ids_of(const uint8_t *piece, size_t n, int is_part, uint32_t below, int32_t *ids)
{
    uint64_t h = n + 1000 * (uint64_t)is_part;
    size_t count;

    for (size_t i = 0; i < n; i++)
        h = (h ^ piece[i]) * 0x100000001b3u;
    count = 1 + h % n;
    for (size_t i = 0; i < count; i++) {
        h = h * 6364136223846793005u + 1442695040888963407u;
        ids[i] = (int32_t)((h >> 33) % below);
    }
    return count;
}

static size_t find(struct mb_piece_cache *c, struct mb_piece_probe *q, int32_t *out)
{
    size_t n = q->n <= MB_PIECE_SHORT_BYTES ? mb_piece_find_short(c, q, out) : 0;

    if (n > 0 || (q->n <= MB_PIECE_SHORT_BYTES && !mb_piece_ask_long(c, q)))
        return n;
    return mb_piece_find_long(c, q, out);
}

static void check(struct mb_piece_cache *c, uint32_t below)
{
    size_t max_long = c->is_narrow ? MB_PIECE_LONG_IDS : MB_PIECE_LONG_WIDE_IDS;
    unsigned n_found = 0;

    for (int round = 0; round < 200000; round++) {
        uint8_t piece[32];
        int32_t want[32];
        int32_t got[MB_PIECE_LONG_IDS + 8];
        struct mb_piece_probe q;
        size_t n = 1 + draw(MB_PIECE_LONG_BYTES);
        int is_part = (int)draw(2);
        size_t n_want;
        size_t n_got;

        for (size_t i = 0; i < sizeof(piece); i++) /* bytes behind the piece must not count */
            piece[i] = (uint8_t)draw(i < 4 ? 6 : i < n ? 2 : 256);
        piece[0] |= draw(2) == 0 ? 0x80 : 0; /* such are not tiny */
        n_want = ids_of(piece, n, is_part, below, want);
        mb_piece_prepare_as(c, &q, piece, n, is_part);
        n_got = find(c, &q, got);
        if (n_got > 0) {
            n_found++;
            assert_int_equal(n_got, n_want);
            assert_memory_equal(got, want, n_want * sizeof(*want));
            continue;
        }
        mb_piece_cache_add(c, &q, want, n_want);
        n_got = find(c, &q, got);
        assert_int_equal(n_got, n_want <= max_long ? n_want : 0);
        if (n_got > 0)
            assert_memory_equal(got, want, n_want * sizeof(*want));
    }
    assert_true(n_found > 10000);
}

static void test_wide(void **unused)
{
    struct mb_piece_cache c;

    (void)unused;
    assert_int_equal(mb_piece_cache_init(&c), 0);
    check(&c, 1 << MB_PIECE_ID_BITS);
    mb_piece_cache_close(&c);
}

static void test_narrow(void **unused)
{
    struct mb_piece_cache c;

    (void)unused;
    assert_int_equal(mb_piece_cache_init_narrow(&c), 0);
    check(&c, 1 << 16);
    mb_piece_cache_close(&c);
}

/* Pieces of one line: the one that was found keeps its place while others come and go. */
static void test_found_pieces_stay(void **unused)
{
    struct mb_piece_cache c;
    struct mb_piece_probe kept;
    uint8_t piece[32] = "kept";
    int32_t out[MB_PIECE_LONG_IDS];

    (void)unused;
    assert_int_equal(mb_piece_cache_init(&c), 0);
    mb_piece_prepare(&c, &kept, piece, 4);
    mb_piece_cache_add(&c, &kept, (int32_t[]){5}, 1);
    assert_int_equal(find(&c, &kept, out), 1);
    for (uint64_t i = 0; i < 10; i++) {
        struct mb_piece_probe other = kept;

        other.key[0] ^= i + 1;
        mb_piece_cache_add(&c, &other, (int32_t[]){6}, 1);
        assert_int_equal(find(&c, &kept, out), 1);
        assert_int_equal(out[0], 5);
    }
    mb_piece_cache_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_wide),
        cmocka_unit_test(test_narrow),
        cmocka_unit_test(test_found_pieces_stay),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
