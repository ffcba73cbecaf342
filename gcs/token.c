/*
 * Finding the token.
 *
 *  1. White space around it is not part of it; an empty file is an error, not an open cluster.
 *  2. White space or a control character inside would end the header early: refused.
 *  3. The token never appears in a text: errors name the place only.
 */
#include "gcs/token.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/fs.h"

enum { TOKEN_MAX = 64 << 10 };

static int keep(const char *text, const char *where, char **out, struct mb_err *err)
{
    size_t n;

    while (isspace((unsigned char)*text))
        text++;
    n = strlen(text);
    while (n > 0 && isspace((unsigned char)text[n - 1]))
        n--;
    if (n == 0)
        return mb_err_set(err, MB_EINVAL, "%s: the token is empty", where);
    for (size_t i = 0; i < n; i++)
        if (!isgraph((unsigned char)text[i]))
            return mb_err_set(err, MB_EINVAL,
                              "%s: character %zu of the token is no visible ASCII character", where,
                              i + 1);
    *out = mb_strndup(text, n);
    return *out != NULL ? MB_OK : mb_err_set(err, MB_ENOMEM, "no memory for the token");
}

static int from_file(const char *path, char **out, struct mb_err *err)
{
    struct mb_buf text = {0};
    int rc = mb_fs_read(path, TOKEN_MAX, &text, err);

    if (rc == MB_OK)
        rc = keep(mb_buf_str(&text), path, out, err);
    else
        mb_err_wrap(err, "token file %s", path);
    mb_buf_close(&text);
    return rc;
}

int mb_token_load(const char *token_file, char **out, struct mb_err *err)
{
    const char *mode = getenv("RAY_AUTH_MODE");
    const char *token = getenv("RAY_AUTH_TOKEN");
    const char *path = getenv("RAY_AUTH_TOKEN_PATH");
    const char *home = getenv("HOME");
    char *own;
    int rc;

    *out = NULL;
    if (token_file != NULL)
        return from_file(token_file, out, err);
    if (mode == NULL || strcmp(mode, "token") != 0)
        return MB_OK;
    if (token != NULL)
        return keep(token, "RAY_AUTH_TOKEN", out, err);
    if (path != NULL)
        return from_file(path, out, err);
    own = mb_path_join(home != NULL ? home : "/", ".ray/auth_token");
    if (own == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory for the token");
    rc = from_file(own, out, err);
    mb_free(own);
    return rc;
}
