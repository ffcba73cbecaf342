/*
 * One table of flags: parsing, help and the suggestion for a mistyped one.
 *
 *  1. An unknown flag, a missing value, a bad number: one line that names the flag.
 *  2. Labels are a JSON object of strings; anything else is refused with the key named.
 *  3. Exactly one of --head and --address.
 */
#include "agent/options.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "agent/log_plan.h"
#include "agent/neighbour.h"
#include "base/address.h"
#include "base/alloc.h"
#include "base/str.h"
#include "gcs/redis_url.h"
#include "gcs/head.h"

enum kind { KIND_FLAG, KIND_TEXT, KIND_NUMBER };

struct option {
    const char *name;
    enum kind kind;
    size_t offset;
    int64_t min, max;
    const char *help;
};

#define AT(field) offsetof(struct mb_agent_options, field)

static const struct option options[] = {
    {"head", KIND_FLAG, AT(is_head), 0, 0, "be the head of a new cluster"},
    {"address", KIND_TEXT, AT(address), 0, 0, "HOST:PORT of the head to join"},
    {"job-agent", KIND_FLAG, AT(is_job_agent), 0, 0,
     "with --address of Ray's own head: its dashboard hands its jobs to this node"},
    {"node-dir", KIND_TEXT, AT(node_dir), 0, 0, "directory of this node's files"},
    {"num-gpus", KIND_NUMBER, AT(num_gpus), 0, 1024, "devices to offer (default: those found)"},
    {"num-cpus", KIND_NUMBER, AT(num_cpus), 0, 1 << 20, "CPUs for drivers (default: those found)"},
    {"memory", KIND_NUMBER, AT(memory_bytes), 0, INT64_MAX, "bytes of memory for drivers"},
    {"resources", KIND_TEXT, AT(resources_json), 0, 0, "JSON object: other amounts for drivers"},
    {"max-running-jobs", KIND_NUMBER, AT(max_running_jobs), 1, 4096,
     "drivers that run at once (4 for each CPU, at least 64)"},
    {"max-queued-jobs", KIND_NUMBER, AT(max_queued_jobs), 1, 1000000, "jobs that may wait (10000)"},
    {"max-ended-jobs", KIND_NUMBER, AT(max_ended_jobs), 1, 1000000,
     "jobs remembered that have ended (10000)"},
    {"node-ip-address", KIND_TEXT, AT(node_ip), 0, 0, "address that other nodes dial"},
    {"port", KIND_NUMBER, AT(port), 0, 65535, "gRPC port of the head (6379; 0: any)"},
    {"dashboard-port", KIND_NUMBER, AT(dashboard_port), 0, 65535,
     "HTTP port of the head (8265; 0: any)"},
    {"node-manager-port", KIND_NUMBER, AT(agent_port), 0, 65535, "gRPC port of this node"},
    {"dashboard-agent-listen-port", KIND_NUMBER, AT(http_port), 0, 65535, "HTTP port of this node"},
    {"metrics-export-port", KIND_NUMBER, AT(metrics_port), 0, 65535,
     "serve /metrics at this port, too"},
    {"temp-dir", KIND_TEXT, AT(temp_dir), 0, 0, "directory of all nodes of this machine"},
    {"node-name", KIND_TEXT, AT(node_name), 0, 0, "name shown in lists of nodes"},
    {"labels", KIND_TEXT, AT(labels_json), 0, 0, "JSON object of labels"},
    {"store", KIND_TEXT, AT(store), 0, 0,
     "where the head keeps its tables: sqlite | memory | redis://..."},
    {"store-password-file", KIND_TEXT, AT(store_password_file), 0, 0, "password of a redis store"},
    {"store-sync", KIND_TEXT, AT(store_sync), 0, 0, "normal | full: survive power loss too"},
    {"max-package-size", KIND_NUMBER, AT(max_package_bytes), 1, INT64_MAX,
     "bytes of an uploaded package (100 MiB)"},
    {"package-keep", KIND_NUMBER, AT(package_keep_s), 1, 366 * 86400,
     "seconds to keep a package no job needs (3600)"},
    {"log-max-bytes", KIND_NUMBER, AT(log_max_bytes), 0, INT64_MAX,
     "cap of a job's or rank's log file (1 GiB; 0: none)"},
    {"gang-order", KIND_TEXT, AT(gang_order), 0, 0, "of the head: backfill | strict"},
    {"gang-patience", KIND_TEXT, AT(gang_patience), 0, 0,
     "of the head: after this time what a gang needs is kept for it (60s)"},
    {"launch-timeout", KIND_NUMBER, AT(launch_timeout_s), 1, 3600,
     "seconds until processes of a job that mobula-init does not launch are given up (60)"},
    {"token-file", KIND_TEXT, AT(token_file), 0, 0, "file that holds the cluster's token"},
    {"no-token", KIND_FLAG, AT(no_token), 0, 0,
     "trust the network: whoever reaches a port may use it"},
    {"notice-file", KIND_TEXT, AT(notice_file), 0, 0,
     "when it appears the node will be taken away (MOBULA_NOTICE_FILE)"},
    {"notice-url", KIND_TEXT, AT(notice_url), 0, 0, "a cloud's notice of that (MOBULA_NOTICE_URL)"},
    {"ray-version", KIND_TEXT, AT(ray_version), 0, 0,
     "of the head: the version of Ray that it says it is (MOBULA_RAY_VERSION, 2.60.0)"},
    {"ray-commit", KIND_TEXT, AT(ray_commit), 0, 0, "the same of the commit (MOBULA_RAY_COMMIT)"},
    {"log-level", KIND_TEXT, AT(log_level), 0, 0, "debug | info | warn | error"},
};

enum { N_OPTIONS = sizeof(options) / sizeof(options[0]) };

static void print_help(void)
{
    printf("usage: mobula-agent (--head | --address HOST:PORT) --node-dir DIR [options]\n"
           "Started by `mobula start` through mobula-init; not meant to be typed.\n\n");
    for (size_t i = 0; i < N_OPTIONS; i++)
        printf("  --%-28s %s\n", options[i].name, options[i].help);
}

static const struct option *find(const char *name, size_t n)
{
    for (size_t i = 0; i < N_OPTIONS; i++)
        if (strlen(options[i].name) == n && memcmp(options[i].name, name, n) == 0)
            return &options[i];
    return NULL;
}

static int unknown(const char *arg, struct mb_err *err)
{
    const char *names[N_OPTIONS + 1] = {NULL};
    const char *near = NULL;

    for (size_t i = 0; i < N_OPTIONS; i++)
        names[i] = options[i].name;
    if (mb_starts_with(arg, "--"))
        near = mb_nearest(arg + 2, names);
    return near != NULL
               ? mb_err_set(err, MB_EINVAL, "unknown option %s, did you mean --%s?", arg, near)
               : mb_err_set(err, MB_EINVAL, "unknown option %s", arg);
}

static int parse_labels(struct mb_agent_options *o, struct mb_err *err)
{
    json_t *json = json_loads(o->labels_json, 0, NULL);
    const char *key;
    json_t *value;
    int rc = MB_OK;

    if (!json_is_object(json))
        rc = mb_err_set(err, MB_EINVAL, "--labels: expected a JSON object of strings");
    json_object_foreach(json, key, value)
    {
        char *k, *v;

        if (rc != MB_OK)
            break;
        if (strcmp(key, "ray.io/node-id") == 0 || strcmp(key, MB_NODE_LABEL_VERSION) == 0) {
            rc = mb_err_set(err, MB_EINVAL, "--labels: \"%s\" is said by the node itself", key);
            break;
        }
        if (!json_is_string(value) || o->n_labels == MB_AGENT_LABELS_MAX) {
            rc = mb_err_set(err, MB_EINVAL, "--labels: \"%s\" is %s", key,
                            json_is_string(value) ? "one too many (32 are possible)"
                                                  : "not a string");
            break;
        }
        k = mb_strdup(key);
        v = mb_strdup(json_string_value(value));
        o->labels[o->n_labels++] = (struct mb_gcs_label){k, v};
        if (k == NULL || v == NULL)
            rc = mb_err_set(err, MB_ENOMEM, "no memory for --labels");
    }
    json_decref(json);
    return rc;
}

static int parse_resources(struct mb_agent_options *o, struct mb_err *err)
{
    json_t *json = json_loads(o->resources_json, 0, NULL);
    const char *key;
    json_t *value;
    int rc = MB_OK;

    if (!json_is_object(json))
        rc = mb_err_set(err, MB_EINVAL, "--resources: expected a JSON object of numbers");
    json_object_foreach(json, key, value)
    {
        struct mb_job_amount *r = &o->resources[o->n_resources];

        if (rc == MB_OK && o->n_resources == MB_AGENT_RESOURCES_MAX)
            rc = mb_err_set(err, MB_EINVAL, "--resources: %d are possible", MB_AGENT_RESOURCES_MAX);
        else if (rc == MB_OK && (!json_is_number(value) || !(json_number_value(value) >= 0) ||
                                 strlen(key) >= sizeof(r->name)))
            rc = mb_err_set(err, MB_EINVAL, "--resources: \"%.80s\" is no amount", key);
        if (rc != MB_OK)
            break;
        *r = (struct mb_job_amount){.amount = json_number_value(value)};
        memcpy(r->name, key, strlen(key) + 1);
        o->n_resources++;
    }
    json_decref(json);
    return rc;
}

static int is_empty(const char *text)
{
    return text != NULL && text[0] == '\0';
}

/* It becomes part of JSON, and clients parse it: 2.60.0, 3.0.0.dev0, 2.9.3+cu12. */
static int check_version(const char **version, const char *what, struct mb_err *err)
{
    static const char letters[] =
        "0123456789.abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-_";
    const char *v = *version;

    if (is_empty(v))
        *version = v = NULL;
    if (v != NULL && (strlen(v) > 64 || v[strspn(v, letters)] != '\0'))
        return mb_err_set(err, MB_EINVAL,
                          "%s %.80s: expected at most 64 letters, digits and . + - _", what, v);
    return MB_OK;
}

static int check_ray(struct mb_agent_options *o, struct mb_err *err)
{
    int rc = check_version(&o->ray_version, "--ray-version", err);

    if (rc == MB_OK && o->ray_version != NULL &&
        (o->ray_version[0] < '0' || o->ray_version[0] > '9'))
        rc = mb_err_set(err, MB_EINVAL, "--ray-version %s: expected a version, e.g. 2.60.0",
                        o->ray_version);
    return rc == MB_OK ? check_version(&o->ray_commit, "--ray-commit", err) : rc;
}

static int check(struct mb_agent_options *o, struct mb_err *err)
{
    if (o->node_dir == NULL || o->node_dir[0] != '/')
        return mb_err_set(err, MB_EINVAL, "--node-dir: an absolute directory is needed");
    if (o->is_head == (o->address != NULL))
        return mb_err_set(err, MB_EINVAL, "give exactly one of --head and --address HOST:PORT");
    if (o->is_head && o->is_job_agent)
        return mb_err_set(err, MB_EINVAL,
                          "--job-agent goes with --address: a head takes its own "
                          "jobs");
    if (o->address != NULL && mb_address_check_heads("--address", o->address, err) != MB_OK)
        return MB_EINVAL;
    if (o->node_ip != NULL && mb_address_check("--node-ip-address", o->node_ip, err) != MB_OK)
        return MB_EINVAL;
    if (o->node_name != NULL && !mb_utf8_valid(o->node_name, strlen(o->node_name)))
        return mb_err_set(err, MB_EINVAL, "--node-name is no UTF-8");
    if (strcmp(o->store_sync, "full") != 0 && strcmp(o->store_sync, "normal") != 0)
        return mb_err_set(err, MB_EINVAL, "--store-sync %s: expected normal or full",
                          o->store_sync);
    if (mb_starts_with(o->store, "redis")) {
        struct mb_redis_url url;
        int rc = mb_redis_url_parse(o->store, &url, err);
        if (rc != MB_OK)
            return mb_err_wrap(err, "--store");
    } else if (strcmp(o->store, "sqlite") != 0 && strcmp(o->store, "memory") != 0) {
        return mb_err_set(err, MB_EINVAL, "--store: expected sqlite, memory or redis://...");
    }
    if (is_empty(o->notice_file))
        o->notice_file = NULL;
    if (is_empty(o->notice_url))
        o->notice_url = NULL;
    if (check_ray(o, err) != MB_OK)
        return MB_EINVAL;
    if (o->notice_url != NULL && !mb_starts_with(o->notice_url, "http://") &&
        !mb_starts_with(o->notice_url, "https://"))
        return mb_err_set(err, MB_EINVAL, "--notice-url %s: expected http:// or https://",
                          o->notice_url);
    if (strcmp(o->gang_order, "backfill") != 0 && strcmp(o->gang_order, "strict") != 0)
        return mb_err_set(err, MB_EINVAL, "--gang-order %s: expected backfill or strict",
                          o->gang_order);
    if (mb_parse_duration_ms(o->gang_patience, "--gang-patience", &o->gang_patience_ms, err) != 0)
        return MB_EINVAL;
    if (o->resources_json != NULL && parse_resources(o, err) != MB_OK)
        return MB_EINVAL;
    if (o->log_max_bytes > 0 && o->log_max_bytes < MB_LOG_PLAN_CAP_MIN)
        return mb_err_set(err, MB_EINVAL, "--log-max-bytes: 0 or at least %d KiB",
                          MB_LOG_PLAN_CAP_MIN >> 10);
    return o->labels_json != NULL ? parse_labels(o, err) : MB_OK;
}

int mb_agent_options_parse(int argc, char **argv, struct mb_agent_options *out, struct mb_err *err)
{
    *out = (struct mb_agent_options){.num_gpus = -1,
                                     .num_cpus = -1,
                                     .memory_bytes = -1,
                                     .max_queued_jobs = MB_HEAD_QUEUED_JOBS,
                                     .max_ended_jobs = MB_HEAD_ENDED_JOBS,
                                     .port = 6379,
                                     .dashboard_port = 8265,
                                     .http_port = -1,
                                     .store = "sqlite",
                                     .store_sync = "normal",
                                     .log_max_bytes = -1,
                                     .gang_order = "backfill",
                                     .gang_patience = "60s",
                                     .log_level = "info"};
    out->notice_file = getenv("MOBULA_NOTICE_FILE");
    out->notice_url = getenv("MOBULA_NOTICE_URL");
    out->ray_version = getenv("MOBULA_RAY_VERSION");
    out->ray_commit = getenv("MOBULA_RAY_COMMIT");
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        const char *eq = strchr(arg, '=');
        size_t n = eq != NULL ? (size_t)(eq - arg) : strlen(arg);
        const struct option *o;
        const char *value = eq != NULL ? eq + 1 : NULL;

        if (strcmp(arg, "--help") == 0) {
            print_help();
            return 1;
        }
        o = n > 2 && mb_starts_with(arg, "--") ? find(arg + 2, n - 2) : NULL;
        if (o == NULL)
            return unknown(arg, err);
        if (o->kind == KIND_FLAG) {
            *(int *)(void *)((char *)out + o->offset) = 1;
            continue;
        }
        if (value == NULL && i + 1 < argc)
            value = argv[++i];
        if (value == NULL)
            return mb_err_set(err, MB_EINVAL, "--%s needs a value", o->name);
        if (o->kind == KIND_TEXT) {
            *(const char **)(void *)((char *)out + o->offset) = value;
        } else {
            char what[64];
            int rc;

            snprintf(what, sizeof(what), "--%s", o->name);
            rc = mb_parse_i64(value, o->min, o->max, what,
                              (int64_t *)(void *)((char *)out + o->offset), err);
            if (rc != MB_OK)
                return rc;
        }
    }
    return check(out, err);
}

void mb_agent_options_close(struct mb_agent_options *o)
{
    for (size_t i = 0; i < o->n_labels; i++) {
        mb_free((void *)(uintptr_t)o->labels[i].key);
        mb_free((void *)(uintptr_t)o->labels[i].value);
    }
    o->n_labels = 0;
}
