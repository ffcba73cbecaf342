/*
 * Verbs and their options. One table per verb (name, argument, help) drives parsing, help texts,
 * bash completion and the suggestion for a mistyped flag: a flag that is not in a table does not
 * exist. A verb fills its own struct, option by option, through offsets. One thread.
 */
#ifndef MOBULA_CLI_OPTIONS_H
#define MOBULA_CLI_OPTIONS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include "base/err.h"

enum mb_option_kind {
    MB_OPTION_FLAG,     /* int: 1 when given */
    MB_OPTION_STRING,   /* const char *: borrowed from argv */
    MB_OPTION_INT,      /* int64_t */
    MB_OPTION_DOUBLE,   /* double */
    MB_OPTION_DURATION, /* uint64_t milliseconds: 250ms, 30s, 5m, plain seconds */
    MB_OPTION_SIZE,     /* uint64_t bytes: 64M, 2GiB */
    MB_OPTION_WORDS     /* struct mb_words: one or more, up to the next flag; needs no_words */
};

/* Words that follow a flag: a part of argv, borrowed. */
struct mb_words {
    const char *const *at; /* NULL: not given */
    size_t n;
};

struct mb_option {
    const char *name; /* without the dashes; NULL ends the table */
    char letter;      /* one-letter form, 0: none */
    const char *arg;  /* what the help calls its argument; NULL for flags */
    enum mb_option_kind kind;
    size_t offset;    /* of the field in the verb's struct */
    const char *help; /* one line; NULL: accepted but not shown */
    int64_t min, max; /* of an INT; both 0: any */
};

/* What runs a verb: the context of the whole command. */
struct mb_cli {
    const char *program; /* "mobula" or "ray", for texts */
    int ray_mode;        /* argv[0] was ray: unknown flags are passed over with one warning */
    int warned;          /* that warning is out */
    int json;            /* --json was given: errors are JSON, too */
    const char *parent;  /* "job" while a subverb of it runs; NULL */
};

struct mb_verb {
    const char *name;
    const char *summary;                   /* one line for the list of verbs */
    const char *synopsis;                  /* what follows "mobula NAME " in the usage line */
    const char *examples;                  /* whole lines, each ends with \n */
    const struct mb_option *options;       /* NULL: the verb reads its arguments itself */
    const struct mb_verb *const *subverbs; /* NULL-terminated; then run is NULL */
    int no_words;                          /* 1: a word that is no option is an error */
    /* argv[0] is the verb's name. Returns the exit status of the process (docs/operations.md). */
    int (*run)(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv);
};

/*
 * Reads argv[1..] by the verb's table into values (defaults are what it holds already). Words that
 * are no option are collected, in order, in argv[1..*n_words] (argv is reordered); everything after
 * "--" is a word too. With stop_at_word the first word ends the options, so that a command line can
 * follow. "--name=value" and "--name value" both work.
 * 0: parsed; 1: --help was asked for and printed to stdout; MB_EINVAL: a line that names the flag
 * and, if one is near, the flag that was probably meant.
 */
int mb_options_parse(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv,
                     int stop_at_word, void *values, int *n_words, struct mb_err *err);

/* Help of one verb: synopsis, options, examples. */
void mb_options_help(const struct mb_cli *cli, const struct mb_verb *verb, FILE *out);

/* Notes in cli->json whether --json is among words that no table could be asked about, or that
 * stand behind one which was refused. With stop_at_word the first word ends the options. */
void mb_cli_look_for_json(struct mb_cli *cli, int n, char *const *words, int stop_at_word);

/* Prints "PROGRAM: TEXT" to stderr, with --json one line {"error": {"code": STATUS, "name":
 * "ENOENT", "message": TEXT}}, and returns the exit status of the code. */
int mb_cli_fail(const struct mb_cli *cli, const struct mb_err *err);

/* The last word of a verb whose output is its answer: status, or, where that is 0 and stdout has
 * not taken all of it (a full disk, a reader that is gone), what mb_cli_fail() makes of that. */
int mb_cli_printed(const struct mb_cli *cli, int status);
#define MB_CLI_NOT_PRINTED "standard output is closed or full: the answer is not all there"

/* Help of everything: the list of verbs. */
void mb_options_help_all(const struct mb_cli *cli, const struct mb_verb *const *verbs, FILE *out);

/* The verb of that name in a NULL-terminated list. NULL: none, and err names the nearest one. */
const struct mb_verb *mb_options_find_verb(const struct mb_verb *const *verbs, const char *name,
                                           struct mb_err *err);

/* Prints, one a line, what may follow words[0..n) (the last one is being typed): verbs, subverbs
 * or options. */
void mb_options_complete(const struct mb_verb *const *verbs, char *const *words, int n, FILE *out);

/* What this program has, NULL-terminated: verbs.c, or client/verbs.c in the static client. */
extern const struct mb_verb *const mb_verbs[], *const mb_ray_verbs[];
/* What only the other one has. */
extern const char *const mb_absent_verbs[];

/* One per file of this room. */
extern const struct mb_verb mb_verb_start, mb_verb_stop, mb_verb_status, mb_verb_job,
    mb_verb_preprocess, mb_verb_version, mb_verb_health_check, mb_verb_train, mb_verb_run,
    mb_verb_checkpoint, mb_verb_tokenizer, mb_verb_drain;

#endif
