/*
 * The uploader, in the order of agent/upload/upload.c and commit.c, over a bucket whose requests
 * may fail before or after they took effect. The journal is the real one, on a file in memory whose
 * last record a kill may tear.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "tests/sim/sim.h"
#include "tests/sim/upload_internal.h"

enum {
    FAIL_ONE_IN = 40,
    FILES_A_CHANGE = 300,
    BACK_OFF_MS = 1000,
    RELEASED_WAIT_MS = 30000,
    PREPARED_MS = 10000,
    IS_AWAY = 2, /* how a request failed */
    CONFLICT = 3,
    ASIDE_MIN_MS = 200,
    ASIDE_MAX_MS = 2000,
    TRIES_MAX = 5,
    S3_BACKOFF_MS = 100,
    S3_BACKOFF_CAP_MS = 20000
};
enum {
    OP_PREPARE = UPLOAD_OP_PREPARE,
    OP_FILE,
    OP_PART,
    OP_LIST,
    OP_PARTS,
    OP_MANIFEST,
    OP_GET_POINTER,
    OP_PUT_POINTER
};

struct run *upload_run_at(struct world *w, int machine, int run)
{
    return &w->machines[machine].agent.runs[run];
}

void upload_writer_of(const struct run *r, char hex[8], struct mb_manifest_writer *out)
{
    snprintf(hex, 8, "%02x", r->job + 1);
    *out = (struct mb_manifest_writer){"job", hex, r->attempt};
}

/* ---- the journal ---- */

static int journal_fd(struct world *w, int machine, int run)
{
    return w->machines[machine].disk.journals[run] - 1;
}

off_t upload_journal_size(struct world *w, int machine, int run)
{
    return lseek(journal_fd(w, machine, run), 0, SEEK_END);
}

/* A record was just written: the kill may have come in the middle of it. */
void upload_noted(struct world *w, int machine, int run, off_t before, int rc)
{
    off_t after = upload_journal_size(w, machine, run);

    sim_check(w, rc == MB_OK, "a journal cannot be written");
    if (!sim_chance(w, 150))
        return;
    off_t keep = before + (off_t)sim_below(w, (int)(after - before));
    if (ftruncate(journal_fd(w, machine, run), keep) != 0)
        sim_fail(w, "ftruncate");
    w->stats.torn++;
    w->stats.crashes++;
    w->stats.faults++;
    sim_trace(w, "agent %d is killed while it writes a journal", machine);
    int proc = w->current;
    sim_kill_proc(w, proc);
    longjmp(w->crashed, 1);
}

void upload_drop(struct world *w, int machine, int run, struct mb_plan_iteration *it,
                 const char *why)
{
    struct run *r = upload_run_at(w, machine, run);
    struct mb_err err;

    if (mb_plan_event(it, MB_PLAN_EV_DROPPED, why, &err) != MB_OK || it->state != MB_PLAN_DROPPED)
        return;
    sim_trace(w, "agent %d: job %d attempt %u iteration %d dropped: %s", machine, r->job,
              r->attempt, (int)it->iteration, why);
    NOTE(w, machine, run, mb_journal_dropped(r->up.journal, it->iteration, why, &err));
    w->dropped[r->job][r->attempt - 1] |= 1u << it->iteration;
    gang_tell(w, machine, run, M_UPLOAD, 0, it->iteration, MB_EIO);
}

/* ---- the bucket ---- */

static void answered(struct world *w, int a, int b);
static void try_again(struct world *w, int a, int b);

static int is_away(struct world *w, int machine)
{
    int is_down = w->now_ms < w->bucket.down_until_ms;

    if (is_down)
        faults_acted(w, w->bucket.down_number);
    return faults_cut_off(w, machine, MACHINE_OUTSIDE) || is_down;
}

/* 1: the request takes effect. Its answer comes later, and may say failed all the same. A store
 * that is away is tried for a minute: no outage here lasts for that. For a file it is PREPARED_MS,
 * after which the fence is looked at again (try_again). */
static int request_if(struct world *w, int machine, int run, int op, int64_t iteration, int x,
                      int holds)
{
    int tries = upload_run_at(w, machine, run)->up.tries,
        packed = op << 24 | (int)iteration << 16 | x << 8;

    if (is_away(w, machine)) {
        sim_at(w, sim_agent_proc(machine),
               1 + mb_backoff_ms((unsigned)tries, S3_BACKOFF_MS, S3_BACKOFF_CAP_MS, sim_rnd(w)),
               try_again, machine * MAX_RUNS + run, packed | (tries + 1));
        return 0;
    }
    int failed = sim_chance(w, FAIL_ONE_IN);
    int effect = (!failed || sim_below(w, 2)) && holds;
    if (!failed && !holds)
        failed = CONFLICT;
    sim_at(w, sim_agent_proc(machine), 2 + (uint64_t)sim_below(w, 40), answered,
           machine * MAX_RUNS + run, packed | failed);
    return effect;
}

int upload_request(struct world *w, int machine, int run, int op, int64_t iteration, int x)
{
    return request_if(w, machine, run, op, iteration, x, 1);
}

const struct object *upload_objects_of(struct world *w, int job, int64_t iteration,
                                       const char *place)
{
    const char *dash = place ? strrchr(place, '-') : NULL;

    return w->bucket.jobs[job].files[iteration][dash ? atoi(dash + 1) : 0];
}

int upload_is_whole(const struct world *w, int job, int64_t iteration)
{
    const char *text = w->bucket.jobs[job].manifest[iteration];
    struct mb_manifest m = {0};
    int whole = text && mb_manifest_decode(text, strlen(text), "manifest", &m, NULL) == MB_OK;

    mb_manifest_close(&m);
    return whole;
}

/* Whatever is visible is whole: all that a manifest lists is there and is what it says. What latest
 * names has a manifest. */
void upload_check_manifest(struct world *w, int job, int64_t iteration)
{
    const char *text = w->bucket.jobs[job].manifest[iteration];
    struct mb_manifest m = {0};
    struct mb_err err;

    sim_check(w, w->bucket.jobs[job].latest != iteration || upload_is_whole(w, job, iteration),
              "job %d: latest names iteration %d, which has no manifest", job, (int)iteration);
    if (!text)
        return;
    if (mb_manifest_decode_any(text, strlen(text), "manifest", &m, &err) != MB_OK)
        sim_fail(w, "%s", err.text);
    const struct object *objects = upload_objects_of(w, job, iteration, m.data);
    int bad = !m.is_claim && m.n_files != (size_t)m.num_nodes * (size_t)w->scripts[job].per_node;
    for (size_t i = 0; i < m.n_files; i++) {
        const struct object *o = &objects[m.files[i].path[4] - '0'];
        bad |= !o->present || o->crc != m.files[i].crc64nvme;
    }
    mb_manifest_close(&m);
    sim_check(w, !bad, "job %d: the manifest of iteration %d lists what is not there", job,
              (int)iteration);
}

void upload_replace(char **at, char *text)
{
    mb_free(*at);
    *at = text;
}

static struct mb_plan_file *file_of_rank(struct mb_plan_iteration *it, int rank)
{
    for (size_t i = 0; i < it->n_files; i++)
        if (it->files[i].path[4] - '0' == rank)
            return &it->files[i];
    return NULL;
}

char *upload_etag_of(const struct object *o)
{
    return o->present ? mb_asprintf("%016llx", (unsigned long long)o->crc) : NULL;
}

static void put_file(struct world *w, int machine, int run, int64_t iteration, int rank)
{
    struct run *r = upload_run_at(w, machine, run);
    struct mb_plan_iteration *it = mb_plan_find(r->up.plan, iteration);
    struct object *o =
        (struct object *)(uintptr_t)&upload_objects_of(w, r->job, iteration, it->place)[rank];
    const struct mb_plan_file *f = file_of_rank(it, rank);
    uint64_t crc = sim_crc(r->job, iteration, rank, r->attempt);
    char *there = upload_etag_of(o);

    if (r->up.tries == 0)
        r->up.failing_since_ms[rank] = w->now_ms;
    int holds = (!there && !f->etag) || (there && f->etag && strcmp(there, f->etag) == 0) ||
                (there && o->crc == crc);
    mb_free(there);
    if (!request_if(w, machine, run, OP_FILE, iteration, rank, holds))
        return;
    *o = (struct object){1, crc};
    upload_check_manifest(w, r->job, iteration);
}

static int build_part(struct world *w, const struct run *r, const struct mb_plan_iteration *it,
                      char **text, struct mb_err *err)
{
    struct mb_manifest m = {
        .iteration = it->iteration, .node_rank = r->node, .num_nodes = (uint32_t)r->n_nodes};
    struct mb_manifest_writer writer;
    char hex[8];

    (void)w;
    upload_writer_of(r, hex, &writer);
    int rc = mb_manifest_set_writer(&m, &writer, err);
    if (rc == MB_OK)
        rc = mb_manifest_set_data(&m, it->place, err);
    for (size_t i = 0; i < it->n_files && rc == MB_OK; i++)
        rc = mb_manifest_add(&m, it->files[i].path, it->files[i].size_bytes, it->files[i].crc64nvme,
                             err);
    if (rc == MB_OK)
        rc = mb_manifest_encode(&m, text, err);
    mb_manifest_close(&m);
    return rc;
}

static int is_text(const char *a, const char *b)
{
    return (!a && !b) || (a && b && strcmp(a, b) == 0);
}

static void put_part(struct world *w, int machine, int run, struct mb_plan_iteration *it)
{
    struct run *r = upload_run_at(w, machine, run);
    char **at = &w->bucket.jobs[r->job].parts[it->iteration][r->n_nodes][r->node], *text = NULL;
    struct mb_err err;

    sim_check(w, build_part(w, r, it, &text, &err) == MB_OK, "%s", err.text);
    r->up.part_busy = 1;
    if (request_if(w, machine, run, OP_PART, it->iteration, 0,
                   is_text(*at, it->part_etag) || is_text(*at, text)))
        upload_replace(at, text);
    else
        mb_free(text);
}

/* ---- the commit ---- */

static void commit_step(struct world *w, int machine, int run, int op)
{
    struct run *r = upload_run_at(w, machine, run);

    r->up.commit_busy = 1;
    upload_request(w, machine, run, op, r->up.commit_it, 0);
}

/* 1: what was being committed is dropped, so nothing follows the request that is under way. */
static int is_cancelled(struct agent_upload *u)
{
    if (mb_plan_find(u->plan, u->commit_it)->state == MB_PLAN_PART)
        return 0;
    u->commit_busy = 0;
    u->commit_it = -1;
    return 1;
}

static void list_again(struct world *w, int machine, int run)
{
    struct agent_upload *u = &upload_run_at(w, machine, run)->up;
    struct mb_plan_iteration *it = mb_plan_find(u->plan, u->commit_it);

    u->commit_busy = 0;
    if (u->released_at_ms > 0 && w->now_ms >= u->released_at_ms + RELEASED_WAIT_MS) {
        u->commit_it = -1;
        upload_drop(w, machine, run, it, "the parts of other nodes did not appear");
        return;
    }
    u->commit_at_ms = w->now_ms + 200 + (uint64_t)sim_below(w, 800);
}

static int is_ours(struct world *w, const struct run *r, const char *text, struct mb_manifest *m)
{
    struct mb_manifest_writer writer;
    struct mb_err err;
    char hex[8];

    upload_writer_of(r, hex, &writer);
    if (!text || mb_manifest_decode_any(text, strlen(text), "part", m, &err) != MB_OK)
        return 0;
    if (w->plant == PLANT_OLD_MANIFEST)
        m->attempt = r->attempt;
    return mb_manifest_is_of(m, &writer);
}

/* The parts are read after what stands at the manifest's key, and the write comes after both. */
static void merge_and_put(struct world *w, int machine, int run)
{
    struct run *r = upload_run_at(w, machine, run);
    struct mb_manifest parts[MAX_BUNDLES] = {0}, whole = {0};
    char **at = &w->bucket.jobs[r->job].manifest[r->up.commit_it], *text = NULL;
    struct mb_err err;
    int rc = MB_OK;

    for (int i = 0; i < r->n_nodes; i++)
        if (!is_ours(w, r, w->bucket.jobs[r->job].parts[r->up.commit_it][r->n_nodes][i], &parts[i]))
            rc = MB_ENOENT;
    if (rc == MB_OK)
        rc = mb_manifest_merge(parts, (size_t)r->n_nodes, &whole, &err);
    if (rc == MB_OK)
        rc = mb_manifest_encode(&whole, &text, &err);
    for (int i = 0; i < r->n_nodes; i++)
        mb_manifest_close(&parts[i]);
    mb_manifest_close(&whole);
    if (rc != MB_OK) {
        list_again(w, machine, run);
        return;
    }
    r->up.commit_busy = 1;
    if (request_if(w, machine, run, OP_MANIFEST, r->up.commit_it, 0,
                   is_text(*at, r->up.commit_etag) || is_text(*at, text))) {
        upload_replace(at, text);
        upload_check_manifest(w, r->job, r->up.commit_it);
    } else {
        mb_free(text);
    }
}

static void commit_is_over(struct world *w, int machine, int run, const char *why)
{
    struct agent_upload *u = &upload_run_at(w, machine, run)->up;
    struct mb_plan_iteration *it = mb_plan_find(u->plan, u->commit_it);

    u->commit_busy = 0;
    u->commit_it = -1;
    upload_drop(w, machine, run, it, why);
}

static void on_list(struct world *w, int machine, int run)
{
    struct run *r = upload_run_at(w, machine, run);
    const char *text = w->bucket.jobs[r->job].manifest[r->up.commit_it];
    const char *place = mb_plan_find(r->up.plan, r->up.commit_it)->place;
    struct mb_manifest m = {0};
    struct mb_err err;

    if (!text) {
        commit_is_over(w, machine, run, "its claim is gone");
        return;
    }
    if (mb_manifest_decode_any(text, strlen(text), "manifest", &m, &err) != MB_OK)
        sim_fail(w, "%s", err.text);
    int is_claim = m.is_claim;
    mb_manifest_close(&m);
    int ours = is_ours(w, r, text, &m);
    mb_manifest_close(&m);
    upload_replace(&r->up.commit_etag, mb_strdup(text));
    if (!ours && (is_claim || !place || !place[0]))
        commit_is_over(w, machine, run, "another writer has taken over");
    else if (ours && !is_claim)
        commit_step(w, machine, run, OP_GET_POINTER);
    else
        commit_step(w, machine, run, OP_PARTS);
}

static void committed(struct world *w, int machine, int run)
{
    struct run *r = upload_run_at(w, machine, run);
    struct mb_plan_iteration *it = mb_plan_find(r->up.plan, r->up.commit_it);
    struct mb_err err;

    r->up.commit_busy = 0;
    r->up.commit_it = -1;
    if (it->state != MB_PLAN_PART)
        return;
    NOTE(w, machine, run, mb_journal_committed(r->up.journal, it->iteration, &err));
    if (mb_plan_event(it, MB_PLAN_EV_COMMITTED, NULL, &err) != MB_OK)
        sim_fail(w, "%s", err.text);
    w->stats.commits++;
    sim_trace(w, "agent %d: job %d iteration %d is durable", machine, r->job, (int)it->iteration);
    gang_tell(w, machine, run, M_UPLOAD, 0, it->iteration, MB_OK);
}

static void on_pointer(struct world *w, int machine, int run)
{
    struct run *r = upload_run_at(w, machine, run);
    int64_t now_at = w->bucket.jobs[r->job].latest;

    if (!mb_latest_moves(now_at, r->up.commit_it) && w->plant != PLANT_POINTER_BACKWARDS) {
        committed(w, machine, run);
        return;
    }
    int etag = w->bucket.jobs[r->job].etag;
    r->up.pointer_etag = etag;
    /* Between the look and the write somebody else may write: the etag tells. */
    sim_at(w, sim_agent_proc(machine), 1 + (uint64_t)sim_below(w, 20), upload_put_pointer, machine,
           run);
}

void upload_put_pointer(struct world *w, int machine, int run)
{
    struct run *r = upload_run_at(w, machine, run);

    if (!r->used || !r->up.plan || !r->up.commit_busy || is_cancelled(&r->up))
        return;
    int matches =
        w->bucket.jobs[r->job].etag == r->up.pointer_etag || w->plant == PLANT_POINTER_BACKWARDS;
    if (!request_if(w, machine, run, OP_PUT_POINTER, r->up.commit_it, 0, matches))
        return;
    int64_t *latest = &w->bucket.jobs[r->job].latest;
    sim_check(w, r->up.commit_it >= *latest, "job %d: latest moved from %d back to %d", r->job,
              (int)*latest, (int)r->up.commit_it);
    sim_check(w, upload_is_whole(w, r->job, r->up.commit_it),
              "job %d: latest names iteration %d, which has no manifest", r->job,
              (int)r->up.commit_it);
    *latest = r->up.commit_it;
    w->bucket.jobs[r->job].etag++;
}

/* ---- answers ---- */

/* Something wrote to the file after it was saved: what is read is not what was noted. */
static int has_changed(struct world *w, int machine, int run, struct mb_plan_iteration *it)
{
    struct job_script *s = &w->scripts[upload_run_at(w, machine, run)->job];

    if (it->state != MB_PLAN_UPLOADING || sim_below(w, FILES_A_CHANGE) != 0)
        return 0;
    sim_trace(w, "FAULT: a file of iteration %d on machine %d changes", (int)it->iteration,
              machine);
    w->stats.faults++;
    s->harmed = s->harmed ? s->harmed : 1;
    upload_drop(w, machine, run, it, "a file changed after it was saved");
    return 1;
}

static void on_file(struct world *w, int machine, int run, int64_t iteration, int rank, int failed)
{
    struct agent_upload *u = &upload_run_at(w, machine, run)->up;
    struct mb_plan_iteration *it = mb_plan_find(u->plan, iteration);
    char path[16];
    struct mb_err err;

    u->sending--;
    snprintf(path, sizeof(path), "rank%d", rank);
    for (size_t i = 0; i < it->n_files; i++) {
        struct mb_plan_file *f = &it->files[i];
        if (strcmp(f->path, path) != 0)
            continue;
        if (failed == CONFLICT) {
            const struct run *r = upload_run_at(w, machine, run);

            mb_plan_file_back(f);
            mb_free(f->etag);
            f->etag = upload_etag_of(&upload_objects_of(w, r->job, iteration, it->place)[rank]);
            u->prepared = -1;
        } else if (failed) {
            mb_plan_file_again(f);
            if (failed == IS_AWAY && f->failures >= TRIES_MAX)
                f->failures = TRIES_MAX - 1;
            if (it->state == MB_PLAN_UPLOADING && f->failures >= TRIES_MAX)
                upload_drop(w, machine, run, it, path);
            else
                u->not_before_ms = w->now_ms + BACK_OFF_MS;
        } else if (!has_changed(w, machine, run, it)) {
            NOTE(w, machine, run, mb_journal_done(u->journal, iteration, path, f->crc64nvme, &err));
            mb_plan_file_done(f, f->crc64nvme);
        }
    }
}

static void on_part(struct world *w, int machine, int run, int64_t iteration, int failed)
{
    struct agent_upload *u = &upload_run_at(w, machine, run)->up;
    struct mb_plan_iteration *it = mb_plan_find(u->plan, iteration);
    struct mb_err err;

    u->part_busy = 0;
    if (failed == CONFLICT) {
        const struct run *r = upload_run_at(w, machine, run);

        upload_replace(&it->part_etag,
                       mb_strdup(w->bucket.jobs[r->job].parts[iteration][r->n_nodes][r->node]));
        u->prepared = -1;
        return;
    }
    if (failed || it->state != MB_PLAN_UPLOADING) {
        u->not_before_ms = w->now_ms + BACK_OFF_MS;
        return;
    }
    NOTE(w, machine, run, mb_journal_part(u->journal, iteration, &err));
    if (mb_plan_event(it, MB_PLAN_EV_PART_SENT, NULL, &err) != MB_OK)
        sim_fail(w, "%s", err.text);
}

static void on_commit_answer(struct world *w, int machine, int run, int op, int failed)
{
    if (is_cancelled(&upload_run_at(w, machine, run)->up))
        return;
    if (failed && failed != CONFLICT) {
        list_again(w, machine, run);
        return;
    }
    switch (op) {
    case OP_LIST:
        on_list(w, machine, run);
        break;
    case OP_PARTS:
        merge_and_put(w, machine, run);
        break;
    case OP_MANIFEST:
        if (failed)
            list_again(w, machine, run);
        else
            commit_step(w, machine, run, OP_GET_POINTER);
        break;
    case OP_GET_POINTER:
        on_pointer(w, machine, run);
        break;
    default:
        if (failed) /* somebody else moved it meanwhile */
            commit_step(w, machine, run, OP_GET_POINTER);
        else
            committed(w, machine, run);
        break;
    }
}

static void answered(struct world *w, int a, int b)
{
    int machine = a / MAX_RUNS, run = a % MAX_RUNS;
    int op = b >> 24, x = b >> 8 & 0xff, failed = b & 0xff;
    int64_t iteration = b >> 16 & 0xff;
    struct agent_upload *u = &upload_run_at(w, machine, run)->up;

    if (!upload_run_at(w, machine, run)->used || !u->plan)
        return;
    sim_crash_point(w);
    switch (op) {
    case OP_PREPARE:
        u->preparing = 0;
        if (failed)
            u->not_before_ms = w->now_ms + BACK_OFF_MS;
        else
            upload_on_prepared(w, machine, run, iteration);
        break;
    case OP_FILE:
        on_file(w, machine, run, iteration, x, failed);
        break;
    case OP_PART:
        on_part(w, machine, run, iteration, failed);
        break;
    default:
        on_commit_answer(w, machine, run, op, failed);
        break;
    }
    upload_tick(w, machine, run);
}

static void try_again(struct world *w, int a, int b)
{
    int machine = a / MAX_RUNS, run = a % MAX_RUNS, op = b >> 24;
    int64_t iteration = b >> 16 & 0xff;
    struct agent_upload *u = &upload_run_at(w, machine, run)->up;

    if (!upload_run_at(w, machine, run)->used || !u->plan)
        return;
    u->tries = b & 0xff;
    if (op == OP_FILE && w->now_ms - u->failing_since_ms[b >> 8 & 0xff] > PREPARED_MS)
        on_file(w, machine, run, iteration, b >> 8 & 0xff, IS_AWAY);
    else if (op == OP_FILE)
        put_file(w, machine, run, iteration, b >> 8 & 0xff);
    else if (op == OP_PREPARE)
        upload_request(w, machine, run, op, iteration, 0);
    else if (op == OP_PART)
        put_part(w, machine, run, mb_plan_find(u->plan, iteration));
    else if (op == OP_MANIFEST && !is_cancelled(u))
        merge_and_put(w, machine, run);
    else if (op == OP_PUT_POINTER)
        upload_put_pointer(w, machine, run);
    else if (op == OP_LIST || op == OP_PARTS || op == OP_GET_POINTER)
        if (!is_cancelled(u))
            commit_step(w, machine, run, op);
    u->tries = 0;
}

/* ---- the loop of work ---- */

static int is_prepared(struct world *w, int machine, int run, const struct mb_plan_iteration *it)
{
    struct agent_upload *u = &upload_run_at(w, machine, run)->up;

    if (it->iteration == u->prepared && w->now_ms - u->prepared_ms <= PREPARED_MS)
        return 1;
    if (!u->preparing)
        upload_request(w, machine, run, OP_PREPARE, it->iteration, 0);
    u->preparing = 1;
    return 0;
}

static int may_put_part(struct world *w, int machine, int run, const struct mb_plan_iteration *it)
{
    return (it->place && !it->part_etag) || is_prepared(w, machine, run, it);
}

static void start_transfers(struct world *w, int machine, int run)
{
    struct agent_upload *u = &upload_run_at(w, machine, run)->up;

    while (u->sending < 4) {
        struct mb_plan_iteration *it;
        struct mb_plan_file *f;
        struct mb_err err;

        if (!mb_plan_next(u->plan, &it, &f))
            return;
        if (!is_prepared(w, machine, run, it)) {
            mb_plan_file_back(f);
            return;
        }
        u->sending++;
        if (w->plant == PLANT_DONE_BEFORE_SENT)
            NOTE(w, machine, run,
                 mb_journal_done(u->journal, it->iteration, f->path, f->crc64nvme, &err));
        put_file(w, machine, run, it->iteration, f->path[4] - '0');
    }
}

static struct mb_plan_iteration *next_commit(const struct world *w, const struct agent_upload *u)
{
    struct mb_plan_iteration *next = NULL;

    for (size_t i = 0; i < mb_plan_count(u->plan); i++) {
        struct mb_plan_iteration *it = mb_plan_at(u->plan, i);

        if (it->state == MB_PLAN_PART && it->iteration != u->commit_it &&
            it->commit_at_ms <= w->now_ms && (!next || it->commit_at_ms < next->commit_at_ms))
            next = it;
    }
    return next;
}

static void put_aside(struct world *w, struct agent_upload *u)
{
    struct mb_plan_iteration *it = mb_plan_find(u->plan, u->commit_it);
    uint64_t wait_ms = it->commit_wait_ms * 2;

    it->commit_wait_ms = wait_ms == 0             ? ASIDE_MIN_MS
                         : wait_ms < ASIDE_MAX_MS ? wait_ms
                                                  : ASIDE_MAX_MS;
    it->commit_at_ms = w->now_ms + it->commit_wait_ms;
    w->stats.aside++;
}

/* As agent/upload/upload.c: one that only waits for other nodes makes room for the next. */
static void look_after_commits(struct world *w, struct agent_upload *u)
{
    struct mb_plan_iteration *next;

    if (u->commit_busy || (next = next_commit(w, u)) == NULL)
        return;
    if (u->commit_it >= 0 && u->commit_at_ms == 0) /* it is about to begin */
        return;
    if (u->commit_it >= 0)
        put_aside(w, u);
    u->commit_it = next->iteration;
    u->commit_at_ms = 0;
}

void upload_tick(struct world *w, int machine, int run)
{
    struct run *r = upload_run_at(w, machine, run);
    struct agent_upload *u = &r->up;

    if (!r->used || !u->plan)
        return;
    if (w->now_ms >= u->not_before_ms) {
        start_transfers(w, machine, run);
        for (size_t i = 0; i < mb_plan_count(u->plan); i++) {
            struct mb_plan_iteration *it = mb_plan_at(u->plan, i);
            if (!u->part_busy && mb_plan_files_done(it) && may_put_part(w, machine, run, it))
                put_part(w, machine, run, it);
        }
        look_after_commits(w, u);
    }
    if (u->commit_it >= 0 && !u->commit_busy && w->now_ms >= u->commit_at_ms)
        commit_step(w, machine, run, OP_LIST);
    if (u->was_busy && !mb_plan_is_busy(u->plan)) {
        u->was_busy = 0;
        gang_event(w, machine, run, MB_GANG_EV_UPLOADS_IDLE);
    }
}

void upload_saved(struct world *w, int machine, int run, int rank, int64_t iteration)
{
    struct run *r = upload_run_at(w, machine, run);
    char path[16];
    struct mb_upload_file file = {.path = path,
                                  .size_bytes = 1000 + (uint64_t)rank,
                                  .crc64nvme = sim_crc(r->job, iteration, rank, r->attempt),
                                  .has_crc = 1};
    struct mb_err err;

    snprintf(path, sizeof(path), "rank%d", rank);
    int rc = mb_plan_saved(r->up.plan, iteration, (uint32_t)rank, "/d", &file, 1, &err);
    if (rc == MB_EEXIST)
        return;
    sim_check(w, rc == MB_OK, "%s", err.text);
    r->up.was_busy = 1;
    if (w->plant != PLANT_SAVE_NOT_NOTED)
        NOTE(w, machine, run,
             mb_journal_saved(r->up.journal, iteration, (uint32_t)rank, "/d", &file, 1, &err));
    if (mb_plan_is_busy(r->up.plan))
        gang_event(w, machine, run, MB_GANG_EV_UPLOADS_BUSY);
}

void upload_no_more(struct world *w, int machine, int run)
{
    struct mb_plan *p = upload_run_at(w, machine, run)->up.plan;

    for (size_t i = 0; p && i < mb_plan_count(p); i++)
        if (mb_plan_at(p, i)->state == MB_PLAN_COLLECTING)
            upload_drop(w, machine, run, mb_plan_at(p, i), "a rank ended before it saved its part");
}

void upload_repeat(struct world *w, int machine, int run)
{
    struct mb_plan *p = upload_run_at(w, machine, run)->up.plan;

    for (size_t i = 0; p && i < mb_plan_count(p); i++) {
        struct mb_plan_iteration *it = mb_plan_at(p, i);
        if (it->state == MB_PLAN_COMMITTED || it->state == MB_PLAN_DROPPED)
            gang_tell(w, machine, run, M_UPLOAD, 0, it->iteration,
                      it->state == MB_PLAN_COMMITTED ? MB_OK : MB_EIO);
    }
}

void upload_open(struct world *w, int machine, int run)
{
    struct run *r = upload_run_at(w, machine, run);
    int *slot = &w->machines[machine].disk.journals[run];
    uint32_t ranks[MAX_PER_NODE];
    char path[40];
    struct mb_err err;

    if (r->up.plan)
        return;
    memset(&r->up, 0, sizeof(r->up));
    r->up.commit_it = r->up.prepared = -1;
    for (int i = 0; i < r->per_node; i++)
        ranks[i] = (uint32_t)(r->node * r->per_node + i);
    if (*slot == 0)
        *slot = memfd_create("journal", MFD_CLOEXEC) + 1;
    snprintf(path, sizeof(path), "/proc/self/fd/%d", *slot - 1);
    if (*slot == 0 || mb_plan_create(ranks, (size_t)r->per_node, &r->up.plan, &err) != MB_OK ||
        mb_journal_open(path, r->up.plan, &r->up.journal, &err) != MB_OK)
        sim_fail(w, "machine %d: %s", machine, err.text);
    r->up.was_busy = mb_plan_is_busy(r->up.plan);
    if (r->up.was_busy)
        gang_event(w, machine, run, MB_GANG_EV_UPLOADS_BUSY);
}

void upload_close(struct world *w, int machine, int run)
{
    struct agent_upload *u = &upload_run_at(w, machine, run)->up;

    mb_plan_destroy(u->plan);
    mb_journal_close(u->journal);
    mb_free(u->commit_etag);
    memset(u, 0, sizeof(*u));
}
