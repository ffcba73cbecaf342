/* CPUs, memory and what --resources names; GPUs are the ledger's and not told here. */
#include "agent/head_limits.h"

#include <stdlib.h>
#include "agent/resources.h"
#include "base/str.h"

int mb_head_limits_of(const struct mb_agent_options *o,
                      struct mb_job_amount totals[MB_JOB_QUEUE_KINDS_MAX],
                      struct mb_head_job_limits *out, struct mb_err *err)
{
    const char *timeout_s = getenv("RAY_JOB_START_TIMEOUT_SECONDS");
    size_t cpus = mb_cpus_detect(), n = 0;
    double seconds = 0;
    int rc = MB_OK;

    totals[n++] = (struct mb_job_amount){
        .name = MB_JOB_CPU, .amount = o->num_cpus >= 0 ? (double)o->num_cpus : (double)cpus};
    totals[n++] = (struct mb_job_amount){
        .name = MB_JOB_MEMORY,
        .amount = o->memory_bytes >= 0 ? (double)o->memory_bytes : (double)mb_memory_detect()};
    for (size_t i = 0; i < o->n_resources; i++)
        totals[n++] = o->resources[i];
    if (timeout_s != NULL && *timeout_s != '\0') {
        rc = mb_parse_double(timeout_s, "RAY_JOB_START_TIMEOUT_SECONDS", &seconds, err);
        if (rc == MB_OK && !(seconds >= 0 && seconds < 1e9))
            rc = mb_err_set(err, MB_EINVAL, "RAY_JOB_START_TIMEOUT_SECONDS: %s is no wait",
                            timeout_s);
    }
    *out = (struct mb_head_job_limits){.max_running =
                                           o->max_running_jobs > 0 ? (size_t)o->max_running_jobs
                                           : 4 * cpus > MB_HEAD_RUNNING_JOBS ? 4 * cpus
                                                                             : MB_HEAD_RUNNING_JOBS,
                                       .max_queued = (size_t)o->max_queued_jobs,
                                       .max_ended = (size_t)o->max_ended_jobs,
                                       .start_timeout_ms = (uint64_t)(seconds * 1000),
                                       .totals = totals,
                                       .n_totals = n};
    return rc;
}
