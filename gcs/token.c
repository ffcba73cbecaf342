/*
 * Finding the token.
 *
 *  1. White space around it is not part of it; an empty file is an error, not an open cluster.
 *  2. White space or a control character inside would end the header early: refused.
 *  3. A file is judged by what was opened, not by its name: owner and mode first, then its bytes.
 *     A FIFO or a device is never waited for.
 *  4. A new token is written beside its place and linked there, so that nobody reads half of it and
 *     nobody's is replaced.
 *  5. The token never appears in a text: errors name the place only.
 */
#include "gcs/token.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/str.h"

enum { TOKEN_MAX = 64 << 10, NEW_BYTES = 32 };

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "no memory for the token");
}

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
    return *out != NULL ? MB_OK : no_memory(err);
}

/* ---- files ---- */

static int check_file(int fd, const char *path, struct mb_err *err)
{
    struct stat st;

    if (fstat(fd, &st) != 0)
        return mb_err_sys(err, errno, "token file %s", path);
    if (!S_ISREG(st.st_mode))
        return mb_err_set(err, MB_EINVAL, "token file %s: not a regular file", path);
    if (st.st_uid != geteuid() && st.st_uid != 0)
        return mb_err_set(err, MB_EDENIED, "token file %s: it belongs to user %u, not to you", path,
                          (unsigned)st.st_uid);
    /* What root gave its group to read is an administrator's (or Kubernetes') decision. */
    mode_t mine = st.st_uid == 0 && geteuid() != 0 ? 0740 : 0700;
    if ((st.st_mode & 0777 & ~mine) != 0)
        return mb_err_set(err, MB_EDENIED,
                          "token file %s: others may use it (mode %04o): chmod 600 it, or in "
                          "Kubernetes give its volume defaultMode 0400",
                          path, (unsigned)(st.st_mode & 0777));
    return MB_OK;
}

static int read_all(int fd, const char *path, struct mb_buf *out, struct mb_err *err)
{
    char part[4096];
    ssize_t n;

    while ((n = read(fd, part, sizeof(part))) != 0) {
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return mb_err_sys(err, errno, "token file %s", path);
        if (out->len + (size_t)n > TOKEN_MAX)
            return mb_err_set(err, MB_EINVAL, "token file %s: more than %d KiB", path,
                              TOKEN_MAX >> 10);
        if (mb_buf_add(out, part, (size_t)n) != 0)
            return no_memory(err);
    }
    explicit_bzero(part, sizeof(part));
    return MB_OK;
}

static int from_file(const char *path, struct mb_token *out, struct mb_err *err)
{
    struct mb_buf text = {0};
    char *full = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    int rc;

    if (fd < 0)
        return mb_err_sys(err, errno, "token file %s", path);
    rc = check_file(fd, path, err);
    if (rc == MB_OK)
        rc = read_all(fd, path, &text, err);
    if (rc == MB_OK && (full = realpath(path, NULL)) == NULL)
        rc = mb_err_sys(err, errno, "token file %s", path);
    if (rc == MB_OK && (out->path = mb_strdup(full)) == NULL)
        rc = no_memory(err);
    if (rc == MB_OK)
        rc = keep(mb_buf_str(&text), path, &out->text, err);
    if (rc != MB_OK)
        mb_token_close(out);
    if (text.data != NULL)
        explicit_bzero(text.data, text.len);
    free(full); /* libc's memory */
    mb_buf_close(&text);
    close(fd);
    return rc;
}

static char *home_path(const char *name, struct mb_err *err)
{
    const char *home = getenv("HOME");
    char *path = mb_path_join(home != NULL && *home != '\0' ? home : "/", name);

    if (path == NULL)
        no_memory(err);
    return path;
}

/* ---- finding ---- */

int mb_token_mode(enum mb_token_mode *out, struct mb_err *err)
{
    const char *mode = getenv("RAY_AUTH_MODE");

    *out = MB_TOKEN_IF_THERE;
    if (mode == NULL || *mode == '\0')
        return MB_OK;
    *out = strcasecmp(mode, "token") == 0 ? MB_TOKEN_NEEDED : MB_TOKEN_OFF;
    if (*out == MB_TOKEN_OFF && strcasecmp(mode, "disabled") != 0)
        return mb_err_set(err, MB_EINVAL, "RAY_AUTH_MODE=%.40s: expected token or disabled", mode);
    return MB_OK;
}

static int from_home(enum mb_token_mode mode, struct mb_token *out, struct mb_err *err)
{
    char *path = home_path(".ray/auth_token", err);
    int rc = path != NULL ? from_file(path, out, err) : MB_ENOMEM;

    if (rc == MB_ENOENT && mode == MB_TOKEN_IF_THERE)
        rc = MB_OK;
    else if (rc == MB_ENOENT)
        mb_err_set(err, rc,
                   "RAY_AUTH_MODE=token, but there is no token: neither RAY_AUTH_TOKEN "
                   "nor RAY_AUTH_TOKEN_PATH is set, and %s does not exist",
                   path);
    mb_free(path);
    return rc;
}

int mb_token_find(const char *token_file, struct mb_token *out, struct mb_err *err)
{
    const char *token = getenv("RAY_AUTH_TOKEN");
    const char *path = getenv("RAY_AUTH_TOKEN_PATH");
    enum mb_token_mode mode;
    int rc;

    *out = (struct mb_token){.text = NULL};
    if (token_file != NULL)
        return from_file(token_file, out, err);
    rc = mb_token_mode(&mode, err);
    if (rc != MB_OK || mode == MB_TOKEN_OFF)
        return rc;
    if (token != NULL && (*token != '\0' || mode == MB_TOKEN_NEEDED))
        return keep(token, "RAY_AUTH_TOKEN", &out->text, err);
    if (path != NULL && *path != '\0')
        return from_file(path, out, err);
    return from_home(mode, out, err);
}

int mb_token_load(const char *token_file, char **out, struct mb_err *err)
{
    struct mb_token found;
    int rc = mb_token_find(token_file, &found, err);

    *out = found.text;
    found.text = NULL;
    mb_token_close(&found);
    return rc;
}

void mb_token_close(struct mb_token *t)
{
    if (t->text != NULL)
        explicit_bzero(t->text, strlen(t->text));
    mb_free(t->text);
    mb_free(t->path);
    *t = (struct mb_token){.text = NULL};
}

/* ---- making ---- */

/* MB_EEXIST: somebody else was first. */
static int link_new(const char *path, const char *token, struct mb_err *err)
{
    char *tmp = mb_asprintf("%s.new-%016llx", path, (unsigned long long)mb_random_u64());
    int rc =
        tmp != NULL ? mb_fs_write_atomic(tmp, token, strlen(token), 0600, err) : no_memory(err);

    if (rc == MB_OK) {
        if (link(tmp, path) != 0)
            rc = mb_err_sys(err, errno, "token file %s", path);
        unlink(tmp);
    }
    mb_free(tmp);
    return rc;
}

int mb_token_make(struct mb_token *out, struct mb_err *err)
{
    const char *home = getenv("HOME");
    char text[2 * NEW_BYTES + 1];
    uint8_t bytes[NEW_BYTES];
    char *dir, *path;
    int rc = MB_ENOMEM, made;

    *out = (struct mb_token){.text = NULL};
    if (home == NULL || *home == '\0')
        return mb_err_set(err, MB_EINVAL,
                          "HOME is not set, so there is no place for a token: give --token-file");
    dir = home_path(".ray", err);
    path = home_path(".ray/auth_token", err);
    mb_random_bytes(bytes, sizeof(bytes));
    mb_hex(bytes, sizeof(bytes), text);
    if (dir != NULL && path != NULL)
        rc = mb_fs_mkdir_p(dir, 0700, err);
    if (rc == MB_OK)
        rc = link_new(path, text, err);
    made = rc == MB_OK;
    if (rc == MB_OK)
        rc = mb_fs_sync_dir(dir, err);
    if (rc == MB_OK || rc == MB_EEXIST)
        rc = from_file(path, out, err);
    out->is_new = rc == MB_OK && made;
    explicit_bzero(text, sizeof(text));
    explicit_bzero(bytes, sizeof(bytes));
    mb_free(dir);
    mb_free(path);
    return rc;
}
