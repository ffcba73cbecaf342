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

/* Where the ranks are, and their logs: rank r is on nodes[r / ranks per node]. */
static json_t *nodes_json(const struct driver *d)
{
    json_t *list = json_array();
    char hex[2 * MB_NODE_ID_BYTES + 1];

    for (uint32_t i = 0; d->nodes && i < d->n_nodes && d->nodes[i].ip; i++)
        json_array_append_new(list,
                              json_string(mb_hex(d->nodes[i].node_id, MB_NODE_ID_BYTES, hex)));
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
        (json_int_t)mb_drv_committed(d->state), "uploading_bytes", (json_int_t)r->upload_done_bytes,
        "total_bytes", (json_int_t)r->upload_total_bytes);
    for (size_t i = 0; i < d->n_causes; i++)
        json_array_append_new(restarts, json_string(d->causes[i]));
    root = json_pack(
        "{s:s, s:s, s:i, s:i, s:i, s:s, s:s, s:I, s:I, s:I, s:f, s:f, s:f, s:I, s:i, s:i, "
        "s:o*, s:o*, s:o*, s:o*}",
        "submission_id", d->opts->submission_id ? d->opts->submission_id : "", "placement_group_id",
        pg, "attempt", (int)d->attempt, "world_size", (int)drv_world_size(d), "num_nodes",
        (int)d->n_nodes, "state", state_word(d), "error", mb_drv_verdict(d->state), "iteration",
        (json_int_t)r->iteration, "train_iters", (json_int_t)r->train_iters, "consumed_samples",
        (json_int_t)r->consumed_samples, "loss", r->loss, "validation_loss", r->validation_loss,
        "tokens_per_s", r->tokens_per_s, "updated_unix_ms", (json_int_t)mb_unix_ms(), "max_nodes",
        (int)d->opts->num_nodes, "max_restarts", (int)d->opts->max_restarts, "restarts", restarts,
        "checkpoint", checkpoint, "nodes", nodes_json(d), "exits", exits_json(d));
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
