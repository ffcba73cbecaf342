/* The record of a running gang in the internal KV: namespace "mobula", key "gang:<job id>". */
#include "cli/driver/internal.h"

#include <jansson.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/str.h"

enum { RECORD_TIMEOUT_MS = 10000 };

/* What people and programs see: words of the job's own states, or finer. */
static const char *state_word(const struct driver *d)
{
    static const char *const words[MB_DRV_N_PHASES] = {
        "CONNECTING", "RESTARTING", "CONNECTING", "WAITING",  "DIALLING",  "LAUNCHING",
        "RENDEZVOUS", "RUNNING",    "STOPPING",   "DRAINING", "RELEASING", "OVER",
    };

    if (mb_drv_phase(d->state) == MB_DRV_OVER || d->releasing)
        return mb_drv_exit_status(d->state) ? "FAILED" : "SUCCEEDED";
    return words[mb_drv_phase(d->state)];
}

/* ---- where the ranks of the attempts are, and their logs ---- */

static void forget_oldest(struct driver *d)
{
    mb_free(d->placed[0].node_ids);
    d->n_placed--;
    memmove(d->placed, d->placed + 1, d->n_placed * sizeof(d->placed[0]));
}

int drv_placed_add(struct driver *d, struct mb_err *err)
{
    struct drv_placed *p;
    size_t n_ids = d->n_nodes;

    for (size_t i = 0; i < d->n_placed; i++)
        n_ids += d->placed[i].n_nodes;
    while (d->n_placed > 0 && (d->n_placed == DRV_PLACED_MAX || n_ids > DRV_PLACED_IDS_MAX)) {
        n_ids -= d->placed[0].n_nodes;
        forget_oldest(d);
    }
    p = &d->placed[d->n_placed];
    p->node_ids = mb_calloc(d->n_nodes, sizeof(p->node_ids[0]));
    if (!p->node_ids)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    p->attempt = d->attempt;
    p->n_nodes = d->n_nodes;
    p->world_size = drv_world_size(d);
    memcpy(p->pg_id, d->pg_id, sizeof(p->pg_id));
    for (uint32_t i = 0; i < d->n_nodes; i++)
        memcpy(p->node_ids[i], d->nodes[i].node_id, MB_NODE_ID_BYTES);
    d->n_placed++;
    return 0;
}

void drv_placed_clear(struct driver *d)
{
    while (d->n_placed > 0)
        forget_oldest(d);
}

/* Rank r is on nodes[r / ranks per node], also when that node is gone. */
static json_t *ids_json(const struct drv_placed *p)
{
    json_t *list = json_array();
    char hex[2 * MB_NODE_ID_BYTES + 1];

    for (uint32_t i = 0; i < p->n_nodes; i++)
        json_array_append_new(list, json_string(mb_hex(p->node_ids[i], MB_NODE_ID_BYTES, hex)));
    return list;
}

/* Of the present attempt; empty until its nodes are known. */
static json_t *nodes_json(const struct driver *d)
{
    const struct drv_placed *newest = d->n_placed > 0 ? &d->placed[d->n_placed - 1] : NULL;

    return newest && newest->attempt == d->attempt ? ids_json(newest) : json_array();
}

static json_t *former_json(const struct driver *d)
{
    json_t *list = json_array();
    char pg[2 * MB_PG_ID_BYTES + 1];

    for (size_t i = 0; i < d->n_placed; i++) {
        const struct drv_placed *p = &d->placed[i];

        if (p->attempt != d->attempt)
            json_array_append_new(
                list, json_pack("{s:i, s:s, s:i, s:o}", "attempt", (int)p->attempt,
                                "placement_group_id", mb_hex(p->pg_id, sizeof(p->pg_id), pg),
                                "world_size", (int)p->world_size, "nodes", ids_json(p)));
    }
    return list;
}

/* Of the newest attempt; a rank that has not ended, or was lost with its node, is missing. */
static json_t *exits_json(const struct driver *d)
{
    json_t *list = json_array();

    for (uint32_t r = 0; d->exits && r < drv_world_size(d); r++) {
        const struct drv_exit *x = &d->exits[r];

        if (x->is_known)
            json_array_append_new(list,
                                  json_pack("{s:i, s:i, s:i, s:s}", "rank", (int)r, "exit_code",
                                            x->code, "signal", x->signal, "cause", x->cause));
    }
    return list;
}

/* What will not be durable, and why: the job may run on for long. */
static json_t *given_up_json(const struct driver *d)
{
    json_t *list = json_array();

    for (size_t i = 0; i < d->n_leaves; i++)
        if (d->leaves[i].is_dropped)
            json_array_append_new(
                list, json_pack("{s:I, s:i, s:s}", "iteration", (json_int_t)d->leaves[i].iteration,
                                "node", (int)d->leaves[i].node, "error", d->leaves[i].error));
    return list;
}

/* What is on its way, as numbers and as the line that people read. */
static void add_progress(const struct driver *d, json_t *checkpoint)
{
    const struct mb_drv_uploads *u = &d->report.uploads;
    char text[MB_DRV_UPLOADS_TEXT_MAX];

    mb_drv_uploads_text(u, mb_drv_saved(d->state), mb_drv_committed(d->state), d->deadline.unix_ms,
                        mb_unix_ms(), text);
    json_object_set_new(checkpoint, "uploading_iteration", json_integer(u->iteration));
    json_object_set_new(checkpoint, "parts_done", json_integer((json_int_t)u->parts_done));
    json_object_set_new(checkpoint, "parts_total", json_integer((json_int_t)u->parts_total));
    json_object_set_new(checkpoint, "rate_bytes_per_s",
                        json_integer((json_int_t)u->rate_bytes_per_s));
    if (u->eta_ms != UINT64_MAX)
        json_object_set_new(checkpoint, "eta_ms", json_integer((json_int_t)u->eta_ms));
    json_object_set_new(checkpoint, "given_up", given_up_json(d));
    json_object_set_new(checkpoint, "progress",
                        json_string(d->opts->checkpoint_url != NULL ? text : ""));
}

static json_t *deadline_json(const struct driver *d)
{
    if (d->deadline.unix_ms == 0)
        return NULL;
    return json_pack("{s:I, s:s, s:I, s:b, s:b}", "unix_ms", (json_int_t)d->deadline.unix_ms,
                     "source", d->deadline.source, "save_at_unix_ms",
                     (json_int_t)d->deadline.save_at_unix_ms, "is_local_only",
                     d->deadline.is_local_only, "reached", mb_drv_at_deadline(d->state));
}

char *drv_record_json(const struct driver *d)
{
    const struct drv_report *r = &d->report;
    char pg[2 * MB_PG_ID_BYTES + 1];
    char *text = NULL;
    json_t *checkpoint, *root, *restarts = json_array();

    mb_hex(d->pg_id, sizeof(d->pg_id), pg);
    checkpoint = json_pack(
        "{s:s, s:I, s:I, s:I, s:I}", "url", d->opts->checkpoint_url ? d->opts->checkpoint_url : "",
        "saved_iteration", (json_int_t)mb_drv_saved(d->state), "durable_iteration",
        (json_int_t)mb_drv_committed(d->state), "uploading_bytes",
        (json_int_t)r->uploads.done_bytes, "total_bytes", (json_int_t)r->uploads.total_bytes);
    add_progress(d, checkpoint);
    for (size_t i = 0; i < d->n_causes; i++)
        json_array_append_new(restarts, json_string(d->causes[i]));
    root = json_pack(
        "{s:s, s:s, s:i, s:i, s:i, s:s, s:s, s:I, s:I, s:I, s:f, s:f, s:f, s:I, s:i, s:i, "
        "s:o*, s:o*, s:o*, s:o*, s:o*, s:o*}",
        "submission_id", d->opts->submission_id ? d->opts->submission_id : "", "placement_group_id",
        pg, "attempt", (int)d->attempt, "world_size", (int)drv_world_size(d), "num_nodes",
        (int)d->n_nodes, "state", state_word(d), "error", mb_drv_verdict(d->state), "iteration",
        (json_int_t)r->iteration, "train_iters", (json_int_t)r->train_iters, "consumed_samples",
        (json_int_t)r->consumed_samples, "loss", r->loss, "validation_loss", r->validation_loss,
        "tokens_per_s", r->tokens_per_s, "updated_unix_ms", (json_int_t)mb_unix_ms(), "max_nodes",
        (int)d->opts->num_nodes, "max_restarts", (int)d->opts->max_restarts, "restarts", restarts,
        "checkpoint", checkpoint, "nodes", nodes_json(d), "attempts", former_json(d), "exits",
        exits_json(d), "deadline", deadline_json(d));
    if (root)
        text = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    return text;
}

static void on_put(void *arg, const struct mb_err *err, int64_t count)
{
    struct driver *d = arg;

    (void)count;
    d->record_busy = 0;
    if (err->code && err->code != MB_ECANCELED)
        d->record_dirty = 1; /* the next tick tries again with newer facts */
}

void drv_record_put(struct driver *d)
{
    char key[256];
    char *json;

    /* A gang of one that is a job's driver is no gang of the job. */
    if (!d->gcs || !mb_gcs_connected(d->gcs) || d->record_busy || d->opts->as_driver)
        return;
    snprintf(key, sizeof(key), "gang:%s", d->opts->job_id);
    json = drv_record_json(d);
    if (json && mb_gcs_kv_put(d->gcs, "mobula", key, json, strlen(json), 1, RECORD_TIMEOUT_MS,
                              on_put, d, NULL, NULL) == 0) {
        d->record_busy = 1;
        d->record_dirty = 0;
    }
    mb_free(json);
}
