/*
 * The registry of attempts on this node and their common clock.
 *
 *  1. Adoption: every NODE_DIR/gangs/ directory whose gang.json is not ENDED becomes a run again,
 * in the state it was in; what cannot be read is named in the log and left alone.
 *  2. One timer of 50 ms drives log files, leases and waiting launches, only while runs exist.
 *  3. stop_all ends every attempt as if its driver had said Stop; when the last one is forgotten,
 *     on_all_ended.
 *  4. With every attempt that has ended, and after adoption, old directories go (gang_prune.h).
 *  5. Another timer looks for groups that are committed here and that no driver speaks for.
 *  6. A run is freed from the loop, never inside a call that may still use it.
 */
#include "agent/gangs.h"

#include <dirent.h>
#include <errno.h>
#include <string.h>
#include "agent/gang_prune.h"
#include "agent/gang_run.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"

enum { PENDING_MAX = 32 };

static void on_tick(uv_timer_t *t)
{
    struct mb_gangs *g = t->data;
    uint64_t now_ms = mb_mono_ms();
    int hold = 0;

    for (size_t i = g->n_runs; i-- > 0;)
        if (i < g->n_runs)
            mb_gang_run_tick(g->runs[i], now_ms);
    for (size_t i = 0; i < g->n_runs; i++)
        hold |= mb_gang_deadline_holds_logs(g->runs[i]);
    if (g->opts.logs != NULL)
        mb_log_keeper_hold(g->opts.logs, hold);
    if (g->n_runs == 0)
        uv_timer_stop(&g->tick);
}

static int has_gang(void *arg, const struct mb_pg_id *pg)
{
    const struct mb_gangs *g = arg;

    for (size_t i = 0; i < g->n_runs; i++)
        if (memcmp(&g->runs[i]->pg, pg, sizeof(*pg)) == 0)
            return 1;
    return 0;
}

static void on_orphan_timer(uv_timer_t *t)
{
    struct mb_gangs *g = t->data;
    struct mb_pg_id lost[MB_ORPHANS_MAX];
    const unsigned before = g->orphans.n_changes;
    size_t n = mb_orphans_look(&g->orphans, g->ledger, has_gang, g, mb_mono_ms(), lost);

    for (size_t i = 0; i < n; i++) {
        char hex[2 * MB_PG_ID_BYTES + 1];

        mb_warn("gang", "placement group %.8s: no driver came for it within %d s, giving it back",
                mb_hex(lost[i].bytes, sizeof(lost[i].bytes), hex), MB_ORPHAN_MS / 1000);
        g->ops->on_abandoned(g->arg, &lost[i], NULL);
    }
    if (g->orphans.n_changes != before)
        g->ops->on_changed(g->arg);
}

void mb_gangs_look_soon(struct mb_gangs *g)
{
    if (!g->stopping && uv_timer_get_due_in(&g->orphan_timer) > MB_GANG_UNDRIVEN_MS &&
        mb_orphans_new(&g->orphans, g->ledger, has_gang, g) > 0)
        uv_timer_start(&g->orphan_timer, on_orphan_timer, MB_GANG_UNDRIVEN_MS, MB_GANG_ORPHANS_MS);
}

int mb_gangs_is_undriven(const struct mb_gangs *g, const struct mb_pg_id *pg)
{
    return mb_orphans_has(&g->orphans, pg) && !has_gang((void *)(uintptr_t)g, pg);
}

int mb_gangs_create(uv_loop_t *loop, struct mb_ledger *ledger, struct mb_init *init,
                    const struct mb_gangs_opts *opts, const struct mb_gangs_ops *ops, void *arg,
                    struct mb_gangs **out, struct mb_err *err)
{
    struct mb_gangs *g = mb_calloc(1, sizeof(*g));

    if (g != NULL)
        g->scratch = mb_alloc(MB_REPORT_FRAME_MAX + 4);
    if (g == NULL || g->scratch == NULL) {
        mb_free(g);
        return mb_err_set(err, MB_ENOMEM, "no memory for the gangs");
    }
    g->loop = loop;
    g->ledger = ledger;
    g->init = init;
    g->opts = *opts;
    g->ops = ops;
    g->arg = arg;
    g->start_ms = mb_mono_ms();
    uv_timer_init(loop, &g->tick);
    uv_timer_init(loop, &g->orphan_timer);
    g->tick.data = g->orphan_timer.data = g;
    uv_timer_start(&g->orphan_timer, on_orphan_timer, MB_GANG_ORPHANS_MS, MB_GANG_ORPHANS_MS);
    *out = g;
    return MB_OK;
}

int mb_gangs_serve(struct mb_gangs *g, struct mb_grpc_server *srv, const uint8_t *node_id,
                   struct mb_err *err)
{
    g->node_id = node_id;
    return mb_control_add(g, srv, err);
}

struct mb_gang_run *mb_gangs_find(struct mb_gangs *g, const struct mb_pg_id *pg, uint32_t attempt)
{
    for (size_t i = 0; i < g->n_runs; i++)
        if (g->runs[i]->attempt == attempt && !g->runs[i]->is_closing &&
            memcmp(&g->runs[i]->pg, pg, sizeof(*pg)) == 0)
            return g->runs[i];
    return NULL;
}

struct mb_gang_run *mb_gangs_older_with_processes(struct mb_gangs *g, const struct mb_gang_run *r)
{
    for (size_t i = 0; i < g->n_runs; i++)
        if (g->runs[i]->attempt < r->attempt && mb_gang_has_processes(&g->runs[i]->fsm) &&
            memcmp(&g->runs[i]->gang, &r->gang, sizeof(r->gang)) == 0)
            return g->runs[i];
    return NULL;
}

static void free_run(struct mb_gang_run *r)
{
    for (size_t i = 0; i < r->n_ranks; i++) {
        mb_free(r->ranks[i].cause);
        mb_free(r->ranks[i].endpoint);
    }
    if (r->launch != NULL)
        mobula__v1__launch__free_unpacked(r->launch, NULL);
    mb_free(r->ranks);
    mb_free(r->job_id);
    mb_free(r->dir);
    mb_free(r->checkpoint_dir);
    mb_free(r->url);
    mb_free(r->load_url);
    mb_free(r->failure);
    mb_free(r);
}

struct mb_gang_run *mb_gangs_new_run(struct mb_gangs *g, const struct mb_pg_id *pg,
                                     const struct mb_pg_id *gang, uint32_t attempt,
                                     const char *job_id, struct mb_err *err)
{
    struct mb_gang_run *r;

    if (g->n_runs == MB_GANGS_MAX) {
        mb_err_set(err, MB_EFULL, "this node knows %d gangs already", MB_GANGS_MAX);
        return NULL;
    }
    r = mb_calloc(1, sizeof(*r));
    if (r == NULL)
        goto nomem;
    r->owner = g;
    mb_gang_init(&r->fsm);
    r->pg = *pg;
    r->gang = *gang;
    mb_hex(pg->bytes, sizeof(pg->bytes), r->pg_hex);
    r->attempt = attempt;
    r->loaded_iteration = -1;
    r->first_failed_rank = -1;
    mb_gang_deadline_init(&r->deadline);
    r->job_id = mb_strdup(job_id);
    r->dir = mb_asprintf("%s/gangs/%.8s-%u", g->opts.node_dir, r->pg_hex, attempt);
    if (r->job_id == NULL || r->dir == NULL) {
        free_run(r);
        goto nomem;
    }
    if (mb_fs_mkdir_p(r->dir, 0755, err) != MB_OK) {
        free_run(r);
        return NULL;
    }
    g->runs[g->n_runs++] = r;
    if (!uv_is_active((uv_handle_t *)&g->tick))
        uv_timer_start(&g->tick, on_tick, MB_GANG_TICK_MS, MB_GANG_TICK_MS);
    return r;
nomem:
    mb_err_set(err, MB_ENOMEM, "no memory for a gang");
    return NULL;
}

static void maybe_closed(struct mb_gangs *g)
{
    void (*cb)(void *) = g->close_cb;
    void *arg = g->close_arg;

    if (cb == NULL || g->n_runs > 0 || g->timers_closed < 2)
        return;
    g->close_cb = NULL;
    cb(arg);
}

void mb_gangs_note_lost(struct mb_gang_run *r, const char *text)
{
    struct mb_gangs *g = r->owner;
    char *line = g->n_lost < MB_GANGS_LOST_MAX ? mb_asprintf("job %s: %s", r->job_id, text) : NULL;

    for (size_t i = 0; line != NULL && i < g->n_lost; i++)
        if (strcmp(g->lost[i], line) == 0) {
            mb_free(line);
            return;
        }
    if (line != NULL)
        g->lost[g->n_lost++] = line;
}

static void forget_lost(struct mb_gangs *g)
{
    while (g->n_lost > 0)
        mb_free(g->lost[--g->n_lost]);
}

size_t mb_gangs_lost(const struct mb_gangs *g, const char *const **texts)
{
    *texts = (const char *const *)g->lost;
    return g->n_lost;
}

void mb_gangs_destroy(struct mb_gangs *g)
{
    if (g == NULL)
        return;
    forget_lost(g);
    mb_free(g->scratch);
    mb_free(g);
}

static void prune(const struct mb_gang_run *r)
{
    char *root = mb_path_join(r->owner->opts.node_dir, "gangs");

    mb_gang_prune_ended(r->dir);
    if (root != NULL)
        mb_gang_prune(root, (int64_t)(mb_unix_ms() / 1000));
    mb_free(root);
}

void mb_gangs_run_closed(struct mb_gang_run *r)
{
    struct mb_gangs *g = r->owner;
    size_t at = 0;

    while (g->runs[at] != r)
        at++;
    memmove(&g->runs[at], &g->runs[at + 1], (g->n_runs - at - 1) * sizeof(g->runs[0]));
    g->n_runs--;
    if (r->fsm.state == MB_GANG_ENDED)
        prune(r);
    free_run(r);
    if (g->stopping && g->n_runs == 0 && g->close_cb == NULL)
        g->ops->on_all_ended(g->arg);
    maybe_closed(g);
}

int mb_gangs_are_left(const char *node_dir)
{
    char *root = mb_path_join(node_dir, "gangs");
    DIR *dir = root != NULL ? opendir(root) : NULL;
    const struct dirent *e;
    int yes = root == NULL;

    while (dir != NULL && !yes && (e = readdir(dir)) != NULL) {
        char *path = e->d_name[0] != '.' ? mb_path_join(root, e->d_name) : NULL;
        int64_t ended_s;

        yes = path != NULL && !mb_gang_dir_has_ended(path, &ended_s);
        mb_free(path);
    }
    if (dir != NULL)
        closedir(dir);
    mb_free(root);
    return yes;
}

void mb_gangs_adopt(struct mb_gangs *g)
{
    char *root = mb_path_join(g->opts.node_dir, "gangs");
    DIR *dir = root != NULL ? opendir(root) : NULL;
    struct dirent *e;

    while (dir != NULL && (e = readdir(dir)) != NULL) {
        struct mb_err err = {0};
        struct mb_gang_run *r;
        char *path;

        if (e->d_name[0] == '.')
            continue;
        path = mb_path_join(root, e->d_name);
        r = path != NULL ? mb_gang_store_load(g, path, &err) : NULL;
        if (r != NULL)
            mb_gang_run_adopt(r);
        else if (err.code != MB_OK && err.code != MB_ENOENT)
            mb_error("gang", "%s is not adopted: %s", path, err.text);
        mb_free(path);
    }
    if (dir != NULL)
        closedir(dir);
    if (root != NULL)
        mb_gang_prune(root, (int64_t)(mb_unix_ms() / 1000));
    mb_free(root);
}

void mb_gangs_bundles_removed(struct mb_gangs *g, const struct mb_pg_id *pg)
{
    for (size_t i = g->n_runs; i-- > 0;) {
        struct mb_gang_run *r = g->runs[i];

        if (!r->is_closing && r->fsm.state != MB_GANG_ENDED && !r->fsm.released &&
            memcmp(&r->pg, pg, sizeof(*pg)) == 0)
            mb_gang_run_event(r, MB_GANG_EV_BUNDLES_REMOVED, NULL);
    }
}

/* All that has not ended, also what ends already: this deadline may be the earlier one. */
static void leave_all(struct mb_gangs *g, enum mb_deadline_source source, uint64_t unix_ms,
                      const char *why)
{
    for (size_t i = g->n_runs; i-- > 0;)
        if (!g->runs[i]->is_closing && g->runs[i]->fsm.state != MB_GANG_ENDED)
            mb_gang_deadline_leave(g->runs[i], source, unix_ms, why);
}

void mb_gangs_stop_all(struct mb_gangs *g, enum mb_deadline_source source, uint64_t unix_ms,
                       const char *why)
{
    int again = g->stopping;

    g->stopping = 1;
    for (size_t i = g->n_runs; i-- > 0;)
        if (g->runs[i]->fsm.state == MB_GANG_ENDED && !g->runs[i]->is_closing)
            mb_gang_run_stop_ended(g->runs[i], unix_ms);
    leave_all(g, source, unix_ms, why);
    if (g->n_runs == 0 && !again)
        g->ops->on_all_ended(g->arg);
}

void mb_gangs_drain(struct mb_gangs *g, enum mb_deadline_source source, uint64_t unix_ms,
                    const char *why)
{
    if (!g->is_drained)
        forget_lost(g);
    g->is_drained = 1;
    leave_all(g, source, unix_ms, why);
}

void mb_gangs_deadline(struct mb_gangs *g, enum mb_deadline_source source, uint64_t unix_ms)
{
    g->deadline_source = source;
    g->deadline_unix_ms = unix_ms;
    for (size_t i = g->n_runs; i-- > 0;)
        if (!g->runs[i]->is_closing)
            mb_gang_deadline_add(g->runs[i], source, unix_ms);
}

void mb_gangs_forget_jobs(struct mb_gangs *g)
{
    for (size_t i = 0; i < g->n_runs; i++) {
        g->runs[i]->has_own_job = 0;
        mb_gang_store_save(g->runs[i]);
    }
}

void mb_gangs_cut_off(struct mb_gangs *g, int is_cut_off)
{
    g->is_cut_off = is_cut_off;
    for (size_t i = 0; !is_cut_off && i < g->n_runs; i++)
        mb_gang_cut_is_over(&g->runs[i]->fsm, mb_mono_ms());
}

static void on_timer_closed(uv_handle_t *h)
{
    struct mb_gangs *g = h->data;

    g->timers_closed++;
    maybe_closed(g);
}

void mb_gangs_keep_logs(struct mb_gangs *g)
{
    for (size_t i = 0; i < g->n_runs; i++)
        mb_gang_logs_stay(g->runs[i]);
}

void mb_gangs_close(struct mb_gangs *g, void (*cb)(void *arg), void *arg)
{
    g->stopping = 1;
    g->close_cb = cb;
    g->close_arg = arg;
    for (size_t i = g->n_runs; i-- > 0;) {
        mb_control_unbind(g->runs[i]);
        mb_gang_run_close(g->runs[i]);
    }
    uv_close((uv_handle_t *)&g->tick, on_timer_closed);
    uv_close((uv_handle_t *)&g->orphan_timer, on_timer_closed);
}

size_t mb_gangs_count(const struct mb_gangs *g)
{
    return g->n_runs;
}

void mb_gangs_info(const struct mb_gangs *g, size_t i, struct mb_gang_info *out)
{
    const struct mb_gang_run *r = g->runs[i];
    struct mb_upload_status pending[PENDING_MAX];
    size_t n;

    *out = (struct mb_gang_info){.pg = &r->pg,
                                 .attempt = r->attempt,
                                 .job_id = r->job_id,
                                 .state = r->fsm.state,
                                 .ranks = (unsigned)r->n_ranks,
                                 .iteration = -1,
                                 .saved = r->deadline.saved,
                                 .durable = r->deadline.durable,
                                 .rate_bytes_per_s = mb_rate_bytes_per_s(&r->deadline.rate),
                                 .save_ms = r->deadline.save.ms,
                                 .n_saves = r->deadline.n_saves,
                                 .stall_ms = r->deadline.stall_ms,
                                 .deadline = r->deadline.until};
    out->parts = r->deadline.parts;
    out->retries = r->deadline.retries;
    n = mb_gang_deadline_pending(r, pending, PENDING_MAX);
    for (size_t k = 0; k < n; k++) {
        out->pending_done_bytes += pending[k].done_bytes;
        out->pending_total_bytes += pending[k].total_bytes;
    }
    for (size_t k = 0; k < r->n_ranks; k++) {
        if (r->ranks[k].pid != 0 && !r->ranks[k].exited)
            out->ranks_running++;
        if (r->ranks[k].progress.iteration > out->iteration)
            out->iteration = r->ranks[k].progress.iteration;
    }
}

uint64_t mb_gangs_sent_bytes(const struct mb_gangs *g)
{
    uint64_t sum = g->sent_bytes_before;

    for (size_t i = 0; i < g->n_runs; i++)
        if (g->runs[i]->upload != NULL)
            sum += mb_upload_sent_bytes(g->runs[i]->upload);
    return sum;
}

unsigned mb_gangs_rank_failures(const struct mb_gangs *g)
{
    return g->rank_failures;
}
