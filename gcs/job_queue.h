/*
 * Which submitted job may start its driver now, on which node, and why the others wait. Pure: time,
 * nodes and free GPUs are arguments, nothing here does I/O.
 *
 * A driver goes to the head's node if it fits there, else to the node with the fewest drivers of
 * those where it fits; one that asks for nothing goes to the head's node or waits.
 *
 * The rule is first come, first served, with overtaking that delays nobody: a job that waits is
 * pinned to the node where it lacks least, and one behind it may start there only with what remains
 * when every job pinned there has set aside, of each resource, as much of its need as is free. So
 * what a waiting job lacks only ever grows towards it. The place of one running job is set aside in
 * the same way. Amounts of the queue's own kinds are counted here; free units of an outside kind
 * (GPUs, which gangs use too) are told before each look. In a line so long that one look at it
 * would take long, the front is looked at each time, and those behind in turns.
 *
 * A job that can never fit is failed as soon as somebody was shown that, and why, it waits; or
 * after MB_JOB_QUEUE_UNSEEN_MS when nobody looks. Not before every node has told what it has.
 */
#ifndef MOBULA_GCS_JOB_QUEUE_H
#define MOBULA_GCS_JOB_QUEUE_H

#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/err.h"

enum {
    MB_JOB_QUEUE_KINDS_MAX = 16,
    MB_JOB_QUEUE_NAME_MAX = 64,
    MB_JOB_QUEUE_SEEN_MS = 500,    /* from the first look to the verdict on what never fits */
    MB_JOB_QUEUE_UNSEEN_MS = 10000 /* the same from its submission, when nobody looks */
};

#define MB_JOB_CPU    "CPU"
#define MB_JOB_GPU    "GPU"
#define MB_JOB_MEMORY "memory" /* bytes */

/* An amount of a resource: what the queue has to give, or what a job needs. */
struct mb_job_amount {
    char name[MB_JOB_QUEUE_NAME_MAX];
    double amount;
    int is_outside; /* of a total: its free units are told by mb_job_queue_set_free() */
};

enum mb_job_place {
    MB_JOB_PLACE_NONE,    /* not in the queue */
    MB_JOB_PLACE_COMING,  /* has its place, but its record is not stored yet */
    MB_JOB_PLACE_WAITING, /* may start */
    MB_JOB_PLACE_RUNNING  /* was told to start, holds what it needs */
};

struct mb_job_queue;
struct mb_job_node; /* where drivers run */

/* Which nodes a job would take. */
struct mb_job_wish {
    const char *what; /* "a node with GPUs": opts.may_use decides; NULL: any. Borrowed while the job
                         is in the queue */
    int is_plain;     /* it asks for nothing: the head's node only */
    int is_patient;   /* waits for such a node to come, instead of never fitting */
};

/* A job's place, embedded by its owner; zero-initialised. Owned by the queue from add or adopt to
 * leave. */
struct mb_job_ticket {
    struct mb_job_queue *queue;
    struct mb_job_ticket *prev, *next;
    uint64_t number; /* in the order in which they joined; kept when it is put back */
    enum mb_job_place place;
    double need[MB_JOB_QUEUE_KINDS_MAX];
    char unknown[MB_JOB_QUEUE_NAME_MAX]; /* a resource nobody has; "": none */
    double unknown_amount;
    uint64_t since_ms, seen_ms; /* seen_ms 0: nobody looked yet */
    uint64_t timeout_ms;        /* longest wait; 0: none */
    uint64_t held_until_ms;     /* it was put back: not started before */
    const char *held_for;       /* for this reason; static */
    size_t position;            /* from 1; valid while the queue is numbered */
    struct mb_job_wish wish;
    struct mb_job_node *node; /* RUNNING: there. Waiting: what it needs is set aside there */
    int is_confirmed;         /* RUNNING: what it needs of outside kinds is taken */
};

struct mb_job_queue_opts {
    size_t max_running, max_waiting;
    const struct mb_job_amount *totals; /* of the head's node; copied; at most KINDS_MAX */
    size_t n_totals;
    /* May the driver of t, which has a wish, run there? NULL: everywhere. */
    int (*may_use)(void *arg, const struct mb_job_ticket *t, const char *node);
    void *arg;
};

#define MB_JOB_HEAD_NODE "" /* the name of the head's node, which is always there */

int mb_job_queue_create(const struct mb_job_queue_opts *opts, struct mb_job_queue **out,
                        struct mb_err *err);
void mb_job_queue_destroy(struct mb_job_queue *q); /* NULL is legal; tickets are left alone */

/* At the end of the queue, as COMING. MB_EFULL beyond max_waiting unless `forced` (after a restart,
 * nobody is turned away who was let in before). */
int mb_job_queue_add(struct mb_job_queue *q, struct mb_job_ticket *t,
                     const struct mb_job_amount *needs, size_t n, uint64_t timeout_ms,
                     uint64_t now_ms, int forced, struct mb_err *err);
/* Right after add or adopt; without it any node will do. */
void mb_job_queue_wish(struct mb_job_ticket *t, const struct mb_job_wish *wish);
/* The kinds that the cluster has are others now: what a waiting job needs, again. */
void mb_job_queue_set_needs(struct mb_job_ticket *t, const struct mb_job_amount *needs, size_t n);
/* Its record is stored: COMING becomes WAITING. */
void mb_job_queue_ready(struct mb_job_ticket *t);
/* Runs already (a restarted head): counted whatever the bounds say. node: its name. */
void mb_job_queue_adopt(struct mb_job_queue *q, struct mb_job_ticket *t, const char *node,
                        const struct mb_job_amount *needs, size_t n);
/* The one that was told to start holds what it needs of outside kinds: it is not free any more, and
 * is not told as free. */
void mb_job_queue_confirm(struct mb_job_ticket *t);
/* It could not start now: back to its old place in line, and not started before until_ms; those
 * behind may start with what it does not need. why: static, said of it in place of what is missing.
 */
void mb_job_queue_put_back(struct mb_job_ticket *t, uint64_t until_ms, const char *why);
/* Those that were put back may start at once. */
void mb_job_queue_release(struct mb_job_queue *q);
/* Ended, stopped or failed: what it held is free. Legal in any place. */
void mb_job_queue_leave(struct mb_job_ticket *t);
/* Somebody was shown that it waits. */
void mb_job_queue_seen(struct mb_job_ticket *t, uint64_t now_ms);
/* ---- nodes ---- */
/* What a node has: new, or changed. *is_new_kind: one that no node had. Kinds beyond
 * MB_JOB_QUEUE_KINDS_MAX are left out (MB_EFULL; the rest counts). */
int mb_job_queue_node(struct mb_job_queue *q, const char *node, const struct mb_job_amount *totals,
                      size_t n, int *is_new_kind, struct mb_err *err);
void mb_job_queue_node_gone(struct mb_job_queue *q, const char *node); /* unknown: legal */
/* Nothing starts on this node, though it has what is needed: on another, or when it is open again.
 */
void mb_job_queue_close_node(struct mb_job_queue *q, const char *node, int is_closed);
/* Free units of an outside kind on a node, as of now. */
void mb_job_queue_set_free(struct mb_job_queue *q, const char *node, const char *name,
                           double amount);
/* Valid until mb_job_queue_node_gone(); NULL: no such node. */
struct mb_job_node *mb_job_queue_find_node(const struct mb_job_queue *q, const char *node);
void mb_job_queue_node_free(struct mb_job_queue *q, struct mb_job_node *node, const char *name,
                            double amount);
/* The k-th kind of what there is for drivers: how much of it the node has, and how much of that is
 * taken. 0: there are no more kinds, or it has not told. */
int mb_job_queue_look(const struct mb_job_queue *q, const char *node, size_t k,
                      struct mb_job_amount *total, double *taken);
/* 0: there are nodes of which it is not known what they have. */
void mb_job_queue_settled(struct mb_job_queue *q, int is_settled);
/* Of the node where it runs; NULL: in no place, or waiting. */
const char *mb_job_queue_node_of(const struct mb_job_ticket *t);

enum mb_job_queue_action {
    MB_JOB_QUEUE_NOTHING,
    MB_JOB_QUEUE_START,      /* *t is RUNNING now */
    MB_JOB_QUEUE_NEVER_FITS, /* fail it, then leave */
    MB_JOB_QUEUE_TIMED_OUT   /* fail it, then leave */
};
/* What is to be done now, one job at a time; ask until NOTHING. */
enum mb_job_queue_action mb_job_queue_next(struct mb_job_queue *q, uint64_t now_ms,
                                           struct mb_job_ticket **t);

/* For one that is COMING or WAITING: its position and what is missing, as a sentence. For one that
 * never fits: what it needs and what there is. 0 or MB_ENOMEM. */
int mb_job_queue_reason(struct mb_job_ticket *t, struct mb_buf *out);

size_t mb_job_queue_waiting(const struct mb_job_queue *q);
size_t mb_job_queue_running(const struct mb_job_queue *q);
/* NULL, or a text naming the promise that is broken. */
const char *mb_job_queue_invariant(const struct mb_job_queue *q);

#endif
