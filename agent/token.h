/* The cluster's token, from where Ray looks for it too. Blocking, start-up only. */
#ifndef MOBULA_AGENT_TOKEN_H
#define MOBULA_AGENT_TOKEN_H

#include "base/err.h"

/*
 * token_file (--token-file) if given; else, with RAY_AUTH_MODE=token, RAY_AUTH_TOKEN, the file
 * RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token; else *out is NULL: no authentication. Owned by the
 * caller. MB_ENOENT or MB_EINVAL when a token was asked for and there is none.
 */
int mb_token_load(const char *token_file, char **out, struct mb_err *err);

#endif
