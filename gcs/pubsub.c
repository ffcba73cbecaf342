/*
 * Pub/sub, the least that Ray's own tools touch: publishing and subscribing succeed, a poll is held
 * for 10 s and then answered without messages, which its client repeats. Nothing is published from
 * here: our agents learn by polling what they need. Of what is published here one part is read:
 * what a node with GPUs says of them stays with the node, for status. Bound: HEAD_POLLS_MAX polls
 * are held; further ones are answered at once.
 */
#include <jansson.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "gcs/services.h"

enum { HOLD_MS = 10000, GPUS_MAX = 64 };

/* 1 if the page of a node has GPUs; they replace what the node had. */
static int take_page(struct mb_head *h, const Ray__Rpc__PubMessage *m)
{
    static const char prefix[] = "RAY_REPORTER:";
    const size_t n_prefix = sizeof prefix - 1;
    struct head_node *n;
    char hex[2 * MB_NODE_ID_BYTES + 1];
    json_t *page, *gpus;
    int kept;

    if (m->inner_message_case != RAY__RPC__PUB_MESSAGE__INNER_MESSAGE_NODE_RESOURCE_USAGE_MESSAGE ||
        m->key_id.len != n_prefix + sizeof hex - 1 || memcmp(m->key_id.data, prefix, n_prefix) != 0)
        return 0;
    memcpy(hex, m->key_id.data + n_prefix, sizeof hex - 1);
    hex[sizeof hex - 1] = '\0';
    n = head_node_find_hex(h, hex);
    page = n ? json_loads(m->node_resource_usage_message->json, 0, NULL) : NULL;
    gpus = json_object_get(page, MB_GCS_PAGE_GPUS);
    kept = json_array_size(gpus) > 0 && json_array_size(gpus) <= GPUS_MAX;
    if (kept) {
        json_decref(n->gpus);
        n->gpus = json_incref(gpus);
    }
    json_decref(page);
    return kept;
}

static void publish(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    const Ray__Rpc__GcsPublishRequest *m = (const Ray__Rpc__GcsPublishRequest *)request;
    Ray__Rpc__GcsPublishReply reply = RAY__RPC__GCS_PUBLISH_REPLY__INIT;
    Ray__Rpc__GcsStatus ok = RAY__RPC__GCS_STATUS__INIT;
    int is_read = 0;

    if (!head_admits(arg, req))
        return;
    for (size_t i = 0; i < m->n_pub_messages; i++)
        is_read |= take_page(arg, m->pub_messages[i]);
    if (!is_read)
        ok.message = mb_wire_str(MB_GCS_NO_READERS); /* our nodes need not go on */
    reply.status = &ok;
    mb_grpc_reply(req, &reply.base);
}

static void command_batch(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    Ray__Rpc__GcsSubscriberCommandBatchReply reply =
        RAY__RPC__GCS_SUBSCRIBER_COMMAND_BATCH_REPLY__INIT;
    Ray__Rpc__GcsStatus ok = RAY__RPC__GCS_STATUS__INIT;

    (void)request;
    if (!head_admits(arg, req))
        return;
    reply.status = &ok;
    mb_grpc_reply(req, &reply.base);
}

static void answer_poll(struct mb_grpc_req *req)
{
    static const uint8_t publisher[MB_NODE_ID_BYTES] = {
        0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
        0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
    Ray__Rpc__GcsSubscriberPollReply reply = RAY__RPC__GCS_SUBSCRIBER_POLL_REPLY__INIT;
    Ray__Rpc__GcsStatus ok = RAY__RPC__GCS_STATUS__INIT;

    reply.status = &ok;
    reply.publisher_id = mb_wire_bytes(publisher, sizeof publisher);
    mb_grpc_reply(req, &reply.base);
}

static void poll(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    struct head_poll *p;

    (void)request;
    if (!head_admits(h, req))
        return;
    p = h->n_polls < HEAD_POLLS_MAX ? mb_calloc(1, sizeof *p) : NULL;
    if (!p) {
        answer_poll(req);
        return;
    }
    p->req = req;
    p->until_ms = mb_mono_ms() + HOLD_MS;
    p->next = h->polls;
    h->polls = p;
    h->n_polls++;
}

void head_pubsub_tick(struct mb_head *h, uint64_t now_ms)
{
    for (struct head_poll **at = &h->polls; *at;) {
        struct head_poll *p = *at;

        if (p->until_ms > now_ms) {
            at = &p->next;
            continue;
        }
        *at = p->next;
        h->n_polls--;
        answer_poll(p->req);
        mb_free(p);
    }
}

void head_pubsub_close(struct mb_head *h)
{
    head_pubsub_tick(h, UINT64_MAX);
}

int head_pubsub_methods(struct mb_head *h, struct mb_err *err)
{
#define CONTROL "/ray.rpc.ControlPlanePubSubGcsService/"
#define OBSERVE "/ray.rpc.ObservabilityPubSubService/"
    static const struct mb_grpc_method methods[] = {
        {CONTROL "GcsPublish", &ray__rpc__gcs_publish_request__descriptor, publish, NULL, 0},
        {CONTROL "GcsSubscriberCommandBatch",
         &ray__rpc__gcs_subscriber_command_batch_request__descriptor, command_batch, NULL, 0},
        {CONTROL "GcsSubscriberPoll", &ray__rpc__gcs_subscriber_poll_request__descriptor, poll,
         NULL, 0},
        {OBSERVE "GcsPublish", &ray__rpc__gcs_publish_request__descriptor, publish, NULL, 0},
        {OBSERVE "GcsSubscriberCommandBatch",
         &ray__rpc__gcs_subscriber_command_batch_request__descriptor, command_batch, NULL, 0},
        {OBSERVE "GcsSubscriberPoll", &ray__rpc__gcs_subscriber_poll_request__descriptor, poll,
         NULL, 0},
    };
#undef CONTROL
#undef OBSERVE
    return mb_grpc_server_add(h->server, methods, sizeof methods / sizeof methods[0], h, err);
}
