/*
 * Every field of a message and of those in it, by the descriptors that protobuf-c has of them.
 *
 *  1. An id: bytes in a field whose name says what it is of. It has its length; it may be left out
 * only where `optional` has its field.
 *  2. A list that may not be empty, a message that may not be missing: `wanted`.
 *  3. Text is UTF-8, a number is finite.
 */
#include "gcs/wire_check.h"

#include <math.h>
#include <string.h>
#include "base/str.h"
#include "gcs/types.h"

enum { DEPTH_MAX = 16 }; /* of messages in messages; Ray's have five */

/* By the end of a field's name. What is no id, a key or a value say, is not in it. */
static const struct {
    const char *name;
    size_t bytes;
} ids[] = {
    {"node_id", MB_NODE_ID_BYTES},   {"node_ids", MB_NODE_ID_BYTES},
    {"worker_id", MB_NODE_ID_BYTES}, {"placement_group_id", MB_PG_ID_BYTES},
    {"job_id", MB_JOB_ID_BYTES},     {"actor_id", MB_ACTOR_ID_BYTES},
};

struct field {
    const char *message, *name;
};

/* Ray's own clients leave these out, or send them empty. */
static const struct field optional[] = {
    {"ray.rpc.Bundle", "node_id"},
    {"ray.rpc.PlacementGroupSpec", "soft_target_node_id"},
};

static const struct field wanted[] = {
    {"ray.rpc.CreatePlacementGroupRequest", "placement_group_spec"},
    {"ray.rpc.PlacementGroupSpec", "bundles"},
    {"ray.rpc.Bundle", "bundle_id"},
    {"ray.rpc.AddJobRequest", "data"},
    {"ray.rpc.JobTableData", "driver_address"},
    {"ray.rpc.RegisterNodeRequest", "node_info"},
    {"ray.rpc.syncer.RaySyncMessageBatch", "messages"},
};

static int is_in(const struct field *list, size_t n, const char *message, const char *name)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(list[i].message, message) == 0 && strcmp(list[i].name, name) == 0)
            return 1;
    return 0;
}

#define IS_IN(list, message, name) is_in(list, sizeof(list) / sizeof((list)[0]), message, name)

/* 0: no id. */
static size_t id_bytes(const char *name)
{
    const size_t n = strlen(name);

    for (size_t i = 0; i < sizeof(ids) / sizeof(ids[0]); i++) {
        const size_t k = strlen(ids[i].name);

        if (n >= k && strcmp(name + n - k, ids[i].name) == 0 && (n == k || name[n - k - 1] == '_'))
            return ids[i].bytes;
    }
    return 0;
}

static int look(const ProtobufCMessage *m, int depth, struct mb_err *err);

static int look_at(const ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, const void *p,
                   int depth, struct mb_err *err)
{
    const char *message = m->descriptor->name;
    double number = 0;

    if (f->type == PROTOBUF_C_TYPE_MESSAGE)
        return look(*(ProtobufCMessage *const *)p, depth + 1, err);
    if (f->type == PROTOBUF_C_TYPE_BYTES) {
        const size_t len = ((const ProtobufCBinaryData *)p)->len, want = id_bytes(f->name);

        if (want == 0 || len == want || (len == 0 && IS_IN(optional, message, f->name)))
            return MB_OK;
        return mb_err_set(err, MB_EINVAL, "%s of %s has %zu bytes, not %zu", f->name, message, len,
                          want);
    }
    if (f->type == PROTOBUF_C_TYPE_STRING) {
        const char *text = *(const char *const *)p;

        /* No GCS of Ray's reads our messages, and our own heads clean what they show. */
        if (text == NULL || !mb_starts_with(message, "ray.") || mb_utf8_valid(text, strlen(text)))
            return MB_OK;
        return mb_err_set(err, MB_EINVAL, "%s of %s is no UTF-8", f->name, message);
    }
    if (f->type == PROTOBUF_C_TYPE_DOUBLE)
        number = *(const double *)p;
    if (!isfinite(number))
        return mb_err_set(err, MB_EINVAL, "%s of %s is no number", f->name, message);
    return MB_OK;
}

static size_t size_of(ProtobufCType type)
{
    return type == PROTOBUF_C_TYPE_BYTES    ? sizeof(ProtobufCBinaryData)
           : type == PROTOBUF_C_TYPE_DOUBLE ? sizeof(double)
                                            : sizeof(void *);
}

static int is_looked_at(ProtobufCType type)
{
    return type == PROTOBUF_C_TYPE_MESSAGE || type == PROTOBUF_C_TYPE_BYTES ||
           type == PROTOBUF_C_TYPE_STRING || type == PROTOBUF_C_TYPE_DOUBLE;
}

static int look(const ProtobufCMessage *m, int depth, struct mb_err *err)
{
    const char *at = (const char *)m;

    if (m == NULL)
        return MB_OK;
    if (depth > DEPTH_MAX)
        return mb_err_set(err, MB_EINVAL, "%s is too deep", m->descriptor->name);
    for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &m->descriptor->fields[i];
        const int is_list = f->label == PROTOBUF_C_LABEL_REPEATED;
        const char *p = at + f->offset;
        size_t n = is_list ? *(const size_t *)(const void *)(at + f->quantifier_offset) : 1;

        if (!is_looked_at(f->type))
            continue;
        if ((f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) != 0 &&
            *(const uint32_t *)(const void *)(at + f->quantifier_offset) != f->id)
            continue;
        if (IS_IN(wanted, m->descriptor->name, f->name) &&
            (n == 0 || (!is_list && *(const void *const *)(const void *)p == NULL)))
            return mb_err_set(err, MB_EINVAL, "%s without %s", m->descriptor->name, f->name);
        if (is_list && n > 0)
            p = *(const char *const *)(const void *)p;
        for (size_t k = 0; k < n; k++) {
            int rc = look_at(m, f, p + k * size_of(f->type), depth, err);

            if (rc != MB_OK)
                return rc;
        }
    }
    return MB_OK;
}

int mb_wire_check(const ProtobufCMessage *m, struct mb_err *err)
{
    return look(m, 0, err);
}
