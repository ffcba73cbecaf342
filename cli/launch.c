/*
 * 1. Who we are: inside a submitted job the submission id and its env_vars come from
 *    RAY_JOB_CONFIG_JSON_ENV_VAR; elsewhere the run gets a name of its own.
 * 2. What the ranks get: variables of the communication and math libraries that this process has,
 *    then the job's env_vars. Nothing else: credentials never travel by accident.
 * 3. The cluster's token, when it has one.
 */
#include "cli/launch.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "base/address.h"
#include "base/alloc.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/moment.h"
#include "base/str.h"
#include "cli/driver/driver.h"
#include "cli/slurm_step.h"
#include "gcs/token.h"

extern char **environ;

static const char *const forwarded_prefixes[] = {
    "NCCL_",    "RCCL_",     "GLOO_", "TORCH_", "FI_",         "UCX_",      "HSA_", "HIP_",
    "PYTORCH_", "MEGATRON_", "OMP_",  "NVTE_",  "TOKENIZERS_", "OPENBLAS_", NULL,
};

static const char *const forwarded_names[] = {
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "GPU_MAX_HW_QUEUES",
    "LOGLEVEL",
    "MOBULA_LOG_MAX_BYTES",
    "MOBULA_LOG_WAIT",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "LD_LIBRARY_PATH",
    "PATH",
    "HOME",
    "MOBULA_CPU_THREADS",
    "MOBULA_CUDA_TUNE",
    "MOBULA_TENSOR_STRIPS",
    "MOBULA_TUNING_CACHE",
    NULL,
};

/* Of a job's driver besides: where the cluster is, which job it is. */
static const char *const drivers_names[] = {"RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", NULL};

/* Everything that must outlive the driver's run. */
struct context {
    json_t *config; /* RAY_JOB_CONFIG_JSON_ENV_VAR, or NULL */
    const char *submission_id;
    char name[80];
    char *driver_name;
    char *cwd;
    char *save_dir; /* absolute: agents do not share our working directory */
    char *token;
    char **env; /* owned strings, NULL-terminated */
    size_t n_env;
};

void mb_launch_defaults(struct mb_launch *l)
{
    memset(l, 0, sizeof(*l));
    l->wait_timeout_ms = 3600000;
    l->stop_grace_ms = 60000;
    l->lease_ms = 60000;
    l->restart_delay_ms = 1000;
    l->elastic_wait_ms = 30000;
}

int mb_launch_is_url(const char *s)
{
    return mb_starts_with(s, "s3://") || mb_starts_with(s, "gs://") || mb_starts_with(s, "file://");
}

static int name_is_forwarded(const char *entry, size_t name_len)
{
    for (size_t i = 0; forwarded_prefixes[i]; i++)
        if (mb_starts_with(entry, forwarded_prefixes[i]))
            return 1;
    for (size_t i = 0; forwarded_names[i]; i++)
        if (strlen(forwarded_names[i]) == name_len &&
            strncmp(entry, forwarded_names[i], name_len) == 0)
            return 1;
    return 0;
}

static int add_env(struct context *c, char *entry, struct mb_err *err)
{
    char **grown = entry ? mb_reallocarray(c->env, c->n_env + 2, sizeof(*grown)) : NULL;

    if (!grown) {
        mb_free(entry);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    c->env = grown;
    c->env[c->n_env++] = entry;
    c->env[c->n_env] = NULL;
    return 0;
}

static int add_drivers_env(struct context *c, struct mb_err *err)
{
    int rc = add_env(c, mb_strdup("MOBULA_DRIVER=1"), err);

    for (size_t i = 0; !rc && drivers_names[i]; i++)
        if (getenv(drivers_names[i]))
            rc = add_env(c, mb_asprintf("%s=%s", drivers_names[i], getenv(drivers_names[i])), err);
    return rc;
}

static int collect_env(struct context *c, struct mb_err *err)
{
    json_t *env_vars = json_object_get(json_object_get(c->config, "runtime_env"), "env_vars");
    const char *name;
    json_t *value;
    int rc = 0;

    for (char **e = environ; !rc && *e; e++) {
        const char *eq = strchr(*e, '=');

        if (eq && name_is_forwarded(*e, (size_t)(eq - *e)))
            rc = add_env(c, mb_strdup(*e), err);
    }
    json_object_foreach(env_vars, name, value)
    {
        if (rc)
            break;
        if (json_is_string(value))
            rc = add_env(c, mb_asprintf("%s=%s", name, json_string_value(value)), err);
    }
    return rc;
}

static int identify(struct context *c, const struct mb_launch *l, struct mb_err *err)
{
    const char *config = getenv("RAY_JOB_CONFIG_JSON_ENV_VAR");
    struct tm now;
    time_t t = time(NULL);

    if (config) {
        c->config = json_loads(config, 0, NULL);
        if (!c->config)
            return mb_err_set(err, MB_EINVAL, "RAY_JOB_CONFIG_JSON_ENV_VAR is not JSON");
        c->submission_id = json_string_value(
            json_object_get(json_object_get(c->config, "metadata"), "job_submission_id"));
    }
    if (l->as_driver && !c->submission_id)
        return mb_err_set(err, MB_EINVAL, "--as-driver: not inside a submitted job");
    if (l->as_driver) /* the gang that it starts will have the job's own name */
        c->driver_name = mb_asprintf("%s.driver", c->submission_id);
    if (l->as_driver && !c->driver_name)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    if (l->name || c->submission_id) {
        const char *name = l->name ? l->name : c->submission_id;

        if (!mb_utf8_valid(name, strlen(name)))
            return mb_err_set(err, MB_EINVAL, "--name is no UTF-8");
        /* The name becomes part of paths and keys. */
        if (!name[0] || strlen(name) >= 200 || strchr(name, '/') || name[0] == '.')
            return mb_err_set(err, MB_EINVAL, "--name %s: must be a plain name without slashes",
                              name);
        return 0;
    }
    localtime_r(&t, &now);
    strftime(c->name, sizeof(c->name), "run-%Y%m%d-%H%M%S", &now);
    snprintf(c->name + strlen(c->name), sizeof(c->name) - strlen(c->name), "-%d", (int)getpid());
    return 0;
}

static const char *gcs_address(const struct mb_launch *l, struct mb_err *err)
{
    const char *address = l->address ? l->address : getenv("RAY_ADDRESS");

    if (!address || !address[0] || strcmp(address, "auto") == 0)
        return "127.0.0.1:6379";
    if (strstr(address, "://")) {
        mb_err_set(err, MB_EINVAL,
                   "--address %s: a gang needs the GCS as HOST:PORT (6379 by default), not a URL; "
                   "to run it there, use: mobula job submit --address %s -- mobula train ...",
                   address, address);
        return NULL;
    }
    return mb_address_check_heads("--address", address, err) == MB_OK ? address : NULL;
}

static void close_context(struct context *c)
{
    for (size_t i = 0; i < c->n_env; i++)
        mb_free(c->env[i]);
    mb_free(c->env);
    mb_free(c->token);
    mb_free(c->driver_name);
    mb_free(c->save_dir);
    mb_free(c->cwd);
    json_decref(c->config);
}

/* Where the agent that runs us looks for the store of our own log; the submission may have said it
 * already. */
static int tell_log_url(const char *url, struct mb_err *err)
{
    const char *path = getenv("MOBULA_LOG_URL_FILE");

    if (!path || !url || mb_fs_exists(path))
        return 0;
    return mb_fs_write_atomic(path, url, strlen(url), 0600, err);
}

/* Only restarts are elastic, so --min-nodes alone would be without effect. */
static int check_elastic(const struct mb_launch *l, struct mb_err *err)
{
    if (l->min_nodes > l->num_nodes)
        return mb_err_set(err, MB_EINVAL, "--min-nodes %lld: there are only %lld (--num-nodes)",
                          (long long)l->min_nodes, (long long)l->num_nodes);
    if (l->min_nodes > 0 && l->min_nodes < l->num_nodes && l->max_restarts == 0)
        return mb_err_set(err, MB_EINVAL,
                          "--min-nodes needs --max-restarts N: only a restart goes on with fewer");
    if (l->is_worker && l->min_nodes > 0 && l->min_nodes < l->num_nodes &&
        (l->global_batch == 0 || l->micro_batch == 0))
        return mb_err_set(err, MB_EINVAL,
                          "--min-nodes needs --global-batch-size N and --micro-batch-size N: what "
                          "stays the same on fewer nodes");
    return 0;
}

static int read_deadline(const struct mb_launch *l, uint64_t *out, struct mb_err *err)
{
    const char *text = l->deadline ? l->deadline : getenv("MOBULA_DEADLINE");
    uint64_t now = mb_unix_ms();
    int rc;

    *out = 0;
    if (!text || !text[0])
        return 0;
    rc = mb_moment_parse(text, now, l->deadline ? "--deadline" : "MOBULA_DEADLINE", out, err);
    if (!rc && *out <= now)
        rc = mb_err_set(err, MB_ETIMEOUT, "the deadline %s is over already", text);
    return rc;
}

/* What the node of this job's driver knows of the job of its pod; over already: the agents know
 * what follows. */
static int read_estimate(uint64_t *out, struct mb_err *err)
{
    static const char name[] = "MOBULA_ESTIMATED_DEADLINE";
    const char *text = getenv(name);

    *out = 0;
    return text && text[0] ? mb_moment_parse(text, mb_unix_ms(), name, out, err) : 0;
}

static int read_resume(const struct mb_launch *l, enum mb_resume *out, struct mb_err *err)
{
    int rc = mb_resume_parse(l->resume, out, err);

    if (rc == MB_OK && *out != MB_RESUME_NEVER && !l->checkpoint_url)
        rc = mb_err_set(err, MB_EINVAL, "--resume %s needs --checkpoint-url: what to go on from",
                        l->resume);
    return rc;
}

static int launch_gang(struct mb_cli *cli, const struct mb_launch *l)
{
    struct context c = {0};
    struct mb_driver_opts o = {0};
    struct mb_err err = {0};
    int status;

    o.address = gcs_address(l, &err);
    if (!o.address || check_elastic(l, &err) < 0 || identify(&c, l, &err) < 0 ||
        mb_token_load(NULL, &c.token, &err) < 0 || collect_env(&c, &err) < 0 ||
        (l->as_driver && add_drivers_env(&c, &err) < 0) ||
        read_deadline(l, &o.deadline_unix_ms, &err) < 0 ||
        read_estimate(&o.estimated_deadline_unix_ms, &err) < 0 ||
        read_resume(l, &o.resume, &err) < 0 || tell_log_url(l->checkpoint_url, &err) < 0) {
        status = mb_cli_fail(cli, &err);
        goto out;
    }
    c.cwd = getcwd(NULL, 0);
    c.save_dir = l->save_dir ? mb_path_join(c.cwd ? c.cwd : "/", l->save_dir) : NULL;
    o.token = c.token;
    o.submission_id = c.submission_id;
    o.job_id = l->name           ? l->name
               : c.driver_name   ? c.driver_name
               : c.submission_id ? c.submission_id
                                 : c.name;
    o.entrypoint = l->entrypoint;
    o.num_nodes = (uint32_t)l->num_nodes;
    o.ranks_per_node = (uint32_t)(l->gpus_per_node    ? l->gpus_per_node
                                  : l->ranks_per_node ? l->ranks_per_node
                                                      : 1);
    o.use_gpu = l->use_gpu;
    o.argv = l->argv;
    o.env = (const char *const *)c.env;
    o.cwd = c.cwd && !l->as_driver ? c.cwd : ""; /* a driver's other node has no such directory */
    o.as_driver = l->as_driver;
    o.driver_gpus = (uint32_t)l->driver_gpus;
    o.is_worker = l->is_worker;
    o.tag_ranks = l->tag_ranks && l->num_nodes * o.ranks_per_node > 1;
    o.save_dir = c.save_dir;
    o.checkpoint_url = l->checkpoint_url;
    o.checkpoint_keep_last = (uint32_t)l->checkpoint_keep_last;
    o.local_keep_last = (uint32_t)l->local_keep_last;
    o.load_url = l->load_url;
    o.inputs = l->inputs;
    o.n_inputs = l->n_inputs;
    o.priority = (int)l->priority;
    o.reserve_timeout_ms = l->wait_timeout_ms;
    o.stop_grace_ms = l->stop_grace_ms;
    o.drain_timeout_ms = l->drain_timeout_ms;
    o.lease_ms = l->lease_ms;
    o.max_restarts = (uint32_t)l->max_restarts;
    o.restart_delay_ms = l->restart_delay_ms;
    o.min_nodes = (uint32_t)l->min_nodes;
    o.elastic_wait_ms = l->elastic_wait_ms;
    o.global_batch = (uint64_t)l->global_batch;
    o.micro_batch = (uint64_t)l->micro_batch;
    o.ranks_per_model = (uint32_t)l->ranks_per_model;
    status = mb_driver_run(&o);
out:
    close_context(&c);
    return status;
}

/* ---- under Slurm: the step is the cluster ---- */

struct step {
    struct mb_cli *cli;
    struct mb_launch launch;
};

static const char *from_environment(void *arg, const char *name)
{
    (void)arg;
    return getenv(name);
}

static int drive_step(void *arg, const char *gcs)
{
    struct step *s = arg;

    s->launch.address = gcs;
    return launch_gang(s->cli, &s->launch);
}

/* What was not given on the command line is what the step was given by Slurm. */
static int fit_to_step(struct mb_launch *l, const struct mb_slurm *s, struct mb_err *err)
{
    if (l->num_nodes > s->n_nodes)
        return mb_err_set(err, MB_EINVAL, "--num-nodes %lld: the Slurm step has %lld",
                          (long long)l->num_nodes, (long long)s->n_nodes);
    if (l->num_nodes == 0)
        l->num_nodes = s->n_nodes;
    if (l->gpus_per_node > 0 || l->ranks_per_node > 0)
        return 0;
    if (l->use_gpu || (!l->is_worker && s->gpus_per_node > 0)) {
        if (s->gpus_per_node == 0)
            return mb_err_set(err, MB_EINVAL,
                              "Slurm gave this step no GPUs; use srun --gpus-per-node N, or "
                              "--distributed-backend gloo to train on the CPU");
        l->gpus_per_node = s->gpus_per_node;
        l->use_gpu = 1;
    } else if (s->tasks_per_node == 0) {
        return mb_err_set(err, MB_EINVAL,
                          "the nodes of the Slurm step have different numbers of tasks; use srun "
                          "--ntasks-per-node N, or say how many ranks a node gets: %s",
                          l->is_worker ? "--gpus-per-node N" : "--ranks-per-node N");
    } else {
        l->ranks_per_node = s->tasks_per_node;
    }
    return 0;
}

int mb_launch_run(struct mb_cli *cli, const struct mb_launch *l)
{
    struct step step = {.cli = cli, .launch = *l};
    struct mb_slurm slurm = {.role = MB_SLURM_NONE};
    struct mb_err err = {0};
    int rc = 0;

    if (!l->address && !getenv("RAY_ADDRESS"))
        rc = mb_slurm_read(from_environment, NULL, &slurm, &err);
    if (!rc && slurm.role != MB_SLURM_NONE)
        rc = fit_to_step(&step.launch, &slurm, &err);
    if (rc)
        return mb_cli_fail(cli, &err);
    if (slurm.role != MB_SLURM_NONE)
        return mb_slurm_step(cli, &slurm, drive_step, &step);
    if (step.launch.num_nodes == 0)
        step.launch.num_nodes = 1;
    return launch_gang(cli, &step.launch);
}
