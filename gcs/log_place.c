/*
 *  1. A rank: the gang's record in the KV names its node, the attempt, and the checkpoint URL.
 *  2. A driver: the job's record names the node. The URL is the job's MOBULA_LOG_URL, as for the
 *     agent that sends the log (agent/jobs.c), else that of the gang's record.
 *  3. No gang yet: nowhere. A rank that the gang does not have, a job that ended without a gang:
 *     MB_ENOENT.
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

static int of_rank(struct mb_head *h, const char *job_id, int64_t rank, const json_t *record,
                   struct log_place *out, struct mb_err *err)
{
    json_t *nodes = json_object_get(record, "nodes");
    const char *pg = json_string_value(json_object_get(record, "placement_group_id"));
    int64_t world = json_integer_value(json_object_get(record, "world_size"));
    long long attempt = json_integer_value(json_object_get(record, "attempt"));
    int64_t n_nodes = (int64_t)json_array_size(nodes);

    if (rank >= world)
        return mb_err_set(err, MB_ENOENT, "job %s has no rank %lld, its world size is %lld", job_id,
                          (long long)rank, (long long)world);
    if (!pg || n_nodes == 0 || world < n_nodes)
        return LOG_NOWHERE;
    snprintf(out->name, sizeof out->name, "gangs/%.8s-%lld/rank-%lld.log", pg, attempt,
             (long long)rank);
    snprintf(out->prefix, sizeof out->prefix, "logs/%s/rank-%lld/%lld/", job_id, (long long)rank,
             attempt);
    take_url(out, gang_url(record));
    return of_node(h, json_string_value(json_array_get(nodes, (size_t)(rank / (world / n_nodes)))),
                   out);
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

int head_log_place(struct mb_head *h, const char *job_id, int64_t rank, struct log_place *out,
                   struct mb_err *err)
{
    const struct head_job *job = head_job_find(h, job_id);
    json_t *record = gang_record(h, job_id);
    int rc;

    *out = (struct log_place){0};
    if (rank < 0)
        rc = of_driver(h, job, record, out);
    else if (record)
        rc = of_rank(h, job_id, rank, record, out, err);
    else if (job && mb_job_is_terminal(job->state))
        rc = mb_err_set(err, MB_ENOENT, "job %s has no ranks", job_id);
    else
        rc = LOG_NOWHERE;
    json_decref(record);
    return rc;
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
