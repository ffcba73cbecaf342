/*
 * A step that every rank does for itself and that may take long on some: opening data, building and
 * writing its indices. It runs on a thread of its own, while the callers tell each other, a few
 * times a second at most, who is still at it. So ranks that are through wait for the others beyond
 * the communicator's time-out; who is waited for, and what that rank does, is said after a while;
 * and a step that stands still on all ranks that are left ends it.
 *
 * It moves while its thread uses the processor, however little: a thread that the disk does not
 * answer uses none. One that waits for a single flush looks the same, and has stall_ms for it.
 */
#ifndef MOBULA_WORKER_PARALLEL_LONG_STEP_H
#define MOBULA_WORKER_PARALLEL_LONG_STEP_H

#include <pthread.h>
#include <stdint.h>
#include "base/err.h"
#include "worker/parallel/comm.h"

enum { MB_LONG_STEP_DOING_MAX = 256 };

struct mb_long_step {
    int (*run)(void *arg, struct mb_err *err);
    void *arg;
    uint64_t stall_ms; /* 0: for ever */
    uint64_t say_ms;   /* the first time after this long, then each 6 times as long */
    void (*say)(void *say_arg, const char *text); /* called on rank 0; a line without its end */
    void *say_arg;
    /* What run() is at; any thread, by mb_long_step_begins(). */
    pthread_mutex_t lock;
    char doing[MB_LONG_STEP_DOING_MAX];
};

void mb_long_step_init(struct mb_long_step *s);
void mb_long_step_close(struct mb_long_step *s);
/* "writing", "/cache/x.npy". */
void mb_long_step_begins(struct mb_long_step *s, const char *verb, const char *what);

/*
 * Collective; what names the step in texts. The outcome of this rank's run(), at once if that is a
 * failure, which the caller tells the others by mb_comm_abort(). MB_ETIMEOUT, on all ranks: no rank
 * moved for stall_ms, and one is named. The communicator's failure, a rank died: a second later,
 * whatever run() is at. *hangs 1: run() goes on for all one knows: s and what it uses must not be
 * freed, so the process may but end.
 */
int mb_long_step_run(struct mb_comm *comm, struct mb_long_step *s, const char *what, int *hangs,
                     struct mb_err *err);

#endif
