/* Every row of the table of arguments that is not implemented does what it says: it is refused by
 * its name and with its reason, or is one note; with its default it is nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>
#include "base/buf.h"
#include "tests/unit/worker/args_line.h"
#include "worker/args_table.h"

#define BASE                                                                                       \
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "                     \
    "--max-position-embeddings 32 --distributed-backend gloo --lr 1e-3 --mock-data "               \
    "--tokenizer-type NullTokenizer --vocab-size 100 --micro-batch-size 2 --train-iters 10 "

enum { LINE_BYTES = 512 };

static int is_flag(const struct mb_arg_row *row)
{
    return row->type == MB_ARG_FLAG || row->type == MB_ARG_FLAG_OFF;
}

/* The first choice that is not the default; 0: there is none. */
static int other_choice(const struct mb_arg_row *row, char *out, size_t size)
{
    for (const char *at = row->choices; *at != '\0';) {
        const size_t n = strcspn(at, "|");
        snprintf(out, size, "%.*s", (int)n, at);
        if (row->def == NULL || strcmp(out, row->def) != 0) {
            return 1;
        }
        at += n + (at[n] == '|');
    }
    return 0;
}

/* Without which Megatron-LM does not take it. */
static const char *needed(const struct mb_arg_row *row)
{
    return strcmp(row->name, "fp16-lm-cross-entropy") == 0 ? "--fp16 --loss-scale 8 " : "";
}

/* A command line with the row, and a value that is not its default; 0: it has no other. */
static int line_of(const struct mb_arg_row *row, char line[LINE_BYTES], char value[64])
{
    const char *const text = row->type == MB_ARG_TEXT || row->type == MB_ARG_LIST ? "word" : "7";
    snprintf(value, 64, "%s", is_flag(row) ? "" : text);
    if (row->choices != NULL && !other_choice(row, value, 64)) {
        return 0;
    }
    snprintf(line, LINE_BYTES, BASE "%s--%s %s", needed(row), row->name, value);
    return 1;
}

static void check(const struct mb_arg_row *row, const char *line, int rc, const char *error,
                  const char *notes)
{
    struct mb_args a;
    struct mb_err err;
    const int got = validate_line(line, 1, &a, &err);
    if (got != rc || strcmp(err.text, error) != 0 || strcmp(mb_buf_str(&a.notes), notes) != 0) {
        fail_msg("--%s: %d, %s; notes: %s", row->name, got, err.text, mb_buf_str(&a.notes));
    }
    mb_args_close(&a);
}

static void what_is_refused_is_named_with_its_reason(void **state)
{
    (void)state;
    size_t n = 0;
    for (const struct mb_arg_row *row = MB_ARG_ROWS; row < MB_ARG_ROWS + MB_ARG_N_ROWS; row++) {
        char line[LINE_BYTES], value[64], text[LINE_BYTES];
        if (row->use == MB_ARG_REFUSED) {
            assert_true(line_of(row, line, value));
            snprintf(text, sizeof text, "--%s%s%s: not provided by this version; %s", row->name,
                     value[0] != '\0' ? " " : "", value, row->text);
            check(row, line, MB_EUNSUPPORTED, text, "");
            n++;
        }
    }
    assert_true(n > 0);
}

static void what_has_no_effect_is_one_note(void **state)
{
    (void)state;
    size_t n = 0;
    for (const struct mb_arg_row *row = MB_ARG_ROWS; row < MB_ARG_ROWS + MB_ARG_N_ROWS; row++) {
        char line[LINE_BYTES], value[64], note[LINE_BYTES];
        if (row->use == MB_ARG_NOTED && line_of(row, line, value)) {
            snprintf(note, sizeof note, "note: --%s has no effect: %s\n", row->name, row->text);
            check(row, line, 0, "", note);
            n++;
        }
    }
    assert_true(n > 0);
}

static void a_default_is_neither_refused_nor_noted(void **state)
{
    (void)state;
    size_t n = 0;
    for (const struct mb_arg_row *row = MB_ARG_ROWS; row < MB_ARG_ROWS + MB_ARG_N_ROWS; row++) {
        char line[LINE_BYTES];
        if (row->use != MB_ARG_IMPLEMENTED && row->def != NULL) {
            snprintf(line, sizeof line, BASE "--%s %s", row->name, row->def);
            check(row, line, 0, "", "");
            n++;
        }
    }
    assert_true(n > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_refused_is_named_with_its_reason),
        cmocka_unit_test(what_has_no_effect_is_one_note),
        cmocka_unit_test(a_default_is_neither_refused_nor_noted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
