/* Patterns of .gitignore files: which paths of a directory are left out of a package. Pure. */
#ifndef MOBULA_CLI_IGNORE_H
#define MOBULA_CLI_IGNORE_H

#include <stddef.h>

struct mb_ignore_rule {
    char *base;    /* directory the pattern was found in, relative, "" at the top; owned */
    char *pattern; /* without "!", leading "/" and trailing "/"; owned */
    int negated, only_dirs, anchored;
};

struct mb_ignore {
    struct mb_ignore_rule *rules; /* owned; the last rule that matches decides */
    size_t n_rules;
};

/* One line of a file found in directory base. Comments and empty lines are passed over. 0 or
 * MB_ENOMEM. */
int mb_ignore_add(struct mb_ignore *ig, const char *base, const char *line);
int mb_ignore_matches(const struct mb_ignore *ig, const char *path, int is_dir);
void mb_ignore_close(struct mb_ignore *ig);

#endif
