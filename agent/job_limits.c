/* Text to numbers; an empty value is as good as none, so that a job can lift a node's default. */
#include "agent/job_limits.h"

#include <string.h>
#include "base/joblimit.h"

/* Its value; NULL: not set, or empty. */
static const char *value_of(char *const *vars, const char *name)
{
    size_t n = strlen(name);

    for (; *vars != NULL; vars++)
        if (strncmp(*vars, name, n) == 0 && (*vars)[n] == '=')
            return (*vars)[n + 1] != '\0' ? *vars + n + 1 : NULL;
    return NULL;
}

int mb_job_limits_read(char *const *vars, struct mb_job_limits *out, struct mb_err *err)
{
    const char *memory = value_of(vars, "MOBULA_JOB_MEMORY_LIMIT");
    const char *nofile = value_of(vars, "MOBULA_JOB_NOFILE");
    const char *core = value_of(vars, "MOBULA_JOB_CORE");
    struct mb_job_limits limits = {0};
    uint64_t files = 0;

    if (memory != NULL &&
        mb_joblimit_memory(memory, "MOBULA_JOB_MEMORY_LIMIT", &limits.memory_bytes, err) != 0)
        return MB_EINVAL;
    if (nofile != NULL && mb_joblimit_nofile(nofile, "MOBULA_JOB_NOFILE", &files, err) != 0)
        return MB_EINVAL;
    limits.nofile = (uint32_t)files;
    if (core != NULL && strcmp(core, "0") != 0 && strcmp(core, "1") != 0)
        return mb_err_set(err, MB_EINVAL, "MOBULA_JOB_CORE: 0 or 1, not %s", core);
    limits.core_files = core != NULL && core[0] == '1';
    *out = limits;
    return 0;
}

void mb_job_limits_apply(const struct mb_job_limits *limits, struct mb_sup_spec *spec)
{
    spec->memory_limit_bytes = limits->memory_bytes;
    spec->nofile = limits->nofile;
    spec->core_files = limits->core_files;
}
