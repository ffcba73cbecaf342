/* The inside of mb_gcs, shared by the client's source files only. */
#ifndef MOBULA_GCS_CLIENT_INTERNAL_H
#define MOBULA_GCS_CLIENT_INTERNAL_H

#include "base/buf.h"
#include "gcs/client.h"
#include "gcs/wire.h"

enum {
    GCS_TIMEOUT_MS = 30000,
    GCS_BACKOFF_BASE_MS = 100,
    GCS_BACKOFF_CAP_MS = 2000,
    GCS_HANDSHAKE_TRY_MS = 5000,
    GCS_WATCH_MS = 5000,
    GCS_HEADS_MAX = 8,
    GCS_TRY_MS = 3000,
    GCS_SYNC_MS = 2000,
    GCS_UNACKNOWLEDGED_MS = 20000 /* a third of what Ray waits for a silent node */
};

/* The user's callback, of the type that the operation's complete knows. */
typedef void (*gcs_any_cb)(void);

/* A request and what becomes of its reply. reply is NULL exactly when err->code is not 0. */
typedef void (*gcs_complete)(struct mb_gcs_op *op, const struct mb_err *err,
                             const ProtobufCMessage *reply);

struct mb_gcs_op {
    struct mb_gcs_op *prev, *next;
    struct mb_gcs *c;
    const char *method;
    void *request; /* packed, for another try: most are sent once; owned */
    size_t n_request;
    const ProtobufCMessageDescriptor *request_desc;
    const ProtobufCMessageDescriptor *reply_desc;
    uint64_t deadline_ms; /* mb_mono_ms() */
    unsigned attempt;
    int repeatable;
    int canceled;
    struct gcs_value *value; /* a large one that goes into a file (client_value.c), or NULL */
    struct mb_grpc_channel *own_channel; /* of the operation alone, or NULL; owned */
    int is_written;   /* the value is on its way into the file: the end of that finishes */
    int internal;     /* of the client itself: allowed before the handshake is done */
    unsigned cluster; /* as n_clusters was: what is meant for one cluster is not sent to the next */
    struct mb_grpc_call *call;
    struct mb_grpc_channel *channel; /* where it was sent */
    uv_timer_t timer; /* waits between attempts; also carries cancel out of the caller's stack */
    gcs_complete complete;
    gcs_any_cb cb;
    void *cb_arg;
    /* pg_create: sent after the job was found. */
    ProtobufCMessage *second;
    uint8_t job_id[MB_JOB_ID_BYTES];
};

enum gcs_state { GCS_IDLE, GCS_CONNECTING, GCS_CONNECTED, GCS_CLOSING };

struct gcs_sync {
    int on;
    int is_unsure; /* the stream ended: is the node still one of this head's? */
    struct mb_grpc_stream *stream;
    uv_timer_t timer;
    uint8_t node_id[MB_NODE_ID_BYTES];
    int64_t version;
    struct mb_buf view; /* packed ResourceViewSyncMessage */
};

struct gcs_watch {
    int on;
    int unreachable;
    uint8_t node_id[MB_NODE_ID_BYTES];
    uv_timer_t timer;
    struct mb_gcs_op *op;
};

struct mb_gcs {
    uv_loop_t *loop;
    struct mb_grpc *grpc;
    struct mb_grpc_channel *channel; /* the one in use */
    struct mb_grpc_channel *channels[GCS_HEADS_MAX];
    char *addresses[GCS_HEADS_MAX]; /* owned */
    size_t n_heads, head;           /* head: index of the one in use */
    char *token;
    struct mb_gcs_op *heads_op;
    char *address; /* of the one in use; borrowed from addresses */
    mb_gcs_event_cb cb;
    void *cb_arg;
    enum gcs_state state;
    char ray_version[32];
    int is_modern; /* it speaks as Ray does since 2.60 */
    char cluster_id[2 * MB_NODE_ID_BYTES + 1];
    unsigned n_clusters; /* that were here before this one */

    uint64_t connect_timeout_ms;
    size_t max_message_bytes;
    uint64_t connect_deadline_ms;
    unsigned connect_attempt;
    struct mb_err connect_cause; /* of the attempt before this one; MB_OK: it is the first */
    struct mb_gcs_op *connect_op;
    uv_timer_t connect_timer;

    struct mb_gcs_op *ops;
    struct gcs_sync sync;
    struct gcs_watch watch;
    int timers_open;
    void (*closed_cb)(void *arg);
    void *closed_arg;
};

struct gcs_call {
    const char *method;
    const ProtobufCMessage *request;
    const ProtobufCMessageDescriptor *reply_desc;
    uint64_t timeout_ms;
    int repeatable;
    int internal;
    struct mb_grpc_channel *own_channel; /* this and value are taken unless gcs_start() fails */
    struct gcs_value *value;
    gcs_complete complete;
    gcs_any_cb cb;
    void *cb_arg;
};

/* A method of the GCS, what it answers and who takes the answer. */
struct gcs_method {
    const char *name;
    const ProtobufCMessageDescriptor *reply_desc;
    gcs_complete complete;
};

/* Checks the state, copies the request, sends. */
int gcs_start(struct mb_gcs *c, const struct gcs_call *call, struct mb_gcs_op **op,
              struct mb_err *err);
/* gcs_start() of a caller's request that does no harm when it comes twice. A NULL request is one
 * for which there was no memory. */
int gcs_repeatable(struct mb_gcs *c, const struct gcs_method *method,
                   const ProtobufCMessage *request, uint64_t timeout_ms, gcs_any_cb cb,
                   void *cb_arg, struct mb_gcs_op **op, struct mb_err *err);
/* Asks for the job table alone: without these two flags a real GCS looks up every submission and
 * asks every live driver whether it is busy. complete gets a GetAllJobInfoReply. */
int gcs_list_jobs(struct mb_gcs *c, gcs_complete complete, uint64_t timeout_ms, gcs_any_cb cb,
                  void *cb_arg, struct mb_gcs_op **op, struct mb_err *err);
/* The same operation goes on with another request; the deadline stays. Only from complete. */
void gcs_continue(struct mb_gcs_op *op, const char *method, ProtobufCMessage *request,
                  const ProtobufCMessageDescriptor *reply_desc, gcs_complete complete);
/* Completion for replies that carry nothing but a status; cb is mb_gcs_done_cb. */
void gcs_complete_done(struct mb_gcs_op *op, const struct mb_err *err,
                       const ProtobufCMessage *reply);
/* The head in use does not serve: the next address has its turn, if there is another. */
void gcs_next_head(struct mb_gcs *c, const struct mb_grpc_channel *failed);
/* Another address where the head may be; known ones are passed over. */
int gcs_add_head(struct mb_gcs *c, const char *address, size_t n, struct mb_err *err);
/* "host:port[,host:port]..." */
int gcs_add_heads(struct mb_gcs *c, const char *list, struct mb_err *err);
int gcs_heads_set_cluster(struct mb_gcs *c); /* cluster_id "" removes it */
/* Ask the head which standbys it has (client_heads.c). */
void gcs_ask_heads(struct mb_gcs *c);
void gcs_heads_close(struct mb_gcs *c);
/* A connection to one head, with the token and the cluster; max_bytes 0: 512 MiB. */
int gcs_open_channel(struct mb_gcs *c, const char *address, size_t max_bytes,
                     struct mb_grpc_channel **out, struct mb_err *err);
/* What a GcsStatus of the head says; 0 if it is OK. */
int gcs_status_error(const Ray__Rpc__GcsStatus *status, struct mb_err *err);
/* The reply of a large value is written; takes bytes. gcs_value_done() follows unless it fails. */
int gcs_value_take(struct mb_gcs_op *op, struct mb_grpc_bytes *bytes, struct mb_err *err);
void gcs_value_done(struct mb_gcs_op *op, const struct mb_err *err);
void gcs_value_close(struct gcs_value *v); /* NULL is legal */
int gcs_no_memory(struct mb_err *err);
enum { GCS_AGENT_KEY_BYTES = 128 };
/* Key of a node's agent, in the namespace "dashboard". */
void gcs_agent_key(const struct mb_gcs *c, const char *node_hex, char out[GCS_AGENT_KEY_BYTES]);
void gcs_emit(struct mb_gcs *c, enum mb_gcs_event event, const struct mb_err *err);

void gcs_sync_init(struct mb_gcs *c);
void gcs_sync_resume(struct mb_gcs *c); /* the head has said that the node is alive */
void gcs_sync_close(struct mb_gcs *c);  /* timer and stream; gcs_maybe_closed() when gone */
void gcs_watch_init(struct mb_gcs *c);
void gcs_watch_look(struct mb_gcs *c);      /* now; a look that is under way is enough */
void gcs_timer_closed(uv_handle_t *handle); /* handle->data is the client */
void gcs_maybe_closed(struct mb_gcs *c);

#endif
