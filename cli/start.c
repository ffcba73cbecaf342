/*
 * mobula start: a node on this machine.
 *
 *  1. make TEMP_DIR/node_XXXXXXXX; 2. run `mobula-init agent -- mobula-agent FLAGS` in it, with
 *  --block in this very process; 3. else wait until the agent's node.json says ALIVE and print what
 *  to type next.
 *  The agent writes an error into node.json, or its front process ends, or 30 s are over: one line
 *  with the cause and the path of the log, and what was started is ended again.
 */
#include <errno.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/address.h"
#include "base/alloc.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/str.h"
#include "cli/local.h"
#include "cli/options.h"
#include "cli/start_resume.h"
#include "cli/start_store.h"

enum {
    CHECK_MS = 10,
    START_TIMEOUT_MS = 30000,
    ARGS_MAX = 96,
    LOG_LINE_MAX_BYTES = 512,
    GRACE_MAX_S = 86400
};

struct start_args {
    const char *address, *node_ip, *dashboard_host, *temp_dir, *node_name, *labels, *store,
        *store_sync, *store_password_file;
    const char *gang_order, *gang_patience;
    const char *token_file, *log_level, *resources, *notice_file, *notice_url;
    const char *ray_version, *ray_commit;
    int64_t num_cpus, memory, max_running_jobs, max_queued_jobs, max_ended_jobs;
    uint64_t log_max_bytes, max_package_bytes, package_keep_ms, launch_timeout_ms;
    int64_t num_gpus, port, dashboard_port, node_manager_port, http_port, metrics_port;
    int head, block, no_token, job_agent, resume;
};

#define OPTION(name_, arg_, kind_, field_, help_, min_, max_)                                      \
    {                                                                                              \
        name_, 0, arg_, kind_, offsetof(struct start_args, field_), help_, min_, max_              \
    }

static const struct mb_option options[] = {
    OPTION("head", NULL, MB_OPTION_FLAG, head, "be the cluster: the embedded head and a node", 0,
           0),
    OPTION("address", "HOST:PORT", MB_OPTION_STRING, address, "join the cluster of this GCS", 0, 0),
    OPTION("job-agent", NULL, MB_OPTION_FLAG, job_agent,
           "with --address of Ray's own head: its dashboard hands its jobs to this node", 0, 0),
    OPTION("num-gpus", "N", MB_OPTION_INT, num_gpus, "GPUs to offer (all that are found)", 0, 1024),
    OPTION("num-cpus", "N", MB_OPTION_INT, num_cpus,
           "head: CPUs for the entrypoints of jobs (all that are found)", 0, 1 << 20),
    OPTION("memory", "BYTES", MB_OPTION_INT, memory, "head: memory for them (all that is found)", 0,
           INT64_MAX),
    OPTION("resources", "JSON", MB_OPTION_STRING, resources,
           "head: other amounts for them, {\"disk\": 2}", 0, 0),
    OPTION("max-running-jobs", "N", MB_OPTION_INT, max_running_jobs,
           "head: jobs that run at once (4 for each CPU, at least 64)", 1, 4096),
    OPTION("max-queued-jobs", "N", MB_OPTION_INT, max_queued_jobs,
           "head: jobs that may wait, more are refused (10000)", 1, 1000000),
    OPTION("max-ended-jobs", "N", MB_OPTION_INT, max_ended_jobs,
           "head: jobs remembered, with their logs, that have ended (10000)", 1, 1000000),
    OPTION("node-ip-address", "IP", MB_OPTION_STRING, node_ip, "what other nodes dial", 0, 0),
    OPTION("dashboard-host", "IP", MB_OPTION_STRING, dashboard_host,
           "head without --node-ip-address: 0.0.0.0 takes this machine's own (127.0.0.1)", 0, 0),
    OPTION("port", "PORT", MB_OPTION_INT, port, "of the embedded GCS (6379; 0 picks one)", 0,
           65535),
    OPTION("dashboard-port", "PORT", MB_OPTION_INT, dashboard_port,
           "of the Jobs API (8265; 0 picks one)", 0, 65535),
    OPTION("node-manager-port", "PORT", MB_OPTION_INT, node_manager_port,
           "gRPC port of this node (0 picks one)", 0, 65535),
    OPTION("dashboard-agent-listen-port", "PORT", MB_OPTION_INT, http_port,
           "HTTP port of this node: metrics, health, logs (52365 if it is free; 0 picks one)", 0,
           65535),
    OPTION("metrics-export-port", "PORT", MB_OPTION_INT, metrics_port,
           "serve /metrics at this port, too (0, the default: nowhere else)", 0, 65535),
    OPTION("temp-dir", "DIR", MB_OPTION_STRING, temp_dir,
           "logs and state (MOBULA_TEMP_DIR, /tmp/mobula)", 0, 0),
    OPTION("resume", NULL, MB_OPTION_FLAG, resume,
           "head: go on as the last one in --temp-dir, with its jobs, if there was one", 0, 0),
    OPTION("node-name", "NAME", MB_OPTION_STRING, node_name, "shown in status (the host's name)", 0,
           0),
    OPTION("labels", "JSON", MB_OPTION_STRING, labels, "labels of the node, {\"zone\": \"a\"}", 0,
           0),
    OPTION("store", "WHERE", MB_OPTION_STRING, store,
           "the head's tables: sqlite (a file of the node), memory, or redis://... with standbys",
           0, 0),
    OPTION("store-password-file", "FILE", MB_OPTION_STRING, store_password_file,
           "password of a redis store (MOBULA_STORE_PASSWORD)", 0, 0),
    OPTION("store-sync", "MODE", MB_OPTION_STRING, store_sync,
           "full: the head's store survives power loss", 0, 0),
    OPTION("max-package-size", "SIZE", MB_OPTION_SIZE, max_package_bytes,
           "of a working_dir that is uploaded (100M)", 1, 0),
    OPTION("package-keep", "TIME", MB_OPTION_DURATION, package_keep_ms,
           "how long an uploaded package stays that no job needs (1h)", 0, 0),
    OPTION("log-max-bytes", "SIZE", MB_OPTION_SIZE, log_max_bytes,
           "cap of the log of a job or rank: the oldest lines go (1GiB; 0: none)", 0, 0),
    OPTION("gang-order", "ORDER", MB_OPTION_STRING, gang_order,
           "of the head: backfill lets a gang that fits start before an earlier one, strict does "
           "not (backfill)",
           0, 0),
    OPTION("gang-patience", "TIME", MB_OPTION_STRING, gang_patience,
           "with backfill: after this time what a gang needs is kept for it (60s)", 0, 0),
    OPTION("launch-timeout", "TIME", MB_OPTION_DURATION, launch_timeout_ms,
           "processes of a job that are not launched by then are given up (60s)", 0, 0),
    OPTION("token-file", "FILE", MB_OPTION_STRING, token_file,
           "the cluster's token (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token)", 0, 0),
    OPTION("no-token", NULL, MB_OPTION_FLAG, no_token,
           "trust the network: whoever reaches this node may run programs on it", 0, 0),
    OPTION("notice-file", "FILE", MB_OPTION_STRING, notice_file,
           "when it appears this node will be taken away: gangs save and upload", 0, 0),
    OPTION("notice-url", "URL", MB_OPTION_STRING, notice_url,
           "a cloud's notice of that: EC2 spot/instance-action, GCE instance/preempted", 0, 0),
    OPTION("ray-version", "V", MB_OPTION_STRING, ray_version,
           "head: the version of Ray that clients are told (MOBULA_RAY_VERSION, 2.60.0)", 0, 0),
    OPTION("ray-commit", "C", MB_OPTION_STRING, ray_commit,
           "head: its commit, for those that compare it (MOBULA_RAY_COMMIT)", 0, 0),
    OPTION("log-level", "LEVEL", MB_OPTION_STRING, log_level, "debug, info, warn or error (info)",
           0, 0),
    OPTION("block", NULL, MB_OPTION_FLAG, block, "stay in front until the node ends", 0, 0),
    {0},
};

/* ---- the command line of mobula-init ---- */

struct command {
    char *argv[ARGS_MAX + 1]; /* owned */
    int n, failed;
};

static void add(struct command *c, const char *word)
{
    char *copy = c->n < ARGS_MAX ? mb_strdup(word) : NULL;

    c->failed |= copy == NULL;
    if (copy != NULL)
        c->argv[c->n++] = copy;
}

static void add_text(struct command *c, const char *flag, const char *value)
{
    if (value == NULL)
        return;
    add(c, flag);
    add(c, value);
}

static void add_number(struct command *c, const char *flag, int64_t value)
{
    char number[24];

    if (value < 0)
        return; /* not given */
    snprintf(number, sizeof(number), "%lld", (long long)value);
    add_text(c, flag, number);
}

static void close_command(struct command *c)
{
    for (int i = 0; i < c->n; i++)
        mb_free(c->argv[i]);
}

/* A pod is killed so long after its SIGTERM; only its chart knows. */
static int read_grace(int64_t *killed_after_ms, struct mb_err *err)
{
    const char *text = getenv("MOBULA_GRACE_SECONDS");
    int64_t seconds;

    if (text == NULL || *text == '\0')
        return 0;
    if (mb_parse_i64(text, 1, GRACE_MAX_S, "MOBULA_GRACE_SECONDS", &seconds, err) != 0)
        return err->code;
    *killed_after_ms = seconds * 1000;
    return 0;
}

static int build(struct command *c, const struct start_args *a, const struct mb_start_store *secret,
                 const char *temp_dir, const char *node_dir, struct mb_err *err)
{
    char *self = mb_fs_self_dir(err);
    int64_t killed_after_ms = -1;
    char *init, *agent;

    if (self == NULL)
        return err->code;
    if (read_grace(&killed_after_ms, err) != 0) {
        mb_free(self);
        return err->code;
    }
    init = mb_path_join(self, "mobula-init");
    agent = mb_path_join(self, "mobula-agent");
    if (init != NULL && agent != NULL) {
        add(c, init);
        add(c, "agent");
        add_text(c, "--run-dir", node_dir);
        if (!a->block)
            add(c, "--daemonize");
        add_number(c, "--killed-after-ms", killed_after_ms);
        add_number(c, "--secret-fd", secret->fd);
        add(c, "--");
        add(c, agent);
        if (a->head)
            add(c, "--head");
        add_text(c, "--node-dir", node_dir);
        add_text(c, "--temp-dir", temp_dir);
        add_text(c, "--address", a->address);
        if (a->job_agent)
            add(c, "--job-agent");
        add_number(c, "--num-gpus", a->num_gpus);
        add_number(c, "--num-cpus", a->num_cpus);
        add_number(c, "--memory", a->memory);
        add_text(c, "--resources", a->resources);
        add_number(c, "--max-running-jobs", a->max_running_jobs);
        add_number(c, "--max-queued-jobs", a->max_queued_jobs);
        add_number(c, "--max-ended-jobs", a->max_ended_jobs);
        add_text(c, "--node-ip-address", a->node_ip);
        add_number(c, "--port", a->port);
        add_number(c, "--dashboard-port", a->dashboard_port);
        add_number(c, "--node-manager-port", a->node_manager_port);
        add_number(c, "--dashboard-agent-listen-port", a->http_port);
        add_number(c, "--metrics-export-port", a->metrics_port);
        if (a->max_package_bytes > 0)
            add_number(c, "--max-package-size", (int64_t)a->max_package_bytes);
        if (a->package_keep_ms > 0)
            add_number(c, "--package-keep", (int64_t)((a->package_keep_ms + 999) / 1000));
        add_number(c, "--log-max-bytes", (int64_t)a->log_max_bytes);
        add_text(c, "--node-name", a->node_name);
        add_text(c, "--labels", a->labels);
        add_text(c, "--store", secret->url);
        add_text(c, "--store-sync", a->store_sync);
        add_text(c, "--gang-order", a->gang_order);
        add_text(c, "--gang-patience", a->gang_patience);
        if (a->launch_timeout_ms > 0)
            add_number(c, "--launch-timeout", (int64_t)((a->launch_timeout_ms + 999) / 1000));
        add_text(c, "--token-file", a->token_file);
        if (a->no_token)
            add(c, "--no-token");
        add_text(c, "--notice-file", a->notice_file);
        add_text(c, "--notice-url", a->notice_url);
        add_text(c, "--ray-version", a->ray_version);
        add_text(c, "--ray-commit", a->ray_commit);
        add_text(c, "--log-level", a->log_level);
    }
    c->failed |= init == NULL || agent == NULL;
    mb_free(init);
    mb_free(agent);
    mb_free(self);
    return c->failed ? mb_err_set(err, MB_ENOMEM, "out of memory") : 0;
}

/* ---- waiting ---- */

/* What the agent said last; "" when nothing can be read. */
static void last_log_line(const char *dir, char line[LOG_LINE_MAX_BYTES])
{
    char *path = mb_path_join(dir, "agent.log");
    FILE *f = path != NULL ? fopen(path, "re") : NULL;
    char text[LOG_LINE_MAX_BYTES];

    line[0] = '\0';
    while (f != NULL && fgets(text, LOG_LINE_MAX_BYTES, f) != NULL) {
        text[strcspn(text, "\n")] = '\0';
        if (text[0] != '\0')
            memcpy(line, text, sizeof(text));
    }
    if (f != NULL)
        fclose(f);
    mb_free(path);
}

/* Ctrl-C while the node comes up: it is ended like a node that failed. */
static volatile sig_atomic_t interrupted;

static void on_signal(int signum)
{
    interrupted = signum;
}

static void catch_signals(void)
{
    struct sigaction action = {.sa_handler = on_signal}; /* no SA_RESTART: poll() returns */

    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

static int is_elsewhere(const struct start_args *a)
{
    return a->node_ip != NULL && mb_address_is_elsewhere(a->node_ip);
}

/* 0: ALIVE. */
static int wait_alive(const struct start_args *a, const char *dir, json_t **node,
                      struct mb_err *err)
{
    uint64_t deadline_ms = mb_mono_ms() + START_TIMEOUT_MS;
    struct mb_local_node init = {0};
    char line[LOG_LINE_MAX_BYTES];

    for (;;) {
        int rc = mb_local_read_node(dir, node, err);

        if (rc != 0)
            return rc > 0 ? 0 : rc;
        if (mb_local_find(dir, &init, NULL) != 0) {
            /* It may have written its reason and ended between the two looks. */
            rc = mb_local_read_node(dir, node, err);
            last_log_line(dir, line);
            return rc < 0 ? rc : mb_err_set(err, MB_ESTATE, "the agent ended: %s", line);
        }
        mb_free(init.dir);
        if (interrupted)
            return mb_err_set(err, MB_ECANCELED,
                              "interrupted; the node that was starting is ended");
        if (mb_mono_ms() >= deadline_ms) {
            if (!a->head) /* whatever else goes wrong, the agent says so itself */
                return mb_err_set(err, MB_EUNAVAIL,
                                  "no head answered at %s within %d s; is it up, and is this its "
                                  "GCS port? (mobula start --head prints it)",
                                  a->address, START_TIMEOUT_MS / 1000);
            last_log_line(dir, line);
            return mb_err_set(err, MB_ETIMEOUT, "the node is not ALIVE after %d s%s%s%s: %s",
                              START_TIMEOUT_MS / 1000,
                              is_elsewhere(a) ? ", at --node-ip-address " : "",
                              is_elsewhere(a) ? a->node_ip : "",
                              is_elsewhere(a) ? ", which this machine does not have" : "", line);
        }
        poll(NULL, 0, CHECK_MS);
    }
}

static int spawn_and_wait(char *const *argv, struct mb_err *err)
{
    pid_t pid = fork();
    int status;

    if (pid < 0)
        return mb_err_sys(err, errno, "fork");
    if (pid == 0) {
        execv(argv[0], argv);
        fprintf(stderr, "mobula: cannot run %s: %s\n", argv[0], strerror(errno));
        _exit(127);
    }
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return 0;
    return mb_err_set(err, MB_ESTATE, "%s could not start the node", argv[0]);
}

static const char *text(const json_t *node, const char *name)
{
    const char *s = json_string_value(json_object_get(node, name));

    return s != NULL ? s : "";
}

/* Never the token, only its place. */
static void print_access(const json_t *node)
{
    const char *path = text(node, "token_path");

    if (json_is_true(json_object_get(node, "is_open")))
        fprintf(stderr,
                "mobula: WARNING: this node takes commands from other machines WITHOUT a token: "
                "whoever reaches %s may run programs here\n",
                text(node, "node_ip"));
    if (json_is_true(json_object_get(node, "token_is_new")))
        printf("token: %s was made; other nodes and users of this cluster need a copy (mode 0600), "
               "Ray's commands RAY_AUTH_MODE=token too\n",
               path);
    else if (*path != '\0')
        printf("token: %s\n", path);
}

static void print_next_steps(const struct start_args *a, const char *dir, const json_t *node)
{
    json_int_t http_port = json_integer_value(json_object_get(node, "dashboard_port"));
    const char *gcs = text(node, "gcs_address"), *ip = text(node, "node_ip");
    struct mb_buf stop = {0}; /* as it can be typed */
    int failed = mb_buf_puts(&stop, "mobula stop");

    if (a->temp_dir != NULL)
        failed |= mb_buf_puts(&stop, " --temp-dir ") | mb_buf_shell(&stop, a->temp_dir);
    if (failed)
        mb_buf_close(&stop);

    printf("node %.12s is ALIVE\nlogs: %s\n", text(node, "node_id"), dir);
    print_access(node);
    if (!a->head) {
        printf("\nnext:\n  %s\n", mb_buf_str(&stop));
        mb_buf_close(&stop);
        return;
    }
    if (http_port == 0)
        http_port = 8265;
    if (!mb_starts_with(ip, "127.")) /* it listens on all of them */
        ip = "127.0.0.1";
    if (*gcs == '\0' || mb_starts_with(gcs, "127."))
        printf("\nnext:\n  a second node here: mobula start --address %s\n"
               "  other machines:     join a head started with --node-ip-address IP\n",
               *gcs != '\0' ? gcs : "127.0.0.1:6379");
    else
        printf("\nnext:\n  on other machines:  mobula start --address %s\n", gcs);
    printf("  submit:             mobula job submit --address http://%s:%lld -- mobula train ...\n"
           "  look:               mobula status --address http://%s:%lld\n"
           "  end:                %s\n",
           ip, (long long)http_port, ip, (long long)http_port, mb_buf_str(&stop));
    mb_buf_close(&stop);
}

/* ---- start ---- */

static int check_labels(const char *text, struct mb_err *err)
{
    json_t *labels = json_loads(text, 0, NULL), *value;
    const char *name;
    int good = json_is_object(labels);

    json_object_foreach(labels, name, value)
    {
        good &= json_is_string(value);
    }
    json_decref(labels);
    return good ? 0
                : mb_err_set(err, MB_EINVAL,
                             "start: --labels %.80s: expected a JSON object of strings, "
                             "e.g. '{\"zone\": \"a\"}'",
                             text);
}

static int check(const struct start_args *a, int ray_mode, struct mb_err *err)
{
    uint64_t patience_ms;

    if (a->head && a->address != NULL)
        return mb_err_set(err, MB_EINVAL, "start: either --head or --address, not both");
    if (!a->head && a->address == NULL)
        return mb_err_set(
            err, MB_EINVAL,
            "start: say --head to be the cluster, or --address HOST:PORT to join one");
    if (a->address != NULL && mb_address_check_heads("start: --address", a->address, err) != 0)
        return MB_EINVAL;
    if (a->node_ip != NULL && mb_address_check("start: --node-ip-address", a->node_ip, err) != 0)
        return MB_EINVAL;
    if (a->labels != NULL && check_labels(a->labels, err) != 0)
        return MB_EINVAL;
    if (a->store != NULL && strcmp(a->store, "sqlite") != 0 && strcmp(a->store, "memory") != 0 &&
        !mb_starts_with(a->store, "redis"))
        return mb_err_set(err, MB_EINVAL, "start: --store: sqlite, memory or redis://...");
    if (a->resume && (!a->head || (a->store != NULL && strcmp(a->store, "sqlite") != 0)))
        return mb_err_set(err, MB_EINVAL, "start: --resume goes with --head and the sqlite store");
    if (a->gang_order != NULL && strcmp(a->gang_order, "backfill") != 0 &&
        strcmp(a->gang_order, "strict") != 0)
        return mb_err_set(err, MB_EINVAL, "start: --gang-order %s: backfill or strict",
                          a->gang_order);
    if (a->gang_patience != NULL &&
        mb_parse_duration_ms(a->gang_patience, "start: --gang-patience", &patience_ms, err) != 0)
        return MB_EINVAL;
    if ((a->gang_order != NULL || a->gang_patience != NULL) && !a->head)
        return mb_err_set(err, MB_EINVAL, "start: --gang-order and --gang-patience go with --head");
    if (a->no_token && a->token_file != NULL)
        return mb_err_set(err, MB_EINVAL, "start: either --token-file or --no-token, not both");
    if (a->store_sync != NULL && !ray_mode && strcmp(a->store_sync, "full") != 0 &&
        strcmp(a->store_sync, "normal") != 0)
        return mb_err_set(err, MB_EINVAL, "start: --store-sync %s: normal or full", a->store_sync);
    return 0;
}

/* What a head binds to by itself, in other words than 127.0.0.1. */
static int is_loopback_name(const char *host)
{
    return strcmp(host, "::1") == 0 || strcmp(host, "localhost") == 0 ||
           mb_starts_with(host, "localhost.") || mb_starts_with(host, "localhost6") ||
           mb_starts_with(host, "ip6-l");
}

/* Ray's flag for who may reach the dashboard, which here is the head as a whole: KubeRay starts
 * every head with 0.0.0.0 and says nothing else of addresses. */
static int take_dashboard_host(struct start_args *a, char own[64], struct mb_err *err)
{
    const char *host = a->dashboard_host;

    if (host == NULL || !a->head || a->node_ip != NULL || is_loopback_name(host))
        return 0;
    a->node_ip = host;
    if (strcmp(host, "0.0.0.0") != 0 && strcmp(host, "::") != 0)
        return mb_address_check("start: --dashboard-host", host, err);
    a->node_ip = own;
    return mb_address_find_own(own, err);
}

/* The temporary directory, made and absolute: the agent runs elsewhere. */
static char *make_temp_dir(const char *flag, struct mb_err *err)
{
    const char *temp_dir = mb_local_temp_dir(flag);
    char *absolute = NULL;

    if (mb_fs_mkdir_p(temp_dir, 0755, err) != 0 ||
        (mb_local_temp_dir_is_default(flag) && mb_local_check_owner(temp_dir, err) != 0))
        return NULL;
    absolute = realpath(temp_dir, NULL);
    if (absolute == NULL)
        mb_err_sys(err, errno, "--temp-dir %s", temp_dir);
    return absolute;
}

static char *make_node_dir(const char *temp_dir, struct mb_err *err)
{
    uint64_t random = mb_random_u64();
    char *dir = mb_asprintf("%s/node_%08x", temp_dir, (unsigned)(random & 0xffffffffu));

    if (dir == NULL)
        mb_err_set(err, MB_ENOMEM, "out of memory");
    else if (mb_fs_mkdir_p(dir, 0700, err) == 0)
        return dir;
    mb_free(dir);
    return NULL;
}

/* A new directory, or with --resume the one of the last head. */
static char *choose_node_dir(const struct start_args *a, const char *temp_dir, int is_quiet,
                             struct mb_err *err)
{
    char *last = NULL;

    if (a->head && mb_start_resume_find(temp_dir, &last, err) != 0)
        return NULL;
    if (last != NULL && a->resume) {
        if (mb_start_resume_take(last, err) == 0) {
            printf("going on from %s\n", last);
            fflush(stdout);
            return last;
        }
        mb_free(last);
        return NULL;
    }
    if (last != NULL && !is_quiet)
        fprintf(stderr, "mobula: this is a new cluster; --resume would go on from %s\n", last);
    mb_free(last);
    return make_node_dir(temp_dir, err);
}

/* What failed is ended before the error is told. */
static int start_daemon(const struct start_args *a, const char *dir, char *const *argv,
                        struct mb_err *err)
{
    struct mb_local_node init;
    json_t *node = NULL;
    int rc;

    catch_signals();
    rc = spawn_and_wait(argv, err);
    if (rc == 0)
        rc = wait_alive(a, dir, &node, err);
    if (rc == 0) {
        print_next_steps(a, dir, node);
    } else if (mb_local_find(dir, &init, NULL) == 0) {
        if (mb_local_ask_to_end(&init, 0, NULL) != 0 ||
            mb_local_wait_end(&init, MB_LOCAL_KILL_MS, NULL) == MB_EIO)
            fprintf(stderr, "mobula: process %lld could not be ended\n", (long long)init.init_pid);
        mb_free(init.dir);
    }
    json_decref(node);
    return rc;
}

static int run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct start_args args = {.num_cpus = -1,
                              .memory = -1,
                              .max_running_jobs = -1,
                              .max_queued_jobs = -1,
                              .max_ended_jobs = -1,
                              .num_gpus = -1,
                              .port = -1,
                              .dashboard_port = -1,
                              .node_manager_port = -1,
                              .http_port = -1,
                              .log_max_bytes = UINT64_MAX};
    struct command command = {.n = 0};
    struct mb_start_store store = {.fd = -1};
    struct mb_err err;
    char *temp_dir = NULL, *dir = NULL, own[64];
    int n_words, rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &err);

    if (rc == 1)
        return 0;
    if (rc == 0)
        rc = check(&args, cli->ray_mode, &err);
    if (rc == 0)
        rc = take_dashboard_host(&args, own, &err);
    if (rc == 0) {
        temp_dir = make_temp_dir(args.temp_dir, &err);
        dir = temp_dir != NULL ? choose_node_dir(&args, temp_dir, cli->ray_mode, &err) : NULL;
        rc = dir != NULL ? mb_start_store(&store, args.store, args.store_password_file, &err)
                         : err.code;
    }
    if (rc == 0)
        rc = build(&command, &args, &store, temp_dir, dir, &err);
    if (rc == 0 && is_elsewhere(&args))
        fprintf(stderr,
                "mobula: WARNING: no interface of this machine has --node-ip-address %s: nodes%s "
                "have to reach this one there all the same\n",
                args.node_ip, args.head ? ", this one included," : "");
    if (rc == 0 && args.block) {
        execv(command.argv[0], command.argv);
        rc = mb_err_sys(&err, errno, "cannot run %s", command.argv[0]);
    } else if (rc == 0) {
        rc = start_daemon(&args, dir, command.argv, &err);
        if (rc != 0)
            mb_err_set(&err, rc, "%.800s (log: %s/agent.log)", err.text, dir);
    }
    close_command(&command);
    mb_start_store_close(&store);
    mb_free(temp_dir);
    mb_free(dir);
    return rc != 0 ? mb_cli_fail(cli, &err) : 0;
}

const struct mb_verb mb_verb_start = {
    .name = "start",
    .summary = "start a node on this machine",
    .synopsis = "--head | --address HOST:PORT [OPTIONS]",
    .examples = "  mobula start --head                     # a whole cluster on this machine\n"
                "  mobula start --address head:6379        # join one, Ray's or mobula's\n"
                "  mobula start --address head:6379 --block --num-gpus 8\n",
    .options = options,
    .no_words = 1,
    .run = run,
};
