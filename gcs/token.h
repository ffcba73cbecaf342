/* The cluster's token, from where Ray looks for it too. Blocking, start-up only; any thread. */
#ifndef MOBULA_GCS_TOKEN_H
#define MOBULA_GCS_TOKEN_H

#include "base/err.h"

/*
 * token_file (--token-file; may be NULL) if given; else, with RAY_AUTH_MODE=token, RAY_AUTH_TOKEN,
 * the file RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token; else *out is NULL: no authentication. *out is
 * owned by the caller and goes into a header as it is. MB_ENOENT when a token was asked for and
 * there is none, MB_EINVAL for one that is empty or no header could carry. The text of an error
 * names the place, never the token.
 */
int mb_token_load(const char *token_file, char **out, struct mb_err *err);

#endif
