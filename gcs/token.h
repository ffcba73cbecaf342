/*
 * The cluster's token, from where Ray 2.60 looks for it too. Blocking, start-up only; any thread.
 * The text of an error names the place, never the token.
 */
#ifndef MOBULA_GCS_TOKEN_H
#define MOBULA_GCS_TOKEN_H

#include "base/err.h"

enum mb_token_mode {
    MB_TOKEN_IF_THERE, /* RAY_AUTH_MODE is not set: a token that is there is used, as by `ray start`
                        */
    MB_TOKEN_OFF,      /* disabled */
    MB_TOKEN_NEEDED    /* token */
};

/* What RAY_AUTH_MODE says, in any case; MB_EINVAL for a word that Ray does not know either. */
int mb_token_mode(enum mb_token_mode *out, struct mb_err *err);

struct mb_token {
    char *text; /* goes into a header as it is; NULL: no authentication */
    char *path; /* the file it is from, absolute; NULL: RAY_AUTH_TOKEN */
    int is_new; /* the file was made by mb_token_make() */
};

/*
 * token_file (--token-file; may be NULL) if given; else, unless RAY_AUTH_MODE is disabled,
 * RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token. MB_ENOENT when a token was
 * asked for and there is none, MB_EINVAL for one that is empty or no header could carry, MB_EDENIED
 * for a file that is not its reader's alone: it belongs to somebody else than him and root, others
 * may read it, or somebody may write to it. The group may read what belongs to root.
 */
int mb_token_find(const char *token_file, struct mb_token *out, struct mb_err *err);
/* ~/.ray/auth_token with 256 random bits, 0600, unless it is there already; then it is read. Of
 * several that make it at once, one does, and all have its. */
int mb_token_make(struct mb_token *out, struct mb_err *err);
void mb_token_close(struct mb_token *t);

/* mb_token_find() for callers to whom its place does not matter; *out is owned by the caller. */
int mb_token_load(const char *token_file, char **out, struct mb_err *err);

#endif
