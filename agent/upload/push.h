/*
 * Pushes one directory into a store: one iteration of a checkpoint (push_source.h), visible only
 * when all of it is there, or plain files. Loop-thread only.
 *
 * Iteration: data -> part -> manifest -> latest pointer, each under a condition. A whole iteration
 * is never written again: with the same contents it is taken as done, with others it is refused.
 * Killed at any point, the same call goes on where it was: push_journal.h.
 */
#ifndef MOBULA_AGENT_UPLOAD_PUSH_H
#define MOBULA_AGENT_UPLOAD_PUSH_H

#include <stddef.h>
#include <stdint.h>
#include <uv.h>
#include "base/err.h"

struct mb_push;

struct mb_push_opts { /* copied */
    const char *dir;
    const char *url;
    const char *state_dir; /* of the journal; NULL: dir */
    const char *job_id;    /* noted as the writer; NULL: "push" */
    int64_t iteration;     /* -1: the one the tracker names */
    int is_plain;          /* all files as they are, no manifest */
    int force;             /* the pointer may go backwards */
    int abandon;           /* nothing is sent: what earlier pushes left unfinished is aborted */
    uint64_t retry_for_ms; /* how long a store that does not answer is asked again; 0: 10 min */
};

enum mb_push_phase {
    MB_PUSH_LOOKING, /* what the store has */
    MB_PUSH_COMPARING,
    MB_PUSH_ABORTING,
    MB_PUSH_SENDING,
    MB_PUSH_COMMITTING,
    MB_PUSH_N_PHASES
};
const char *mb_push_phase_name(enum mb_push_phase phase);

struct mb_push_status {
    enum mb_push_phase phase;
    int64_t iteration; /* -1: plain files */
    uint64_t total_bytes, done_bytes;
    uint64_t kept_bytes; /* of done_bytes: there already, or noted by an earlier call */
    size_t n_files, n_done;
    int was_whole;    /* nothing had to be sent */
    int64_t latest;   /* what the pointer says at the end; -1: plain files */
    size_t n_aborted; /* unfinished uploads */
};

/* Runs once, never from inside a call. status: as at the end. */
typedef void (*mb_push_cb)(void *arg, const struct mb_err *err,
                           const struct mb_push_status *status);

/* Blocks while it looks at the directory. Errors of directory, journal and url are returned, and no
 * cb comes. */
int mb_push_start(uv_loop_t *loop, const struct mb_push_opts *opts, mb_push_cb cb, void *arg,
                  struct mb_push **out, struct mb_err *err);
void mb_push_status(const struct mb_push *p, struct mb_push_status *out);
void mb_push_cancel(struct mb_push *p); /* cb still runs, with MB_ECANCELED */

#endif
