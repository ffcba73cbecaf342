/*
 *  1. what is inherited, without what belongs to the agent alone;
 *  2. PYTHONUNBUFFERED=1, which a submission may override;
 *  3. runtime_env.env_vars, with ${NAME} expanded;
 *  4. what nobody may override: RAY_ADDRESS, the job's configuration, our programs in PATH.
 * A runtime_env that is no object, or a value that is no string, fails with its name; nothing is
 * built then.
 */
#include "agent/job_env.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>
#include <strings.h>
#include <jansson.h>
#include "agent/supervise/secrets.h"
#include "base/alloc.h"
#include "base/buf.h"
#include "base/str.h"

enum { STOP_GRACE_MS = 30 * 1000, STOP_GRACE_MAX_S = 24 * 3600 };

static const char *const agent_only[] = {"MOBULA_INIT_FD",
                                         "MOBULA_LIFE_FD",
                                         "MOBULA_READY_FD",
                                         "MOBULA_REPORT_FD",
                                         "MOBULA_SUPERVISOR",
                                         "MOBULA_SIGNALS",
                                         NULL};

static int is_one_of(const char *var, const char *const *names)
{
    for (; *names != NULL; names++) {
        size_t n = strlen(*names);

        if (strncmp(var, *names, n) == 0 && var[n] == '=')
            return 1;
    }
    return 0;
}

static size_t find(const struct mb_job_env *env, const char *name, size_t name_len)
{
    for (size_t i = 0; i < env->n; i++) {
        if (strncmp(env->vars[i], name, name_len) == 0 && env->vars[i][name_len] == '=')
            return i;
    }
    return env->n;
}

const char *mb_job_env_get(const struct mb_job_env *env, const char *name)
{
    size_t i = find(env, name, strlen(name));

    return i < env->n ? env->vars[i] + strlen(name) + 1 : NULL;
}

int mb_job_env_set(struct mb_job_env *env, const char *name, const char *value)
{
    size_t i = find(env, name, strlen(name));
    char *var = mb_asprintf("%s=%s", name, value);
    char **grown;

    if (var == NULL)
        return MB_ENOMEM;
    if (i < env->n) {
        mb_free(env->vars[i]);
        env->vars[i] = var;
        return 0;
    }
    grown = mb_reallocarray(env->vars, env->n + 2, sizeof(*grown));
    if (grown == NULL) {
        mb_free(var);
        return MB_ENOMEM;
    }
    env->vars = grown;
    env->vars[env->n++] = var;
    env->vars[env->n] = NULL;
    return 0;
}

void mb_job_env_close(struct mb_job_env *env)
{
    for (size_t i = 0; i < env->n; i++)
        mb_free(env->vars[i]);
    mb_free(env->vars);
    *env = (struct mb_job_env){0};
}

static int inherit(struct mb_job_env *env, char *const *inherited)
{
    int keep_keys = 0;

    for (char *const *v = inherited; *v != NULL; v++)
        keep_keys |= strcmp(*v, "MOBULA_JOB_STORE_KEYS=1") == 0;
    for (char *const *v = inherited; *v != NULL; v++) {
        const char *eq = strchr(*v, '=');
        char *name;
        int rc;

        if (eq == NULL || is_one_of(*v, agent_only) || (!keep_keys && mb_is_store_key(*v)))
            continue;
        name = mb_strndup(*v, (size_t)(eq - *v));
        rc = name != NULL ? mb_job_env_set(env, name, eq + 1) : MB_ENOMEM;
        mb_free(name);
        if (rc != 0)
            return rc;
    }
    return 0;
}

/* ${NAME} becomes its value, or nothing when it is not set. */
static int expand(const struct mb_job_env *env, const char *value, struct mb_buf *out)
{
    while (*value != '\0') {
        const char *end = value[0] == '$' && value[1] == '{' ? strchr(value, '}') : NULL;
        size_t at;
        int rc;

        if (end == NULL) {
            rc = mb_buf_add(out, value++, 1);
        } else {
            size_t n = (size_t)(end - value - 2);

            at = find(env, value + 2, n);
            rc = at < env->n ? mb_buf_puts(out, env->vars[at] + n + 1) : 0;
            value = end + 1;
        }
        if (rc != 0)
            return rc;
    }
    return 0;
}

static int apply_env_vars(struct mb_job_env *env, json_t *vars, struct mb_err *err)
{
    const char *name;
    json_t *value;

    if (vars == NULL || json_is_null(vars))
        return 0;
    if (!json_is_object(vars))
        return mb_err_set(err, MB_EINVAL, "runtime_env.env_vars must be an object");
    json_object_foreach(vars, name, value)
    {
        struct mb_buf b = {0};
        int rc;

        if (!json_is_string(value) || *name == '\0' || strchr(name, '=') != NULL)
            return mb_err_set(err, MB_EINVAL, "runtime_env.env_vars: %s must be a string", name);
        rc = expand(env, json_string_value(value), &b);
        if (rc == 0)
            rc = mb_job_env_set(env, name, mb_buf_str(&b));
        mb_buf_close(&b);
        if (rc != 0)
            return mb_err_set(err, rc, "out of memory");
    }
    return 0;
}

static int apply_stop(struct mb_job_env *env, struct mb_err *err)
{
    const char *name = mb_job_env_get(env, "RAY_JOB_STOP_SIGNAL");
    const char *wait_s = mb_job_env_get(env, "RAY_JOB_STOP_WAIT_TIME_S");
    double seconds;

    env->stop_signal = SIGTERM;
    env->stop_grace_ms = STOP_GRACE_MS;
    if (name != NULL && strcasecmp(name, "SIGINT") == 0)
        env->stop_signal = SIGINT;
    else if (name != NULL && strcasecmp(name, "SIGTERM") != 0)
        return mb_err_set(err, MB_EINVAL, "RAY_JOB_STOP_SIGNAL: SIGTERM or SIGINT, not %s", name);
    if (wait_s == NULL)
        return 0;
    if (mb_parse_double(wait_s, "RAY_JOB_STOP_WAIT_TIME_S", &seconds, err) != 0)
        return MB_EINVAL;
    if (!(seconds >= 0 && seconds <= STOP_GRACE_MAX_S))
        return mb_err_set(err, MB_EINVAL, "RAY_JOB_STOP_WAIT_TIME_S: 0 to %d seconds, not %s",
                          STOP_GRACE_MAX_S, wait_s);
    env->stop_grace_ms = (uint32_t)(seconds * 1000);
    return 0;
}

/* {"runtime_env": ..., "metadata": {"job_submission_id": ID, "job_name": ID, user's}} */
static char *job_config(const struct mb_job_spec *spec, json_t *runtime_env, json_t *metadata)
{
    json_t *all = json_object(), *names = json_object();
    char *text = NULL;

    if (json_object_set_new(names, "job_submission_id", json_string(spec->submission_id)) == 0 &&
        json_object_set_new(names, "job_name", json_string(spec->submission_id)) == 0 &&
        (metadata == NULL || json_object_update(names, metadata) == 0) &&
        json_object_set(all, "runtime_env", runtime_env) == 0 &&
        json_object_set(all, "metadata", names) == 0)
        text = json_dumps(all, JSON_COMPACT);
    json_decref(names);
    json_decref(all);
    return text;
}

/* What Ray's supervisor gives a driver for the Ray that it may start, unless the submission has it.
 */
static int apply_rays(struct mb_job_env *env, const struct mb_job_spec *spec)
{
    static const char NOSET[] = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES";
    static const char NICE[] = "RAY_worker_niceness";
    int rc = 0;

    if (spec->n_gpus == 0 && mb_job_env_get(env, NOSET) == NULL)
        rc = mb_job_env_set(env, NOSET, "1");
    if (rc == 0 && mb_job_env_get(env, NICE) == NULL)
        rc = mb_job_env_set(env, NICE, "0");
    return rc;
}

static int apply_ours(struct mb_job_env *env, const struct mb_job_spec *spec, const char *bin_dir,
                      json_t *runtime_env, json_t *metadata)
{
    const char *path = mb_job_env_get(env, "PATH");
    char *full_path = mb_asprintf("%s:%s", bin_dir, path != NULL ? path : "/usr/bin:/bin");
    char *config = job_config(spec, runtime_env, metadata);
    int rc = MB_ENOMEM;

    if (full_path != NULL && config != NULL && mb_job_env_set(env, "PATH", full_path) == 0 &&
        mb_job_env_set(env, "RAY_ADDRESS", spec->ray_address) == 0 &&
        mb_job_env_set(env, "RAY_JOB_CONFIG_JSON_ENV_VAR", config) == 0)
        rc = apply_rays(env, spec);
    mb_free(full_path);
    mb_free(config);
    return rc;
}

static json_t *load(const char *text, const char *what, struct mb_err *err)
{
    json_error_t why;
    json_t *j = json_loads(text != NULL && *text != '\0' ? text : "{}", 0, &why);

    if (j == NULL) {
        mb_err_set(err, MB_EINVAL, "%s is not JSON: %s at character %d", what, why.text,
                   why.position);
    } else if (!json_is_object(j)) {
        json_decref(j);
        j = NULL;
        mb_err_set(err, MB_EINVAL, "%s must be an object", what);
    }
    return j;
}

int mb_job_env_build(const struct mb_job_spec *spec, char *const *inherited, const char *bin_dir,
                     struct mb_job_env *out, struct mb_err *err)
{
    json_t *metadata = NULL, *runtime_env = load(spec->runtime_env_json, "runtime_env", err);
    struct mb_job_env env = {0};
    int rc = MB_EINVAL;

    if (runtime_env == NULL)
        return MB_EINVAL;
    metadata = load(spec->metadata_json, "metadata", err);
    if (metadata == NULL)
        goto out;
    if (inherit(&env, inherited) != 0 || mb_job_env_set(&env, "PYTHONUNBUFFERED", "1") != 0)
        goto no_memory;
    rc = apply_env_vars(&env, json_object_get(runtime_env, "env_vars"), err);
    if (rc == 0)
        rc = apply_stop(&env, err);
    if (rc == 0)
        rc = mb_job_limits_read(env.vars, &env.limits, err);
    if (rc != 0)
        goto out;
    rc = apply_ours(&env, spec, bin_dir, runtime_env, metadata);
    if (rc == 0) {
        *out = env;
        env = (struct mb_job_env){0};
        goto out;
    }
no_memory:
    rc = mb_err_set(err, MB_ENOMEM, "out of memory");
out:
    json_decref(runtime_env);
    json_decref(metadata);
    mb_job_env_close(&env);
    return rc;
}

const char *mb_job_pipefail_shell(void)
{
    static const char *const bash[] = {"/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash"};

    for (size_t i = 0; i < sizeof(bash) / sizeof(bash[0]); i++)
        if (access(bash[i], X_OK) == 0)
            return bash[i];
    return NULL;
}
