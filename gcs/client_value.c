/*
 * A large value of the head's KV into a file.
 *
 *  1. It comes over a connection of its own, which may bring one answer of 512 MiB, as Ray allows;
 *     on the connection for all else the head is bounded (mb_gcs_opts.max_message_bytes).
 *  2. The answer stays in the pieces in which it came, and these are written in the pool: memory
 *     has it once. There they are freed, too, and the heap gives back what they took.
 *  3. With the callback the connection goes.
 * Failure: as any request (client.c); one that is cancelled while it is written ends after that.
 */
#include <malloc.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "gcs/client_internal.h"
#include "gcs/kv_value.h"

struct gcs_value {
    uv_work_t work;
    struct mb_gcs_op *op;
    struct mb_grpc_bytes *bytes;
    int fd; /* borrowed */
    struct mb_err err;
};

static int to_file(void *arg, const void *p, size_t n, struct mb_err *err)
{
    const struct gcs_value *v = arg;

    return mb_fs_write_all(v->fd, p, n, err);
}

static void write_value(uv_work_t *work)
{
    struct gcs_value *v = work->data;
    struct mb_kv_value reader;
    const uint8_t *p;
    size_t n;
    int rc = 0;

    mb_kv_value_init(&reader);
    while (rc == 0 && (n = mb_grpc_bytes_next(v->bytes, &p)) > 0)
        rc = mb_kv_value_feed(&reader, p, n, to_file, v, &v->err);
    if (rc == 0)
        mb_kv_value_end(&reader, &v->err);
    mb_grpc_bytes_destroy(v->bytes);
    v->bytes = NULL;
    malloc_trim(0); /* small pieces among others: not given back by itself */
}

static void on_written(uv_work_t *work, int status)
{
    struct gcs_value *v = work->data;

    (void)status; /* nobody cancels it */
    gcs_value_done(v->op, &v->err);
}

int gcs_value_take(struct mb_gcs_op *op, struct mb_grpc_bytes *bytes, struct mb_err *err)
{
    struct gcs_value *v = op->value;
    int rc;

    v->bytes = bytes;
    v->work.data = v;
    rc = uv_queue_work(op->c->loop, &v->work, write_value, on_written);
    if (rc == 0)
        return 0;
    mb_grpc_bytes_destroy(bytes);
    v->bytes = NULL;
    return mb_err_sys(err, -rc, "%s", op->method);
}

void gcs_value_close(struct gcs_value *v)
{
    mb_free(v);
}

int mb_gcs_kv_fetch(struct mb_gcs *c, const char *ns, const char *key, int fd, uint64_t timeout_ms,
                    mb_gcs_done_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err)
{
    Ray__Rpc__InternalKVGetRequest req = RAY__RPC__INTERNAL_KVGET_REQUEST__INIT;
    struct gcs_call call = {.method = "/ray.rpc.InternalKVGcsService/InternalKVGet",
                            .request = &req.base,
                            .timeout_ms = timeout_ms,
                            .repeatable = 1,
                            .complete = gcs_complete_done,
                            .cb = (gcs_any_cb)cb,
                            .cb_arg = arg};
    struct mb_grpc_channel *channel = NULL;
    struct gcs_value *v = mb_calloc(1, sizeof(*v));
    struct mb_gcs_op *started;
    int rc;

    if (v == NULL)
        return gcs_no_memory(err);
    v->fd = fd;
    req.namespace_ = mb_wire_bytes(ns, strlen(ns));
    req.key = mb_wire_bytes(key, strlen(key));
    rc = gcs_open_channel(c, c->address, 0, &channel, err);
    call.own_channel = channel;
    call.value = v;
    if (rc == 0)
        rc = gcs_start(c, &call, &started, err);
    if (rc != 0) {
        mb_grpc_channel_destroy(channel);
        mb_free(v);
        return rc;
    }
    v->op = started;
    if (op)
        *op = started;
    return 0;
}
