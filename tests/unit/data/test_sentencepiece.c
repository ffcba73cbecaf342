/* SentencePiece models made by hand: merges and ties, cutting against whole-text merging on random
 * models, unigram choices, decoding, refused and damaged files, memory that runs out. Equality with
 * the SentencePiece package is in tests/integration/data. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "worker/data/tokenizer/sentencepiece/model.h"
#include "worker/data/tokenizer/sentencepiece/spm.h"

#define SPACE "\xe2\x96\x81"

/* The file's messages, one field after the other. */
static void put_varint(struct mb_buf *b, uint64_t v)
{
    for (; v >= 0x80; v >>= 7) {
        uint8_t byte = (uint8_t)(v | 0x80);
        assert_int_equal(mb_buf_add(b, &byte, 1), 0);
    }
    assert_int_equal(mb_buf_add(b, &(uint8_t){(uint8_t)v}, 1), 0);
}

static void put_number(struct mb_buf *b, unsigned field, uint64_t v)
{
    put_varint(b, field << 3);
    put_varint(b, v);
}

static void put_bytes(struct mb_buf *b, unsigned field, const void *p, size_t n)
{
    put_varint(b, field << 3 | 2);
    put_varint(b, n);
    assert_int_equal(mb_buf_add(b, p, n), 0);
}

static void put_piece(struct mb_buf *file, const char *text, float score,
                      enum mb_spm_piece_type type)
{
    struct mb_buf piece = {0};
    uint32_t bits;

    put_bytes(&piece, 1, text, strlen(text));
    memcpy(&bits, &score, sizeof(bits));
    put_varint(&piece, 2 << 3 | 5);
    assert_int_equal(mb_buf_u32le(&piece, bits), 0);
    put_number(&piece, 3, type);
    put_bytes(file, 1, piece.data, piece.len);
    mb_buf_close(&piece);
}

static void put_specs(struct mb_buf *file, enum mb_spm_algorithm algorithm, int falls_back,
                      int adds_prefix, int removes_extra)
{
    struct mb_buf spec = {0};

    put_number(&spec, 3, algorithm);
    put_number(&spec, 35, (uint64_t)falls_back);
    put_bytes(file, 2, spec.data, spec.len);
    mb_buf_reset(&spec);
    put_number(&spec, 3, (uint64_t)adds_prefix);
    put_number(&spec, 4, (uint64_t)removes_extra);
    put_bytes(file, 3, spec.data, spec.len);
    mb_buf_close(&spec);
}

/* <unk> <s> </s>, then <0x00> to <0xFF> if bytes are fallen back to. */
static void put_first(struct mb_buf *file, int falls_back)
{
    char name[8];

    put_piece(file, "<unk>", 0, MB_SPM_UNKNOWN);
    put_piece(file, "<s>", 0, MB_SPM_CONTROL);
    put_piece(file, "</s>", 0, MB_SPM_CONTROL);
    for (unsigned i = 0; falls_back && i < 256; i++) {
        snprintf(name, sizeof(name), "<0x%02X>", i);
        put_piece(file, name, 0, MB_SPM_BYTE);
    }
}

static struct mb_spm *make(const struct mb_buf *file)
{
    struct mb_spm *m = NULL;
    struct mb_err err = {0};
    int rc = mb_spm_create(file->data, file->len, &m, &err);

    if (rc != 0)
        fail_msg("%s", err.text);
    return m;
}

static void encode(const struct mb_spm *m, const char *text, struct mb_ids *out)
{
    struct mb_spm_scratch *s;

    assert_int_equal(mb_spm_scratch_create(m, &s, NULL), 0);
    for (int pass = 0; pass < 2; pass++) { /* the second one from the cache */
        struct mb_ids again = {0};
        assert_int_equal(mb_spm_encode(m, s, text, strlen(text), pass == 0 ? out : &again), 0);
        if (pass == 1) {
            assert_int_equal(again.n, out->n);
            if (out->n > 0)
                assert_memory_equal(again.data, out->data, out->n * sizeof(*out->data));
        }
        mb_ids_close(&again);
    }
    mb_spm_scratch_destroy(s);
}

static void expect(const struct mb_spm *m, const char *text, const int32_t *want, size_t n,
                   const char *decoded)
{
    struct mb_ids ids = {0};
    struct mb_buf back = {0};

    encode(m, text, &ids);
    assert_int_equal(ids.n, n);
    if (n > 0)
        assert_memory_equal(ids.data, want, n * sizeof(*want));
    assert_int_equal(mb_spm_decode(m, ids.data, ids.n, &back), 0);
    assert_string_equal(mb_buf_str(&back), decoded);
    mb_buf_close(&back);
    mb_ids_close(&ids);
}
#define EXPECT(m, text, decoded, ...)                                                              \
    expect(m, text, (const int32_t[]){__VA_ARGS__},                                                \
           sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t), decoded)

static void test_bpe(void **state)
{
    struct mb_buf file = {0};
    struct mb_spm *m;

    (void)state;
    put_first(&file, 0);
    put_piece(&file, SPACE, -9, MB_SPM_NORMAL); /* 3 */
    put_piece(&file, "a", -9, MB_SPM_NORMAL);
    put_piece(&file, "b", -9, MB_SPM_NORMAL);
    put_piece(&file, "bc", -1, MB_SPM_NORMAL);      /* 6: before ab; c itself is no piece */
    put_piece(&file, "ab", -2, MB_SPM_NORMAL);      /* 7 */
    put_piece(&file, "abc", -2, MB_SPM_NORMAL);     /* 8: as early as ab */
    put_piece(&file, "aa", -3, MB_SPM_NORMAL);      /* 9 */
    put_piece(&file, SPACE "a", -4, MB_SPM_NORMAL); /* 10 */
    put_specs(&file, MB_SPM_BPE, 0, 1, 0);
    m = make(&file);
    EXPECT(m, "abc", "abc", 3, 8);
    EXPECT(m, "ab", "ab", 3, 7);
    EXPECT(m, "aaa", "aaa", 3, 9, 4); /* the leftmost of equals */
    EXPECT(m, "a a", "a a", 10, 10);
    EXPECT(m, "a" SPACE "a", "a a", 10, 10);
    EXPECT(m, "b  b", "b  b", 3, 5, 3, 3, 5);
    EXPECT(m, "ccdab", " \xe2\x81\x87 ab", 3, 0, 7); /* unknown ones are one id, also c */
    EXPECT(m, "\xffz", " \xe2\x81\x87 ", 3, 0);
    expect(m, "", NULL, 0, "");
    assert_int_equal(mb_spm_bos(m), 1);
    assert_int_equal(mb_spm_eos(m), 2);
    assert_int_equal(mb_spm_pad(m), -1);
    assert_int_equal(mb_spm_decode(m, (const int32_t[]){99}, 1, &(struct mb_buf){0}), MB_EINVAL);
    mb_spm_destroy(m);
    mb_buf_close(&file);
}

static void test_bytes(void **state)
{
    struct mb_buf file = {0};
    struct mb_buf back = {0};
    struct mb_spm *m;

    (void)state;
    put_first(&file, 1);
    put_piece(&file, "a", 0, MB_SPM_NORMAL); /* 259 */
    put_specs(&file, MB_SPM_BPE, 1, 0, 1);
    m = make(&file);
    EXPECT(m, "  a\xc3\xa9  ", "a\xc3\xa9", 259, 3 + 0xc3, 3 + 0xa9); /* extra spaces go */
    EXPECT(m, "a a",
           "a\xe2\x96\x81"
           "a",
           259, 3 + 0xe2, 3 + 0x96, 3 + 0x81, 259);
    EXPECT(m, "\xff", "\xef\xbf\xbd", 3 + 0xef, 3 + 0xbf, 3 + 0xbd);
    assert_int_equal(
        mb_spm_decode(m, (const int32_t[]){3 + 0xc3, 1, 3 + 0xa9, 3 + 0xf0, 259}, 5, &back), 0);
    assert_string_equal(mb_buf_str(&back), "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"
                                           "a");
    mb_buf_close(&back);
    mb_spm_destroy(m);
    mb_buf_close(&file);
}

static void test_unigram(void **state)
{
    struct mb_buf file = {0};
    struct mb_spm *m;

    (void)state;
    put_first(&file, 0);
    put_piece(&file, "a", -1, MB_SPM_NORMAL); /* 3 */
    put_piece(&file, "b", -1, MB_SPM_NORMAL);
    put_piece(&file, "ab", -1.5f, MB_SPM_NORMAL); /* 5 */
    put_piece(&file, "abb", -3, MB_SPM_NORMAL);   /* 6: no better than ab b */
    put_piece(&file, "bb", -0.25f, MB_SPM_UNUSED);
    put_piece(&file, "<x>", 0, MB_SPM_USER_DEFINED); /* 8 */
    put_piece(&file, SPACE, -2, MB_SPM_NORMAL);
    put_specs(&file, MB_SPM_UNIGRAM, 0, 0, 1);
    m = make(&file);
    EXPECT(m, "abb", "abb", 5, 4);
    EXPECT(m, "  a  <x>b ", "a <x>b", 3, 9, 8, 4);
    EXPECT(m, "axyb", "a \xe2\x81\x87 b", 3, 0, 4);
    expect(m, "   ", NULL, 0, "");
    mb_spm_destroy(m);
    mb_buf_close(&file);
}

/* BPE as it is defined: the whole text at once, every pair tried by its text. */
struct plain {
    char pieces[64][40];
    float scores[64];
    int n;
};

static int plain_find(const struct plain *v, const char *text, size_t n)
{
    for (int i = 0; i < v->n; i++) {
        if (strlen(v->pieces[i]) == n && memcmp(v->pieces[i], text, n) == 0)
            return i;
    }
    return -1;
}

static size_t plain_encode(const struct plain *v, const char *text, int32_t *ids)
{
    size_t starts[400];
    size_t n = 0;
    size_t length = strlen(text);

    for (size_t i = 0; i < length; i++) {
        if (((uint8_t)text[i] & 0xc0) != 0x80)
            starts[n++] = i;
    }
    for (;;) {
        size_t best = n;
        float score = 0;
        starts[n] = length;
        for (size_t i = 0; i + 1 < n; i++) {
            int id = plain_find(v, text + starts[i], starts[i + 2] - starts[i]);
            if (id >= 0 && (best == n || v->scores[id] > score)) {
                best = i;
                score = v->scores[id];
            }
        }
        if (best == n)
            break;
        memmove(&starts[best + 1], &starts[best + 2], (n - best - 1) * sizeof(*starts));
        n--;
    }
    for (size_t i = 0; i < n; i++)
        ids[i] = 3 + plain_find(v, text + starts[i], starts[i + 1] - starts[i]);
    return n;
}

static void test_cut_against_plain(void **state)
{
    static const char *const letters[] = {"a", "b", "c", "\xc3\xa9", SPACE};

    (void)state;
    srand(7);
    for (int round = 0; round < 60; round++) {
        struct plain v = {.n = 5};
        struct mb_buf file = {0};
        struct mb_spm *m;

        put_first(&file, 0);
        for (int i = 0; i < 5; i++) {
            strcpy(v.pieces[i], letters[i]);
            v.scores[i] = -100;
        }
        while (v.n < 30) {
            char piece[2 * sizeof(v.pieces[0])];
            snprintf(piece, sizeof(piece), "%s%s", v.pieces[rand() % v.n], v.pieces[rand() % v.n]);
            if (strlen(piece) >= sizeof(v.pieces[0]) || plain_find(&v, piece, strlen(piece)) >= 0)
                continue;
            memcpy(v.pieces[v.n], piece, sizeof(v.pieces[0]));
            v.scores[v.n++] = (float)-(rand() % 12);
        }
        for (int i = 0; i < v.n; i++)
            put_piece(&file, v.pieces[i], v.scores[i], MB_SPM_NORMAL);
        put_specs(&file, MB_SPM_BPE, 0, 0, 0);
        m = make(&file);
        for (int i = 0; i < 40; i++) {
            char text[400] = "";
            int32_t want[400];
            struct mb_ids ids = {0};
            for (int n = rand() % 100; n > 0; n--)
                strcat(text, letters[rand() % 5]);
            encode(m, text, &ids);
            assert_int_equal(ids.n, plain_encode(&v, text, want));
            if (ids.n > 0)
                assert_memory_equal(ids.data, want, ids.n * sizeof(*want));
            mb_ids_close(&ids);
        }
        mb_spm_destroy(m);
        mb_buf_close(&file);
    }
}

static void expect_refused(const struct mb_buf *file, int code, const char *text)
{
    struct mb_spm *m = NULL;
    struct mb_err err = {0};

    assert_int_equal(mb_spm_create(file->data, file->len, &m, &err), code);
    assert_null(m);
    if (strstr(err.text, text) == NULL)
        fail_msg("\"%s\" lacks \"%s\"", err.text, text);
}

static void test_refused(void **state)
{
    struct mb_buf file = {0};
    struct mb_buf map = {0};

    (void)state;
    expect_refused(&file, MB_ECORRUPT, "no pieces");
    put_first(&file, 0);
    put_piece(&file, "a", 0, MB_SPM_NORMAL);
    for (size_t n = 1; n < file.len; n++) { /* every cut: an error, or a model without its end */
        struct mb_buf part = {file.data, n, n};
        struct mb_spm *m = NULL;
        int rc = mb_spm_create(part.data, part.len, &m, NULL);
        assert_true(rc == 0 || rc == MB_ECORRUPT);
        mb_spm_destroy(m);
    }
    put_specs(&file, MB_SPM_WORD, 0, 1, 1);
    expect_refused(&file, MB_EUNSUPPORTED, "word model");
    put_specs(&file, MB_SPM_BPE, 1, 1, 1);
    expect_refused(&file, MB_ECORRUPT, "without the piece <0x00>");
    put_specs(&file, (enum mb_spm_algorithm)9, 0, 1, 1);
    expect_refused(&file, MB_EUNSUPPORTED, "model_type 9");
    mb_buf_reset(&file);
    put_piece(&file, "a", 0, MB_SPM_NORMAL);
    expect_refused(&file, MB_ECORRUPT, "no unknown piece");
    put_first(&file, 0);
    put_piece(&file, "a", 0, MB_SPM_NORMAL);
    expect_refused(&file, MB_ECORRUPT, "piece 4: \"a\" is there twice");
    mb_buf_reset(&file);
    put_first(&file, 0);
    put_piece(&file, "\xff", 0, MB_SPM_NORMAL);
    expect_refused(&file, MB_ECORRUPT, "piece 3: expected 1 to 8000 bytes of UTF-8");
    mb_buf_reset(&file);
    put_first(&file, 0);
    put_piece(&file, "x", 0, MB_SPM_CONTROL);
    put_piece(&file, "xy", 0, MB_SPM_NORMAL);
    put_specs(&file, MB_SPM_BPE, 0, 1, 1);
    expect_refused(&file, MB_EUNSUPPORTED, "control piece of one character");
    mb_buf_reset(&file);
    put_first(&file, 0);
    put_bytes(&map, 2, "\x08\0\0\0abcd", 9);
    put_bytes(&file, 3, map.data, map.len);
    expect_refused(&file, MB_ECORRUPT, "precompiled_charsmap");
    mb_buf_close(&map);
    mb_buf_close(&file);
}

/* A file with a bit of everything, for the sweep. */
static void put_everything(struct mb_buf *file, enum mb_spm_algorithm algorithm,
                           enum mb_spm_piece_type last)
{
    put_first(file, 1);
    put_piece(file, "a", -3, MB_SPM_NORMAL);
    put_piece(file, "ab", -1, MB_SPM_NORMAL);
    put_piece(file, SPACE "abab", -2, MB_SPM_NORMAL);
    put_piece(file, "<x>", 0, MB_SPM_USER_DEFINED);
    put_piece(file, "aba", -2, last);
    put_specs(file, algorithm, 1, 1, algorithm != MB_SPM_BPE);
}

static void sweep(const struct mb_buf *file)
{
    static const char text[] = " abab <x> zab abababababababababababababababababababababababababab"
                               "ababababababababababababab \xe4\xb8\xad";

    for (unsigned long n = 1;; n++) {
        struct mb_spm *m = NULL;
        struct mb_spm_scratch *s = NULL;
        struct mb_ids ids = {0};
        struct mb_buf back = {0};
        int rc;

        mb_alloc_fail_nth(n);
        rc = mb_spm_create(file->data, file->len, &m, NULL);
        if (rc == 0)
            rc = mb_spm_scratch_create(m, &s, NULL);
        if (rc == 0)
            rc = mb_spm_encode(m, s, text, sizeof(text) - 1, &ids);
        if (rc == 0)
            rc = mb_spm_decode(m, ids.data, ids.n, &back);
        mb_buf_close(&back);
        mb_ids_close(&ids);
        mb_spm_scratch_destroy(s);
        mb_spm_destroy(m);
        if (!mb_alloc_did_fail()) {
            mb_alloc_fail_nth(0);
            assert_int_equal(rc, 0);
            break;
        }
        assert_int_equal(rc, MB_ENOMEM);
    }
}

static void test_out_of_memory(void **state)
{
    static const enum mb_spm_algorithm algorithms[] = {MB_SPM_BPE, MB_SPM_UNIGRAM, MB_SPM_CHAR};

    (void)state;
    for (size_t i = 0; i < 6; i++) {
        struct mb_buf file = {0};
        put_everything(&file, algorithms[i / 2], i % 2 == 0 ? MB_SPM_NORMAL : MB_SPM_UNUSED);
        sweep(&file);
        mb_buf_close(&file);
    }
}

static void expect_create(struct mb_tokenizer_options o, int code, const char *text)
{
    struct mb_tokenizer *t = NULL;
    struct mb_err err = {0};

    assert_int_equal(mb_tokenizer_create(&o, &t, &err), code);
    if (strstr(err.text, text) == NULL)
        fail_msg("\"%s\" lacks \"%s\"", err.text, text);
}

static void test_megatron(void **state)
{
    char path[] = "/tmp/mobula-spm-XXXXXX";
    int fd = mkstemp(path);
    struct mb_tokenizer_options o = {.type = "SentencePieceTokenizer", .tokenizer_model = path};
    struct mb_tokenizer *t;
    struct mb_tokenizer_scratch *s;
    struct mb_buf file = {0};
    struct mb_ids ids = {0};
    struct mb_buf back = {0};

    (void)state;
    assert_true(fd >= 0);
    close(fd);
    put_piece(&file, "<unk>", 0, MB_SPM_UNKNOWN);
    put_piece(&file, "a", 0, MB_SPM_NORMAL);
    put_specs(&file, MB_SPM_BPE, 0, 0, 0);
    assert_int_equal(mb_fs_write_atomic(path, file.data, file.len, 0600, NULL), 0);
    /* <CLS> 2, <SEP> 3, <EOD> 4, <MASK> 5, <PAD> 6, <BOS> 7, <EOS> 8 behind two pieces */
    assert_int_equal(mb_tokenizer_create(&o, &t, NULL), 0);
    assert_int_equal(mb_tokenizer_vocab_size(t), 9);
    assert_int_equal(mb_tokenizer_eod(t), 4);
    assert_int_equal(mb_tokenizer_n_added(t), 7);
    assert_int_equal(mb_tokenizer_scratch_create(t, &s, NULL), 0);
    assert_int_equal(mb_tokenizer_encode(t, s, "a<SEP><EOD>aa", 13, &ids, NULL), 0);
    assert_int_equal(ids.n, 5);
    assert_memory_equal(ids.data, ((const int32_t[]){1, 3, 4, 1, 1}), 5 * sizeof(int32_t));
    assert_int_equal(mb_tokenizer_decode(t, ids.data, ids.n, &back, NULL), 0);
    assert_string_equal(mb_buf_str(&back), "a <SEP>  <EOD> aa");
    assert_int_equal(mb_tokenizer_decode(t, (const int32_t[]){9}, 1, &back, NULL), MB_EINVAL);
    o.type = "Llama2Tokenizer";
    expect_create(o, MB_EINVAL, "no beginning-of-sentence piece");
    o.tokenizer_model = NULL;
    expect_create(o, MB_EINVAL, "Llama2Tokenizer needs --tokenizer-model");
    o.tokenizer_model = "/nowhere.model";
    expect_create(o, MB_ENOENT, "/nowhere.model");
    mb_buf_close(&back);
    mb_ids_close(&ids);
    mb_tokenizer_scratch_destroy(s);
    mb_tokenizer_destroy(t);
    mb_buf_close(&file);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bpe),      cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_unigram),  cmocka_unit_test(test_cut_against_plain),
        cmocka_unit_test(test_refused),  cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_megatron),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
