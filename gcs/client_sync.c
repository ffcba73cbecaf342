/*
 * The resource sync stream: this node's view, at once on change and every 2 s, which also keeps the
 * node alive without health checks.
 *
 *  1. start packs the view, opens the stream, sends the first message.
 *  2. set packs the new view and sends it; renew only packs it; the timer sends the newest one
 * every 2 s.
 *  3. What the GCS sends (other nodes' views, commands) is read and passed over.
 *  4. The stream ends: every 2 s the head is asked whether the node is alive, and then it is opened
 *     anew, until stop. Nothing is queued meanwhile: only the newest view counts. A node that was
 *     declared dead has no stream: Ray 2.60's GCS aborted when one was opened for it and, as the
 *     node learnt its fate, ended while the next id was being registered.
 * The batch is never empty and ids have their exact length, as gcs/wire_check.c finds before each
 * message: a real GCS aborts otherwise.
 */
#include <string.h>
#include <time.h>
#include "base/alloc.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/client_internal.h"
#include "gcs/wire_check.h"
#include "proto/ray/ray_syncer.pb-c.h"

static void on_sync_timer(uv_timer_t *timer);

static void on_message(void *arg, struct mb_grpc_stream *s, const ProtobufCMessage *msg)
{
    (void)arg;
    (void)s;
    (void)msg;
}

static void on_end(void *arg, struct mb_grpc_stream *s, int status, const char *detail)
{
    struct mb_gcs *c = arg;

    (void)s;
    c->sync.stream = NULL;
    c->sync.is_unsure = c->watch.on;
    if (c->sync.on && status == MB_GRPC_UNAVAILABLE)
        gcs_next_head(c, c->channel);
    if (c->sync.on)
        mb_info("gcs", "sync stream ended, reconnecting: %s: %s", mb_grpc_status_name(status),
                detail ? detail : "");
    gcs_maybe_closed(c);
}

static const struct mb_grpc_stream_ops stream_ops = {.on_message = on_message, .on_end = on_end};

static int64_t next_version(struct gcs_sync *s)
{
    struct timespec ts;

    clock_gettime(CLOCK_REALTIME, &ts);
    int64_t now = (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
    s->version = now > s->version ? now : s->version + 1;
    return s->version;
}

static int send_view(struct mb_gcs *c, struct mb_err *err)
{
    struct gcs_sync *s = &c->sync;
    Ray__Rpc__Syncer__RaySyncMessage msg = RAY__RPC__SYNCER__RAY_SYNC_MESSAGE__INIT;
    Ray__Rpc__Syncer__RaySyncMessage *messages[] = {&msg};
    Ray__Rpc__Syncer__RaySyncMessageBatch batch = RAY__RPC__SYNCER__RAY_SYNC_MESSAGE_BATCH__INIT;

    msg.version = next_version(s);
    msg.message_type = RAY__RPC__SYNCER__MESSAGE_TYPE__RESOURCE_VIEW;
    msg.sync_message = mb_wire_bytes(s->view.data, s->view.len);
    msg.node_id = mb_wire_bytes(s->node_id, MB_NODE_ID_BYTES);
    batch.n_messages = 1;
    batch.messages = messages;
    const int rc = mb_wire_check(&batch.base, err);
    if (rc != 0)
        return rc;
    return mb_grpc_stream_send(s->stream, mb_gcs_is_modern(c) ? &batch.base : &msg.base, err);
}

static int open_stream(struct mb_gcs *c, struct mb_err *err)
{
    struct gcs_sync *s = &c->sync;
    char hex[2 * MB_NODE_ID_BYTES + 1];
    struct mb_grpc_metadata md = {"node_id", mb_hex(s->node_id, MB_NODE_ID_BYTES, hex)};
    const ProtobufCMessageDescriptor *desc =
        mb_gcs_is_modern(c) ? &ray__rpc__syncer__ray_sync_message_batch__descriptor
                            : &ray__rpc__syncer__ray_sync_message__descriptor;

    return mb_grpc_stream_open(c->channel, "/ray.rpc.syncer.RaySyncer/StartSync", desc, &md, 1, 0,
                               &stream_ops, c, &s->stream, err);
}

static void push(struct mb_gcs *c)
{
    struct gcs_sync *s = &c->sync;
    struct mb_err err = {0};
    int rc = 0;

    if (!s->on || c->state != GCS_CONNECTED)
        return;
    if (!s->stream)
        rc = open_stream(c, &err);
    if (rc == 0)
        rc = send_view(c, &err);
    if (rc != 0)
        mb_warn("gcs", "resource view not sent: %s", err.text);
}

static void on_sync_timer(uv_timer_t *timer)
{
    struct mb_gcs *c = timer->data;

    if (c->sync.is_unsure && c->watch.on)
        gcs_watch_look(c);
    else
        push(c);
}

void gcs_sync_resume(struct mb_gcs *c)
{
    if (!c->sync.is_unsure)
        return;
    c->sync.is_unsure = 0;
    push(c);
}

static int pack_view(struct mb_gcs *c, const struct mb_gcs_view *view, struct mb_err *err)
{
    Ray__Rpc__Syncer__ResourceViewSyncMessage m =
        RAY__RPC__SYNCER__RESOURCE_VIEW_SYNC_MESSAGE__INIT;
    struct mb_arena a = {0};
    struct mb_buf packed = {0};
    int rc = MB_OK;

    m.n_resources_available = view->n_available;
    m.resources_available = mb_wire_resources(
        &a, &ray__rpc__syncer__resource_view_sync_message__resources_available_entry__descriptor,
        view->available, view->n_available);
    m.n_resources_total = view->n_total;
    m.resources_total = mb_wire_resources(
        &a, &ray__rpc__syncer__resource_view_sync_message__resources_total_entry__descriptor,
        view->total, view->n_total);
    m.n_labels = view->n_labels;
    m.labels =
        mb_wire_labels(&a, &ray__rpc__syncer__resource_view_sync_message__labels_entry__descriptor,
                       view->labels, view->n_labels);
    m.idle_duration_ms = view->idle_ms;
    m.is_draining = view->is_draining != 0;
    m.draining_deadline_timestamp_ms =
        view->draining_deadline_unix_ms ? view->draining_deadline_unix_ms : -1;
    if (!m.resources_available || !m.resources_total || !m.labels)
        rc = gcs_no_memory(err);
    else
        rc = mb_wire_check(&m.base, err);
    if (rc == 0) {
        size_t n = protobuf_c_message_get_packed_size(&m.base);
        rc = mb_buf_reserve(&packed, n);
        if (rc == 0) {
            protobuf_c_message_pack(&m.base, packed.data);
            packed.len = n;
            mb_buf_close(&c->sync.view);
            c->sync.view = packed;
        } else {
            rc = gcs_no_memory(err);
        }
    }
    mb_arena_close(&a);
    return rc;
}

int mb_gcs_sync_start(struct mb_gcs *c, const uint8_t node_id[MB_NODE_ID_BYTES],
                      const struct mb_gcs_view *view, struct mb_err *err)
{
    if (c->state != GCS_CONNECTED)
        return mb_err_set(err, MB_ESTATE, "not connected to the GCS at %s", c->address);
    mb_gcs_sync_stop(c);
    int rc = pack_view(c, view, err);
    if (rc != 0)
        return rc;
    memcpy(c->sync.node_id, node_id, MB_NODE_ID_BYTES);
    c->sync.is_unsure = 0;
    c->sync.on = 1;
    /* A stream of an earlier id is still ending: the timer then opens the new one. */
    if (!c->sync.stream)
        push(c);
    uv_timer_start(&c->sync.timer, on_sync_timer, GCS_SYNC_MS, GCS_SYNC_MS);
    return 0;
}

int mb_gcs_sync_renew(struct mb_gcs *c, const struct mb_gcs_view *view, struct mb_err *err)
{
    if (!c->sync.on)
        return mb_err_set(err, MB_ESTATE, "resource sync is not started");
    return pack_view(c, view, err);
}

int mb_gcs_sync_set(struct mb_gcs *c, const struct mb_gcs_view *view, struct mb_err *err)
{
    int rc = mb_gcs_sync_renew(c, view, err);

    if (rc == 0 && c->sync.stream)
        push(c);
    return rc;
}

void mb_gcs_sync_stop(struct mb_gcs *c)
{
    c->sync.on = 0;
    uv_timer_stop(&c->sync.timer);
    if (c->sync.stream)
        mb_grpc_stream_cancel(c->sync.stream);
}

void gcs_sync_init(struct mb_gcs *c)
{
    uv_timer_init(c->loop, &c->sync.timer);
    c->sync.timer.data = c;
    c->timers_open++;
}

void gcs_sync_close(struct mb_gcs *c)
{
    mb_gcs_sync_stop(c);
    uv_close((uv_handle_t *)&c->sync.timer, gcs_timer_closed);
}
