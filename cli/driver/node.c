/*
 * One node of the gang.
 *  1. dial: open Control, say Hello. HelloReply -> HELLO. Launch, Endpoint, Start, Progress, ...
 * are translated one to one into events of the state machine.
 *  2. The stream breaks: dial again with back-off, where the head says the node is by then. After
 *     the hello, what was asked before is asked again (Stop, End); the agent still has the gang.
 *  3. The agent came back without the gang: if the launch never arrived it is repeated; if it was
 *     asked to end, it has, and its last words were lost; else NODE_LOST.
 *  4. No hello for the length of the lease: NODE_LOST; by then the agent has ended the gang itself.
 *     One that may be cut off has longer (adrift.c).
 */
#include "cli/driver/internal.h"
#include "cli/driver/words.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"
#include "base/clock.h"

enum { DEAD_SILENT_MS = 2000 };

static const char CONTROL[] = "/mobula.v1.NodeAgent/Control";

static void on_message(void *arg, struct mb_grpc_stream *s, const ProtobufCMessage *msg);
static void on_end(void *arg, struct mb_grpc_stream *s, int status, const char *detail);

static const struct mb_grpc_stream_ops stream_ops = {
    .on_message = on_message,
    .on_end = on_end,
};

static void fail(struct drv_node *n, enum mb_drv_event_kind kind, int code, const char *text)
{
    drv_event(n->driver,
              &(struct mb_drv_event){.kind = kind, .node = n->index, .code = code, .text = text});
}

static int over(const struct drv_node *n)
{
    return n->driver->closing || mb_drv_node_ended(n->driver->state, n->index);
}

static void on_redial(uv_timer_t *t)
{
    drv_node_dial(t->data);
}

/* dir with the node's rank for every %n: nodes of one machine that share no directory. */
static char *with_node(const char *dir, uint32_t index)
{
    struct mb_buf text = {0};
    char *out = NULL;
    int rc = 0;

    for (; *dir && !rc; dir++) {
        if (dir[0] == '%' && dir[1] == 'n') {
            rc = mb_buf_printf(&text, "%u", index);
            dir++;
        } else {
            rc = mb_buf_add(&text, dir, 1);
        }
    }
    if (!rc)
        out = mb_strdup(mb_buf_str(&text));
    mb_buf_close(&text);
    return out;
}

static int open_channel(struct driver *d, const char *ip, int port, struct mb_grpc_channel **out,
                        struct mb_err *err)
{
    const struct mb_grpc_channel_opts opts = {.token = d->opts->token};
    char target[280];

    snprintf(target, sizeof(target), strchr(ip, ':') ? "[%s]:%d" : "%s:%d", ip, port);
    return mb_grpc_channel_create(d->grpc, target, &opts, out, err);
}

int drv_node_init(struct driver *d, uint32_t index, const struct mb_gcs_node *node,
                  struct mb_err *err)
{
    struct drv_node *n = &d->nodes[index];
    const char *ip = node->ip;
    const char *temp = getenv("MOBULA_TEMP_DIR");

    n->driver = d;
    n->index = index;
    n->port = node->port;
    memcpy(n->node_id, node->node_id, sizeof(n->node_id));
    n->ip = mb_strdup(ip);
    if (!n->ip)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    if (!n->has_timer) {
        uv_timer_init(&d->loop, &n->redial);
        n->redial.data = n;
        n->has_timer = 1;
        d->handles_open++;
    }
    if (d->opts->save_dir && !d->opts->is_worker)
        n->local_dir = with_node(d->opts->save_dir, index);
    else if (d->opts->save_dir)
        n->local_dir = mb_strdup(d->opts->save_dir);
    else if (d->opts->checkpoint_url || d->opts->load_url)
        n->local_dir = mb_asprintf("%s/checkpoints/%s/node-%u", temp ? temp : "/tmp/mobula",
                                   d->opts->job_id, index);
    return open_channel(d, ip, n->port, &n->channel, err);
}

static void on_timer_closed(uv_handle_t *h)
{
    struct drv_node *n = h->data;

    n->driver->handles_open--;
}

void drv_node_reset(struct drv_node *n)
{
    struct mb_grpc_stream *stream = n->stream;

    n->stream = NULL; /* what it still says is nobody's */
    if (stream)
        mb_grpc_stream_cancel(stream);
    mb_grpc_channel_destroy(n->channel);
    n->channel = NULL;
    if (n->has_timer)
        uv_timer_stop(&n->redial);
    mb_free(n->ip);
    n->ip = NULL;
    mb_free(n->local_dir);
    n->local_dir = NULL;
    n->attempts = 0;
    n->silent_since_ms = n->heard_ms = n->adrift_ms = 0;
    n->stop_grace_ms = 0;
    n->lost_said = -1;
    n->hello = n->launched = n->launch_heard = n->stop_asked = n->end_asked = n->started =
        n->abandons = n->replaced = 0;
}

void drv_node_close(struct drv_node *n)
{
    if (!n->driver)
        return;
    drv_node_reset(n);
    if (!uv_is_closing((uv_handle_t *)&n->redial))
        uv_close((uv_handle_t *)&n->redial, on_timer_closed);
}

/* A message that cannot be queued means a stream that does not move: break it, the re-dial asks
 * again for what matters. */
static void say(struct drv_node *n, const Mobula__V1__DriverMessage *m)
{
    struct mb_err err = {0};

    if (!n->stream || mb_grpc_stream_send(n->stream, &m->base, &err) == 0)
        return;
    fprintf(stderr, "mobula: control stream to node %u (%s): %s\n", n->index, n->ip, err.text);
    mb_grpc_stream_cancel(n->stream);
}

static void schedule_redial(struct drv_node *n, const char *why)
{
    uint64_t now = mb_mono_ms();
    char text[512];

    if (!n->silent_since_ms)
        n->silent_since_ms = now;
    if (!n->adrift_ms && now - n->silent_since_ms >= n->driver->opts->lease_ms) {
        snprintf(text, sizeof(text), "no answer from its agent %s:%d for %llu s (%s)", n->ip,
                 n->port, (unsigned long long)(n->driver->opts->lease_ms / 1000), why);
        fail(n, MB_DRV_NODE_LOST, MB_EUNAVAIL, text);
        return;
    }
    if (n->attempts == 1)
        fprintf(stderr, "mobula: lost the agent of node %u (%s:%d): %s; dialling again\n", n->index,
                n->ip, n->port, why);
    uv_timer_start(&n->redial, on_redial,
                   100 + mb_backoff_ms(n->attempts, 100, 2000, mb_random_u64()), 0);
    n->attempts++;
}

void drv_node_dial(struct drv_node *n)
{
    struct driver *d = n->driver;
    Mobula__V1__DriverMessage m = MOBULA__V1__DRIVER_MESSAGE__INIT;
    Mobula__V1__Hello hello = MOBULA__V1__HELLO__INIT;
    struct mb_err err = {0};

    if (over(n) || n->stream)
        return;
    n->hello = 0;
    if (!n->silent_since_ms)
        n->silent_since_ms = mb_mono_ms();
    if (mb_grpc_stream_open(n->channel, CONTROL, &mobula__v1__agent_message__descriptor, NULL, 0, 0,
                            &stream_ops, n, &n->stream, &err) < 0) {
        n->stream = NULL;
        schedule_redial(n, err.text);
        return;
    }
    hello.protocol_version = MB_DRIVER_PROTOCOL_VERSION;
    hello.placement_group_id.data = d->pg_id;
    hello.placement_group_id.len = sizeof(d->pg_id);
    hello.attempt = d->attempt;
    hello.gang_id.data = d->gang_id;
    hello.gang_id.len = sizeof(d->gang_id);
    hello.job_id = (char *)(uintptr_t)d->opts->job_id;
    hello.lease_ms = d->opts->lease_ms;
    hello.cut_off_ms = drv_adrift_patience_ms(d);
    if (d->own_job) {
        hello.own_job_id.data = d->job_id;
        hello.own_job_id.len = sizeof(d->job_id);
    }
    m.body_case = MOBULA__V1__DRIVER_MESSAGE__BODY_HELLO;
    m.hello = &hello;
    say(n, &m);
}

static void on_end(void *arg, struct mb_grpc_stream *s, int status, const char *detail)
{
    struct drv_node *n = arg;
    char why[300];

    if (n->stream != s)
        return;
    n->stream = NULL;
    if (over(n))
        return;
    snprintf(why, sizeof(why), "%s: %s", mb_grpc_status_name(status), detail ? detail : "");
    /* A refusal will not get better by asking again. */
    if (status == MB_GRPC_PERMISSION_DENIED || status == MB_GRPC_UNAUTHENTICATED ||
        status == MB_GRPC_FAILED_PRECONDITION || status == MB_GRPC_INVALID_ARGUMENT ||
        status == MB_GRPC_UNIMPLEMENTED || status == MB_GRPC_NOT_FOUND) {
        if (mb_drv_dialled(0, n->launched, n->launch_heard, n->stop_asked || n->end_asked) ==
            MB_DRV_HAS_ENDED) {
            fail(n, MB_DRV_NODE_ENDED, 0, NULL);
            return;
        }
        fail(n, n->launched ? MB_DRV_NODE_LOST : MB_DRV_NODE_FAILED, mb_grpc_status_code(status),
             why);
        if (!over(n) && !n->launched) /* nothing runs there that could say Ended */
            fail(n, MB_DRV_NODE_ENDED, 0, NULL);
        return;
    }
    schedule_redial(n, why);
}

static void on_hello_reply(struct drv_node *n, const Mobula__V1__HelloReply *r)
{
    n->hello = 1;
    n->silent_since_ms = 0;
    drv_adrift_is_back(n);
    if (n->attempts > 1)
        fprintf(stderr, "mobula: the agent of node %u (%s:%d) is back\n", n->index, n->ip, n->port);
    n->attempts = 0;
    switch (
        mb_drv_dialled(r->running, n->launched, n->launch_heard, n->stop_asked || n->end_asked)) {
    case MB_DRV_GANG_LOST:
        fail(n, MB_DRV_NODE_LOST, MB_EUNAVAIL, "its agent came back without the gang");
        return;
    case MB_DRV_HAS_ENDED:
        drv_node_end(n, 0);
        fail(n, MB_DRV_NODE_ENDED, 0, NULL);
        return;
    case MB_DRV_LAUNCH_AGAIN:
        drv_node_launch(n);
        break;
    case MB_DRV_GOES_ON:
        break;
    }
    if (!n->launched) /* ranks that run know the first */
        n->rendezvous_port = r->rendezvous_port;
    drv_seals_repeat(n);
    drv_leaves_repeat(n);
    if (n->stop_asked)
        drv_node_stop(n, "asked again after a re-dial", n->stop_grace_ms);
    if (n->end_asked)
        drv_node_end(n, 0);
    if (n->started)
        drv_node_start(n);
    drv_event(n->driver, &(struct mb_drv_event){.kind = MB_DRV_HELLO, .node = n->index});
}

/* What this run has made durable, now or, with --resume, before. */
static int goes_on(const struct driver *d)
{
    return d->committed >= 0 || d->resumes;
}

/* Where a node's ranks begin. What this run has made durable comes first, so that an attempt goes
 * on where the one before it was; "" = nothing is pulled. */
static const char *load_url(const struct driver *d)
{
    const char *url = goes_on(d) ? d->opts->checkpoint_url : d->opts->load_url;

    return url ? url : "";
}

static char *node_argv(const struct drv_node *n, size_t *n_argv, const char **out)
{
    const struct mb_driver_opts *o = n->driver->opts;
    /* Without a store: from what the nodes themselves, or their common disk, have. */
    int from_disk = !o->checkpoint_url && o->save_dir && n->driver->saved_locally >= 0;
    size_t k = 0;

    if (o->is_worker && (goes_on(n->driver) || from_disk))
        k = drv_words_going_on(o->argv, out);
    else
        for (; o->argv[k]; k++)
            out[k] = o->argv[k];
    if (o->is_worker && n->local_dir && !o->save_dir && o->checkpoint_url) {
        out[k++] = "--save";
        out[k++] = n->local_dir;
    }
    if (o->is_worker && n->local_dir && (load_url(n->driver)[0] || from_disk)) {
        out[k++] = "--load";
        out[k++] = n->local_dir;
    }
    *n_argv = k;
    return n->local_dir;
}

/* Both lists owned by the caller; NULL: out of memory. */
static Mobula__V1__Input *list_inputs(const struct drv_node *n, Mobula__V1__Input ***list,
                                      size_t *n_list)
{
    const struct mb_driver_opts *o = n->driver->opts;
    Mobula__V1__Input *inputs = mb_calloc(o->n_inputs + 1, sizeof(*inputs));

    *n_list = 0;
    *list = mb_calloc(o->n_inputs + 1, sizeof(**list));
    for (size_t i = 0; inputs && *list && i < o->n_inputs; i++) {
        if (o->inputs[i].is_of_rank_0 && n->index != 0)
            continue;
        mobula__v1__input__init(&inputs[*n_list]);
        inputs[*n_list].url = (char *)(uintptr_t)o->inputs[i].url;
        inputs[*n_list].kind = (Mobula__V1__Input__Kind)o->inputs[i].kind;
        (*list)[*n_list] = &inputs[*n_list];
        ++*n_list;
    }
    if (inputs && *list)
        return inputs;
    mb_free(inputs);
    mb_free(*list);
    *list = NULL;
    return NULL;
}

static size_t count(const char *const *list)
{
    size_t k = 0;

    while (list && list[k])
        k++;
    return k;
}

void drv_node_launch(struct drv_node *n)
{
    struct driver *d = n->driver;
    const struct mb_driver_opts *o = d->opts;
    uint32_t per_node = o->ranks_per_node;
    Mobula__V1__DriverMessage m = MOBULA__V1__DRIVER_MESSAGE__INIT;
    Mobula__V1__Launch launch = MOBULA__V1__LAUNCH__INIT;
    Mobula__V1__Checkpoint checkpoint = MOBULA__V1__CHECKPOINT__INIT;
    Mobula__V1__Rank *ranks = mb_calloc(per_node, sizeof(*ranks));
    Mobula__V1__Rank **rank_list = mb_calloc(per_node, sizeof(*rank_list));
    const char **argv = mb_calloc(count(o->argv) + 6, sizeof(*argv));
    size_t n_env = count(o->env);
    char **env = mb_calloc(n_env + 2, sizeof(*env));
    char *master_addr = mb_asprintf("MASTER_ADDR=%s", d->nodes[0].ip);
    char *master_port = mb_asprintf("MASTER_PORT=%u", d->nodes[0].rendezvous_port);
    Mobula__V1__Input **input_list = NULL;
    Mobula__V1__Input *inputs = list_inputs(n, &input_list, &launch.n_inputs);

    if (!inputs || !ranks || !rank_list || !argv || !env || !master_addr || !master_port) {
        fail(n, MB_DRV_NODE_FAILED, MB_ENOMEM, "out of memory");
        goto out;
    }
    for (uint32_t i = 0; i < per_node; i++) {
        mobula__v1__rank__init(&ranks[i]);
        ranks[i].rank = n->index * per_node + i;
        ranks[i].local_rank = i;
        ranks[i].bundle_index = n->index;
        rank_list[i] = &ranks[i];
    }
    for (size_t i = 0; i < n_env; i++)
        env[i] = (char *)(uintptr_t)o->env[i];
    env[n_env] = master_addr;
    env[n_env + 1] = master_port;
    launch.world_size = drv_world_size(d);
    launch.num_nodes = d->n_nodes;
    launch.node_rank = n->index;
    launch.ranks = rank_list;
    launch.n_ranks = per_node;
    launch.env = env;
    launch.n_env = n_env + 2;
    launch.cwd = (char *)(uintptr_t)o->cwd;
    launch.is_worker = o->is_worker;
    launch.stop_grace_ms = o->stop_grace_ms;
    launch.deadline_unix_ms = o->deadline_unix_ms;
    launch.estimated_deadline_unix_ms = o->estimated_deadline_unix_ms;
    launch.argv = (char **)(uintptr_t)argv;
    launch.inputs = input_list;
    checkpoint.local_dir = node_argv(n, &launch.n_argv, argv);
    if (n->local_dir) {
        checkpoint.url = (char *)(uintptr_t)(o->checkpoint_url ? o->checkpoint_url : "");
        checkpoint.load_url = (char *)(uintptr_t)load_url(d);
        checkpoint.watch_tracker = !o->is_worker;
        checkpoint.keep_last = o->checkpoint_keep_last;
        checkpoint.local_keep_last = o->local_keep_last;
        if (load_url(d)[0] && d->load_only_after == d->committed)
            checkpoint.load_iteration = d->load_only;
        launch.checkpoint = &checkpoint;
    }
    m.body_case = MOBULA__V1__DRIVER_MESSAGE__BODY_LAUNCH;
    m.launch = &launch;
    n->launched = 1;
    if (n->hello) /* else its hello asks for it: a second Launch would be a mistake */
        say(n, &m);
out:
    mb_free(master_port);
    mb_free(master_addr);
    mb_free(env);
    mb_free(argv);
    mb_free(rank_list);
    mb_free(ranks);
    mb_free(input_list);
    mb_free(inputs);
}

void drv_node_start(struct drv_node *n)
{
    Mobula__V1__DriverMessage m = MOBULA__V1__DRIVER_MESSAGE__INIT;
    Mobula__V1__Start start = MOBULA__V1__START__INIT;

    start.endpoints = n->driver->endpoints;
    start.n_endpoints = drv_world_size(n->driver);
    m.body_case = MOBULA__V1__DRIVER_MESSAGE__BODY_START;
    m.start = &start;
    n->started = 1;
    say(n, &m);
}

void drv_node_stop(struct drv_node *n, const char *reason, uint64_t grace_ms)
{
    Mobula__V1__DriverMessage m = MOBULA__V1__DRIVER_MESSAGE__INIT;
    Mobula__V1__Stop stop = MOBULA__V1__STOP__INIT;

    n->stop_asked = 1;
    stop.reason = (char *)(uintptr_t)reason;
    stop.grace_ms = n->stop_grace_ms = grace_ms;
    stop.waits_for_end = mb_drv_ends_in_order(n->driver->state); /* End follows the last exit */
    m.body_case = MOBULA__V1__DRIVER_MESSAGE__BODY_STOP;
    m.stop = &stop;
    if (n->hello)
        say(n, &m);
}

/* Owned by the caller; NULL: none, or no memory, and then their parts are waited for. */
static uint32_t *lost_nodes(const struct driver *d, size_t *n)
{
    uint32_t *list = NULL;

    *n = 0;
    for (uint32_t i = 0; i < d->n_nodes; i++) {
        if (!mb_drv_node_ended(d->state, i)) /* or lost: it will send no more */
            continue;
        if (!list)
            list = mb_calloc(d->n_nodes, sizeof(*list));
        if (!list) {
            fprintf(stderr, "mobula: out of memory: the nodes are not told which are done\n");
            return NULL;
        }
        list[(*n)++] = i;
    }
    return list;
}

void drv_node_end(struct drv_node *n, int abandon_uploads)
{
    Mobula__V1__DriverMessage m = MOBULA__V1__DRIVER_MESSAGE__INIT;
    Mobula__V1__End end = MOBULA__V1__END__INIT;

    n->end_asked = 1;
    n->abandons |= abandon_uploads != 0; /* said again after a re-dial */
    end.abandon_uploads = n->abandons;
    end.within_ms = n->abandons ? n->driver->drain_within_ms : 0;
    end.newest_on_all = mb_drv_newest_on_all(n->driver->state);
    if (end.newest_on_all < INT64_MAX)
        end.known_case = MOBULA__V1__END__KNOWN_NEWEST_ON_ALL;
    m.body_case = MOBULA__V1__DRIVER_MESSAGE__BODY_END;
    m.end = &end;
    end.lost_nodes = lost_nodes(n->driver, &end.n_lost_nodes);
    if (n->hello)
        say(n, &m);
    mb_free(end.lost_nodes);
}

void drv_node_seal(struct drv_node *n, const struct drv_seal *seal)
{
    Mobula__V1__DriverMessage m = MOBULA__V1__DRIVER_MESSAGE__INIT;
    Mobula__V1__Seal s = MOBULA__V1__SEAL__INIT;

    if (!n->hello || !n->launched || over(n))
        return;
    s.iteration = seal->iteration;
    s.files = seal->files;
    s.n_files = seal->n_files;
    m.body_case = MOBULA__V1__DRIVER_MESSAGE__BODY_SEAL;
    m.seal = &s;
    say(n, &m);
}

int drv_node_leave(struct drv_node *n, const struct drv_leave *leave, int is_left)
{
    Mobula__V1__DriverMessage m = MOBULA__V1__DRIVER_MESSAGE__INIT;
    Mobula__V1__Leave l = MOBULA__V1__LEAVE__INIT;
    char why[40];

    if (!n->hello || !n->launched || over(n))
        return 0;
    snprintf(why, sizeof(why), "node %u has given it up", leave->node);
    l.iteration = leave->iteration;
    l.never = leave->is_dropped;
    l.left = is_left;
    if (leave->is_dropped)
        l.why = why;
    m.body_case = MOBULA__V1__DRIVER_MESSAGE__BODY_LEAVE;
    m.leave = &l;
    say(n, &m);
    return 1;
}

void drv_node_renew(struct drv_node *n)
{
    Mobula__V1__DriverMessage m = MOBULA__V1__DRIVER_MESSAGE__INIT;
    Mobula__V1__Renew renew = MOBULA__V1__RENEW__INIT;

    if (!n->hello || over(n))
        return;
    m.body_case = MOBULA__V1__DRIVER_MESSAGE__BODY_RENEW;
    m.renew = &renew;
    say(n, &m);
}

/* Nothing is heard while the agent is not where it was, so a stream that speaks is right. */
void drv_node_moved(struct drv_node *n, const char *ip, int port)
{
    struct mb_grpc_channel *channel = NULL;
    struct mb_grpc_stream *stream = n->stream;
    char *copy = NULL;
    struct mb_err err = {0};

    if (over(n) || (stream && n->hello) || (n->port == port && strcmp(n->ip, ip) == 0))
        return;
    copy = mb_strdup(ip);
    if (!copy || open_channel(n->driver, ip, port, &channel, &err) != 0) {
        mb_free(copy); /* the next look tries again */
        return;
    }
    fprintf(stderr, "mobula: the agent of node %u (%s:%d) is at %s:%d now\n", n->index, n->ip,
            n->port, ip, port);
    n->stream = NULL;
    if (stream)
        mb_grpc_stream_cancel(stream);
    mb_grpc_channel_destroy(n->channel);
    n->channel = channel;
    mb_free(n->ip);
    n->ip = copy;
    n->port = port;
    uv_timer_stop(&n->redial);
    drv_node_dial(n);
}

void drv_node_declared_dead(struct drv_node *n)
{
    if (over(n) || mb_mono_ms() - n->heard_ms < DEAD_SILENT_MS)
        return;
    fail(n, MB_DRV_NODE_LOST, MB_EUNAVAIL, "the head declared it dead");
    drv_node_reset(n);
}

static void on_saved(struct drv_node *n, int64_t iteration)
{
    struct driver *d = n->driver;

    if (iteration > d->saved_locally)
        d->saved_locally = iteration;
    d->record_dirty = 1;
    drv_event(
        d, &(struct mb_drv_event){.kind = MB_DRV_SAVED, .node = n->index, .iteration = iteration});
}

static void on_progress(struct driver *d, const Mobula__V1__Progress *p)
{
    struct drv_report *r = &d->report;

    r->iteration = p->iteration;
    if (p->iteration > d->attempt_iteration)
        d->attempt_iteration = p->iteration;
    r->train_iters = p->train_iters;
    r->consumed_samples = p->consumed_samples;
    r->loss = p->loss;
    r->tokens_per_s = p->tokens_per_s;
    if (p->validation_loss > 0)
        r->validation_loss = p->validation_loss;
    d->record_dirty = 1;
}

static void on_endpoint(struct drv_node *n, const Mobula__V1__Endpoint *p)
{
    struct driver *d = n->driver;
    char *copy;

    if (p->rank >= drv_world_size(d))
        return;
    copy = mb_strdup(p->endpoint);
    if (!copy) {
        fail(n, MB_DRV_NODE_FAILED, MB_ENOMEM, "out of memory");
        return;
    }
    mb_free(d->endpoints[p->rank]);
    d->endpoints[p->rank] = copy;
    drv_event(d, &(struct mb_drv_event){.kind = MB_DRV_ENDPOINT, .rank = p->rank});
}

static void note_exit(struct driver *d, const Mobula__V1__RankExit *m)
{
    struct drv_exit *x;

    if (m->rank >= drv_world_size(d))
        return;
    x = &d->exits[m->rank];
    x->is_known = 1;
    x->code = m->exit_code;
    x->signal = m->signal;
    snprintf(x->cause, sizeof(x->cause), "%.*s",
             (int)mb_utf8_floor(m->cause, strnlen(m->cause, sizeof(x->cause) - 1)), m->cause);
    d->record_dirty = 1;
}

/* A node checks the files that it fetches: one may have found damage where others need not look.
 * 1: it has; another attempt takes what all can have. */
static int loads_differ(struct drv_node *n, int64_t loaded)
{
    struct driver *d = n->driver;
    char text[256];

    n->loaded = loaded;
    for (uint32_t i = 0; i < d->n_nodes; i++) {
        const struct drv_node *other = &d->nodes[i];
        int64_t less = other->loaded < loaded ? other->loaded : loaded;

        if (other == n || !other->launch_heard || other->loaded == loaded)
            continue;
        d->load_only = less > 0 ? less : 0;
        d->load_only_after = d->committed;
        snprintf(
            text, sizeof(text),
            "node %u found iteration %lld of %.100s whole, node %u iteration %lld: a file that "
            "only one of them reads is damaged",
            other->index, (long long)other->loaded, load_url(d), n->index, (long long)loaded);
        fail(n, MB_DRV_NODE_FAILED, MB_EUNAVAIL, text);
        return 1;
    }
    return 0;
}

static void say_start(const struct driver *d, int64_t loaded)
{
    if (load_url(d)[0] && loaded < 0)
        fprintf(stderr, "mobula: there is no checkpoint in %s: training starts from random\n",
                load_url(d));
    else if (d->attempt > 1 || d->resumes)
        fprintf(stderr, "mobula: attempt %u goes on from iteration %lld%s\n", d->attempt,
                (long long)(loaded > 0 ? loaded : 0),
                goes_on(d) && d->opts->is_worker && drv_words_lack_optimizer(d->opts->argv)
                    ? ", its optimizer anew: --no-save-optim"
                    : "");
}

static void on_launched(struct drv_node *n, const Mobula__V1__Launched *m)
{
    struct driver *d = n->driver;

    if (load_url(d)[0] && !n->launch_heard && loads_differ(n, m->loaded_iteration))
        return;
    if (d->resumes && m->loaded_iteration < 0) {
        fail(n, MB_DRV_NODE_FAILED, MB_ECORRUPT,
             "--resume: what the store has was whole when the run began, and cannot be read now");
        return;
    }

    if (!n->launch_heard && n->index == 0) /* not again after a re-dial */
        say_start(d, m->loaded_iteration);
    if (!d->launched_ms)
        d->launched_ms = mb_mono_ms();
    n->launch_heard = 1;
    drv_event(d, &(struct mb_drv_event){.kind = MB_DRV_LAUNCHED, .node = n->index});
}

static void on_rank_exit(struct drv_node *n, const Mobula__V1__RankExit *m)
{
    note_exit(n->driver, m);
    drv_event(n->driver, &(struct mb_drv_event){.kind = MB_DRV_RANK_EXIT,
                                                .node = n->index,
                                                .rank = m->rank,
                                                .exit_code = m->exit_code,
                                                .signal = m->signal,
                                                .text = m->cause});
}

static void on_log(struct driver *d, const Mobula__V1__LogChunk *m)
{
    if (m->rank < drv_world_size(d))
        drv_output(d, m->rank, m->offset, m->data.data, m->data.len);
}

static void say_lost_logs(const struct driver *d, const Mobula__V1__Ended *m)
{
    for (size_t i = 0; i < m->n_lost_logs; i++)
        fprintf(stderr, "mobula: rank %u of attempt %u: %.1500s\n", m->lost_logs[i]->rank,
                d->attempt, m->lost_logs[i]->text);
}

static void on_message(void *arg, struct mb_grpc_stream *s, const ProtobufCMessage *msg)
{
    struct drv_node *n = arg;
    struct driver *d = n->driver;
    const Mobula__V1__AgentMessage *m = (const Mobula__V1__AgentMessage *)msg;

    if (n->stream != s || d->closing)
        return;
    n->heard_ms = mb_mono_ms();
    switch (m->body_case) {
    case MOBULA__V1__AGENT_MESSAGE__BODY_HELLO_REPLY:
        on_hello_reply(n, m->hello_reply);
        break;
    case MOBULA__V1__AGENT_MESSAGE__BODY_LAUNCHED:
        on_launched(n, m->launched);
        break;
    case MOBULA__V1__AGENT_MESSAGE__BODY_NOTE:
        if (n->index == 0) /* the others do the same */
            fprintf(stderr, "mobula: node 0: %.500s\n", m->note->text);
        break;
    case MOBULA__V1__AGENT_MESSAGE__BODY_ENDPOINT:
        on_endpoint(n, m->endpoint);
        break;
    case MOBULA__V1__AGENT_MESSAGE__BODY_PROGRESS:
        on_progress(d, m->progress);
        break;
    case MOBULA__V1__AGENT_MESSAGE__BODY_LOG:
        on_log(d, m->log);
        break;
    case MOBULA__V1__AGENT_MESSAGE__BODY_RANK_EXIT:
        on_rank_exit(n, m->rank_exit);
        break;
    case MOBULA__V1__AGENT_MESSAGE__BODY_SAVED:
        on_saved(n, m->saved->iteration);
        break;
    case MOBULA__V1__AGENT_MESSAGE__BODY_SEALED:
        drv_seals_add(d, n->index, m->sealed);
        on_saved(n, m->sealed->iteration);
        break;
    case MOBULA__V1__AGENT_MESSAGE__BODY_UPLOAD:
        drv_on_upload(n, m->upload);
        break;
    case MOBULA__V1__AGENT_MESSAGE__BODY_PLAN:
        drv_on_plan(n, m->plan);
        break;
    case MOBULA__V1__AGENT_MESSAGE__BODY_FAILURE:
        fail(n, MB_DRV_NODE_FAILED, m->failure->code, m->failure->text);
        break;
    case MOBULA__V1__AGENT_MESSAGE__BODY_ENDED:
        say_lost_logs(d, m->ended);
        fail(n, MB_DRV_NODE_ENDED, 0, NULL);
        break;
    default:
        break; /* a newer agent may say more; what we do not know does not concern us */
    }
}
