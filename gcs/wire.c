/*
 * Plain copying. protobuf-c makes a struct per map; all of one shape have the same layout, checked
 * below, so one function serves them.
 */
#include "gcs/wire.h"

#include <assert.h>
#include <string.h>
#include "base/alloc.h"
#include "base/err.h"

struct double_entry {
    ProtobufCMessage base;
    char *key;
    double value;
};

struct string_entry {
    ProtobufCMessage base;
    char *key;
    char *value;
};

_Static_assert(sizeof(struct double_entry) == sizeof(Ray__Rpc__GcsNodeInfo__ResourcesTotalEntry),
               "layout of map<string,double> entries");
_Static_assert(sizeof(struct string_entry) == sizeof(Ray__Rpc__GcsNodeInfo__LabelsEntry),
               "layout of map<string,string> entries");

void *mb_wire_messages(struct mb_arena *a, const ProtobufCMessageDescriptor *desc, size_t n)
{
    void **array = mb_arena_calloc(a, n ? n : 1, sizeof *array);
    char *bodies = mb_arena_calloc(a, n ? n : 1, desc->sizeof_message);

    if (!array || !bodies)
        return NULL;
    for (size_t i = 0; i < n; i++) {
        array[i] = bodies + i * desc->sizeof_message;
        desc->message_init(array[i]);
    }
    return array;
}

char *mb_wire_str(const char *s)
{
    /* protobuf-c's fields are not const; packing only reads them. */
    return (char *)(uintptr_t)(s ? s : protobuf_c_empty_string);
}

ProtobufCBinaryData mb_wire_bytes(const void *p, size_t n)
{
    return (ProtobufCBinaryData){.len = n, .data = (uint8_t *)(uintptr_t)p};
}

int mb_wire_get_id(ProtobufCBinaryData b, uint8_t *out, size_t n)
{
    if (b.len != n) {
        memset(out, 0, n);
        return -1;
    }
    memcpy(out, b.data, n);
    return 0;
}

void *mb_wire_resources(struct mb_arena *a, const ProtobufCMessageDescriptor *desc,
                        const struct mb_gcs_resource *r, size_t n)
{
    assert(desc->sizeof_message == sizeof(struct double_entry));
    struct double_entry **out = mb_wire_messages(a, desc, n);

    for (size_t i = 0; out && i < n; i++) {
        out[i]->key = mb_wire_str(r[i].name);
        out[i]->value = r[i].amount;
    }
    return out;
}

void *mb_wire_labels(struct mb_arena *a, const ProtobufCMessageDescriptor *desc,
                     const struct mb_gcs_label *l, size_t n)
{
    assert(desc->sizeof_message == sizeof(struct string_entry));
    struct string_entry **out = mb_wire_messages(a, desc, n);

    for (size_t i = 0; out && i < n; i++) {
        out[i]->key = mb_wire_str(l[i].key);
        out[i]->value = mb_wire_str(l[i].value);
    }
    return out;
}

size_t mb_wire_drop_resources(void *entries, size_t n, const char *word)
{
    struct double_entry **e = entries;
    size_t kept = 0;

    for (size_t i = 0; i < n; i++) {
        if (strstr(e[i]->key, word) == NULL)
            e[kept++] = e[i];
        else
            protobuf_c_message_free_unpacked(&e[i]->base, NULL);
    }
    return kept;
}

const struct mb_gcs_resource *mb_wire_get_resources(struct mb_arena *a, const void *entries,
                                                    size_t n)
{
    struct double_entry *const *in = entries;
    struct mb_gcs_resource *out = mb_arena_calloc(a, n ? n : 1, sizeof *out);

    for (size_t i = 0; out && i < n; i++)
        out[i] = (struct mb_gcs_resource){in[i]->key, in[i]->value};
    return out;
}

const struct mb_gcs_label *mb_wire_get_labels(struct mb_arena *a, const void *entries, size_t n)
{
    struct string_entry *const *in = entries;
    struct mb_gcs_label *out = mb_arena_calloc(a, n ? n : 1, sizeof *out);

    for (size_t i = 0; out && i < n; i++)
        out[i] = (struct mb_gcs_label){in[i]->key, in[i]->value};
    return out;
}

void *mb_wire_pack(const ProtobufCMessage *m, size_t *n)
{
    *n = protobuf_c_message_get_packed_size(m);
    uint8_t *bytes = mb_alloc(*n);

    if (bytes)
        protobuf_c_message_pack(m, bytes);
    return bytes;
}

ProtobufCMessage *mb_wire_copy(const ProtobufCMessage *m)
{
    size_t n;
    uint8_t *bytes = mb_wire_pack(m, &n);

    if (!bytes)
        return NULL;
    ProtobufCMessage *copy = protobuf_c_message_unpack(m->descriptor, NULL, n, bytes);
    mb_free(bytes);
    return copy;
}

Ray__Rpc__GcsNodeInfo *mb_wire_node(struct mb_arena *a, const struct mb_gcs_node *node)
{
    Ray__Rpc__GcsNodeInfo *m = mb_arena_calloc(a, 1, sizeof *m);

    if (!m)
        return NULL;
    ray__rpc__gcs_node_info__init(m);
    m->node_id = mb_wire_bytes(node->node_id, MB_NODE_ID_BYTES);
    m->node_manager_address = mb_wire_str(node->ip);
    m->node_manager_port = node->port;
    m->node_manager_hostname = mb_wire_str(node->hostname);
    m->node_name = mb_wire_str(node->node_name);
    m->node_type_name = mb_wire_str(node->node_type_name);
    m->temp_dir = mb_wire_str(node->temp_dir);
    m->session_dir = mb_wire_str(node->session_dir);
    m->dashboard_agent_listen_port = node->agent_http_port;
    m->metrics_export_port = node->metrics_port;
    m->is_head_node = node->is_head != 0;
    m->start_time_ms = node->start_unix_ms;
    m->end_time_ms = node->end_unix_ms;
    m->state = node->is_dead ? RAY__RPC__GCS_NODE_INFO__GCS_NODE_STATE__DEAD
                             : RAY__RPC__GCS_NODE_INFO__GCS_NODE_STATE__ALIVE;
    m->n_resources_total = node->n_resources;
    m->resources_total =
        mb_wire_resources(a, &ray__rpc__gcs_node_info__resources_total_entry__descriptor,
                          node->resources, node->n_resources);
    m->n_labels = node->n_labels;
    m->labels = mb_wire_labels(a, &ray__rpc__gcs_node_info__labels_entry__descriptor, node->labels,
                               node->n_labels);
    if (!m->resources_total || !m->labels)
        return NULL;
    if (node->is_dead) {
        m->death_info = mb_arena_calloc(a, 1, sizeof *m->death_info);
        if (!m->death_info)
            return NULL;
        ray__rpc__node_death_info__init(m->death_info);
        m->death_info->reason = (Ray__Rpc__NodeDeathInfo__Reason)node->death_reason;
        m->death_info->reason_message = mb_wire_str(node->death_text);
    }
    return m;
}

int mb_wire_get_node(struct mb_arena *a, const Ray__Rpc__GcsNodeInfo *in, struct mb_gcs_node *out)
{
    memset(out, 0, sizeof *out);
    if (mb_wire_get_id(in->node_id, out->node_id, MB_NODE_ID_BYTES) != 0)
        return MB_EPROTO;
    out->ip = in->node_manager_address;
    out->port = in->node_manager_port;
    out->hostname = in->node_manager_hostname;
    out->node_name = in->node_name;
    out->node_type_name = in->node_type_name;
    out->temp_dir = in->temp_dir;
    out->session_dir = in->session_dir;
    out->agent_http_port = in->dashboard_agent_listen_port;
    out->metrics_port = in->metrics_export_port;
    out->is_head = in->is_head_node;
    out->is_dead = in->state == RAY__RPC__GCS_NODE_INFO__GCS_NODE_STATE__DEAD;
    out->death_reason =
        in->death_info ? (enum mb_gcs_death)in->death_info->reason : MB_GCS_DEATH_UNSPECIFIED;
    out->death_text = in->death_info ? in->death_info->reason_message : "";
    out->start_unix_ms = in->start_time_ms;
    out->end_unix_ms = in->end_time_ms;
    out->resources = mb_wire_get_resources(a, in->resources_total, in->n_resources_total);
    out->n_resources = in->n_resources_total;
    out->labels = mb_wire_get_labels(a, in->labels, in->n_labels);
    out->n_labels = in->n_labels;
    return out->resources && out->labels ? 0 : MB_ENOMEM;
}

Ray__Rpc__Bundle **mb_wire_bundles(struct mb_arena *a, const uint8_t pg_id[MB_PG_ID_BYTES],
                                   const struct mb_gcs_bundle *bundles, const size_t *indexes,
                                   size_t n, int with_node)
{
    Ray__Rpc__Bundle **out = mb_wire_messages(a, &ray__rpc__bundle__descriptor, n);
    Ray__Rpc__Bundle__BundleIdentifier **ids =
        mb_wire_messages(a, &ray__rpc__bundle__bundle_identifier__descriptor, n);
    const void *id = mb_arena_dup(a, pg_id, MB_PG_ID_BYTES);

    if (!out || !ids || !id)
        return NULL;
    for (size_t i = 0; i < n; i++) {
        size_t index = indexes ? indexes[i] : i;
        const struct mb_gcs_bundle *b = &bundles[index];

        ids[i]->placement_group_id = mb_wire_bytes(id, MB_PG_ID_BYTES);
        ids[i]->bundle_index = (int32_t)index;
        out[i]->bundle_id = ids[i];
        out[i]->n_unit_resources = b->n_resources;
        out[i]->unit_resources = mb_wire_resources(
            a, &ray__rpc__bundle__unit_resources_entry__descriptor, b->resources, b->n_resources);
        if (!out[i]->unit_resources)
            return NULL;
        if (with_node && b->has_node)
            out[i]->node_id = mb_wire_bytes(b->node_id, MB_NODE_ID_BYTES);
    }
    return out;
}

Ray__Rpc__PlacementGroupSpec *mb_wire_pg_spec(struct mb_arena *a, const struct mb_gcs_pg *pg)
{
    Ray__Rpc__PlacementGroupSpec *m = mb_arena_calloc(a, 1, sizeof *m);
    uint8_t *no_actor = mb_arena_calloc(a, 1, MB_ACTOR_ID_BYTES);

    if (!m || !no_actor)
        return NULL;
    ray__rpc__placement_group_spec__init(m);
    memset(no_actor, 0xff, MB_ACTOR_ID_BYTES - MB_JOB_ID_BYTES);
    memcpy(no_actor + MB_ACTOR_ID_BYTES - MB_JOB_ID_BYTES, pg->job_id, MB_JOB_ID_BYTES);
    m->placement_group_id = mb_wire_bytes(pg->id, MB_PG_ID_BYTES);
    m->name = mb_wire_str(pg->name);
    m->strategy = (Ray__Rpc__PlacementStrategy)pg->strategy;
    m->creator_job_id = mb_wire_bytes(pg->job_id, MB_JOB_ID_BYTES);
    m->creator_actor_id = mb_wire_bytes(pg->has_actor ? pg->actor_id : no_actor, MB_ACTOR_ID_BYTES);
    /* A group lives until job and actor are both dead, so the one that does not own it counts as
     * dead from the start. */
    m->creator_actor_dead = !pg->has_actor;
    m->creator_job_dead = pg->has_actor;
    m->is_detached = pg->is_detached != 0;
    m->n_bundles = pg->n_bundles;
    m->bundles = mb_wire_bundles(a, pg->id, pg->bundles, NULL, pg->n_bundles, 0);
    return m->bundles ? m : NULL;
}

int mb_wire_get_pg(struct mb_arena *a, const Ray__Rpc__PlacementGroupTableData *in,
                   struct mb_gcs_pg *out)
{
    struct mb_gcs_bundle *bundles =
        mb_arena_calloc(a, in->n_bundles ? in->n_bundles : 1, sizeof *bundles);

    memset(out, 0, sizeof *out);
    if (!bundles)
        return MB_ENOMEM;
    if (mb_wire_get_id(in->placement_group_id, out->id, MB_PG_ID_BYTES) != 0)
        return MB_EPROTO;
    mb_wire_get_id(in->creator_job_id, out->job_id, MB_JOB_ID_BYTES);
    out->has_actor = mb_wire_get_id(in->creator_actor_id, out->actor_id, MB_ACTOR_ID_BYTES) == 0 &&
                     !in->creator_actor_dead;
    out->name = in->name;
    out->strategy = (enum mb_pg_strategy)in->strategy;
    out->state = (enum mb_pg_state)in->state;
    out->is_detached = in->is_detached;
    if (in->placement_group_creation_timestamp_ms > 0)
        out->created_unix_ms = (uint64_t)in->placement_group_creation_timestamp_ms;
    out->bundles = bundles;
    out->n_bundles = in->n_bundles;
    for (size_t i = 0; i < in->n_bundles; i++) {
        const Ray__Rpc__Bundle *b = in->bundles[i];

        bundles[i].resources = mb_wire_get_resources(a, b->unit_resources, b->n_unit_resources);
        bundles[i].n_resources = b->n_unit_resources;
        if (!bundles[i].resources)
            return MB_ENOMEM;
        bundles[i].has_node = mb_wire_get_id(b->node_id, bundles[i].node_id, MB_NODE_ID_BYTES) == 0;
    }
    return 0;
}

static Ray__Rpc__JobConfig *job_config(struct mb_arena *a, const char *submission_id)
{
    Ray__Rpc__JobConfig *config = mb_arena_calloc(a, 1, sizeof *config);

    if (!config)
        return NULL;
    ray__rpc__job_config__init(config);
    if (submission_id && *submission_id) {
        struct mb_gcs_label entry = {"job_submission_id", submission_id};
        config->n_metadata = 1;
        config->metadata =
            mb_wire_labels(a, &ray__rpc__job_config__metadata_entry__descriptor, &entry, 1);
        if (!config->metadata)
            return NULL;
    }
    return config;
}

Ray__Rpc__JobTableData *mb_wire_job(struct mb_arena *a, const struct mb_gcs_job *job,
                                    const uint8_t worker_id[MB_NODE_ID_BYTES])
{
    Ray__Rpc__JobTableData *m = mb_arena_calloc(a, 1, sizeof *m);
    Ray__Rpc__Address *address = mb_arena_calloc(a, 1, sizeof *address);

    if (!m || !address)
        return NULL;
    ray__rpc__job_table_data__init(m);
    ray__rpc__address__init(address);
    m->job_id = mb_wire_bytes(job->job_id, MB_JOB_ID_BYTES);
    m->is_dead = job->is_dead != 0;
    m->driver_ip_address = mb_wire_str(job->driver_ip);
    m->driver_pid = job->driver_pid;
    m->entrypoint = mb_wire_str(job->entrypoint);
    m->start_time = job->start_unix_ms;
    m->end_time = job->end_unix_ms;
    m->config = job_config(a, job->submission_id);
    address->node_id = mb_wire_bytes(job->node_id, MB_NODE_ID_BYTES);
    address->ip_address = mb_wire_str(job->driver_ip);
    address->port = job->node_port;
    address->worker_id = mb_wire_bytes(worker_id, MB_NODE_ID_BYTES);
    m->driver_address = address;
    return m->config ? m : NULL;
}

int mb_wire_get_job(const Ray__Rpc__JobTableData *in, struct mb_gcs_job *out)
{
    memset(out, 0, sizeof *out);
    if (mb_wire_get_id(in->job_id, out->job_id, MB_JOB_ID_BYTES) != 0)
        return MB_EPROTO;
    out->entrypoint = in->entrypoint;
    out->submission_id = "";
    for (size_t i = 0; in->config && i < in->config->n_metadata; i++)
        if (strcmp(in->config->metadata[i]->key, "job_submission_id") == 0)
            out->submission_id = in->config->metadata[i]->value;
    out->driver_ip = in->driver_ip_address;
    out->driver_pid = in->driver_pid;
    if (in->driver_address) {
        mb_wire_get_id(in->driver_address->node_id, out->node_id, MB_NODE_ID_BYTES);
        out->node_port = in->driver_address->port;
    }
    out->is_dead = in->is_dead;
    out->start_unix_ms = in->start_time;
    out->end_unix_ms = in->end_time;
    return 0;
}
