/*
 * Jobs in line: the shell around job_queue.h.
 *
 *  1. add: what the entrypoint asks for is read from the job's record, and the job is last in line.
 *  2. pump, after whatever may have changed something (a commit, a start, an end, the tick): free
 *     GPUs are asked for, then whoever may start is started.
 *     Where, the queue says: the head's node, or another that has told what it has (job_offers.c).
 *  3. A start that fails makes the job FAILED. One that finds the GPUs taken meanwhile, or its
 *     packages not restored yet, goes back to its place; it is tried again after a moment, or when
 *     they are here. Those behind it go on.
 *  4. What never fits, or has waited too long, is FAILED with the reason.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/services.h"

/* Names beyond this are not looked at: among so many one is unknown to the queue already. */
enum { NEEDS_MAX = MB_JOB_QUEUE_KINDS_MAX + 8, STARTS_PER_TURN = 16, HOLD_MS = 400 };

#define TIMEOUT_VAR "RAY_JOB_START_TIMEOUT_SECONDS"

int head_admission_create(struct mb_head *h, const struct mb_head_job_limits *limits,
                          struct mb_err *err)
{
    struct mb_job_amount totals[MB_JOB_QUEUE_KINDS_MAX];
    struct mb_job_queue_opts opts = {
        .max_running = limits->max_running > 0 ? limits->max_running : MB_HEAD_RUNNING_JOBS,
        .max_waiting = limits->max_queued > 0 ? limits->max_queued : MB_HEAD_QUEUED_JOBS,
        .totals = totals,
        .n_totals = limits->n_totals + 1,
        .may_use = head_offers_may_use,
        .arg = h};
    uint32_t n_gpus = 0, n_free;

    if (opts.n_totals > MB_JOB_QUEUE_KINDS_MAX)
        return mb_err_set(err, MB_EINVAL, "%zu kinds of resources, at most %d are possible",
                          opts.n_totals, MB_JOB_QUEUE_KINDS_MAX);
    if (h->runner->gpus)
        h->runner->gpus(h->runner->self, &n_gpus, &n_free);
    totals[0] = (struct mb_job_amount){.name = MB_JOB_GPU, .amount = n_gpus, .is_outside = 1};
    for (size_t i = 0; i < limits->n_totals; i++)
        totals[i + 1] = limits->totals[i];
    h->start_timeout_ms = limits->start_timeout_ms;
    h->max_ended_jobs = limits->max_ended > 0 ? limits->max_ended : MB_HEAD_ENDED_JOBS;
    return mb_job_queue_create(&opts, &h->queue, err);
}

static void add_need(struct mb_job_amount *needs, size_t *n, const char *name, const json_t *amount)
{
    if (!(json_number_value(amount) > 0) || *n == NEEDS_MAX)
        return;
    snprintf(needs[*n].name, sizeof needs[*n].name, "%s",
             strcmp(name, "mobula_gpu") == 0 ? MB_JOB_GPU : name);
    needs[*n].amount = json_number_value(amount);
    needs[(*n)++].is_outside = 0;
}

static size_t needs_of(const struct head_job *job, struct mb_job_amount needs[NEEDS_MAX])
{
    size_t n = 0;
    const char *name;
    json_t *amount;

    add_need(needs, &n, MB_JOB_CPU, json_object_get(job->info, "entrypoint_num_cpus"));
    add_need(needs, &n, MB_JOB_GPU, json_object_get(job->info, "entrypoint_num_gpus"));
    add_need(needs, &n, MB_JOB_MEMORY, json_object_get(job->info, "entrypoint_memory"));
    json_object_foreach(json_object_get(job->info, "entrypoint_resources"), name, amount)
        add_need(needs, &n, name, amount);
    return n;
}

/* Ray's variable, of the job's own environment or the head's. */
static uint64_t timeout_of(const struct mb_head *h, const struct head_job *job)
{
    const char *text = json_string_value(json_object_get(job->info, "runtime_env_json"));
    json_t *env;
    const char *value;
    double seconds = 0;
    uint64_t ms = h->start_timeout_ms;

    if (!text || !strstr(text, TIMEOUT_VAR))
        return ms;
    env = json_loads(text, 0, NULL);
    value = json_string_value(json_object_get(json_object_get(env, "env_vars"), TIMEOUT_VAR));
    if (value && mb_parse_double(value, TIMEOUT_VAR, &seconds, NULL) == 0 && seconds >= 0 &&
        seconds < 1e9)
        ms = (uint64_t)(seconds * 1000);
    json_decref(env);
    return ms;
}

int head_admission_add(struct mb_head *h, struct head_job *job, int forced, struct mb_err *err)
{
    struct mb_job_amount needs[NEEDS_MAX];
    struct mb_job_wish wish;
    size_t n = needs_of(job, needs);
    int rc = head_job_wish(job, n > 0, &wish);

    if (rc != 0)
        return mb_err_set(err, rc, "out of memory");
    rc = mb_job_queue_add(h->queue, &job->ticket, needs, n, timeout_of(h, job), mb_mono_ms(),
                          forced, err);
    if (rc == 0)
        mb_job_queue_wish(&job->ticket, &wish);
    return rc;
}

void head_admission_adopt(struct mb_head *h, struct head_job *job, const char *node)
{
    struct mb_job_amount needs[NEEDS_MAX];
    size_t n = needs_of(job, needs);
    struct mb_err err = {0};
    int is_new;

    /* It has not told what it has: enough for what runs there. */
    if (!mb_job_queue_find_node(h->queue, node) &&
        mb_job_queue_node(h->queue, node, NULL, 0, &is_new, &err) != 0)
        mb_warn("jobs", "job=%s is counted as the head's: %s", job->id, err.text);
    mb_job_queue_adopt(h->queue, &job->ticket, node, needs, n);
}

void head_admission_needs_anew(struct mb_head *h)
{
    struct mb_job_amount needs[NEEDS_MAX];

    for (size_t i = 0; i < h->n_jobs; i++) {
        struct mb_job_ticket *t = &h->jobs[i]->ticket;

        if (t->place == MB_JOB_PLACE_COMING || t->place == MB_JOB_PLACE_WAITING)
            mb_job_queue_set_needs(t, needs, needs_of(h->jobs[i], needs));
    }
}

void head_admission_leave(struct head_job *job)
{
    mb_job_queue_leave(&job->ticket);
}

static struct head_job *job_of(struct mb_job_ticket *t)
{
    return (struct head_job *)(void *)((char *)t - offsetof(struct head_job, ticket));
}

static void start(struct mb_head *h, struct head_job *job)
{
    struct mb_err err = {0};
    int rc = head_job_start_driver(h, job, &err);

    if (rc == MB_EFULL) {
        mb_info("jobs", "job=%s waits on: %s", job->id, err.text);
        mb_job_queue_put_back(&job->ticket, mb_mono_ms() + HOLD_MS,
                              "it could not start a moment ago and is tried again");
    } else if (rc == MB_EUNAVAIL && h->restore) {
        mb_info("jobs", "job=%s waits on: %s", job->id, err.text);
        mb_job_queue_put_back(&job->ticket, UINT64_MAX,
                              "the packages of the head before this one are restored");
    } else if (rc != 0) {
        struct mb_job_facts facts = {.text = err.text};
        head_job_apply(h, job, MB_JOB_START_FAILED, &facts);
    }
}

void head_admission_restored(struct mb_head *h)
{
    mb_job_queue_release(h->queue);
    head_admission_pump(h);
}

/* Ray's sentence, with the number as Python has it: 900.0, 0.5. */
static int put_timeout(const struct mb_job_ticket *t, struct mb_buf *out)
{
    return mb_buf_printf(
        out,
        "Job supervisor actor failed to start within %.10g%s seconds. This timeout can "
        "be configured by setting the environment variable " TIMEOUT_VAR ". ",
        (double)t->timeout_ms / 1000, t->timeout_ms % 1000 == 0 ? ".0" : "");
}

static void refuse(struct mb_head *h, struct head_job *job, enum mb_job_input input)
{
    struct mb_buf text = {0};
    struct mb_job_facts facts = {0};
    int rc;

    if (input == MB_JOB_NEVER_FITS)
        rc = mb_buf_puts(&text, "This job can never start. ");
    else
        rc = put_timeout(&job->ticket, &text);
    if (rc == 0)
        rc = mb_job_queue_reason(&job->ticket, &text);
    if (rc != 0)
        mb_warn("jobs", "job=%s its message is cut: out of memory", job->id);
    facts.text = mb_buf_str(&text);
    head_job_apply(h, job, input, &facts);
    mb_buf_close(&text);
}

void head_admission_pump(struct mb_head *h)
{
    enum mb_job_queue_action action;
    struct mb_job_ticket *t;
    uint32_t n_gpus, n_free;
    int starts = 0;

    if (h->stopping)
        return;
    if (h->runner->gpus) {
        h->runner->gpus(h->runner->self, &n_gpus, &n_free);
        mb_job_queue_set_free(h->queue, MB_JOB_HEAD_NODE, MB_JOB_GPU, n_free);
    }
    head_offers_refresh(h);
    /* A turn of the loop is short: every start that ends, and the tick, call for the next turn. */
    while (starts < STARTS_PER_TURN &&
           (action = mb_job_queue_next(h->queue, mb_mono_ms(), &t)) != MB_JOB_QUEUE_NOTHING) {
        if (action != MB_JOB_QUEUE_START)
            refuse(h, job_of(t),
                   action == MB_JOB_QUEUE_NEVER_FITS ? MB_JOB_NEVER_FITS : MB_JOB_START_TIMEOUT);
        else
            start(h, job_of(t));
        starts++;
    }
}

int head_admission_message(struct head_job *job, struct mb_buf *out)
{
    const char *base = json_string_value(json_object_get(job->info, "message"));
    size_t n;
    int rc = mb_buf_puts(out, base ? base : "");

    mb_job_queue_seen(&job->ticket, mb_mono_ms());
    rc = rc != 0 ? rc : mb_buf_puts(out, " ");
    n = out->len;
    rc = rc != 0 ? rc : mb_job_queue_reason(&job->ticket, out);
    if (rc == 0 && out->len == n)
        out->data[--out->len] = '\0'; /* it is being started: nothing to add */
    return rc;
}
