/*
 * The start of a node, piece by piece, in the order in which the pieces need each other.
 *
 *  1. Every piece that fails ends the start with its error; agent.c closes what is there already.
 *  2. A port that a former agent of this node had is taken: it is waited for (PORTS_WAIT_MS), since
 *     others know the node by it. Then the node takes another one and tells the head that it moved
 *     (node.c); a head, whose ports are written down everywhere, fails, and its front process
 *     starts it again.
 *  3. A head whose store is shared may stand by for as long as it takes.
 */
#include "agent/agent_run.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "agent/callers.h"
#include "agent/deaf.h"
#include "agent/forget_service.h"
#include "agent/head_limits.h"
#include "agent/head_store.h"
#include "agent/node_file.h"
#include "agent/prepare.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/ports.h"
#include "base/str.h"
#include "gcs/health.h"
#include "gcs/tls.h"

enum {
    DRIVERS_PER_GPU_NODE = 64,
    DOUBT_MS = 30000, /* twice this long a bundle may wait for its Commit */
    /* What a restart takes besides: the front process's back-off, the start, and what is said to
     * the head. */
    RETURN_MS = 2000,
    /* The head last heard of the node up to MB_HEALTH_PERIOD_MS before the former agent died. */
    PORTS_WAIT_MS = MB_HEALTH_SILENCE_MS - MB_HEALTH_PERIOD_MS - RETURN_MS,
    PORTS_LOOK_MS = 50
};

_Static_assert(PORTS_WAIT_MS >= 2000, "too short for who has a port for a moment only");

/* A standby waits for as long as it takes. */
#define CONNECT_FOR_EVER_MS (UINT64_C(1) << 40)

/* Of a message from a driver; what a launch says takes a kilobyte a node. */
#define MESSAGE_MAX_BYTES MB_GCS_NODE_MESSAGE_MAX_BYTES

/* ---- piece by piece ---- */

static int make_ledger(struct agent *a, struct mb_err *err)
{
    struct mb_resource totals[3];
    unsigned gpus = mb_agent_gpus_to_offer(a, &a->gpus);
    size_t n = 0;
    int rc;

    if (gpus > 0)
        totals[n++] = (struct mb_resource){MB_RESOURCE_GPU, gpus};
    if (gpus > 0)
        totals[n++] = (struct mb_resource){MB_RESOURCE_DRIVER, DRIVERS_PER_GPU_NODE};
    totals[n++] = (struct mb_resource){MB_RESOURCE_SLOT, gpus > 0 ? gpus : mb_cpus_detect()};
    mb_info("agent", "resources " MB_RESOURCE_GPU "=%u " MB_RESOURCE_SLOT "=%u", gpus,
            totals[n - 1].units);
    rc = mb_ledger_create(totals, n, &a->ledger, err);
    if (rc == MB_OK)
        mb_agent_load_ledger(a);
    return rc;
}

static struct mb_gcs *gcs_of(void *arg)
{
    struct agent *a = arg;

    return a->node != NULL ? mb_node_gcs(a->node) : NULL;
}

static int start_jobs(struct agent *a, struct mb_err *err)
{
    char *cwd = getcwd(NULL, 0), *unpacker = mb_path_join(a->self_dir, "mobula-unpack");
    struct mb_jobs_opts opts = {.loop = &a->loop,
                                .init = a->init,
                                .logs = a->log_keeper,
                                .node_dir = a->opts->node_dir,
                                .bin_dir = a->self_dir,
                                .unpacker = unpacker,
                                .cwd = cwd != NULL ? cwd : "/",
                                .gcs_of = gcs_of,
                                .gcs_arg = a,
                                .gpus = {.ledger = a->ledger,
                                         .gpus = &a->gpus,
                                         .visible_env = mb_gpu_visible_env(a->gpus.vendor),
                                         .order_env = mb_gpu_order_env(a->gpus.vendor),
                                         .on_changed = mb_agent_on_ledger_changed,
                                         .arg = a}};
    int rc = mb_jobs_create(&opts, &a->jobs, err);

    free(cwd);
    mb_free(unpacker);
    if (rc == MB_OK && !a->opts->is_job_agent &&
        (!a->opts->is_head || mb_head_store_is_shared(a->opts->store)))
        mb_jobs_adopt_all(a->jobs); /* before their GPUs are taken for nobody's */
    return rc;
}

int mb_agent_report_drivers(struct agent *a, struct mb_err *err)
{
    struct mb_job_amount totals[MB_JOB_QUEUE_KINDS_MAX];
    struct mb_head_job_limits limits;
    struct mb_drivers_opts opts = {.jobs = a->jobs,
                                   .node = a->node,
                                   .takes_drivers = mb_access_callers_are_trusted(&a->access) ||
                                                    mb_access_is_loopback(a->ip),
                                   .totals = totals};
    uint32_t n_gpus, n_free;
    int rc = mb_head_limits_of(a->opts, totals, &limits, err);

    if (rc != MB_OK)
        return rc;
    mb_job_gpus_count(a->ledger, &n_gpus, &n_free);
    opts.n_totals = limits.n_totals;
    totals[opts.n_totals++] =
        (struct mb_job_amount){.name = MB_JOB_GPU, .amount = n_gpus, .is_outside = 1};
    if (!opts.takes_drivers)
        mb_info("agent", "the head starts no drivers here: %s", MB_CALLER_NEEDS_TOKEN);
    return mb_drivers_start(&a->loop, &opts, &a->drivers, err);
}

/* ---- a head whose store is shared ---- */

/* This node's drivers are the head's own again. */
static void on_head_active(void *arg)
{
    struct agent *a = arg;

    mb_info("agent", "this node is the head now address=%s", a->gcs_address);
    mb_drivers_stop(a->drivers);
    a->drivers = NULL;
}

static void on_other_head(void *arg, const char *address)
{
    struct agent *a = arg;
    struct mb_gcs *gcs = a->node != NULL ? mb_node_gcs(a->node) : NULL;
    struct mb_err err = {0};

    if (gcs != NULL && mb_gcs_add_address(gcs, address, &err) != MB_OK)
        mb_warn("agent", "the head at %s: %s", address, err.text);
}

/* Lost: the front process starts the agent again, as a standby; gangs and drivers go on. */
static const struct mb_head_ops head_ops = {on_head_active, on_other_head, mb_agent_on_failed};

static int start_head(struct agent *a, struct mb_err *err)
{
    struct mb_job_amount totals[MB_JOB_QUEUE_KINDS_MAX];
    const char *session = strrchr(a->opts->node_dir, '/') + 1;
    struct mb_head_store store;
    char *packages = mb_path_join(a->opts->node_dir, "packages");
    struct mb_head_opts opts = {
        .bind_addr = a->access.bind_addr,
        .http_addr = a->access.http_addr,
        .is_http_local_too = mb_access_is_local_too(&a->access),
        .node_ip = a->ip,
        .gcs_port = a->opts->port != 0 ? (int)a->opts->port : a->former.head_port,
        .http_port =
            a->opts->dashboard_port != 0 ? (int)a->opts->dashboard_port : a->former.head_http_port,
        .gang_order =
            strcmp(a->opts->gang_order, "strict") == 0 ? MB_PLACE_STRICT : MB_PLACE_BACKFILL,
        .gang_patience_ms = a->opts->gang_patience_ms ? a->opts->gang_patience_ms : 1,
        .session_name = session,
        .session_dir = a->opts->node_dir,
        .temp_dir = a->opts->temp_dir,
        .packages_dir = packages,
        .token = a->access.token.text,
        .ray_version = a->opts->ray_version,
        .ray_commit = a->opts->ray_commit};
    int rc = mb_head_store_open(a->opts, &store, &opts, err);

    if (rc == MB_OK && packages == NULL)
        rc = mb_err_set(err, MB_ENOMEM, "no memory for the head");
    if (rc == MB_OK)
        rc = mb_head_limits_of(a->opts, totals, &opts.jobs, err);
    if (rc == MB_OK)
        rc = mb_head_start(&a->loop, a->grpc, &opts, mb_jobs_runner(a->jobs), &head_ops, a,
                           &a->head, err);
    mb_head_store_close(&store);
    mb_free(packages);
    if (rc != MB_OK)
        return rc;
    snprintf(a->gcs_address, sizeof(a->gcs_address), "%s:%d", a->ip, mb_head_gcs_port(a->head));
    return MB_OK;
}

/* Its jobs come from the dashboard of Ray's own head. */
static int start_guest(struct agent *a, struct mb_err *err)
{
    static const struct mb_head_ops ops = {mb_agent_on_jobs_taken, NULL, mb_agent_on_refused};
    struct mb_job_amount totals[MB_JOB_QUEUE_KINDS_MAX];
    char *path = mb_path_join(a->opts->node_dir, "job-agent.sqlite");
    struct mb_head_opts opts = {.bind_addr = a->access.bind_addr,
                                .node_ip = a->ip,
                                .guest_of = a->gcs_address,
                                .store_path = path,
                                .session_dir = a->opts->node_dir,
                                .temp_dir = a->opts->temp_dir,
                                .gang_patience_ms = 1,
                                .token = a->access.token.text};
    int rc = path != NULL ? mb_head_limits_of(a->opts, totals, &opts.jobs, err)
                          : mb_err_set(err, MB_ENOMEM, "no memory for the job agent");

    if (rc == MB_OK)
        rc = mb_head_start(&a->loop, a->grpc, &opts, mb_jobs_runner(a->jobs), &ops, a, &a->head,
                           err);
    mb_free(path);
    return rc;
}

static int make_parts(struct agent *a, struct mb_err *err)
{
    int waits_for_head = a->opts->is_head && mb_head_store_is_shared(a->opts->store);
    struct mb_gangs_opts gangs = {.node_dir = a->opts->node_dir,
                                  .node_ip = a->ip,
                                  .self_dir = a->self_dir,
                                  .logs = a->log_keeper,
                                  .gpus = &a->gpus,
                                  .callers_are_trusted = mb_access_callers_are_trusted(&a->access)};
    struct mb_node_opts node = {.node_dir = a->opts->node_dir,
                                .gcs_address = a->gcs_address,
                                .token = a->access.token.text,
                                .ip = a->ip,
                                .node_name = a->node_name,
                                .temp_dir = a->opts->temp_dir,
                                .session_dir = a->opts->node_dir,
                                .accelerator = a->gpus.model,
                                .labels = a->opts->labels,
                                .n_labels = a->opts->n_labels,
                                .is_head = a->opts->is_head,
                                .connect_timeout_ms = waits_for_head ? CONNECT_FOR_EVER_MS : 0,
                                .max_message_bytes = MESSAGE_MAX_BYTES};
    int rc = mb_gangs_create(&a->loop, a->ledger, a->init, &gangs, &mb_agent_gangs_ops, a,
                             &a->gangs, err);

    if (rc == MB_OK)
        rc = mb_node_create(&a->loop, a->grpc, a->ledger, &node, &mb_agent_node_ops, a, &a->node,
                            err);
    if (rc == MB_OK) /* until it is registered: drivers of before the restart are its own */
        rc = mb_jobs_set_address(a->jobs, "", mb_node_former_hex(a->node), err);
    if (rc == MB_OK) {
        mb_gangs_adopt(a->gangs);
        if (mb_ledger_drop_unheld(a->ledger) > 0)
            mb_agent_keep_ledger(a);
        if (!a->opts->is_head && !a->opts->is_job_agent)
            rc = mb_agent_report_drivers(a, err);
        a->adrift.ledger = a->ledger;
        a->adrift.node = a->node;
        a->adrift.on_lost = mb_agent_on_adrift_lost;
        a->adrift.arg = a;
        mb_adrift_resume(&a->adrift);
        uv_timer_start(&a->doubt_timer, mb_agent_on_doubt_timer, DOUBT_MS, DOUBT_MS);
        mb_deaf_watch(a->grpc, &a->doubt_timer);
    }
    return rc;
}

static int listen_at(struct agent *a, int port, struct mb_err *err)
{
    struct mb_grpc_server_opts opts = {.token = a->access.token.text,
                                       .max_message_bytes = MESSAGE_MAX_BYTES};
    char addr[96];
    int rc = mb_grpc_server_create(a->grpc, &opts, &a->server, err);

    a->leases.node = a->node;
    a->manager = (struct mb_node_manager){.ledger = a->ledger,
                                          .node = a->node,
                                          .leases = &a->leases,
                                          .ip = a->ip,
                                          .ops = &mb_agent_manager_ops,
                                          .arg = a};
    a->driver_service = (struct mb_driver_service){.jobs = a->jobs,
                                                   .node_ip = a->ip,
                                                   .callers_are_trusted =
                                                       mb_access_callers_are_trusted(&a->access)};
    a->drain_service = (struct mb_drain_service){.gangs = a->gangs,
                                                 .node = a->node,
                                                 .drivers = &a->driver_service,
                                                 .node_dir = a->opts->node_dir};
    a->logs = (struct mb_log_service){.loop = &a->loop, .root = a->opts->node_dir};
    a->looks =
        (struct mb_look_service){.loop = &a->loop,
                                 .node_ip = a->ip,
                                 .callers_are_trusted = mb_access_callers_are_trusted(&a->access)};
    snprintf(addr, sizeof(addr), "%s:%d", a->access.bind_addr, port);
    if (rc == MB_OK)
        rc = mb_node_manager_add(a->server, &a->manager, err);
    if (rc == MB_OK)
        rc = mb_log_service_add(a->server, &a->logs, err);
    if (rc == MB_OK)
        rc = mb_look_service_add(a->server, &a->looks, err);
    if (rc == MB_OK)
        rc = mb_forget_service_add(a->server, mb_jobs_runner(a->jobs), err);
    if (rc == MB_OK)
        rc = mb_driver_service_add(a->server, &a->driver_service, err);
    if (rc == MB_OK)
        rc = mb_drain_service_add(a->server, &a->drain_service, err);
    if (rc == MB_OK)
        rc = mb_gangs_serve(a->gangs, a->server, mb_node_id(a->node), err);
    if (rc == MB_OK)
        rc = mb_grpc_server_listen(a->server, addr, &a->grpc_port, err);
    return rc;
}

static int start_servers(struct agent *a, struct mb_err *err)
{
    int wanted = a->opts->agent_port != 0 ? (int)a->opts->agent_port : mb_node_former_port(a->node);
    int rc = listen_at(a, wanted, err);

    if (rc == MB_EEXIST && a->opts->agent_port == 0 && wanted != 0) {
        mb_warn("agent", "the port of the former agent is taken: %s", err->text);
        rc = listen_at(a, 0, err); /* the unbound server goes with the runtime */
    }
    if (rc != MB_OK)
        return rc;
    a->http.node = a->node;
    a->http.ledger = a->ledger;
    a->http.gpu_keeper = a->gpu_keeper;
    a->http.figures = a->figures;
    a->http.gangs = a->gangs;
    a->http.grpc = a->grpc;
    a->http.ip = a->ip;
    a->http.head = a->head;
    a->http.node_name = a->node_name;
    rc = mb_agent_http_start(&a->loop, &a->http, &a->access, (int)a->opts->http_port,
                             a->former.http_port, err);
    snprintf(a->http_address, sizeof(a->http_address), "http://%s:%d", a->ip, a->http.port);
    if (rc == MB_OK && a->opts->metrics_port > 0)
        rc = mb_agent_http_start_metrics(&a->loop, &a->http, &a->access, (int)a->opts->metrics_port,
                                         err);
    return rc;
}

static int make_name(struct agent *a)
{
    char hostname[256] = "node";

    gethostname(hostname, sizeof(hostname) - 1);
    a->node_name = mb_strdup(a->opts->node_name != NULL ? a->opts->node_name : hostname);
    return a->node_name != NULL ? MB_OK : MB_ENOMEM;
}

static int choose_access(struct agent *a, struct mb_err *err)
{
    int rc = mb_access_choose(a->opts, a->ip, &a->access, err);

    if (rc == MB_OK)
        rc = mb_access_hand_down(&a->access, err);
    if (rc != MB_OK)
        return rc;
    if (a->access.is_open)
        mb_warn("agent",
                "this node listens beyond this machine WITHOUT a token: whoever reaches %s may run "
                "programs here",
                a->ip);
    else if (a->access.token.text != NULL)
        mb_info("agent", "callers need the token%s%s%s",
                a->access.token.path != NULL ? " in " : " of RAY_AUTH_TOKEN",
                a->access.token.path != NULL ? a->access.token.path : "",
                a->access.token.is_new ? ", which was made now" : "");
    if (a->access.is_mutual)
        mb_info("agent", "gRPC callers need a certificate of the CA in %s",
                getenv("RAY_TLS_CA_CERT") != NULL ? getenv("RAY_TLS_CA_CERT") : "RAY_TLS_CA_CERT");
    return MB_OK;
}

/* Of the front process: in a pod about when its container began, and the same for every agent. */
static uint64_t node_started_unix_ms(const struct agent *a)
{
    uint64_t hz = (uint64_t)sysconf(_SC_CLK_TCK), now_ms = mb_unix_ms(), ticks = 0, up_ms, at_ms;
    struct timespec up = {0};
    int64_t pid = 0;

    mb_init_identity(a->init, &pid, &ticks);
    clock_gettime(CLOCK_BOOTTIME, &up);
    up_ms = (uint64_t)up.tv_sec * 1000 + (uint64_t)up.tv_nsec / 1000000;
    at_ms = ticks * 1000 / hz;
    return ticks > 0 && at_ms < up_ms ? now_ms - (up_ms - at_ms) : now_ms;
}

static const char *from_environment(const char *name)
{
    return getenv(name);
}

/* When the node's job is over, as far as it can know. Drivers are told: the gangs that they start
 * may be on nodes that came later, or again, and would count from there. */
static int read_active_deadline(struct agent *a, struct mb_err *err)
{
    uint64_t *ms = &a->active_deadline_unix_ms;
    char text[40];
    int rc = mb_notice_active_deadline(from_environment, node_started_unix_ms(a), ms, err);

    if (rc != MB_OK || *ms == 0)
        return rc;
    snprintf(text, sizeof(text), "@%llu.%03u", (unsigned long long)(*ms / 1000),
             (unsigned)(*ms % 1000));
    return setenv("MOBULA_ESTIMATED_DEADLINE", text, 1) == 0
               ? MB_OK
               : mb_err_sys(err, errno, "MOBULA_ESTIMATED_DEADLINE");
}

static int asks_for_rayjob(const struct agent *a)
{
    return a->opts->is_head || getenv("MOBULA_RAYJOB_ASKS") != NULL;
}

/* Before all that may fail: what the chart made gets its owner also then. A pod that cannot ask has
 * the estimate. */
static void watch_rayjob(struct agent *a)
{
    struct mb_err err = {0};
    int rc = mb_rayjob_watch_environment(from_environment, &a->rayjob, &err);

    if (rc < 0)
        a->rayjob.name = NULL;
    if (rc == 1 && asks_for_rayjob(a))
        rc = mb_rayjob_watch_start(&a->loop, &a->rayjob, &mb_agent_rayjob_ops, a, &a->rayjob_watch,
                                   &err);
    if (rc < 0)
        mb_warn("agent", "the RayJob cannot be asked for its deadline: %s", err.text);
}

/* What needs no port. */
static int prepare(struct agent *a, struct mb_err *err)
{
    int rc = mb_agent_make_dirs(a->opts->node_dir, err);

    if (rc == MB_OK)
        rc = mb_init_open(&a->loop, mb_agent_on_init_lost, a, &a->init, err);
    if (rc == MB_OK)
        mb_init_set_launch_timeout(a->init, (uint64_t)a->opts->launch_timeout_s * 1000);
    if (rc == MB_OK)
        rc = read_active_deadline(a, err);
    if (rc == MB_OK)
        watch_rayjob(a);
    if (rc == MB_OK)
        rc = make_name(a) == MB_OK ? MB_OK : mb_err_set(err, MB_ENOMEM, "no memory");
    if (rc == MB_OK)
        rc = mb_agent_find_ip(a->opts, a->ip, err);
    if (rc == MB_OK)
        rc = choose_access(a, err);
    if (rc != MB_OK)
        return rc;
    if (a->opts->address != NULL)
        snprintf(a->gcs_address, sizeof(a->gcs_address), "%s", a->opts->address);
    a->self_dir = mb_fs_self_dir(err);
    return a->self_dir != NULL ? MB_OK : err->code;
}

/* When this node will be gone, as far as somebody says it. */
static int start_deadlines(struct agent *a, struct mb_err *err)
{
    struct mb_notice_opts opts = {.file = a->opts->notice_file, .url = a->opts->notice_url};
    uint64_t unix_ms = a->active_deadline_unix_ms;
    int rc = MB_OK;

    if (unix_ms != 0) {
        mb_info("agent", "the job's active deadline, as far as this node can know, in_s=%lld",
                ((long long)unix_ms - (long long)mb_unix_ms()) / 1000);
        mb_gangs_deadline(a->gangs, MB_DEADLINE_ESTIMATED, unix_ms);
    }
    if (a->rayjob.name != NULL) {
        struct mb_rayjob_news_opts news = {.node = a->node,
                                           .cluster = a->rayjob.cluster,
                                           .look_ms = a->rayjob.look_ms,
                                           .tells = asks_for_rayjob(a)};

        rc = mb_rayjob_news_start(&a->loop, &news, mb_agent_on_rayjob_deadline, a, &a->rayjob_news,
                                  err);
        if (rc == MB_OK && a->rayjob_deadline_unix_ms != 0)
            mb_agent_on_rayjob_deadline(a, a->rayjob_deadline_unix_ms);
    }
    if (rc != MB_OK)
        return rc;
    if (opts.file == NULL && opts.url == NULL)
        return MB_OK;
    return mb_notice_start(&a->loop, &opts, mb_agent_on_notice, a, &a->notice, err);
}

static int start_hardware(struct agent *a, struct mb_err *err)
{
    struct mb_hardware_report_opts opts = {
        .node = a->node, .ip = a->ip, .dir = a->opts->node_dir, .figures = a->figures};

    return mb_hardware_report_start(&a->loop, &opts, &a->hardware, err);
}

/* The ledger is there. */
static int start_parts(struct agent *a, struct mb_err *err)
{
    int rc = mb_gcs_grpc_create(&a->loop, &a->grpc, err);

    if (rc == MB_OK && mb_grpc_tls(a->grpc) != NULL)
        rc = mb_grpc_tls_names(mb_grpc_tls(a->grpc), a->ip, err);
    if (rc == MB_OK)
        rc = mb_log_keeper_create(&a->loop, a->opts->node_dir, a->opts->log_max_bytes,
                                  &a->log_keeper, err);
    if (rc == MB_OK)
        rc = start_jobs(a, err);
    if (rc == MB_OK && a->opts->is_head)
        rc = start_head(a, err);
    if (rc == MB_OK && a->opts->is_job_agent)
        rc = start_guest(a, err);
    if (rc == MB_OK)
        rc = make_parts(a, err);
    if (rc == MB_OK)
        rc = start_servers(a, err);
    if (rc == MB_OK)
        rc = start_deadlines(a, err);
    if (rc == MB_OK && (!a->opts->is_head || a->figures != NULL)) /* our head reads GPUs only */
        rc = start_hardware(a, err);
    if (rc == MB_OK)
        mb_drain_service_resume(&a->drain_service);
    if (rc == MB_OK)
        rc = mb_node_start(a->node, a->grpc_port, a->http.port, err);
    if (rc == MB_OK)
        mb_agent_stop_asked(a);
    return rc;
}

/* One of the former agent's ports that cannot be had now, 0: none. */
static int taken_port(const struct agent *a)
{
    const int ports[] = {a->former.head_port, a->former.head_http_port, a->former.grpc_port,
                         a->former.http_port, a->former.metrics_port};

    for (size_t i = 0; i < sizeof(ports) / sizeof(ports[0]); i++)
        if (ports[i] != 0 && !mb_port_is_free(a->access.bind_addr, ports[i]))
            return ports[i];
    return 0;
}

static void on_port_timer(uv_timer_t *t)
{
    struct agent *a = t->data;
    int taken = taken_port(a);
    struct mb_err err = {0};

    if (taken != 0 && mb_mono_ms() < a->ports_by_ms)
        return;
    uv_timer_stop(t);
    if (taken == 0)
        mb_info("agent", "the ports of the former agent are free again");
    if (start_parts(a, &err) != MB_OK)
        mb_agent_on_failed(a, &err);
}

static int start_when_ports_are_free(struct agent *a, struct mb_err *err)
{
    int taken = taken_port(a);

    if (taken == 0)
        return start_parts(a, err);
    mb_warn("agent", "waiting for the ports of the former agent: %d is taken", taken);
    a->ports_by_ms = mb_mono_ms() + PORTS_WAIT_MS;
    uv_timer_start(&a->port_timer, on_port_timer, PORTS_LOOK_MS, PORTS_LOOK_MS);
    return MB_OK;
}

void mb_agent_begin(struct agent *a, const struct mb_gpu_found *found)
{
    struct mb_err err = {0};
    int rc = make_ledger(a, &err);

    a->has_begun = 1;
    if (rc == MB_OK && a->gpus.vendor != MB_GPU_NONE)
        rc = mb_agent_watch_gpus(a, found, &err);
    if (rc == MB_OK)
        rc = start_when_ports_are_free(a, &err);
    if (rc != MB_OK)
        mb_agent_on_failed(a, &err);
}

int mb_agent_start(struct agent *a, struct mb_err *err)
{
    int rc;

    mb_node_file_former_ports(a->opts->node_dir, &a->former); /* a failure writes them again */
    rc = prepare(a, err);
    return rc == MB_OK ? mb_agent_count_gpus(a, err) : rc;
}
