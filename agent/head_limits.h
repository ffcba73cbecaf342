/* What the drivers of submitted jobs may use on the head's node, from its options, the machine and
 * the environment. Start-up only. */
#ifndef MOBULA_AGENT_HEAD_LIMITS_H
#define MOBULA_AGENT_HEAD_LIMITS_H

#include "agent/options.h"
#include "gcs/head.h"

/* out points into totals. MB_EINVAL: RAY_JOB_START_TIMEOUT_SECONDS is no number of seconds. */
int mb_head_limits_of(const struct mb_agent_options *o,
                      struct mb_job_amount totals[MB_JOB_QUEUE_KINDS_MAX],
                      struct mb_head_job_limits *out, struct mb_err *err);

#endif
