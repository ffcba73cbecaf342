/*
 * What the job table needs from whoever can run a driver process: implemented by agent/, so that
 * gcs/ knows nothing of supervisors and files. Loop-thread only.
 */
#ifndef MOBULA_GCS_RUNNER_H
#define MOBULA_GCS_RUNNER_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

/* Everything a driver is started with. Borrowed for the call. */
struct mb_job_spec {
    const char *submission_id;
    const char *entrypoint;       /* run as /bin/sh -c ENTRYPOINT */
    const char *runtime_env_json; /* "{}" if none: env_vars, working_dir, py_modules count */
    const char *metadata_json;    /* "{}" if none */
    const char *ray_address;      /* host:port of the GCS for RAY_ADDRESS */
    const char *packages_dir;     /* absolute; holds NAME of every uploaded package gcs://NAME;
                                     NULL: the head has them */
    uint32_t n_gpus;   /* devices of this node that are the driver's own until it has ended */
    int pipefail;      /* the shell ends at the first command that fails, also inside a pipe */
    int hides_gpus;    /* without n_gpus it sees none, instead of all */
    uint64_t start_no; /* not 0: the same number again is the same start, begun once; numbers of a
                          job only grow */
};

enum mb_job_event_kind {
    MB_JOB_EVENT_RUNNING,      /* the driver process exists: pid */
    MB_JOB_EVENT_EXITED,       /* exit_code (negative signal number when killed) */
    MB_JOB_EVENT_START_FAILED, /* text says why (runtime_env: text starts with "runtime_env setup
                                 failed") */
    MB_JOB_EVENT_ENDING        /* it has ended, but text: EXITED follows */
};

/* The supervisor's own word, which is on its disk and outlives head and agent. */
#define MB_JOB_TEXT_STOPPED "stop requested" /* then "; " and what of its log was lost */

struct mb_job_event {
    const char *submission_id;
    enum mb_job_event_kind kind;
    uint64_t start_no; /* of its mb_job_spec */
    int64_t pid;
    int exit_code;
    /* borrowed; "" if none; EXITED behind a stop(): it begins with MB_JOB_TEXT_STOPPED */
    const char *text;
    const char *log_tail; /* EXITED with a failure: the last 10 lines, at most 20,000 characters */
};

/* Given to the runner when the head starts; may be called at any time from the loop. */
typedef void (*mb_job_event_cb)(void *arg, const struct mb_job_event *event);

enum mb_job_adopt { MB_JOB_ADOPT_RUNNING, MB_JOB_ADOPT_EXITED, MB_JOB_ADOPT_UNKNOWN };

struct mb_job_runner {
    void *self;
    void (*set_listener)(void *self, mb_job_event_cb cb, void *arg);
    /* Begin to start it; RUNNING or START_FAILED follows as an event. MB_EFULL: there are not as
     * many free GPUs, or drivers without number run here; nothing follows. */
    int (*start)(void *self, const struct mb_job_spec *spec, struct mb_err *err);
    /* Ask it to end: stop signal, grace period, SIGKILL; EXITED follows. MB_ENOENT if unknown. */
    int (*stop)(void *self, const char *submission_id, struct mb_err *err);
    /* After a restart: is the driver of this job still there? EXITED and RUNNING are followed by
     * the matching event. */
    enum mb_job_adopt (*adopt)(void *self, const char *submission_id);
    /* After a restart: drivers here of which the head has no record, or one that says that the job
     * is over, are nobody's: they are stopped, as by stop(), and no event follows. is_wanted is
     * called from inside this call only. */
    void (*stop_unwanted)(void *self, int (*is_wanted)(void *arg, const char *submission_id),
                          void *arg);
    /* Nobody asks for this job any more: the files here of its driver and ranks that have ended go.
     */
    void (*forget)(void *self, const char *submission_id);
    /* Path of the driver's log, owned by the caller; MB_ENOENT while there is none. */
    int (*log_path)(void *self, const char *submission_id, char **out, struct mb_err *err);
    /* 1 if this node has a log of that name, below its directory. NULL: it has none. */
    int (*has_log)(void *self, const char *name);
    /* Address of the agent that serves this job's logs, e.g. "http://10.0.0.1:52365"; borrowed. */
    const char *(*http_address)(void *self);
    /* Hex id of the node it runs drivers on; borrowed. */
    const char *(*node_id_hex)(void *self);
    /* GPUs of that node, and how many of them nobody holds. NULL: it has none. */
    void (*gpus)(void *self, uint32_t *total, uint32_t *n_free);
};

#endif
