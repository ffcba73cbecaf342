/*
 * Start and stop of a node.
 *
 * Start: directories, front process -> GPUs -> ledger -> gRPC -> (head) -> gangs of a former agent
 * -> servers -> registration -> node.json, ready. Stop, in reverse: gangs end (they save and
 * upload), the node unregisters, everything closes.
 *
 *  1. Anything that fails before ALIVE ends the process: one line, also in node.json, and the exit
 *     status of its code. Nothing is left behind but the log.
 *  2. SIGTERM or SIGINT: gangs get the grace they asked for; then the node unregisters as "received
 *     SIGTERM". A second signal skips the wait: the front process sends it when its grace is over,
 *     which is the only bound, since it knows how long the node may take; with the first one it
 *     says how long that is, where it was told itself. Any other stop has until its deadline, or
 *     STOP_GANGS_MS altogether.
 *  3. Declared dead, or a new cluster: every bundle is void, gangs are stopped, the node registers
 *     anew.
 *  4. A drain for preemption is accepted: gangs are told to stop, and when they have ended the node
 *     unregisters as preempted. An idle drain is refused while a gang is here.
 *  5. The front process is gone: its supervisors end by themselves, so the agent ends too.
 */
#include "agent/agent_run.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "agent/head_store.h"
#include "agent/node_file.h"
#include "agent/supervise/sender.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"

enum { STOP_GANGS_MS = 120000, ABANDONED_TIMEOUT_MS = 30000, LEDGER_MAX = 1 << 20 };

static void begin_stop(struct agent *a, const struct mb_agent_leaving *how);
static void on_stop_timer(uv_timer_t *t);
static void begin_leave(struct agent *a);
static void begin_close(struct agent *a);

/* ---- what is on disk ---- */

/* A port that a failed start did not get is still the node's: the next one tries again. */
static int known_port(int port, int former)
{
    return port != 0 ? port : former;
}

static void write_node_file(struct agent *a, const char *state)
{
    char former_head[96];
    struct mb_node_file f = {
        .state = state,
        .error = a->failure.code != MB_OK ? a->failure.text : "",
        .code = a->failure.code,
        .pid_agent = getpid(),
        .node_id = a->node != NULL ? mb_node_id_hex(a->node) : "",
        .node_name = a->node_name != NULL ? a->node_name : "",
        .node_ip = a->ip,
        .gcs_address = a->gcs_address,
        .grpc_port = known_port(a->grpc_port, a->former.grpc_port),
        .http_port = known_port(a->http.port, a->former.http_port),
        .is_head = a->opts->is_head,
        .is_open = a->access.is_open,
        .token_path = a->access.token.path != NULL ? a->access.token.path : "",
        .token_is_new = a->access.token.is_new,
        .head_http_port = a->head != NULL ? mb_head_http_port(a->head) : a->former.head_http_port,
        .metrics_port = a->http.metrics_server != NULL ? (int)a->opts->metrics_port
                        : a->http.port != 0            ? 0
                                                       : a->former.metrics_port};
    struct mb_err err;

    if (a->gcs_address[0] == '\0' && a->former.head_port != 0) {
        snprintf(former_head, sizeof(former_head), "%s:%d", a->ip, a->former.head_port);
        f.gcs_address = former_head;
    }
    if (a->init != NULL)
        mb_init_identity(a->init, &f.pid_init, &f.init_start_ticks);
    if (mb_node_file_write(a->opts->node_dir, &f, &err) != MB_OK)
        mb_error("agent", "%s", err.text);
}

static char *ledger_path(const struct agent *a)
{
    return mb_path_join(a->opts->node_dir, "ledger.json");
}

static int write_ledger(struct agent *a, struct mb_err *err)
{
    char *path = ledger_path(a);
    char *text = mb_ledger_dump(a->ledger);
    int rc = path != NULL && text != NULL
                 ? mb_fs_replace(path, text, strlen(text), 0644, err)
                 : mb_err_set(err, MB_ENOMEM, "no memory to write the ledger");

    mb_free(text);
    mb_free(path);
    return rc;
}

void mb_agent_keep_ledger(struct agent *a)
{
    struct mb_err err;

    if (write_ledger(a, &err) != MB_OK)
        mb_warn("agent", "a restarted agent would not know its bundles: %s", err.text);
}

void mb_agent_load_ledger(struct agent *a)
{
    char *path = ledger_path(a);
    struct mb_buf text = {0};
    struct mb_err err = {0};

    if (path != NULL && mb_fs_exists(path) &&
        (mb_fs_read(path, LEDGER_MAX, &text, &err) != MB_OK ||
         mb_ledger_load(a->ledger, mb_buf_str(&text), &err) != MB_OK))
        mb_error("agent", "%s: %s; starting with an empty one", path, err.text);
    mb_buf_close(&text);
    mb_free(path);
}

/* ---- events of the parts ---- */

void mb_agent_on_ledger_changed(void *arg)
{
    struct agent *a = arg;

    mb_agent_keep_ledger(a);
    if (a->gangs != NULL)
        mb_gangs_look_soon(a->gangs);
    if (a->node != NULL) /* the head adopts drivers before the node exists */
        mb_node_changed(a->node);
    mb_gpu_keeper_look(a->gpu_keeper);
}

static void on_bundles_removed(void *arg, const struct mb_pg_id *pg)
{
    struct agent *a = arg;

    mb_gangs_bundles_removed(a->gangs, pg);
}

static int on_drain(void *arg, int is_preemption, const char *reason, int64_t deadline_unix_ms,
                    char *text, size_t size)
{
    struct agent *a = arg;
    int has_time = deadline_unix_ms > 0 && deadline_unix_ms < INT64_MAX;

    (void)reason;
    if (!is_preemption && mb_ledger_count(a->ledger) > 0) {
        snprintf(text, size, "the node is not idle: %zu bundles are held",
                 mb_ledger_count(a->ledger));
        return 0;
    }
    mb_node_drain(a->node, deadline_unix_ms);
    begin_stop(a, &(struct mb_agent_leaving){.reason = is_preemption ? MB_GCS_DEATH_PREEMPTED
                                                                     : MB_GCS_DEATH_IDLE,
                                             .text = is_preemption ? "preempted" : "idle",
                                             .source = MB_DEADLINE_DRAIN,
                                             .unix_ms = has_time ? (uint64_t)deadline_unix_ms : 0,
                                             .why = "the node is drained",
                                             .is_patient = is_preemption});
    return 1;
}

static void on_shutdown(void *arg)
{
    begin_stop(arg, &(struct mb_agent_leaving){MB_GCS_DEATH_EXPECTED, "asked to shut down",
                                               MB_DEADLINE_DRAIN, 0, "the node is stopping", 0});
}

const struct mb_node_manager_ops mb_agent_manager_ops = {mb_agent_on_ledger_changed,
                                                         on_bundles_removed, on_drain, on_shutdown};

static void on_all_gangs_ended(void *arg)
{
    struct agent *a = arg;

    if (a->stage == ENDING_GANGS)
        begin_leave(a);
}

static int is_given_back(const struct mb_err *err)
{
    if (err->code != MB_OK && err->code != MB_ENOENT && err->code != MB_ECANCELED)
        mb_warn("agent", "giving back what a lost driver held: %s", err->text);
    return err->code == MB_OK || err->code == MB_ENOENT;
}

static void on_job_finished(void *arg, const struct mb_err *err)
{
    (void)arg;
    is_given_back(err);
}

struct given_back { /* while the head is asked */
    struct agent *a;
    struct mb_pg_id pg;
};

/* A head that has removed a group before knows nobody whom it would tell: Ray 2.40 forgets nodes to
 * which it gave a bundle as they joined. */
static void on_given_back(void *arg, const struct mb_err *err)
{
    struct given_back *g = arg;

    if (is_given_back(err))
        mb_node_manager_drop(&g->a->manager, &g->pg);
    mb_free(g);
}

/* Nobody is left who would give the group back, so we do. */
static void on_abandoned(void *arg, const struct mb_pg_id *pg, const uint8_t *job_id)
{
    struct agent *a = arg;
    struct mb_gcs *gcs = mb_node_gcs(a->node);
    struct given_back *g = gcs != NULL ? mb_alloc(sizeof(*g)) : NULL;
    struct mb_err err = {0};

    if (g != NULL)
        *g = (struct given_back){a, *pg};
    if (g == NULL ||
        mb_gcs_pg_remove(gcs, pg->bytes, ABANDONED_TIMEOUT_MS, on_given_back, g, NULL, &err) < 0) {
        mb_free(g);
        mb_warn("agent", "a gang without a driver keeps its placement group: %s", err.text);
        return;
    }
    if (job_id != NULL &&
        mb_gcs_finish_job(gcs, job_id, ABANDONED_TIMEOUT_MS, on_job_finished, a, NULL, &err) < 0)
        mb_warn("agent", "the job of a lost driver stays: %s", err.text);
}

static int on_fenced(void *arg, struct mb_err *err)
{
    return write_ledger(arg, err);
}

const struct mb_gangs_ops mb_agent_gangs_ops = {mb_agent_on_ledger_changed, on_fenced,
                                                on_all_gangs_ended, on_abandoned};

/* Other nodes learn where this head is; while it stands by, the head learns of its drivers. */
static void share_head(struct agent *a)
{
    struct mb_err err = {0};

    if (mb_gcs_announce_head(mb_node_gcs(a->node), a->gcs_address, &err) != MB_OK)
        mb_warn("agent", "this head is not announced: %s", err.text);
    if (!mb_head_is_active(a->head) && a->drivers == NULL &&
        mb_agent_report_drivers(a, &err) != MB_OK)
        mb_error("agent", "the head will not hear of drivers here: %s", err.text);
}

/* The node does what it was started for. */
static void say_ready(struct agent *a)
{
    struct mb_err err;

    write_node_file(a, "ALIVE");
    if (mb_init_ready(a->init, &err) != MB_OK)
        mb_error("agent", "the front process cannot be told that the node is up: %s", err.text);
}

void mb_agent_on_jobs_taken(void *arg)
{
    struct agent *a = arg;

    if (mb_node_is_alive(a->node))
        say_ready(a);
}

static void on_alive(void *arg)
{
    struct agent *a = arg;
    struct mb_err err;
    char words[32], former[2 * MB_NODE_ID_BYTES + 1];

    snprintf(words, sizeof(words), "node=%.8s", mb_node_id_hex(a->node));
    mb_log_context(words);
    mb_info("agent", "ALIVE gcs=%s ip=%s port=%d http_port=%d", a->gcs_address, a->ip, a->grpc_port,
            a->http.port);
    snprintf(former, sizeof(former), "%s", mb_jobs_runner(a->jobs)->node_id_hex(a->jobs));
    if (mb_jobs_set_address(a->jobs, a->http_address, mb_node_id_hex(a->node), &err) != MB_OK)
        mb_error("agent", "%s", err.text);
    mb_drivers_tell(a->drivers);
    mb_hardware_report_alive(a->hardware);
    if (a->head != NULL) {
        if (former[0] != '\0')
            mb_head_node_renamed(a->head, former);
        mb_head_set_node(a->head, mb_node_id_hex(a->node));
        if (a->opts->is_head && mb_head_store_is_shared(a->opts->store)) {
            share_head(a);
            if (mb_head_expect_cluster(a->head, mb_gcs_cluster_id(mb_node_gcs(a->node)), &err) !=
                MB_OK)
                mb_error("agent", "%s", err.text);
        }
    }
    if (a->stage == STARTING)
        a->stage = SERVING;
    if (!a->opts->is_job_agent || mb_head_is_active(a->head))
        say_ready(a);
}

static void fail(struct agent *a, const struct mb_err *err)
{
    if (a->failure.code == MB_OK)
        a->failure = *err;
    mb_error("agent", "%s", err->text);
    begin_close(a);
}

void mb_agent_on_failed(void *arg, const struct mb_err *err)
{
    fail(arg, err);
}

/* It is registered, or about to be: the head need not find out that it is gone. */
void mb_agent_on_refused(void *arg, const struct mb_err *err)
{
    struct agent *a = arg;

    if (a->stage >= LEAVING)
        return;
    a->failure = *err;
    a->leave_reason = MB_GCS_DEATH_EXPECTED;
    a->leave_text = "refused to be the job agent";
    mb_error("agent", "%s", err->text);
    begin_leave(a);
}

static void on_node_reset(void *arg, const char *why)
{
    struct agent *a = arg;

    for (size_t i = mb_ledger_count(a->ledger); i-- > 0;) {
        struct mb_pg_id pg = mb_ledger_at(a->ledger, i)->pg;

        mb_info("agent", "a bundle is void: %s", why);
        mb_gangs_bundles_removed(a->gangs, &pg);
    }
    mb_ledger_release_unused(a->ledger, NULL, 0);
    mb_agent_keep_ledger(a);
}

static void on_other_cluster(void *arg)
{
    struct agent *a = arg;

    mb_gangs_forget_jobs(a->gangs);
}

void mb_agent_on_adrift_lost(void *arg, const struct mb_pg_id *pg)
{
    struct agent *a = arg;

    mb_gangs_bundles_removed(a->gangs, pg);
    mb_agent_on_ledger_changed(a);
}

static void on_given_up(void *arg, const char *why)
{
    struct agent *a = arg;

    mb_adrift_begin(&a->adrift, why);
    mb_agent_keep_ledger(a);
}

static int is_told(void *arg, const struct mb_pg_id *pg)
{
    const struct agent *a = arg;

    return a->gangs != NULL && mb_gangs_is_undriven(a->gangs, pg);
}

static void on_cut_off(void *arg, int is_cut_off)
{
    const struct agent *a = arg;

    mb_gangs_cut_off(a->gangs, is_cut_off);
}

const struct mb_node_ops mb_agent_node_ops = {on_alive,         mb_agent_on_failed, on_node_reset,
                                              on_other_cluster, on_given_up,        on_cut_off,
                                              is_told};

void mb_agent_on_init_lost(void *arg)
{
    struct agent *a = arg;

    mb_error("agent", "the front process is gone, ending");
    a->is_alone = 1;
    begin_stop(a, &(struct mb_agent_leaving){MB_GCS_DEATH_EXPECTED, "the front process is gone",
                                             MB_DEADLINE_SIGTERM, 0, "the node is stopping", 0});
    if (a->stage == ENDING_GANGS) /* also when its death signal was faster than this */
        uv_timer_start(&a->stop_timer, on_stop_timer, STOP_GANGS_MS, 0);
}

static void on_signal(void *arg, const struct signalfd_siginfo *info)
{
    struct agent *a = arg;
    int signum = (int)info->ssi_signo;
    int has_time = info->ssi_code == SI_QUEUE && info->ssi_int > 0; /* until we are told again */

    if (!mb_sender_counts(info))
        return;

    mb_info("agent", "received %s", signum == SIGTERM ? "SIGTERM" : "SIGINT");
    if (a->stage == ENDING_GANGS && a->signalled)
        begin_leave(a);
    else
        begin_stop(a, &(struct mb_agent_leaving){
                          .reason = MB_GCS_DEATH_EXPECTED,
                          .text = signum == SIGTERM ? "received SIGTERM" : "received SIGINT",
                          .source = MB_DEADLINE_SIGTERM,
                          .unix_ms = has_time ? mb_unix_ms() + (uint64_t)info->ssi_int : 0,
                          .why = "the node is stopping",
                          .is_patient = 1});
    a->signalled = 1;
    if (!a->is_alone) /* the front process tells again when its time is over */
        uv_timer_stop(&a->stop_timer);
}

/* ---- stop ---- */

/* Bundles that a head which is gone prepared, and that no other head knows. */
void mb_agent_on_doubt_timer(uv_timer_t *t)
{
    struct agent *a = t->data;
    size_t n = mb_ledger_drop_stale(a->ledger);

    if (n == 0)
        return;
    mb_warn("agent", "%zu bundles were promised to a head that never came back to them", n);
    mb_agent_on_ledger_changed(a);
}

static void on_stop_timer(uv_timer_t *t)
{
    struct agent *a = t->data;

    mb_warn("agent", "gangs did not end in time, leaving without them");
    begin_leave(a);
}

/* The bound of a stop that nobody else bounds: a deadline, or STOP_GANGS_MS altogether. */
static void bound_stop(struct agent *a, const struct mb_agent_leaving *how)
{
    uint64_t now_ms = mb_unix_ms(), ms = STOP_GANGS_MS;

    if (how->unix_ms != 0)
        ms = how->unix_ms > now_ms ? how->unix_ms - now_ms : 0;
    else if (how->is_patient)
        return;
    if (!uv_is_active((uv_handle_t *)&a->stop_timer) || uv_timer_get_due_in(&a->stop_timer) > ms)
        uv_timer_start(&a->stop_timer, on_stop_timer, ms, 0);
}

static void begin_stop(struct agent *a, const struct mb_agent_leaving *how)
{
    if (a->stage > ENDING_GANGS)
        return;
    if (a->stage < ENDING_GANGS) {
        a->leave_reason = how->reason;
        a->leave_text = how->text;
    }
    /* Gangs of a former agent save and upload first, also before this one is ALIVE. */
    if (a->gangs == NULL && mb_gangs_are_left(a->opts->node_dir)) {
        if (a->stop_asked.why == NULL || how->unix_ms != 0)
            a->stop_asked = *how;
        return;
    }
    if (a->stage == STARTING && (a->gangs == NULL || mb_gangs_count(a->gangs) == 0)) {
        a->stage = LEAVING;
        begin_close(a);
        return;
    }
    if (a->stage < ENDING_GANGS) {
        a->stage = ENDING_GANGS;
        a->driver_service.is_stopping = 1;
        mb_node_drain(a->node, (int64_t)how->unix_ms);
    }
    bound_stop(a, how);
    /* Also while they end: an earlier deadline counts. */
    mb_gangs_stop_all(a->gangs, how->source, how->unix_ms, how->why);
}

void mb_agent_stop_asked(struct agent *a)
{
    if (a->stop_asked.why != NULL)
        begin_stop(a, &a->stop_asked);
}

void mb_agent_on_notice(void *arg, uint64_t unix_ms)
{
    begin_stop(arg, &(struct mb_agent_leaving){.reason = MB_GCS_DEATH_PREEMPTED,
                                               .text = "preempted",
                                               .source = MB_DEADLINE_NOTICE,
                                               .unix_ms = unix_ms,
                                               .why = "the node will be taken away",
                                               .is_patient = 1});
}

void mb_agent_on_rayjob_deadline(void *arg, uint64_t unix_ms)
{
    struct agent *a = arg;

    if (unix_ms == MB_DEADLINE_NEVER)
        mb_info("agent", "the RayJob has no active deadline");
    else
        mb_info("agent", "the RayJob's active deadline in_s=%lld",
                ((long long)unix_ms - (long long)mb_unix_ms()) / 1000);
    a->rayjob_deadline_unix_ms = unix_ms;
    if (a->gangs != NULL) /* else when they are there */
        mb_gangs_deadline(a->gangs, MB_DEADLINE_RAYJOB, unix_ms);
    if (a->rayjob_watch != NULL)
        mb_rayjob_news_tell(a->rayjob_news, unix_ms);
}

/* SIGTERM follows within seconds, and says until when. The node stays for it: a head that ended by
 * itself would be started anew. The other nodes' ranks save with ours. */
static void on_rayjob_leaves(void *arg, const char *why)
{
    struct agent *a = arg;

    if (a->gangs == NULL || a->stage >= ENDING_GANGS)
        return;
    a->driver_service.is_stopping = 1;
    mb_node_drain(a->node, 0);
    mb_gangs_drain(a->gangs, MB_DEADLINE_NOTICE, 0, why);
}

const struct mb_rayjob_watch_ops mb_agent_rayjob_ops = {mb_agent_on_rayjob_deadline,
                                                        on_rayjob_leaves};

static void on_left(void *arg)
{
    begin_close(arg);
}

static void begin_leave(struct agent *a)
{
    if (a->stage >= LEAVING)
        return;
    a->stage = LEAVING;
    uv_timer_stop(&a->stop_timer);
    if (a->gangs != NULL) /* the bound of logs is now, and leaving takes a while */
        mb_gangs_keep_logs(a->gangs);
    mb_node_leave(a->node, a->leave_reason, a->leave_text, on_left, a);
}

/* In waves, since parts use each other: what serves and decides; what runs the drivers; what keeps
 * their logs; the front process; last the gRPC runtime, because the others still cancel calls on
 * it. */
static void on_grpc_stopped(void *arg)
{
    struct agent *a = arg;

    mb_signals_close(&a->signals, NULL);
    uv_close((uv_handle_t *)&a->stop_timer, NULL);
    uv_close((uv_handle_t *)&a->doubt_timer, NULL);
    mb_adrift_close(&a->adrift);
    mb_leases_close(&a->leases);
    uv_close((uv_handle_t *)&a->port_timer, NULL);
}

static void on_init_closed(void *arg)
{
    struct agent *a = arg;

    if (a->grpc != NULL)
        mb_grpc_stop(a->grpc, on_grpc_stopped, a);
    else
        on_grpc_stopped(a);
}

static void on_logs_closed(void *arg)
{
    struct agent *a = arg;

    if (a->init != NULL)
        mb_init_close(a->init, on_init_closed, a);
    else
        on_init_closed(a);
}

static void on_jobs_closed(void *arg)
{
    struct agent *a = arg;

    if (a->log_keeper != NULL)
        mb_log_keeper_close(a->log_keeper, on_logs_closed, a);
    else
        on_logs_closed(a);
}

static void part_closed(void *arg)
{
    struct agent *a = arg;

    if (--a->closing > 0)
        return;
    if (a->jobs != NULL)
        mb_jobs_close(a->jobs, on_jobs_closed, a);
    else
        on_jobs_closed(a);
}

static void begin_close(struct agent *a)
{
    if (a->stage == CLOSING)
        return;
    a->stage = CLOSING;
    uv_timer_stop(&a->port_timer);
    mb_adrift_stop(&a->adrift);
    mb_leases_stop(&a->leases);
    write_node_file(a, a->failure.code != MB_OK ? "FAILED" : "ENDED");
    a->closing = 2;
    mb_gpu_driver_close(a->gpu_driver, part_closed, a);
    a->gpu_driver = NULL;
    mb_log_service_close(&a->logs);
    mb_look_service_close(&a->looks);
    mb_drivers_stop(a->drivers);
    a->drivers = NULL;
    if (a->head != NULL) {
        a->closing++;
        mb_head_stop(a->head, part_closed, a);
    }
    if (a->http.server != NULL) {
        a->closing++;
        mb_http_server_stop(a->http.server, part_closed, a);
    }
    if (a->http.metrics_server != NULL) {
        a->closing++;
        mb_http_server_stop(a->http.metrics_server, part_closed, a);
    }
    if (a->gangs != NULL) {
        a->closing++;
        mb_gangs_close(a->gangs, part_closed, a);
    }
    if (a->node != NULL) {
        a->closing++;
        mb_node_close(a->node, part_closed, a);
    }
    if (a->hardware != NULL) {
        a->closing++;
        mb_hardware_report_stop(a->hardware, part_closed, a);
        a->hardware = NULL;
    }
    if (a->notice != NULL) {
        a->closing++;
        mb_notice_stop(a->notice, part_closed, a);
        a->notice = NULL;
    }
    if (a->rayjob_watch != NULL) {
        a->closing++;
        mb_rayjob_watch_stop(a->rayjob_watch, part_closed, a);
        a->rayjob_watch = NULL;
    }
    if (a->rayjob_news != NULL) {
        a->closing++;
        mb_rayjob_news_stop(a->rayjob_news, part_closed, a);
        a->rayjob_news = NULL;
    }
    if (a->gpu_keeper != NULL) {
        a->closing++;
        mb_gpu_keeper_close(a->gpu_keeper, part_closed, a);
        a->gpu_keeper = NULL;
        a->http.gpu_keeper = NULL;
    }
    if (a->figures != NULL) {
        a->closing++;
        a->http.figures = NULL;
        mb_gpu_figures_close(a->figures, part_closed, a);
        a->figures = NULL;
    }
    part_closed(a);
}

static void free_parts(struct agent *a)
{
    mb_grpc_destroy(a->grpc);
    mb_head_destroy(a->head);
    mb_http_server_destroy(a->http.server);
    mb_http_server_destroy(a->http.metrics_server);
    mb_gangs_destroy(a->gangs);
    mb_node_destroy(a->node);
    mb_ledger_destroy(a->ledger);
    mb_token_close(&a->access.token);
    mb_free(a->self_dir);
    mb_free(a->node_name);
}

int mb_agent_run(const struct mb_agent_options *opts, struct mb_err *err)
{
    struct agent *a = mb_calloc(1, sizeof(*a));
    struct mb_err failure = {0};
    int rc;

    if (a == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory for the agent");
    a->opts = opts;
    uv_loop_init(&a->loop);
    mb_signals_block();
    rc = mb_signals_start(&a->signals, &a->loop, on_signal, a, err);
    if (rc != MB_OK) {
        uv_loop_close(&a->loop);
        mb_free(a);
        return rc;
    }
    uv_timer_init(&a->loop, &a->stop_timer);
    a->stop_timer.data = a;
    mb_adrift_init(&a->adrift, &a->loop);
    mb_leases_init(&a->leases, &a->loop);
    uv_timer_init(&a->loop, &a->doubt_timer);
    a->doubt_timer.data = a;
    uv_timer_init(&a->loop, &a->port_timer);
    a->port_timer.data = a;
    if (mb_agent_start(a, &failure) != MB_OK)
        fail(a, &failure);
    uv_run(&a->loop, UV_RUN_DEFAULT);
    rc = a->failure.code;
    if (rc != MB_OK)
        *err = a->failure;
    free_parts(a);
    uv_loop_close(&a->loop);
    mb_free(a);
    return rc;
}
