/* The inside of jobs.h: jobs.c (life, start, end), job_keep_log.c (a driver's log and its store)
 * and job_adopt.c (after a restart, and starts that are asked for twice) only. */
#ifndef MOBULA_AGENT_JOBS_INTERNAL_H
#define MOBULA_AGENT_JOBS_INTERNAL_H

#include "agent/fetch.h"
#include "agent/job_env.h"
#include "agent/job_forget.h"
#include "agent/job_packages.h"
#include "agent/job_unpacked.h"
#include "agent/jobs.h"
#include "agent/supervise/protocol.h"

enum job_phase { JOB_PREPARING, JOB_SUPERVISED, JOB_OVER };

struct job {
    struct job *next;
    struct mb_jobs *jobs;
    char *id, *dir, *log_path;
    char *entrypoint;
    struct mb_job_packages packages;
    struct mb_fetch *fetch; /* of a package, while it is under way */
    struct mb_unpack_child unpacking;
    struct mb_job_env env;
    enum job_phase phase;
    uv_work_t work;
    struct mb_err work_err;
    struct mb_supervisor *supervisor;
    int stop_asked, started, pipefail;
    int is_unwanted; /* nobody is told what becomes of it */
    int exit_code;
    struct mb_kept_log *log; /* NULL: not kept (any more) */
    char *reason;            /* why it ended, while its log is sent */
    char start_error[MB_SUP_TEXT_MAX];
    uint64_t start_no; /* of the head that asked for it; 0: none */
};

struct mb_jobs {
    uv_loop_t *loop;
    struct mb_init *init;
    struct mb_log_keeper *logs;
    struct mb_job_runner runner;
    struct mb_job_gpus gpus;
    struct job *list;
    size_t n_jobs;
    char *node_dir, *bin_dir, *unpacker, *cwd, *http_address, *node_id_hex;
    mb_job_event_cb listener;
    void *listener_arg;
    struct mb_job_forget forget;
    struct mb_job_unpacked unpacked;
    mb_jobs_gcs_cb gcs_of; /* who has uploaded packages that are not here */
    void *gcs_arg;
    int closing;
    uv_timer_t closer; /* gives the callback of close a turn of its own */
    void (*on_closed)(void *arg);
    void *on_closed_arg;
};

/* ---- jobs.c ---- */
extern const struct mb_supervisor_ops mb_job_supervisor_ops;
struct job *mb_jobs_find(struct mb_jobs *jobs, const char *id); /* NULL: none, or it is over */
int mb_jobs_check_id(const char *id, struct mb_err *err);
struct job *mb_jobs_new(struct mb_jobs *jobs, const char *id); /* not in the list yet */
void mb_jobs_add(struct mb_jobs *jobs, struct job *job);
void mb_jobs_free(struct job *job);
void mb_jobs_drop(void *job); /* the job is forgotten; its files stay */
char *mb_jobs_log_path(const struct mb_jobs *jobs, const char *id);
void mb_jobs_finish_close(void *jobs);

/* ---- job_keep_log.c ---- */
int mb_jobs_keep_log(struct job *job, int is_new, struct mb_err *err);
/* The driver's environment gets the name of the file in which it may say where its log goes. */
int mb_job_tell_url_file(struct job *job, struct mb_err *err);
/* Its driver has ended: a time that it named there bounds the wait for its log. */
void mb_job_hurry_log(struct job *job);

/* ---- job_adopt.c ---- */
enum mb_job_adopt mb_jobs_adopt(void *jobs, const char *submission_id);
void mb_jobs_stop_unwanted(void *jobs, int (*is_wanted)(void *arg, const char *submission_id),
                           void *arg);
/* 1: this very start was begun before, its events follow; 0: begin; MB_ESTATE: older than one that
 * was seen; MB_ECANCELED: it was given up; MB_EEXIST: the job runs; MB_EFULL: a driver of this id
 * that nobody wants is being stopped. */
int mb_jobs_former_start(struct mb_jobs *jobs, const struct mb_job_spec *spec, struct mb_err *err);
/* On disk before anything begins. is_given_up: it never will begin. */
int mb_jobs_note_start(const struct mb_jobs *jobs, const char *id, uint64_t start_no,
                       int is_given_up, struct mb_err *err);
void mb_jobs_forget_start(const struct mb_jobs *jobs, const char *id);

#endif
