/* The journal of preprocess: what is written is read back, and nothing else is. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/data/preprocess_journal.h"

static void make(struct mb_journal *j)
{
    *j = (struct mb_journal){.phase = MB_JOURNAL_COMMITTING,
                             .source = 3,
                             .offset = UINT64_MAX,
                             .line = 17,
                             .n_lines = 99,
                             .n_documents = 80,
                             .n_sequences = 85,
                             .n_tokens = 1234567,
                             .n_bad_lines = 2,
                             .n_repaired_lines = 1,
                             .json_chars = 5,
                             .text_bytes = 4,
                             .elapsed_us = 1000000};
    memset(j->identity.input, 'a', 64);
    memset(j->identity.options, '0', 64);
    memset(j->identity.tokenizer, 'f', 64);
    j->marks = mb_calloc(2, sizeof(*j->marks));
    j->n_marks = 2;
    j->marks[0] = (struct mb_index_mark){10, 2, 1};
    j->marks[1] = (struct mb_index_mark){0, 0, UINT64_MAX};
}

static void test_reads_what_it_writes(void **state)
{
    struct mb_journal j, back = {0};
    struct mb_buf text = {0};

    (void)state;
    make(&j);
    assert_int_equal(mb_journal_write(&j, &text), 0);
    assert_int_equal(mb_journal_read(text.data, text.len, &back, NULL), 0);
    assert_memory_equal(&back.identity, &j.identity, sizeof(j.identity));
    assert_int_equal(back.phase, j.phase);
    assert_true(back.offset == UINT64_MAX && back.source == 3 && back.line == 17);
    assert_true(back.n_lines == 99 && back.n_documents == 80 && back.n_sequences == 85);
    assert_true(back.n_tokens == 1234567 && back.n_bad_lines == 2 && back.n_repaired_lines == 1);
    assert_true(back.json_chars == 5 && back.text_bytes == 4 && back.elapsed_us == 1000000);
    assert_int_equal(back.n_marks, 2);
    assert_memory_equal(back.marks, j.marks, 2 * sizeof(*j.marks));
    mb_journal_close(&back);
    mb_journal_close(&j);
    mb_buf_close(&text);
}

/* Cut anywhere, or with any byte changed, it is no journal. */
static void test_damage_is_seen(void **state)
{
    struct mb_journal j, back = {0};
    struct mb_buf text = {0};

    (void)state;
    make(&j);
    assert_int_equal(mb_journal_write(&j, &text), 0);
    for (size_t n = 0; n < text.len; n++)
        assert_int_equal(mb_journal_read(text.data, n, &back, NULL), MB_ECORRUPT);
    for (size_t i = 0; i < text.len; i++) {
        uint8_t kept = text.data[i];
        text.data[i] ^= 1;
        assert_int_equal(mb_journal_read(text.data, text.len, &back, NULL), MB_ECORRUPT);
        assert_null(back.marks);
        text.data[i] = kept;
    }
    assert_int_equal(mb_buf_puts(&text, "\n"), 0);
    assert_int_equal(mb_journal_read(text.data, text.len, &back, NULL), MB_ECORRUPT);
    mb_journal_close(&j);
    mb_buf_close(&text);
}

static void test_difference(void **state)
{
    struct mb_journal a, b;

    (void)state;
    make(&a);
    make(&b);
    assert_null(mb_journal_difference(&a.identity, &b.identity));
    b.identity.tokenizer[0] = '1';
    assert_string_equal(mb_journal_difference(&a.identity, &b.identity), "the tokenizer");
    b.identity.input[0] = '1';
    assert_string_equal(mb_journal_difference(&a.identity, &b.identity), "the input");
    mb_journal_close(&a);
    mb_journal_close(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reads_what_it_writes),
        cmocka_unit_test(test_damage_is_seen),
        cmocka_unit_test(test_difference),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
