#include "cli/token.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"

enum { TOKEN_MAX_BYTES = 64 * 1024 };

int mb_cli_token(struct mb_buf *out, struct mb_err *err)
{
    const char *mode = getenv("RAY_AUTH_MODE");
    const char *token = getenv("RAY_AUTH_TOKEN");
    const char *path = getenv("RAY_AUTH_TOKEN_PATH");
    const char *home = getenv("HOME");
    char *found;
    int rc;

    if (token && token[0])
        return mb_buf_puts(out, token) < 0 ? mb_err_set(err, MB_ENOMEM, "out of memory") : 0;
    if (!path && (!mode || strcmp(mode, "token") != 0))
        return 0;
    found = path ? mb_strdup(path) : mb_path_join(home ? home : "/", ".ray/auth_token");
    if (!found)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    rc = mb_fs_read(found, TOKEN_MAX_BYTES, out, err);
    if (rc < 0)
        mb_err_wrap(err, "reading the cluster's token");
    while (!rc && out->len && isspace(out->data[out->len - 1]))
        out->data[--out->len] = '\0';
    mb_free(found);
    return rc;
}
