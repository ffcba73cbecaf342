/*
 *  1. What follows "--", up to "=", is compared with the names of our options and of the arguments
 *     that the launcher itself reads.
 *  2. The nearest is one of ours: refused. It is none of ours, or nothing is near: the ranks
 * decide.
 */
#include "cli/train_words.h"

#include <string.h>
#include "base/str.h"

enum { N_READ = 5, NAMES_MAX = 32, WORD_MAX = 64 };

const struct mb_option mb_train_options[] = {
    MB_LAUNCH_OPTIONS(struct mb_train, launch),
    {0},
};

/* Of the trainer, and read by train.c. */
static const char *const read_too[N_READ] = {"distributed-backend", "load", "save", "save-interval",
                                             "help"};

int mb_train_own_words(const char *word, int has_next)
{
    size_t len;

    if (!mb_starts_with(word, "--"))
        return 0;
    len = strcspn(word + 2, "=");
    for (const struct mb_option *o = mb_train_options; o->name; o++)
        if (strlen(o->name) == len && strncmp(o->name, word + 2, len) == 0)
            return word[2 + len] == '=' || o->kind == MB_OPTION_FLAG || !has_next ? 1 : 2;
    return 0;
}

int mb_train_check_word(const char *word, struct mb_err *err)
{
    const char *names[NAMES_MAX + 1] = {NULL};
    const char *nearest;
    char name[WORD_MAX + 1];
    size_t len, n = 0;

    if (!mb_starts_with(word, "--"))
        return 0;
    len = strcspn(word + 2, "=");
    if (len == 0 || len > WORD_MAX)
        return 0;
    memcpy(name, word + 2, len);
    name[len] = '\0';
    for (const struct mb_option *o = mb_train_options; o->name && n < NAMES_MAX - N_READ; o++)
        names[n++] = o->name;
    memcpy(names + n, read_too, sizeof(read_too));
    nearest = mb_nearest(name, names);
    for (size_t i = 0; nearest && i < n; i++)
        if (names[i] == nearest)
            return mb_err_set(err, MB_EINVAL, "train: unknown argument --%s; did you mean --%s?",
                              name, nearest);
    return 0;
}
