/* The inside of the queue of jobs: job_queue.c decides, job_queue_nodes.c counts, job_queue_words.c
 * tells. */
#ifndef MOBULA_GCS_JOB_QUEUE_INTERNAL_H
#define MOBULA_GCS_JOB_QUEUE_INTERNAL_H

#include "gcs/job_queue.h"

static const double QUEUE_EPSILON = 1e-9; /* sums of fractions such as 0.1 */

struct queue_line {
    struct mb_job_ticket *first, *last;
    size_t n;
};

struct mb_job_node {
    char name[MB_JOB_QUEUE_NAME_MAX];
    double total[MB_JOB_QUEUE_KINDS_MAX];
    double used[MB_JOB_QUEUE_KINDS_MAX];      /* by RUNNING; of inside kinds */
    double told_free[MB_JOB_QUEUE_KINDS_MAX]; /* of outside kinds */
    double promised[MB_JOB_QUEUE_KINDS_MAX];  /* of them, to who is not confirmed */
    double left[MB_JOB_QUEUE_KINDS_MAX];      /* of one walk */
    size_t n_running;
    int is_gone;   /* freed when nothing runs there */
    int is_closed; /* nothing starts there now */
};

struct queue_kind {
    char name[MB_JOB_QUEUE_NAME_MAX];
    int is_outside;
};

struct mb_job_queue {
    struct queue_kind kinds[MB_JOB_QUEUE_KINDS_MAX];
    size_t n_kinds;
    struct mb_job_node **nodes; /* the first is the head's */
    size_t n_nodes;
    size_t max_running, max_waiting;
    int (*may_use)(void *arg, const struct mb_job_ticket *t, const char *node);
    void *arg;
    struct queue_line waiting, running;
    uint64_t n_joined;
    struct mb_job_ticket *turn; /* where the looks behind the front go on; NULL: right behind it */
    int is_numbered;            /* positions are right */
    int is_unsettled;           /* nodes have not told what they have */
    uint64_t walked_ms;         /* when the line was last looked through to its end */
};

/* ---- job_queue_nodes.c ---- */
int queue_kind_of(const struct mb_job_queue *q, const char *name);
double queue_free_of(const struct mb_job_queue *q, const struct mb_job_node *n, size_t k);
/* May it run there at all, were the node empty? */
int queue_could_hold(const struct mb_job_queue *q, const struct mb_job_ticket *t,
                     const struct mb_job_node *n);
int queue_may_use(const struct mb_job_queue *q, const struct mb_job_ticket *t,
                  const struct mb_job_node *n);
int queue_never_fits(const struct mb_job_queue *q, const struct mb_job_ticket *t);
void queue_hold(struct mb_job_ticket *t, struct mb_job_node *n);
void queue_unhold(struct mb_job_ticket *t);
void queue_free_nodes(struct mb_job_queue *q);

#endif
