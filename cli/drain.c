/*
 * mobula drain: nodes save and upload what runs on them, and take no new work.
 *
 *  1. The GCS says which nodes there are; a NODE that is none, or several, is refused before any
 *     node is asked. --local asks no GCS: nodes of this machine have said in their node.json where
 *     they listen, and a pod's preStop hook may run when the head is gone already.
 *  2. Every node is asked (mobula.v1.NodeAgent/Drain at its agent). --all passes over nodes that
 * are not mobula's.
 *  3. --wait: all that took the request are asked how far they are until nothing is left on them,
 *     also when another one could not be asked. An agent that is being restarted answers again;
 *     one that is silent for SILENT_MS is taken for gone, and nobody knows what it had saved.
 *  4. The exit status is that of the worst node: 0 only if every one was asked and, with --wait, is
 *     drained with all of it durable.
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>
#include "base/loop.h"
#include "base/address.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/grpc/grpc.h"
#include "base/moment.h"
#include "base/printable.h"
#include "base/str.h"
#include "cli/local.h"
#include "cli/options.h"
#include "gcs/client.h"
#include "gcs/tls.h"
#include "gcs/token.h"
#include "proto/mobula/agent.pb-c.h"

enum {
    ASK_TIMEOUT_MS = 10000,
    LOOK_EVERY_MS = 500,
    SILENT_MS = 15000,
    LATE_MS = 5000, /* after the deadline nodes may still say what was lost */
    PREFIX_MIN = 4
};

static const char DRAIN[] = "/mobula.v1.NodeAgent/Drain";

struct drain_args {
    const char *address, *deadline, *reason, *temp_dir;
    int all, local, wait, json;
};

static const struct mb_option options[] = {
    {"address", 0, "HOST:PORT", MB_OPTION_STRING, offsetof(struct drain_args, address),
     "GCS of the cluster ($RAY_ADDRESS, else 127.0.0.1:6379); --local needs none", 0, 0},
    {"all", 0, NULL, MB_OPTION_FLAG, offsetof(struct drain_args, all), "every node", 0, 0},
    {"local", 0, NULL, MB_OPTION_FLAG, offsetof(struct drain_args, local),
     "the nodes that were started on this machine (a pod's preStop hook)", 0, 0},
    {"temp-dir", 0, "DIR", MB_OPTION_STRING, offsetof(struct drain_args, temp_dir),
     "with --local: where they were started (MOBULA_TEMP_DIR, /tmp/mobula)", 0, 0},
    {"wait", 0, NULL, MB_OPTION_FLAG, offsetof(struct drain_args, wait),
     "until all that was saved is durable and nothing runs there", 0, 0},
    {"deadline", 0, "TIME", MB_OPTION_STRING, offsetof(struct drain_args, deadline),
     "when the nodes will be gone: 90s, 2026-11-22T10:00:00Z (as long as it takes)", 0, 0},
    {"reason", 0, "TEXT", MB_OPTION_STRING, offsetof(struct drain_args, reason),
     "for the nodes' logs", 0, 0},
    {"json", 0, NULL, MB_OPTION_FLAG, offsetof(struct drain_args, json), "print JSON, errors too",
     0, 0},
    {0},
};

enum state { ASKING, DRAINING, DRAINED, FAILED };

struct drain;

struct target {
    struct drain *owner;
    char id[2 * MB_NODE_ID_BYTES + 1];
    char *name, *ip;
    int port;
    struct mb_grpc_channel *channel;
    enum state state;
    int is_foreign; /* not mobula's */
    int in_flight;
    uint64_t heard_ms, next_ms;
    struct mb_err err;
    json_t *gangs, *lost; /* of the newest answer */
};

struct drain {
    const struct drain_args *args;
    const char *address;
    char *token;
    uint64_t deadline_unix_ms;
    char *const *words;
    int n_words;
    json_t *local; /* node.json of the nodes of this machine, with --local */
    uv_loop_t loop;
    struct mb_grpc *grpc;
    struct mb_gcs *gcs;
    uv_timer_t timer;
    struct target *targets;
    size_t n;
    int has_nodes, is_done;
    struct mb_err err;
};

/* ---- which nodes ---- */

static int fits_word(const char *word, const char *id, const struct mb_gcs_node *node)
{
    return (strlen(word) >= PREFIX_MIN && mb_starts_with(id, word)) ||
           strcmp(word, node->node_name) == 0 || strcmp(word, node->ip) == 0;
}

static int is_wanted(const struct drain *d, const char *id, const struct mb_gcs_node *node)
{
    if (node->is_dead)
        return 0;
    if (d->args->all)
        return 1;
    for (int i = 0; i < d->n_words; i++)
        if (fits_word(d->words[i], id, node))
            return 1;
    return 0;
}

static int check_words(const struct drain *d, const struct mb_gcs_node *nodes, size_t n,
                       struct mb_err *err)
{
    char id[2 * MB_NODE_ID_BYTES + 1];

    for (int i = 0; i < d->n_words; i++) {
        size_t found = 0;

        for (size_t k = 0; k < n; k++)
            found +=
                !nodes[k].is_dead &&
                fits_word(d->words[i], mb_hex(nodes[k].node_id, MB_NODE_ID_BYTES, id), &nodes[k]);
        if (found == 0)
            return mb_err_set(err, MB_ENOENT, "drain: no live node is called %s (id, name or IP)",
                              d->words[i]);
        if (found > 1)
            return mb_err_set(err, MB_EINVAL, "drain: %zu nodes are called %s; give the node's id",
                              found, d->words[i]);
    }
    return 0;
}

static int add_target(struct drain *d, const char *id, const char *name, const char *ip, int port,
                      struct mb_err *err)
{
    const struct mb_grpc_channel_opts opts = {.token = d->token};
    struct target *t = &d->targets[d->n];
    char address[300];

    *t = (struct target){.owner = d,
                         .name = mb_strdup(name),
                         .ip = mb_strdup(ip),
                         .port = port,
                         .heard_ms = mb_mono_ms(),
                         .gangs = json_array(),
                         .lost = json_array()};
    snprintf(t->id, sizeof(t->id), "%s", id);
    d->n++;
    if (t->name == NULL || t->ip == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    snprintf(address, sizeof(address), strchr(t->ip, ':') ? "[%s]:%d" : "%s:%d", t->ip, t->port);
    return mb_grpc_channel_create(d->grpc, address, &opts, &t->channel, err);
}

/* ---- asking ---- */

static void fail(struct target *t, int code, const char *text)
{
    t->state = FAILED;
    mb_err_set(&t->err, code, "%s", text);
}

static void take_reply(struct target *t, const Mobula__V1__DrainReply *r)
{
    json_array_clear(t->gangs);
    json_array_clear(t->lost);
    for (size_t i = 0; i < r->n_gangs; i++) {
        const Mobula__V1__DrainGang *g = r->gangs[i];

        json_array_append_new(
            t->gangs,
            json_pack("{s:s, s:i, s:s, s:i, s:I, s:I, s:I, s:I}", "job_id", g->job_id, "attempt",
                      (int)g->attempt, "state", g->state, "ranks", (int)g->ranks, "saved_iteration",
                      (json_int_t)g->saved_iteration, "durable_iteration",
                      (json_int_t)g->durable_iteration, "done_bytes", (json_int_t)g->done_bytes,
                      "total_bytes", (json_int_t)g->total_bytes));
    }
    for (size_t i = 0; i < r->n_lost; i++)
        json_array_append_new(t->lost, json_string(r->lost[i]));
    t->state = r->n_gangs > 0 ? DRAINING : DRAINED;
    if (t->state == DRAINED && r->n_lost > 0)
        fail(t, MB_EIO, r->lost[0]);
}

static void on_reply(void *arg, int status, const char *detail, const ProtobufCMessage *reply)
{
    struct target *t = arg;
    char text[400];

    t->in_flight = 0;
    if (t->owner->is_done)
        return;
    if (status == MB_GRPC_OK) {
        t->heard_ms = mb_mono_ms();
        take_reply(t, (const void *)reply);
    } else if (status == MB_GRPC_UNIMPLEMENTED) {
        t->is_foreign = 1;
        fail(t, MB_EUNSUPPORTED, "it is no mobula node, or one that cannot be drained");
    } else if ((status != MB_GRPC_UNAVAILABLE && status != MB_GRPC_DEADLINE_EXCEEDED) ||
               !t->owner->args->wait || mb_mono_ms() - t->heard_ms >= SILENT_MS) {
        snprintf(text, sizeof(text), "%s: %s%s", mb_grpc_status_name(status), detail,
                 t->state == DRAINING ? "; it is not known what it had saved" : "");
        fail(t, mb_grpc_status_code(status), text);
    }
}

static void ask(struct target *t)
{
    Mobula__V1__DrainRequest q = MOBULA__V1__DRAIN_REQUEST__INIT;
    const struct drain *d = t->owner;
    struct mb_err err = {0};

    t->next_ms = mb_mono_ms() + LOOK_EVERY_MS;
    q.look = t->state == DRAINING;
    q.deadline_unix_ms = d->deadline_unix_ms;
    q.reason = (char *)(uintptr_t)(d->args->reason ? d->args->reason : "mobula drain");
    t->in_flight = mb_grpc_unary(t->channel, DRAIN, &q.base, &mobula__v1__drain_reply__descriptor,
                                 ASK_TIMEOUT_MS, on_reply, t, NULL, &err) == 0;
    if (!t->in_flight)
        fail(t, err.code, err.text);
}

static int is_settled(const struct target *t)
{
    return t->state == DRAINED || t->state == FAILED ||
           (t->state == DRAINING && !t->owner->args->wait);
}

static void fail_late(struct target *t)
{
    const char *lost = json_string_value(json_array_get(t->lost, 0));

    if (lost != NULL)
        fail(t, MB_EIO, lost);
    else
        fail(t, MB_ETIMEOUT, "the deadline is over, and it is not drained");
}

static void on_timer(uv_timer_t *timer)
{
    struct drain *d = timer->data;
    int is_late = d->deadline_unix_ms != 0 && mb_unix_ms() > d->deadline_unix_ms + LATE_MS;
    size_t settled = 0;

    if (!d->has_nodes)
        return;
    for (size_t i = 0; i < d->n; i++) {
        struct target *t = &d->targets[i];

        if (!is_settled(t) && is_late)
            fail_late(t);
        settled += (size_t)is_settled(t);
        if (!is_settled(t) && !t->in_flight && mb_mono_ms() >= t->next_ms)
            ask(t);
    }
    d->is_done = settled == d->n;
}

static void on_nodes(void *arg, const struct mb_err *err, const struct mb_gcs_node *nodes, size_t n)
{
    struct drain *d = arg;
    char id[2 * MB_NODE_ID_BYTES + 1];
    int rc = err->code;

    if (rc != 0)
        d->err = *err;
    else
        rc = check_words(d, nodes, n, &d->err);
    d->targets = mb_calloc(n > 0 ? n : 1, sizeof(*d->targets));
    if (rc == 0 && d->targets == NULL)
        rc = mb_err_set(&d->err, MB_ENOMEM, "out of memory");
    for (size_t i = 0; rc == 0 && i < n; i++)
        if (is_wanted(d, mb_hex(nodes[i].node_id, MB_NODE_ID_BYTES, id), &nodes[i]))
            rc = add_target(d, id, nodes[i].node_name, nodes[i].ip, nodes[i].port, &d->err);
    if (rc == 0 && d->n == 0)
        rc = mb_err_set(&d->err, MB_ENOENT, "drain: no node of the cluster at %s is meant",
                        d->address);
    d->is_done = rc != 0;
    d->has_nodes = rc == 0;
}

static void on_gcs(void *arg, struct mb_gcs *c, enum mb_gcs_event event, const struct mb_err *err)
{
    struct drain *d = arg;

    if (d->is_done || d->has_nodes)
        return;
    if (event == MB_GCS_CONNECTED) {
        if (mb_gcs_nodes(c, ASK_TIMEOUT_MS, on_nodes, d, NULL, &d->err) < 0)
            d->is_done = 1;
    } else if (event == MB_GCS_CONNECT_FAILED) {
        d->err = *err;
        d->is_done = 1;
    }
}

/* ---- the end ---- */

static const char *state_name(const struct target *t)
{
    static const char *const names[] = {"asking", "draining", "drained", "failed"};

    return t->is_foreign ? "foreign" : names[t->state];
}

static int worst_status(const struct drain *d)
{
    int code = 0;

    for (size_t i = 0; i < d->n; i++) {
        const struct target *t = &d->targets[i];

        if (t->state != FAILED || (t->is_foreign && d->args->all))
            continue;
        if (code == 0 || t->err.code == MB_EIO) /* what is lost is the worst */
            code = t->err.code;
    }
    return code == 0 ? 0 : mb_exit_status(code);
}

static void print_json(const struct drain *d, int status)
{
    json_t *list = json_array(), *o;

    for (size_t i = 0; i < d->n; i++) {
        const struct target *t = &d->targets[i];

        json_array_append_new(list,
                              json_pack("{s:s, s:s, s:s, s:s, s:O, s:O, s:s}", "node_id", t->id,
                                        "node_name", t->name, "ip", t->ip, "state", state_name(t),
                                        "gangs", t->gangs, "lost", t->lost, "error", t->err.text));
    }
    o = json_pack("{s:b, s:o}", "ok", status == 0, "nodes", list);
    mb_printable_json(o, JSON_INDENT(2), stdout);
    putchar('\n');
    json_decref(o);
}

static void print_text(const struct mb_cli *cli, const struct drain *d)
{
    size_t k;
    json_t *line;

    for (size_t i = 0; i < d->n; i++) {
        const struct target *t = &d->targets[i];

        if (t->is_foreign && d->args->all)
            continue;
        if (t->state == FAILED)
            fprintf(stderr, "%s: node %.12s %s (%s): %s\n", cli->program, t->id, t->name, t->ip,
                    t->err.text);
        else
            printf("node %.12s %s (%s): %s", t->id, t->name, t->ip, state_name(t));
        if (t->state == DRAINING)
            printf(", %zu gangs end", json_array_size(t->gangs));
        if (t->state != FAILED)
            putchar('\n');
        json_array_foreach(t->lost, k, line) if (k > 0)
            fprintf(stderr, "%s: node %.12s %s: %s\n", cli->program, t->id, t->name,
                    json_string_value(line));
    }
}

/* ---- life ---- */

static void on_closed(void *arg)
{
    *(int *)arg = 1;
}

static void close_all(struct drain *d)
{
    int gcs_closed = 0, stopped = 0;

    d->is_done = 1;
    if (d->gcs) {
        mb_gcs_close(d->gcs, on_closed, &gcs_closed);
        while (!gcs_closed)
            mb_loop_turn(&d->loop);
    }
    for (size_t i = 0; i < d->n; i++)
        mb_grpc_channel_destroy(d->targets[i].channel);
    if (d->grpc) {
        mb_grpc_stop(d->grpc, on_closed, &stopped);
        while (!stopped)
            mb_loop_turn(&d->loop);
        mb_grpc_destroy(d->grpc);
    }
    uv_close((uv_handle_t *)&d->timer, NULL);
    uv_run(&d->loop, UV_RUN_DEFAULT);
    uv_loop_close(&d->loop);
}

static void free_all(struct drain *d)
{
    for (size_t i = 0; i < d->n; i++) {
        mb_free(d->targets[i].name);
        mb_free(d->targets[i].ip);
        json_decref(d->targets[i].gangs);
        json_decref(d->targets[i].lost);
    }
    mb_free(d->targets);
    mb_free(d->token);
    json_decref(d->local);
}

static int find_local(struct drain *d, struct mb_err *err)
{
    const char *temp_dir = mb_local_temp_dir(d->args->temp_dir);
    struct mb_local_node *nodes;
    size_t n;
    int rc = mb_local_nodes(temp_dir, &nodes, &n, err);

    if (rc != 0)
        return rc;
    d->local = json_array();
    for (size_t i = 0; i < n; i++) {
        json_t *node = NULL;

        if (mb_local_read_node(nodes[i].dir, &node, NULL) == 1)
            json_array_append_new(d->local, node);
    }
    mb_local_nodes_free(nodes, n);
    if (json_array_size(d->local) == 0)
        return mb_err_set(err, MB_ENOENT, "drain: no node runs below %s", temp_dir);
    return 0;
}

static int add_local(struct drain *d, struct mb_err *err)
{
    size_t i;
    json_t *o;

    d->targets = mb_calloc(json_array_size(d->local), sizeof(*d->targets));
    if (d->targets == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    json_array_foreach(d->local, i, o)
    {
        const char *id, *name, *ip;
        int port, rc;

        if (json_unpack(o, "{s:s, s:s, s:s, s:i}", "node_id", &id, "node_name", &name, "node_ip",
                        &ip, "grpc_port", &port) != 0)
            return mb_err_set(err, MB_ECORRUPT,
                              "drain: a node.json of this machine does not say "
                              "where its agent listens");
        rc = add_target(d, id, name, ip, port, err);
        if (rc != 0)
            return rc;
    }
    d->has_nodes = 1;
    return 0;
}

static int read_args(struct drain *d, struct mb_err *err)
{
    const struct drain_args *a = d->args;
    uint64_t now = mb_unix_ms();
    int rc = 0;

    d->address = a->address ? a->address : getenv("RAY_ADDRESS");
    if (!d->address || !d->address[0] || strcmp(d->address, "auto") == 0)
        d->address = "127.0.0.1:6379";
    rc = mb_address_check_heads("drain: --address", d->address, err);
    if (rc == 0 && (a->all != 0) + (a->local != 0) + (d->n_words > 0) != 1)
        rc = mb_err_set(err, MB_EINVAL, "drain: which nodes? NODE..., --all or --local");
    if (rc == 0 && a->deadline)
        rc = mb_moment_parse(a->deadline, now, "--deadline", &d->deadline_unix_ms, err);
    if (rc == 0 && a->deadline && d->deadline_unix_ms <= now)
        rc = mb_err_set(err, MB_ETIMEOUT, "drain: the deadline %s is over already", a->deadline);
    if (rc == 0 && a->local)
        rc = find_local(d, err);
    return rc != 0 ? rc : mb_token_load(NULL, &d->token, err);
}

static int drain(struct drain *d, struct mb_err *err)
{
    const struct mb_gcs_opts opts = {
        .address = d->address, .token = d->token, .connect_timeout_ms = ASK_TIMEOUT_MS};

    if (uv_loop_init(&d->loop) != 0)
        return mb_err_set(err, MB_ENOMEM, "no event loop");
    uv_timer_init(&d->loop, &d->timer);
    d->timer.data = d;
    if (mb_gcs_grpc_create(&d->loop, &d->grpc, &d->err) == 0 &&
        (d->args->local
             ? add_local(d, &d->err) == 0
             : mb_gcs_create(&d->loop, d->grpc, &opts, on_gcs, d, &d->gcs, &d->err) == 0 &&
                   mb_gcs_connect(d->gcs, &d->err) == 0)) {
        uv_timer_start(&d->timer, on_timer, 0, LOOK_EVERY_MS / 5);
        while (!d->is_done)
            mb_loop_turn(&d->loop);
    }
    close_all(d);
    return d->err.code != 0 ? mb_err_set(err, d->err.code, "%s", d->err.text) : 0;
}

static int run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct drain_args args = {0};
    struct drain d = {.args = &args};
    struct mb_err err = {0};
    int status;
    int rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &d.n_words, &err);

    if (rc == 1)
        return 0;
    d.words = argv + 1;
    if (rc == 0)
        rc = read_args(&d, &err);
    if (rc == 0)
        rc = drain(&d, &err);
    status = rc != 0 ? mb_cli_fail(cli, &err) : worst_status(&d);
    if (rc == 0 && args.json)
        print_json(&d, status);
    else if (rc == 0)
        print_text(cli, &d);
    free_all(&d);
    return status;
}

const struct mb_verb mb_verb_drain = {
    .name = "drain",
    .summary = "save and upload what runs on nodes, and give them no new work",
    .synopsis = "NODE...|--all|--local [--wait] [--deadline TIME]",
    .examples = "  mobula drain --wait 3f9c2a node-7      # ids, names or IPs\n"
                "  mobula drain --local --wait --deadline 10m   # a pod's preStop hook\n",
    .options = options,
    .run = run,
};
