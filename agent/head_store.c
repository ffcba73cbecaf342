/*
 * A shared store knows its holder by node directory and host, so that a restarted agent takes its
 * own lease over at once: the front process runs one agent at a time. The cluster this node was in
 * comes from identity.json.
 */
#include "agent/head_store.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "agent/supervise/protocol.h"
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"

enum { SMALL_FILE_MAX = 4096 };

int mb_head_store_is_shared(const char *store)
{
    return mb_starts_with(store, "redis");
}

/* The first line is it. */
static int keep_password(const char *text, char **out, struct mb_err *err)
{
    *out = mb_asprintf("%.*s", (int)strcspn(text, "\r\n"), text);
    return *out != NULL ? MB_OK : mb_err_set(err, MB_ENOMEM, "out of memory");
}

/* From mobula-init, which keeps the memory that it stands in for the agents that follow this one;
 * what we start gets neither the descriptor nor its number, and cannot look into this process
 * (main.c). */
static int take_password(const char *number, char **out, struct mb_err *err)
{
    char text[SMALL_FILE_MAX];
    int64_t fd;
    ssize_t n;
    int rc = mb_parse_i64(number, 3, 1 << 20, MB_SECRET_FD_ENV, &fd, err);

    if (rc != MB_OK)
        return rc;
    n = pread((int)fd, text, sizeof(text) - 1, 0);
    if (n < 0) {
        rc = mb_err_sys(err, errno, "%s %d", MB_SECRET_FD_ENV, (int)fd);
    } else {
        text[n] = '\0';
        rc = keep_password(text, out, err);
    }
    explicit_bzero(text, sizeof(text));
    close((int)fd);
    unsetenv(MB_SECRET_FD_ENV);
    return rc;
}

static int read_password(const struct mb_agent_options *opts, char **out, struct mb_err *err)
{
    const char *number = getenv(MB_SECRET_FD_ENV);
    struct mb_buf b = {0};
    int rc = MB_OK;

    if (number != NULL)
        return take_password(number, out, err);
    if (opts->store_password_file == NULL)
        return MB_OK;
    rc = mb_fs_read(opts->store_password_file, SMALL_FILE_MAX, &b, err);
    if (rc == MB_OK)
        rc = keep_password(mb_buf_str(&b), out, err);
    else
        mb_err_wrap(err, "--store-password-file");
    if (b.data != NULL)
        explicit_bzero(b.data, b.len);
    mb_buf_close(&b);
    return rc;
}

static void read_cluster(const char *node_dir, char out[2 * MB_NODE_ID_BYTES + 1])
{
    char *path = mb_path_join(node_dir, "identity.json");
    struct mb_buf b = {0};
    const char *cluster = NULL;
    json_t *o = NULL;

    out[0] = '\0';
    if (path != NULL && mb_fs_exists(path) && mb_fs_read(path, SMALL_FILE_MAX, &b, NULL) == MB_OK)
        o = json_loads(mb_buf_str(&b), 0, NULL);
    cluster = json_string_value(json_object_get(o, "cluster_id"));
    if (cluster != NULL && strlen(cluster) == 2 * MB_NODE_ID_BYTES)
        memcpy(out, cluster, 2 * MB_NODE_ID_BYTES + 1);
    json_decref(o);
    mb_buf_close(&b);
    mb_free(path);
}

int mb_head_store_open(const struct mb_agent_options *opts, struct mb_head_store *s,
                       struct mb_head_opts *out, struct mb_err *err)
{
    const char *session = strrchr(opts->node_dir, '/') + 1;
    char host[256] = "";

    memset(s, 0, sizeof(*s));
    out->store_sync_full = strcmp(opts->store_sync, "full") == 0;
    out->max_package_bytes = (uint64_t)opts->max_package_bytes;
    out->package_keep_ms = (uint64_t)opts->package_keep_s * 1000;
    if (strcmp(opts->store, "memory") == 0)
        return MB_OK;
    /* An empty store in place of the one that was there is damage, too. */
    read_cluster(opts->node_dir, s->cluster);
    out->expect_cluster = s->cluster[0] != '\0' ? s->cluster : NULL;
    if (!mb_head_store_is_shared(opts->store)) {
        s->path = mb_path_join(opts->node_dir, "gcs.sqlite");
        out->store_path = s->path;
        return s->path != NULL ? MB_OK : mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    gethostname(host, sizeof(host) - 1);
    snprintf(s->holder, sizeof(s->holder), "%.60s@%s", session, host);
    out->store_url = opts->store;
    out->holder = s->holder;
    int rc = read_password(opts, &s->password, err);
    if (rc != MB_OK)
        return rc;
    out->store_password = s->password;
    return MB_OK;
}

void mb_head_store_close(struct mb_head_store *s)
{
    if (s->password != NULL)
        explicit_bzero(s->password, strlen(s->password));
    mb_free(s->password);
    mb_free(s->path);
}
