/*
 * What a driver sees: its environment, made of the agent's own, the runtime_env of the submission
 * and what Ray promises a job (docs/operations.md has the list). Pure.
 */
#ifndef MOBULA_AGENT_JOB_ENV_H
#define MOBULA_AGENT_JOB_ENV_H

#include <stddef.h>
#include <stdint.h>
#include "agent/job_limits.h"
#include "base/err.h"
#include "gcs/runner.h"

struct mb_job_env {
    char **vars; /* owned, NULL-terminated "NAME=value" */
    size_t n;
    int stop_signal; /* RAY_JOB_STOP_SIGNAL: SIGTERM or SIGINT */
    struct mb_job_limits limits;
    uint32_t stop_grace_ms; /* RAY_JOB_STOP_WAIT_TIME_S; 30 s, since a driver may have to save */
};

/*
 * inherited: the agent's environment. bin_dir goes in front of PATH. Values of env_vars may use
 * ${NAME} of what is set before them, as in Ray. Secrets of the agent's object store are left out
 * unless the submission sets them or MOBULA_JOB_STORE_KEYS=1 is inherited.
 * MB_EINVAL names the field that is wrong.
 */
int mb_job_env_build(const struct mb_job_spec *spec, char *const *inherited, const char *bin_dir,
                     struct mb_job_env *out, struct mb_err *err);
/* NAME=value replaces or adds; 0 or MB_ENOMEM. */
int mb_job_env_set(struct mb_job_env *env, const char *name, const char *value);
const char *mb_job_env_get(const struct mb_job_env *env, const char *name); /* NULL: not set */
void mb_job_env_close(struct mb_job_env *env);

/* A shell that knows pipefail; NULL: there is none. POSIX 2024 has it, many a /bin/sh not yet. */
const char *mb_job_pipefail_shell(void);

#endif
