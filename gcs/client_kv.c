/* Internal KV. NotFound is a status inside an OK reply; the core makes it MB_ENOENT. */
#include <string.h>
#include "gcs/client_internal.h"

static void complete_value(struct mb_gcs_op *op, const struct mb_err *err,
                           const ProtobufCMessage *reply)
{
    mb_gcs_value_cb cb = (mb_gcs_value_cb)op->cb;
    const Ray__Rpc__InternalKVGetReply *m = (const Ray__Rpc__InternalKVGetReply *)reply;
    struct mb_arena a = {0};
    struct mb_err e = *err;
    const void *value = NULL;

    if (m) {
        value = mb_arena_dup(&a, m->value.data, m->value.len); /* the callback is promised a NUL */
        if (!value)
            gcs_no_memory(&e);
    }
    cb(op->cb_arg, &e, value, value ? m->value.len : 0);
    mb_arena_close(&a);
}

int mb_gcs_kv_get(struct mb_gcs *c, const char *ns, const char *key, uint64_t timeout_ms,
                  mb_gcs_value_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err)
{
    static const struct gcs_method method = {"/ray.rpc.InternalKVGcsService/InternalKVGet",
                                             &ray__rpc__internal_kvget_reply__descriptor,
                                             complete_value};
    Ray__Rpc__InternalKVGetRequest req = RAY__RPC__INTERNAL_KVGET_REQUEST__INIT;

    req.namespace_ = mb_wire_bytes(ns, strlen(ns));
    req.key = mb_wire_bytes(key, strlen(key));
    return gcs_repeatable(c, &method, &req.base, timeout_ms, (gcs_any_cb)cb, arg, op, err);
}

static void complete_put(struct mb_gcs_op *op, const struct mb_err *err,
                         const ProtobufCMessage *reply)
{
    const Ray__Rpc__InternalKVPutReply *m = (const Ray__Rpc__InternalKVPutReply *)reply;

    ((mb_gcs_count_cb)op->cb)(op->cb_arg, err, m ? m->added : 0);
}

int mb_gcs_kv_put(struct mb_gcs *c, const char *ns, const char *key, const void *value, size_t n,
                  int overwrite, uint64_t timeout_ms, mb_gcs_count_cb cb, void *arg,
                  struct mb_gcs_op **op, struct mb_err *err)
{
    Ray__Rpc__InternalKVPutRequest req = RAY__RPC__INTERNAL_KVPUT_REQUEST__INIT;

    req.namespace_ = mb_wire_bytes(ns, strlen(ns));
    req.key = mb_wire_bytes(key, strlen(key));
    req.value = mb_wire_bytes(value, n);
    req.overwrite = overwrite != 0;
    return gcs_start(c,
                     &(struct gcs_call){.method = "/ray.rpc.InternalKVGcsService/InternalKVPut",
                                        .request = &req.base,
                                        .reply_desc = &ray__rpc__internal_kvput_reply__descriptor,
                                        .timeout_ms = timeout_ms,
                                        .repeatable = overwrite,
                                        .complete = complete_put,
                                        .cb = (gcs_any_cb)cb,
                                        .cb_arg = arg},
                     op, err);
}

static void complete_del(struct mb_gcs_op *op, const struct mb_err *err,
                         const ProtobufCMessage *reply)
{
    const Ray__Rpc__InternalKVDelReply *m = (const Ray__Rpc__InternalKVDelReply *)reply;

    ((mb_gcs_count_cb)op->cb)(op->cb_arg, err, m ? m->deleted_num : 0);
}

int mb_gcs_kv_del(struct mb_gcs *c, const char *ns, const char *key, int by_prefix,
                  uint64_t timeout_ms, mb_gcs_count_cb cb, void *arg, struct mb_gcs_op **op,
                  struct mb_err *err)
{
    static const struct gcs_method method = {"/ray.rpc.InternalKVGcsService/InternalKVDel",
                                             &ray__rpc__internal_kvdel_reply__descriptor,
                                             complete_del};
    Ray__Rpc__InternalKVDelRequest req = RAY__RPC__INTERNAL_KVDEL_REQUEST__INIT;

    req.namespace_ = mb_wire_bytes(ns, strlen(ns));
    req.key = mb_wire_bytes(key, strlen(key));
    req.del_by_prefix = by_prefix != 0;
    return gcs_repeatable(c, &method, &req.base, timeout_ms, (gcs_any_cb)cb, arg, op, err);
}

static void complete_exists(struct mb_gcs_op *op, const struct mb_err *err,
                            const ProtobufCMessage *reply)
{
    const Ray__Rpc__InternalKVExistsReply *m = (const Ray__Rpc__InternalKVExistsReply *)reply;

    ((mb_gcs_count_cb)op->cb)(op->cb_arg, err, m ? m->exists : 0);
}

int mb_gcs_kv_exists(struct mb_gcs *c, const char *ns, const char *key, uint64_t timeout_ms,
                     mb_gcs_count_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err)
{
    static const struct gcs_method method = {"/ray.rpc.InternalKVGcsService/InternalKVExists",
                                             &ray__rpc__internal_kvexists_reply__descriptor,
                                             complete_exists};
    Ray__Rpc__InternalKVExistsRequest req = RAY__RPC__INTERNAL_KVEXISTS_REQUEST__INIT;

    req.namespace_ = mb_wire_bytes(ns, strlen(ns));
    req.key = mb_wire_bytes(key, strlen(key));
    return gcs_repeatable(c, &method, &req.base, timeout_ms, (gcs_any_cb)cb, arg, op, err);
}

static void complete_keys(struct mb_gcs_op *op, const struct mb_err *err,
                          const ProtobufCMessage *reply)
{
    mb_gcs_keys_cb cb = (mb_gcs_keys_cb)op->cb;
    const Ray__Rpc__InternalKVKeysReply *m = (const Ray__Rpc__InternalKVKeysReply *)reply;
    struct mb_arena a = {0};
    struct mb_err e = *err;
    const char **keys = NULL;
    size_t n = m ? m->n_results : 0;

    if (m && !(keys = mb_arena_calloc(&a, n ? n : 1, sizeof *keys)))
        gcs_no_memory(&e);
    for (size_t i = 0; e.code == 0 && i < n; i++) {
        keys[i] = mb_arena_dup(&a, m->results[i].data, m->results[i].len);
        if (!keys[i])
            gcs_no_memory(&e);
    }
    cb(op->cb_arg, &e, e.code == 0 ? keys : NULL, e.code == 0 ? n : 0);
    mb_arena_close(&a);
}

int mb_gcs_kv_keys(struct mb_gcs *c, const char *ns, const char *prefix, uint64_t timeout_ms,
                   mb_gcs_keys_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err)
{
    static const struct gcs_method method = {"/ray.rpc.InternalKVGcsService/InternalKVKeys",
                                             &ray__rpc__internal_kvkeys_reply__descriptor,
                                             complete_keys};
    Ray__Rpc__InternalKVKeysRequest req = RAY__RPC__INTERNAL_KVKEYS_REQUEST__INIT;

    req.namespace_ = mb_wire_bytes(ns, strlen(ns));
    req.prefix = mb_wire_bytes(prefix, strlen(prefix));
    return gcs_repeatable(c, &method, &req.base, timeout_ms, (gcs_any_cb)cb, arg, op, err);
}
