/* The inside of a pull, shared by its files only: pull.c (pointer, manifest, files, life) and
 * pull_older.c (what is taken in place of a checkpoint that is not whole). */
#ifndef MOBULA_AGENT_UPLOAD_PULL_INTERNAL_H
#define MOBULA_AGENT_UPLOAD_PULL_INTERNAL_H

#include <stdatomic.h>
#include "agent/upload/manifest.h"
#include "agent/upload/pull.h"
#include "agent/upload/pull_lock.h"
#include "base/s3/store.h"

enum {
    PULL_SLOTS = MB_STORE_FILES_AT_ONCE,
    PULL_SMALL_TIMEOUT_MS = 60000,
    PULL_LATEST_MAX_BYTES = 64
};

struct pull_slot {
    struct mb_pull *p;
    const struct mb_manifest_file *file; /* NULL: free */
    char *path;                          /* where it belongs */
    char *temporary;
    uint64_t done_bytes;
    uv_work_t work;
    int matches; /* what the check in the pool found */
    enum mb_pull_turn turn;
    int lock_fd; /* -1: none */
    int waits;   /* for another puller of this file */
};

struct mb_pull {
    uv_loop_t *loop;
    struct mb_store *store;
    char *local_dir;
    mb_pull_cb cb;
    void *arg;
    int (*wants)(void *arg, const char *path); /* NULL: every file */
    void *wants_arg;
    struct mb_manifest manifest;
    int64_t wanted; /* -1: what the pointer names */
    int is_direct;  /* past the page cache */
    int64_t trying;
    int64_t newest;   /* that the pointer has named */
    int is_gone;      /* something of the present one is not there */
    unsigned n_again; /* how often the pointer was read again */
    uv_work_t sync_work;
    uv_timer_t timer; /* while another puller is waited for */
    char *iteration_dir;
    int dir_fd;  /* of mb_pull_enter() */
    int sync_fd; /* open from before the first byte, so that it is told of each failed write */
    int sync_errno;
    struct mb_pull_status status;
    int64_t *older; /* ascending; those not tried yet are the first n_older */
    size_t n_older;
    int has_listed;
    int has_no_pointer;
    size_t next; /* file to start next */
    unsigned busy;
    struct pull_slot slots[PULL_SLOTS];
    struct mb_err first; /* why the newest was not good */
    struct mb_err bad;   /* why the present one is not; code 0: nothing yet */
    struct mb_err result;
    int64_t iteration;
    int finishing;
    atomic_int stops; /* ... for the pool */
    int store_closed, timer_closing, timer_closed;
};

/* It ends; requests in flight come back with MB_ECANCELED before that. */
void pull_finish(struct mb_pull *p, const struct mb_err *err, int64_t iteration);
/* A request or a check came back; 0: the pull is over, nothing more may be begun. */
int pull_came_back(struct mb_pull *p);
void pull_started(struct mb_pull *p, int rc, const struct mb_err *err);
void pull_end_slot(struct pull_slot *s);
void pull_leave_dir(struct mb_pull *p);
void pull_try(struct mb_pull *p, int64_t iteration);

/* ---- pull_older.c ---- */
/* The present checkpoint is not whole: p->bad says why. pull_try() or the end follows. */
void pull_fall_back(struct mb_pull *p);
/* The newest whole one, or none. */
void pull_without_pointer(struct mb_pull *p);

#endif
