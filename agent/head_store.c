/*
 * A shared store knows its holder by node directory and host, so that a restarted agent takes its
 * own lease over at once: the front process runs one agent at a time. The cluster this node was in
 * comes from identity.json.
 */
#include "agent/head_store.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"

enum { SMALL_FILE_MAX = 4096 };

int mb_head_store_is_shared(const char *store)
{
    return mb_starts_with(store, "redis");
}

static int read_password(const char *path, char **out, struct mb_err *err)
{
    struct mb_buf b = {0};
    int rc = mb_fs_read(path, SMALL_FILE_MAX, &b, err);

    if (rc == MB_OK) {
        *out = mb_asprintf("%.*s", (int)strcspn(mb_buf_str(&b), "\r\n"), mb_buf_str(&b));
        rc = *out != NULL ? MB_OK : mb_err_set(err, MB_ENOMEM, "out of memory");
    } else {
        mb_err_wrap(err, "--store-password-file");
    }
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
    if (!mb_head_store_is_shared(opts->store)) {
        s->path = mb_path_join(opts->node_dir, "gcs.sqlite");
        out->store_path = s->path;
        return s->path != NULL ? MB_OK : mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    gethostname(host, sizeof(host) - 1);
    snprintf(s->holder, sizeof(s->holder), "%.60s@%s", session, host);
    read_cluster(opts->node_dir, s->cluster);
    out->store_url = opts->store;
    out->holder = s->holder;
    out->expect_cluster = s->cluster[0] != '\0' ? s->cluster : NULL;
    if (opts->store_password_file != NULL) {
        int rc = read_password(opts->store_password_file, &s->password, err);
        if (rc != MB_OK)
            return rc;
    }
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
