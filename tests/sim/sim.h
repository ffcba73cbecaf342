/*
 * One cluster in one process: the pure modules of head, agents, supervisors, uploaders and drivers,
 * joined by a simulated network, disks, processes and clock. Everything random comes from one seed,
 * so a seed is one life and replays exactly.
 *
 * The real modules decide: gcs/placement, gcs/job_states, gcs/job_queue, gcs/health, agent/ledger,
 * agent/gang, agent/gang_rules, agent/supervise/plan, agent/upload/{plan,journal,manifest},
 * cli/driver/{state, restart,elastic,offsets}. head.c, agent.c, upload.c, driver.c and client.c
 * here are the shells that carry out their actions, in the order in which the real shells do: a
 * process may be killed between any two steps that reach a disk or the network (sim_crash_point).
 */
#ifndef MOBULA_TESTS_SIM_SIM_H
#define MOBULA_TESTS_SIM_SIM_H

#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include "agent/gang_rules.h"
#include "agent/supervise/plan.h"
#include "agent/upload/journal.h"
#include "agent/upload/claim.h"
#include "agent/upload/fence.h"
#include "agent/upload/manifest.h"
#include "cli/driver/elastic.h"
#include "cli/driver/restart.h"
#include "cli/driver/state.h"
#include "gcs/health.h"
#include "gcs/job_queue.h"
#include "gcs/job_states.h"
#include "gcs/placement.h"
#include "tests/sim/plant.h"

enum {
    MAX_MACHINES = 5, /* machine 0 has the head, and the drivers */
    DRAWN_JOBS = 5,
    MIN_GANGS = 2,
    MAX_JOBS = DRAWN_JOBS + MIN_GANGS,
    MAX_BUNDLES = 3,
    MAX_PER_NODE = 2,
    MAX_RANKS = MAX_BUNDLES * MAX_PER_NODE,
    MAX_ATTEMPTS = 3,
    MAX_GROUPS = 8, /* placement groups of a job, one after the other */
    N_GROUPS = MAX_JOBS * MAX_GROUPS,
    MAX_SAVES = 4,
    MAX_RUNS = MAX_JOBS * MAX_ATTEMPTS, /* attempts on one machine */
    /* Node ids of all machines together; groups are stored under the same numbers. */
    MAX_IDS = N_GROUPS,
    MAX_KEYS = 16, /* of the client's KV */
    MAX_CALLS = 512,
    MAX_CONNS = 256,
    MAX_WRITES = 512,
    LEASE_MS = 12000,
    GRACE_MS = 3000,
    RPC_MS = 5000,
    TICK_MS = 100,
    FAULTS_END_MS = 20000,
    MAX_ARMED = 512
};

enum { PROC_AGENT = 0, PROC_DRIVER = MAX_MACHINES, PROC_CLIENT = PROC_DRIVER + MAX_JOBS, N_PROCS };
#define MACHINE_OUTSIDE MAX_MACHINES /* the client's */

struct world;
typedef void (*sim_fn)(struct world *w, int a, int b);

/* ---- messages ---- */

enum msg_kind {
    /* client to head */
    M_SUBMIT,
    M_STATUS,
    M_STOP,
    M_LOGS, /* offset in; n bytes and end out */
    M_PUT,
    /* agent to head */
    M_REGISTER,
    M_SYNC,
    M_ABANDONED,
    /* driver to head */
    M_ADD_JOB,
    M_CREATE,
    M_WAIT,
    M_REMOVE,
    M_FINISH,
    /* head to agent */
    M_PREPARE,
    M_COMMIT,
    M_RETURN,
    M_RELEASE_UNUSED,
    M_HEALTH,
    M_SECOND, /* the same over its HTTP port */
    /* driver to agent, on a stream */
    M_HELLO,
    M_LAUNCH,
    M_START,
    M_RENEW,
    M_DRV_STOP,
    M_DRV_HALT,
    M_DRV_END,
    /* agent to driver, on a stream */
    M_HELLO_REPLY,
    M_REFUSED,
    M_LAUNCHED,
    M_ENDPOINT,
    M_LOG,
    M_RANK_EXIT,
    M_SAVED,
    M_UPLOAD,
    M_FAILURE,
    M_ENDED,
    M_BROKEN, /* the stream is over */
    /* object store: answers of M_PUT_OBJECT and so on */
    M_N_KINDS
};

struct msg {
    enum msg_kind kind;
    int from, to; /* processes */
    uint32_t from_inc, to_inc;
    uint32_t call; /* 0: no call */
    int is_reply;
    int conn; /* -1: none */
    uint32_t conn_no, seq;
    int code; /* MB_E* */
    int job;
    int group; /* placement group: job * MAX_GROUPS + its number */
    uint32_t attempt;
    int node_id; /* number of a node id */
    int node;    /* bundle */
    int rank;
    int signal;
    int flag;
    uint64_t ticket;
    int64_t iteration;
    uint64_t offset, n;
    int list[N_GROUPS * MAX_BUNDLES];
    int n_list;
};

/* ---- the store of the head: records in memory, committed in groups ---- */

enum table { T_JOB, T_STOPPING, T_GCS_JOB, T_GROUP, T_NODE, T_KV, N_TABLES };

struct record {
    int present;
    int state;
    int value;
    int nodes[MAX_BUNDLES]; /* T_GROUP: ids, -1 none */
};

enum done_kind { DONE_NOTHING, DONE_REPLY, DONE_JOB_FIRST, DONE_JOB, DONE_GROUPS };

struct write {
    enum table table; /* N_TABLES: a barrier */
    int key;
    struct record r;
    enum done_kind done;
    int job;
    uint64_t group_write; /* DONE_GROUPS */
    struct msg request, reply;
};

struct store {
    struct record mem[N_TABLES][MAX_IDS]; /* lost with the process */
    struct record disk[N_TABLES][MAX_IDS];
    struct write queue[MAX_WRITES];
    size_t n;
    size_t n_batch; /* in front of the queue, on its way to the disk */
};

/* ---- head ---- */

struct head_node {
    int used, alive, machine;
    struct mb_health health;
    int reconciled, reconciling;
    uint64_t channel; /* number of the connection that calls go through */
};

struct head_job {
    int known;
    enum mb_job_state state;
    int final; /* terminal and committed */
    int since_ms;
    struct mb_job_ticket ticket;
};

struct head {
    struct mb_placement *placement; /* NULL: the process is down */
    struct mb_job_queue *queue;
    struct head_node nodes[MAX_IDS];
    struct head_job jobs[MAX_JOBS];
    struct {
        int used;
        uint64_t need; /* answered when this write of groups is on the disk */
        struct msg request;
    } waits[MAX_JOBS];
    uint64_t group_writes;
    int pumping;
};

/* ---- agents ---- */

struct rank_report {
    enum msg_kind kind; /* M_ENDPOINT or M_SAVED */
    int64_t iteration;
};

/* A rank's process; its memory dies with it, its log file and reports stay. */
struct rank {
    int rank;
    int alive, started, start_told, exited;
    int code, signal;
    int device; /* -1: none */
    int has_start, told_stop;
    int n_saves;
    int64_t from_iteration;
    uint64_t log_bytes;
    struct rank_report reports[MAX_SAVES + 2];
    int n_reports, n_taken;
    uint32_t life; /* guards its timers */
};

/* The supervisor of an attempt's ranks and what it left on disk: lives on without the agent. */
struct supervisor {
    int exists; /* its socket answers, or its state file tells the end */
    int running;
    struct mb_sup_spec spec;
    struct mb_sup_plan plan;
    struct rank ranks[MAX_PER_NODE];
    int n_ranks;
    int all_told;
};

struct agent_upload {
    struct mb_plan *plan; /* NULL: none */
    struct mb_journal *journal;
    int preparing, sending, part_busy, commit_busy;
    char *commit_etag;           /* what stood at the manifest's key */
    int64_t prepared, commit_it; /* -1: none */
    int pointer_etag;
    int tries; /* of the request that is being made: answers that did not come */
    uint64_t failing_since_ms[MAX_RANKS]; /* of each rank's file */
    uint64_t prepared_ms, not_before_ms, commit_at_ms, released_at_ms;
    int was_busy;
};

struct rank_file {
    int pid_known, exited, code, signal, echo, endpoint;
};

/* An attempt as the agent knows it. */
struct run {
    int used;
    int job, group;
    uint32_t attempt;
    int node, per_node, n_nodes;
    struct mb_gang fsm;
    int is_launched, is_pulling, launch_waits, is_abandoned;
    int failure_code, has_failure;
    int first_failed;
    int ended_kept;
    int conn; /* -1: no driver */
    struct rank_file ranks[MAX_PER_NODE];
    uint64_t log_offsets[MAX_PER_NODE];
    struct agent_upload up;
};

/* gang.json */
struct run_file {
    int present;
    int job, group, node, per_node, n_nodes;
    uint32_t attempt;
    enum mb_gang_state state;
    int released;
    uint64_t lease_ms;
    int has_failure, failure_code;
    struct rank_file ranks[MAX_PER_NODE];
    int is_launched;
};

struct disk {
    char *ledger; /* ledger.json */
    char *beside; /* what a kill left of a newer one */
    uint64_t ledger_ms;
    int node_id; /* identity, -1: none */
    struct run_file runs[MAX_RUNS];
    int journals[MAX_RUNS]; /* a file descriptor plus one; 0: none */
    struct supervisor sups[MAX_RUNS];
};

struct agent {
    int up;
    struct mb_ledger *ledger;
    int node_id;
    int registered, asking;
    uint64_t sync_at_ms;
    struct run runs[MAX_RUNS]; /* same index as on disk */
};

struct machine {
    int n_gpus;
    uint64_t down_until_ms;
    uint64_t boot_ms; /* when the agent began to serve */
    struct disk disk;
    struct agent agent;
};

/* ---- jobs: what they are, and the processes of their drivers ---- */

struct job_script {
    int n_nodes, per_node;
    int min_nodes;    /* n_nodes: never fewer */
    int global_batch; /* what has to divide by the ranks */
    int n_saves;
    int step_ms;
    int max_restarts;
    int fail_rank, fail_at_ms;         /* -1: none; in attempt 1 */
    int deaf;                          /* ranks do not end on SIGTERM */
    uint64_t submit_at_ms, stop_at_ms; /* stop 0: never */
    int log_every_ms;
    int cpus; /* what its driver needs of the head's machine */
    int start_timeout_ms;
    int harmed; /* something was done to it that may end it */
};

struct drv_node {
    int machine;
    int conn; /* -1 */
    int hello, launched, heard, stop_asked, end_asked, started;
    uint64_t silent_since_ms;
    unsigned tries;
    int said_ended;
    uint64_t renew_at_ms;
};

/* A submitted job's driver process and its supervisor. */
struct driver {
    struct mb_sup_spec spec;
    struct mb_sup_plan plan;
    int exists; /* the supervisor, or its last words, are there */
    int preparing, stop_asked;
    int alive;
    int starts;
    int exited, code, told;
    uint64_t dead_at_ms;
    uint64_t log_bytes;
    struct mb_drv *state;
    uint32_t attempt;
    int node_id_of[MAX_BUNDLES];
    struct drv_node nodes[MAX_BUNDLES];
    uint64_t next_offset[MAX_RANKS];
    int reserved, interrupted, releasing;
    struct mb_restart restart;
    struct mb_elastic elastic;
    int n_nodes;                /* of the present attempt */
    int group, n_groups;        /* the present one; how many there were */
    int group_of[MAX_ATTEMPTS]; /* by attempt, for ghosts */
    int keeps_group, is_resizing, again;
    uint64_t next_delay_ms, reserve_by_ms;
    uint64_t give_up_ms;
    int ops_fail;
};

/* ---- the object store ---- */

struct object {
    int present;
    uint64_t crc;
};

struct bucket {
    struct {
        struct object files[MAX_SAVES + 1][MAX_ATTEMPTS + 1][MAX_RANKS]; /* place 0, or beside */
        char *parts[MAX_SAVES + 1][MAX_BUNDLES + 1][MAX_BUNDLES];        /* part N of M: [M][N] */
        char *manifest[MAX_SAVES + 1];                                   /* or a claim */
        int64_t latest;                                                  /* -1: no pointer */
        char *writers;                                                   /* agent/upload/fence.h */
        int etag;
    } jobs[MAX_JOBS];
    uint64_t down_until_ms;
    int down_number; /* of the fault */
};

/* ---- client ---- */

struct client_job {
    int acked;
    int stop_acked;
    int busy, follow_busy, status_busy;
    int seen; /* enum mb_job_state, -1: nothing yet */
    uint64_t offset;
    int closed; /* the stream ended */
};

struct client {
    struct client_job jobs[MAX_JOBS];
    int kv_sent[MAX_KEYS], kv_acked[MAX_KEYS];
    int kv_busy;
};

/* ---- world ---- */

struct event {
    uint64_t at_ms, order;
    sim_fn fn;
    int a, b;
    int proc; /* -1: always runs */
    uint32_t inc;
    int msg; /* slot, -1: none */
};

struct call {
    uint32_t id; /* 0: free */
    struct msg request;
    uint64_t deadline_ms;
};

struct conn {
    int used;
    uint32_t no;
    int driver, machine; /* its two ends */
    uint32_t driver_inc, agent_inc;
    int node; /* bundle */
    int group;
    uint32_t attempt;
    uint64_t last_ms[2]; /* of each direction */
    uint32_t sent[2], taken[2];
    int is_torn; /* something was lost: so is all that follows */
};

struct proc {
    int machine;
    int up;
    uint32_t inc;
};

struct stats {
    uint64_t events, messages, lost, crashes, faults, gangs;
    uint64_t succeeded, failed, stopped, restarts, commits, aside, torn, shrunk, grown;
    uint64_t sealed, lost_saves; /* when their job SUCCEEDED: durable; given up (check.c) */
};

enum { MAX_EVENTS = 4096, MAX_MSGS = 2048 };

struct world {
    uint64_t seed, rng, now_ms, order;
    enum sim_plant plant;
    int trace;
    int faults_on;
    struct event heap[MAX_EVENTS];
    size_t n_heap;
    struct msg msgs[MAX_MSGS];
    int free_msgs[MAX_MSGS];
    size_t n_free_msgs;
    struct call calls[MAX_CALLS];
    uint32_t next_call;
    struct conn conns[MAX_CONNS];
    uint32_t next_conn;
    struct proc procs[N_PROCS];
    uint64_t cut_until_ms[MAX_MACHINES + 1][MAX_MACHINES + 1];
    int cut_number[MAX_MACHINES + 1][MAX_MACHINES + 1]; /* of the fault that cut it */
    int deaf_number[MAX_MACHINES], slow_disk_number;
    int n_armed; /* faults that act when somebody meets them */
    unsigned char armed_acted[MAX_ARMED];
    uint64_t link_last_ms[N_PROCS][N_PROCS];
    uint64_t deaf_until_ms[MAX_MACHINES]; /* calls between it and the head do not get through */
    uint64_t
        silent_since_ms[MAX_MACHINES]; /* the checker's own: on every channel; 0: it is heard */
    int unanswered[MAX_MACHINES]; /* the checker's own: questions to its second channel, in a row */
    uint64_t slow_disk_until_ms;
    uint64_t calm_ms; /* from here on no link is cut */
    int n_machines;
    int head_cpus, max_running; /* what drivers may have */
    struct machine machines[MAX_MACHINES];
    struct store store;
    struct head head;
    int n_jobs;
    unsigned has_launched; /* a bit for each job: a gang of it */
    struct job_script scripts[MAX_JOBS];
    int group_nodes[N_GROUPS]; /* bundles that each was created with */
    struct driver drivers[MAX_JOBS];
    struct client client;
    struct bucket bucket;
    int next_id; /* node ids */
    int id_machine[MAX_IDS];
    int id_was_dead[MAX_IDS]; /* the checker's own: on the head's disk */
    /* the checker's own memory */
    uint32_t newest_attempt[MAX_MACHINES][MAX_JOBS];
    int starts[MAX_JOBS][MAX_ATTEMPTS][MAX_RANKS]; /* processes of a rank of an attempt, ever */
    uint64_t heard_ms[MAX_MACHINES][MAX_RUNS];     /* an agent took its driver's word */
    int given_up[MAX_MACHINES][MAX_RUNS];          /* by its driver, out of reach for a lease */
    unsigned dropped[MAX_JOBS][MAX_ATTEMPTS];      /* a bit for each iteration: a journal says so */
    int has_succeeded[MAX_JOBS];                   /* looked at, when it became so */
    struct stats stats;
    int current; /* process whose event runs, -1: none */
    jmp_buf crashed, failed;
    int is_out_of_room;
    char why[400];
};

void client_submits(struct world *w, int job);
/* world.c */
uint64_t sim_rnd(struct world *w);
int sim_below(struct world *w, int n);       /* 0 .. n-1 */
int sim_chance(struct world *w, int one_in); /* never without faults */
void sim_at(struct world *w, int proc, uint64_t delay_ms, sim_fn fn, int a, int b);
void sim_trace(struct world *w, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
_Noreturn void sim_fail(struct world *w, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
#define sim_check(w, cond, ...)                                                                    \
    do {                                                                                           \
        if (!(cond))                                                                               \
            sim_fail(w, __VA_ARGS__);                                                              \
    } while (0)
/* More than max of something: a bound of the simulation, no promise of the cluster. It fails a seed
 * all the same, but whoever runs into it has noticed no planted bug. */
_Noreturn void sim_out_of_room(struct world *w, int max, const char *what);
int sim_agent_proc(int machine);
int sim_driver_proc(int job);
void sim_start_proc(struct world *w, int proc);
/* SIGKILL: its memory is gone, its timers and calls too. */
void sim_kill_proc(struct world *w, int proc);
/* Here the process that runs may die. Does not return then. */
void sim_crash_point(struct world *w);
int sim_is_cut(const struct world *w, int machine_a, int machine_b);
/* A request; its outcome comes to sim_on_reply() once: reply NULL when the deadline passed. */
void sim_call(struct world *w, struct msg *request, uint64_t deadline_ms);
void sim_reply(struct world *w, const struct msg *request, struct msg *reply);
/* Streams: in order, until one end dies or the keepalive finds out. */
int sim_dial(struct world *w, int job, int node, int machine);
void sim_stream_send(struct world *w, int conn, int from_driver, struct msg *m);
void sim_stream_close(struct world *w, int conn, int by_driver);
int sim_step(struct world *w); /* 0: nothing left */
void sim_pg_id(int group, uint8_t out[MB_PG_ID_BYTES]);
void sim_pg(int group, struct mb_pg_id *out);
void sim_node_id(int id, uint8_t out[MB_NODE_ID_BYTES]);
int sim_node_number(const uint8_t id[MB_NODE_ID_BYTES]);
uint64_t sim_crc(int job, int64_t iteration, int rank, uint32_t attempt);

/* head.c */
void head_start(struct world *w);
void head_crashed(struct world *w);
void head_message(struct world *w, const struct msg *m);
void head_reply_came(struct world *w, const struct msg *request, const struct msg *reply);
void head_driver_event(struct world *w, int job, const struct mb_job_event *e);

/* runner.c: drivers below supervisors, on machine 0 */
int runner_start(struct world *w, int job);
int runner_stop(struct world *w, int job);
enum mb_job_adopt runner_adopt(struct world *w, int job);
void runner_exited(struct world *w, int job, int code); /* the driver process ended */
void runner_tick(struct world *w, int job);
void runner_agent_crashed(struct world *w);

/* agent.c */
void agent_start(struct world *w, int machine);
void agent_crashed(struct world *w, int machine);
void agent_message(struct world *w, const struct msg *m);
void agent_reply_came(struct world *w, const struct msg *request, const struct msg *reply);
void agent_keep_ledger(struct world *w, int machine);
void agent_power_lost(struct world *w, int machine);

/* gang.c: attempts on a machine */
void gang_message(struct world *w, int machine, const struct msg *m);
void gang_bundles_removed(struct world *w, int machine, int group);
void gang_adopt(struct world *w, int machine);
void gang_tick(struct world *w, int machine);
int gang_event(struct world *w, int machine, int run, enum mb_gang_event e);
void gang_tell(struct world *w, int machine, int run, enum msg_kind kind, int rank,
               int64_t iteration, int code);

/* ranks.c: supervisors and ranks */
void ranks_spawn(struct world *w, int machine, int run);
void ranks_stop(struct world *w, int machine, int run, int grace_ms);
void ranks_tick(struct world *w, int machine, int run);
void ranks_kill_all(struct world *w, int machine); /* power is gone */
void ranks_kill_one(struct world *w, int machine, int run, int r);
void ranks_start(struct world *w, int machine, int run);      /* the endpoints are there */
void ranks_tell_agent(struct world *w, int machine, int run); /* all it may have missed */
int64_t ranks_newest(const struct world *w, int job);

/* upload.c */
void upload_open(struct world *w, int machine, int run);
void upload_close(struct world *w, int machine, int run);
void upload_saved(struct world *w, int machine, int run, int rank, int64_t iteration);
void upload_no_more(struct world *w, int machine, int run);
void upload_tick(struct world *w, int machine, int run);
void upload_repeat(struct world *w, int machine, int run);
/* 1: an iteration has a manifest, not a claim only. */
int upload_is_whole(const struct world *w, int job, int64_t iteration);
void upload_put_pointer(struct world *w, int machine, int run); /* a timer */

/* driver.c */
void driver_begin(struct world *w, int job);
void driver_ended(struct world *w, int job); /* the process is gone */
void driver_message(struct world *w, const struct msg *m);
void driver_reply_came(struct world *w, const struct msg *request, const struct msg *reply);
/* A forgotten driver of the attempt before says hello. 0: it reaches nobody. */
int driver_ghost(struct world *w, int job, int machine);
void driver_signal(struct world *w, int job, int sig);

/* client.c */
void client_start(struct world *w);
void client_reply_came(struct world *w, const struct msg *request, const struct msg *reply);

/* check.c */
void check_ended(struct world *w, int job);
void check_told(struct world *w, int group, const int *nodes); /* its driver hears of it */
void check_turn(struct world *w, int job); /* its driver is about to be started */
void check_rank_starts(struct world *w, int machine, int run, int rank);
void check_success(struct world *w, int job); /* its driver is about to exit with 0 */
void check_always(struct world *w);
void check_end(struct world *w);

/* life.c: one seed */
struct life {
    uint64_t seed;
    enum sim_plant plant;
    int trace;
    struct stats stats;
    int is_out_of_room; /* it failed by a bound of the simulation */
    char why[400];
};
int sim_life(struct life *l); /* 0: every promise held */

/* faults.c */
void faults_plan(struct world *w);
void faults_acted(struct world *w, int number);             /* somebody met it */
int faults_cut_off(struct world *w, int a, int b);          /* sim_is_cut(), and met */
void life_joined(struct world *w);                          /* a node registers */
void life_dead(struct world *w, const struct head_node *n); /* it is declared so */

#endif
