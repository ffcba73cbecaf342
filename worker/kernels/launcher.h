/*
 * A thread that makes one call after the other for its owner, who never waits longer than it likes:
 * for a library whose calls are quick as long as all is well, and may last for ever when a peer is
 * gone.
 *
 * For some time after a call the thread looks for the next one without sleeping, so that calls that
 * follow each other, as in a training step, begin within a microsecond.
 * Threads: the owner is one thread at a time.
 */
#ifndef MOBULA_WORKER_KERNELS_LAUNCHER_H
#define MOBULA_WORKER_KERNELS_LAUNCHER_H

#include <stdint.h>
#include "base/err.h"

struct mb_launcher;

int mb_launcher_create(struct mb_launcher **out, struct mb_err *err);

/* Only while idle. run(arg) is called on the thread; arg is borrowed until it has returned. */
void mb_launcher_post(struct mb_launcher *l, void (*run)(void *arg), void *arg);

/* 1: the last call has returned, and what it wrote is seen here; or there was none. */
int mb_launcher_is_idle(const struct mb_launcher *l);

/* As is_idle(), after at most so many milliseconds of waiting for it. */
int mb_launcher_wait(const struct mb_launcher *l, uint64_t ms);

/* One call on a thread of its own, awaited for so long. 1: it has returned. 0: it has not, and goes
 * on with arg, or there was no thread for it. */
int mb_launcher_call(void (*run)(void *arg), void *arg, uint64_t ms);

/* 1: the thread has ended. 0: its call has not returned; it goes on, and the thread ends behind it,
 * if ever. The owner leaves arg, and what the call uses, to it. *l is gone in both cases. NULL is
 * legal. */
int mb_launcher_destroy(struct mb_launcher *l);

#endif
