/*
 * Whose a word of `mobula train`'s command line is: the options of the gang are ours, the rest are
 * the trainer's arguments, which the ranks check against a table that this room does not see. A
 * word that is near to one of ours, and nearer than to the trainer's arguments that we read too, is
 * taken for a slip. No argument of the trainer's may look like one:
 * tests/unit/cli/test_train_words.c goes through its whole table. Pure.
 */
#ifndef MOBULA_CLI_TRAIN_WORDS_H
#define MOBULA_CLI_TRAIN_WORDS_H

#include "base/err.h"
#include "cli/launch.h"
#include "cli/options.h"

struct mb_train {
    struct mb_launch launch;
};

extern const struct mb_option mb_train_options[]; /* values: struct mb_train */

/* How many words an option takes at this word if it is ours: 0, 1 (flag, --x=v) or 2. */
int mb_train_own_words(const char *word, int has_next);

/* 0, or MB_EINVAL for a word that is a misspelt option of ours; err names the right one. */
int mb_train_check_word(const char *word, struct mb_err *err);

#endif
