/*
 * The drivers of this node, and what it has for drivers, told to a head that runs elsewhere
 * (proto/mobula/head.proto). Loop-thread only.
 */
#ifndef MOBULA_AGENT_DRIVERS_H
#define MOBULA_AGENT_DRIVERS_H

#include <uv.h>
#include "agent/jobs.h"
#include "agent/node.h"
#include "gcs/job_queue.h"
#include "gcs/runner.h"

struct mb_drivers;

struct mb_drivers_opts {
    struct mb_jobs *jobs; /* borrowed, as is node: both must outlive it */
    struct mb_node *node;
    int takes_drivers;                  /* the head may start some here */
    const struct mb_job_amount *totals; /* what there is for them; copied */
    size_t n_totals;
};

/* Reports while the node is ALIVE; it listens to the runner until mb_drivers_stop(), which must
 * come before a head listens. */
int mb_drivers_start(uv_loop_t *loop, const struct mb_drivers_opts *opts, struct mb_drivers **out,
                     struct mb_err *err);
/* What this node has is told at once: the head may be another, or this node anew. */
void mb_drivers_tell(struct mb_drivers *d);
/* Frees it, in time; NULL is legal. */
void mb_drivers_stop(struct mb_drivers *d);

#endif
