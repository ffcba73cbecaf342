/*
 * Several heads of one cluster: one serves, the others stand by (UNAVAILABLE).
 *
 *  1. Addresses come from --address, and from the KV: namespace "mobula", keys "head:HOST:PORT",
 *     where every standby puts its own. They are read at the handshake and at every watch.
 *  2. A call that finds no head moves on to the next address; the call itself is repeated there as
 *     on any UNAVAILABLE. The sync stream ends and is opened anew at the new address.
 * A real Ray head has no such keys: one address, nothing changes.
 */
#include <string.h>
#include "base/alloc.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/client_internal.h"

#define HEAD_KEY "head:"
static const char *const heads_ns = "mobula";

int gcs_heads_set_cluster(struct mb_gcs *c)
{
    int rc = 0;

    for (size_t i = 0; i < c->n_heads; i++)
        rc |= mb_grpc_channel_metadata(c->channels[i], "ray_cluster_id",
                                       c->cluster_id[0] ? c->cluster_id : NULL);
    return rc;
}

static void use_head(struct mb_gcs *c, size_t i)
{
    c->head = i;
    c->channel = c->channels[i];
    c->address = c->addresses[i];
}

int gcs_open_channel(struct mb_gcs *c, const char *address, size_t max_bytes,
                     struct mb_grpc_channel **out, struct mb_err *err)
{
    const struct mb_grpc_channel_opts opts = {.max_message_bytes = max_bytes,
                                              .token = c->token,
                                              .unacknowledged_ms = GCS_UNACKNOWLEDGED_MS};
    int rc = mb_grpc_channel_create(c->grpc, address, &opts, out, err);

    if (rc == 0 && c->cluster_id[0] &&
        mb_grpc_channel_metadata(*out, "ray_cluster_id", c->cluster_id) != 0) {
        mb_grpc_channel_destroy(*out);
        *out = NULL;
        rc = gcs_no_memory(err);
    }
    return rc;
}

int gcs_add_head(struct mb_gcs *c, const char *address, size_t n, struct mb_err *err)
{
    size_t i = c->n_heads;

    for (size_t k = 0; k < c->n_heads; k++)
        if (strlen(c->addresses[k]) == n && memcmp(c->addresses[k], address, n) == 0)
            return 0;
    if (i == GCS_HEADS_MAX)
        return mb_err_set(err, MB_EFULL, "more than %d addresses of heads", GCS_HEADS_MAX);
    c->addresses[i] = mb_asprintf("%.*s", (int)n, address);
    if (!c->addresses[i])
        return gcs_no_memory(err);
    int rc = gcs_open_channel(c, c->addresses[i], c->max_message_bytes, &c->channels[i], err);
    if (rc != 0) {
        mb_free(c->addresses[i]);
        return rc;
    }
    if (c->n_heads++ == 0)
        use_head(c, 0);
    return 0;
}

int gcs_add_heads(struct mb_gcs *c, const char *list, struct mb_err *err)
{
    int rc;

    do {
        size_t n = strcspn(list, ",");
        rc = gcs_add_head(c, list, n, err);
        list += n;
    } while (rc == 0 && *list++ == ',');
    return rc;
}

int mb_gcs_add_address(struct mb_gcs *c, const char *address, struct mb_err *err)
{
    return gcs_add_head(c, address, strlen(address), err);
}

void gcs_next_head(struct mb_gcs *c, const struct mb_grpc_channel *failed)
{
    if (c->n_heads < 2 || failed != c->channel || c->state == GCS_CLOSING)
        return; /* somebody moved on already */
    use_head(c, (c->head + 1) % c->n_heads);
    mb_debug("gcs", "looking for the head at %s", c->address);
    if (c->sync.stream)
        mb_grpc_stream_cancel(c->sync.stream); /* the timer opens it at the new address */
}

void gcs_heads_close(struct mb_gcs *c)
{
    for (size_t i = 0; i < c->n_heads; i++) {
        mb_grpc_channel_destroy(c->channels[i]);
        mb_free(c->addresses[i]);
    }
    mb_free(c->token);
}

static void on_heads(void *arg, const struct mb_err *err, const char *const *keys, size_t n)
{
    struct mb_gcs *c = arg;

    c->heads_op = NULL;
    for (size_t i = 0; err->code == 0 && i < n; i++) {
        struct mb_err e = {0};
        const char *address = keys[i] + strlen(HEAD_KEY);
        if (gcs_add_head(c, address, strlen(address), &e) != 0)
            mb_debug("gcs", "a standby at %s is passed over: %s", address, e.text);
    }
}

void gcs_ask_heads(struct mb_gcs *c)
{
    struct mb_err err = {0};

    if (!c->heads_op && c->state == GCS_CONNECTED &&
        mb_gcs_kv_keys(c, heads_ns, HEAD_KEY, GCS_WATCH_MS - 500, on_heads, c, &c->heads_op,
                       &err) != 0)
        mb_debug("gcs", "standbys are not known: %s", err.text);
}

static void on_announced(void *arg, const struct mb_err *err, int64_t count)
{
    (void)arg;
    (void)count;
    if (err->code != 0 && err->code != MB_ECANCELED)
        mb_warn("gcs", "this standby is not announced: %s", err->text);
}

int mb_gcs_announce_head(struct mb_gcs *c, const char *address, struct mb_err *err)
{
    char key[320];

    snprintf(key, sizeof key, "%s%.300s", HEAD_KEY, address);
    return mb_gcs_kv_put(c, heads_ns, key, "", 0, 1, 0, on_announced, c, NULL, err);
}
