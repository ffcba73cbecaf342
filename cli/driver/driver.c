/*
 * Shell around state.c: the GCS requests, the signals, the clock.
 *  1. Connect. Inside a job of a real Ray head its supervisor actor owns the placement group;
 *     elsewhere we add a job of our own, bound to a live node.
 *  2. Reserve (reserve.c): a group, its nodes.
 *  3. The streams (node.c) run the gang; once a second leases are renewed and the record is
 * written.
 *  4. Release: remove the group, finish our job, write the last record, leave.
 *  5. The attempt failed and restart.c wants another (attempts.c): the group is kept when its nodes
 *     are well and there are not more of them now (elastic.c), else everything is given back; then
 *     on from the reservation.
 *  6. A signal: the state machine stops the gang and lets it save; a second signal abandons
 * uploads.
 */
#include "cli/driver/internal.h"
#include "gcs/tls.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "agent/supervise/sender.h"
#include "base/loop.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/str.h"

enum {
    VERDICT_BURIED_LINES = 5,
    PEERS_GRACE_MS = 2000, /* of ranks whose peer died */
    TICK_MS = 1000,
    REQUEST_TIMEOUT_MS = 20000,
    RELEASE_TIMEOUT_MS = 5000
};

static void do_actions(struct driver *d, int actions);

void drv_event(struct driver *d, const struct mb_drv_event *e)
{
    enum mb_drv_phase before = mb_drv_phase(d->state);
    int actions = mb_drv_step(d->state, e);

    if (actions < 0) {
        fprintf(stderr, "mobula: event %s does not belong into phase %s\n",
                mb_drv_event_name(e->kind), mb_drv_phase_name(before));
        return;
    }
    if (d->verdict_said != mb_drv_verdict_number(d->state) && mb_drv_verdict_stands(d->state)) {
        d->verdict_said = mb_drv_verdict_number(d->state);
        fprintf(stderr, "mobula: %s\n", mb_drv_verdict(d->state));
    }
    if (mb_drv_phase(d->state) != before)
        d->record_dirty = 1;
    do_actions(d, actions);
}

void drv_failed(struct driver *d, const struct mb_err *err)
{
    if (d->closing || err->code == MB_ECANCELED)
        return;
    drv_event(d,
              &(struct mb_drv_event){.kind = MB_DRV_FAILED, .code = err->code, .text = err->text});
}

void drv_happened(struct driver *d, enum mb_drv_event_kind kind)
{
    drv_event(d, &(struct mb_drv_event){.kind = kind});
}

/* ---- owning ---- */

static void on_job_added(void *arg, const struct mb_err *err)
{
    struct driver *d = arg;

    if (err->code) {
        drv_failed(d, err);
        return;
    }
    d->own_job = 1;
    drv_happened(d, MB_DRV_OWNED);
}

static void on_job_id(void *arg, const struct mb_err *err, const uint8_t job_id[MB_JOB_ID_BYTES])
{
    struct driver *d = arg;
    struct mb_gcs_job job = {0};
    struct mb_err e = {0};

    if (err->code) {
        drv_failed(d, err);
        return;
    }
    memcpy(d->job_id, job_id, sizeof(d->job_id));
    memcpy(job.job_id, job_id, sizeof(job.job_id));
    memcpy(job.node_id, d->owner.node_id, sizeof(job.node_id));
    job.entrypoint = d->opts->entrypoint;
    job.submission_id = d->opts->submission_id;
    job.driver_ip = "127.0.0.1";
    job.driver_pid = getpid();
    job.node_port = d->owner.port;
    if (mb_gcs_add_job(d->gcs, &job, REQUEST_TIMEOUT_MS, on_job_added, d, NULL, &e) < 0)
        drv_failed(d, &e);
}

/* Our job is bound to a live node, so that it ends with that node; the head's own is preferred. */
static void on_owner_nodes(void *arg, const struct mb_err *err, const struct mb_gcs_node *nodes,
                           size_t n)
{
    struct driver *d = arg;
    const struct mb_gcs_node *best = NULL;
    struct mb_err e = {0};

    if (err->code) {
        drv_failed(d, err);
        return;
    }
    for (size_t i = 0; i < n; i++)
        if (!nodes[i].is_dead && (!best || (nodes[i].is_head && !best->is_head)))
            best = &nodes[i];
    if (!best) {
        mb_err_set(&e, MB_EUNAVAIL,
                   "the cluster at %s has no live node; start one with: mobula "
                   "start --address %s",
                   d->opts->address, d->opts->address);
        drv_failed(d, &e);
        return;
    }
    memcpy(d->owner.node_id, best->node_id, sizeof(best->node_id));
    d->owner.port = best->port;
    if (mb_gcs_next_job_id(d->gcs, REQUEST_TIMEOUT_MS, on_job_id, d, NULL, &e) < 0)
        drv_failed(d, &e);
}

static void own_by_job(struct driver *d)
{
    struct mb_err e = {0};

    if (mb_gcs_nodes(d->gcs, REQUEST_TIMEOUT_MS, on_owner_nodes, d, NULL, &e) < 0)
        drv_failed(d, &e);
}

static void on_actor(void *arg, const struct mb_err *err, const uint8_t actor_id[MB_ACTOR_ID_BYTES])
{
    struct driver *d = arg;

    if (err->code == MB_ENOENT) {
        own_by_job(d);
        return;
    }
    if (err->code) {
        drv_failed(d, err);
        return;
    }
    memcpy(d->actor_id, actor_id, sizeof(d->actor_id));
    memcpy(d->job_id, actor_id + MB_ACTOR_ID_BYTES - MB_JOB_ID_BYTES, sizeof(d->job_id));
    d->has_actor = 1;
    drv_happened(d, MB_DRV_OWNED);
}

static void do_own(struct driver *d)
{
    struct mb_err e = {0};
    char name[300];

    if (d->keeps_group || d->own_job) { /* of the attempt before */
        drv_happened(d, MB_DRV_OWNED);
        return;
    }
    if (!d->opts->submission_id) {
        own_by_job(d);
        return;
    }
    snprintf(name, sizeof(name), "_ray_internal_job_actor_%s", d->opts->submission_id);
    if (mb_gcs_named_actor(d->gcs, name, "SUPERVISOR_ACTOR_RAY_NAMESPACE", REQUEST_TIMEOUT_MS,
                           on_actor, d, NULL, &e) < 0)
        drv_failed(d, &e);
}

/* ---- the end ---- */

static void on_handle_closed(uv_handle_t *h)
{
    struct driver *d = h->data;

    d->handles_open--;
}

static void on_signals_closed(void *arg)
{
    struct driver *d = arg;

    d->handles_open--;
}

static void on_gcs_closed(void *arg)
{
    struct driver *d = arg;

    d->gcs_is_closing = 0;
}

static void close_gcs(struct driver *d)
{
    d->gcs_is_closing = 1;
    mb_gcs_close(d->gcs, on_gcs_closed, d);
    d->gcs = NULL;
}

static void finish(struct driver *d)
{
    if (d->closing)
        return;
    d->closing = 1;
    for (uint32_t i = 0; i < d->opts->num_nodes; i++)
        drv_node_close(&d->nodes[i]);
    mb_signals_close(&d->signals, on_signals_closed);
    uv_close((uv_handle_t *)&d->tick, on_handle_closed);
    uv_close((uv_handle_t *)&d->pause, on_handle_closed);
    close_gcs(d);
}

static void given_back(struct driver *d)
{
    if (d->next.again)
        drv_attempts_begin(d);
    else
        drv_happened(d, MB_DRV_RELEASED);
}

static void on_job_finished(void *arg, const struct mb_err *err)
{
    struct driver *d = arg;

    d->own_job = 0;
    if (err->code && err->code != MB_ECANCELED)
        fprintf(stderr, "mobula: marking the run as finished: %s\n", err->text);
    given_back(d);
}

static void finish_job(struct driver *d)
{
    struct mb_err e = {0};

    if (!d->own_job ||
        mb_gcs_finish_job(d->gcs, d->job_id, RELEASE_TIMEOUT_MS, on_job_finished, d, NULL, &e) < 0)
        given_back(d);
}

static void on_group_removed(void *arg, const struct mb_err *err)
{
    if (err->code && err->code != MB_ENOENT && err->code != MB_ECANCELED)
        fprintf(stderr, "mobula: removing the placement group: %s\n", err->text);
    ((struct driver *)arg)->reserved = 0;
    finish_job(arg);
}

static void give_back(struct driver *d)
{
    struct mb_err e = {0};

    d->releasing = !d->next.again;
    d->keeps_group = 0;
    d->record_busy = 0; /* the last record counts: an older put in flight may be overtaken */
    drv_record_put(d);
    if (d->wait_op)
        mb_gcs_op_cancel(d->wait_op);
    if (!d->reserved ||
        mb_gcs_pg_remove(d->gcs, d->pg_id, RELEASE_TIMEOUT_MS, on_group_removed, d, NULL, &e) < 0)
        finish_job(d);
}

static void keep_group(struct driver *d)
{
    d->keeps_group = 1;
    drv_attempts_begin(d);
}

/* The attempt had fewer nodes than it might have: are more of them there now? */
static void on_alive(void *arg, const struct mb_err *err, const struct mb_gcs_node *nodes, size_t n)
{
    struct driver *d = arg;

    if (d->closing)
        return;
    if (err->code || mb_elastic_keeps(&d->elastic, drv_waiting_count(d, nodes, n)))
        keep_group(d);
    else
        give_back(d);
}

static void do_release(struct driver *d)
{
    if (!drv_attempts_conclude(d) || !d->next.keep_group)
        give_back(d);
    else if (d->n_nodes == d->opts->num_nodes ||
             mb_gcs_nodes(d->gcs, RELEASE_TIMEOUT_MS, on_alive, d, NULL, NULL) < 0)
        keep_group(d);
}

static void do_actions(struct driver *d, int actions)
{
    if (actions & MB_DRV_DO_OWN)
        do_own(d);
    if (actions & MB_DRV_DO_RESERVE)
        drv_reserve(d);
    for (uint32_t i = 0; i < d->n_nodes; i++) {
        struct drv_node *n = &d->nodes[i];

        if (!n->driver || mb_drv_node_ended(d->state, i))
            continue;
        if (actions & MB_DRV_DO_DIAL)
            drv_node_dial(n);
        if (actions & MB_DRV_DO_START)
            drv_node_start(n);
        if (actions & MB_DRV_DO_STOP)
            /* Peers of a rank that died have nobody to finish a step with. */
            drv_node_stop(n, mb_drv_verdict(d->state),
                          mb_drv_ends_in_order(d->state) ? drv_leaving_grace_ms(d)
                                                         : PEERS_GRACE_MS);
        if (actions & MB_DRV_DO_END)
            drv_node_end(n, 0);
    }
    if (actions & MB_DRV_DO_LAUNCH)
        drv_launch(d);
    if (actions & MB_DRV_DO_ASK_STORE)
        drv_ask_store(d);
    if (actions & MB_DRV_DO_RELEASE)
        do_release(d);
    if (actions & MB_DRV_DO_FINISH)
        finish(d);
}

/* ---- events of the shell ---- */

static void on_gcs(void *arg, struct mb_gcs *c, enum mb_gcs_event event, const struct mb_err *err)
{
    struct driver *d = arg;
    struct mb_err e = *err;

    (void)c;
    switch (event) {
    case MB_GCS_CONNECTED:
        drv_happened(d, MB_DRV_CONNECTED);
        break;
    case MB_GCS_CONNECT_FAILED:
        mb_err_wrap(&e, "cannot reach a cluster at %s", d->opts->address);
        drv_failed(d, &e);
        break;
    case MB_GCS_CLUSTER_CHANGED:
        mb_err_set(&e, MB_EUNAVAIL,
                   "another cluster answers at %s: the head was restarted without "
                   "its store",
                   d->opts->address);
        drv_failed(d, &e);
        break;
    default:
        break;
    }
}

static void on_signal(void *arg, const struct signalfd_siginfo *info)
{
    struct driver *d = arg;
    int signum = (int)info->ssi_signo;

    if (!mb_sender_counts(info))
        return;

    if (++d->interrupts == 1) {
        d->signal = signum;
        fprintf(stderr,
                "mobula: signal %d: stopping the gang, saving what --save asks for; a second "
                "signal abandons uploads\n",
                signum);
        drv_event(d, &(struct mb_drv_event){.kind = MB_DRV_INTERRUPTED, .signal = signum});
        return;
    }
    for (uint32_t i = 0; i < d->n_nodes; i++)
        if (d->nodes[i].driver && !mb_drv_node_ended(d->state, i))
            drv_node_end(&d->nodes[i], 1);
}

static void on_tick(uv_timer_t *t)
{
    struct driver *d = t->data;

    for (uint32_t i = 0; i < d->n_nodes; i++)
        if (d->nodes[i].driver)
            drv_node_renew(&d->nodes[i]);
    if (d->record_dirty && mb_drv_phase(d->state) > MB_DRV_OWN)
        drv_record_put(d);
    drv_waiting_tick(d);
    drv_attempts_tick(d);
    drv_deadline_tick(d);
}

static void on_grpc_stopped(void *arg)
{
    *(int *)arg = 1;
}

static int setup(struct driver *d, struct mb_err *err)
{
    const struct mb_driver_opts *o = d->opts;
    const struct mb_drv_config config = {.n_nodes = o->num_nodes,
                                         .ranks_per_node = o->ranks_per_node,
                                         .is_worker = o->is_worker,
                                         .has_url = o->checkpoint_url != NULL,
                                         .keep_last = o->checkpoint_keep_last};
    const struct mb_gcs_opts gcs_opts = {.address = o->address, .token = o->token};
    int rc;

    d->state = mb_drv_create(&config);
    d->nodes = mb_calloc(o->num_nodes, sizeof(*d->nodes));
    d->uploads = mb_calloc(o->num_nodes, sizeof(*d->uploads));
    d->endpoints = mb_calloc(drv_ranks_max(d), sizeof(*d->endpoints));
    d->exits = mb_calloc(drv_ranks_max(d), sizeof(*d->exits));
    d->output = mb_calloc(drv_ranks_max(d), sizeof(*d->output));
    if (!d->state || !d->nodes || !d->uploads || !d->endpoints || !d->exits || !d->output)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    mb_signals_block(); /* gRPC's threads too */
    rc = mb_gcs_grpc_create(&d->loop, &d->grpc, err);
    if (rc < 0)
        return rc;
    rc = mb_gcs_create(&d->loop, d->grpc, &gcs_opts, on_gcs, d, &d->gcs, err);
    if (rc < 0)
        return rc;
    rc = mb_signals_start(&d->signals, &d->loop, on_signal, d, err);
    if (rc < 0)
        return rc;
    uv_timer_init(&d->loop, &d->tick);
    uv_timer_init(&d->loop, &d->pause);
    d->tick.data = d->pause.data = d;
    d->handles_open += 3;
    uv_timer_start(&d->tick, on_tick, TICK_MS, TICK_MS);
    d->started_ms = mb_mono_ms();
    return mb_gcs_connect(d->gcs, err);
}

static void teardown(struct driver *d)
{
    int stopped = 0;

    if (!d->closing && d->tick.data)
        finish(d);
    else if (d->gcs)
        close_gcs(d);
    while (d->gcs_is_closing) /* its channels are its own to free, before the runtime does */
        mb_loop_turn(&d->loop);
    if (d->grpc) {
        mb_grpc_stop(d->grpc, on_grpc_stopped, &stopped);
        while (!stopped)
            mb_loop_turn(&d->loop);
        mb_grpc_destroy(d->grpc);
    }
    uv_run(&d->loop, UV_RUN_DEFAULT);
    drv_output_flush(d);
    drv_seals_clear(d);
    drv_leaves_clear(d);
    if (d->lines_after_verdict >= VERDICT_BURIED_LINES)
        fprintf(stderr, "mobula: %s\n", mb_drv_verdict(d->state));
    for (uint32_t r = 0; d->endpoints && r < drv_ranks_max(d); r++)
        mb_free(d->endpoints[r]);
    for (size_t i = 0; i < d->n_causes; i++)
        mb_free(d->causes[i]);
    drv_placed_clear(d);
    mb_free(d->endpoints);
    mb_free(d->exits);
    mb_free(d->output);
    mb_free(d->uploads);
    mb_free(d->nodes);
    mb_drv_destroy(d->state);
    uv_loop_close(&d->loop);
}

/* What a shell would say of the rank. */
static int status_of_rank(struct mb_failure f, int otherwise)
{
    if (f.kind != MB_FAILURE_RANK)
        return otherwise;
    return f.signal != 0 ? 128 + f.signal : f.exit_code;
}

int mb_driver_run(const struct mb_driver_opts *opts)
{
    struct driver d = {
        .opts = opts,
        .attempt = 1,
        .restart = {.max_restarts = opts->max_restarts, .delay_ms = opts->restart_delay_ms},
        .n_nodes = opts->num_nodes,
        .elastic = {.min_nodes = opts->min_nodes ? opts->min_nodes : opts->num_nodes,
                    .max_nodes = opts->num_nodes,
                    .ranks_per_node = opts->ranks_per_node,
                    .global_batch = opts->global_batch,
                    .micro_batch = opts->micro_batch,
                    .ranks_per_model = opts->ranks_per_model,
                    .wait_ms = opts->elastic_wait_ms,
                    .n_nodes = opts->num_nodes},
        .committed = -1,
        .attempt_iteration = -1,
        .report = {.uploads = {.iteration = -1, .given_up = -1}},
        .saved_locally = -1};
    struct mb_err err = {0};
    int status;

    if (uv_loop_init(&d.loop) < 0) {
        fprintf(stderr, "mobula: out of memory\n");
        return mb_exit_status(MB_ENOMEM);
    }
    if (setup(&d, &err) < 0) {
        fprintf(stderr, "mobula: %s\n", err.text);
        teardown(&d);
        return mb_exit_status(err.code);
    }
    while (!d.closing)
        mb_loop_turn(&d.loop);
    status = mb_drv_exit_status(d.state);
    if (mb_drv_at_deadline(d.state))
        drv_deadline_bound_log(&d);
    if (mb_drv_at_deadline(d.state) && status == 0)
        printf("ended for its deadline (%s)%s\n", d.deadline.source,
               opts->checkpoint_url ? ": all that was saved is durable" : "");
    if (opts->as_driver && status != 0)
        status = status_of_rank(mb_drv_failure(d.state), status);
    teardown(&d);
    return status;
}
