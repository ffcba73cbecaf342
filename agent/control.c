/*
 * mobula.v1.NodeAgent: the driver's stream to the gang on this node.
 *
 * Happy path: Hello binds the stream to (placement group, attempt); Launch, Start, Renew, End go
 * in; what happens to the ranks comes out; Ended, and the stream is finished.
 *
 *  1. Launching is remote code execution: without the cluster's token only callers on this machine
 *     get past Hello (PERMISSION_DENIED).
 *  2. Hello for a group without a committed bundle here, or for an attempt older than the newest:
 *     FAILED_PRECONDITION. A newer attempt ends the older ones. Which attempt is the newest is on
 *     disk before Hello is answered.
 *  3. A re-dial: the newer stream wins, the older is finished. Everything the driver may have
 * missed is said again: Launched, endpoints, progress, uploads, exits, failure; logs go on where
 * Hello says. A driver must take repetition for what it is.
 *  4. The stream breaks: the gang goes on until the lease runs out. A node that is cut off from its
 *     head, too, gives a driver that waits for it more time (Hello's cut_off_ms).
 *  5. The driver does not read: log chunks wait in their files; should 64 MiB of other messages
 * wait, the stream is cancelled and the driver dials again.
 *  6. A message that is not possible now (Launch twice) is answered with Failure; it ends nothing.
 */
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "agent/callers.h"
#include "agent/gang_run.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/ports.h"
#include "base/str.h"

enum { PROTOCOL_VERSION = 1, TEXT_MAX = 1200 };

static const char any_addr[] = "0.0.0.0";

struct mb_control {
    struct mb_gangs *gangs;
    struct mb_grpc_stream *stream;
    struct mb_gang_run *run; /* NULL before Hello and after the attempt let go */
    int said_hello;
};

/* ---- to the driver ---- */

static int send_message(struct mb_gang_run *r, Mobula__V1__AgentMessage__BodyCase body_case,
                        void *body)
{
    Mobula__V1__AgentMessage m = MOBULA__V1__AGENT_MESSAGE__INIT;
    struct mb_err err;
    int rc;

    if (r->stream == NULL)
        return MB_ESTATE;
    m.body_case = body_case;
    m.hello_reply = body; /* every member of the union is a pointer */
    rc = mb_grpc_stream_send(r->stream, &m.base, &err);
    if (rc != MB_OK && body_case != MOBULA__V1__AGENT_MESSAGE__BODY_LOG) {
        mb_warn("control", "job=%s: the driver's stream is given up: %s", r->job_id, err.text);
        mb_grpc_stream_cancel(r->stream);
    }
    return rc;
}

void mb_control_note(struct mb_gang_run *r, const char *text)
{
    Mobula__V1__Note m = MOBULA__V1__NOTE__INIT;

    m.text = (char *)(uintptr_t)text;
    send_message(r, MOBULA__V1__AGENT_MESSAGE__BODY_NOTE, &m);
}

void mb_control_launched(struct mb_gang_run *r)
{
    Mobula__V1__Launched m = MOBULA__V1__LAUNCHED__INIT;
    uint32_t pids[MB_GANG_RANKS_MAX];

    for (size_t i = 0; i < r->n_ranks; i++)
        pids[i] = (uint32_t)r->ranks[i].pid;
    m.pids = pids;
    m.n_pids = r->n_ranks;
    if (r->checkpoint_dir != NULL)
        m.checkpoint_dir = r->checkpoint_dir;
    m.loaded_iteration = r->loaded_iteration;
    send_message(r, MOBULA__V1__AGENT_MESSAGE__BODY_LAUNCHED, &m);
}

void mb_control_endpoint(struct mb_gang_run *r, const struct mb_gang_rank *rank)
{
    Mobula__V1__Endpoint m = MOBULA__V1__ENDPOINT__INIT;

    if (rank->endpoint == NULL)
        return;
    m.rank = rank->rank;
    m.endpoint = rank->endpoint;
    send_message(r, MOBULA__V1__AGENT_MESSAGE__BODY_ENDPOINT, &m);
}

static void fill_progress(const struct mb_gang_rank *rank, Mobula__V1__Progress *m)
{
    mobula__v1__progress__init(m);
    m->rank = rank->rank;
    m->iteration = rank->progress.iteration;
    m->train_iters = rank->progress.train_iters;
    m->loss = rank->progress.loss;
    m->tokens_per_s = rank->progress.tokens_per_s;
    m->consumed_samples = rank->progress.consumed_samples;
    m->learning_rate = rank->progress.learning_rate;
    m->grad_norm = rank->progress.grad_norm;
    m->validation_loss = rank->progress.validation_loss;
}

void mb_control_progress(struct mb_gang_run *r, const struct mb_gang_rank *rank)
{
    Mobula__V1__Progress m;

    if (rank->progress.iteration < 0)
        return;
    fill_progress(rank, &m);
    send_message(r, MOBULA__V1__AGENT_MESSAGE__BODY_PROGRESS, &m);
}

int mb_control_log(struct mb_gang_run *r, uint32_t rank, uint64_t offset, const void *p, size_t n)
{
    Mobula__V1__LogChunk m = MOBULA__V1__LOG_CHUNK__INIT;

    m.rank = rank;
    m.offset = offset;
    m.data.data = (uint8_t *)p;
    m.data.len = n;
    return send_message(r, MOBULA__V1__AGENT_MESSAGE__BODY_LOG, &m);
}

void mb_control_rank_exit(struct mb_gang_run *r, struct mb_gang_rank *rank)
{
    Mobula__V1__RankExit m = MOBULA__V1__RANK_EXIT__INIT;

    m.rank = rank->rank;
    m.exit_code = rank->code;
    m.signal = rank->signal;
    m.pid = (uint32_t)rank->pid;
    if (rank->cause != NULL)
        m.cause = rank->cause;
    send_message(r, MOBULA__V1__AGENT_MESSAGE__BODY_RANK_EXIT, &m);
}

void mb_control_saved(struct mb_gang_run *r, uint32_t rank, int64_t iteration, uint64_t bytes)
{
    Mobula__V1__Saved m = MOBULA__V1__SAVED__INIT;

    m.rank = rank;
    m.iteration = iteration;
    m.bytes = bytes;
    send_message(r, MOBULA__V1__AGENT_MESSAGE__BODY_SAVED, &m);
}

void mb_control_upload(struct mb_gang_run *r, const struct mb_upload_status *status)
{
    Mobula__V1__Upload m = MOBULA__V1__UPLOAD__INIT;

    m.iteration = status->iteration;
    m.done_bytes = status->done_bytes;
    m.total_bytes = status->total_bytes;
    m.shards_durable = status->shards_durable;
    m.committed = status->committed;
    m.parts_done = status->parts_done;
    m.parts_total = status->parts_total;
    m.rate_bytes_per_s = status->rate_bytes_per_s;
    if (status->parts_total > 0 && status->eta_ms != UINT64_MAX) {
        m.eta_case = MOBULA__V1__UPLOAD__ETA_ETA_MS;
        m.eta_ms = status->eta_ms;
    }
    m.left = status->is_left;
    m.never = status->never;
    if (status->error != NULL)
        m.error = (char *)status->error;
    send_message(r, MOBULA__V1__AGENT_MESSAGE__BODY_UPLOAD, &m);
}

static void fill_plan(const struct mb_gang_run *r, Mobula__V1__Plan *m)
{
    const struct mb_gang_deadline *d = &r->deadline;

    mobula__v1__plan__init(m);
    m->deadline_unix_ms = d->until.unix_ms;
    m->source = (char *)(uintptr_t)mb_deadline_source_name(d->until.source);
    m->save_at_unix_ms = d->plan.save_at_ms;
    m->save_and_end = d->state.asked_end;
    m->end = d->state.ended;
    m->is_local_only = d->plan.is_local_only;
    m->why = (char *)(uintptr_t)(d->plan.why != NULL ? d->plan.why : "");
    m->leaves = d->until.leaves;
    m->saved_iteration = d->saved;
}

void mb_control_plan(struct mb_gang_run *r)
{
    Mobula__V1__Plan m;

    /* A deadline that its RayJob has no more is told too. */
    if (r->deadline.until.unix_ms == 0 && !r->deadline.until.leaves &&
        r->deadline.until.said_ms[MB_DEADLINE_RAYJOB] == 0)
        return;
    fill_plan(r, &m);
    send_message(r, MOBULA__V1__AGENT_MESSAGE__BODY_PLAN, &m);
}

void mb_control_sealed(struct mb_gang_run *r, int64_t iteration, const uint64_t *prints, size_t n)
{
    Mobula__V1__Seal m = MOBULA__V1__SEAL__INIT;

    m.iteration = iteration;
    m.files = (uint64_t *)(uintptr_t)prints;
    m.n_files = n;
    send_message(r, MOBULA__V1__AGENT_MESSAGE__BODY_SEALED, &m);
}

static void send_failure(struct mb_gang_run *r, int code, const char *text)
{
    Mobula__V1__Failure m = MOBULA__V1__FAILURE__INIT;

    m.code = code;
    m.text = (char *)text;
    send_message(r, MOBULA__V1__AGENT_MESSAGE__BODY_FAILURE, &m);
}

void mb_control_failure(struct mb_gang_run *r)
{
    if (r->failure != NULL)
        send_failure(r, r->failure_code, r->failure);
}

void mb_control_unbind(struct mb_gang_run *r)
{
    if (r->control != NULL)
        r->control->run = NULL;
    r->control = NULL;
    r->stream = NULL;
}

void mb_control_ended(struct mb_gang_run *r)
{
    Mobula__V1__Ended m = MOBULA__V1__ENDED__INIT;
    Mobula__V1__LostLog lost[MB_GANG_RANKS_MAX], *list[MB_GANG_RANKS_MAX];
    struct mb_grpc_stream *stream = r->stream;

    m.lost_logs = list;
    for (size_t i = 0; i < r->n_ranks; i++) {
        if (r->ranks[i].lost == NULL)
            continue;
        list[m.n_lost_logs] = &lost[m.n_lost_logs];
        mobula__v1__lost_log__init(&lost[m.n_lost_logs]);
        lost[m.n_lost_logs].rank = r->ranks[i].rank;
        lost[m.n_lost_logs++].text = r->ranks[i].lost;
    }
    send_message(r, MOBULA__V1__AGENT_MESSAGE__BODY_ENDED, &m);
    mb_control_unbind(r);
    if (stream != NULL)
        mb_grpc_stream_finish(stream, MB_GRPC_OK, "ended");
}

/* ---- Hello ---- */

static void refuse(struct mb_control *c, int status, const char *text)
{
    mb_warn("control", "refused %s: %s", mb_grpc_stream_peer(c->stream), text);
    mb_grpc_stream_finish(c->stream, status, text);
}

/* A port that is free now; 0 if none could be had. No outgoing connection gets it before the first
 * rank listens there, unless the kernel had to choose (base/ports.h). */
static int pick_port(void *unused)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_ANY)}};
    socklen_t len = sizeof(a);
    int port = mb_port_pick(any_addr), fd;

    (void)unused;
    if (port != 0)
        return port;
    fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return 0;
    if (bind(fd, (struct sockaddr *)&a, sizeof(a)) == 0 &&
        getsockname(fd, (struct sockaddr *)&a, &len) == 0)
        port = ntohs(a.sin_port);
    close(fd);
    return port;
}

/* The attempt keeps it for its life: no other gang of this node is given it before its first rank
 * listens there. Another program of this machine may take it all the same. */
static uint32_t port_of(struct mb_gang_run *r)
{
    const struct mb_gangs *g = r->owner;
    uint32_t given[MB_GANGS_MAX];
    size_t n = 0;

    if (r->rendezvous_port != 0 &&
        (r->fsm.state != MB_GANG_CREATED || mb_port_is_free(any_addr, (int)r->rendezvous_port)))
        return r->rendezvous_port;
    for (size_t i = 0; i < g->n_runs; i++)
        if (g->runs[i] != r && g->runs[i]->fsm.state != MB_GANG_ENDED &&
            g->runs[i]->rendezvous_port != 0)
            given[n++] = g->runs[i]->rendezvous_port;
    r->rendezvous_port = mb_gang_port(pick_port, NULL, given, n);
    return r->rendezvous_port;
}

static void host_id(char out[64])
{
    struct mb_buf text = {0};

    if (mb_fs_read("/proc/sys/kernel/random/boot_id", 64, &text, NULL) == MB_OK)
        snprintf(out, 64, "%.*s", (int)strcspn(mb_buf_str(&text), "\n"), mb_buf_str(&text));
    else
        gethostname(out, 63);
    mb_buf_close(&text);
}

static void say_hello(struct mb_gang_run *r)
{
    Mobula__V1__HelloReply m = MOBULA__V1__HELLO_REPLY__INIT;
    char host[64] = "";

    host_id(host);
    m.protocol_version = PROTOCOL_VERSION;
    m.node_ip = (char *)r->owner->opts.node_ip;
    m.rendezvous_port = port_of(r);
    m.host_id = host;
    m.running = r->fsm.state != MB_GANG_CREATED;
    send_message(r, MOBULA__V1__AGENT_MESSAGE__BODY_HELLO_REPLY, &m);
}

static void repeat(struct mb_gang_run *r, const Mobula__V1__Hello *hello)
{
    for (size_t i = 0; i < r->n_ranks; i++) {
        struct mb_gang_rank *rank = &r->ranks[i];

        rank->log_offset = 0;
        for (size_t k = 0; k < hello->n_log_positions; k++)
            if (hello->log_positions[k]->rank == rank->rank)
                rank->log_offset = hello->log_positions[k]->offset;
    }
    if (r->is_launched)
        mb_control_launched(r);
    mb_control_plan(r);
    for (size_t i = 0; i < r->n_ranks; i++) {
        mb_control_endpoint(r, &r->ranks[i]);
        mb_control_progress(r, &r->ranks[i]);
    }
    if (r->upload != NULL)
        mb_upload_repeat(r->upload);
    for (size_t i = 0; i < r->n_ranks; i++)
        if (r->ranks[i].exited)
            mb_control_rank_exit(r, &r->ranks[i]);
    mb_control_failure(r);
}

static void supersede_older(struct mb_gangs *g, const struct mb_gang_run *r)
{
    for (size_t i = 0; i < g->n_runs; i++) {
        struct mb_gang_run *old = g->runs[i];

        if (old->attempt < r->attempt && memcmp(&old->gang, &r->gang, sizeof(r->gang)) == 0 &&
            old->fsm.state != MB_GANG_ENDED && !old->is_closing)
            mb_gang_run_event(old, MB_GANG_EV_SUPERSEDED, NULL);
    }
}

/* 0 and the ids; else the stream was refused. */
static int check_hello(struct mb_control *c, const Mobula__V1__Hello *hello, struct mb_pg_id *pg,
                       struct mb_pg_id *gang)
{
    const struct mb_gangs *g = c->gangs;
    char text[TEXT_MAX];

    if (hello->protocol_version != PROTOCOL_VERSION) {
        snprintf(text, sizeof(text), "this agent speaks version %d of the gang protocol, not %u",
                 PROTOCOL_VERSION, hello->protocol_version);
        refuse(c, MB_GRPC_UNIMPLEMENTED, text);
        return MB_EUNSUPPORTED;
    }
    if (hello->placement_group_id.len != sizeof(pg->bytes) || hello->attempt == 0 ||
        (hello->gang_id.len != 0 && hello->gang_id.len != sizeof(gang->bytes))) {
        refuse(c, MB_GRPC_INVALID_ARGUMENT, "Hello needs ids of 18 bytes and an attempt from 1");
        return MB_EINVAL;
    }
    if (!g->opts.callers_are_trusted &&
        !mb_caller_is_local(mb_grpc_stream_peer(c->stream), g->opts.node_ip)) {
        refuse(c, MB_GRPC_PERMISSION_DENIED, MB_CALLER_NEEDS_TOKEN);
        return MB_EDENIED;
    }
    memcpy(pg->bytes, hello->placement_group_id.data, sizeof(pg->bytes));
    *gang = *pg;
    if (hello->gang_id.len == sizeof(gang->bytes))
        memcpy(gang->bytes, hello->gang_id.data, sizeof(gang->bytes));
    return 0;
}

/* The run of the attempt, which has got past the fence; NULL: the stream was refused. */
static struct mb_gang_run *admit(struct mb_control *c, const Mobula__V1__Hello *hello,
                                 const struct mb_pg_id *pg, const struct mb_pg_id *gang)
{
    struct mb_gangs *g = c->gangs;
    struct mb_gang_run *r = mb_gangs_find(g, pg, hello->attempt);
    uint32_t before = mb_ledger_newest(g->ledger, gang);
    struct mb_err err = {0};

    if (mb_gang_admit(g->ledger, pg, gang, hello->attempt, r != NULL, &err) != MB_OK) {
        refuse(c, MB_GRPC_FAILED_PRECONDITION, err.text);
        return NULL;
    }
    if (mb_ledger_newest(g->ledger, gang) != before && g->ops->on_fenced(g->arg, &err) != MB_OK) {
        refuse(c, MB_GRPC_RESOURCE_EXHAUSTED, err.text);
        return NULL;
    }
    if (r == NULL && !g->stopping && !g->is_drained)
        r = mb_gangs_new_run(g, pg, gang, hello->attempt, hello->job_id, &err);
    if (r == NULL)
        refuse(c, MB_GRPC_RESOURCE_EXHAUSTED,
               g->stopping     ? "the node is stopping"
               : g->is_drained ? "the node is drained"
                               : err.text);
    return r;
}

/* The newer stream wins. */
static void bind_stream(struct mb_control *c, struct mb_gang_run *r, const Mobula__V1__Hello *hello)
{
    struct mb_grpc_stream *old = r->stream;

    if (old != NULL) {
        mb_control_unbind(r);
        mb_grpc_stream_finish(old, MB_GRPC_ABORTED, "the driver opened another stream");
    }
    r->stream = c->stream;
    r->control = c;
    c->run = r;
    c->said_hello = 1;
    r->has_own_job = hello->own_job_id.len == sizeof(r->own_job);
    if (r->has_own_job)
        memcpy(r->own_job, hello->own_job_id.data, sizeof(r->own_job));
}

static void on_hello(struct mb_control *c, const Mobula__V1__Hello *hello)
{
    struct mb_pg_id pg, gang;
    struct mb_gang_run *r =
        check_hello(c, hello, &pg, &gang) == 0 ? admit(c, hello, &pg, &gang) : NULL;

    if (r == NULL)
        return;
    bind_stream(c, r, hello);
    if (r->fsm.state != MB_GANG_ENDED)
        mb_gang_lease(&r->fsm, hello->lease_ms, mb_mono_ms());
    mb_gang_cut_off(&r->fsm, hello->cut_off_ms);
    mb_info("control", "job=%s attempt=%u: driver connected from %s state=%s", r->job_id,
            r->attempt, mb_grpc_stream_peer(c->stream), mb_gang_state_name(r->fsm.state));
    say_hello(r);
    supersede_older(c->gangs, r);
    repeat(r, hello);
}

/* ---- from the driver ---- */

/* The message is the stream's; a launch is kept, so it is copied through its encoding. */
static Mobula__V1__Launch *copy_launch(const Mobula__V1__Launch *l)
{
    size_t n = mobula__v1__launch__get_packed_size(l);
    uint8_t *bytes = mb_alloc(n);
    Mobula__V1__Launch *copy = NULL;

    if (bytes != NULL) {
        mobula__v1__launch__pack(l, bytes);
        copy = mobula__v1__launch__unpack(NULL, n, bytes);
    }
    mb_free(bytes);
    return copy;
}

static void on_launch(struct mb_gang_run *r, const Mobula__V1__Launch *launch)
{
    Mobula__V1__Launch *copy = copy_launch(launch);
    struct mb_err err = {0};

    if (copy == NULL)
        mb_err_set(&err, MB_ENOMEM, "no memory for the launch");
    else
        mb_gang_run_launch(r, copy, &err);
    if (err.code != MB_OK)
        mb_gang_run_fail(r, err.code, err.text);
}

static void on_start(struct mb_gang_run *r, const Mobula__V1__Start *start)
{
    struct mb_report m = {
        .type = MB_REPORT_START, .endpoints = start->endpoints, .n_endpoints = start->n_endpoints};
    struct mb_err err;

    if (mb_gang_run_event(r, MB_GANG_EV_START, &err) != MB_OK)
        return;
    /* Also when RUNNING was noted before: that agent may have died before it told the ranks. To a
     * rank that knows, it is nothing new. */
    for (size_t i = 0; r->is_worker && i < r->n_ranks; i++)
        mb_gang_report_send(&r->ranks[i], &m);
}

static void on_save_now(struct mb_gang_run *r, const char *reason)
{
    struct mb_report m = {.type = MB_REPORT_SAVE_NOW, .text = (char *)reason};

    mb_info("control", "job=%s: save now reason=%s", r->job_id, reason);
    for (size_t i = 0; r->is_worker && i < r->n_ranks; i++)
        mb_gang_report_send(&r->ranks[i], &m);
}

static void on_stop(struct mb_gang_run *r, const Mobula__V1__Stop *stop)
{
    if (stop->grace_ms > 0 && stop->grace_ms < r->stop_grace_ms)
        r->stop_grace_ms = (uint32_t)stop->grace_ms;
    else if (stop->waits_for_end && stop->grace_ms > 0)
        mb_gang_deadline_peer_leaves(r, stop->grace_ms);
    mb_gang_run_event(r, stop->waits_for_end ? MB_GANG_EV_HALT : MB_GANG_EV_STOP, NULL);
}

static void on_seal(struct mb_gang_run *r, const Mobula__V1__Seal *seal)
{
    struct mb_err err = {0};

    if (r->upload == NULL || !r->watch_tracker)
        return;
    /* A failure was told already, and there may be something to clean up. */
    mb_upload_seal(r->upload, seal->iteration, seal->files, seal->n_files, &err);
    if (mb_upload_is_busy(r->upload))
        mb_gang_run_event(r, MB_GANG_EV_UPLOADS_BUSY, NULL);
}

static void on_leave(struct mb_gang_run *r, const Mobula__V1__Leave *leave)
{
    if (r->upload == NULL)
        return;
    if (leave->never)
        mb_upload_given_up(r->upload, leave->iteration, leave->why);
    else
        mb_upload_left(r->upload, leave->iteration, leave->left);
}

static void on_end(struct mb_gang_run *r, const Mobula__V1__End *end)
{
    struct mb_err err = {0};

    if (end->abandon_uploads && r->upload != NULL)
        mb_upload_abandon(r->upload, end->within_ms);
    if (end->abandon_uploads && end->within_ms > 0)
        mb_gang_logs_hurry(r, mb_mono_ms() + end->within_ms);
    if (end->known_case == MOBULA__V1__END__KNOWN_NEWEST_ON_ALL && r->upload != NULL)
        mb_upload_newest_on_all(r->upload, end->newest_on_all);
    if (end->n_lost_nodes > 0 && r->upload != NULL &&
        mb_upload_lost(r->upload, end->lost_nodes, end->n_lost_nodes, &err) != MB_OK)
        mb_warn("control", "job=%s: %s: their parts are waited for", r->job_id, err.text);
    mb_gang_run_event(r, MB_GANG_EV_END, NULL);
}

static void on_message(void *arg, struct mb_grpc_stream *s, const ProtobufCMessage *msg)
{
    struct mb_control *c = arg;
    const Mobula__V1__DriverMessage *m = (const void *)msg;
    struct mb_gang_run *r = c->run;

    (void)s;
    if (r == NULL) {
        if (m->body_case == MOBULA__V1__DRIVER_MESSAGE__BODY_HELLO)
            on_hello(c, m->hello);
        else if (!c->said_hello)
            refuse(c, MB_GRPC_FAILED_PRECONDITION, "the first message of a stream is Hello");
        /* Else the attempt let go: it ended, or this agent ends and the next one adopts it. What
         * was under way then is nothing to refuse: a refusal would end the gang everywhere. */
        return;
    }
    mb_gang_renew(&r->fsm, mb_mono_ms());
    switch (m->body_case) {
    case MOBULA__V1__DRIVER_MESSAGE__BODY_LAUNCH:
        on_launch(r, m->launch);
        break;
    case MOBULA__V1__DRIVER_MESSAGE__BODY_START:
        on_start(r, m->start);
        break;
    case MOBULA__V1__DRIVER_MESSAGE__BODY_SAVE_NOW:
        on_save_now(r, m->save_now->reason);
        break;
    case MOBULA__V1__DRIVER_MESSAGE__BODY_STOP:
        on_stop(r, m->stop);
        break;
    case MOBULA__V1__DRIVER_MESSAGE__BODY_END:
        on_end(r, m->end);
        break;
    case MOBULA__V1__DRIVER_MESSAGE__BODY_SEAL:
        on_seal(r, m->seal);
        break;
    case MOBULA__V1__DRIVER_MESSAGE__BODY_LEAVE:
        on_leave(r, m->leave);
        break;
    case MOBULA__V1__DRIVER_MESSAGE__BODY_RENEW:
    case MOBULA__V1__DRIVER_MESSAGE__BODY_HELLO:
    default: /* a newer driver's message: nothing this agent could do */
        break;
    }
}

static void on_stream_end(void *arg, struct mb_grpc_stream *s, int status, const char *detail)
{
    struct mb_control *c = arg;

    (void)s;
    if (c->run != NULL) {
        mb_info("control", "job=%s: the driver's stream ended status=%s %s", c->run->job_id,
                mb_grpc_status_name(status), detail != NULL ? detail : "");
        mb_gang_stream_ended(&c->run->fsm, mb_mono_ms());
        mb_control_unbind(c->run);
    }
    mb_free(c);
}

/* The driver half-closes only when it is done with the stream. */
static void on_peer_done(void *arg, struct mb_grpc_stream *s)
{
    struct mb_control *c = arg;

    if (c->run != NULL)
        mb_control_unbind(c->run);
    mb_grpc_stream_finish(s, MB_GRPC_OK, "");
}

static const struct mb_grpc_stream_ops stream_ops = {on_message, on_peer_done, on_stream_end};

static void on_control(void *arg, struct mb_grpc_stream *s)
{
    struct mb_control *c = mb_calloc(1, sizeof(*c));

    if (c == NULL) {
        mb_grpc_stream_finish(s, MB_GRPC_RESOURCE_EXHAUSTED, "the agent is out of memory");
        return;
    }
    c->gangs = arg;
    c->stream = s;
    mb_grpc_stream_accept(s, &mobula__v1__driver_message__descriptor, &stream_ops, c);
}

/* ---- GetStatus ---- */

struct status {
    Mobula__V1__GangStatus gang;
    Mobula__V1__Progress progress;
    uint32_t ranks[MB_GANG_RANKS_MAX];
};

static void fill_status(struct mb_gang_run *r, struct status *s)
{
    mobula__v1__gang_status__init(&s->gang);
    s->gang.placement_group_id.data = r->pg.bytes;
    s->gang.placement_group_id.len = sizeof(r->pg.bytes);
    s->gang.attempt = r->attempt;
    s->gang.job_id = r->job_id;
    s->gang.state = (char *)mb_gang_state_name(r->fsm.state);
    s->gang.ranks = s->ranks;
    s->gang.n_ranks = r->n_ranks;
    for (size_t i = 0; i < r->n_ranks; i++) {
        s->ranks[i] = r->ranks[i].rank;
        if (i == 0 && r->ranks[i].progress.iteration >= 0) {
            fill_progress(&r->ranks[i], &s->progress);
            s->gang.progress = &s->progress;
        }
    }
}

static void on_get_status(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_gangs *g = arg;
    Mobula__V1__GetStatusReply reply = MOBULA__V1__GET_STATUS_REPLY__INIT;
    struct status *list = mb_calloc(g->n_runs, sizeof(*list));
    Mobula__V1__GangStatus **at = mb_calloc(g->n_runs, sizeof(void *));

    (void)request;
    if (list == NULL || at == NULL) {
        mb_grpc_reply_error(req, MB_GRPC_RESOURCE_EXHAUSTED, "the agent is out of memory");
        goto out;
    }
    for (size_t i = 0; i < g->n_runs; i++) {
        fill_status(g->runs[i], &list[i]);
        at[i] = &list[i].gang;
    }
    reply.version = (char *)MOBULA_VERSION;
    reply.node_id.data = (uint8_t *)g->node_id;
    reply.node_id.len = g->node_id != NULL ? 28 : 0;
    reply.uptime_ms = mb_mono_ms() - g->start_ms;
    reply.gangs = at;
    reply.n_gangs = g->n_runs;
    mb_grpc_reply(req, &reply.base);
out:
    mb_free(at);
    mb_free(list);
}

static const struct mb_grpc_method methods[] = {
    {"/mobula.v1.NodeAgent/Control", &mobula__v1__driver_message__descriptor, NULL, on_control, 0},
    {"/mobula.v1.NodeAgent/GetStatus", &mobula__v1__get_status_request__descriptor, on_get_status,
     NULL, 0},
};

int mb_control_add(struct mb_gangs *g, struct mb_grpc_server *srv, struct mb_err *err)
{
    return mb_grpc_server_add(srv, methods, sizeof(methods) / sizeof(methods[0]), g, err);
}
