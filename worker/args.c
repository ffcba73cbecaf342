/*
 * Parsing (args.h).
 *
 *  0. The words of --model-preset go before all others, which so override them.
 *  1. Each argument is looked up whole in the table; `--k=v` is split at the first '='.
 *  2. Values are taken as the row's type says: none, one, three, or all up to the next option.
 *  3. A later occurrence replaces an earlier one. Numbers are checked when they are met.
 *  4. At the end the fields of the implemented rows are filled from what was given or the default.
 * Failures, with argparse's words: an unknown argument (all of them are listed, the first with its
 * nearest known name), a missing or surplus value, a value that is no number or no choice.
 */
#include "worker/args_preset.h"
#include "worker/args_table.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"

void mb_arg_dest(const struct mb_arg_row *row, char out[64])
{
    const char *s = row->dest != NULL ? row->dest : row->name;
    size_t i = 0;
    for (; s[i] != '\0' && i < 63; i++) {
        out[i] = s[i] == '-' ? '_' : s[i];
    }
    out[i] = '\0';
}

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "out of memory for the arguments");
}

/* ---- what a text may be ---- */

/* An option, as argparse sees it: dashes and something that is no negative number. */
static int is_option(const char *s)
{
    if (s[0] != '-' || s[1] == '\0') {
        return 0;
    }
    char *end;
    strtod(s, &end);
    return *end != '\0';
}

static int parse_int(const char *s, int64_t *out)
{
    return mb_parse_i64(s, INT64_MIN + 1, INT64_MAX, "", out, NULL);
}

static int is_choice(const char *choices, const char *value)
{
    size_t n = strlen(value);
    for (const char *p = choices; *p != '\0';) {
        size_t k = strcspn(p, "|");
        if (k == n && memcmp(p, value, n) == 0) {
            return 1;
        }
        p += k + (p[k] == '|');
    }
    return 0;
}

static int bad_choice(const struct mb_arg_row *row, const char *value, struct mb_err *err)
{
    struct mb_buf list = {0};
    const char *quote = row->type == MB_ARG_TEXT ? "'" : "";
    int rc = mb_buf_puts(&list, quote);
    for (const char *p = row->choices; rc == 0 && *p != '\0'; p++) {
        rc = *p == '|' ? mb_buf_printf(&list, "%s, %s", quote, quote) : mb_buf_add(&list, p, 1);
    }
    rc = mb_err_set(err, MB_EINVAL,
                    "error: argument --%s: invalid choice: %s%s%s (choose from %s%s)", row->name,
                    quote, value, quote, mb_buf_str(&list), quote);
    mb_buf_close(&list);
    return rc;
}

static int check_value(const struct mb_arg_row *row, const char *value, struct mb_err *err)
{
    int64_t i;
    double d;
    if ((row->type == MB_ARG_INT || row->type == MB_ARG_INTS || row->type == MB_ARG_TRIPLE) &&
        parse_int(value, &i) != 0) {
        return mb_err_set(err, MB_EINVAL, "error: argument --%s: invalid int value: '%s'",
                          row->name, value);
    }
    if (row->type == MB_ARG_FLOAT && mb_parse_double(value, row->name, &d, NULL) != 0) {
        return mb_err_set(err, MB_EINVAL, "error: argument --%s: invalid float value: '%s'",
                          row->name, value);
    }
    if (row->choices != NULL && !is_choice(row->choices, value)) {
        return bad_choice(row, value, err);
    }
    return 0;
}

/* ---- one argument after the other ---- */

static const struct mb_arg_row *find_row(const char *name, size_t n)
{
    for (size_t i = 0; i < MB_ARG_N_ROWS; i++) {
        const struct mb_arg_row *r = &MB_ARG_ROWS[i];
        if (r->type != MB_ARG_COMPUTED && strlen(r->name) == n && memcmp(r->name, name, n) == 0) {
            return r;
        }
    }
    return NULL;
}

const struct mb_args_raw *mb_arg_raw(const struct mb_args *args, const char *name)
{
    const struct mb_arg_row *row = find_row(name, strlen(name));
    assert(row != NULL);
    return &args->raw[row - MB_ARG_ROWS];
}

static void clear_raw(struct mb_args_raw *raw)
{
    for (size_t i = 0; i < raw->n_values; i++) {
        mb_free(raw->values[i]);
    }
    mb_free(raw->values);
    *raw = (struct mb_args_raw){0};
}

static int add_value(struct mb_args_raw *raw, const char *value, struct mb_err *err)
{
    char **more = mb_reallocarray(raw->values, raw->n_values + 1, sizeof *more);
    if (more == NULL) {
        return no_memory(err);
    }
    raw->values = more;
    raw->values[raw->n_values] = mb_strdup(value);
    if (raw->values[raw->n_values] == NULL) {
        return no_memory(err);
    }
    raw->n_values++;
    return 0;
}

static int wrong_count(const struct mb_arg_row *row, struct mb_err *err)
{
    return mb_err_set(err, MB_EINVAL, "error: argument --%s: expected %s", row->name,
                      row->type == MB_ARG_TRIPLE ? "3 arguments"
                      : row->type == MB_ARG_INTS ? "at least one argument"
                                                 : "one argument");
}

/* How many values a row takes at most, and at least. */
static size_t most_values(const struct mb_arg_row *row)
{
    return row->type == MB_ARG_LIST || row->type == MB_ARG_INTS ? SIZE_MAX
           : row->type == MB_ARG_TRIPLE                         ? 3
                                                                : 1;
}

static size_t least_values(const struct mb_arg_row *row)
{
    return row->type == MB_ARG_LIST ? 0 : row->type == MB_ARG_TRIPLE ? 3 : 1;
}

/* Takes the values of row from argv[*at ...], or `inline_value` of --k=v. */
static int take_values(const struct mb_arg_row *row, struct mb_args_raw *raw, int argc,
                       const char *const *argv, int *at, const char *inline_value,
                       struct mb_err *err)
{
    const size_t most = most_values(row), least = least_values(row);
    clear_raw(raw);
    raw->given = 1;
    if (row->type == MB_ARG_FLAG || row->type == MB_ARG_FLAG_OFF) {
        return inline_value == NULL
                   ? 0
                   : mb_err_set(err, MB_EINVAL,
                                "error: argument --%s: ignored explicit argument '%s'", row->name,
                                inline_value);
    }
    int rc = 0;
    if (inline_value != NULL) {
        rc = check_value(row, inline_value, err);
        rc = rc == 0 ? add_value(raw, inline_value, err) : rc;
        return rc != 0 || least <= 1 ? rc : wrong_count(row, err);
    }
    while (rc == 0 && raw->n_values < most && *at < argc && !is_option(argv[*at])) {
        rc = check_value(row, argv[*at], err);
        rc = rc == 0 ? add_value(raw, argv[(*at)++], err) : rc;
    }
    if (rc == 0 && raw->n_values < least) {
        rc = wrong_count(row, err);
    }
    return rc;
}

static const struct mb_arg_family *find_family(const char *name)
{
    for (const struct mb_arg_family *f = MB_ARG_FAMILIES; f->prefix != NULL; f++) {
        if (mb_starts_with(name, f->prefix)) {
            return f;
        }
    }
    return NULL;
}

static int unrecognized(const struct mb_buf *all, const char *first, struct mb_err *err)
{
    const char *near = NULL;
    const char **names = mb_calloc(MB_ARG_N_ROWS + 1, sizeof *names);
    size_t n = 0;
    for (size_t i = 0; names != NULL && i < MB_ARG_N_ROWS; i++) {
        if (MB_ARG_ROWS[i].type != MB_ARG_COMPUTED) {
            names[n++] = MB_ARG_ROWS[i].name;
        }
    }
    char *word = mb_strndup(first, strcspn(first, "="));
    if (names != NULL && word != NULL && mb_starts_with(word, "--")) {
        near = mb_nearest(word + 2, names);
    }
    int rc = mb_err_set(err, MB_EINVAL, "error: unrecognized arguments: %s%s%s%s", mb_buf_str(all),
                        near != NULL ? " (nearest known: --" : "", near != NULL ? near : "",
                        near != NULL ? ")" : "");
    mb_free(word);
    mb_free(names);
    return rc;
}

/* ---- fields ---- */

static int64_t int_default(const struct mb_arg_row *row)
{
    int64_t v = MB_ARGS_NONE;
    if (row->type == MB_ARG_FLAG || row->type == MB_ARG_FLAG_OFF) {
        return row->type == MB_ARG_FLAG_OFF;
    }
    if (row->def != NULL) {
        parse_int(row->def, &v);
    }
    return v;
}

static int fill_field(struct mb_args *args, const struct mb_arg_row *row,
                      const struct mb_args_raw *raw, struct mb_err *err)
{
    char *field = (char *)args + row->offset;
    const char *last = raw->n_values > 0 ? raw->values[raw->n_values - 1] : row->def;
    int64_t i = int_default(row);
    double d = NAN;
    switch (row->type) {
    case MB_ARG_FLAG:
    case MB_ARG_FLAG_OFF:
        i = raw->given ? row->type == MB_ARG_FLAG : i;
        memcpy(field, &i, sizeof i);
        return 0;
    case MB_ARG_COMPUTED:
        i = 0;
        memcpy(field, &i, sizeof i);
        return 0;
    case MB_ARG_INT:
        if (last != NULL) {
            parse_int(last, &i);
        }
        memcpy(field, &i, sizeof i);
        return 0;
    case MB_ARG_FLOAT:
        if (last != NULL) {
            mb_parse_double(last, row->name, &d, NULL);
        }
        memcpy(field, &d, sizeof d);
        return 0;
    case MB_ARG_TEXT: {
        char *copy = mb_strdup(last);
        memcpy(field, &copy, sizeof copy);
        return copy != NULL || last == NULL ? 0 : no_memory(err);
    }
    case MB_ARG_LIST:
    case MB_ARG_INTS:
    case MB_ARG_TRIPLE: {
        struct mb_args_list list = {raw->values, raw->n_values}; /* borrowed from raw */
        memcpy(field, &list, sizeof list);
        return 0;
    }
    }
    return 0;
}

static int parse_words(struct mb_args *args, int argc, const char *const *argv, struct mb_err *err)
{
    struct mb_buf unknown = {0};
    const char *first_unknown = NULL;
    int rc = 0, help = 0;
    for (int at = 0; at < argc && rc == 0;) {
        const char *arg = argv[at++];
        if (strcmp(arg, "--help") == 0 || strcmp(arg, "-h") == 0) {
            help = 1;
            continue;
        }
        const char *value = strchr(arg, '=');
        size_t n = value != NULL ? (size_t)(value - arg) : strlen(arg);
        const struct mb_arg_row *row =
            mb_starts_with(arg, "--") && n > 2 ? find_row(arg + 2, n - 2) : NULL;
        if (row != NULL) {
            rc = take_values(row, &args->raw[row - MB_ARG_ROWS], argc, argv, &at,
                             value != NULL ? value + 1 : NULL, err);
            continue;
        }
        const struct mb_arg_family *f = mb_starts_with(arg, "--") ? find_family(arg + 2) : NULL;
        if (f != NULL) {
            rc = mb_err_set(err, MB_EUNSUPPORTED, "%.*s: not provided by this version; %s", (int)n,
                            arg, f->what);
            continue;
        }
        first_unknown = first_unknown == NULL ? arg : first_unknown;
        if (mb_buf_printf(&unknown, "%s%s", unknown.len > 0 ? " " : "", arg) != 0) {
            rc = no_memory(err);
        }
    }
    if (rc == 0 && help) {
        rc = MB_ARGS_HELP;
    } else if (rc == 0 && first_unknown != NULL) {
        rc = unrecognized(&unknown, first_unknown, err);
    }
    for (size_t i = 0; i < MB_ARG_N_ROWS && rc == 0; i++) {
        if (MB_ARG_ROWS[i].offset != SIZE_MAX) {
            rc = fill_field(args, &MB_ARG_ROWS[i], &args->raw[i], err);
        }
    }
    mb_buf_close(&unknown);
    return rc;
}

int mb_arg_set(struct mb_args *args, size_t row, const char *text, struct mb_err *err)
{
    const struct mb_arg_row *r = &MB_ARG_ROWS[row];
    const int is_flag = r->type == MB_ARG_FLAG || r->type == MB_ARG_FLAG_OFF;
    int rc = text != NULL && !is_flag ? check_value(r, text, err) : 0;
    if (rc != 0) {
        return rc;
    }
    clear_raw(&args->raw[row]);
    args->raw[row].given = text != NULL;
    if (text != NULL && !is_flag) {
        rc = add_value(&args->raw[row], text, err);
    }
    if (rc == 0 && r->type == MB_ARG_TEXT) {
        char *old;
        memcpy(&old, (char *)args + r->offset, sizeof old);
        mb_free(old);
    }
    return rc == 0 ? fill_field(args, r, &args->raw[row], err) : rc;
}

int mb_args_parse(struct mb_args *args, int argc, const char *const *argv, struct mb_err *err)
{
    const char *const *preset = NULL;
    size_t n_preset = mb_args_preset(argc, argv, &preset);
    memset(args, 0, sizeof *args);
    args->raw = mb_calloc(MB_ARG_N_ROWS, sizeof *args->raw);
    const char **words = mb_calloc((size_t)argc + n_preset + 1, sizeof *words);
    if (args->raw == NULL || words == NULL) {
        mb_free(words);
        return no_memory(err);
    }
    for (size_t i = 0; i < n_preset; i++) {
        words[i] = preset[i];
    }
    for (int i = 0; i < argc; i++) {
        words[n_preset + (size_t)i] = argv[i];
    }
    int rc = parse_words(args, argc + (int)n_preset, words, err);
    mb_free(words);
    args->is_usage = rc == MB_EINVAL;
    return rc;
}

int mb_args_take_data_args(struct mb_args *args, const char *text, size_t n, struct mb_err *err)
{
    static const char SPACE[] = " \t\n\v\f\r\x1c\x1d\x1e\x1f";
    const size_t row = (size_t)(find_row("data-path", strlen("data-path")) - MB_ARG_ROWS);
    int rc = 0;
    if (args->data_path.n > 0) {
        return mb_err_set(err, MB_EINVAL, "--data-path and --data-args-path exclude each other");
    }
    if (strlen(text) < n) {
        return mb_err_set(err, MB_EINVAL, "byte %zu is 0: the file is no text", strlen(text));
    }
    if (strspn(text, SPACE) == n) {
        return mb_err_set(err, MB_EINVAL, "the file has no words");
    }
    while (rc == 0 && *(text += strspn(text, SPACE)) != '\0') {
        const size_t length = strcspn(text, SPACE);
        char *word = mb_strndup(text, length);
        rc = word != NULL ? add_value(&args->raw[row], word, err) : no_memory(err);
        mb_free(word);
        text += length;
    }
    args->raw[row].given = 1;
    return rc == 0 ? fill_field(args, &MB_ARG_ROWS[row], &args->raw[row], err) : rc;
}

void mb_args_close(struct mb_args *args)
{
    for (size_t i = 0; args->raw != NULL && i < MB_ARG_N_ROWS; i++) {
        const struct mb_arg_row *row = &MB_ARG_ROWS[i];
        if (row->type == MB_ARG_TEXT && row->offset != SIZE_MAX) {
            char *text;
            memcpy(&text, (char *)args + row->offset, sizeof text);
            mb_free(text);
        }
        clear_raw(&args->raw[i]);
    }
    mb_free(args->raw);
    mb_free(args->checkpoint_tokenizer.type);
    mb_free(args->checkpoint_tokenizer.model);
    mb_buf_close(&args->notes);
    memset(args, 0, sizeof *args);
}
