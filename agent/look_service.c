/*
 *  1. A store is read with this node's keys: without the cluster's token only callers of this
 *     machine may ask.
 *  2. The store is opened, its inventory taken (upload/inventory.h), the newest whole iteration up
 *     to the pointer told.
 *  3. The service closes: callers are answered at once, also those that come before the server
 * ends; their stores end by themselves.
 */
#include "agent/look_service.h"

#include "agent/callers.h"
#include "agent/upload/inventory.h"
#include "base/alloc.h"
#include "base/log.h"
#include "base/s3/store.h"
#include "proto/mobula/agent.pb-c.h"

struct mb_look {
    struct mb_look_service *s; /* NULL: the caller was answered, and this goes with its store */
    struct mb_grpc_req *req;
    struct mb_store *store;
};

static void answer(struct mb_grpc_req *req, const struct mb_err *err,
                   const struct mb_inventory *inv)
{
    Mobula__V1__LookReply reply = MOBULA__V1__LOOK_REPLY__INIT;

    reply.latest = reply.newest_whole = -1;
    if (err->code != MB_OK) {
        reply.code = err->code;
        reply.text = (char *)(uintptr_t)err->text;
    } else {
        reply.latest = inv->latest;
        for (size_t i = 0; i < inv->n; i++)
            if (inv->iterations[i].iteration <= inv->latest &&
                inv->iterations[i].state == MB_INVENTORY_WHOLE)
                reply.newest_whole = inv->iterations[i].iteration;
    }
    mb_grpc_reply(req, &reply.base);
}

static void let_go(struct mb_look *l)
{
    for (size_t i = 0; i < MB_LOOKS_MAX; i++)
        if (l->s->looks[i] == l)
            l->s->looks[i] = NULL;
    l->s = NULL;
}

static void on_inventory(void *arg, const struct mb_err *err, struct mb_inventory *inv)
{
    struct mb_look *l = arg;

    if (l->s != NULL) {
        answer(l->req, err, inv);
        let_go(l);
        mb_store_close(l->store, NULL, NULL);
    }
    mb_inventory_close(inv);
    mb_free(l);
}

static int start(struct mb_look_service *s, struct mb_look **slot, struct mb_grpc_req *req,
                 const char *url, struct mb_err *err)
{
    struct mb_look *l = mb_calloc(1, sizeof(*l));
    int rc;

    if (l == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory to look at %s", url);
    l->s = s;
    l->req = req;
    rc = mb_store_open(s->loop, url, &l->store, err);
    if (rc == MB_OK) {
        rc = mb_inventory_start(l->store, on_inventory, l, err);
        if (rc != MB_OK)
            mb_store_close(l->store, NULL, NULL);
    }
    if (rc == MB_OK)
        *slot = l;
    else
        mb_free(l);
    return rc;
}

static void on_look(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_look_service *s = arg;
    const Mobula__V1__LookRequest *q = (const void *)request;
    struct mb_look **slot = NULL;
    struct mb_err err = {0};

    if (!s->callers_are_trusted && !mb_caller_is_local(mb_grpc_req_peer(req), s->node_ip)) {
        mb_warn("look", "refused %s: %s", mb_grpc_req_peer(req), MB_CALLER_NEEDS_TOKEN);
        mb_grpc_reply_error(req, MB_GRPC_PERMISSION_DENIED, "%s", MB_CALLER_NEEDS_TOKEN);
        return;
    }
    for (size_t i = 0; slot == NULL && i < MB_LOOKS_MAX; i++)
        if (s->looks[i] == NULL)
            slot = &s->looks[i];
    if (s->is_closing)
        mb_grpc_reply_error(req, MB_GRPC_UNAVAILABLE, "the agent ends");
    else if (slot == NULL)
        mb_grpc_reply_error(req, MB_GRPC_UNAVAILABLE, "%d others look at stores", MB_LOOKS_MAX);
    else if (start(s, slot, req, q->url, &err) != MB_OK)
        answer(req, &err, NULL);
}

int mb_look_service_add(struct mb_grpc_server *srv, struct mb_look_service *s, struct mb_err *err)
{
    static const struct mb_grpc_method methods[] = {
        {"/mobula.v1.NodeAgent/Look", &mobula__v1__look_request__descriptor, on_look, NULL, 0},
    };

    return mb_grpc_server_add(srv, methods, 1, s, err);
}

void mb_look_service_close(struct mb_look_service *s)
{
    s->is_closing = 1;
    for (size_t i = 0; i < MB_LOOKS_MAX; i++) {
        struct mb_look *l = s->looks[i];

        if (l == NULL)
            continue;
        mb_grpc_reply_error(l->req, MB_GRPC_UNAVAILABLE, "the agent ends");
        let_go(l);
        mb_store_close(l->store, NULL, NULL);
    }
}
