/* Byte pair encoding: every way of doing it against one that follows the definition word by word,
 * on random vocabularies; merges of ranks; what a model must not be. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/bpe_private.h"

enum { N_LETTERS = 4, MAX_TOKENS = 120, MAX_BYTES = 24, MAX_PIECE = 150 };

static uint64_t state = 0x2545f4914f6cdd1du;

static uint32_t draw(uint32_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)((state >> 32) * below >> 32);
}

struct vocabulary {
    uint8_t bytes[MAX_TOKENS][MAX_BYTES];
    struct mb_bpe_token tokens[MAX_TOKENS];
    size_t n;
    struct mb_bpe_merge merges[MAX_TOKENS];
    size_t n_merges;
};

static int has_text(const struct vocabulary *v, const uint8_t *bytes, size_t n)
{
    for (size_t i = 0; i < v->n; i++) {
        if (v->tokens[i].n == n && memcmp(v->tokens[i].bytes, bytes, n) == 0)
            return 1;
    }
    return 0;
}

/* Bytes that are letters, and bytes that make characters of two and of three. */
static const uint8_t alphabets[][N_LETTERS] = {{'a', 'b', 'c', 'd'},
                                               {' ', 0xd0, 0xbe, 0x81},
                                               {0xe4, 0xb8, 0xad, 'x'},
                                               {0xd1, 0x8f, 0xe2, 0x80}};
enum { N_ALPHABETS = 4 };

/* Letters, then tokens that join two earlier ones; ids are a permutation if is_mixed. */
static void make(struct vocabulary *v, const uint8_t *alphabet, int is_mixed)
{
    uint32_t step = is_mixed ? 7 : 1; /* 7 and MAX_TOKENS + 1 have no common factor */

    memset(v, 0, sizeof(*v));
    for (size_t tries = 0; v->n < MAX_TOKENS && tries < 4000; tries++) {
        struct mb_bpe_token *t = &v->tokens[v->n];
        const struct mb_bpe_token *left;
        const struct mb_bpe_token *right;
        uint8_t *bytes = v->bytes[v->n];

        t->id = (int32_t)((v->n + 1) * step % (MAX_TOKENS + 1)) - 1;
        t->bytes = bytes;
        if (v->n < N_LETTERS) {
            bytes[0] = alphabet[v->n];
            t->n = 1;
            v->n++;
            continue;
        }
        left = &v->tokens[draw((uint32_t)v->n)];
        right = &v->tokens[draw((uint32_t)v->n)];
        if (left->n + right->n > MAX_BYTES)
            continue;
        memcpy(bytes, left->bytes, left->n);
        memcpy(bytes + left->n, right->bytes, right->n);
        t->n = left->n + right->n;
        if (has_text(v, bytes, t->n))
            continue;
        v->merges[v->n_merges] =
            (struct mb_bpe_merge){left->id, right->id, t->id, (int32_t)v->n_merges};
        v->n_merges++;
        v->n++;
    }
}

/* As no vocabulary is that was learned: what a token is made of may join later than the token
 * joins others. */
static void shuffle_ranks(struct vocabulary *v)
{
    for (size_t i = v->n_merges; i > 1; i--) {
        size_t k = draw((uint32_t)i);
        int32_t rank = v->merges[k].rank;

        v->merges[k].rank = v->merges[i - 1].rank;
        v->merges[i - 1].rank = rank;
    }
}

static int32_t id_of(const struct vocabulary *v, uint8_t letter)
{
    size_t i = 0;

    while (v->bytes[i][0] != letter)
        i++;
    return v->tokens[i].id;
}

/* The definition: join the leftmost pair of the lowest rank until none is left. */
static size_t naive(const struct vocabulary *v, const struct mb_bpe_merge *merges, size_t n_merges,
                    const uint8_t *piece, size_t n, int32_t *ids)
{
    for (size_t i = 0; i < n; i++)
        ids[i] = id_of(v, piece[i]);
    for (;;) {
        const struct mb_bpe_merge *best = NULL;
        size_t at = 0;

        for (size_t i = 0; i + 1 < n; i++) {
            for (size_t k = 0; k < n_merges; k++) {
                const struct mb_bpe_merge *m = &merges[k];
                if (m->left == ids[i] && m->right == ids[i + 1] &&
                    (best == NULL || m->rank < best->rank)) {
                    best = m;
                    at = i;
                }
            }
        }
        if (best == NULL)
            return n;
        ids[at] = best->product;
        n--;
        memmove(&ids[at + 1], &ids[at + 2], (n - at - 1) * sizeof(*ids));
    }
}

static void expect(const struct mb_bpe_item *got, const int32_t *want, size_t n)
{
    assert_int_equal(got->n_ids, n);
    assert_memory_equal(got->ids, want, n * sizeof(*want));
}

enum { ROUNDS = 60 };

static unsigned n_sure; /* characters that began as one symbol */

static void count_sure(const struct mb_bpe *b, const uint8_t *piece, size_t n)
{
    uint32_t symbol;

    for (size_t i = 0; i < n; i++)
        n_sure += mb_bpe_letter_at(b->letters, piece + i, piece, piece + n, &symbol) > 0;
}

/* All pieces at once in both kinds of lanes, and one by one through the heap. */
static void compare(const struct vocabulary *v, const struct mb_bpe_merge *merges, size_t n_merges,
                    const struct mb_bpe *b)
{
    static uint8_t pieces[ROUNDS][MAX_PIECE];
    static int32_t want[ROUNDS][MAX_PIECE], got[ROUNDS][MAX_PIECE];
    struct mb_bpe_item items[ROUNDS];
    size_t n_want[ROUNDS];
    struct mb_bpe_work work = {0};

    for (int round = 0; round < ROUNDS; round++) {
        size_t n = 1 + draw(round % 2 == 0 ? 20 : MAX_PIECE);
        uint32_t letters = 1 + draw(N_LETTERS);

        for (size_t i = 0; i < n; i++)
            pieces[round][i] = v->bytes[draw(letters)][0];
        n_want[round] = naive(v, merges, n_merges, pieces[round], n, want[round]);
        count_sure(b, pieces[round], n);
        items[round] =
            (struct mb_bpe_item){.piece = pieces[round], .ids = got[round], .n = (uint32_t)n};
    }
    for (int wide = 0; wide <= mb_bpe_has_wide(); wide++) {
        memset(got, 0x55, sizeof(got));
        assert_int_equal(wide ? mb_bpe_encode_wide(b, &work, items, ROUNDS)
                              : mb_bpe_encode_lanes(b, &work, items, ROUNDS),
                         0);
        for (int round = 0; round < ROUNDS; round++)
            expect(&items[round], want[round], n_want[round]);
    }
    for (int round = 0; round < ROUNDS; round++) {
        memset(got[round], 0x55, sizeof(got[round]));
        assert_int_equal(mb_bpe_encode_long(b, &work, &items[round]), 0);
        expect(&items[round], want[round], n_want[round]);
    }
    mb_bpe_work_close(&work);
}

static void test_every_way_is_equal(void **unused)
{
    static struct vocabulary v;

    (void)unused;
    for (int round = 0; round < 160; round++) {
        struct mb_bpe_model model = {.tokens = v.tokens, .merges = v.merges, .eod = -1};
        struct mb_bpe *b;

        make(&v, alphabets[round / 4 % N_ALPHABETS], round % 2);
        model.n_tokens = v.n;
        model.n_merges = v.n_merges;
        model.vocab_size = MAX_TOKENS + 1;
        if (round % 4 >= 2)
            shuffle_ranks(&v);
        assert_int_equal(mb_bpe_create(&model, &b, NULL), 0);
        if (round % 4 < 2)
            assert_int_equal(b->products != NULL, round % 2); /* both forms of the table */
        compare(&v, v.merges, v.n_merges, b);
        mb_bpe_destroy(b);
    }
    assert_true(n_sure > 1000);
}

/* The parts of a piece one by one, which are to become what the piece does. */
static size_t encode_parts(const struct mb_bpe *b, struct mb_bpe_work *work, const uint8_t *piece,
                           size_t n, struct mb_ids *out)
{
    size_t n_parts = 0;

    for (size_t at = 0, part; at < n; at += part, n_parts++) {
        part = mb_bpe_first_part(b->cuts, piece + at, n - at);
        assert_in_range(part, 1, n - at);
        assert_int_equal(mb_bpe_encode(b, work, piece + at, part, part < n, out), 0);
    }
    return n_parts;
}

/* Few merges, so that there are places that none joins; with and without tokens that no merge
 * makes, which a whole piece becomes where merges are ignored. */
static void test_parts_are_independent(void **unused)
{
    static struct vocabulary v;
    struct mb_bpe_work work = {0};
    struct mb_ids whole = {0}, parts = {0};
    size_t n_cut = 0, n_whole = 0;

    (void)unused;
    for (int round = 0; round < 400; round++) {
        struct mb_bpe_model model = {.tokens = v.tokens, .merges = v.merges, .eod = -1};
        struct mb_bpe *b;

        make(&v, alphabets[1 + draw(N_ALPHABETS - 1)], round % 2);
        shuffle_ranks(&v);
        model.n_merges = draw(10);
        model.ignore_merges = round % 4 >= 2;
        model.n_tokens = model.ignore_merges ? N_LETTERS + draw(12) : v.n;
        if (model.n_tokens < model.n_merges + N_LETTERS)
            model.n_tokens = model.n_merges + N_LETTERS;
        model.vocab_size = MAX_TOKENS + 1;
        assert_int_equal(mb_bpe_create(&model, &b, NULL), 0);
        for (int k = 0; k < 100; k++) {
            uint8_t piece[MAX_PIECE];
            size_t n = 1 + draw(30), n_parts;

            for (size_t i = 0; i < n; i++)
                piece[i] = v.bytes[draw(N_LETTERS)][0];
            whole.n = parts.n = 0;
            assert_int_equal(mb_bpe_encode(b, &work, piece, n, 0, &whole), 0);
            n_parts = encode_parts(b, &work, piece, n, &parts);
            assert_int_equal(parts.n, whole.n);
            assert_memory_equal(parts.data, whole.data, whole.n * sizeof(*whole.data));
            n_cut += n_parts > 1;
            n_whole += n_parts == 1;
        }
        mb_bpe_destroy(b);
    }
    assert_true(n_cut > 2000 && n_whole > 2000);
    mb_bpe_work_close(&work);
    mb_ids_close(&whole);
    mb_ids_close(&parts);
}

struct joint {
    const char *left;
    const char *right;
};

static void compare_one(const struct vocabulary *v, const struct mb_bpe *b, const char *text)
{
    const uint8_t *piece = (const uint8_t *)text;
    int32_t want[MAX_PIECE], got[MAX_PIECE];
    struct mb_bpe_item item = {.piece = piece, .ids = got, .n = (uint32_t)strlen(text)};
    struct mb_bpe_work work = {0};
    size_t n = naive(v, v->merges, v->n_merges, piece, item.n, want);

    assert_int_equal(mb_bpe_encode_many(b, &work, &item, 1), 0);
    expect(&item, want, n);
    mb_bpe_work_close(&work);
}

/* Merges in the order of their ranks, over the four bytes of a text. */
static void compare_joints(const char *letters, const struct joint *joints, size_t n)
{
    static struct vocabulary v;
    struct mb_bpe_model model = {.tokens = v.tokens, .merges = v.merges, .eod = -1};
    struct mb_bpe *b;

    memset(&v, 0, sizeof(v));
    for (; v.n < N_LETTERS; v.n++)
        v.bytes[v.n][0] = (uint8_t)letters[v.n];
    for (size_t i = 0; i < n; i++, v.n++)
        snprintf((char *)v.bytes[v.n], MAX_BYTES, "%s%s", joints[i].left, joints[i].right);
    for (size_t i = 0; i < v.n; i++)
        v.tokens[i] = (struct mb_bpe_token){v.bytes[i], strlen((char *)v.bytes[i]), (int32_t)i, 0};
    model.n_tokens = v.n;
    model.vocab_size = v.n;
    for (; v.n_merges < n; v.n_merges++) {
        struct mb_bpe_merge *m = &v.merges[v.n_merges];

        *m = (struct mb_bpe_merge){-1, -1, (int32_t)(N_LETTERS + v.n_merges), (int32_t)v.n_merges};
        for (size_t i = 0; i < v.n; i++) {
            if (strcmp((char *)v.bytes[i], joints[v.n_merges].left) == 0)
                m->left = (int32_t)i;
            if (strcmp((char *)v.bytes[i], joints[v.n_merges].right) == 0)
                m->right = (int32_t)i;
        }
    }
    model.n_merges = n;
    assert_int_equal(mb_bpe_create(&model, &b, NULL), 0);
    compare(&v, v.merges, n, b);
    compare_one(&v, b, letters);
    mb_bpe_destroy(b);
}

/* Characters that join if alone, and something that comes earlier beside a neighbour. */
static void test_characters_that_are_not_sure(void **unused)
{
    static const struct joint before[] = {
        {"\xe4", "\xb8"}, {"x", "\xe4\xb8"}, {"\xe4\xb8", "\xad"}};
    static const struct joint behind[] = {
        {"\xb8", "\xad"}, {"\xb8\xad", "x"}, {"\xe4", "\xb8\xad"}};
    static const struct joint lead[] = {{"x", "\xd0"}, {"\xd0", "\xbe"}, {"\xbe", "x"}};
    static const struct joint last[] = {{"\xbe", "x"}, {"\xd0", "\xbe"}, {"x", "\xd0"}};
    static const struct joint whole[] = {{"\xd0\xbe", "x"}, {"x", "y"}, {"\xd0", "\xbe"}};

    (void)unused;
    compare_joints("x\xe4\xb8\xad", before, 3);
    compare_joints("\xe4\xb8\xadx", behind, 3);
    compare_joints("x\xd0\xbey", lead, 3);
    compare_joints("\xd0\xbexy", last, 3);
    compare_joints("\xd0\xbexy", whole, 3);
}

static void test_merges_of_ranks(void **unused)
{
    static struct vocabulary v;

    (void)unused;
    for (int round = 0; round < 20; round++) {
        struct mb_bpe_model model = {.tokens = v.tokens, .vocab_size = MAX_TOKENS + 1, .eod = -1};
        struct mb_bpe_merge *merges;
        struct mb_bpe *b;

        make(&v, alphabets[round % N_ALPHABETS], 0);
        assert_int_equal(mb_bpe_merges_of_ranks(v.tokens, v.n, &merges, &model.n_merges, NULL), 0);
        assert_true(model.n_merges >= v.n_merges);
        model.merges = merges;
        model.n_tokens = v.n;
        assert_int_equal(mb_bpe_create(&model, &b, NULL), 0);
        compare(&v, merges, model.n_merges, b);
        mb_bpe_destroy(b);
        for (size_t i = 0; i < model.n_merges; i++) /* as a tokenizer.json made of ranks has them */
            merges[i].rank = (int32_t)i;
        assert_int_equal(mb_bpe_create(&model, &b, NULL), 0);
        assert_true(b->products == NULL && b->rank_shift > 0);
        compare(&v, merges, model.n_merges, b);
        mb_bpe_destroy(b);
        mb_free(merges);
    }
}

static void test_whole_pieces(void **unused)
{
    static const struct mb_bpe_token tokens[] = {{(const uint8_t *)"a", 1, 0, 0},
                                                 {(const uint8_t *)"b", 1, 1, 0},
                                                 {(const uint8_t *)"aba", 3, 2, 0},
                                                 {(const uint8_t *)"b", 1, 3, 1}};
    struct mb_bpe_model model = {
        .tokens = tokens, .n_tokens = 4, .vocab_size = 4, .eod = -1, .ignore_merges = 1};
    struct mb_bpe_work work = {0};
    struct mb_ids ids = {0};
    struct mb_bpe *b;

    (void)unused;
    assert_int_equal(mb_bpe_create(&model, &b, NULL), 0);
    assert_int_equal(mb_bpe_encode(b, &work, (const uint8_t *)"aba", 3, 0, &ids), 0);
    assert_int_equal(mb_bpe_encode(b, &work, (const uint8_t *)"abx", 3, 0, &ids), 0);
    assert_int_equal(ids.n, 4);
    assert_int_equal(ids.data[0], 2); /* no merge makes it */
    /* A byte that is no token is `unknown`. */
    assert_memory_equal(ids.data + 1, ((int32_t[]){0, 1, 0}), 3 * sizeof(int32_t));
    assert_int_equal(mb_bpe_find(b, (const uint8_t *)"b", 1), 1);
    assert_int_equal(mb_bpe_find(b, (const uint8_t *)"ab", 2), -1);
    mb_ids_close(&ids);
    mb_bpe_work_close(&work);
    mb_bpe_destroy(b);
}

static void refuse(const struct mb_bpe_model *model, int code, const char *text)
{
    struct mb_err err = {0};
    struct mb_bpe *b;

    assert_int_equal(mb_bpe_create(model, &b, &err), code);
    if (strstr(err.text, text) == NULL)
        fail_msg("'%s' is not in: %s", text, err.text);
}

static void test_bad_models(void **unused)
{
    struct mb_bpe_token tokens[] = {{(const uint8_t *)"a", 1, 0, 0},
                                    {(const uint8_t *)"b", 1, 1, 0}};
    struct mb_bpe_merge merges[] = {{0, 1, 1, 0}, {1, 0, 0, 0}};
    struct mb_bpe_model model = {
        .tokens = tokens, .n_tokens = 2, .merges = merges, .vocab_size = 2, .eod = -1};

    (void)unused;
    tokens[1].id = 0;
    refuse(&model, MB_ECORRUPT, "given twice");
    tokens[1].id = MB_BPE_MAX_IDS;
    refuse(&model, MB_EUNSUPPORTED, "token id");
    tokens[1] = (struct mb_bpe_token){(const uint8_t *)"a", 1, 1, 0};
    refuse(&model, MB_ECORRUPT, "same text");
    tokens[1] = (struct mb_bpe_token){(const uint8_t *)"", 0, 1, 0};
    refuse(&model, MB_ECORRUPT, "empty");
    tokens[1] = (struct mb_bpe_token){(const uint8_t *)"b", 1, 1, 0};
    model.n_merges = 2;
    refuse(&model, MB_ECORRUPT, "different products");
    merges[1] = (struct mb_bpe_merge){1, 5, 0, 1};
    refuse(&model, MB_ECORRUPT, "not all of them are tokens");
    model.vocab_size = 0;
    refuse(&model, MB_EUNSUPPORTED, "vocabulary");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_way_is_equal),
        cmocka_unit_test(test_parts_are_independent),
        cmocka_unit_test(test_characters_that_are_not_sure),
        cmocka_unit_test(test_merges_of_ranks),
        cmocka_unit_test(test_whole_pieces),
        cmocka_unit_test(test_bad_models),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
