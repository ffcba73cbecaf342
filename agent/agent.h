/*
 * The agent as a whole: puts the parts together, in the order they need each other, and takes them
 * apart again. One per process.
 */
#ifndef MOBULA_AGENT_AGENT_H
#define MOBULA_AGENT_AGENT_H

#include "agent/options.h"
#include "base/err.h"

/* Runs until a signal, a drain or a failure ends it; the loop is inside. MB_OK: ended as asked.
 * Otherwise err is the one line that says why the node could not come up. */
int mb_agent_run(const struct mb_agent_options *opts, struct mb_err *err);

#endif
