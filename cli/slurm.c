/*
 *  1. Inside a job that our own head runs, or without SLURM_STEP_ID (a batch script outside srun),
 *     Slurm does not matter: role NONE.
 *  2. Numbers; the run of a step is named by cluster, job, step and how often the job was requeued.
 *  3. Tasks of the step on each node, "2(x3),1": one number if they are all the same.
 *  4. The meeting file is replaced whole, so half a JSON text in it is damage and said at once.
 */
#include "cli/slurm.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"

static int read_number(mb_slurm_get get, void *arg, const char *name, int64_t missing, int64_t *out,
                       struct mb_err *err)
{
    const char *text = get(arg, name);
    char *end;

    *out = missing;
    if (text == NULL && missing >= 0)
        return 0;
    if (text == NULL)
        return mb_err_set(err, MB_EINVAL, "this is a step of Slurm, but %s is not set", name);
    errno = 0;
    *out = strtoll(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || *out < 0)
        return mb_err_set(err, MB_EINVAL, "%s=%.40s: expected a number, as srun sets it", name,
                          text);
    return 0;
}

/* "8" or "2(x3)": 8, 2. Lists of different counts: 0. */
static int64_t same_everywhere(const char *text)
{
    char *end;
    long long n;

    if (text == NULL)
        return 0;
    n = strtoll(text, &end, 10);
    if (end == text || n < 1)
        return 0;
    if (end[0] == '(' && end[1] == 'x')
        end = strchr(end, ')');
    else
        return *end == '\0' ? n : 0;
    return end != NULL && end[1] == '\0' ? n : 0;
}

/* Only what is safe in a file name everywhere. */
static void clean(char *name)
{
    for (char *c = name; *c != '\0'; c++)
        if (strchr("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.", *c) == NULL)
            *c = '_';
}

int mb_slurm_read(mb_slurm_get get, void *arg, struct mb_slurm *out, struct mb_err *err)
{
    struct mb_slurm s = {.role = MB_SLURM_NONE};
    const char *cluster, *ip;
    int64_t job, step, local, restarts;
    int rc;

    *out = s;
    if (get(arg, "SLURM_STEP_ID") == NULL || get(arg, "SLURM_JOB_ID") == NULL ||
        get(arg, "RAY_JOB_CONFIG_JSON_ENV_VAR") != NULL)
        return 0;
    if ((rc = read_number(get, arg, "SLURM_JOB_ID", -1, &job, err)) != 0 ||
        (rc = read_number(get, arg, "SLURM_STEP_ID", -1, &step, err)) != 0 ||
        (rc = read_number(get, arg, "SLURM_NODEID", -1, &s.node_id, err)) != 0 ||
        (rc = read_number(get, arg, "SLURM_LOCALID", -1, &local, err)) != 0 ||
        (rc = read_number(get, arg, "SLURM_STEP_NUM_NODES", -1, &s.n_nodes, err)) != 0 ||
        (rc = read_number(get, arg, "SLURM_RESTART_COUNT", 0, &restarts, err)) != 0 ||
        (rc = read_number(get, arg, "SLURM_GPUS_ON_NODE", 0, &s.gpus_per_node, err)) != 0)
        return rc;
    if (s.n_nodes < 1 || s.node_id >= s.n_nodes)
        return mb_err_set(err, MB_EINVAL,
                          "SLURM_NODEID=%lld does not fit SLURM_STEP_NUM_NODES=%lld",
                          (long long)s.node_id, (long long)s.n_nodes);
    s.tasks_per_node = same_everywhere(get(arg, "SLURM_STEP_TASKS_PER_NODE"));
    ip = get(arg, "SLURM_LAUNCH_NODE_IPADDR");
    snprintf(s.launch_ip, sizeof(s.launch_ip), "%s", ip != NULL ? ip : "");
    cluster = get(arg, "SLURM_CLUSTER_NAME");
    snprintf(s.key, sizeof(s.key), "%.64s-%lld.%lld.%lld", cluster != NULL ? cluster : "slurm",
             (long long)job, (long long)step, (long long)restarts);
    clean(s.key);
    s.role = local > 0 ? MB_SLURM_COMPANION : s.node_id > 0 ? MB_SLURM_NODE : MB_SLURM_HEAD;
    *out = s;
    return 0;
}

int mb_slurm_meet_format(const char *address, const char *token, char **text, struct mb_err *err)
{
    json_t *meeting = json_pack("{s:s, s:s}", "address", address, "token", token);

    *text = meeting != NULL ? json_dumps(meeting, 0) : NULL;
    json_decref(meeting);
    return *text != NULL ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");
}

/* Neither is empty, and a token is one word: it becomes a file and a header of requests. */
static int fits(const char *address, const char *token)
{
    if (address == NULL || token == NULL || *address == '\0' || *token == '\0')
        return 0;
    for (; *token != '\0'; token++)
        if (*token <= ' ' || *token > '~')
            return 0;
    return 1;
}

int mb_slurm_meet_parse(const char *text, char **address, char **token, struct mb_err *err)
{
    json_t *meeting = json_loads(text, 0, NULL);
    const char *a = json_string_value(json_object_get(meeting, "address"));
    const char *t = json_string_value(json_object_get(meeting, "token"));
    int rc = 0;

    *address = *token = NULL;
    if (!fits(a, t)) {
        rc = mb_err_set(err, MB_EPROTO, "that is not what the head task of a step writes");
        goto out;
    }
    *address = mb_strdup(a);
    *token = mb_strdup(t);
    if (*address == NULL || *token == NULL) {
        mb_free(*address);
        mb_free(*token);
        *address = *token = NULL;
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    }
out:
    json_decref(meeting);
    return rc;
}
