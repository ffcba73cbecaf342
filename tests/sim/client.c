/*
 * Users: they submit, ask, stop, follow logs by offset and write keys; every request is repeated
 * until it is answered. What they were told once is what check.c holds the cluster to.
 */
#include <string.h>
#include "tests/sim/sim.h"

enum { AGAIN_MS = 300, WATCH_MS = 400, FOLLOW_MS = 150, KEY_MS = 900 };

static void ask(struct world *w, enum msg_kind kind, int job, uint64_t offset)
{
    struct msg m = {
        .kind = kind, .from = PROC_CLIENT, .to = sim_agent_proc(0), .job = job, .offset = offset};

    sim_call(w, &m, 2000);
}

static void submit(struct world *w, int job, int unused)
{
    (void)unused;
    ask(w, M_SUBMIT, job, 0);
}

static void stop(struct world *w, int job, int unused)
{
    (void)unused;
    ask(w, M_STOP, job, 0);
}

static void watch(struct world *w, int job, int unused)
{
    (void)unused;
    ask(w, M_STATUS, job, 0);
}

static void follow(struct world *w, int job, int unused)
{
    (void)unused;
    ask(w, M_LOGS, job, w->client.jobs[job].offset);
}

static void put_key(struct world *w, int key, int unused)
{
    struct msg m = {.kind = M_PUT,
                    .from = PROC_CLIENT,
                    .to = sim_agent_proc(0),
                    .list = {key},
                    .code = w->client.kv_sent[key]};

    (void)unused;
    sim_call(w, &m, 2000);
}

static void new_value(struct world *w, int key, int unused)
{
    w->client.kv_sent[key]++;
    put_key(w, key, unused);
}

static void on_status(struct world *w, int job, const struct msg *r)
{
    struct client_job *c = &w->client.jobs[job];

    sim_check(w, r->flag, "job %d was acknowledged and is not known any more", job);
    sim_check(
        w, c->seen < 0 || !mb_job_is_terminal((enum mb_job_state)c->seen) || c->seen == r->code,
        "job %d was shown as %s and now as %s", job, mb_job_state_name((enum mb_job_state)c->seen),
        mb_job_state_name((enum mb_job_state)r->code));
    sim_check(w, c->seen != MB_JOB_RUNNING || r->code != MB_JOB_PENDING,
              "job %d was shown as RUNNING and now as PENDING", job);
    if (c->seen != r->code)
        sim_trace(w, "client: job %d is %s", job, mb_job_state_name((enum mb_job_state)r->code));
    c->seen = r->code;
    if (!mb_job_is_terminal((enum mb_job_state)r->code) || w->faults_on)
        sim_at(w, PROC_CLIENT, WATCH_MS, watch, job, 0);
}

static void on_logs(struct world *w, int job, const struct msg *r)
{
    struct client_job *c = &w->client.jobs[job];

    sim_check(w, r->offset == c->offset, "job %d: the log goes on at %d instead of %d", job,
              (int)r->offset, (int)c->offset);
    c->offset += r->n;
    if (!r->flag) {
        sim_at(w, PROC_CLIENT, r->n > 0 ? 5 : FOLLOW_MS, follow, job, 0);
        return;
    }
    c->closed = 1;
    const struct record *disk = &w->store.disk[T_JOB][job];
    sim_check(w, disk->present && mb_job_is_terminal((enum mb_job_state)disk->state),
              "job %d: its log was closed before a committed end", job);
    sim_check(w, c->offset == w->drivers[job].log_bytes,
              "job %d: its log was closed at %d of %d bytes", job, (int)c->offset,
              (int)w->drivers[job].log_bytes);
    sim_check(w, !w->drivers[job].alive, "job %d: its log was closed, and its driver runs", job);
}

static void again(struct world *w, const struct msg *q)
{
    sim_fn fn = q->kind == M_SUBMIT   ? submit
                : q->kind == M_STOP   ? stop
                : q->kind == M_STATUS ? watch
                : q->kind == M_LOGS   ? follow
                                      : put_key;

    sim_at(w, PROC_CLIENT, AGAIN_MS, fn, q->kind == M_PUT ? q->list[0] : q->job, 0);
}

void client_reply_came(struct world *w, const struct msg *q, const struct msg *r)
{
    struct client_job *c = &w->client.jobs[q->job];

    if (!r) {
        again(w, q);
        return;
    }
    switch (q->kind) {
    case M_SUBMIT: /* MB_EEXIST: the answer to an earlier try was lost */
        c->acked = 1;
        sim_trace(w, "client: job %d is accepted", q->job);
        sim_at(w, PROC_CLIENT, 1, watch, q->job, 0);
        sim_at(w, PROC_CLIENT, 1, follow, q->job, 0);
        if (w->scripts[q->job].stop_at_ms > 0)
            sim_at(w, PROC_CLIENT, w->scripts[q->job].stop_at_ms, stop, q->job, 0);
        break;
    case M_STOP:
        c->stop_acked |= r->flag;
        break;
    case M_STATUS:
        on_status(w, q->job, r);
        break;
    case M_LOGS:
        on_logs(w, q->job, r);
        break;
    default:
        if (w->client.kv_acked[q->list[0]] < q->code)
            w->client.kv_acked[q->list[0]] = q->code;
        if (w->faults_on)
            sim_at(w, PROC_CLIENT, KEY_MS, new_value, q->list[0], 0);
        break;
    }
}

void client_submits(struct world *w, int job)
{
    w->client.jobs[job].seen = -1;
    sim_at(w, PROC_CLIENT, w->scripts[job].submit_at_ms, submit, job, 0);
}

void client_start(struct world *w)
{
    sim_start_proc(w, PROC_CLIENT);
    for (int i = 0; i < w->n_jobs; i++)
        client_submits(w, i);
    for (int k = 0; k < 3; k++)
        sim_at(w, PROC_CLIENT, 100 + (uint64_t)k * 300, new_value, k, 0);
}
