/*
 * --store of `mobula start`: a password must not be on the agent's command line, in the environment
 * that drivers inherit, nor in a file that jobs, which are the same user, can read. It goes into
 * memory that mobula-init holds for its agents.
 */
#ifndef MOBULA_CLI_START_STORE_H
#define MOBULA_CLI_START_STORE_H

#include "base/err.h"

struct mb_start_store {
    char *url; /* for the agent, without a password; NULL: not given */
    int fd;    /* of a sealed memfd with the password, inherited by what is executed; -1: none */
};

/* The password comes from file, from MOBULA_STORE_PASSWORD (which is removed from the environment),
 * or from the url; from more than one is MB_EINVAL. */
int mb_start_store(struct mb_start_store *out, const char *store, const char *file,
                   struct mb_err *err);
void mb_start_store_close(struct mb_start_store *s);

#endif
