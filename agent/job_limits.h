/*
 * What the processes of one job may take on this node, by variables of their environment:
 *   MOBULA_JOB_MEMORY_LIMIT   e.g. 2GiB: of the driver with all it starts, and of the ranks
 *   MOBULA_JOB_NOFILE         open files of each process
 *   MOBULA_JOB_CORE           1: core files are allowed (they are not otherwise)
 * Set by env_vars of the submission; in the agent's environment they are the node's defaults. Pure.
 */
#ifndef MOBULA_AGENT_JOB_LIMITS_H
#define MOBULA_AGENT_JOB_LIMITS_H

#include <stdint.h>
#include "agent/supervise/spec.h"
#include "base/err.h"

struct mb_job_limits {
    uint64_t memory_bytes; /* 0: none */
    uint32_t nofile;       /* 0: as inherited */
    int core_files;
};

/* vars: NULL-terminated "NAME=value", the first of a name counts. MB_EINVAL names the variable that
 * is wrong; *out is unchanged then. */
int mb_job_limits_read(char *const *vars, struct mb_job_limits *out, struct mb_err *err);
void mb_job_limits_apply(const struct mb_job_limits *limits, struct mb_sup_spec *spec);

#endif
