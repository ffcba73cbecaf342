/*
 * Which submitted job may start its driver now, and why the others wait. Pure: time and free GPUs
 * are arguments, nothing here does I/O.
 *
 * The rule is first come, first served, with overtaking that delays nobody: a job behind one that
 * waits may start only with what remains when every job before it has set aside, of each resource,
 * as much of its need as is free. So what a waiting job lacks only ever grows towards it. The place
 * of one running job is set aside in the same way. Amounts of the queue's own kinds are counted
 * here; free units of an outside kind (GPUs, which gangs use too) are told before each look.
 *
 * A job that can never fit is failed as soon as somebody was shown that, and why, it waits; or
 * after MB_JOB_QUEUE_UNSEEN_MS when nobody looks.
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

/* A job's place, embedded by its owner; zero-initialised. Owned by the queue from add or adopt to
 * leave. */
struct mb_job_ticket {
    struct mb_job_queue *queue;
    struct mb_job_ticket *prev, *next;
    enum mb_job_place place;
    double need[MB_JOB_QUEUE_KINDS_MAX];
    char unknown[MB_JOB_QUEUE_NAME_MAX]; /* a resource nobody has; "": none */
    double unknown_amount;
    uint64_t since_ms, seen_ms; /* seen_ms 0: nobody looked yet */
    uint64_t timeout_ms;        /* longest wait; 0: none */
    size_t position;            /* from 1; valid while the queue is numbered */
};

struct mb_job_queue_opts {
    size_t max_running, max_waiting;
    const struct mb_job_amount *totals; /* copied; at most MB_JOB_QUEUE_KINDS_MAX */
    size_t n_totals;
};

int mb_job_queue_create(const struct mb_job_queue_opts *opts, struct mb_job_queue **out,
                        struct mb_err *err);
void mb_job_queue_destroy(struct mb_job_queue *q); /* NULL is legal; tickets are left alone */

/* At the end of the queue, as COMING. MB_EFULL beyond max_waiting unless `forced` (after a restart,
 * nobody is turned away who was let in before). */
int mb_job_queue_add(struct mb_job_queue *q, struct mb_job_ticket *t,
                     const struct mb_job_amount *needs, size_t n, uint64_t timeout_ms,
                     uint64_t now_ms, int forced, struct mb_err *err);
/* Its record is stored: COMING becomes WAITING. */
void mb_job_queue_ready(struct mb_job_ticket *t);
/* Runs already (a restarted head): counted whatever the bounds say. */
void mb_job_queue_adopt(struct mb_job_queue *q, struct mb_job_ticket *t,
                        const struct mb_job_amount *needs, size_t n);
/* It could not start for lack of what others took meanwhile: back to the front of those waiting. */
void mb_job_queue_put_back(struct mb_job_ticket *t);
/* Ended, stopped or failed: what it held is free. Legal in any place. */
void mb_job_queue_leave(struct mb_job_ticket *t);
/* Somebody was shown that it waits. */
void mb_job_queue_seen(struct mb_job_ticket *t, uint64_t now_ms);
/* Free units of an outside kind, as of now. */
void mb_job_queue_set_free(struct mb_job_queue *q, const char *name, double amount);

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
