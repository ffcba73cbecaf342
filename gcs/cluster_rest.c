/*
 * The rest of the head's HTTP: version, health, what Ray's state CLI and dashboard clients ask
 * about nodes and jobs, and /api/mobula/status, the one answer that `mobula status` needs.
 */
#include <string.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/http/guard.h"
#include "base/str.h"
#include "gcs/services.h"

static void version(void *arg, struct mb_http_req *req)
{
    struct mb_head *h = arg;

    mb_http_reply_json(req, 200,
                       json_pack("{s:s, s:s, s:s, s:s}", "version", "4", "ray_version",
                                 h->ray_version, "ray_commit", h->ray_commit, "session_name",
                                 h->session_name));
}

static void authentication_mode(void *arg, struct mb_http_req *req)
{
    struct mb_head *h = arg;

    mb_http_reply_json(req, 200,
                       json_pack("{s:s}", "authentication_mode", h->token ? "token" : "disabled"));
}

static const char *authorization(const void *req, const char *name)
{
    return strcmp(name, "Authorization") == 0 ? mb_http_req_header(req, name) : NULL;
}

/* A browser turns the token of its Authorization header into a cookie; nothing else counts here,
 * so the route is public and looks for itself. */
static void authenticate(void *arg, struct mb_http_req *req)
{
    enum { COOKIE_MAX_AGE_S = 30 * 24 * 3600 };
    struct mb_head *h = arg;
    struct mb_http_verdict verdict = {0};
    char *cookie;

    if (!h->token) {
        mb_http_reply_text(req, 401, "Unauthorized: Token authentication is not enabled");
        return;
    }
    mb_http_guard_token(h->token, authorization, req, &verdict);
    if (verdict.status != 0) {
        mb_http_reply_text(req, verdict.status, "%s", verdict.text);
        return;
    }
    cookie = mb_asprintf("ray-authentication-token=%s; HttpOnly; Max-Age=%d; Path=/; "
                         "SameSite=Strict",
                         h->token, COOKIE_MAX_AGE_S);
    if (cookie)
        mb_http_reply_header(req, "Set-Cookie", cookie);
    mb_free(cookie);
    mb_http_reply_json(
        req, 200, json_pack("{s:s, s:s}", "status", "authenticated", "message", "Token is valid"));
}

static void healthz(void *arg, struct mb_http_req *req)
{
    struct mb_head *h = arg;

    if (h->stopping)
        mb_http_reply_text(req, 503, "stopping");
    else
        mb_http_reply(req, 200, "application/text; charset=utf-8", "success", 7);
}

/* A node's health is its agent's to tell, Serve's and the web pages are Ray's. Its head says so to
 * everyone, token or not. */
static void not_here(void *arg, struct mb_http_req *req)
{
    (void)arg;
    mb_http_reply_text(req, 404, "404: Not Found");
}

/* ---- nodes ---- */

static json_t *amounts_json(const void *entries, size_t n)
{
    struct mb_arena a = {0};
    const struct mb_gcs_resource *r = mb_wire_get_resources(&a, entries, n);
    json_t *out = json_object();

    for (size_t i = 0; r && i < n; i++)
        json_object_set_new(out, r[i].name, json_real(r[i].amount));
    mb_arena_close(&a);
    return out;
}

static json_t *labels_json(const struct head_node *n)
{
    json_t *out = json_object();

    for (size_t i = 0; i < n->info->n_labels; i++)
        json_object_set_new(out, n->info->labels[i]->key, json_string(n->info->labels[i]->value));
    return out;
}

static json_t *total_json(const struct head_node *n)
{
    if (n->view)
        return amounts_json(n->view->resources_total, n->view->n_resources_total);
    return amounts_json(n->info->resources_total, n->info->n_resources_total);
}

static json_t *available_json(const struct head_node *n)
{
    if (n->view)
        return amounts_json(n->view->resources_available, n->view->n_resources_available);
    if (n->is_loaded) /* what it holds is not known before it says so */
        return json_object();
    return amounts_json(n->info->resources_total, n->info->n_resources_total);
}

static const char *state_name(const struct head_node *n)
{
    return head_node_alive(n) ? "ALIVE" : "DEAD";
}

json_t *head_node_json(const struct head_node *n)
{
    char hex[2 * MB_NODE_ID_BYTES + 1];

    return json_pack("{s:s, s:s, s:s, s:s, s:b, s:o, s:o, s:o, s:s, s:i, s:I}", "node_id",
                     mb_hex(n->id, MB_NODE_ID_BYTES, hex), "node_name", n->info->node_name, "ip",
                     n->info->node_manager_address, "state", state_name(n), "is_head",
                     n->info->is_head_node, "resources_total", total_json(n), "resources_available",
                     available_json(n), "labels", labels_json(n), "death_reason",
                     n->info->death_info ? n->info->death_info->reason_message : "",
                     "agent_http_port", n->info->dashboard_agent_listen_port, "start_time_ms",
                     (json_int_t)n->info->start_time_ms);
}

/* The envelope of Ray's state API. Takes rows. */
static json_t *state_reply(json_t *rows, size_t total)
{
    json_int_t n = (json_int_t)json_array_size(rows);

    return json_pack("{s:b, s:s, s:{s:{s:I, s:I, s:I, s:o, s:s, s:n}}}", "result", 1, "msg", "",
                     "data", "result", "total", (json_int_t)total, "num_after_truncation",
                     (json_int_t)total, "num_filtered", n, "result", rows,
                     "partial_failure_warning", "", "warnings");
}

/* Filters "key = value" or "key != value", as the CLI sends them: all of them count. */
static int passes(struct mb_http_req *req, const json_t *row)
{
    const char *key, *predicate, *value;

    for (size_t i = 0; (key = mb_http_req_query_at(req, "filter_keys", i)) != NULL; i++) {
        json_t *v = json_object_get(row, key);
        const char *text =
            json_is_boolean(v) ? (json_is_true(v) ? "true" : "false") : json_string_value(v);

        predicate = mb_http_req_query_at(req, "filter_predicates", i);
        value = mb_http_req_query_at(req, "filter_values", i);
        if ((text && strcasecmp(text, value) == 0) == (strcmp(predicate, "!=") == 0))
            return 0;
    }
    return 1;
}

/* Takes msg, which may be NULL. */
static void state_refusal(struct mb_http_req *req, char *msg)
{
    mb_http_reply_json(
        req, 400, json_pack("{s:b, s:s?, s:{s:n}}", "result", 0, "msg", msg, "data", "result"));
    mb_free(msg);
}

static const char *const node_columns[] = {"state",   "node_ip",      "node_name",
                                           "node_id", "is_head_node", NULL};
static const char *const job_columns[] = {"job_id", "type", "status", "submission_id", NULL};

/* Key, predicate and value of each filter. Of jobs a filter that cannot be is a crash in Ray. */
static int are_filters_whole(struct mb_http_req *req)
{
    size_t i = 0;

    while (mb_http_req_query_at(req, "filter_keys", i)) {
        if (!mb_http_req_query_at(req, "filter_predicates", i) ||
            !mb_http_req_query_at(req, "filter_values", i))
            return 0;
        i++;
    }
    return !mb_http_req_query_at(req, "filter_values", i);
}

static int is_column(const char *const *columns, const char *key)
{
    while (*columns && strcmp(*columns, key) != 0)
        columns++;
    return *columns != NULL;
}

/* NULL: each filter can be applied; else why one cannot, owned by the caller. */
static char *filter_fault(struct mb_http_req *req, const char *const *columns)
{
    const char *key, *predicate;

    for (size_t i = 0; (key = mb_http_req_query_at(req, "filter_keys", i)) != NULL; i++) {
        predicate = mb_http_req_query_at(req, "filter_predicates", i);
        if (strcmp(predicate, "=") != 0 && strcmp(predicate, "!=") != 0)
            return mb_asprintf("Unsupported filter predicate %s is given. Available predicates: "
                               "=, !=.",
                               predicate);
        if (!is_column(columns, key))
            return mb_asprintf("The given filter column %s is not supported. Enter filters with "
                               "\u2013-filter key=value or \u2013-filter key!=value",
                               key);
    }
    return NULL;
}

/* What a query asks for, or -1 after the answer of Ray's state API to a bad one. What is bad about
 * one of jobs is a crash there, about one of nodes it is explained. */
static int64_t row_limit(struct mb_http_req *req, const char *const *columns, int is_explained)
{
    enum { LIMIT = 100, LIMIT_MAX = 10000 };
    const char *text = mb_http_req_query(req, "limit");
    int64_t limit = LIMIT;
    int is_number = !text || mb_parse_i64(text, 0, INT64_MAX, "limit", &limit, NULL) == 0;
    int is_whole = are_filters_whole(req);
    char *fault = is_whole ? filter_fault(req, columns) : NULL;

    if (!is_whole || ((!is_number || limit > LIMIT_MAX || fault) && !is_explained)) {
        mb_http_reply_text(req, 500, "500 Internal Server Error\n\nServer got itself in trouble");
        limit = -1;
    } else if (!is_number) {
        state_refusal(req, mb_asprintf("invalid literal for int() with base 10: '%s'", text));
        limit = -1;
    } else if (limit > LIMIT_MAX) {
        state_refusal(req,
                      mb_asprintf("Given limit %lld exceeds the supported limit %d. Use a lower "
                                  "limit, or set the `RAY_MAX_LIMIT_FROM_API_SERVER` environment "
                                  "variable to a larger value.",
                                  (long long)limit, LIMIT_MAX));
        limit = -1;
    } else if (fault) {
        state_refusal(req, mb_strdup(fault));
        limit = -1;
    }
    mb_free(fault);
    return limit;
}

static int wants_detail(struct mb_http_req *req)
{
    const char *detail = mb_http_req_query(req, "detail");

    return detail && (strcmp(detail, "1") == 0 || strcasecmp(detail, "true") == 0);
}

static void state_nodes(void *arg, struct mb_http_req *req)
{
    struct mb_head *h = arg;
    int64_t limit = row_limit(req, node_columns, 1);
    int detail = wants_detail(req);
    json_t *rows;

    if (limit < 0)
        return;
    rows = json_array();
    for (size_t i = 0; i < h->n_nodes; i++) {
        const struct head_node *n = h->nodes[i];
        char hex[2 * MB_NODE_ID_BYTES + 1];
        json_t *row = json_pack(
            "{s:s, s:s, s:b, s:s, s:s?, s:s, s:o, s:o}", "node_id",
            mb_hex(n->id, MB_NODE_ID_BYTES, hex), "node_ip", n->info->node_manager_address,
            "is_head_node", n->info->is_head_node, "state", state_name(n), "state_message",
            n->info->death_info ? n->info->death_info->reason_message : NULL, "node_name",
            n->info->node_name, "resources_total", total_json(n), "labels", labels_json(n));
        if (row && detail) {
            json_object_set_new(row, "start_time_ms",
                                json_integer((json_int_t)n->info->start_time_ms));
            json_object_set_new(row, "end_time_ms", json_integer((json_int_t)n->info->end_time_ms));
        }
        if (row && passes(req, row) && (int64_t)json_array_size(rows) < limit)
            json_array_append(rows, row);
        json_decref(row);
    }
    mb_http_reply_json(req, 200, state_reply(rows, h->n_nodes));
}

/* A request that waits for rows of jobs. */
struct asked {
    struct mb_head *h;
    struct mb_http_req *req;
    int64_t limit;
};

/* 0: answered already. */
static int has_rows(const struct asked *a, const json_t *rows)
{
    if (!rows)
        mb_http_reply_text(a->req, a->h->stopping ? 503 : 500, "%s",
                           a->h->stopping ? "the head is stopping" : "out of memory");
    return rows != NULL;
}

/* All jobs, over several turns of the loop. */
static void ask_rows(struct mb_head *h, struct mb_http_req *req, int64_t limit, head_rows_cb cb)
{
    struct asked *a = mb_calloc(1, sizeof *a);

    if (a) {
        *a = (struct asked){h, req, limit};
        head_job_rows(h, NULL, 0, mb_http_req_is_browser(req), cb, a);
    } else {
        mb_http_reply_text(req, 500, "out of memory");
    }
}

static void show_state_jobs(void *arg, json_t *all)
{
    struct asked a = *(struct asked *)arg;
    json_t *rows, *row;
    size_t i, total = json_array_size(all);

    mb_free(arg);
    if (!has_rows(&a, all))
        return;
    rows = json_array();
    json_array_foreach(all, i, row)
    {
        if (passes(a.req, row) && (int64_t)json_array_size(rows) < a.limit)
            json_array_append(rows, row);
    }
    json_decref(all);
    head_jobs_reply_read(a.h, a.req, state_reply(rows, total));
}

static void state_jobs(void *arg, struct mb_http_req *req)
{
    struct mb_head *h = arg;
    int64_t limit;

    if (h->stopping) {
        mb_http_reply_text(req, 503, "the head is stopping");
        return;
    }
    limit = row_limit(req, job_columns, 0);
    if (limit >= 0)
        ask_rows(h, req, limit, show_state_jobs);
}

static void host_names(struct mb_head *h, struct mb_http_req *req)
{
    json_t *names = json_array();

    for (size_t i = 0; i < h->n_nodes; i++)
        if (head_node_alive(h->nodes[i]))
            json_array_append_new(names, json_string(h->nodes[i]->info->node_manager_hostname));
    mb_http_reply_json(req, 200,
                       json_pack("{s:b, s:s, s:{s:o}}", "result", 1, "msg",
                                 "Node hostname list fetched.", "data", "hostNameList", names));
}

static void nodes_view(void *arg, struct mb_http_req *req)
{
    struct mb_head *h = arg;
    const char *view = mb_http_req_query(req, "view");
    json_t *rows;

    if (view && strcasecmp(view, "hostNameList") == 0) {
        host_names(h, req);
        return;
    }
    if (!view || strcmp(view, "summary") != 0) {
        char *msg = mb_asprintf("Unknown view %s", view ? view : "None");
        mb_http_reply_json(req, 500,
                           json_pack("{s:b, s:s?, s:{}}", "result", 0, "msg", msg, "data"));
        mb_free(msg);
        return;
    }
    rows = json_array();
    for (size_t i = 0; i < h->n_nodes; i++) {
        const struct head_node *n = h->nodes[i];
        char hex[2 * MB_NODE_ID_BYTES + 1];
        mb_hex(n->id, MB_NODE_ID_BYTES, hex);
        json_array_append_new(
            rows,
            json_pack("{s:s, s:s, s:{s:s, s:s, s:i, s:s, s:s, s:b, s:o, s:o, s:I}}", "ip",
                      n->info->node_manager_address, "hostname", n->info->node_manager_hostname,
                      "raylet", "nodeId", hex, "nodeManagerAddress", n->info->node_manager_address,
                      "nodeManagerPort", n->info->node_manager_port, "nodeName", n->info->node_name,
                      "state", state_name(n), "isHeadNode", n->info->is_head_node, "resourcesTotal",
                      total_json(n), "labels", labels_json(n), "startTimeMs",
                      (json_int_t)n->info->start_time_ms));
    }
    mb_http_reply_json(req, 200,
                       json_pack("{s:b, s:s, s:{s:o}}", "result", 1, "msg", "Node summary fetched.",
                                 "data", "summary", rows));
}

/* ---- cluster ---- */

static double amount(json_t *o, const char *name)
{
    return json_number_value(json_object_get(o, name));
}

/* Sums over the nodes that live. */
static void sum_up(struct mb_head *h, json_t *total, json_t *available)
{
    for (size_t i = 0; i < h->n_nodes; i++) {
        if (!head_node_alive(h->nodes[i]))
            continue;
        json_t *t = total_json(h->nodes[i]), *a = available_json(h->nodes[i]), *v;
        const char *name;
        json_object_foreach(t, name, v)
            json_object_set_new(total, name, json_real(amount(total, name) + json_number_value(v)));
        json_object_foreach(a, name, v) json_object_set_new(
            available, name, json_real(amount(available, name) + json_number_value(v)));
        json_decref(t);
        json_decref(a);
    }
}

static size_t count_nodes(const struct mb_head *h, int alive)
{
    size_t n = 0;

    for (size_t i = 0; i < h->n_nodes; i++)
        n += head_node_alive(h->nodes[i]) == alive;
    return n;
}

/* Without ?format=1 Ray answers with its autoscaler's report. There is none here: the usage is said
 * under Ray's names, [used, total] each. */
static void cluster_report(struct mb_http_req *req, json_t *total, json_t *available)
{
    json_t *usage = json_object(), *v;
    const char *name;

    json_object_foreach(total, name, v) json_object_set_new(
        usage, name,
        json_pack("[f, f]", json_number_value(v) - amount(available, name), json_number_value(v)));
    mb_http_reply_json(req, 200,
                       json_pack("{s:b, s:s, s:{s:n, s:n, s:{s:f, s:{s:o}}}}", "result", 1, "msg",
                                 "Got cluster status.", "data", "autoscalingStatus",
                                 "autoscalingError", "clusterStatus", "time",
                                 (double)mb_unix_ms() / 1000.0, "loadMetricsReport", "usage",
                                 usage));
}

static void cluster_status(void *arg, struct mb_http_req *req)
{
    struct mb_head *h = arg;
    json_t *total = json_object(), *available = json_object(), *v;
    const char *format = mb_http_req_query(req, "format");
    struct mb_buf text = {0};
    const char *name;
    int rc;

    sum_up(h, total, available);
    if (!format || strcmp(format, "1") != 0) {
        cluster_report(req, total, available);
        json_decref(total);
        json_decref(available);
        return;
    }
    rc = mb_buf_printf(&text,
                       "======== Cluster status ========\nNode status\n"
                       "---------------------------------------------------------------\n"
                       "Active:\n %zu node(s)\nDead:\n %zu node(s)\n\nResources\n"
                       "---------------------------------------------------------------\n"
                       "Total Usage:\n",
                       count_nodes(h, 1), count_nodes(h, 0));
    json_object_foreach(total, name, v) rc |=
        mb_buf_printf(&text, " %.1f/%.1f %s\n", json_number_value(v) - amount(available, name),
                      json_number_value(v), name);
    if (rc == 0)
        mb_http_reply_json(req, 200,
                           json_pack("{s:b, s:s, s:{s:s}}", "result", 1, "msg",
                                     "Got formatted cluster status.", "data", "clusterStatus",
                                     mb_buf_str(&text)));
    else
        mb_http_reply_text(req, 500, "out of memory");
    json_decref(total);
    json_decref(available);
    mb_buf_close(&text);
}

struct activity {
    size_t n_live;
    uint64_t ended_ms; /* the newest end; 0: none */
};

/* A gang that was started outside of a job counts, too; what a job started is counted by the job.
 */
static void add_activity(void *arg, const Ray__Rpc__JobTableData *job)
{
    struct activity *a = arg;

    if (job->config && mb_starts_with(job->config->ray_namespace, "_ray_internal_"))
        return;
    if (job->end_time > a->ended_ms)
        a->ended_ms = job->end_time;
    a->n_live += !job->is_dead && *head_jobinfo_submission(job) == '\0';
}

static void component_activities(void *arg, struct mb_http_req *req)
{
    struct mb_head *h = arg;
    struct activity a = {0};
    uint64_t now_ms = (uint64_t)mb_unix_ms();
    char reason[64];

    for (size_t i = 0; i < h->n_jobs; i++) {
        json_int_t end_ms = json_integer_value(json_object_get(h->jobs[i]->info, "end_time"));

        a.n_live += !mb_job_is_terminal(h->jobs[i]->state);
        if (end_ms > 0 && (uint64_t)end_ms > a.ended_ms)
            a.ended_ms = (uint64_t)end_ms;
    }
    head_jobinfo_each(h, add_activity, &a);
    if (a.ended_ms > now_ms) /* dates of jobs may run ahead of the clock (job_submit.c) */
        a.ended_ms = now_ms;
    snprintf(reason, sizeof reason, "Number of active drivers: %zu", a.n_live);
    mb_http_reply_json(
        req, 200,
        json_pack("{s:{s:s, s:s?, s:f, s:o}}", "driver", "is_active",
                  a.n_live > 0 ? "ACTIVE" : "INACTIVE", "reason", a.n_live > 0 ? reason : NULL,
                  "timestamp", (double)now_ms / 1000.0, "last_activity_at",
                  a.ended_ms > 0 ? json_real((double)a.ended_ms / 1000.0) : json_null()));
}

/* The record that a gang's driver keeps in the KV, or null. */
static json_t *gang_of(struct mb_head *h, const char *id)
{
    char key[300];
    struct mb_blob value;
    json_t *record = NULL;

    snprintf(key, sizeof key, "gang:%s", id ? id : "");
    if (mb_tables_get(h->store, MB_TABLES_KV, mb_blob_str("mobula"), mb_blob_str(key), &value))
        record = json_loadb(value.p, value.n, 0, NULL);
    return record ? record : json_null();
}

void head_gang_tell(struct mb_head *h, json_t *details)
{
    const char *status = json_string_value(json_object_get(details, "status"));
    const char *progress;
    json_t *gang;

    if (!status || strcmp(status, "RUNNING") != 0)
        return;
    gang = gang_of(h, json_string_value(json_object_get(details, "submission_id")));
    progress = json_string_value(json_object_get(json_object_get(gang, "checkpoint"), "progress"));
    if (progress && *progress)
        json_object_set_new(details, "message",
                            json_sprintf("Job is currently running: %s.", progress));
    json_decref(gang);
}

/* What an agent keeps in the KV about GPUs that it gives to nobody, or []. */
static json_t *quarantine_of(struct mb_head *h, const char *node_id)
{
    char key[100];
    struct mb_blob value;
    json_t *list = NULL;

    snprintf(key, sizeof key, "gpu-quarantine:%s", node_id);
    if (mb_tables_get(h->store, MB_TABLES_KV, mb_blob_str("mobula"), mb_blob_str(key), &value))
        list = json_loadb(value.p, value.n, 0, NULL);
    return list ? list : json_array();
}

/* Of several heads that share a store one serves: this one. Without such a store another head is
 * the one that was here before. */
static int is_standby(const struct mb_head *h, const struct head_node *n)
{
    char hex[2 * MB_NODE_ID_BYTES + 1];

    return h->redis != NULL && head_node_alive(n) && n->info->is_head_node && h->head_node_hex[0] &&
           strcmp(mb_hex(n->id, MB_NODE_ID_BYTES, hex), h->head_node_hex) != 0;
}

static void show_status(void *arg, json_t *jobs)
{
    struct asked a = *(struct asked *)arg;
    struct mb_head *h = a.h;
    json_t *total, *available, *nodes, *job;
    size_t i;

    mb_free(arg);
    if (!has_rows(&a, jobs))
        return;
    total = json_object();
    available = json_object();
    nodes = json_array();
    sum_up(h, total, available);
    for (i = 0; i < h->n_nodes; i++) {
        json_t *node = head_node_json(h->nodes[i]);
        const char *id = json_string_value(json_object_get(node, "node_id"));
        json_object_set_new(node, "gpu_quarantine", quarantine_of(h, id ? id : ""));
        json_object_set_new(node, "gpus",
                            h->nodes[i]->gpus ? json_incref(h->nodes[i]->gpus) : json_array());
        json_object_set_new(node, "for_drivers", head_offers_json(h, h->nodes[i]));
        json_object_set_new(node, "is_standby", json_boolean(is_standby(h, h->nodes[i])));
        json_array_append_new(nodes, node);
    }
    json_array_foreach(jobs, i, job)
    {
        const char *id = json_string_value(json_object_get(job, "submission_id"));
        json_t *gang = gang_of(h, id);
        if (json_is_null(gang))
            gang = gang_of(h, json_string_value(json_object_get(job, "job_id")));
        json_object_set_new(job, "gang", gang);
    }
    mb_http_reply_json(
        a.req, 200,
        json_pack("{s:{s:s, s:s, s:s, s:I, s:I, s:I, s:s, s:b, s:o, s:o}, s:o, s:o, s:o}",
                  "cluster", "cluster_id", h->cluster_hex, "session_name", h->session_name,
                  "ray_version", h->ray_version, "now_unix_ms", (json_int_t)mb_unix_ms(),
                  "nodes_alive", (json_int_t)count_nodes(h, 1), "nodes_dead",
                  (json_int_t)count_nodes(h, 0), "gang_order", head_placement_order_name(h),
                  "is_open", h->is_open, "resources_total", total, "resources_available", available,
                  "nodes", nodes, "queue", head_placement_queue_json(h), "jobs", jobs));
}

static void mobula_status(void *arg, struct mb_http_req *req)
{
    struct mb_head *h = arg;

    if (h->stopping)
        mb_http_reply_text(req, 503, "the head is stopping");
    else
        ask_rows(h, req, 0, show_status);
}

int head_cluster_routes(struct mb_head *h, struct mb_err *err)
{
    static const struct mb_http_route routes[] = {
        {"GET", "/api/version", version, 0},
        {"GET", "/api/authentication_mode", authentication_mode, MB_HTTP_PUBLIC},
        {"POST", "/api/authenticate", authenticate, MB_HTTP_PUBLIC | MB_HTTP_BROWSER},
        {"GET", "/api/gcs_healthz", healthz, MB_HTTP_PUBLIC},
        {"*", "/api/local_raylet_healthz", not_here, MB_HTTP_PUBLIC},
        {"*", "/api/healthz", not_here, MB_HTTP_PUBLIC},
        {"*", "/-/healthz", not_here, MB_HTTP_PUBLIC},
        {"GET", "/", not_here, MB_HTTP_PUBLIC},
        {"GET", "/favicon.ico", not_here, MB_HTTP_PUBLIC},
        {"GET", "/static/{file*}", not_here, MB_HTTP_PUBLIC},
        {"GET", "/api/v0/nodes", state_nodes, 0},
        {"GET", "/api/v0/jobs", state_jobs, 0},
        {"GET", "/api/cluster_status", cluster_status, 0},
        {"GET", "/nodes", nodes_view, 0},
        {"GET", "/api/component_activities", component_activities, 0},
        {"GET", "/api/mobula/status", mobula_status, 0},
    };

    return mb_http_server_add(h->http, routes, sizeof routes / sizeof routes[0], h, err);
}
