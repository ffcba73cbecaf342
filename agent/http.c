/*
 * Serving the node's state.
 *
 *  1. The wanted port is taken: any free one, said in the log. Only an address that cannot be bound
 *     at all is an error.
 *  2. Health is "success" with 200 while the node is ALIVE in its cluster, else 503 with the
 * reason; both health paths need no token, since Kubernetes probes send none. The answer bears the
 * node's id: it is the head's second way to see that this node lives (gcs/node_checks.c).
 */
#include "agent/http.h"

#include <dirent.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "agent/gpu_figures.h"
#include "agent/gpu_keeper.h"
#include "agent/metrics.h"
#include "base/alloc.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"

static void on_health(void *arg, struct mb_http_req *req)
{
    const struct mb_agent_http *h = arg;

    mb_http_reply_header(req, "X-Mobula-Node-Id", mb_node_id_hex(h->node));
    if (mb_node_is_alive(h->node))
        mb_http_reply_text(req, 200, "success");
    else
        mb_http_reply_text(req, 503, "the node is not registered with its head");
}

/* ---- metrics ---- */

static double open_fds(void)
{
    DIR *dir = opendir("/proc/self/fd");
    double n = -3; /* ".", ".." and the directory itself */

    if (dir == NULL)
        return 0;
    while (readdir(dir) != NULL)
        n++;
    closedir(dir);
    return n;
}

static double rss_bytes(void)
{
    unsigned long long size = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "re");

    if (f == NULL)
        return 0;
    if (fscanf(f, "%llu %llu", &size, &resident) != 2)
        resident = 0;
    fclose(f);
    return (double)resident * (double)sysconf(_SC_PAGESIZE);
}

static void put_resources(const struct mb_agent_http *h, struct mb_buf *out)
{
    mb_metric_family(out, "mobula_resource_total", MB_METRIC_GAUGE, "Units this node has.");
    for (size_t k = 0; k < mb_ledger_kinds(h->ledger); k++) {
        const struct mb_resource *r = mb_ledger_total(h->ledger, k);
        const char *labels[] = {"resource", r->name, NULL};

        mb_metric_sample(out, "mobula_resource_total", labels, r->units);
    }
    mb_metric_family(out, "mobula_resource_available", MB_METRIC_GAUGE,
                     "Units no placement group holds.");
    for (size_t k = 0; k < mb_ledger_kinds(h->ledger); k++) {
        const char *labels[] = {"resource", mb_ledger_total(h->ledger, k)->name, NULL};

        mb_metric_sample(out, "mobula_resource_available", labels,
                         mb_ledger_available(h->ledger, k));
    }
}

static void put_gangs(const struct mb_agent_http *h, struct mb_buf *out)
{
    unsigned by_state[MB_GANG_N_STATES] = {0};
    unsigned ranks = 0;

    for (size_t i = 0; i < mb_gangs_count(h->gangs); i++) {
        struct mb_gang_info info;

        mb_gangs_info(h->gangs, i, &info);
        by_state[info.state]++;
        ranks += info.ranks_running;
    }
    mb_metric_family(out, "mobula_gangs", MB_METRIC_GAUGE, "Gang attempts on this node by state.");
    for (int s = 0; s < MB_GANG_N_STATES; s++) {
        const char *labels[] = {"state", mb_gang_state_name((enum mb_gang_state)s), NULL};

        mb_metric_sample(out, "mobula_gangs", labels, by_state[s]);
    }
    mb_metric_family(out, "mobula_ranks", MB_METRIC_GAUGE, "Rank processes running on this node.");
    mb_metric_sample(out, "mobula_ranks", NULL, ranks);
    mb_metric_family(out, "mobula_rank_failures_total", MB_METRIC_COUNTER,
                     "Gangs that ended because a rank of this node failed.");
    mb_metric_sample(out, "mobula_rank_failures_total", NULL, mb_gangs_rank_failures(h->gangs));
    mb_metric_family(
        out, "mobula_upload_bytes_total", MB_METRIC_COUNTER,
        "Checkpoint bytes that reached the store; parts found there after a restart count too.");
    mb_metric_sample(out, "mobula_upload_bytes_total", NULL, (double)mb_gangs_sent_bytes(h->gangs));
}

/* ---- what a gang keeps: a sample for each attempt that is here ---- */

static double saved_of(const struct mb_gang_info *g)
{
    return (double)g->saved;
}

static double durable_of(const struct mb_gang_info *g)
{
    return (double)g->durable;
}

static double lag_of(const struct mb_gang_info *g)
{
    return (double)(g->pending_total_bytes - g->pending_done_bytes);
}

static double rate_of(const struct mb_gang_info *g)
{
    return (double)g->rate_bytes_per_s;
}

static double parts_of(const struct mb_gang_info *g)
{
    return (double)g->parts;
}

static double retries_of(const struct mb_gang_info *g)
{
    return (double)g->retries;
}

static double saves_of(const struct mb_gang_info *g)
{
    return (double)g->n_saves;
}

static double stall_of(const struct mb_gang_info *g)
{
    return (double)g->stall_ms / 1000;
}

static double save_seconds_of(const struct mb_gang_info *g)
{
    return (double)g->save_ms / 1000;
}

/* Seconds that are left; less than 0 when it is over, and +Inf without one. */
static double deadline_of(const struct mb_gang_info *g)
{
    return g->deadline.unix_ms == 0 ? INFINITY
                                    : ((double)g->deadline.unix_ms - (double)mb_unix_ms()) / 1000;
}

static const struct {
    const char *name;
    enum mb_metric_type type;
    const char *help;
    double (*value)(const struct mb_gang_info *g);
} kept[] = {
    {"mobula_saved_iteration", MB_METRIC_GAUGE,
     "Newest iteration that is on this node's disk; -1: none.", saved_of},
    {"mobula_durable_iteration", MB_METRIC_GAUGE,
     "Newest iteration that this node knows to be durable in the store; -1: none.", durable_of},
    {"mobula_upload_lag_bytes", MB_METRIC_GAUGE,
     "Bytes on this node that were saved and are not in the store yet.", lag_of},
    {"mobula_upload_rate_bytes_per_second", MB_METRIC_GAUGE,
     "Measured over acknowledged bytes, never overestimated; 0: not known.", rate_of},
    {"mobula_upload_parts_total", MB_METRIC_COUNTER,
     "Parts of checkpoint files that the store acknowledged.", parts_of},
    {"mobula_upload_retries_total", MB_METRIC_COUNTER,
     "Requests to the store that were sent again.", retries_of},
    {"mobula_saves_total", MB_METRIC_COUNTER, "Saves of the first rank on this node.", saves_of},
    {"mobula_save_stall_seconds_total", MB_METRIC_COUNTER,
     "How long its training stood still for them.", stall_of},
    {"mobula_save_seconds", MB_METRIC_GAUGE,
     "From an iteration's end until its save is on the disks of this node; 0: not known.",
     save_seconds_of},
    {"mobula_deadline_seconds", MB_METRIC_GAUGE,
     "Until the earliest deadline of the gang; negative: over.", deadline_of},
};

static void put_kept(const struct mb_agent_http *h, struct mb_buf *out)
{
    for (size_t k = 0; k < sizeof(kept) / sizeof(kept[0]); k++) {
        mb_metric_family(out, kept[k].name, kept[k].type, kept[k].help);
        for (size_t i = 0; i < mb_gangs_count(h->gangs); i++) {
            struct mb_gang_info info;
            char attempt[16];

            mb_gangs_info(h->gangs, i, &info);
            snprintf(attempt, sizeof(attempt), "%u", info.attempt);
            const char *labels[] = {"job_id",  info.job_id,
                                    "attempt", attempt,
                                    "source",  mb_deadline_source_name(info.deadline.source),
                                    NULL};
            double value = kept[k].value(&info);

            if (kept[k].value != deadline_of)
                labels[4] = NULL;
            if (!isinf(value))
                mb_metric_sample(out, kept[k].name, labels, value);
        }
    }
    mb_metric_family(out, "mobula_node_draining", MB_METRIC_GAUGE,
                     "1 while this node takes no new work.");
    mb_metric_sample(out, "mobula_node_draining", NULL, mb_node_is_draining(h->node));
}

/* Of agent and, on its node, head: they share the runtime. */
static void put_grpc(const struct mb_agent_http *h, struct mb_buf *out)
{
    static const char *const ok[] = {"result", "ok", NULL}, *const failed[] = {"result", "failed",
                                                                               NULL};
    static const char *const in[] = {"direction", "in", NULL}, *const sent[] = {"direction", "out",
                                                                                NULL};
    struct mb_grpc_counts n;

    mb_grpc_count(h->grpc, &n);
    mb_metric_family(out, "mobula_grpc_calls_total", MB_METRIC_COUNTER,
                     "Unary calls that this process made and that ended.");
    mb_metric_sample(out, "mobula_grpc_calls_total", ok, (double)(n.calls - n.calls_failed));
    mb_metric_sample(out, "mobula_grpc_calls_total", failed, (double)n.calls_failed);
    mb_metric_family(out, "mobula_grpc_requests_total", MB_METRIC_COUNTER,
                     "Unary requests that came.");
    mb_metric_sample(out, "mobula_grpc_requests_total", NULL, (double)n.requests);
    mb_metric_family(out, "mobula_grpc_stream_messages_total", MB_METRIC_COUNTER,
                     "Messages of streams.");
    mb_metric_sample(out, "mobula_grpc_stream_messages_total", in, (double)n.messages_in);
    mb_metric_sample(out, "mobula_grpc_stream_messages_total", sent, (double)n.messages_out);
}

static void on_metrics(void *arg, struct mb_http_req *req)
{
    const struct mb_agent_http *h = arg;
    const struct mb_gpu_usage *gpus;
    const char *info[] = {"version", MOBULA_VERSION, "node_id", mb_node_id_hex(h->node), NULL};
    const unsigned n_gpus = mb_gpu_figures_latest(h->figures, &gpus);
    struct mb_buf out = {0};

    mb_metric_family(&out, "mobula_node_info", MB_METRIC_GAUGE, "This node.");
    mb_metric_sample(&out, "mobula_node_info", info, 1);
    mb_metric_family(&out, "mobula_node_up", MB_METRIC_GAUGE, "1 while registered as ALIVE.");
    mb_metric_sample(&out, "mobula_node_up", NULL, mb_node_is_alive(h->node));
    put_resources(h, &out);
    put_gangs(h, &out);
    put_kept(h, &out);
    mb_gpu_usage_metrics(gpus, n_gpus, &out);
    put_grpc(h, &out);
    mb_metric_family(&out, "process_resident_memory_bytes", MB_METRIC_GAUGE,
                     "Resident memory of the agent.");
    mb_metric_sample(&out, "process_resident_memory_bytes", NULL, rss_bytes());
    mb_metric_family(&out, "process_open_fds", MB_METRIC_GAUGE, "Open files of the agent.");
    mb_metric_sample(&out, "process_open_fds", NULL, open_fds());
    mb_http_reply(req, 200, "text/plain; version=0.0.4; charset=utf-8", out.data, out.len);
    mb_buf_close(&out);
}

/* ---- the node as JSON ---- */

static json_t *gangs_json(const struct mb_agent_http *h)
{
    json_t *list = json_array();

    for (size_t i = 0; i < mb_gangs_count(h->gangs); i++) {
        struct mb_gang_info info;
        char pg[2 * MB_PG_ID_BYTES + 1];

        mb_gangs_info(h->gangs, i, &info);
        json_array_append_new(list,
                              json_pack("{s:s, s:i, s:s, s:s, s:i, s:i, s:I}", "placement_group_id",
                                        mb_hex(info.pg->bytes, sizeof(info.pg->bytes), pg),
                                        "attempt", (int)info.attempt, "job_id", info.job_id,
                                        "state", mb_gang_state_name(info.state), "ranks",
                                        (int)info.ranks, "ranks_running", (int)info.ranks_running,
                                        "iteration", (json_int_t)info.iteration));
    }
    return list;
}

static json_t *bundles_json(const struct mb_agent_http *h)
{
    char *text = mb_ledger_dump(h->ledger);
    json_t *root = text != NULL ? json_loads(text, 0, NULL) : NULL;
    json_t *list = json_incref(json_object_get(root, "bundles"));

    mb_free(text);
    json_decref(root);
    return list != NULL ? list : json_array();
}

static void on_node(void *arg, struct mb_http_req *req)
{
    const struct mb_agent_http *h = arg;
    json_t *total = json_object(), *available = json_object();
    const struct mb_gpu_usage *gpus;
    const unsigned n_gpus = mb_gpu_figures_latest(h->figures, &gpus);

    for (size_t k = 0; k < mb_ledger_kinds(h->ledger); k++) {
        const struct mb_resource *r = mb_ledger_total(h->ledger, k);

        json_object_set_new(total, r->name, json_integer(r->units));
        json_object_set_new(available, r->name, json_integer(mb_ledger_available(h->ledger, k)));
    }
    mb_http_reply_json(
        req, 200,
        json_pack("{s:s, s:s, s:s, s:s, s:s, s:b, s:o, s:o, s:o, s:o, s:o, s:o}", "node_id",
                  mb_node_id_hex(h->node), "node_name", h->node_name, "ip", h->ip, "version",
                  MOBULA_VERSION, "state", mb_node_is_alive(h->node) ? "ALIVE" : "CONNECTING",
                  "draining", mb_node_is_draining(h->node), "resources_total", total,
                  "resources_available", available, "bundles", bundles_json(h), "gangs",
                  gangs_json(h), "gpu_quarantine", mb_gpu_keeper_json(h->gpu_keeper), "gpus",
                  mb_gpu_usage_json(gpus, n_gpus)));
}

static const struct mb_http_route routes[] = {
    {"GET", "/api/healthz", on_health, MB_HTTP_PUBLIC},
    {"GET", "/api/local_raylet_healthz", on_health, MB_HTTP_PUBLIC},
    {"GET", "/metrics", on_metrics, 0},
    {"GET", "/api/mobula/node", on_node, 0},
};
static const struct mb_http_route metrics_routes[] = {{"GET", "/metrics", on_metrics, 0}};

/* Ray's agents take jobs on every node; ours are the head's matter. */
static void on_job_agent(void *arg, struct mb_http_req *req)
{
    (void)arg;
    mb_http_reply_text(
        req, 503,
        "jobs are not served by this node: ask the head, at its dashboard port or at "
        "the agent port of its node");
}

static const struct mb_http_route elsewhere[] = {
    {"POST", "/api/job_agent/jobs/", on_job_agent, 0},
    {"DELETE", "/api/job_agent/jobs/{id}", on_job_agent, 0},
    {"POST", "/api/job_agent/jobs/{id}/stop", on_job_agent, 0},
    {"GET", "/api/job_agent/jobs/{id}/logs", on_job_agent, 0},
    {"GET", "/api/job_agent/jobs/{id}/logs/tail", on_job_agent, 0},
};

static struct mb_http_server_opts options_of(const struct mb_access *access, int port)
{
    return (struct mb_http_server_opts){.bind_addr = access->http_addr,
                                        .is_local_too = mb_access_is_local_too(access),
                                        .port = port,
                                        .token = access->token.text,
                                        .browser_guard_status = 403};
}

static int listen_on(uv_loop_t *loop, struct mb_agent_http *h, const struct mb_access *access,
                     int port, struct mb_err *err)
{
    struct mb_http_server_opts opts = options_of(access, port);
    int rc = mb_http_server_create(loop, &opts, &h->server, err);

    if (rc != MB_OK)
        return rc;
    rc = mb_http_server_add(h->server, routes, sizeof(routes) / sizeof(routes[0]), h, err);
    if (rc == MB_OK && h->head != NULL)
        rc = mb_head_serve_job_agent(h->head, h->server, err);
    else if (rc == MB_OK)
        rc = mb_http_server_add(h->server, elsewhere, sizeof(elsewhere) / sizeof(elsewhere[0]), h,
                                err);
    if (rc == MB_OK)
        rc = mb_http_server_listen(h->server, &h->port, err);
    if (rc != MB_OK) {
        mb_http_server_destroy(h->server);
        h->server = NULL;
    }
    return rc;
}

int mb_agent_http_start(uv_loop_t *loop, struct mb_agent_http *h, const struct mb_access *access,
                        int port, int former_port, struct mb_err *err)
{
    int wanted = port > 0          ? port
                 : former_port > 0 ? former_port
                 : port == 0       ? 0
                                   : MB_AGENT_HTTP_PORT;
    int rc = listen_on(loop, h, access, wanted, err);

    if (rc == MB_EEXIST && port <= 0) {
        rc = listen_on(loop, h, access, 0, err);
        if (rc == MB_OK)
            mb_info("http", "the usual port is taken, using another port=%d", h->port);
    }
    return rc;
}

int mb_agent_http_start_metrics(uv_loop_t *loop, struct mb_agent_http *h,
                                const struct mb_access *access, int port, struct mb_err *err)
{
    struct mb_http_server_opts opts = options_of(access, port);
    int rc = mb_http_server_create(loop, &opts, &h->metrics_server, err);

    if (rc != MB_OK)
        return rc;
    rc = mb_http_server_add(h->metrics_server, metrics_routes,
                            sizeof(metrics_routes) / sizeof(metrics_routes[0]), h, err);
    if (rc == MB_OK)
        rc = mb_http_server_listen(h->metrics_server, &port, err);
    if (rc != MB_OK) {
        mb_http_server_destroy(h->metrics_server);
        h->metrics_server = NULL;
    }
    if (rc == MB_EEXIST) {
        mb_warn(
            "http",
            "the port of --metrics-export-port is taken: /metrics is served at port=%d only: %s",
            h->port, err->text);
        return MB_OK;
    }
    if (rc == MB_OK)
        mb_info("http", "metrics also at port=%d", port);
    return rc;
}
