/* The url keeps its user; the password moves to NODE_DIR/store.password. */
#include "cli/start_store.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"
#include "gcs/redis_url.h"

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

static int keep(struct mb_start_store *out, const char *password, const char *node_dir,
                struct mb_err *err)
{
    out->file = mb_path_join(node_dir, "store.password");
    if (!out->file)
        return no_memory(err);
    return mb_fs_write_atomic(out->file, password, strlen(password), 0600, err);
}

int mb_start_store(struct mb_start_store *out, const char *store, const char *file,
                   const char *node_dir, struct mb_err *err)
{
    const char *from_env = getenv("MOBULA_STORE_PASSWORD");
    struct mb_redis_url url = {.port = 0};
    int rc = 0;

    if (!store)
        return 0;
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
    else if (file) {
        out->file = realpath(file, NULL);
        char *copy = out->file ? mb_strdup(out->file) : NULL;
        rc = copy        ? 0
             : out->file ? no_memory(err)
                         : mb_err_sys(err, errno, "start: --store-password-file %s", file);
        free(out->file); /* libc's memory */
        out->file = copy;
    } else if (from_env && *from_env)
        rc = keep(out, from_env, node_dir, err);
    else if (url.password[0])
        rc = keep(out, url.password, node_dir, err);
    unsetenv("MOBULA_STORE_PASSWORD");
    explicit_bzero(&url, sizeof url);
    return rc;
}

void mb_start_store_close(struct mb_start_store *s)
{
    mb_free(s->url);
    mb_free(s->file);
}
