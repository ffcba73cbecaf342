/*
 * mobula job submit.
 *  1. the request is built from the flags; --working-dir becomes runtime_env.working_dir;
 *  2. directories and files of this machine in it are uploaded (job_upload.c);
 *  3. POST; 4. unless --no-wait, the log is followed; the exit status is the job's.
 *
 *  A head that is not there, or not yet again, is waited for for HEAD_WAIT_MS at each of these
 * steps, which is said once.
 *
 *  The connection breaks after the POST: nobody knows whether the job was taken. So the job's name
 *  is chosen here, and its metadata gets a key that nobody else has: sending it again is answered
 *  with the same job by our head, and on a stock Ray head, which refuses the name, the key shows
 *  that the job is the one that was sent. Nor is a POST judged wrongly that libcurl sent again by
 *  itself (was_repeated in base/http/client.h): the key is looked for at the first answer, too.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/joblimit.h"
#include "base/moment.h"
#include "base/printable.h"
#include "base/str.h"
#include "cli/job.h"
#include "cli/job_upload.h"
#include "cli/yaml_json.h"

enum { RUNTIME_ENV_MAX_BYTES = 8 << 20 };
enum { HEAD_WAIT_MS = 10 * 1000, PAUSE_MIN_MS = 200, PAUSE_MAX_MS = 1000, CALL_MIN_MS = 5000 };

/* Keys of metadata, as gcs/services.h has them for the head. */
#define KEY_KEY      "mobula_submission_key"
#define PIPEFAIL_KEY "mobula_pipefail"
/* Our head places the driver by it. On a stock Ray head the entrypoint does it. */
#define DRIVER_ON_KEY "mobula_driver_on"

struct submit_args {
    struct mb_job_common common;
    const char *submission_id, *job_id, *runtime_env, *runtime_env_json, *working_dir, *metadata;
    const char *resources, *labels, *driver_on, *deadline, *memory_limit, *nofile, *log_max_bytes;
    double num_cpus, num_gpus;
    int64_t memory;
    int no_wait, pipefail;
};

#define OPTION(name_, arg_, kind_, field_, help_)                                                  \
    MB_JOB_OPTION(name_, 0, arg_, kind_, struct submit_args, field_, help_)

static const struct mb_option options[] = {
    MB_JOB_COMMON_OPTIONS(struct submit_args),
    OPTION("submission-id", "ID", MB_OPTION_STRING, submission_id, "name of the job (chosen)"),
    OPTION("job-id", "ID", MB_OPTION_STRING, job_id, NULL),
    OPTION("working-dir", "DIR", MB_OPTION_STRING, working_dir,
           "uploaded, the job's working directory; or a URL of a package"),
    OPTION("runtime-env", "FILE", MB_OPTION_STRING, runtime_env,
           "runtime environment, YAML or JSON"),
    OPTION("runtime-env-json", "JSON", MB_OPTION_STRING, runtime_env_json,
           "runtime environment, e.g. {\"env_vars\": {\"A\": \"1\"}}"),
    OPTION("metadata-json", "JSON", MB_OPTION_STRING, metadata, "strings kept with the job"),
    OPTION("entrypoint-num-cpus", "N", MB_OPTION_DOUBLE, num_cpus, "CPUs for the entrypoint"),
    OPTION("entrypoint-num-gpus", "N", MB_OPTION_DOUBLE, num_gpus, "GPUs for the entrypoint"),
    OPTION("entrypoint-memory", "BYTES", MB_OPTION_INT, memory, "memory for the entrypoint"),
    OPTION("entrypoint-resources", "JSON", MB_OPTION_STRING, resources,
           "other resources for the entrypoint"),
    OPTION("entrypoint-label-selector", "JSON", MB_OPTION_STRING, labels,
           "labels of the node for the entrypoint"),
    OPTION("memory-limit", "SIZE", MB_OPTION_STRING, memory_limit,
           "of all processes of the job on a node; beyond it they are killed"),
    OPTION("nofile", "N", MB_OPTION_STRING, nofile, "open files of each process of the job"),
    OPTION("log-max-bytes", "SIZE", MB_OPTION_STRING, log_max_bytes,
           "cap of the log of the driver and of each rank, 0: none (the node's: 1 GiB)"),
    OPTION("driver-on", "WHERE", MB_OPTION_STRING, driver_on,
           "head, or gpu-node: the command runs on a node that has GPUs (head)"),
    OPTION("deadline", "TIME", MB_OPTION_STRING, deadline,
           "mobula train and run save and end by then: 90m, 2026-11-22T10:00:00Z"),
    OPTION("pipefail", NULL, MB_OPTION_FLAG, pipefail,
           "end at the first command that fails, also inside a pipe: -- 'a | b; c'"),
    OPTION("no-wait", NULL, MB_OPTION_FLAG, no_wait, "do not follow the log"),
    {0},
};

/* ---- the request ---- */

static json_t *parse_object(const char *text, const char *flag, struct mb_err *err)
{
    json_error_t why;
    json_t *j = json_loads(text, 0, &why);

    if (json_is_object(j))
        return j;
    mb_err_set(err, MB_EINVAL, "job submit: %s must be a JSON object%s%s", flag,
               j == NULL ? ": " : "", j == NULL ? why.text : "");
    json_decref(j);
    return NULL;
}

/* JSON first: a tab, say, is nothing to it and an error in YAML. */
static json_t *parse_runtime_env(const char *path, const struct mb_buf *text, struct mb_err *err)
{
    json_t *env = json_loadb(mb_buf_str(text), text->len, 0, NULL);
    int rc = env != NULL ? 0 : mb_yaml_json(mb_buf_str(text), text->len, &env, err);

    if (rc == 0 && !json_is_object(env))
        rc =
            mb_err_set(err, MB_EINVAL, "it has to be names with values, e.g. env_vars: {A: \"1\"}");
    if (rc == 0)
        return env;
    json_decref(env);
    mb_err_wrap(err, "job submit: --runtime-env %s", path);
    return NULL;
}

static json_t *read_runtime_env(const struct submit_args *a, struct mb_err *err)
{
    struct mb_buf text = {0};
    json_t *env;

    if (a->runtime_env != NULL && a->runtime_env_json != NULL) {
        mb_err_set(err, MB_EINVAL, "job submit: either --runtime-env or --runtime-env-json");
        return NULL;
    }
    if (a->runtime_env_json != NULL)
        return parse_object(a->runtime_env_json, "--runtime-env-json", err);
    if (a->runtime_env == NULL)
        return json_object();
    if (mb_fs_read(a->runtime_env, RUNTIME_ENV_MAX_BYTES, &text, err) != 0)
        return NULL;
    env = parse_runtime_env(a->runtime_env, &text, err);
    mb_buf_close(&text);
    return env;
}

/* As a shell would read it back. */
static char *join_words(char *const *words, int n)
{
    struct mb_buf b = {0};
    int rc = 0;

    for (int i = 0; i < n && rc == 0; i++) {
        if (i > 0)
            rc = mb_buf_add(&b, " ", 1);
        if (rc == 0)
            rc = mb_buf_shell(&b, words[i]);
    }
    if (rc == 0)
        return mb_buf_take(&b);
    mb_buf_close(&b);
    return NULL;
}

static int add_object(json_t *request, const char *field, const char *text, const char *flag,
                      struct mb_err *err)
{
    json_t *j;

    if (text == NULL)
        return 0;
    j = parse_object(text, flag, err);
    if (j == NULL)
        return MB_EINVAL;
    json_object_set_new(request, field, j);
    return 0;
}

/* A flag wins over the same variable in --runtime-env. */
static int add_variable(json_t *env, const char *name, const char *value, struct mb_err *err)
{
    json_t *vars = json_object_get(env, "env_vars");

    if (vars == NULL) {
        vars = json_object();
        json_object_set_new(env, "env_vars", vars);
    }
    if (json_object_set_new(vars, name, json_string(value)) != 0)
        return mb_err_set(err, MB_EINVAL, "job submit: env_vars must be an object");
    return 0;
}

typedef int (*parse_limit)(const char *s, const char *what, uint64_t *out, struct mb_err *err);

/* Refused here by the flag's name, not after the job was taken. */
static int add_limit(json_t *env, const char *flag, const char *text, parse_limit parse,
                     const char *name, struct mb_err *err)
{
    char number[24];
    uint64_t value;

    if (text == NULL)
        return 0;
    if (parse(text, flag, &value, err) != 0)
        return mb_err_wrap(err, "job submit");
    snprintf(number, sizeof(number), "%llu", (unsigned long long)value);
    return add_variable(env, name, number, err);
}

static int add_limits(json_t *env, const struct submit_args *a, struct mb_err *err)
{
    int rc = add_limit(env, "--memory-limit", a->memory_limit, mb_joblimit_memory,
                       "MOBULA_JOB_MEMORY_LIMIT", err);

    if (rc == 0)
        rc = add_limit(env, "--nofile", a->nofile, mb_joblimit_nofile, "MOBULA_JOB_NOFILE", err);
    if (rc == 0)
        rc = add_limit(env, "--log-max-bytes", a->log_max_bytes, mb_joblimit_log,
                       "MOBULA_LOG_MAX_BYTES", err);
    return rc;
}

/* As a point in time: the job may wait in the queue, and its clock runs from here. */
static int add_deadline(json_t *env, const char *text, struct mb_err *err)
{
    uint64_t ms;
    char value[40];

    if (text == NULL)
        return 0;
    if (mb_moment_parse(text, mb_unix_ms(), "--deadline", &ms, err) != 0)
        return MB_EINVAL;
    snprintf(value, sizeof(value), "@%llu.%03u", (unsigned long long)(ms / 1000),
             (unsigned)(ms % 1000));
    return add_variable(env, "MOBULA_DEADLINE", value, err);
}

/* "raysubmit_" and 16 characters, as a head would choose it. */
static void choose_id(char out[27])
{
    static const char alphabet[] = "ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnpqrstuvwxyz123456789";

    memcpy(out, "raysubmit_", 10);
    for (int i = 10; i < 26; i++)
        out[i] = alphabet[mb_random_u64() % (sizeof alphabet - 1)];
    out[26] = '\0';
}

/* What makes a repetition harmless, and what the user asked of our heads only. */
static int add_ours(json_t *request, const struct submit_args *a, struct mb_err *err)
{
    json_t *metadata = json_object_get(request, "metadata");
    char key[33], id[27];
    uint64_t random[2] = {mb_random_u64(), mb_random_u64()};
    int rc = 0;

    if (metadata == NULL) {
        metadata = json_object();
        rc |= json_object_set_new(request, "metadata", metadata);
    }
    if (json_object_get(metadata, KEY_KEY) == NULL) /* who gives one may repeat the whole command */
        rc |=
            json_object_set_new(metadata, KEY_KEY, json_string(mb_hex(random, sizeof random, key)));
    if (a->driver_on != NULL)
        rc |= json_object_set_new(metadata, DRIVER_ON_KEY, json_string(a->driver_on));
    if (a->pipefail)
        rc |= json_object_set_new(metadata, PIPEFAIL_KEY, json_string("1"));
    if (json_object_get(request, "submission_id") == NULL) {
        choose_id(id);
        rc |= json_object_set_new(request, "submission_id", json_string(id));
    }
    return rc == 0 ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");
}

static int on_gpu_node(const struct submit_args *a)
{
    return a->driver_on != NULL && strcmp(a->driver_on, "gpu-node") == 0;
}

static int check_driver_on(const struct submit_args *a, struct mb_err *err)
{
    if (a->driver_on == NULL || strcmp(a->driver_on, "head") == 0 || on_gpu_node(a))
        return 0;
    return mb_err_set(err, MB_EINVAL, "job submit: --driver-on %s: head or gpu-node", a->driver_on);
}

/* On a stock Ray head the driver there would only keep a gang of one. */
static int check_stock_head(const struct submit_args *a, const json_t *env, struct mb_err *err)
{
    if (json_object_get(env, "working_dir") != NULL || json_object_get(env, "py_modules") != NULL)
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "job submit: --driver-on gpu-node: Ray's head unpacks working_dir and "
                          "py_modules on its own node only; use a directory that all nodes have, "
                          "or --driver-on head");
    if (a->num_gpus > 0 && a->num_gpus != (double)(int64_t)a->num_gpus)
        return mb_err_set(err, MB_EINVAL,
                          "job submit: --driver-on gpu-node: --entrypoint-num-gpus must be whole");
    return 0;
}

/* Takes the entrypoint; NULL when memory is out. */
static char *move_to_gpu_node(const struct submit_args *a, char *entrypoint)
{
    char *const shell[] = {"/bin/sh", "-c", entrypoint};
    char *const strict[] = {"bash", "-eo", "pipefail", "-c", entrypoint};
    char *command = !entrypoint ? NULL : a->pipefail ? join_words(strict, 5) : join_words(shell, 3);
    char *out = command ? mb_asprintf("exec mobula run --as-driver --driver-gpus %d -- %s",
                                      a->num_gpus > 0 ? (int)a->num_gpus : 0, command)
                        : NULL;

    mb_free(command);
    mb_free(entrypoint);
    return out;
}

static json_t *build_request(const struct submit_args *a, char *const *words, int n_words,
                             struct mb_err *err)
{
    /* Quoted by join_words(), a pipe in a single word would be the name of a program. */
    char *entrypoint =
        a->pipefail && n_words == 1 ? mb_strdup(words[0]) : join_words(words, n_words);
    json_t *request = json_object(), *env = read_runtime_env(a, err);
    const char *id = a->submission_id != NULL ? a->submission_id : a->job_id;

    if (env == NULL || add_limits(env, a, err) != 0 || add_deadline(env, a->deadline, err) != 0 ||
        add_object(request, "metadata", a->metadata, "--metadata-json", err) != 0 ||
        add_object(request, "entrypoint_resources", a->resources, "--entrypoint-resources", err) !=
            0 ||
        add_object(request, "entrypoint_label_selector", a->labels, "--entrypoint-label-selector",
                   err) != 0) {
        json_decref(env);
        json_decref(request);
        mb_free(entrypoint);
        return NULL;
    }
    if (a->working_dir != NULL)
        json_object_set_new(env, "working_dir", json_string(a->working_dir));
    json_object_set_new(request, "runtime_env", env);
    if (check_driver_on(a, err) != 0) {
        json_decref(request);
        mb_free(entrypoint);
        return NULL;
    }
    if (entrypoint != NULL)
        json_object_set_new(request, "entrypoint", json_string(entrypoint));
    if (id != NULL)
        json_object_set_new(request, "submission_id", json_string(id));
    if (a->num_cpus >= 0)
        json_object_set_new(request, "entrypoint_num_cpus", json_real(a->num_cpus));
    if (a->num_gpus >= 0)
        json_object_set_new(request, "entrypoint_num_gpus", json_real(a->num_gpus));
    if (a->memory >= 0)
        json_object_set_new(request, "entrypoint_memory", json_integer(a->memory));
    mb_free(entrypoint);
    if (add_ours(request, a, err) != 0) {
        json_decref(request);
        return NULL;
    }
    return request;
}

/* ---- a head that is away ---- */

/* Zero-initialise; one for the whole command. */
struct patience {
    uint64_t until_ms; /* on the clock of mb_mono_ms(); 0: it answered last */
    uint64_t rest_ms;  /* a call's time before; 0: rest was not open */
    uint64_t pause_ms;
    int said;
};

/* After every call. 1, after a pause: what failed with rc is to be tried again, and that call has
 * the time that is left, or CALL_MIN_MS: a head that takes connections and says nothing would
 * hold all of them for a call's whole time. */
static int try_again(struct patience *p, struct mb_rest *rest, int rc, const struct mb_err *err)
{
    uint64_t now_ms = mb_mono_ms(), left_ms, pause_ms;

    if (rc != MB_EIO && rc != MB_EUNAVAIL && rc != MB_ETIMEOUT) {
        if (p->until_ms != 0 && p->rest_ms != 0)
            rest->timeout_ms = p->rest_ms;
        p->until_ms = 0;
        return 0;
    }
    if (p->until_ms == 0)
        *p = (struct patience){.until_ms = now_ms + HEAD_WAIT_MS,
                               .rest_ms = rest->timeout_ms,
                               .pause_ms = PAUSE_MIN_MS,
                               .said = p->said};
    if (now_ms >= p->until_ms)
        return 0;
    if (!p->said)
        fprintf(stderr, "mobula: %s; trying again for %d s\n", err->text, HEAD_WAIT_MS / 1000);
    p->said = 1;
    left_ms = p->until_ms - now_ms;
    pause_ms = left_ms < p->pause_ms ? left_ms : p->pause_ms;
    poll(NULL, 0, (int)pause_ms);
    left_ms -= pause_ms;
    rest->timeout_ms = left_ms > CALL_MIN_MS ? left_ms : CALL_MIN_MS;
    p->pause_ms = p->pause_ms * 2 < PAUSE_MAX_MS ? p->pause_ms * 2 : PAUSE_MAX_MS;
    return 1;
}

/* ---- where the driver runs ---- */

static int place_driver(struct mb_rest *rest, const struct submit_args *a, json_t *request,
                        struct mb_err *err)
{
    struct mb_head_limits limits;
    char *entrypoint;
    int rc;

    if (!on_gpu_node(a))
        return 0;
    rc = mb_job_ask_limits(rest, &limits, err);
    if (rc != 0 || limits.places_drivers)
        return rc;
    rc = check_stock_head(a, json_object_get(request, "runtime_env"), err);
    if (rc != 0)
        return rc;
    entrypoint = mb_strdup(mb_job_text(request, "entrypoint"));
    entrypoint = move_to_gpu_node(a, entrypoint);
    json_object_del(request, "entrypoint_num_gpus"); /* the gang of one asks for them */
    if (entrypoint == NULL ||
        json_object_set_new(request, "entrypoint", json_string(entrypoint)) != 0)
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    mb_free(entrypoint);
    return rc;
}

/* ---- submit ---- */

static void print_submitted(const struct mb_cli *cli, const char *id)
{
    printf("Job '%s' submitted successfully\n\n"
           "Next steps\n"
           "  Query the logs of the job:     %s job logs %s\n"
           "  Query the status of the job:   %s job status %s\n"
           "  Request the job to be stopped: %s job stop %s\n",
           id, cli->program, id, cli->program, id, cli->program, id);
    fflush(stdout);
}

/* 1 if the head has a job of this name that carries our key and is what we ask for: who gives a key
 * of his own may use it for another command by mistake. */
static int is_ours(struct mb_rest *rest, const json_t *request)
{
    const char *key = mb_job_text(json_object_get(request, "metadata"), KEY_KEY);
    struct mb_err err;
    json_t *job = NULL;
    int ours = 0;

    if (mb_job_get(rest, mb_job_text(request, "submission_id"), &job, &err) == 0)
        ours = strcmp(mb_job_text(json_object_get(job, "metadata"), KEY_KEY), key) == 0 &&
               strcmp(mb_job_text(job, "entrypoint"), mb_job_text(request, "entrypoint")) == 0 &&
               json_equal(json_object_get(job, "metadata"), json_object_get(request, "metadata"));
    json_decref(job);
    return ours;
}

static int is_duplicate(int rc, const struct mb_err *err)
{
    return (rc == MB_ESTATE || rc == MB_EINVAL) &&
           strstr(err->text, "Please use a different submission_id") != NULL;
}

/* A connection that broke, or a head that was not there, is tried again: see the story above. */
static int post(struct mb_rest *rest, const json_t *request, struct patience *patience,
                json_t **answer, struct mb_err *err)
{
    int rc = 0;

    do {
        rc = mb_rest_json(rest, "POST", "/api/jobs/", request, answer, err);
        if (is_duplicate(rc, err) && is_ours(rest, request)) {
            *answer = json_pack("{s:O, s:O}", "job_id", json_object_get(request, "submission_id"),
                                "submission_id", json_object_get(request, "submission_id"));
            return *answer != NULL ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");
        }
        if (rc == MB_EUNAVAIL && strstr(err->text, "--max-queued-jobs") != NULL)
            return err->code = MB_EFULL; /* the head answers, it has no room */
    } while (try_again(patience, rest, rc, err));
    return rc;
}

/* With --json and the log every line of the output is an object: the answer, the log's lines, and
 * the job as it ended. */
static void print_json_line(const json_t *j)
{
    mb_printable_json(j, JSON_COMPACT, stdout);
    putchar('\n');
    fflush(stdout);
}

static int submit(struct mb_cli *cli, struct mb_rest *rest, const struct submit_args *a,
                  json_t *request, struct patience *patience, int *status, struct mb_err *err)
{
    struct mb_log_view view = {.json = a->common.json};
    struct mb_log_lines lines = {.view = &view, .rank = -1};
    struct mb_follow_opts opts = {.lines = &lines, .rank = -1, .tail_lines = -1};
    json_t *answer, *job;
    const char *id;
    int rc;

    do {
        rc = place_driver(rest, a, request, err);
    } while (try_again(patience, rest, rc, err));
    if (rc == 0)
        do {
            rc = mb_job_upload(rest, json_object_get(request, "runtime_env"), err);
        } while ((rc == 0 || rc == MB_EUNAVAIL) && try_again(patience, rest, rc, err));
    if (rc == 0)
        rc = post(rest, request, patience, &answer, err);
    if (is_duplicate(rc, err))
        return mb_err_set(err, MB_EEXIST, "job %s exists already",
                          mb_job_text(request, "submission_id"));
    if (rc != 0)
        return rc;
    id = mb_job_text(answer, "submission_id");
    if (a->common.json && a->no_wait)
        mb_job_print_json(answer);
    else if (a->common.json)
        print_json_line(answer);
    else
        print_submitted(cli, id);
    if (!a->no_wait) {
        if (!a->common.json)
            puts("\nTailing logs until the job exits (disable with --no-wait):");
        fflush(stdout);
        rc = mb_job_follow(rest, id, &opts, &job, err);
        if (rc == 0) {
            if (a->common.json)
                print_json_line(job);
            else
                mb_job_print_end(id, job);
            *status = mb_job_exit_status(cli, job);
            json_decref(job);
        } else {
            mb_err_wrap(err, "job %s was submitted, but", id);
        }
    }
    json_decref(answer);
    return rc;
}

static int run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct submit_args args = {.num_cpus = -1, .num_gpus = -1, .memory = -1};
    struct patience patience = {0};
    json_t *request = NULL;
    struct mb_rest rest = {0};
    struct mb_err err;
    int n_words, status = 0;
    int rc = mb_options_parse(cli, verb, argc, argv, 1, &args, &n_words, &err);

    if (rc == 1)
        return 0;
    if (rc == 0 && n_words == 0)
        rc = mb_err_set(&err, MB_EINVAL, "job submit: what is to run? ... submit [OPTIONS] -- CMD");
    if (rc == 0) {
        request = build_request(&args, argv + 1, n_words, &err);
        do { /* an address of the GCS is asked for the API's */
            rc = request != NULL ? mb_rest_open(&rest, cli, args.common.address, &err) : err.code;
        } while ((rc == 0 || rc == MB_EUNAVAIL || rc == MB_ETIMEOUT) &&
                 try_again(&patience, &rest, rc, &err));
    }
    if (rc == 0) {
        rc = submit(cli, &rest, &args, request, &patience, &status, &err);
        mb_rest_close(&rest);
    }
    json_decref(request);
    return rc != 0 ? mb_cli_fail(cli, &err) : mb_cli_printed(cli, status);
}

const struct mb_verb mb_verb_job_submit = {
    .name = "submit",
    .summary = "run a command as a job and follow its output",
    .synopsis = "[OPTIONS] -- COMMAND...",
    .examples = "  mobula job submit -- mobula train --num-nodes 2 --gpus-per-node 8 ...\n"
                "  mobula job submit --no-wait --working-dir . -- python main.py\n"
                "  mobula job submit --runtime-env env.yaml -- python main.py\n"
                "  mobula job submit --pipefail -- 'python main.py | tee out.txt'\n",
    .options = options,
    .run = run,
};
