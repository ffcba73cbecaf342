/*
 *  1. A rank: the gang's record in the KV names nodes and world size of the present attempt and of
 *     those before it, and the checkpoint URL. An attempt whose nodes are not known yet is passed
 * over: it has no logs, so the one before it is still the newest. A node that is gone may have been
 * ours before a restart with --resume: then the log is here.
 *  2. A driver: the job's record names the node. The URL is the job's MOBULA_LOG_URL, as for the
 *     agent that sends the log (agent/jobs.c), else that of the gang's record.
 *  3. No gang yet: nowhere. A rank that the attempt does not have, an attempt that is not known, a
 * job that ended without a gang: MB_ENOENT.
 */
#include "gcs/log_place.h"

#include <stdio.h>
#include <string.h>
#include "base/str.h"
#include "gcs/services.h"

static json_t *gang_record(struct mb_head *h, const char *job_id)
{
    char key[300];
    struct mb_blob value;

    snprintf(key, sizeof key, "gang:%s", job_id);
    if (!mb_tables_get(h->store, MB_TABLES_KV, mb_blob_str("mobula"), mb_blob_str(key), &value))
        return NULL;
    return json_loadb(value.p, value.n, 0, NULL);
}

static void take_url(struct log_place *out, const char *url)
{
    if (url && strlen(url) < sizeof out->url)
        snprintf(out->url, sizeof out->url, "%s", url);
}

static const char *gang_url(const json_t *record)
{
    return json_string_value(json_object_get(json_object_get(record, "checkpoint"), "url"));
}

static int of_node(struct mb_head *h, const char *hex, struct log_place *out)
{
    uint8_t id[MB_NODE_ID_BYTES];

    snprintf(out->node_hex, sizeof out->node_hex, "%.8s", hex ? hex : "");
    out->node = hex && mb_unhex(hex, id, sizeof id) == 0 ? head_node_find_id(h, id) : NULL;
    if (out->node && !head_node_alive(out->node))
        out->node = NULL;
    return out->node ? LOG_ON_NODE : LOG_GONE;
}

/* A node that is gone may have been this one, under the id it had before: it has the file then. */
static int here_or_gone(struct mb_head *h, int rc, struct log_place *out)
{
    const struct mb_job_runner *r = h->runner;
    struct log_place here = *out;

    if (rc != LOG_GONE || !r->has_log || !r->has_log(r->self, out->name) ||
        of_node(h, r->node_id_hex(r->self), &here) != LOG_ON_NODE)
        return rc;
    *out = here;
    return LOG_ON_NODE;
}

/* ---- attempts: the record itself, and its "attempts" ---- */

static int64_t number_of(const json_t *o, const char *name)
{
    return json_integer_value(json_object_get(o, name));
}

/* Its nodes are known: rank r is on nodes[r / ranks per node]. */
static int is_placed(const json_t *attempt)
{
    int64_t n = (int64_t)json_array_size(json_object_get(attempt, "nodes"));
    int64_t world = number_of(attempt, "world_size");

    return n > 0 && world >= n && world % n == 0 &&
           json_is_string(json_object_get(attempt, "placement_group_id"));
}

/* The placed attempt with the smallest number from `from` on that has the rank (-1: any), or the
 * newest of all if from is 0. Borrowed; NULL: none. */
static const json_t *find_attempt(const json_t *record, int64_t from, int64_t rank)
{
    json_t *former = json_object_get(record, "attempts");
    const json_t *found = NULL;

    for (size_t i = 0; i <= json_array_size(former); i++) {
        const json_t *o = i < json_array_size(former) ? json_array_get(former, i) : record;
        int64_t n = number_of(o, "attempt");

        if (!is_placed(o) || n < from || rank >= number_of(o, "world_size"))
            continue;
        if (!found ||
            (from == 0 ? n > number_of(found, "attempt") : n < number_of(found, "attempt")))
            found = o;
    }
    return found;
}

static int of_rank(struct mb_head *h, const char *job_id, const struct log_whose *whose,
                   const json_t *record, struct log_place *out, struct mb_err *err)
{
    const json_t *newest = find_attempt(record, 0, -1);
    const json_t *o = whose->attempt > 0 ? find_attempt(record, whose->attempt, -1) : newest;
    int64_t world = number_of(o ? o : record, "world_size");
    json_t *nodes = json_object_get(o, "nodes");

    if (whose->attempt > 0 && (!o || number_of(o, "attempt") != whose->attempt))
        return mb_err_set(err, MB_ENOENT, "job %s has no logs of attempt %lld, the newest is %lld",
                          job_id, (long long)whose->attempt,
                          (long long)number_of(newest, "attempt"));
    if (whose->rank >= world)
        return mb_err_set(err, MB_ENOENT, "job %s has no rank %lld, its world size is %lld", job_id,
                          (long long)whose->rank, (long long)world);
    if (!o)
        return LOG_NOWHERE;
    out->attempt = number_of(o, "attempt");
    out->newest_attempt = number_of(newest, "attempt");
    out->world_size = world;
    snprintf(out->name, sizeof out->name, "gangs/%.8s-%lld/rank-%lld.log",
             json_string_value(json_object_get(o, "placement_group_id")), (long long)out->attempt,
             (long long)whose->rank);
    snprintf(out->prefix, sizeof out->prefix, "logs/%s/rank-%lld/%lld/", job_id,
             (long long)whose->rank, (long long)out->attempt);
    take_url(out, gang_url(record));
    size_t i = (size_t)(whose->rank / (world / (int64_t)json_array_size(nodes)));
    return here_or_gone(h, of_node(h, json_string_value(json_array_get(nodes, i)), out), out);
}

/* What the job's own environment says. */
static void take_own_url(const struct head_job *job, struct log_place *out)
{
    const char *text = json_string_value(json_object_get(job->info, "runtime_env_json"));
    json_t *env = text ? json_loads(text, 0, NULL) : NULL;

    take_url(out, json_string_value(
                      json_object_get(json_object_get(env, "env_vars"), "MOBULA_LOG_URL")));
    json_decref(env);
}

/* A driver that the head before us started runs on, and its log is on its node; what is on ours is
 * not looked for by name. */
static int of_driver(struct mb_head *h, const struct head_job *job, const json_t *record,
                     struct log_place *out)
{
    const char *hex = job ? json_string_value(json_object_get(job->info, "driver_node_id")) : NULL;

    if (!hex || strcmp(hex, h->runner->node_id_hex(h->runner->self)) == 0)
        return LOG_NOWHERE;
    snprintf(out->name, sizeof out->name, "logs/job-driver-%s.log", job->id);
    snprintf(out->prefix, sizeof out->prefix, "logs/%s/driver/", job->id);
    take_own_url(job, out);
    if (!out->url[0])
        take_url(out, gang_url(record));
    return of_node(h, hex, out);
}

int head_log_place(struct mb_head *h, const char *job_id, const struct log_whose *whose,
                   struct log_place *out, struct mb_err *err)
{
    const struct head_job *job = head_job_find(h, job_id);
    json_t *record = gang_record(h, job_id);
    int rc;

    *out = (struct log_place){0};
    if (whose->rank < 0)
        rc = of_driver(h, job, record, out);
    else if (record)
        rc = of_rank(h, job_id, whose, record, out, err);
    else if (job && mb_job_is_terminal(job->state))
        rc = mb_err_set(err, MB_ENOENT, "job %s has no ranks", job_id);
    else
        rc = LOG_NOWHERE;
    json_decref(record);
    return rc;
}

int64_t head_log_next_attempt(struct mb_head *h, const char *job_id, const struct log_whose *whose)
{
    json_t *record = whose->rank >= 0 ? gang_record(h, job_id) : NULL;
    int64_t n = number_of(find_attempt(record, whose->attempt + 1, whose->rank), "attempt");

    json_decref(record);
    return n;
}

int head_log_place_lost(const struct log_place *p, int64_t rank, struct mb_err *err)
{
    char whose[40] = "the driver";

    if (rank >= 0)
        snprintf(whose, sizeof whose, "rank %lld", (long long)rank);
    return mb_err_set(err, MB_EUNAVAIL,
                      "the log of %s was on node %s, which is gone, and nowhere else: the job has "
                      "no --checkpoint-url and no MOBULA_LOG_URL to which it would have been sent",
                      whose, p->node_hex);
}
