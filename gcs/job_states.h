/*
 * The life of a submitted job as two tables. Pure: no clock, no I/O.
 * States and default messages are those of Ray's Jobs API; STOPPING is ours and reads RUNNING
 * outside. A terminal state never changes again.
 */
#ifndef MOBULA_GCS_JOB_STATES_H
#define MOBULA_GCS_JOB_STATES_H

#include "base/buf.h"
#include "base/err.h"
#include "gcs/runner.h"

enum mb_job_state {
    MB_JOB_PENDING,
    MB_JOB_RUNNING,
    MB_JOB_STOPPING,
    MB_JOB_SUCCEEDED,
    MB_JOB_FAILED,
    MB_JOB_STOPPED,
    MB_JOB_STATES
};

enum mb_job_input {
    MB_JOB_STARTED,      /* the driver process exists */
    MB_JOB_START_FAILED, /* it never will */
    MB_JOB_EXIT_ZERO,
    MB_JOB_EXIT_NONZERO,
    MB_JOB_STOP,          /* somebody asked for the end */
    MB_JOB_LOST,          /* after a restart nobody knows the driver */
    MB_JOB_NEVER_FITS,    /* it needs more than there is */
    MB_JOB_START_TIMEOUT, /* it waited longer than it wanted to */
    MB_JOB_INPUTS
};

/* The next state, or MB_ESTATE for an input that is impossible in this state (err says which). */
int mb_job_next(enum mb_job_state from, enum mb_job_input input, enum mb_job_state *to,
                struct mb_err *err);
/* "PENDING" ...; STOPPING gives "RUNNING". */
const char *mb_job_state_name(enum mb_job_state s);
/* MB_EINVAL for a word that is none of Ray's five. */
int mb_job_state_parse(const char *name, enum mb_job_state *out);
int mb_job_is_terminal(enum mb_job_state s);

/* What the runner said of a driver, as inputs in this order; stop_driver: nobody wants it any more.
 * One that ended behind a stop was asked to, also where the store did not take that wish down and
 * the head that had heard it is gone. */
struct mb_job_news {
    enum mb_job_input inputs[3];
    int n_inputs;
    int stop_driver;
};
void mb_job_on_event(enum mb_job_state s, const struct mb_job_event *e, struct mb_job_news *out);
/* A stop was asked for. has_driver: the runner has one of this job, or begins to start one, and was
 * told to end it; its event follows. */
void mb_job_on_stop(enum mb_job_state s, int has_driver, struct mb_job_news *out);

/* After a restart: what is due for a job whose driver the runner found, or not. */
enum mb_job_recovery {
    MB_JOB_RECOVER_WAIT, /* its next event comes by itself */
    MB_JOB_RECOVER_STOP, /* it runs, and a stop was asked for */
    MB_JOB_RECOVER_START,
    MB_JOB_RECOVER_LOST /* input MB_JOB_LOST */
};
enum mb_job_recovery mb_job_recover(enum mb_job_state s, enum mb_job_adopt found);

struct mb_job_facts {
    int asks_resources;   /* PENDING: the entrypoint asked for resources */
    int has_runtime_env;  /* PENDING */
    int exit_code;        /* FAILED by exit */
    const char *log_tail; /* FAILED by exit: the last lines, "" if none */
    const char *text;     /* FAILED otherwise: why */
};
/* Ray's message for the state, added to out; input is what led to FAILED. */
int mb_job_message(enum mb_job_state s, enum mb_job_input input, const struct mb_job_facts *facts,
                   struct mb_buf *out);
/* Ray's error_type for a FAILED job, else NULL. */
const char *mb_job_error_type(enum mb_job_state s, enum mb_job_input input, const char *text);

#endif
