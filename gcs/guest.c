/*
 * A job agent below Ray's own head.
 *
 *  1. open: the tables come from the file here (store_kv.h) and drivers are adopted at once: a
 *     job's truth is with the process that holds its driver, not with the KV.
 *  2. connected: which node is the head's (KV), where its dashboard looks for that node's agent
 *     (another key in Ray before 2.60, which has no address, so that we must be on the head's
 *     machine then); everything is published; from then on jobs are taken.
 *  3. Every LOOK_MS: the key of that agent says this node, else it is written again. The head's
 *     own agent writes it whenever it starts. Asked for a job all the same, it says of every job of
 *     ours that it has failed: one record is read at each look, and if it says so, 4 follows.
 *  4. Every SYNC_MS jobs that have not ended are published again; when the key was another's,
 *     everything.
 *     Which node is the job agent stands in a key of ours: of two, the second ends with an error
 *     while the first is ALIVE.
 * Failure paths:
 *  5. A job in the KV that is not ours, before we took any: the dashboard has that agent's address
 *     for good. This node ends with an error. Later: said once for each.
 *  6. A record of another job agent of ours: the same while its node is ALIVE; else that node or
 *     its directory is gone, and the record is adopted.
 *  7. The head is gone: writes wait; another cluster at its address gets everything that is here.
 */
#include "gcs/guest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/client_internal.h"
#include "gcs/guest_owner.h"
#include "gcs/job_list.h"
#include "gcs/jobs_internal.h"
#include "gcs/store_kv.h"

enum { LOOK_MS = 2000, RETRY_MS = 1000, SYNC_MS = 30000, ASK_MS = 10000 };

#define CLAIM_KEY "job-agent"

struct head_guest {
    struct mb_head *h;
    struct mb_gcs *gcs;
    struct mb_kv_store *store; /* freed with the head's tables */
    uv_timer_t timer;
    char head_hex[2 * MB_NODE_ID_BYTES + 1];
    char key[GCS_AGENT_KEY_BYTES]; /* where the dashboard looks for the head's agent */
    char value[128];               /* what is to stand there */
    char closed[200];              /* why no job is taken; "": they are */
    int is_open;                   /* jobs have been taken since this process began */
    int is_settling, settle_again;
    char claim[2 * MB_NODE_ID_BYTES + 1];    /* of this node, under way */
    char claimed[2 * MB_NODE_ID_BYTES + 1];  /* as which node it is the cluster's job agent */
    char claimant[2 * MB_NODE_ID_BYTES + 1]; /* who was, by the key */
    int is_claiming_over;
    uint64_t sync_at_ms;
    int publish_all; /* the next sync: ended jobs too */
    size_t n_looks;  /* which job's record is looked at next */
    char *looked_at; /* whose it is that was asked for */
    json_t
        *foreign;  /* ids of other agents that have been said: of the last whole sync, and since */
    json_t *found; /* those of the sync that is under way */
    json_t *alive; /* ids in hex of the nodes that were ALIVE when they were last listed */
    void (*closed_cb)(void *arg);
    void *closed_arg;
};

static void look_for_head(struct head_guest *g);

static void again_in(struct head_guest *g, uint64_t ms);

static void say_closed(struct head_guest *g, const char *why)
{
    snprintf(g->closed, sizeof g->closed, "%s", why);
}

/* It cannot serve here, whatever is tried again. */
static void refuse(struct head_guest *g, const struct mb_err *err)
{
    if (!g->h->stopping && g->h->n_lost++ == 0)
        g->h->ops->on_lost(g->h->ops_arg, err);
}

/* ---- the key of the head's agent ---- */

static void on_key_put(void *arg, const struct mb_err *err, int64_t count)
{
    struct head_guest *g = arg;

    (void)count;
    if (g->h->stopping)
        return;
    if (err->code != 0)
        mb_warn("jobs", "the dashboard is not told of this node: %s", err->text);
    else if (g->closed[0])
        mb_info("jobs", "the head's dashboard hands its jobs to this node key=%s value=%s", g->key,
                g->value);
    if (err->code == 0 && g->closed[0]) {
        g->is_open = 1;
        say_closed(g, "");
        g->h->ops->on_active(g->h->ops_arg);
    }
    again_in(g, err->code == 0 ? LOOK_MS : RETRY_MS);
}

/* The port of the head's own agent that serves its logs stays in the value, where it can. */
static int value_is_ours(struct head_guest *g, const char *now)
{
    json_t *was = now ? json_loads(now, 0, NULL) : NULL;
    const char *address = g->h->runner->http_address(g->h->runner->self);
    const char *colon = strrchr(address, ':');
    int port = colon ? atoi(colon + 1) : 0, is_ours, grpc_port = -1;

    if (mb_gcs_is_modern(g->gcs)) {
        const char *ip = json_string_value(json_array_get(was, 0));
        int on_our_host = ip && strcmp(ip, g->h->node_ip) == 0;
        is_ours = on_our_host && json_integer_value(json_array_get(was, 1)) == port;
        if (on_our_host)
            grpc_port = (int)json_integer_value(json_array_get(was, 2));
        snprintf(g->value, sizeof g->value, "[\"%.64s\", %d, %d]", g->h->node_ip, port,
                 grpc_port > 0 ? grpc_port : -1);
    } else {
        is_ours = json_integer_value(json_array_get(was, 0)) == port;
        grpc_port = (int)json_integer_value(json_array_get(was, 1));
        snprintf(g->value, sizeof g->value, "[%d, %d]", port, grpc_port > 0 ? grpc_port : -1);
    }
    json_decref(was);
    return is_ours;
}

static void write_key(struct head_guest *g)
{
    struct mb_err err = {0};

    if (mb_gcs_kv_put(g->gcs, "dashboard", g->key, g->value, strlen(g->value), 1, ASK_MS,
                      on_key_put, g, NULL, &err) != 0)
        again_in(g, RETRY_MS);
}

/* ---- records of jobs that have not ended ---- */

static const struct head_job *next_live_job(struct head_guest *g)
{
    const struct mb_head *h = g->h;

    for (size_t i = 0; i < h->n_jobs; i++) {
        const struct head_job *job = h->jobs[g->n_looks++ % h->n_jobs];
        if (!mb_job_is_terminal(job->state))
            return job;
    }
    return NULL;
}

static void on_record(void *arg, const struct mb_err *err, const void *value, size_t n)
{
    struct head_guest *g = arg;
    const struct head_job *job = head_job_find(g->h, g->looked_at);
    enum mb_job_state said = MB_JOB_PENDING;
    const char *status;
    json_t *info;

    if (g->h->stopping)
        return;
    info = err->code == 0 ? json_loadb(value, n, 0, NULL) : NULL;
    status = json_string_value(json_object_get(info, "status"));
    if (job && !mb_job_is_terminal(job->state) && status &&
        mb_job_state_parse(status, &said) == 0 && mb_job_is_terminal(said)) {
        mb_warn("jobs",
                "job=%s another agent says that it is %s, and it is %s: the jobs of this node are "
                "published again",
                job->id, mb_job_state_name(said), mb_job_state_name(job->state));
        g->sync_at_ms = 0;
    }
    json_decref(info);
    again_in(g, g->sync_at_ms == 0 ? 0 : LOOK_MS);
}

static void look_at_a_job(struct head_guest *g)
{
    const struct head_job *job = next_live_job(g);
    struct mb_err err = {0};
    char *key;
    int rc;

    if (!job) {
        again_in(g, LOOK_MS);
        return;
    }
    key = mb_asprintf(JOBS_KEY_PREFIX "%s", job->id);
    mb_free(g->looked_at);
    g->looked_at = mb_strdup(job->id);
    rc = key && g->looked_at ? mb_gcs_kv_get(g->gcs, "job", key, ASK_MS, on_record, g, NULL, &err)
                             : MB_ENOMEM;
    mb_free(key);
    if (rc != 0)
        again_in(g, RETRY_MS);
}

/* ---- the key, again ---- */

static void on_key(void *arg, const struct mb_err *err, const void *value, size_t n)
{
    struct head_guest *g = arg;
    const char *now = err->code == 0 ? value : NULL;

    (void)n;
    if (g->h->stopping)
        return;
    if (err->code != 0 && err->code != MB_ENOENT) {
        again_in(g, RETRY_MS);
        return;
    }
    if (value_is_ours(g, now) && !g->closed[0]) {
        look_at_a_job(g);
        return;
    }
    if (!g->closed[0]) {
        mb_warn("jobs",
                "another agent registered itself as the one that takes jobs: key=%s had=%.200s, "
                "now=%s again",
                g->key, now ? now : "nothing", g->value);
        g->sync_at_ms = 0;
        g->publish_all = 1;
    }
    write_key(g);
}

/* ---- one job agent a cluster ---- */

static void on_claimed(void *arg, const struct mb_err *err, int64_t count);
static void look_at_key(struct head_guest *g);

static void claim(struct head_guest *g, int overwrite)
{
    const char *own = g->h->runner->node_id_hex(g->h->runner->self);
    struct mb_err err = {0};

    snprintf(g->claim, sizeof g->claim, "%s", own);
    g->is_claiming_over = overwrite;
    if (mb_gcs_kv_put(g->gcs, "mobula", CLAIM_KEY, own, strlen(own), overwrite, ASK_MS, on_claimed,
                      g, NULL, &err) != 0)
        again_in(g, RETRY_MS);
}

/* Nobody else, or one whose node is gone: the place is free. */
static void on_claim_nodes(void *arg, const struct mb_err *err, const struct mb_gcs_node *nodes,
                           size_t n)
{
    struct head_guest *g = arg;
    const char *own = g->h->runner->node_id_hex(g->h->runner->self);
    char hex[2 * MB_NODE_ID_BYTES + 1];
    struct mb_err why = {0};

    if (g->h->stopping)
        return;
    if (err->code != 0) {
        again_in(g, RETRY_MS);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        mb_hex(nodes[i].node_id, MB_NODE_ID_BYTES, hex);
        if (nodes[i].is_dead || strcmp(hex, own) == 0 || strcmp(hex, g->claimant) != 0)
            continue;
        mb_err_set(&why, MB_ESTATE,
                   "--job-agent refused: node %.56s, which is ALIVE, is the job agent of this "
                   "cluster. One node is: stop that one first, or start this one without "
                   "--job-agent",
                   hex);
        refuse(g, &why);
        return;
    }
    claim(g, 1);
}

static void on_claimant(void *arg, const struct mb_err *err, const void *value, size_t n)
{
    struct head_guest *g = arg;
    struct mb_err why = {0};

    (void)n;
    if (g->h->stopping)
        return;
    snprintf(g->claimant, sizeof g->claimant, "%s", err->code == 0 ? (const char *)value : "");
    if ((err->code != 0 && err->code != MB_ENOENT) ||
        mb_gcs_nodes(g->gcs, ASK_MS, on_claim_nodes, g, NULL, &why) != 0)
        again_in(g, RETRY_MS);
}

static void on_claimed(void *arg, const struct mb_err *err, int64_t count)
{
    struct head_guest *g = arg;
    struct mb_err why = {0};

    if (g->h->stopping)
        return;
    if (err->code == 0 && (count > 0 || g->is_claiming_over)) {
        g->is_claiming_over = 0;
        memcpy(g->claimed, g->claim, sizeof g->claimed);
        look_at_key(g);
        return;
    }
    if (err->code != 0 ||
        mb_gcs_kv_get(g->gcs, "mobula", CLAIM_KEY, ASK_MS, on_claimant, g, NULL, &why) != 0)
        again_in(g, RETRY_MS);
}

static void look_at_key(struct head_guest *g)
{
    struct mb_err err = {0};

    if (g->h->runner->http_address(g->h->runner->self)[0] == '\0') { /* not registered yet */
        again_in(g, 50);
        return;
    }
    if (strcmp(g->claimed, g->h->runner->node_id_hex(g->h->runner->self)) != 0) {
        claim(g, !g->closed[0]); /* under another id, it is ours still */
        return;
    }
    gcs_agent_key(g->gcs, g->head_hex, g->key);
    if (mb_gcs_kv_get(g->gcs, "dashboard", g->key, ASK_MS, on_key, g, NULL, &err) != 0)
        again_in(g, RETRY_MS);
}

/* ---- what is published ---- */

static void on_synced(void *arg)
{
    struct head_guest *g = arg;

    json_t *before = g->foreign;

    g->foreign = g->found; /* what the KV has no more is forgotten */
    g->found = before;
    json_object_clear(before);
    g->sync_at_ms = mb_mono_ms() + SYNC_MS;
    if (g->h->stopping)
        return;
    head_guest_settle(g);
    look_at_key(g);
}

static void on_sync_failed(void *arg, const struct mb_err *err)
{
    struct head_guest *g = arg;

    if (g->h->stopping || g->h->n_lost > 0)
        return;
    mb_warn("jobs", "the head does not take the jobs of this node: %s", err->text);
    again_in(g, RETRY_MS);
}

static int has_live_job(const struct mb_head *h)
{
    for (size_t i = 0; i < h->n_jobs; i++)
        if (!mb_job_is_terminal(h->jobs[i]->state))
            return 1;
    return 0;
}

static int is_settled(void *arg, const char *id)
{
    const struct head_guest *g = arg;
    const struct head_job *job = head_job_find(g->h, id);

    return job && mb_job_is_terminal(job->state);
}

/* The dashboard, or another agent of ours, may hold on to what it knows. */
static int must_refuse(const struct head_guest *g)
{
    return !g->is_open && !has_live_job(g->h) &&
           !mb_kv_store_has_served(g->store, mb_gcs_cluster_id(g->gcs));
}

static void say_foreign(struct head_guest *g, const char *id, const char *whose)
{
    if (!json_object_get(g->foreign, id) && !json_object_get(g->found, id))
        mb_error("jobs", "job=%s was taken by %s of this cluster, not by this node", id, whose);
    json_object_set_new(g->found, id, json_true());
}

static int on_foreign(void *arg, const char *id)
{
    struct head_guest *g = arg;
    struct mb_err err = {0};

    if (must_refuse(g)) {
        mb_err_set(&err, MB_ESTATE,
                   "--job-agent refused: another agent of this cluster has taken jobs (%.200s), so "
                   "that its dashboard knows that one. Delete them (ray job delete), restart the "
                   "head, and start this node before the first job",
                   id);
        refuse(g, &err);
        return MB_ESTATE;
    }
    say_foreign(g, id, "another agent");
    return 0;
}

static int on_alive(void *arg, const struct mb_gcs_node *nodes, size_t n)
{
    struct head_guest *g = arg;
    char hex[2 * MB_NODE_ID_BYTES + 1];

    json_decref(g->alive);
    g->alive = json_object();
    for (size_t i = 0; i < n; i++)
        if (!nodes[i].is_dead &&
            json_object_set_new(g->alive, mb_hex(nodes[i].node_id, MB_NODE_ID_BYTES, hex),
                                json_true()) != 0)
            return MB_ENOMEM;
    return g->alive ? 0 : MB_ENOMEM;
}

static enum mb_kv_store_verdict judge(void *arg, const char *id, struct mb_blob value)
{
    struct head_guest *g = arg;
    struct mb_err err = {0};
    const char *owner = head_guest_other_owner(
        value.p, value.n, g->h->runner->node_id_hex(g->h->runner->self), g->alive);
    char whose[96];

    if (!owner)
        return MB_KV_STORE_ADOPT;
    if (must_refuse(g)) {
        mb_err_set(&err, MB_ESTATE,
                   "--job-agent refused: node %.56s, which is ALIVE, has taken jobs of this "
                   "cluster's dashboard (%.200s). One node does: stop that one first, or start "
                   "this one without --job-agent",
                   owner, id);
        refuse(g, &err);
        return MB_KV_STORE_REFUSE;
    }
    snprintf(whose, sizeof whose, "node %.56s, the other job agent", owner);
    say_foreign(g, id, whose);
    return MB_KV_STORE_LEAVE;
}

static void on_found(void *arg, struct mb_blob key, struct mb_blob value)
{
    struct head_guest *g = arg;
    struct mb_err err = {0};

    if (!g->h->stopping && head_jobs_take_record(g->h, key, value, &err) != 0)
        mb_error("jobs", "a record of a former node is left alone: %s", err.text);
}

/* ---- the head ---- */

static void after_head(struct head_guest *g)
{
    int all = g->publish_all;

    if (mb_mono_ms() < g->sync_at_ms && !g->closed[0]) {
        look_at_key(g);
        return;
    }
    g->publish_all = 0; /* the store keeps it until it is done */
    mb_kv_store_sync(g->store, g->gcs, all);
}

/* Before 2.60 the dashboard takes the port from the key and the address from the node table. */
static void on_nodes(void *arg, const struct mb_err *err, const struct mb_gcs_node *nodes, size_t n)
{
    struct head_guest *g = arg;
    char hex[2 * MB_NODE_ID_BYTES + 1];
    struct mb_err why = {0};

    if (g->h->stopping)
        return;
    for (size_t i = 0; err->code == 0 && i < n; i++) {
        mb_hex(nodes[i].node_id, MB_NODE_ID_BYTES, hex);
        if (strcmp(hex, g->head_hex) != 0)
            continue;
        if (strcmp(nodes[i].ip, g->h->node_ip) == 0) {
            after_head(g);
            return;
        }
        mb_err_set(&why, MB_EUNSUPPORTED,
                   "--job-agent refused: Ray %.20s asks for jobs at its head's own address, %.64s; "
                   "this node is at %.64s. Start it on the head's machine, or use Ray 2.60",
                   mb_gcs_ray_version(g->gcs), nodes[i].ip, g->h->node_ip);
        refuse(g, &why);
        return;
    }
    again_in(g, RETRY_MS);
}

static void on_head_id(void *arg, const struct mb_err *err, const void *value, size_t n)
{
    struct head_guest *g = arg;
    struct mb_err why = {0};

    if (g->h->stopping)
        return;
    if (err->code != 0 || n != sizeof g->head_hex - 1) {
        again_in(g, RETRY_MS); /* a head that has just begun says it a little later */
        return;
    }
    if (memcmp(g->head_hex, value, n) == 0) {
        after_head(g);
        return;
    }
    memcpy(g->head_hex, value, n);
    g->head_hex[n] = '\0';
    if (mb_gcs_is_modern(g->gcs))
        after_head(g);
    else if (mb_gcs_nodes(g->gcs, ASK_MS, on_nodes, g, NULL, &why) != 0)
        again_in(g, RETRY_MS);
}

static void look_for_head(struct head_guest *g)
{
    struct mb_err err = {0};

    if (mb_gcs_connected(g->gcs) &&
        mb_gcs_kv_get(g->gcs, "job", "head_node_id", ASK_MS, on_head_id, g, NULL, &err) != 0)
        again_in(g, RETRY_MS);
}

static void on_timer(uv_timer_t *timer)
{
    look_for_head(timer->data);
}

static void again_in(struct head_guest *g, uint64_t ms)
{
    if (!g->h->stopping)
        uv_timer_start(&g->timer, on_timer, ms, 0);
}

static void on_gcs(void *arg, struct mb_gcs *gcs, enum mb_gcs_event event, const struct mb_err *err)
{
    struct head_guest *g = arg;
    struct mb_err why = {0};

    (void)err;
    if (event == MB_GCS_CONNECTED) {
        g->head_hex[0] = g->claimed[0] = '\0';
        look_for_head(g);
    } else if (event == MB_GCS_CLUSTER_CHANGED || event == MB_GCS_CONNECT_FAILED) {
        say_closed(g, "this node is not connected to the head of its cluster");
        uv_timer_stop(&g->timer);
        mb_kv_store_hold(g->store);
        if (!g->h->stopping && mb_gcs_connect(gcs, &why) != 0)
            mb_error("jobs", "%s", why.text);
    }
}

/* ---- Ray's table of drivers ---- */

static void on_finished(void *arg, const struct mb_err *err)
{
    (void)arg;
    if (err->code != 0 && err->code != MB_ECANCELED)
        mb_warn("jobs", "a driver that has ended is not finished in Ray's table: %s", err->text);
}

static void on_drivers(void *arg, const struct mb_err *err, const struct mb_gcs_job *jobs, size_t n)
{
    struct head_guest *g = arg;
    struct mb_err why = {0};

    g->is_settling = 0;
    if (g->h->stopping)
        return;
    if (err->code != 0)
        on_finished(g, err);
    for (size_t i = 0; err->code == 0 && i < n; i++) {
        const struct head_job *job = jobs[i].is_dead || !jobs[i].submission_id
                                         ? NULL
                                         : head_job_find(g->h, jobs[i].submission_id);
        if (job && mb_job_is_terminal(job->state) &&
            mb_gcs_finish_job(g->gcs, jobs[i].job_id, ASK_MS, on_finished, g, NULL, &why) != 0)
            on_finished(g, &why);
    }
    if (g->settle_again)
        head_guest_settle(g);
}

void head_guest_settle(struct head_guest *g)
{
    struct mb_err err = {0};

    g->settle_again = g->is_settling;
    if (g->is_settling || !mb_gcs_connected(g->gcs))
        return; /* the sync that follows a connection comes here again */
    g->is_settling = mb_gcs_jobs(g->gcs, ASK_MS, on_drivers, g, NULL, &err) == 0;
    if (!g->is_settling)
        on_finished(g, &err);
}

/* ---- for the rest of the head ---- */

const char *head_guest_closed(const struct head_guest *g)
{
    return g->closed[0] ? g->closed : NULL;
}

const char *head_guest_ray_address(const struct head_guest *g)
{
    return mb_gcs_address(g->gcs);
}

/* An ended job keeps the id of the node that it ran on. */
static int is_elsewhere_now(const struct head_job *job, const char *address, const char *node_hex)
{
    const char *was = json_string_value(json_object_get(job->info, "driver_agent_http_address"));
    const char *id = json_string_value(json_object_get(job->info, "driver_node_id"));

    return was && (strcmp(was, address) != 0 ||
                   (!mb_job_is_terminal(job->state) && id && strcmp(id, node_hex) != 0));
}

void head_guest_moved(struct head_guest *g)
{
    struct mb_head *h = g->h;
    const char *address = h->runner->http_address(h->runner->self);
    const char *hex = h->runner->node_id_hex(h->runner->self);
    struct mb_err err = {0};

    for (size_t i = 0; i < h->n_jobs; i++) {
        struct head_job *job = h->jobs[i];

        if (is_elsewhere_now(job, address, hex) &&
            (jobs_set_text(job->info, "driver_agent_http_address", address) != 0 ||
             jobs_set_text(job->info, "driver_node_id", hex) != 0 ||
             jobs_write(h, job, 0, &err) != 0))
            mb_warn("jobs", "job=%s its record has an address of before", job->id);
    }
}

struct question {
    head_guest_id_cb cb;
    void *arg;
};

static void on_exists(void *arg, const struct mb_err *err, int64_t count)
{
    struct question *q = arg;

    q->cb(q->arg, err, count > 0);
    mb_free(q);
}

int head_guest_ask_id(struct head_guest *g, const char *id, head_guest_id_cb cb, void *arg,
                      struct mb_err *err)
{
    struct question *q = mb_calloc(1, sizeof *q);
    char *key = mb_asprintf(JOBS_KEY_PREFIX "%s", id);
    int rc = q && key ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");

    if (rc == 0) {
        *q = (struct question){cb, arg};
        rc = mb_gcs_kv_exists(g->gcs, "job", key, ASK_MS, on_exists, q, NULL, err);
    }
    if (rc != 0)
        mb_free(q);
    mb_free(key);
    return rc;
}

/* ---- life ---- */

static void free_guest(struct head_guest *g)
{
    json_decref(g->foreign);
    json_decref(g->found);
    json_decref(g->alive);
    mb_free(g->looked_at);
    mb_free(g);
}

static void on_timer_closed(uv_handle_t *handle)
{
    struct head_guest *g = handle->data;
    void (*cb)(void *) = g->closed_cb;
    void *arg = g->closed_arg;

    free_guest(g);
    cb(arg);
}

static void on_gcs_closed(void *arg)
{
    struct head_guest *g = arg;

    uv_close((uv_handle_t *)&g->timer, on_timer_closed);
}

void head_guest_close(struct head_guest *g, void (*cb)(void *arg), void *arg)
{
    g->closed_cb = cb;
    g->closed_arg = arg;
    if (g->gcs)
        mb_gcs_close(g->gcs, on_gcs_closed, g);
    else
        on_gcs_closed(g);
}

int head_guest_open(struct mb_head *h, const struct mb_head_opts *o, struct mb_err *err)
{
    static const struct mb_kv_store_ops ops = {on_synced, on_sync_failed, is_settled, on_foreign,
                                               on_alive,  judge,          on_found};
    struct mb_gcs_opts go = {.address = o->guest_of,
                             .token = o->token,
                             .max_message_bytes = MB_GCS_NODE_MESSAGE_MAX_BYTES};
    struct head_guest *g = mb_calloc(1, sizeof *g);
    int rc;

    if (!g || !(g->foreign = json_object()) || !(g->found = json_object())) {
        if (g)
            free_guest(g);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    g->h = h;
    say_closed(g, "this node is not connected to the head of its cluster yet");
    uv_timer_init(h->loop, &g->timer);
    g->timer.data = g;
    h->guest = g;
    rc = mb_gcs_create(h->loop, h->grpc, &go, on_gcs, g, &g->gcs, err);
    if (rc == 0)
        rc = mb_kv_store_open(h->loop, o->store_path, JOBS_KEY_PREFIX, &ops, g, &g->store,
                              &h->store, err);
    return rc == 0 ? mb_gcs_connect(g->gcs, err) : rc;
}
