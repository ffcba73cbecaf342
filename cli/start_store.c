/* The url keeps its user; the password moves into sealed memory. */
#include "cli/start_store.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/fs.h"
#include "base/str.h"
#include "gcs/redis_url.h"

enum { PASSWORD_FILE_MAX = 4096 };

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "out of memory");
}

/* redis://user:password@rest -> redis://user:@rest */
static char *without_password(const char *url)
{
    const char *rest = url + strlen("redis://"), *query = strchr(rest, '?'), *at = NULL;
    const char *colon;

    for (const char *p = rest; *p && p != query; p++)
        if (*p == '@')
            at = p;
    if (!at)
        return mb_strdup(url);
    colon = memchr(rest, ':', (size_t)(at - rest));
    return mb_asprintf("redis://%.*s:%s", (int)(colon - rest), rest, at);
}

/* Sealed: nobody changes it afterwards. Not close-on-exec: mobula-init is to have it. */
static int keep(struct mb_start_store *out, const char *password, struct mb_err *err)
{
    int rc;

    out->fd = memfd_create("mobula-store", MFD_ALLOW_SEALING);
    if (out->fd < 0)
        return mb_err_sys(err, errno, "memory for the store's password");
    rc = mb_fs_write_all(out->fd, password, strlen(password), err);
    if (rc == 0 &&
        fcntl(out->fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) != 0)
        rc = mb_err_sys(err, errno, "memory for the store's password");
    return rc;
}

static int keep_file(struct mb_start_store *out, const char *file, struct mb_err *err)
{
    struct mb_buf b = {0};
    int rc = mb_fs_read(file, PASSWORD_FILE_MAX, &b, err);

    if (rc == 0)
        rc = keep(out, mb_buf_str(&b), err);
    else
        mb_err_wrap(err, "start: --store-password-file");
    if (b.data)
        explicit_bzero(b.data, b.len);
    mb_buf_close(&b);
    return rc;
}

static int choose(struct mb_start_store *out, const char *store, const char *file,
                  const char *from_env, struct mb_err *err)
{
    struct mb_redis_url url = {.port = 0};
    int rc = 0;

    if (!mb_starts_with(store, "redis")) {
        out->url = mb_strdup(store);
        return out->url ? 0 : no_memory(err);
    }
    rc = mb_redis_url_parse(store, &url, err);
    if (rc != 0)
        return mb_err_wrap(err, "start: --store");
    out->url = without_password(store);
    if (!out->url)
        rc = no_memory(err);
    else if ((file != NULL) + (from_env != NULL) + (url.password[0] != '\0') > 1)
        rc = mb_err_set(err, MB_EINVAL,
                        "start: the store's password is given more than once: one of "
                        "--store-password-file, MOBULA_STORE_PASSWORD and the address of --store");
    else if (file)
        rc = keep_file(out, file, err);
    else if (from_env)
        rc = keep(out, from_env, err);
    else if (url.password[0])
        rc = keep(out, url.password, err);
    explicit_bzero(&url, sizeof url);
    return rc;
}

int mb_start_store(struct mb_start_store *out, const char *store, const char *file,
                   struct mb_err *err)
{
    const char *from_env = getenv("MOBULA_STORE_PASSWORD");
    int rc = 0;

    *out = (struct mb_start_store){.fd = -1};
    if (store)
        rc = choose(out, store, file, from_env && *from_env ? from_env : NULL, err);
    unsetenv("MOBULA_STORE_PASSWORD"); /* drivers would inherit it, whatever the store is */
    return rc;
}

void mb_start_store_close(struct mb_start_store *s)
{
    mb_free(s->url);
    if (s->fd >= 0)
        close(s->fd);
    s->fd = -1;
}
