/* Has a package unpacked by mobula-unpack. */
#ifndef MOBULA_AGENT_UNPACK_RUN_H
#define MOBULA_AGENT_UNPACK_RUN_H

#include <pthread.h>
#include <sys/types.h>
#include "base/err.h"

/* A run, or several one after the other, that another thread may end. */
struct mb_unpack_child {
    pthread_mutex_t lock;
    pid_t pid; /* 0: it does not run */
    int is_cancelled;
};

void mb_unpack_child_init(struct mb_unpack_child *c);
void mb_unpack_child_close(struct mb_unpack_child *c); /* no run is under way */

/*
 * As mb_unpack() with its usual limits, in a process of its own: program is the path of
 * mobula-unpack. Blocking; call from a thread that lives on. MB_ECORRUPT also for a package at
 * which the program dies; MB_ECANCELED once mb_unpack_cancel() was called.
 */
int mb_unpack_run(const char *program, const char *package, const char *dir,
                  struct mb_unpack_child *child, struct mb_err *err);
/* The program gets SIGKILL, and none is started any more. Any thread; does not wait. */
void mb_unpack_cancel(struct mb_unpack_child *c);

#endif
