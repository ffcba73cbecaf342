/* The cluster's token as Ray finds it: RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, or
 * ~/.ray/auth_token when RAY_AUTH_MODE is token. */
#ifndef MOBULA_CLI_TOKEN_H
#define MOBULA_CLI_TOKEN_H

#include "base/buf.h"
#include "base/err.h"

/* Appends the token to out; nothing is appended when the cluster has none. */
int mb_cli_token(struct mb_buf *out, struct mb_err *err);

#endif
