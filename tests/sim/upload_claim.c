/*
 * Before the first file of an iteration goes, as agent/upload/upload_prepare.c does it: the list of
 * writers, the claim, and what is there already.
 */
#include <string.h>
#include "base/alloc.h"
#include "tests/sim/sim.h"
#include "tests/sim/upload_internal.h"

/* 1: a newer attempt was here, and nothing of this one counts any more. */
static int stands_back(struct world *w, int machine, int run)
{
    struct run *r = upload_run_at(w, machine, run);
    char **at = &w->bucket.jobs[r->job].writers, *text = NULL, hex[8];
    struct mb_fence_writer writer = {0};
    enum mb_fence_verdict verdict;
    struct mb_err err;

    upload_writer_of(r, hex, &writer.id);
    if (mb_fence_decide(*at, *at ? strlen(*at) : 0, &writer, &verdict, &text, &err) != MB_OK)
        sim_fail(w, "%s", err.text);
    if (verdict == MB_FENCE_ENTER) {
        upload_replace(at, text);
        return 0;
    }
    mb_free(text);
    if (verdict == MB_FENCE_OURS || w->plant == PLANT_CLAIM_TAKEN_BACK)
        return 0;
    for (size_t i = 0; i < mb_plan_count(r->up.plan); i++)
        if (mb_plan_at(r->up.plan, i)->state < MB_PLAN_COMMITTED)
            upload_drop(w, machine, run, mb_plan_at(r->up.plan, i),
                        "a newer attempt has taken over");
    return 1;
}

static char *claim_of(struct world *w, const struct run *r, int64_t iteration)
{
    struct mb_manifest m = {
        .iteration = iteration, .node_rank = -1, .num_nodes = (uint32_t)r->n_nodes, .is_claim = 1};
    struct mb_manifest_writer writer;
    struct mb_err err;
    char hex[8], *text = NULL;

    upload_writer_of(r, hex, &writer);
    int rc = mb_manifest_set_writer(&m, &writer, &err);
    if (rc == MB_OK)
        rc = mb_manifest_encode(&m, &text, &err);
    mb_manifest_close(&m);
    sim_check(w, rc == MB_OK, "%s", err.text);
    return text;
}

static enum mb_claim_act decide(struct world *w, const struct run *r, int64_t iteration,
                                const char *known, char place[MB_CLAIM_PLACE_MAX])
{
    const char *text = w->bucket.jobs[r->job].manifest[iteration];
    struct mb_manifest_writer writer;
    struct mb_manifest m = {0};
    struct mb_err err;
    char hex[8];

    upload_writer_of(r, hex, &writer);
    if (text && mb_manifest_decode_any(text, strlen(text), "manifest", &m, &err) != MB_OK)
        sim_fail(w, "%s", err.text);
    enum mb_claim_act act = mb_claim_decide(text ? &m : NULL, &writer, known, place);
    if (act >= MB_CLAIM_BESIDE && w->plant == PLANT_CLAIM_TAKEN_BACK) {
        act = MB_CLAIM_PUT;
        place[0] = '\0';
    }
    mb_manifest_close(&m);
    return act;
}

/* What is there already: each file goes in its place. */
static void note_seen(struct world *w, const struct run *r, struct mb_plan_iteration *it)
{
    const struct object *objects = upload_objects_of(w, r->job, it->iteration, it->place);

    for (size_t i = 0; i < it->n_files; i++) {
        struct mb_plan_file *f = &it->files[i];
        mb_free(f->etag);
        f->etag = upload_etag_of(&objects[f->path[4] - '0']);
    }
    it->was_listed = 1;
}

/* What is whole stays so, and nothing goes back to an older attempt. */
static void check_claimable(struct world *w, const struct run *r, int64_t iteration)
{
    const char *text = w->bucket.jobs[r->job].manifest[iteration];
    struct mb_manifest m = {0};
    struct mb_err err;

    if (!text)
        return;
    if (mb_manifest_decode_any(text, strlen(text), "manifest", &m, &err) != MB_OK)
        sim_fail(w, "%s", err.text);
    sim_check(w, m.is_claim, "job %d: attempt %u claims iteration %d, which is whole", r->job,
              r->attempt, (int)iteration);
    sim_check(w, m.attempt <= r->attempt, "job %d: attempt %u claims what a newer attempt has",
              r->job, r->attempt);
    mb_manifest_close(&m);
}

void upload_on_prepared(struct world *w, int machine, int run, int64_t iteration)
{
    struct run *r = upload_run_at(w, machine, run);
    char **at = &w->bucket.jobs[r->job].manifest[iteration], place[MB_CLAIM_PLACE_MAX];
    struct mb_plan_iteration *it = mb_plan_find(r->up.plan, iteration);
    int was_there = *at != NULL;
    struct mb_err err;

    if (it->state != MB_PLAN_UPLOADING || stands_back(w, machine, run))
        return;
    switch (decide(w, r, iteration, it->place, place)) {
    case MB_CLAIM_PUT:
        check_claimable(w, r, iteration);
        upload_replace(at, claim_of(w, r, iteration));
        upload_check_manifest(w, r->job, iteration);
        break;
    case MB_CLAIM_OVER:
        upload_drop(w, machine, run, it, "another writer has taken over");
        return;
    default:
        break;
    }
    if (!it->place) {
        NOTE(w, machine, run, mb_journal_place(r->up.journal, iteration, place, &err));
        if (mb_plan_place(it, place, &err) != MB_OK)
            sim_fail(w, "%s", err.text);
    }
    if (was_there && !it->was_listed) {
        note_seen(w, r, it);
        upload_request(w, machine, run, UPLOAD_OP_PREPARE, iteration, 0);
        r->up.preparing = 1;
        return;
    }
    it->was_listed = 1;
    r->up.prepared = iteration;
    r->up.prepared_ms = w->now_ms;
}
