/*
 *  1. Asked: NODE_DIR/drain is written, the cluster hears that the node drains, no driver is
 * started here any more, gangs are told that the node goes.
 *  2. The file cannot be written: the drain goes on; the log says that a restarted agent would take
 *     work again.
 *  3. A restarted agent finds the file: the same again for what it adopted.
 */
#include "agent/drain_service.h"

#include <jansson.h>
#include <string.h>
#include "agent/callers.h"
#include "base/alloc.h"
#include "base/fs.h"
#include "base/log.h"
#include "proto/mobula/agent.pb-c.h"

enum { FILE_MAX = 4096, GANGS_MAX = 256 };

static void begin(struct mb_drain_service *s, uint64_t unix_ms)
{
    s->drivers->is_stopping = 1;
    mb_node_drain(s->node, (int64_t)unix_ms);
    mb_gangs_drain(s->gangs, MB_DEADLINE_DRAIN, unix_ms, "the node is drained");
}

static void remember(const struct mb_drain_service *s, uint64_t unix_ms)
{
    json_t *o = json_pack("{s:I}", "deadline_unix_ms", (json_int_t)unix_ms);
    char *path = mb_path_join(s->node_dir, "drain"), *text = json_dumps(o, 0);
    struct mb_err err = {.text = "no memory"};

    if (path == NULL || text == NULL ||
        mb_fs_write_atomic(path, text, strlen(text), 0644, &err) != MB_OK)
        mb_warn("drain", "a restarted agent would take work again: %s", err.text);
    json_decref(o);
    mb_free(text);
    mb_free(path);
}

void mb_drain_service_resume(struct mb_drain_service *s)
{
    char *path = mb_path_join(s->node_dir, "drain");
    struct mb_buf text = {0};
    json_t *o = NULL;

    if (path != NULL && mb_fs_exists(path)) {
        if (mb_fs_read(path, FILE_MAX, &text, NULL) == MB_OK)
            o = json_loads(mb_buf_str(&text), 0, NULL);
        mb_info("drain", "this node was drained before its agent was restarted");
        begin(s, (uint64_t)json_integer_value(json_object_get(o, "deadline_unix_ms")));
    }
    json_decref(o);
    mb_buf_close(&text);
    mb_free(path);
}

static size_t fill_gangs(const struct mb_gangs *g, Mobula__V1__DrainGang *list,
                         Mobula__V1__DrainGang **at)
{
    size_t n = 0;

    for (size_t i = 0; i < mb_gangs_count(g) && n < GANGS_MAX; i++) {
        struct mb_gang_info info;

        mb_gangs_info(g, i, &info);
        if (info.state == MB_GANG_ENDED)
            continue;
        mobula__v1__drain_gang__init(&list[n]);
        list[n].job_id = (char *)(uintptr_t)info.job_id;
        list[n].attempt = info.attempt;
        list[n].state = (char *)(uintptr_t)mb_gang_state_name(info.state);
        list[n].ranks = info.ranks_running;
        list[n].saved_iteration = info.saved;
        list[n].durable_iteration = info.durable;
        list[n].done_bytes = info.pending_done_bytes;
        list[n].total_bytes = info.pending_total_bytes;
        at[n] = &list[n];
        n++;
    }
    return n;
}

static void reply(struct mb_drain_service *s, struct mb_grpc_req *req)
{
    Mobula__V1__DrainReply r = MOBULA__V1__DRAIN_REPLY__INIT;
    Mobula__V1__DrainGang list[GANGS_MAX], *at[GANGS_MAX];
    const char *const *lost;

    r.draining = mb_node_is_draining(s->node);
    r.deadline_unix_ms = (uint64_t)mb_node_drain_deadline_ms(s->node);
    r.gangs = at;
    r.n_gangs = fill_gangs(s->gangs, list, at);
    r.n_lost = mb_gangs_lost(s->gangs, &lost);
    r.lost = (char **)(uintptr_t)lost;
    mb_grpc_reply(req, &r.base);
}

static void on_drain(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_drain_service *s = arg;
    const Mobula__V1__DrainRequest *q = (const void *)request;
    uint64_t known = (uint64_t)mb_node_drain_deadline_ms(s->node);
    uint64_t unix_ms = q->deadline_unix_ms;

    if (!q->look && !s->drivers->callers_are_trusted &&
        !mb_caller_is_local(mb_grpc_req_peer(req), s->drivers->node_ip)) {
        mb_grpc_reply_error(req, MB_GRPC_PERMISSION_DENIED, MB_CALLER_NEEDS_TOKEN);
        return;
    }
    if (!q->look) {
        if (mb_node_is_draining(s->node) && known != 0 && (unix_ms == 0 || known < unix_ms))
            unix_ms = known;
        mb_info("drain", "asked by %s reason=%s", mb_grpc_req_peer(req), q->reason);
        remember(s, unix_ms);
        begin(s, unix_ms);
    }
    reply(s, req);
}

int mb_drain_service_add(struct mb_grpc_server *srv, struct mb_drain_service *s, struct mb_err *err)
{
    static const struct mb_grpc_method methods[] = {
        {"/mobula.v1.NodeAgent/Drain", &mobula__v1__drain_request__descriptor, on_drain, NULL, 0},
    };

    return mb_grpc_server_add(srv, methods, 1, s, err);
}
