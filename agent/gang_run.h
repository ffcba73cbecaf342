/*
 * Inside of gangs.h: one attempt and its parts, shared by gangs.c (registry), gang_io.c
 * (processes), gang_spec.c (what is spawned), gang_report.c (workers' sockets), gang_logs.c (log
 * files), gang_deadline.c (the last checkpoint), gang_store.c (what survives a restart) and
 * control.c (the driver's stream). Nobody else includes it.
 */
#ifndef MOBULA_AGENT_GANG_RUN_H
#define MOBULA_AGENT_GANG_RUN_H

#include "agent/gang_deadline.h"
#include "agent/gang_rules.h"
#include "agent/gangs.h"
#include "agent/orphans.h"
#include "agent/log_keeper.h"
#include "agent/upload/inputs.h"
#include "agent/upload/pull.h"
#include "agent/upload/upload.h"
#include "base/buf.h"
#include "base/logfile.h"
#include "proto/mobula/agent.pb-c.h"
#include "worker/report.h"

enum {
    MB_GANGS_LOST_MAX = 32,
    MB_GANGS_MAX = 256, /* attempts known at a time */
    MB_GANG_RANKS_MAX = MB_SUP_CHILDREN_MAX,
    MB_GANG_LOG_CHUNK_MAX = 64 << 10,
    MB_GANG_LOG_QUEUE_MAX = 1 << 20, /* log bytes waiting in a stream; then the file waits */
    MB_GANG_TICK_MS = 50,
    MB_GANG_ORPHANS_MS = 10000, /* between two looks */
    MB_GANG_UNDRIVEN_MS = 1000  /* until the first one at what was committed */
};

struct mb_gang_run;
struct mb_control;

struct mb_gang_rank {
    struct mb_gang_run *run;
    uint32_t rank;
    uint32_t local_rank;
    uint32_t bundle_index;
    int64_t pid; /* 0: not started */
    int exited;
    int code; /* as a shell says it */
    int signal;
    char *cause;               /* owned; NULL: none */
    char *endpoint;            /* owned; NULL: not reported */
    struct mb_report progress; /* newest; iteration -1: none (owns nothing) */
    int64_t saved;             /* newest iteration on disk, -1: none of this agent's life */
    uint64_t saved_bytes;      /* of it */
    /* report socket */
    int fd;         /* -1: none */
    int polling;    /* uv_poll events asked for */
    int is_partial; /* an incomplete frame waits in the socket: looked at again by the tick */
    uv_poll_t *poll;
    struct mb_buf in;  /* bytes of a frame too large for the socket's own buffer */
    struct mb_buf out; /* frames the worker has not taken yet */
    /* log file */
    struct mb_logfile log;    /* fd -1: not open */
    uint64_t log_offset;      /* sent to the driver up to here */
    uint64_t log_seen_size;   /* for partial lines: size at the last look ... */
    uint64_t log_seen_ms;     /* ... and since when it has not grown */
    struct mb_kept_log *kept; /* NULL: not kept (any more) */
    char *lost;               /* owned; of its log, Ended tells it; NULL: nothing */
};

struct mb_gang_run {
    struct mb_gangs *owner;
    struct mb_gang fsm;
    struct mb_pg_id pg;
    char pg_hex[2 * MB_PG_ID_BYTES + 1];
    struct mb_pg_id gang; /* the placement group of attempt 1: what attempts are counted by */
    uint32_t attempt;
    char *job_id;
    uint8_t own_job[MB_JOB_ID_BYTES]; /* the driver's own entry in the job table */
    int has_own_job;
    char *dir;
    uint32_t world_size;
    uint32_t num_nodes;
    uint32_t node_rank;
    uint32_t rendezvous_port; /* said to the driver, nobody else's while it lives; 0: none yet */
    int is_worker;
    uint32_t stop_grace_ms;
    uint64_t stopped_ms; /* when this agent told the ranks to stop; 0: it did not */
    struct mb_gang_deadline deadline;
    struct mb_gang_rank *ranks;
    size_t n_ranks;
    int is_launched;      /* Launched was due: pids are known */
    char *checkpoint_dir; /* NULL: no checkpoint */
    char *url;            /* "" = local only */
    char *load_url;
    int64_t load_iteration; /* 0: the newest that is whole */
    int watch_tracker;
    uint32_t keep_last;       /* checkpoints in the store; 0: all */
    uint32_t local_keep_last; /* in checkpoint_dir; 0: all */
    int64_t loaded_iteration;
    char *failure; /* owned; NULL: none */
    int failure_code;
    int first_failed_rank;      /* -1: none */
    Mobula__V1__Launch *launch; /* owned until the processes are asked for */
    int launch_waits;           /* for the processes of an older attempt */
    struct mb_supervisor *sup;
    struct mb_pull *pull;
    struct mb_inputs *inputs;
    struct mb_upload *upload;
    struct mb_grpc_stream *stream; /* the driver, or NULL */
    struct mb_control *control;    /* ... and its end in control.c */
    uint64_t ended_by_ms;          /* ENDED: log lines are waited for until then */
    uint64_t logs_by_ms;           /* ... and logs on their way to the store; 0: their own bound */
    int close_pending;             /* parts still closing after ENDED */
    int is_abandoned;              /* the lease ran out */
    int is_closing;
};

struct mb_gangs {
    uv_loop_t *loop;
    struct mb_ledger *ledger;
    struct mb_init *init;
    struct mb_gangs_opts opts;
    const struct mb_gangs_ops *ops;
    void *arg;
    const uint8_t *node_id;
    struct mb_gang_run *runs[MB_GANGS_MAX];
    size_t n_runs;
    uv_timer_t tick;
    uv_timer_t orphan_timer; /* looks for groups that no driver speaks for */
    struct mb_orphans orphans;
    uint8_t *scratch; /* MB_REPORT_FRAME_MAX + 4: peeked frames, log chunks */
    unsigned rank_failures;
    uint64_t sent_bytes_before; /* of attempts that have ended */
    uint64_t start_ms;
    enum mb_deadline_source deadline_source; /* of the node itself */
    uint64_t deadline_unix_ms;               /* 0: none */
    char *lost[MB_GANGS_LOST_MAX]; /* owned texts, oldest first; more are counted in the log only */
    size_t n_lost;
    int is_drained;
    int is_cut_off; /* nothing is heard of the head */
    int stopping;
    void (*close_cb)(void *arg);
    void *close_arg;
    int timers_closed;
};

/* gangs.c */
struct mb_gang_run *mb_gangs_find(struct mb_gangs *g, const struct mb_pg_id *pg, uint32_t attempt);
struct mb_gang_run *mb_gangs_new_run(struct mb_gangs *g, const struct mb_pg_id *pg,
                                     const struct mb_pg_id *gang, uint32_t attempt,
                                     const char *job_id, struct mb_err *err);
/* An older attempt of the gang that still has processes, or NULL. */
struct mb_gang_run *mb_gangs_older_with_processes(struct mb_gangs *g, const struct mb_gang_run *r);
void mb_gangs_note_lost(struct mb_gang_run *r, const char *text);
void mb_gangs_run_closed(struct mb_gang_run *r); /* all parts are closed: forget it */

/* gang_io.c */
/* Step the machine and carry out its actions; a refused event is logged and returned. */
int mb_gang_run_event(struct mb_gang_run *r, enum mb_gang_event event, struct mb_err *err);
/* Takes the unpacked message. */
int mb_gang_run_launch(struct mb_gang_run *r, Mobula__V1__Launch *launch, struct mb_err *err);
void mb_gang_run_fail(struct mb_gang_run *r, int code, const char *text);
void mb_gang_run_adopt(struct mb_gang_run *r);
void mb_gang_run_tick(struct mb_gang_run *r, uint64_t now_ms);
void mb_gang_run_begin_launch(struct mb_gang_run *r);
void mb_gang_run_spawn(struct mb_gang_run *r); /* all that ranks need is here */
void mb_gang_run_launch_failed(struct mb_gang_run *r, int code, const char *text);
/* What the ranks need from a store was fetched, or was not. 1: the launch goes on; 0: what follows
 * from a close, a stop or a failure has been done. */
int mb_gang_run_fetched(struct mb_gang_run *r, const char *what, const struct mb_err *err);
void mb_gang_run_close(struct mb_gang_run *r); /* closes every part; mb_gangs_run_closed follows */
/* It has ended, and the node stops, at unix_ms (0: nobody said). */
void mb_gang_run_stop_ended(struct mb_gang_run *r, uint64_t unix_ms);
void mb_gang_run_part_closed(void *r); /* one of them is */

/* gang_inputs.c */
/* Fetches what ranks read, then spawns them; without inputs at once. */
void mb_gang_inputs_begin(struct mb_gang_run *r);
int mb_gang_wants_shard(void *r, const char *path); /* for mb_pull_set_filter() */

/* gang_spec.c */
int mb_gang_spec_start(struct mb_gang_run *r, const struct mb_supervisor_ops *ops,
                       struct mb_err *err);
int mb_gang_spec_ranks(struct mb_gang_run *r, const Mobula__V1__Launch *launch, struct mb_err *err);
char *mb_gang_log_path(const struct mb_gang_run *r, uint32_t rank);

/* gang_report.c */
void mb_gang_report_open(struct mb_gang_rank *rank, int fd);
void mb_gang_report_tick(struct mb_gang_rank *rank);
void mb_gang_report_drain(struct mb_gang_rank *rank); /* the rank is gone: take what it said last */
void mb_gang_report_close(struct mb_gang_rank *rank);
void mb_gang_report_send(struct mb_gang_rank *rank, const struct mb_report *message);

/* gang_logs.c */
void mb_gang_logs_pump(struct mb_gang_run *r, uint64_t now_ms);
int mb_gang_logs_drained(const struct mb_gang_rank *rank); /* 1: all of it is on the stream */

/* Keeps a rank's log below its cap and sends it to the store, for a rank that is about to start
 * with MOBULA_LOG_MAX_BYTES and MOBULA_LOG_WAIT (NULL: not set). */
int mb_gang_logs_keep(struct mb_gang_rank *rank, const char *max_bytes, const char *wait,
                      struct mb_err *err);
void mb_gang_logs_adopt(struct mb_gang_run *r); /* those that an earlier agent of this node kept */
void mb_gang_logs_end(struct mb_gang_run *r);   /* no rank is left */
void mb_gang_logs_hurry(struct mb_gang_run *r, uint64_t by_ms); /* nobody waits longer */
void mb_gang_logs_stay(struct mb_gang_run *r); /* no such bound any more: another agent goes on */
int mb_gang_logs_sent(const struct mb_gang_run *r); /* 1: nothing of them is on its way */
/* 1: the driver has not heard yet what became of the logs. */
int mb_gang_logs_owe(const struct mb_gang_run *r);
void mb_gang_logs_drop(struct mb_gang_run *r);

/* gang_store.c */
void mb_gang_store_save(const struct mb_gang_run *r);
struct mb_gang_run *mb_gang_store_load(struct mb_gangs *g, const char *dir, struct mb_err *err);

/* control.c: what goes to the driver; nothing without a stream, mb_control_repeat() tells later. */
int mb_control_add(struct mb_gangs *g, struct mb_grpc_server *srv, struct mb_err *err);
void mb_control_note(struct mb_gang_run *r, const char *text); /* for people */
void mb_control_launched(struct mb_gang_run *r);
void mb_control_endpoint(struct mb_gang_run *r, const struct mb_gang_rank *rank);
void mb_control_progress(struct mb_gang_run *r, const struct mb_gang_rank *rank);
int mb_control_log(struct mb_gang_run *r, uint32_t rank, uint64_t offset, const void *p, size_t n);
void mb_control_rank_exit(struct mb_gang_run *r, struct mb_gang_rank *rank);
void mb_control_saved(struct mb_gang_run *r, uint32_t rank, int64_t iteration, uint64_t bytes);
void mb_control_upload(struct mb_gang_run *r, const struct mb_upload_status *status);
void mb_control_sealed(struct mb_gang_run *r, int64_t iteration, const uint64_t *prints, size_t n);
void mb_control_plan(struct mb_gang_run *r);
void mb_control_failure(struct mb_gang_run *r);
void mb_control_ended(struct mb_gang_run *r); /* and the stream is finished */
void mb_control_unbind(struct mb_gang_run *r);

#endif
