/*
 * 1. token, loop, runtime, client; 2. handshake; 3. at most one KV read; 4. everything is closed
 * again, whatever happened. The first failure is the caller's.
 */
#include "cli/gcs_ask.h"

#include <string.h>
#include <uv.h>
#include "base/loop.h"
#include "base/alloc.h"
#include "base/grpc/grpc.h"
#include "base/str.h"
#include "gcs/client.h"
#include "gcs/tls.h"
#include "gcs/token.h"

struct question {
    const char *kv_key; /* NULL: the handshake is all */
    uint64_t timeout_ms;
    char *value;
    int done;
    struct mb_err err;
};

static void on_value(void *arg, const struct mb_err *err, const void *value, size_t n)
{
    struct question *q = arg;

    q->err = *err;
    if (!err->code && !(q->value = mb_strndup(value, n)))
        mb_err_set(&q->err, MB_ENOMEM, "out of memory");
    q->done = 1;
}

static void on_event(void *arg, struct mb_gcs *c, enum mb_gcs_event event, const struct mb_err *err)
{
    struct question *q = arg;

    if (q->done)
        return;
    if (event == MB_GCS_CONNECTED && q->kv_key) {
        if (mb_gcs_kv_get(c, q->kv_key, q->kv_key, q->timeout_ms, on_value, q, NULL, &q->err) < 0)
            q->done = 1;
    } else if (event == MB_GCS_CONNECTED || event == MB_GCS_CONNECT_FAILED) {
        q->err = *err;
        q->done = 1;
    }
}

static void on_closed(void *arg)
{
    *(int *)arg = 1;
}

static void talk(uv_loop_t *loop, struct mb_grpc *grpc, const struct mb_gcs_opts *opts,
                 struct question *q)
{
    struct mb_gcs *gcs;
    int closed = 0;

    if (mb_gcs_create(loop, grpc, opts, on_event, q, &gcs, &q->err) != 0)
        return;
    if (mb_gcs_connect(gcs, &q->err) == 0)
        while (!q->done)
            mb_loop_turn(loop);
    q->done = 1; /* what comes while closing is no answer */
    mb_gcs_close(gcs, on_closed, &closed);
    while (!closed)
        mb_loop_turn(loop);
}

static int ask(const char *address, struct question *q, struct mb_err *err)
{
    struct mb_gcs_opts opts = {.address = address, .connect_timeout_ms = q->timeout_ms};
    struct mb_grpc *grpc;
    char *token = NULL;
    uv_loop_t loop;
    int closed = 0;

    if (mb_token_load(NULL, &token, err) != 0)
        return err ? err->code : MB_EIO;
    opts.token = token;
    if (uv_loop_init(&loop) != 0) {
        mb_free(token);
        return mb_err_set(err, MB_ENOMEM, "no event loop");
    }
    if (mb_gcs_grpc_create(&loop, &grpc, &q->err) == 0) {
        if (strchr(address, ',') == NULL) /* of one head the error says it */
            mb_grpc_quiet_faults(grpc);
        talk(&loop, grpc, &opts, q);
        mb_grpc_stop(grpc, on_closed, &closed);
        while (!closed)
            mb_loop_turn(&loop);
        mb_grpc_destroy(grpc);
    }
    uv_loop_close(&loop);
    mb_free(token);
    return q->err.code ? mb_err_set(err, q->err.code, "%s", q->err.text) : 0;
}

int mb_gcs_ask_alive(const char *address, uint64_t timeout_ms, struct mb_err *err)
{
    struct question q = {.timeout_ms = timeout_ms};

    return ask(address, &q, err);
}

/* Length of HOST in "HOST:PORT" or "[HOST]:PORT". */
static size_t host_len(const char *address)
{
    return address[0] == '[' ? strcspn(address, "]") + 1 : strcspn(address, ":");
}

int mb_gcs_ask_api_url(const char *address, uint64_t timeout_ms, char **out, struct mb_err *err)
{
    struct question q = {.kv_key = "dashboard", .timeout_ms = timeout_ms};
    const char *host = address, *port;
    size_t n = host_len(address);
    int rc = ask(address, &q, err);

    if (rc < 0)
        return rc;
    port = q.value + host_len(q.value);
    if (*port != ':') {
        rc = mb_err_set(err, MB_EPROTO, "the GCS at %s names \"%s\" as its Jobs API, not HOST:PORT",
                        address, q.value);
        goto out;
    }
    if (!mb_starts_with(q.value, "127.") && !mb_starts_with(q.value, "localhost")) {
        host = q.value;
        n = host_len(q.value);
    }
    *out = mb_asprintf("http://%.*s%s", (int)n, host, port);
    if (!*out)
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
out:
    mb_free(q.value);
    return rc;
}
