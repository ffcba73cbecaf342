/*
 * The nouns of Ray's control plane, shared by the client, the embedded head and the pure modules.
 * Ids are raw bytes of exact length: a real GCS aborts on an id of another length.
 */
#ifndef MOBULA_GCS_TYPES_H
#define MOBULA_GCS_TYPES_H

#include <stddef.h>
#include <stdint.h>

/* What our head says of statistics: it has no page for them. */
/* What a node's page (mb_gcs_publish_usage) has beside that which Ray's dashboard shows. */
#define MB_GCS_PAGE_GPUS  "mobulaGpus"
#define MB_GCS_NO_READERS "nobody reads this here"

enum {
    MB_NODE_ID_BYTES = 28, /* also worker ids and the cluster id */
    MB_PG_ID_BYTES = 18,   /* 14 random bytes, then the creator's job id */
    MB_JOB_ID_BYTES = 4,   /* little-endian number of GetNextJobID */
    MB_ACTOR_ID_BYTES = 16 /* 12 random bytes, then the job id */
};

/* A named amount, e.g. {"mobula_gpu", 8}. Names are unique within one array. */
struct mb_gcs_resource {
    const char *name;
    double amount;
};

struct mb_gcs_label {
    const char *key;
    const char *value;
};

/* NodeDeathInfo.Reason of Ray. */
enum mb_gcs_death {
    MB_GCS_DEATH_UNSPECIFIED = 0,
    MB_GCS_DEATH_EXPECTED = 1,
    MB_GCS_DEATH_UNEXPECTED = 2,
    MB_GCS_DEATH_PREEMPTED = 3,
    MB_GCS_DEATH_IDLE = 4
};

/* A node as the GCS knows it (GcsNodeInfo). All pointers are borrowed; strings may be NULL when
 * given to the client and are never NULL when the client gives them out. */
struct mb_gcs_node {
    uint8_t node_id[MB_NODE_ID_BYTES];
    const char *ip; /* node_manager_address: what the GCS and drivers dial */
    int port;       /* node_manager_port: NodeManager, Health and NodeAgent services */
    const char *hostname;
    const char *node_name;
    const char *node_type_name;
    const char *temp_dir;
    const char *session_dir;
    int agent_http_port; /* dashboard_agent_listen_port */
    int metrics_port;    /* metrics_export_port; 0: none */
    int is_head;         /* never set on a real Ray cluster: its head would be declared DEAD */
    int is_dead;
    enum mb_gcs_death death_reason;
    const char *death_text;
    uint64_t start_unix_ms;
    uint64_t end_unix_ms;                    /* 0 while alive */
    const struct mb_gcs_resource *resources; /* resources_total */
    size_t n_resources;
    const struct mb_gcs_label *labels;
    size_t n_labels;
};

/* PlacementStrategy of Ray. */
enum mb_pg_strategy {
    MB_PG_PACK = 0,
    MB_PG_SPREAD = 1,
    MB_PG_STRICT_PACK = 2,
    MB_PG_STRICT_SPREAD = 3
};

/* PlacementGroupTableData.PlacementGroupState of Ray. */
enum mb_pg_state {
    MB_PG_PENDING = 0,
    MB_PG_PREPARED = 1,
    MB_PG_CREATED = 2,
    MB_PG_REMOVED = 3,
    MB_PG_RESCHEDULING = 4
};

struct mb_gcs_bundle {
    const struct mb_gcs_resource *resources;
    size_t n_resources;
    int has_node;                      /* 0 while no node holds it */
    uint8_t node_id[MB_NODE_ID_BYTES]; /* valid when has_node */
};

/* A placement group; the index of a bundle is its place in the array. */
struct mb_gcs_pg {
    uint8_t id[MB_PG_ID_BYTES];
    const char *name;                    /* "" or NULL: none; unique in the cluster */
    const struct mb_gcs_bundle *bundles; /* at least one */
    size_t n_bundles;
    enum mb_pg_strategy strategy;
    enum mb_pg_state state;          /* ignored on create */
    uint8_t job_id[MB_JOB_ID_BYTES]; /* creator: must be in the GCS's job table */
    int has_actor;                   /* 1: the group goes when this actor dies */
    uint8_t actor_id[MB_ACTOR_ID_BYTES];
    int is_detached;          /* 1: outlives job and actor */
    uint64_t created_unix_ms; /* placement_group_creation_timestamp_ms; 0: not known */
};

/* A driver in the GCS's job table (JobTableData). */
struct mb_gcs_job {
    uint8_t job_id[MB_JOB_ID_BYTES];
    const char *entrypoint;
    const char *submission_id; /* config.metadata.job_submission_id; "" or NULL: none */
    const char *driver_ip;
    int64_t driver_pid;
    uint8_t node_id[MB_NODE_ID_BYTES]; /* the job ends with this node */
    int node_port;                     /* of that node's agent; answers NumPendingTasks */
    int is_dead;
    uint64_t start_unix_ms;
    uint64_t end_unix_ms;
};

#endif
