/*
 * InternalKVGcsService on the store. Reads come from its mirror; a write is answered after its
 * commit. "Not found" is an OK reply with status code 17, as Ray has it.
 */
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "gcs/services.h"

static struct mb_blob blob(ProtobufCBinaryData b)
{
    return head_blob(b.data, b.len);
}

static void kv_get(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Ray__Rpc__InternalKVGetRequest *m = (const Ray__Rpc__InternalKVGetRequest *)request;
    Ray__Rpc__InternalKVGetReply reply = RAY__RPC__INTERNAL_KVGET_REPLY__INIT;
    Ray__Rpc__GcsStatus status = RAY__RPC__GCS_STATUS__INIT;
    struct mb_blob value;

    if (!head_admits(h, req))
        return;
    reply.status = &status;
    if (mb_tables_get(h->store, MB_TABLES_KV, blob(m->namespace_), blob(m->key), &value)) {
        reply.value = mb_wire_bytes(value.p, value.n);
    } else {
        status.code = HEAD_STATUS_NOT_FOUND;
        status.message = mb_wire_str("Failed to find the key");
    }
    mb_grpc_reply(req, &reply.base);
}

static void kv_multi_get(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Ray__Rpc__InternalKVMultiGetRequest *m =
        (const Ray__Rpc__InternalKVMultiGetRequest *)request;
    Ray__Rpc__InternalKVMultiGetReply reply = RAY__RPC__INTERNAL_KVMULTI_GET_REPLY__INIT;
    Ray__Rpc__GcsStatus status = RAY__RPC__GCS_STATUS__INIT;
    struct mb_arena a = {0};

    if (!head_admits(h, req))
        return;
    Ray__Rpc__MapFieldEntry *rows = mb_arena_calloc(&a, m->n_keys + 1, sizeof *rows);
    reply.results = mb_arena_calloc(&a, m->n_keys + 1, sizeof *reply.results);
    for (size_t i = 0; rows && reply.results && i < m->n_keys; i++) {
        struct mb_blob value;
        Ray__Rpc__MapFieldEntry *row = &rows[reply.n_results];
        if (!mb_tables_get(h->store, MB_TABLES_KV, blob(m->namespace_), blob(m->keys[i]), &value))
            continue;
        ray__rpc__map_field_entry__init(row);
        row->key = m->keys[i];
        row->value = mb_wire_bytes(value.p, value.n);
        reply.results[reply.n_results++] = row;
    }
    reply.status = &status;
    if (rows && reply.results)
        mb_grpc_reply(req, &reply.base);
    else
        mb_grpc_reply_error(req, MB_GRPC_RESOURCE_EXHAUSTED, "out of memory");
    mb_arena_close(&a);
}

static void kv_put(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Ray__Rpc__InternalKVPutRequest *m = (const Ray__Rpc__InternalKVPutRequest *)request;
    Ray__Rpc__InternalKVPutReply reply = RAY__RPC__INTERNAL_KVPUT_REPLY__INIT;
    Ray__Rpc__GcsStatus status = RAY__RPC__GCS_STATUS__INIT;
    struct mb_err err = {0};

    if (!head_admits(h, req))
        return;
    int exists = mb_tables_get(h->store, MB_TABLES_KV, blob(m->namespace_), blob(m->key), NULL);
    if ((!exists || m->overwrite) &&
        mb_tables_put(h->store, MB_TABLES_KV, blob(m->namespace_), blob(m->key), blob(m->value),
                      NULL, NULL, &err) != 0) {
        head_reply_err(req, &err);
        return;
    }
    reply.status = &status;
    reply.added = !exists;
    head_reply_committed(h, req, &reply.base);
}

struct keys {
    struct mb_arena a;
    ProtobufCBinaryData *keys;
    size_t n, cap;
};

/* Copies the key: a deletion follows while the list is used. */
static int collect(void *arg, struct mb_blob key, struct mb_blob value)
{
    struct keys *k = arg;

    (void)value;
    if (k->n == k->cap) {
        size_t cap = k->cap ? 2 * k->cap : 64;
        ProtobufCBinaryData *bigger = mb_arena_calloc(&k->a, cap, sizeof *bigger);
        if (!bigger)
            return MB_ENOMEM;
        if (k->n > 0)
            memcpy(bigger, k->keys, k->n * sizeof *bigger);
        k->keys = bigger;
        k->cap = cap;
    }
    void *copy = mb_arena_dup(&k->a, key.p, key.n);
    if (!copy)
        return MB_ENOMEM;
    k->keys[k->n++] = mb_wire_bytes(copy, key.n);
    return 0;
}

static void kv_del(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Ray__Rpc__InternalKVDelRequest *m = (const Ray__Rpc__InternalKVDelRequest *)request;
    Ray__Rpc__InternalKVDelReply reply = RAY__RPC__INTERNAL_KVDEL_REPLY__INIT;
    Ray__Rpc__GcsStatus status = RAY__RPC__GCS_STATUS__INIT;
    struct keys k = {0};
    struct mb_err err = {0};
    int rc = 0;

    if (!head_admits(h, req))
        return;
    if (m->del_by_prefix)
        rc = mb_tables_each(h->store, MB_TABLES_KV, blob(m->namespace_), blob(m->key), collect, &k);
    else if (mb_tables_get(h->store, MB_TABLES_KV, blob(m->namespace_), blob(m->key), NULL))
        rc = collect(&k, blob(m->key), head_blob(NULL, 0));
    if (rc != 0)
        mb_err_set(&err, rc, "out of memory");
    for (size_t i = 0; rc == 0 && i < k.n; i++)
        rc = mb_tables_del(h->store, MB_TABLES_KV, blob(m->namespace_), blob(k.keys[i]), NULL, NULL,
                           &err);
    reply.status = &status;
    reply.deleted_num = (int32_t)k.n;
    if (rc == 0)
        head_reply_committed(h, req, &reply.base);
    else
        head_reply_err(req, &err);
    mb_arena_close(&k.a);
}

static void kv_exists(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Ray__Rpc__InternalKVExistsRequest *m = (const Ray__Rpc__InternalKVExistsRequest *)request;
    Ray__Rpc__InternalKVExistsReply reply = RAY__RPC__INTERNAL_KVEXISTS_REPLY__INIT;
    Ray__Rpc__GcsStatus status = RAY__RPC__GCS_STATUS__INIT;

    if (!head_admits(h, req))
        return;
    reply.status = &status;
    reply.exists = mb_tables_get(h->store, MB_TABLES_KV, blob(m->namespace_), blob(m->key), NULL);
    mb_grpc_reply(req, &reply.base);
}

static void kv_keys(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Ray__Rpc__InternalKVKeysRequest *m = (const Ray__Rpc__InternalKVKeysRequest *)request;
    Ray__Rpc__InternalKVKeysReply reply = RAY__RPC__INTERNAL_KVKEYS_REPLY__INIT;
    Ray__Rpc__GcsStatus status = RAY__RPC__GCS_STATUS__INIT;
    struct keys k = {0};

    if (!head_admits(h, req))
        return;
    int rc =
        mb_tables_each(h->store, MB_TABLES_KV, blob(m->namespace_), blob(m->prefix), collect, &k);
    reply.status = &status;
    reply.n_results = k.n;
    reply.results = k.keys;
    if (rc == 0)
        mb_grpc_reply(req, &reply.base);
    else
        mb_grpc_reply_error(req, MB_GRPC_RESOURCE_EXHAUSTED, "out of memory");
    mb_arena_close(&k.a);
}

/* A node of Ray's insists on these two, and spills below its own session directory when the one
 * that it is told is the head's. Owned by the caller: jansson's, free(). */
static char *internal_config(const struct mb_head *h)
{
    json_t *spill = json_pack("{s:s, s:{s:[s]}}", "type", "filesystem", "params", "directory_path",
                              h->session_dir);
    char *text = json_dumps(spill, JSON_COMPACT), *config;
    json_t *all = json_pack("{s:b, s:s?}", "automatic_object_spilling_enabled", 1,
                            "object_spilling_config", text);

    config = json_dumps(all, JSON_COMPACT);
    json_decref(spill);
    json_decref(all);
    free(text);
    return config;
}

static void get_internal_config(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    Ray__Rpc__GetInternalConfigReply reply = RAY__RPC__GET_INTERNAL_CONFIG_REPLY__INIT;
    Ray__Rpc__GcsStatus status = RAY__RPC__GCS_STATUS__INIT;

    (void)request;
    if (!head_admits(arg, req))
        return;
    char *config = internal_config(arg);
    reply.status = &status;
    reply.config = mb_wire_str(config ? config : "{}"); /* every other setting has its default */
    mb_grpc_reply(req, &reply.base);
    free(config);
}

int head_kv_methods(struct mb_head *h, struct mb_err *err)
{
#define SERVICE "/ray.rpc.InternalKVGcsService/"
    static const struct mb_grpc_method methods[] = {
        {SERVICE "InternalKVGet", &ray__rpc__internal_kvget_request__descriptor, kv_get, NULL, 0},
        {SERVICE "InternalKVMultiGet", &ray__rpc__internal_kvmulti_get_request__descriptor,
         kv_multi_get, NULL, 0},
        {SERVICE "InternalKVPut", &ray__rpc__internal_kvput_request__descriptor, kv_put, NULL, 0},
        {SERVICE "InternalKVDel", &ray__rpc__internal_kvdel_request__descriptor, kv_del, NULL, 0},
        {SERVICE "InternalKVExists", &ray__rpc__internal_kvexists_request__descriptor, kv_exists,
         NULL, 0},
        {SERVICE "InternalKVKeys", &ray__rpc__internal_kvkeys_request__descriptor, kv_keys, NULL,
         0},
        {SERVICE "GetInternalConfig", &ray__rpc__get_internal_config_request__descriptor,
         get_internal_config, NULL, 0},
    };
#undef SERVICE
    return mb_grpc_server_add(h->server, methods, sizeof methods / sizeof methods[0], h, err);
}
