/*
 * Parsing: 1. a word that starts with "--" (or "-x") is looked up in the verb's table; 2. its value
 * is what follows "=", or the next word; 3. other words are moved to the front of argv in order;
 * 4. "--" ends the options.
 * Failure: an unknown flag (with the nearest known one), a value that is missing, superfluous or of
 * the wrong kind. As `ray`, an unknown flag is passed over, with one warning for all of them.
 */
#include "cli/options.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/printable.h"
#include "base/str.h"

enum { NAMES_MAX = 128, HELP_COLUMN = 30 };

/* ---- looking up ---- */

static const struct mb_option *find_long(const struct mb_verb *verb, const char *name, size_t n)
{
    for (const struct mb_option *o = verb->options; o != NULL && o->name != NULL; o++) {
        if (strlen(o->name) == n && memcmp(o->name, name, n) == 0)
            return o;
    }
    return NULL;
}

static const struct mb_option *find_letter(const struct mb_verb *verb, char letter)
{
    for (const struct mb_option *o = verb->options; o != NULL && o->name != NULL; o++) {
        if (o->letter == letter)
            return o;
    }
    return NULL;
}

static int unknown_flag(const struct mb_verb *verb, const char *flag, size_t name_len,
                        struct mb_err *err)
{
    const char *names[NAMES_MAX + 1];
    size_t n = 0;
    char word[128];
    const char *nearest;

    for (const struct mb_option *o = verb->options; o != NULL && o->name != NULL; o++) {
        if (o->help != NULL && n < NAMES_MAX)
            names[n++] = o->name;
    }
    names[n++] = "help";
    names[n < NAMES_MAX ? n : NAMES_MAX] = NULL;
    snprintf(word, sizeof(word), "%.*s", (int)name_len, flag[1] == '-' ? flag + 2 : flag + 1);
    nearest = mb_nearest(word, names);
    if (nearest != NULL)
        return mb_err_set(err, MB_EINVAL, "%s: unknown flag --%s; did you mean --%s?", verb->name,
                          word, nearest);
    return mb_err_set(err, MB_EINVAL, "%s: unknown flag %.*s; see --help", verb->name,
                      (int)(name_len + (flag[1] == '-' ? 2 : 1)), flag);
}

const struct mb_verb *mb_options_find_verb(const struct mb_verb *const *verbs, const char *name,
                                           struct mb_err *err)
{
    const char *names[NAMES_MAX + 1];
    const char *nearest;
    size_t n = 0;

    for (; verbs[n] != NULL && n < NAMES_MAX; n++) {
        if (strcmp(verbs[n]->name, name) == 0)
            return verbs[n];
        names[n] = verbs[n]->name;
    }
    names[n] = NULL;
    nearest = mb_nearest(name, names);
    if (nearest != NULL)
        mb_err_set(err, MB_EINVAL, "unknown verb %s; did you mean %s?", name, nearest);
    else
        mb_err_set(err, MB_EINVAL, "unknown verb %s; see --help", name);
    return NULL;
}

/* ---- parsing ---- */

static int store(const struct mb_verb *verb, const struct mb_option *o, const char *value,
                 void *values, struct mb_err *err)
{
    char what[160];
    void *field = (char *)values + o->offset;
    int bounded = o->min != 0 || o->max != 0;

    snprintf(what, sizeof(what), "%s: --%s", verb->name, o->name);
    switch (o->kind) {
    case MB_OPTION_FLAG:
        *(int *)field = 1;
        return 0;
    case MB_OPTION_STRING:
        *(const char **)field = value;
        return 0;
    case MB_OPTION_INT:
        return mb_parse_i64(value, bounded ? o->min : INT64_MIN, bounded ? o->max : INT64_MAX, what,
                            field, err);
    case MB_OPTION_DOUBLE:
        return mb_parse_double(value, what, field, err);
    case MB_OPTION_DURATION:
        return mb_parse_duration_ms(value, what, field, err);
    case MB_OPTION_SIZE:
        return mb_parse_size(value, what, field, err);
    case MB_OPTION_WORDS:
        break; /* take_words() */
    }
    return mb_err_set(err, MB_EINVAL, "%s: its kind is unknown", what);
}

/* Passes over an unknown flag as `ray` does not know it either; a value that follows goes with it
 * where the verb takes no words. Returns how many words it took. */
static int pass_over(struct mb_cli *cli, const struct mb_verb *verb, int left, char **at)
{
    if (!cli->warned)
        fprintf(stderr,
                "%s: warning: %s %s has no meaning here and is passed over, like every "
                "other flag that is unknown\n",
                cli->program, verb->name, at[0]);
    cli->warned = 1;
    return verb->no_words && strchr(at[0], '=') == NULL && left > 1 && at[1][0] != '-' ? 2 : 1;
}

/* As argparse's nargs='+': the words up to the next flag; "-" is a word. Returns how many it took
 * with the flag; with "--name=word" that is one word. */
static int take_words(const struct mb_option *o, char *eq, int left, char **at, void *values)
{
    struct mb_words *words = (struct mb_words *)(void *)((char *)values + o->offset);
    int n = 1;

    if (eq != NULL) {
        at[0] = eq + 1;
        *words = (struct mb_words){(const char *const *)at, 1};
        return 1;
    }
    while (1 + n < left && (at[1 + n][0] != '-' || at[1 + n][1] == '\0'))
        n++;
    *words = (struct mb_words){(const char *const *)at + 1, (size_t)n};
    return 1 + n;
}

/* One flag at at[0] of left words. Words taken, or a negative code. */
static int take_flag(struct mb_cli *cli, const struct mb_verb *verb, int left, char **at,
                     void *values, struct mb_err *err)
{
    const char *flag = at[0];
    char *eq = strchr(at[0], '=');
    int is_long = flag[1] == '-';
    size_t n =
        is_long ? (eq != NULL ? (size_t)(eq - flag) - 2 : strlen(flag + 2)) : strlen(flag + 1);
    const struct mb_option *o = is_long  ? find_long(verb, flag + 2, n)
                                : n == 1 ? find_letter(verb, flag[1])
                                         : NULL;
    int rc;

    if (o == NULL && cli->ray_mode)
        return pass_over(cli, verb, left, at);
    if (o == NULL)
        return unknown_flag(verb, flag, n, err);
    if (!is_long)
        eq = NULL;
    cli->json |= strcmp(o->name, "json") == 0;
    if (o->kind == MB_OPTION_FLAG) {
        if (eq != NULL)
            return mb_err_set(err, MB_EINVAL, "%s: --%s takes no value", verb->name, o->name);
        return store(verb, o, NULL, values, err) == 0 ? 1 : MB_EINVAL;
    }
    if (eq == NULL &&
        (left < 2 || (o->kind == MB_OPTION_WORDS && at[1][0] == '-' && at[1][1] != '\0')))
        return mb_err_set(err, MB_EINVAL, "%s: --%s needs a value: %s", verb->name, o->name,
                          o->arg);
    if (o->kind == MB_OPTION_WORDS)
        return take_words(o, eq, left, at, values);
    rc = store(verb, o, eq != NULL ? eq + 1 : at[1], values, err);
    return rc != 0 ? rc : eq != NULL ? 1 : 2;
}

int mb_options_parse(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv,
                     int stop_at_word, void *values, int *n_words, struct mb_err *err)
{
    int only_words = 0, i = 1, n = 0;

    while (i < argc) {
        int taken;

        if (!only_words && strcmp(argv[i], "--") == 0) {
            only_words = 1;
            i++;
        } else if (only_words || argv[i][0] != '-' || argv[i][1] == '\0') {
            only_words |= stop_at_word;
            argv[1 + n++] = argv[i++];
        } else if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            mb_options_help(cli, verb, stdout);
            return 1;
        } else {
            taken = take_flag(cli, verb, argc - i, argv + i, values, err);
            if (taken < 0) {
                mb_cli_look_for_json(cli, argc - i, argv + i, stop_at_word);
                return taken;
            }
            i += taken;
        }
    }
    if (n > 0 && verb->no_words)
        return mb_err_set(err, MB_EINVAL, "%s: unexpected argument %s; see --help", verb->name,
                          argv[1]);
    *n_words = n;
    return 0;
}

/* ---- help ---- */

static void help_option(const struct mb_option *o, FILE *out)
{
    char left[96];
    int n = snprintf(left, sizeof(left), o->letter != 0 ? "  -%c, --%s%s%s" : "  %c   --%s%s%s",
                     o->letter != 0 ? o->letter : ' ', o->name, o->arg != NULL ? " " : "",
                     o->arg != NULL ? o->arg : "");

    if (n >= HELP_COLUMN)
        fprintf(out, "%s\n%*s%s\n", left, HELP_COLUMN, "", o->help);
    else
        fprintf(out, "%-*s%s\n", HELP_COLUMN, left, o->help);
}

void mb_options_help(const struct mb_cli *cli, const struct mb_verb *verb, FILE *out)
{
    fprintf(out, "usage: %s %s%s%s %s\n\n%s\n", cli->program,
            cli->parent != NULL ? cli->parent : "", cli->parent != NULL ? " " : "", verb->name,
            verb->synopsis != NULL ? verb->synopsis : "", verb->summary);
    if (verb->subverbs != NULL) {
        fputs("\nverbs:\n", out);
        for (const struct mb_verb *const *v = verb->subverbs; *v != NULL; v++)
            fprintf(out, "  %-14s%s\n", (*v)->name, (*v)->summary);
    }
    if (verb->options != NULL && verb->options[0].name != NULL) {
        fputs("\noptions:\n", out);
        for (const struct mb_option *o = verb->options; o->name != NULL; o++) {
            if (o->help != NULL)
                help_option(o, out);
        }
    }
    if (verb->examples != NULL)
        fprintf(out, "\nexamples:\n%s", verb->examples);
}

void mb_options_help_all(const struct mb_cli *cli, const struct mb_verb *const *verbs, FILE *out)
{
    fprintf(out, "usage: %s VERB [OPTIONS]\n\nverbs:\n", cli->program);
    for (; *verbs != NULL; verbs++)
        fprintf(out, "  %-14s%s\n", (*verbs)->name, (*verbs)->summary);
    fprintf(out, "\n%s VERB --help shows the options and examples of a verb.\n", cli->program);
}

void mb_cli_look_for_json(struct mb_cli *cli, int n, char *const *words, int stop_at_word)
{
    for (int i = 0; i < n && strcmp(words[i], "--") != 0; i++) {
        if (stop_at_word && (words[i][0] != '-' || words[i][1] == '\0'))
            return;
        cli->json |= strcmp(words[i], "--json") == 0;
    }
}

/* In one piece, so that lines of others do not come between. 0: it is printed. */
static int fail_as_json(const struct mb_err *err)
{
    struct mb_buf message = {0};
    char *line = NULL;
    size_t n = 0;
    FILE *out = open_memstream(&line, &n);
    json_t *j = NULL;
    int rc = out != NULL && mb_buf_utf8(&message, err->text, strlen(err->text)) == 0 ? 0 : -1;

    if (rc == 0)
        j = json_pack("{s:{s:i, s:s, s:s}}", "error", "code", mb_exit_status(err->code), "name",
                      mb_code_name(err->code), "message", mb_buf_str(&message));
    if (rc == 0)
        rc = j != NULL ? mb_printable_json(j, 0, out) : -1;
    if (out != NULL && fclose(out) != 0)
        rc = -1;
    if (rc == 0)
        fprintf(stderr, "%s\n", line);
    json_decref(j);
    mb_buf_close(&message);
    free(line);
    return rc;
}

int mb_cli_fail(const struct mb_cli *cli, const struct mb_err *err)
{
    char before[40];

    if (cli->json && fail_as_json(err) == 0)
        return mb_exit_status(err->code);
    snprintf(before, sizeof(before), "%s: ", cli->program);
    mb_printable_say(stderr, before, err->text,
                     "\n"); /* it may quote an answer, or a file's name */
    return mb_exit_status(err->code);
}

int mb_cli_printed(const struct mb_cli *cli, int status)
{
    struct mb_err err;
    int is_lost = fflush(stdout) != 0 || ferror(stdout);

    if (status != 0 || !is_lost)
        return status;
    mb_err_set(&err, MB_EIO, MB_CLI_NOT_PRINTED);
    return mb_cli_fail(cli, &err);
}

/* ---- completion ---- */

static const struct mb_verb *exact(const struct mb_verb *const *verbs, const char *name)
{
    for (; verbs != NULL && *verbs != NULL; verbs++) {
        if (strcmp((*verbs)->name, name) == 0)
            return *verbs;
    }
    return NULL;
}

void mb_options_complete(const struct mb_verb *const *verbs, char *const *words, int n, FILE *out)
{
    const struct mb_verb *verb = NULL;
    const char *typed = n > 0 ? words[n - 1] : "";

    for (int i = 0; i + 1 < n && verbs != NULL; i++) {
        verb = exact(verbs, words[i]);
        if (verb == NULL)
            return;
        verbs = verb->subverbs;
    }
    if (verbs != NULL) {
        for (; *verbs != NULL; verbs++) {
            if (mb_starts_with((*verbs)->name, typed))
                fprintf(out, "%s\n", (*verbs)->name);
        }
        return;
    }
    for (const struct mb_option *o = verb->options; o != NULL && o->name != NULL; o++) {
        char flag[96];

        snprintf(flag, sizeof(flag), "--%s", o->name);
        if (o->help != NULL && typed[0] == '-' && mb_starts_with(flag, typed))
            fprintf(out, "%s\n", flag);
    }
    if (typed[0] == '-' && mb_starts_with("--help", typed))
        fputs("--help\n", out);
}
