/*
 * The drivers of this node, told to a head that runs elsewhere: after a takeover, on the node that
 * was the head before (proto/mobula/head.proto). Loop-thread only.
 */
#ifndef MOBULA_AGENT_DRIVERS_H
#define MOBULA_AGENT_DRIVERS_H

#include <uv.h>
#include "agent/node.h"
#include "gcs/runner.h"

struct mb_drivers;

/* runner and node are borrowed and must outlive it. Reports while the node is ALIVE; it listens to
 * the runner until mb_drivers_stop(), which must come before a head listens. */
int mb_drivers_start(uv_loop_t *loop, const struct mb_job_runner *runner, struct mb_node *node,
                     struct mb_drivers **out, struct mb_err *err);
/* Frees it, in time; NULL is legal. */
void mb_drivers_stop(struct mb_drivers *d);

#endif
