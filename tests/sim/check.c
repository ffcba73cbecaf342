/*
 * What must hold after every event, and what must hold when everything has come to rest.
 */
#include <string.h>
#include "tests/sim/sim.h"

enum {
    SILENT_MAX_MS = MB_HEALTH_BOUND_MS + 1000,
    LATE_MS = 1000 /* ticks of agents and supervisors, and a SIGTERM on its way */
};

/* One process a device. */
static void check_devices(struct world *w)
{
    int owner[MAX_MACHINES][16];

    memset(owner, 0xff, sizeof(owner));
    for (int m = 0; m < w->n_machines; m++)
        for (int run = 0; run < MAX_RUNS; run++) {
            const struct supervisor *s = &w->machines[m].disk.sups[run];
            for (int i = 0; s->running && i < s->n_ranks; i++) {
                const struct rank *k = &s->ranks[i];
                int job = run / MAX_ATTEMPTS;
                if (!k->alive)
                    continue;
                sim_check(w, k->device >= 0, "job %d: rank %d runs without a device", job, k->rank);
                sim_check(w, owner[m][k->device] < 0,
                          "machine %d: device %d is used by jobs %d and %d", m, k->device,
                          owner[m][k->device], job);
                owner[m][k->device] = job;
            }
        }
}

/* ---- the line of jobs: first come, first served, with overtaking that delays nobody ---- */

static int has_driver(const struct world *w, int job)
{
    return w->drivers[job].preparing || w->drivers[job].alive;
}

static int may_fit(const struct world *w, int job)
{
    return w->scripts[job].cpus <= w->head_cpus;
}

/* It takes nothing that a job before it lacks: of what is free, each of those has set aside as much
 * of its need as there is, and one of them a place among the running. */
void check_turn(struct world *w, int job)
{
    const struct record *mine = &w->store.disk[T_JOB][job];
    int left = w->head_cpus, places = w->max_running, has_waiting = 0;

    sim_check(w, mine->present, "job %d is started before its record is on the disk", job);
    for (int i = 0; i < w->n_jobs; i++) {
        left -= has_driver(w, i) ? w->scripts[i].cpus : 0;
        places -= has_driver(w, i);
    }
    for (int i = 0; i < w->n_jobs; i++) {
        const struct record *r = &w->store.disk[T_JOB][i];
        /* One that was started and has ended waits for nothing, though a head that died before
         * that was on the disk finds it PENDING, until it hears of the end. */
        if (!r->present || r->value >= mine->value || w->drivers[i].preparing ||
            w->drivers[i].exists || !may_fit(w, i) || w->head.jobs[i].state != MB_JOB_PENDING)
            continue;
        left -= w->scripts[i].cpus < left ? w->scripts[i].cpus : left;
        has_waiting = 1;
    }
    sim_check(w, w->scripts[job].cpus <= left && places - has_waiting > 0,
              "job %d is started with %d CPUs and %d places left, before jobs that came earlier",
              job, left, places - has_waiting);
}

static void check_line(struct world *w)
{
    int cpus = 0, n = 0;

    for (int i = 0; i < w->n_jobs; i++) {
        cpus += w->drivers[i].alive ? w->scripts[i].cpus : 0;
        n += w->drivers[i].alive;
    }
    sim_check(w, cpus <= w->head_cpus && n <= w->max_running,
              "%d drivers run with %d CPUs, there may be %d with %d", n, cpus, w->max_running,
              w->head_cpus);
}

/* ---- none runs twice at once; README.md says what is promised ---- */

/* A rank of an attempt is one process, once and anywhere. */
void check_rank_starts(struct world *w, int machine, int run, int rank)
{
    int job = run / MAX_ATTEMPTS, attempt = run % MAX_ATTEMPTS;

    sim_check(w, w->starts[job][attempt][rank]++ == 0,
              "job %d attempt %d: rank %d is started a second time, on machine %d", job,
              attempt + 1, rank, machine);
}

static int has_processes(const struct supervisor *s)
{
    for (int i = 0; s->running && i < s->n_ranks; i++)
        if (s->ranks[i].alive)
            return 1;
    return 0;
}

/* Attempts of a job follow each other: on one machine without exception, on two unless the driver
 * could not reach the older one's. */
static void check_attempts(struct world *w, int job)
{
    int on[MAX_MACHINES] = {0}, newest = 0; /* attempts, from 1 */

    for (int m = 0; m < w->n_machines; m++)
        for (int i = 0; i < MAX_ATTEMPTS; i++) {
            if (!has_processes(&w->machines[m].disk.sups[job * MAX_ATTEMPTS + i]))
                continue;
            sim_check(w, on[m] == 0, "job %d: attempts %d and %d run at once on machine %d", job,
                      on[m], i + 1, m);
            on[m] = i + 1;
            newest = newest > i + 1 ? newest : i + 1;
        }
    for (int m = 0; m < w->n_machines; m++)
        sim_check(w,
                  on[m] == 0 || on[m] == newest || w->given_up[m][job * MAX_ATTEMPTS + on[m] - 1],
                  "job %d: attempt %d runs, and attempt %d still does on machine %d", job, newest,
                  on[m], m);
}

/* Ranks whose driver is not heard end when the lease has run out, as long as their agent lives:
 * so does what is left of an attempt where it could not be reached. */
static void check_leases(struct world *w)
{
    for (int m = 0; m < w->n_machines; m++) {
        if (!w->machines[m].agent.up)
            continue;
        for (int run = 0; run < MAX_RUNS; run++) {
            uint64_t heard = w->heard_ms[m][run], boot = w->machines[m].boot_ms;
            uint64_t since = heard > boot ? heard : boot;

            sim_check(w,
                      !w->machines[m].disk.sups[run].running ||
                          w->now_ms <= since + LEASE_MS + GRACE_MS + LATE_MS,
                      "job %d: its driver is not heard for %d ms, ranks still run on machine %d",
                      run / MAX_ATTEMPTS, (int)(w->now_ms - since), m);
        }
    }
}

/* A node that answers nobody is dead in the head's books in time. */
static void check_silent(struct world *w)
{
    for (int m = 1; m < w->n_machines; m++) {
        int is_silent =
            w->head.placement && (!w->procs[sim_agent_proc(m)].up || sim_is_cut(w, 0, m));
        uint64_t *since = &w->silent_since_ms[m];

        if (!is_silent)
            *since = 0;
        else if (*since == 0)
            *since = w->now_ms;
        for (int id = 0; *since && w->now_ms > *since + SILENT_MAX_MS && id < w->next_id; id++)
            sim_check(w, !w->head.nodes[id].alive || w->head.nodes[id].machine != m,
                      "machine %d answers nobody for %d ms, and its node is alive", m,
                      (int)(w->now_ms - *since));
    }
}

/* Who saw it dead has given up what ran there, so a dead id is dead for good. */
static void check_dead(struct world *w)
{
    for (int id = 0; id < w->next_id; id++) {
        const struct record *r = &w->store.disk[T_NODE][id];

        w->id_was_dead[id] |= r->present && r->state == 1;
        sim_check(w, !w->id_was_dead[id] || r->state == 1,
                  "node id %d of machine %d was dead, and is alive again", id, w->id_machine[id]);
    }
}

static void check_books(struct world *w)
{
    struct mb_err err;

    if (w->head.placement && mb_placement_check(w->head.placement, &err) != MB_OK)
        sim_fail(w, "placement: %s", err.text);
    for (int m = 0; m < w->n_machines; m++) {
        const struct mb_ledger *l = w->machines[m].agent.ledger;
        const char *broken = l ? mb_ledger_invariant(l) : NULL;
        sim_check(w, !broken, "machine %d: %s", m, broken);
    }
}

/* What was acknowledged is on the disk, whatever happens next. */
static void check_acks(struct world *w)
{
    const struct store *s = &w->store;

    for (int i = 0; i < w->n_jobs; i++) {
        const struct client_job *c = &w->client.jobs[i];
        sim_check(w, !c->acked || s->disk[T_JOB][i].present,
                  "job %d was acknowledged and is not on the disk", i);
        sim_check(w,
                  c->seen < 0 || !mb_job_is_terminal((enum mb_job_state)c->seen) ||
                      s->disk[T_JOB][i].state == c->seen,
                  "job %d was shown as %s, which is not on the disk", i,
                  mb_job_state_name((enum mb_job_state)c->seen));
    }
    for (int k = 0; k < 3; k++)
        sim_check(w, s->disk[T_KV][k].value >= w->client.kv_acked[k],
                  "key %d: value %d was acknowledged, the disk has %d", k, w->client.kv_acked[k],
                  s->disk[T_KV][k].value);
}

/* What a driver hears of its group a head that crashes now still knows. */
void check_told(struct world *w, int group, const int *nodes)
{
    const struct record *r = &w->store.disk[T_GROUP][group];
    int same = r->present && r->state == (int)MB_PG_CREATED;

    for (int i = 0; i < w->group_nodes[group]; i++)
        same &= r->nodes[i] == nodes[i];
    sim_check(w, same, "job %d hears of a group that is not on the disk", group / MAX_GROUPS);
}

/* What goes when a job has ended is given up for an end that a head which crashes now still knows.
 */
void check_ended(struct world *w, int job)
{
    const struct record *r = &w->store.disk[T_JOB][job];

    sim_check(w, r->present && mb_job_is_terminal((enum mb_job_state)r->state),
              "job %d counts as ended, and its end is not on the disk", job);
}

/* ---- SUCCEEDED implies durable ---- */

static int has_saved(const struct rank *k, int64_t iteration)
{
    for (int i = 0; i < k->n_reports; i++)
        if (k->reports[i].kind == M_SAVED && k->reports[i].iteration == iteration)
            return 1;
    return 0;
}

/* Every rank of the attempt has its part of the iteration on its disk and said so. */
static int is_sealed(const struct world *w, int job, int attempt, int64_t iteration)
{
    int n_ranks = w->group_nodes[w->drivers[job].group_of[attempt]] * w->scripts[job].per_node;
    int n_saved = 0;

    for (int m = 0; m < w->n_machines; m++) {
        const struct supervisor *s = &w->machines[m].disk.sups[job * MAX_ATTEMPTS + attempt];
        for (int i = 0; i < s->n_ranks; i++)
            n_saved += has_saved(&s->ranks[i], iteration);
    }
    return n_saved > 0 && n_saved == n_ranks;
}

/* The attempt that ends well loses nothing. What an older one sealed may be lost if that is on
 * record: a journal says dropped, or the driver gave up a node with its part. The attempts after it
 * went on from what was durable, so nobody lacks it: latest names the last iteration. */
static int is_given_up(const struct world *w, int job, int attempt, int64_t iteration)
{
    int yes = (int)(w->dropped[job][attempt] >> iteration & 1);

    for (int m = 0; m < w->n_machines; m++)
        yes |= w->given_up[m][job * MAX_ATTEMPTS + attempt];
    return yes && attempt + 1 < (int)w->drivers[job].attempt;
}

static void check_iteration(struct world *w, int job, int64_t iteration, struct stats *to)
{
    int is_durable = upload_is_whole(w, job, iteration);

    for (int i = 0; i < (int)w->drivers[job].attempt; i++) {
        if (!is_sealed(w, job, i, iteration))
            continue;
        sim_check(w, is_durable || is_given_up(w, job, i, iteration),
                  "job %d SUCCEEDED, and iteration %d that attempt %d saved is not durable", job,
                  (int)iteration, i + 1);
        to->sealed += (uint64_t)is_durable;
        to->lost_saves += (uint64_t)!is_durable;
    }
}

static void check_saves(struct world *w, int job, struct stats *to)
{
    int n_saves = w->scripts[job].n_saves;

    for (int it = 1; it <= n_saves; it++)
        check_iteration(w, job, it, to);
    sim_check(w, n_saves == 0 || upload_is_whole(w, job, n_saves),
              "job %d SUCCEEDED, and its last iteration %d is not durable", job, n_saves);
    sim_check(w, n_saves == 0 || w->bucket.jobs[job].latest == n_saves,
              "job %d SUCCEEDED, and latest is %d instead of %d", job,
              (int)w->bucket.jobs[job].latest, n_saves);
}

/* From here on nobody waits for an upload. */
void check_success(struct world *w, int job)
{
    struct stats unused = {0};

    check_saves(w, job, &unused);
}

/* Whatever the head made of the driver's end. */
static void check_successes(struct world *w)
{
    for (int job = 0; job < w->n_jobs; job++) {
        if (w->has_succeeded[job] || w->store.disk[T_JOB][job].state != (int)MB_JOB_SUCCEEDED)
            continue;
        w->has_succeeded[job] = 1;
        check_saves(w, job, &w->stats);
    }
}

void check_always(struct world *w)
{
    check_devices(w);
    check_line(w);
    for (int job = 0; job < w->n_jobs; job++)
        check_attempts(w, job);
    check_leases(w);
    check_books(w);
    check_silent(w);
    check_dead(w);
    check_acks(w);
    check_successes(w);
}

static void check_job_end(struct world *w, int job)
{
    const struct job_script *s = &w->scripts[job];
    const struct client_job *c = &w->client.jobs[job];
    enum mb_job_state end = (enum mb_job_state)w->store.disk[T_JOB][job].state;

    sim_check(w, c->acked, "job %d could not be submitted", job);
    sim_check(w, mb_job_is_terminal(end), "job %d never ends: it is %s", job,
              mb_job_state_name(end));
    sim_check(w, c->seen == (int)end, "job %d: the client was never told of its end", job);
    sim_check(w, c->closed, "job %d: its log is never closed", job);
    sim_check(w, !w->drivers[job].alive, "job %d is over and its driver runs", job);
    sim_check(w, !c->stop_acked || end != MB_JOB_SUCCEEDED || s->harmed == 2,
              "job %d was stopped, and SUCCEEDED", job);
    sim_check(w, may_fit(w, job) || end != MB_JOB_SUCCEEDED, "job %d never fits, and SUCCEEDED",
              job);
    sim_check(w, s->harmed || end == MB_JOB_SUCCEEDED,
              "job %d is %s, and nothing had happened to it", job, mb_job_state_name(end));
    w->stats.succeeded += end == MB_JOB_SUCCEEDED;
    w->stats.failed += end == MB_JOB_FAILED;
    w->stats.stopped += end == MB_JOB_STOPPED;
}

void check_end(struct world *w)
{
    check_always(w);
    for (int job = 0; job < w->n_jobs; job++)
        check_job_end(w, job);
    for (int m = 0; m < w->n_machines; m++) {
        const struct agent *a = &w->machines[m].agent;
        sim_check(w, a->up && a->registered == 1, "machine %d never came back", m);
        if (mb_ledger_count(a->ledger) > 0) {
            const struct mb_bundle *b = mb_ledger_at(a->ledger, 0);
            sim_fail(w, "machine %d: bundle %d of job %d leaked (%s)", m, b->index,
                     (b->pg.bytes[0] - 1) / MAX_GROUPS, mb_bundle_state_name(b->state));
        }
        for (int run = 0; run < MAX_RUNS; run++)
            sim_check(w, !w->machines[m].disk.sups[run].running,
                      "machine %d: ranks of job %d are left", m, run / MAX_ATTEMPTS);
    }
    while (mb_placement_count(w->head.placement) > 0) {
        const struct mb_gcs_pg *pg = mb_placement_at(w->head.placement, 0, NULL);
        uint8_t id[MB_PG_ID_BYTES];
        memcpy(id, pg->id, sizeof(id));
        sim_check(w, pg->state == MB_PG_REMOVED, "the group of job %d is left (state %d)",
                  (pg->id[0] - 1) / MAX_GROUPS, (int)pg->state);
        sim_check(w, mb_placement_forget(w->head.placement, id),
                  "the group of job %d still waits for its bundles", (id[0] - 1) / MAX_GROUPS);
    }
}
