/*
 * What the files of this folder share. Loop-thread only, except where a comment says otherwise.
 */
#ifndef MOBULA_BASE_GRPC_INTERNAL_H
#define MOBULA_BASE_GRPC_INTERNAL_H

#include <grpc/grpc.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include "base/grpc/grpc.h"
#include "base/refusals.h"

enum {
    MB_GRPC_DETAIL_MAX = 1024,            /* longest status text kept, NUL included */
    MB_GRPC_MESSAGE_MAX = 512 << 20,      /* default bound of a message in bytes, Ray's */
    MB_GRPC_STREAM_QUEUE_MAX = 64 << 20,  /* bytes waiting to be sent on one stream */
    MB_GRPC_STREAM_MESSAGE_COST = 512,    /* what a waiting message takes beside its payload */
    MB_GRPC_SERVER_SLOTS = 32,            /* calls the library may hand over before we ask again */
    MB_GRPC_SERVER_CONCURRENT_MAX = 1000, /* calls of one connection at a time */
    MB_GRPC_UNARY_DEADLINE_MS = 60000,    /* default bound on a handler */
    MB_GRPC_TURN_TAGS = 64,               /* run in a row before other handles get their chance */
    MB_GRPC_PEER_MAX = 80,                /* longest text of an address, NUL included */
    MB_GRPC_BUSY_MAX = 8                  /* connections that are corked in one turn */
};

#define MB_GRPC_ENTRY(ptr, type, member) ((type *)(void *)((char *)(ptr)-offsetof(type, member)))

/* A circular list; the head is a link as well. */
struct mb_grpc_link {
    struct mb_grpc_link *prev;
    struct mb_grpc_link *next;
};

static inline void mb_grpc_link_init(struct mb_grpc_link *head)
{
    head->prev = head;
    head->next = head;
}

static inline void mb_grpc_link_append(struct mb_grpc_link *head, struct mb_grpc_link *link)
{
    link->prev = head->prev;
    link->next = head;
    head->prev->next = link;
    head->prev = link;
}

/* Removing twice is harmless. */
static inline void mb_grpc_link_remove(struct mb_grpc_link *link)
{
    link->prev->next = link->next;
    link->next->prev = link->prev;
    mb_grpc_link_init(link);
}

/* One operation in flight. Embedded in its owner, which lives until done() has run. */
struct mb_grpc_tag {
    void (*done)(struct mb_grpc_tag *tag, int ok);
    struct mb_grpc_tag *next; /* in the list of finished tags; guarded by the runtime's lock */
    int ok;
};

/* A connection to which this turn of the loop sends; see cork.c. */
struct mb_grpc_busy {
    char peer[MB_GRPC_PEER_MAX];
    int fd;          /* of the library; -1: not found */
    unsigned n_sent; /* in this turn */
    int was_busy;    /* more than one in the turn before */
    int corked;
};

struct mb_grpc {
    uv_loop_t *loop; /* borrowed */
    uv_async_t async;
    uv_timer_t timer;         /* deadlines of requests being served */
    uv_idle_t turn;           /* active while the loop has the completion queue */
    uv_prepare_t before_wait; /* active in a turn that sends */
    int n_handles;            /* of the four above, not closed yet */
    struct mb_grpc_busy busy[MB_GRPC_BUSY_MAX];
    uint64_t look_after_ms; /* on the loop's clock */
    grpc_completion_queue *cq;
    pthread_t poller;
    pthread_mutex_t lock;
    struct mb_grpc_tag *finished_head; /* guarded by lock */
    struct mb_grpc_tag *finished_tail; /* guarded by lock */
    int poller_ended;                  /* guarded by lock */
    int loop_has_queue;                /* guarded by lock; the poller waits in given_back */
    pthread_cond_t given_back;
    size_t n_ops; /* tags handed out whose done() has not run */
    struct mb_grpc_link channels;
    struct mb_grpc_link calls;
    struct mb_grpc_link streams;
    struct mb_grpc_link servers;
    struct mb_grpc_tls *tls; /* NULL: plain */
    struct mb_grpc_counts counts;
    int is_probing;
    int quiet_faults;
    uint64_t probe_patience_ms; /* 0: as fault.c has it; tests have more */
    void (*deaf_cb)(void *arg);
    void *deaf_arg;
    int is_deaf; /* guarded by deaf.c's lock */
    int stopping;
    int draining; /* the completion queue is shut down */
    mb_grpc_stopped_cb stopped_cb;
    void *stopped_arg;
};

struct mb_grpc_channel {
    struct mb_grpc_link link;
    struct mb_grpc *g;
    grpc_channel *core; /* NULL once it ended */
    struct mb_grpc_tag settled;
    int is_settling;  /* the tag is out: core goes when it is back */
    int is_destroyed; /* by its owner: goes with core */
    char *target;
    struct mb_grpc_probe *probe; /* under way, or NULL */
    uint64_t probe_after_ms;     /* on the loop's clock */
    char *fault;
    int fault_code;              /* while there is one */
    char peer[MB_GRPC_PEER_MAX]; /* "": not known yet */
    char *authorization;         /* "Bearer <token>", or NULL */
    struct mb_grpc_pair *pairs;  /* metadata of unary calls */
    size_t n_pairs;
};

/* An owned metadata pair. */
struct mb_grpc_pair {
    char *key;
    char *value;
};

struct mb_grpc_server {
    struct mb_grpc_link link;
    struct mb_grpc *g;
    grpc_server *core; /* NULL until listening */
    char *authorization;
    size_t max_message_bytes;
    uint64_t unary_deadline_ms;
    struct mb_grpc_server_method *methods;
    size_t n_methods;
    struct mb_grpc_link reqs;      /* in order of arrival, which is the order of their deadlines */
    struct mb_grpc_link abandoned; /* nobody waits for them, their handlers have not answered */
    struct mb_grpc_slot *slots;
    struct mb_grpc_tag shutdown_tag;
    struct mb_refusals refusals;
};

struct mb_grpc_server_method {
    struct mb_grpc_method m;
    void *arg;
};

/* ---- grpc.c: tags ---- */

/* Start operations whose end runs done() on the loop. MB_ESTATE when the library refuses them. */
int mb_grpc_batch(struct mb_grpc *g, grpc_call *call, const grpc_op *ops, size_t n_ops,
                  struct mb_grpc_tag *tag, void (*done)(struct mb_grpc_tag *tag, int ok));
/* For library calls that take a tag: count it in; mb_grpc_tag_drop() if the call was refused. */
void mb_grpc_tag_start(struct mb_grpc *g, struct mb_grpc_tag *tag,
                       void (*done)(struct mb_grpc_tag *tag, int ok));
void mb_grpc_tag_drop(struct mb_grpc *g);
/* Run done() on the loop later, without an operation. */
void mb_grpc_defer(struct mb_grpc *g, struct mb_grpc_tag *tag,
                   void (*done)(struct mb_grpc_tag *tag, int ok));
/* Set the timer to the earliest deadline of the servers' requests. */
void mb_grpc_arm_timer(struct mb_grpc *g);

/* ---- cork.c ---- */

/* Something is about to be sent to that peer ("ipv4:1.2.3.4:5"; NULL and "" are legal): what this
 * turn of the loop sends to it leaves together, before the loop waits. */
void mb_grpc_sending(struct mb_grpc *g, const char *peer);

/* ---- fault.c ---- */

/* A call of the channel ended with this status. */
void mb_grpc_channel_heard(struct mb_grpc_channel *ch, int status);
/* The channel ends: nobody waits for what is found out. */
void mb_grpc_fault_close(struct mb_grpc_channel *ch);

/* ---- message.c ---- */

grpc_byte_buffer *mb_grpc_pack(const ProtobufCMessage *msg);
/* NULL when the bytes are no such message (*status MB_GRPC_INVALID_ARGUMENT) or memory is out
 * (MB_GRPC_RESOURCE_EXHAUSTED). */
ProtobufCMessage *mb_grpc_unpack(const ProtobufCMessageDescriptor *desc, grpc_byte_buffer *bytes,
                                 int *status);
void mb_grpc_message_free(ProtobufCMessage *msg);
/* Takes the buffer unless it fails, with the status of mb_grpc_unpack(). */
struct mb_grpc_bytes *mb_grpc_bytes_take(grpc_byte_buffer *buffer, int *status);
/* Text of a slice, cut at a character boundary. */
void mb_grpc_detail(grpc_slice slice, char out[MB_GRPC_DETAIL_MAX]);
/* "Bearer <token>"; NULL when memory is out. */
char *mb_grpc_bearer(const char *token);

/* Text metadata as owned pairs. 0 or MB_ENOMEM. */
int mb_grpc_pairs_copy(const grpc_metadata_array *from, struct mb_grpc_pair **out, size_t *out_n);
void mb_grpc_pairs_free(struct mb_grpc_pair *pairs, size_t n);
const char *mb_grpc_pairs_find(const struct mb_grpc_pair *pairs, size_t n, const char *key);
/* 0, or MB_EINVAL for what HTTP/2 does not allow. */
int mb_grpc_metadata_check(const char *key, const char *value);

/* ---- bound.c ---- */

grpc_arg mb_grpc_int_arg(const char *key, int value);

enum { MB_GRPC_BOUND_ARGS = 4 };

struct mb_grpc_bound {
    grpc_resource_quota *quota;
    grpc_arg args[MB_GRPC_BOUND_ARGS]; /* of a channel or server; until close */
};

/* max: of a message in bytes. */
void mb_grpc_bound_open(struct mb_grpc_bound *b, size_t max, int has_quota);
void mb_grpc_bound_close(struct mb_grpc_bound *b);

/* ---- refused.c; any thread ---- */

enum { MB_GRPC_WHY_MAX = 128 };

/* A line that the library logged in file: 1 if it says why a caller's handshake failed. */
int mb_grpc_refused_why(const char *file, const char *message, char out[MB_GRPC_WHY_MAX]);
void mb_grpc_refused_handshake(const char *file, const char *message);

/* ---- deaf.c ---- */

/* A line that the library logged in file: 1 if a port takes no connections any more. */
int mb_grpc_deaf_says(const char *file, const char *message);
void mb_grpc_deaf_heard(const char *file, const char *message);
void mb_grpc_deaf_tell(struct mb_grpc *g);   /* on the loop's thread */
void mb_grpc_deaf_forget(struct mb_grpc *g); /* before async is closed */

/* ---- client.c ---- */

/* From now; 0 means never. */
gpr_timespec mb_grpc_deadline(uint64_t timeout_ms);
grpc_call *mb_grpc_core_call(struct mb_grpc_channel *ch, const char *method, uint64_t timeout_ms);
grpc_metadata mb_grpc_metadata_make(const char *key, const char *value); /* copies both */
void mb_grpc_metadata_free(grpc_metadata *list, size_t n);

/* ---- client.c, stream.c, server.c: parts of stopping ---- */

void mb_grpc_calls_cancel(struct mb_grpc *g, const struct mb_grpc_channel *only); /* NULL: all */
/* Ends the library's channel: now, or when it has ceased to connect. */
void mb_grpc_channel_settle(struct mb_grpc_channel *ch);
void mb_grpc_channel_free(struct mb_grpc_channel *ch);
void mb_grpc_streams_cancel(struct mb_grpc *g, const struct mb_grpc_channel *only);
void mb_grpc_server_shutdown(struct mb_grpc_server *srv);
void mb_grpc_server_free(struct mb_grpc_server *srv);
/* Answer what is past its deadline at now_ms. */
void mb_grpc_server_expire(struct mb_grpc_server *srv, uint64_t now_ms);
/* On the loop's clock; UINT64_MAX when nothing waits. */
uint64_t mb_grpc_server_next_deadline(const struct mb_grpc_server *srv);

/* A call for a stream method arrived: takes call and pairs (also when it fails). */
void mb_grpc_stream_serve(struct mb_grpc *g, grpc_call *call, struct mb_grpc_pair *pairs,
                          size_t n_pairs, mb_grpc_stream_handler handler, void *arg);

#endif
