/* Shared by the files of this folder only: the driver's shell and its per-node streams. */
#ifndef MOBULA_CLI_DRIVER_INTERNAL_H
#define MOBULA_CLI_DRIVER_INTERNAL_H

#include <uv.h>
#include "base/buf.h"
#include "base/grpc/grpc.h"
#include "base/signals.h"
#include "cli/driver/driver.h"
#include "cli/driver/elastic.h"
#include "cli/driver/restart.h"
#include "cli/driver/state.h"
#include "cli/driver/uploads.h"
#include "gcs/client.h"
#include "proto/mobula/agent.pb-c.h"

enum {
    MB_DRIVER_PROTOCOL_VERSION = 1,
    DRV_CAUSES_MAX = 16,
    DRV_PLACED_MAX = 17,       /* attempts: the present one and 16 before it */
    DRV_PLACED_IDS_MAX = 2048, /* nodes of all of them; the present one counts whatever it has */
};

struct driver;

/* One node of the gang and the control stream to its agent. */
struct drv_node {
    struct driver *driver;
    uint32_t index;
    char *ip;
    int port;
    struct mb_grpc_channel *channel;
    struct mb_grpc_stream *stream; /* NULL between streams */
    uv_timer_t redial;             /* initialised once, for all attempts */
    int has_timer;
    uint8_t node_id[MB_NODE_ID_BYTES];
    unsigned attempts;        /* re-dials since the last hello */
    uint64_t silent_since_ms; /* monotonic; 0 while a stream is up */
    uint64_t heard_ms;        /* monotonic; the agent's newest message */
    uint64_t adrift_ms;       /* monotonic; since then it may be cut off (adrift.c); 0: it is not */
    char *local_dir;          /* checkpoint directory on that node, NULL: none */
    uint32_t rendezvous_port;
    uint64_t stop_grace_ms; /* of the last stop; 0: the launch's */
    int64_t loaded;         /* iteration that its ranks begin from, by Launched; -1: none */
    int64_t lost_said;      /* newest iteration whose loss this node told, -1: none */
    unsigned hello : 1;     /* the present stream has said hello */
    unsigned launched : 1;
    unsigned launch_heard : 1; /* Launched came */
    unsigned stop_asked : 1;
    unsigned end_asked : 1;
    unsigned started : 1;  /* Start was sent on some stream */
    unsigned abandons : 1; /* its uploads */
    unsigned replaced : 1; /* while it is adrift: its bundle has another node */
};

/* Output of one rank: whole lines to stdout, nothing twice after a re-dial. */
struct drv_rank_output {
    uint64_t next_offset;
    struct mb_buf partial; /* a line whose end has not come yet; bounded */
};

/* Iterations that the first node's tracker file sealed, kept until they are durable: a node that is
 * between two streams hears of them with its next hello. */
enum { DRV_SEALS_MAX = 64 };
struct drv_seal {
    int64_t iteration;
    uint64_t *files; /* owned */
    size_t n_files;
};

/* An iteration that some node has given up, or cannot send before the deadline. */
enum { DRV_LEAVES_MAX = 64 };
struct drv_leave {
    int64_t iteration;
    int is_dropped; /* it never will be durable */
    uint32_t node;  /* ... which gave it up first */
    char error[300];
    uint8_t *left_by; /* [n_nodes], owned */
    uint8_t *told;    /* [n_nodes], owned: that others leave it (leaves.c) */
};

/* The newest facts, for the KV record and people. */
/* How a rank ended. */
struct drv_exit {
    int is_known;
    int code; /* as a shell says it */
    int signal;
    char cause[200]; /* "" none; cut at the bound */
};

struct drv_report {
    int64_t iteration;
    int64_t train_iters;
    int64_t consumed_samples;
    double loss;
    double validation_loss;
    double tokens_per_s;
    struct mb_drv_uploads uploads; /* of all nodes */
};

/* The earliest deadline that a node told of. */
struct drv_deadline {
    uint64_t unix_ms; /* 0: none */
    uint64_t save_at_unix_ms;
    int is_local_only;
    char source[32];
    uint32_t node; /* who said it: what it says later takes its place */
};

/* Where an attempt is or was: who looks for its logs needs that also later. */
struct drv_placed {
    uint32_t attempt, n_nodes, world_size;
    uint8_t pg_id[MB_PG_ID_BYTES];
    uint8_t (*node_ids)[MB_NODE_ID_BYTES]; /* [n_nodes], owned */
};

/* While the group is not CREATED. */
struct drv_waiting {
    uint64_t began_ms, said_ms;
    int is_asking;
    int keeps;         /* the group of the attempt before, which once had all its nodes */
    uint64_t half_ms;  /* since when bundles wait for a node that one of them lost; 0: none does */
    char missing[512]; /* what the head said last; "": nothing known */
    char said[512];    /* the last line about it */
};

struct driver {
    const struct mb_driver_opts *opts;
    uv_loop_t loop;
    struct mb_grpc *grpc;
    struct mb_gcs *gcs;
    struct mb_drv *state; /* of the present attempt */
    uint32_t attempt;     /* from 1 */
    struct mb_restart restart;
    struct mb_restart_decision next; /* again: taken when the present attempt is released */
    char *causes[DRV_CAUSES_MAX];    /* why attempts were followed by others, oldest first */
    size_t n_causes;
    struct drv_placed placed[DRV_PLACED_MAX]; /* oldest first */
    size_t n_placed;
    int resumes;             /* checkpoint_url had a checkpoint when the run began */
    int store_was_asked;     /* so that is known */
    uint32_t asking_attempt; /* 0: none asks */
    uint64_t ask_until_ms;
    int64_t committed;               /* newest durable iteration of all attempts, -1: none */
    int64_t attempt_iteration;       /* newest that a rank of this attempt reported, -1: none */
    int64_t load_only;               /* this one; nodes found different ones whole. 0: the newest */
    int64_t load_only_after;         /* committed as that was decided: only while it is the same */
    int64_t saved_locally;           /* newest saved by any attempt, -1: none */
    uint64_t launched_ms;            /* of this attempt; 0: not yet */
    uint8_t gang_id[MB_PG_ID_BYTES]; /* the group of the first attempt: what attempts count by */
    int has_gang_id;
    int keeps_group; /* the next attempt takes the group over */
    struct mb_elastic elastic;
    uint32_t n_nodes;       /* of the present attempt, at most opts->num_nodes */
    int is_rays;            /* the head is Ray's own */
    int is_resizing;        /* the wait is cancelled, then another group asked for */
    uint64_t asked_ms;      /* for the present group */
    uint64_t reserve_by_ms; /* monotonic */
    struct mb_signals signals;
    uv_timer_t tick;  /* once a second: renew leases, the KV record, waiting lines */
    uv_timer_t pause; /* before another attempt */
    uint64_t started_ms;
    struct drv_waiting waiting;
    uint8_t pg_id[MB_PG_ID_BYTES];
    uint8_t job_id[MB_JOB_ID_BYTES];
    uint8_t actor_id[MB_ACTOR_ID_BYTES];
    struct mb_gcs_node owner; /* node our job is bound to; only id and port are used */
    int has_actor;
    int own_job;  /* AddJob was ours: MarkJobFinished at the end */
    int reserved; /* CreatePlacementGroup was sent: remove it at the end */
    int releasing;
    int interrupts;
    int signal;                 /* the first of them */
    unsigned verdict_said;      /* its number */
    size_t lines_after_verdict; /* a job's message has the last ten lines of its log */
    int looking;                /* for nodes that died: the request is in flight */
    int looking_adrift;         /* for the bundles of nodes that may be cut off: as well */
    int closing;
    int gcs_is_closing;
    int handles_open;
    uint64_t blind_ms;             /* the last look that had no answer; 0: none */
    struct mb_gcs_op *wait_op;     /* pg_wait in flight */
    struct drv_node *nodes;        /* [opts->num_nodes] */
    struct mb_drv_upload *uploads; /* [opts->num_nodes] */
    char **endpoints;              /* [drv_ranks_max()], as the next two */
    struct drv_exit *exits;        /* of the newest attempt */
    struct drv_rank_output *output;
    struct drv_seal seals[DRV_SEALS_MAX]; /* oldest first */
    size_t n_seals;
    struct drv_leave leaves[DRV_LEAVES_MAX]; /* oldest first */
    size_t n_leaves;
    struct drv_report report;
    struct drv_deadline deadline;
    int deadline_said;      /* that the ranks save and end */
    uint64_t drain_from_ms; /* since when there are only uploads to wait for; 0: there are ranks */
    int drain_is_over;      /* for longer than they may take */
    uint64_t drain_within_ms; /* then: for what the nodes have left to do */
    int record_dirty;
    int record_busy;
};

static inline uint32_t drv_ranks_max(const struct driver *d)
{
    return d->opts->num_nodes * d->opts->ranks_per_node;
}

static inline uint32_t drv_world_size(const struct driver *d) /* of the present attempt */
{
    return d->n_nodes * d->opts->ranks_per_node;
}

/* driver.c: feed one event to the state machine and do what it says. */
void drv_event(struct driver *d, const struct mb_drv_event *e);

void drv_happened(struct driver *d, enum mb_drv_event_kind kind);
/* A request of ours failed; one that was cancelled did not. */
void drv_failed(struct driver *d, const struct mb_err *err);

/* ask_store.c: every node of the attempt; later, if the store is to be asked before. */
void drv_launch(struct driver *d);

/* reserve.c */
void drv_reserve(struct driver *d);
/* While it waits: so many nodes are there for the gang; is_guess: alive, perhaps busy. */
void drv_reserve_look(struct driver *d, uint32_t n_there, int is_guess);
/* While it waits: the group is given back, then another one asked for. */
void drv_reserve_anew(struct driver *d);

/* attempts.c */
/* The present attempt is over. 1: another follows, and d->next says how; drv_attempts_begin() when
 * what the old one held is given back. */
int drv_attempts_conclude(struct driver *d);
void drv_attempts_begin(struct driver *d); /* from the loop, never at once */
void drv_attempts_tick(struct driver *d);  /* every second: which nodes of the gang died */

/* node.c */
int drv_node_init(struct driver *d, uint32_t index, const struct mb_gcs_node *node,
                  struct mb_err *err);
void drv_node_reset(struct drv_node *n); /* between attempts: stream, channel; the slot stays */
void drv_node_dial(struct drv_node *n);
void drv_node_launch(struct drv_node *n);
void drv_node_start(struct drv_node *n);
void drv_node_stop(struct drv_node *n, const char *reason, uint64_t grace_ms);
void drv_node_end(struct drv_node *n, int abandon_uploads);
void drv_node_renew(struct drv_node *n);
/* The GCS says that it is dead; believed if the agent itself is silent, too. */
void drv_node_declared_dead(struct drv_node *n);
/* The head has the node at this address. */
void drv_node_moved(struct drv_node *n, const char *ip, int port);
void drv_node_close(struct drv_node *n); /* stream, channel, timer */

void drv_node_seal(struct drv_node *n, const struct drv_seal *seal);

/* seals.c */
void drv_seals_add(struct driver *d, uint32_t from, const Mobula__V1__Seal *seal);
void drv_seals_repeat(struct drv_node *n); /* a node said hello again */
void drv_seals_durable(struct driver *d, int64_t iteration);
void drv_seals_clear(struct driver *d);

/* leaves.c */
void drv_on_upload(struct drv_node *n, const Mobula__V1__Upload *u);
void drv_leaves_repeat(struct drv_node *n); /* a node said hello again */
void drv_leaves_clear(struct driver *d);
/* node.c. 0: not sent, since nothing runs there (yet, or any more). */
int drv_node_leave(struct drv_node *n, const struct drv_leave *leave, int is_left);

/* durable.c: whether what was saved is durable after all; MB_DRV_STORE_SAID follows, not at once.
 */
void drv_ask_store(struct driver *d);

/* waiting.c */
void drv_waiting_begin(struct driver *d);
void drv_waiting_tick(struct driver *d); /* once a second */
/* Nodes that are alive and could hold a bundle, were they empty. */
uint32_t drv_waiting_count(const struct driver *d, const struct mb_gcs_node *nodes, size_t n);

/* adrift.c */
/* So long this gang waits for a node that may be cut off; 0: not at all. */
uint64_t drv_adrift_patience_ms(const struct driver *d);
/* The head says that the node is dead. 1: it may be cut off, and is waited for. */
int drv_adrift_waits(struct drv_node *n);
void drv_adrift_look(struct driver *d); /* after nodes were looked at: what became of bundles */
void drv_adrift_is_back(struct drv_node *n);

/* output.c */
void drv_output(struct driver *d, uint32_t rank, uint64_t offset, const void *p, size_t n);
void drv_output_flush(struct driver *d); /* also what begins anew with the next attempt */

/* deadline.c */
void drv_on_plan(struct drv_node *n, const Mobula__V1__Plan *plan);
/* What ranks get where a node of the gang goes: more than --stop-grace, or 0 = that. */
uint64_t drv_leaving_grace_ms(const struct driver *d);
/* Once a second: a gang that does not train yet when the time is over. */
void drv_deadline_tick(struct driver *d);
void drv_deadline_bound_log(const struct driver *d);

/* record.c: the KV record that `mobula status` shows; NULL when memory is out. */
/* The nodes of the present attempt are known. The oldest attempts are forgotten, up to a bound. */
int drv_placed_add(struct driver *d, struct mb_err *err);
void drv_placed_clear(struct driver *d);
char *drv_record_json(const struct driver *d);
void drv_record_put(struct driver *d);

#endif
