/*
 * The gangs of this node: every attempt the drivers launched here, from Hello to Ended, across
 * restarts of the agent. Loop-thread only.
 */
#ifndef MOBULA_AGENT_GANGS_H
#define MOBULA_AGENT_GANGS_H

#include <stddef.h>
#include <stdint.h>
#include <uv.h>
#include "agent/deadline.h"
#include "agent/gang.h"
#include "agent/ledger.h"
#include "agent/log_keeper.h"
#include "agent/resources.h"
#include "agent/supervisor.h"
#include "base/err.h"
#include "base/grpc/grpc.h"

struct mb_gangs;

struct mb_gangs_opts {    /* borrowed for the life of the gangs */
    const char *node_dir; /* gangs live in NODE_DIR/gangs/<placement group>-<attempt>/ */
    const char *node_ip;
    const char *self_dir; /* where the sibling programs are */
    struct mb_log_keeper *logs;
    const struct mb_gpus *gpus;
    /* Launching is remote code execution: 1 if every caller has shown the cluster's token, or
     * the network is trusted (--no-token). Else only callers on this machine may launch. */
    int callers_are_trusted;
};

struct mb_gangs_ops {
    void (*on_changed)(void *arg); /* the ledger changed: report it */
    /* The fence moved: it has to be on disk before anybody hears of it. */
    int (*on_fenced)(void *arg, struct mb_err *err);
    void (*on_all_ended)(void *arg); /* after mb_gangs_stop_all(): none is left */
    /* A lease ran out and nothing of the gang is left here: its driver will not give the group
     * back. job_id: a job that the driver added itself, or NULL. */
    void (*on_abandoned)(void *arg, const struct mb_pg_id *pg, const uint8_t *job_id);
};

int mb_gangs_create(uv_loop_t *loop, struct mb_ledger *ledger, struct mb_init *init,
                    const struct mb_gangs_opts *opts, const struct mb_gangs_ops *ops, void *arg,
                    struct mb_gangs **out, struct mb_err *err);
/* 1: an agent before this one left a gang there that has not ended, logs on their way included. */
int mb_gangs_are_left(const char *node_dir);
/* Take over what a former agent of this node directory left behind; call before listening. */
void mb_gangs_adopt(struct mb_gangs *g);
/* Serve mobula.v1.NodeAgent. */
int mb_gangs_serve(struct mb_gangs *g, struct mb_grpc_server *srv, const uint8_t *node_id,
                   struct mb_err *err);
/* The placement group is gone: its attempts are stopped. */
void mb_gangs_bundles_removed(struct mb_gangs *g, const struct mb_pg_id *pg);
/* The node ends: every attempt saves and ends, nothing new is taken; on_all_ended follows (also
 * when there is none). unix_ms: when the node is gone, 0: not said. Again with an earlier time: it
 * counts. why is static. */
void mb_gangs_stop_all(struct mb_gangs *g, enum mb_deadline_source source, uint64_t unix_ms,
                       const char *why);
/* The same for what is here now; the node stays. */
void mb_gangs_drain(struct mb_gangs *g, enum mb_deadline_source source, uint64_t unix_ms,
                    const char *why);
/* What was saved here and is not durable, since the drain began; borrowed. */
size_t mb_gangs_lost(const struct mb_gangs *g, const char *const **texts);
/* A deadline by the clock, for what is here and what comes. */
void mb_gangs_deadline(struct mb_gangs *g, enum mb_deadline_source source, uint64_t unix_ms);
/* The head is another one, and drivers' jobs of before are not its: a gang of theirs that is
 * abandoned leaves its table alone, where the same id is somebody else's. */
void mb_gangs_forget_jobs(struct mb_gangs *g);
/* The ledger changed: whether a driver comes for what was committed is looked at within a second.
 */
void mb_gangs_look_soon(struct mb_gangs *g);
/* 1: no driver had come for this group's bundles by then, nor has since. */
int mb_gangs_is_undriven(const struct mb_gangs *g, const struct mb_pg_id *pg);
/* Nothing is heard of the head, or it is heard again. */
void mb_gangs_cut_off(struct mb_gangs *g, int is_cut_off);
/* This agent leaves: what it owes of logs is not given up any more, it is the next one's. */
void mb_gangs_keep_logs(struct mb_gangs *g);
/* Lets go of every attempt without ending it. After cb only new streams may come, and are refused,
 * until mb_gangs_destroy(). */
void mb_gangs_close(struct mb_gangs *g, void (*cb)(void *arg), void *arg);
void mb_gangs_destroy(struct mb_gangs *g); /* NULL is legal */

/* For status and metrics. */
struct mb_gang_info {
    const struct mb_pg_id *pg;
    uint32_t attempt;
    const char *job_id;
    enum mb_gang_state state;
    unsigned ranks;
    unsigned ranks_running;
    int64_t iteration;                                /* -1: none yet */
    int64_t saved;                                    /* newest on this node's disk, -1: none */
    int64_t durable;                                  /* newest, -1: none of this agent's life */
    uint64_t pending_done_bytes, pending_total_bytes; /* of what is not durable yet */
    uint64_t rate_bytes_per_s;                        /* of its uploads; 0: not known */
    uint64_t save_ms;                                 /* of the newest saves; 0: not known */
    uint64_t parts, retries;                          /* of its uploads, as n_saves */
    uint64_t n_saves, stall_ms;                       /* since this agent knows the gang */
    struct mb_deadline deadline;
};
size_t mb_gangs_count(const struct mb_gangs *g);
void mb_gangs_info(const struct mb_gangs *g, size_t i, struct mb_gang_info *out);
uint64_t mb_gangs_sent_bytes(const struct mb_gangs *g);    /* uploads */
unsigned mb_gangs_rank_failures(const struct mb_gangs *g); /* since the agent started */

#endif
