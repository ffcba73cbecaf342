/*
 * --store of `mobula start`: a password must not be on the agent's command line, nor in the
 * environment that drivers inherit. It goes into a file of the node, readable by its owner alone.
 */
#ifndef MOBULA_CLI_START_STORE_H
#define MOBULA_CLI_START_STORE_H

#include "base/err.h"

struct mb_start_store {
    char *url;  /* for the agent; NULL: not given */
    char *file; /* of the password; NULL: none */
};

/* The password comes from file, from MOBULA_STORE_PASSWORD (which is removed from the environment),
 * or from the url. */
int mb_start_store(struct mb_start_store *out, const char *store, const char *file,
                   const char *node_dir, struct mb_err *err);
void mb_start_store_close(struct mb_start_store *s);

#endif
