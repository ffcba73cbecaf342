/*
 * Inside of agent.h: the node and its parts, shared by agent.c (events, end), agent_start.c (start)
 * and agent_gpus.c (its GPUs). Nobody else includes it.
 */
#ifndef MOBULA_AGENT_AGENT_RUN_H
#define MOBULA_AGENT_AGENT_RUN_H

#include <uv.h>
#include "agent/access.h"
#include "agent/adrift.h"
#include "agent/agent.h"
#include "agent/drain_service.h"
#include "agent/driver_service.h"
#include "agent/drivers.h"
#include "agent/gangs.h"
#include "agent/gpu_driver.h"
#include "agent/gpu_figures.h"
#include "agent/gpu_keeper.h"
#include "agent/hardware_report.h"
#include "agent/http.h"
#include "agent/jobs.h"
#include "agent/ledger.h"
#include "agent/log_keeper.h"
#include "agent/log_service.h"
#include "agent/look_service.h"
#include "agent/node.h"
#include "agent/node_file.h"
#include "agent/node_manager.h"
#include "agent/notice.h"
#include "agent/rayjob_news.h"
#include "agent/rayjob_watch.h"
#include "agent/resources.h"
#include "agent/supervisor.h"
#include "base/grpc/grpc.h"
#include "base/signals.h"
#include "gcs/client.h"
#include "gcs/head.h"

enum stage { STARTING, SERVING, ENDING_GANGS, LEAVING, CLOSING };

/* Why the node goes, and when. */
struct mb_agent_leaving {
    enum mb_gcs_death reason;
    const char *text; /* for the cluster */
    enum mb_deadline_source source;
    uint64_t unix_ms; /* 0: not said */
    const char *why;  /* for the gangs' drivers */
    int is_patient;   /* there is no other bound: gangs get the time that they need */
};

struct agent {
    const struct mb_agent_options *opts;
    uv_loop_t loop;
    enum stage stage;
    struct mb_err failure; /* why the node could not come up */
    char *self_dir;
    char ip[64];
    struct mb_access access;
    char gcs_address[320];
    char http_address[96];
    char *node_name;
    struct mb_node_ports former;
    struct mb_gpu_driver *gpu_driver;
    uint64_t gpus_asked_ms; /* monotonic */
    int has_begun;          /* with gpus: what the driver has said, or was known before it did */
    struct mb_gpus gpus;
    struct mb_ledger *ledger;
    struct mb_gpu_keeper *gpu_keeper; /* NULL: no NVML */
    struct mb_gpu_figures *figures;   /* NULL: no GPUs */
    struct mb_init *init;
    struct mb_grpc *grpc;
    struct mb_grpc_server *server;
    int grpc_port;
    struct mb_log_keeper *log_keeper;
    struct mb_jobs *jobs;
    struct mb_drivers *drivers; /* while another node is the head */
    struct mb_head *head;
    struct mb_node *node;
    struct mb_node_manager manager;
    struct mb_log_service logs;
    struct mb_look_service looks;
    struct mb_driver_service driver_service;
    struct mb_drain_service drain_service;
    struct mb_gangs *gangs;
    struct mb_agent_http http;
    uint64_t active_deadline_unix_ms;     /* MB_DEADLINE_ESTIMATED; 0: none */
    struct mb_rayjob_watch_opts rayjob;   /* name NULL: this is no pod of a RayJob */
    struct mb_rayjob_watch *rayjob_watch; /* of who asks; NULL: it cannot */
    struct mb_rayjob_news *rayjob_news;
    uint64_t rayjob_deadline_unix_ms; /* MB_DEADLINE_RAYJOB; 0: not known */
    struct mb_hardware_report *hardware;
    struct mb_notice *notice; /* NULL: nobody gives notices */
    struct mb_signals signals;
    uv_timer_t stop_timer;
    uv_timer_t doubt_timer;
    struct mb_adrift adrift;
    struct mb_leases leases;
    uv_timer_t port_timer;
    uint64_t ports_by_ms; /* how long the start waits for the former agent's ports */
    int signalled;
    struct mb_agent_leaving
        stop_asked; /* before what a former agent left was adopted; why NULL: no */
    int is_alone;   /* without a front process */
    enum mb_gcs_death leave_reason;
    const char *leave_text;
    unsigned closing; /* parts that are not closed yet */
};

/* agent.c: events of the parts; arg is the agent. */
extern const struct mb_node_manager_ops mb_agent_manager_ops;
extern const struct mb_gangs_ops mb_agent_gangs_ops;
extern const struct mb_node_ops mb_agent_node_ops;
void mb_agent_on_ledger_changed(void *arg);
void mb_agent_on_jobs_taken(
    void *arg); /* the dashboard of Ray's head hands its jobs to this node */
void mb_agent_on_refused(void *arg, const struct mb_err *err); /* ... nor will it ever */
void mb_agent_on_init_lost(void *arg);
void mb_agent_on_failed(void *arg, const struct mb_err *err);
void mb_agent_on_doubt_timer(uv_timer_t *t);
void mb_agent_on_adrift_lost(void *arg, const struct mb_pg_id *pg);
/* The node will be taken away at this time, 0: soon. Again and earlier: that counts. */
void mb_agent_on_notice(void *arg, uint64_t unix_ms);
/* The start is through: what asked the node to stop meanwhile has its way. */
void mb_agent_stop_asked(struct agent *a);
extern const struct mb_rayjob_watch_ops mb_agent_rayjob_ops;
/* The RayJob's active deadline, read here or heard from the head's agent. */
void mb_agent_on_rayjob_deadline(void *arg, uint64_t unix_ms);

/* agent.c: what is on disk */
void mb_agent_keep_ledger(struct agent *a);
void mb_agent_load_ledger(struct agent *a);

/* agent_gpus.c: count them, which ends in mb_agent_begin() or mb_agent_on_failed(). */
int mb_agent_count_gpus(struct agent *a, struct mb_err *err);
unsigned mb_agent_gpus_to_offer(const struct agent *a, const struct mb_gpus *found);
/* Those of the ledger. found NULL: the driver is silent. */
int mb_agent_watch_gpus(struct agent *a, const struct mb_gpu_found *found, struct mb_err *err);

/* agent_start.c: the rest of the start, with gpus as far as they are known. found NULL: the driver
 * is silent. */
void mb_agent_begin(struct agent *a, const struct mb_gpu_found *found);
/* agent_start.c: up to the registration. What is there when it fails has to be closed. */
int mb_agent_start(struct agent *a, struct mb_err *err);
/* The head runs elsewhere: it hears of the drivers here, and may start some. */
int mb_agent_report_drivers(struct agent *a, struct mb_err *err);

#endif
