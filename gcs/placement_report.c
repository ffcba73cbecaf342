/*
 * What people and drivers are told about placement groups that wait: the queue in
 * /api/mobula/status, the message of a job whose gang waits, and GangQueue.WhyWaiting, which a
 * driver asks. Nothing here changes anything.
 */
#include <stdio.h>
#include <string.h>
#include "base/clock.h"
#include "base/str.h"
#include "gcs/services.h"
#include "proto/mobula/queue.pb-c.h"

enum {
    QUEUE_SHOWN_MAX = 100, /* a reason looks at every node */
    ID_SHOWN_BYTES = 6     /* as in mobula status */
};

/* Agents of one machine, and machines of one image, may have one name. */
static int has_namesake(const struct mb_head *h, const struct head_node *n)
{
    for (size_t i = 0; i < h->n_nodes; i++)
        if (h->nodes[i] != n && head_node_alive(h->nodes[i]) &&
            strcmp(h->nodes[i]->info->node_name, n->info->node_name) == 0)
            return 1;
    return 0;
}

static const char *name_of(void *arg, const uint8_t node_id[MB_NODE_ID_BYTES])
{
    struct mb_head *h = arg;
    const struct head_node *n = head_node_find_id(h, node_id);
    int is_named = n && *n->info->node_name;
    char id[2 * ID_SHOWN_BYTES + 1];

    mb_hex(node_id, ID_SHOWN_BYTES, id);
    if (is_named && !has_namesake(h, n))
        return n->info->node_name;
    if (is_named)
        snprintf(h->name_scratch, sizeof h->name_scratch, "%.100s (%s)", n->info->node_name, id);
    else
        snprintf(h->name_scratch, sizeof h->name_scratch, "%s", id);
    return h->name_scratch;
}

static int reason_of(struct mb_head *h, const uint8_t *id, struct mb_buf *out)
{
    return mb_placement_reason(h->placement, id, name_of, h, out);
}

/* A bundle's resources; those of a gang are all alike. */
static json_t *bundle_json(const struct mb_gcs_pg *pg)
{
    json_t *out = json_object();

    for (size_t r = 0; r < pg->bundles[0].n_resources; r++)
        json_object_set_new(out, pg->bundles[0].resources[r].name,
                            json_real(pg->bundles[0].resources[r].amount));
    return out;
}

json_t *head_placement_queue_json(struct mb_head *h)
{
    uint64_t now = mb_mono_ms();
    json_t *out = json_array();

    for (size_t i = 0; i < mb_placement_count(h->placement); i++) {
        struct mb_place_info info;
        const struct mb_gcs_pg *pg = mb_placement_at(h->placement, i, &info);
        char id[2 * MB_PG_ID_BYTES + 1], job[2 * MB_JOB_ID_BYTES + 1];
        struct mb_buf reason = {0};

        if (!info.is_waiting)
            continue;
        if (json_array_size(out) == QUEUE_SHOWN_MAX)
            break;
        (void)reason_of(h, pg->id, &reason);
        json_array_append_new(
            out, json_pack("{s:s, s:s%, s:s, s:i, s:i, s:I, s:o, s:I, s:i, s:s}",
                           "placement_group_id", mb_hex(pg->id, MB_PG_ID_BYTES, id), "name",
                           pg->name, mb_placement_name_bytes(pg->name), "job_id",
                           mb_hex(pg->job_id, MB_JOB_ID_BYTES, job), "priority", info.priority,
                           "position", (int)info.ahead + 1, "num_bundles",
                           (json_int_t)pg->n_bundles, "bundle", bundle_json(pg), "waited_ms",
                           (json_int_t)(info.waiting_since_ms && now > info.waiting_since_ms
                                            ? now - info.waiting_since_ms
                                            : 0),
                           "overtaken", (int)info.overtaken, "reason", mb_buf_str(&reason)));
        mb_buf_close(&reason);
    }
    return out;
}

const char *head_placement_order_name(const struct mb_head *h)
{
    return h->gang_order == MB_PLACE_STRICT ? "strict" : "backfill";
}

void head_placement_tell(struct mb_head *h, json_t *details)
{
    const char *status = json_string_value(json_object_get(details, "status"));
    const char *job = json_string_value(json_object_get(details, "job_id"));
    uint8_t id[MB_JOB_ID_BYTES];

    if (!status || strcmp(status, "RUNNING") != 0 || !job ||
        strlen(job) != (size_t)2 * MB_JOB_ID_BYTES || mb_unhex(job, id, sizeof id) != 0)
        return;
    for (size_t i = 0; i < mb_placement_count(h->placement); i++) {
        const struct mb_gcs_pg *pg = mb_placement_at(h->placement, i, NULL);
        struct mb_buf text = {0};

        if (memcmp(pg->job_id, id, sizeof id) == 0 && reason_of(h, pg->id, &text) == 0 &&
            text.len > 0)
            json_object_set_new(details, "message",
                                json_sprintf("Job is currently running: %s", mb_buf_str(&text)));
        mb_buf_close(&text);
    }
}

static void why_waiting(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    ProtobufCBinaryData id = ((const Mobula__V1__WhyWaitingRequest *)request)->placement_group_id;
    Mobula__V1__WhyWaitingReply reply = MOBULA__V1__WHY_WAITING_REPLY__INIT;
    struct mb_place_info info = {0};
    struct mb_buf reason = {0};

    if (!head_admits(h, req))
        return;
    if (id.len == MB_PG_ID_BYTES && mb_placement_get(h->placement, id.data, &info) &&
        reason_of(h, id.data, &reason) == 0) {
        reply.is_waiting = info.is_waiting;
        reply.ahead = info.ahead;
        reply.nodes = (uint32_t)mb_placement_nodes_for(h->placement, id.data);
        reply.reason = mb_wire_str(mb_buf_str(&reason));
    }
    mb_grpc_reply(req, &reply.base);
    mb_buf_close(&reason);
}

int head_placement_report_methods(struct mb_head *h, struct mb_err *err)
{
    static const struct mb_grpc_method method = {"/mobula.v1.GangQueue/WhyWaiting",
                                                 &mobula__v1__why_waiting_request__descriptor,
                                                 why_waiting, NULL, 0};

    return mb_grpc_server_add(h->server, &method, 1, h, err);
}
