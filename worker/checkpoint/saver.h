/*
 * Saving while training goes on.
 *
 * A saver has host memory for one checkpoint of this rank (a snapshot), a thread, and a
 * communicator of its own, by which the threads of all ranks agree among themselves; the training
 * loop's collectives never wait for a disk. mb_saver_start() only hands over the counters: the
 * thread copies the device's state while the next forward and backward passes run, and
 * mb_saver_wait_copied() holds the loop before the weights change. Then the thread does exactly
 * what mb_checkpoint_save() does, with the same files byte for byte.
 *
 * One save is in flight at most: a start that finds one waits until it is on disk; none is dropped.
 * A save may take as long as it needs; one in which nothing moves for stall_ms has failed.
 * A save that fails on one rank fails on all, and every later call returns that failure.
 * Threads: all functions from the one that trains; the callback runs on the saver's own thread.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_SAVER_H
#define MOBULA_WORKER_CHECKPOINT_SAVER_H

#include "worker/checkpoint/checkpoint.h"

/* The checkpoint is on disk, on all ranks. saved is borrowed. */
typedef void (*mb_saver_cb)(void *arg, int64_t iteration, const struct mb_checkpoint_saved *saved,
                            const struct mb_checkpoint_times *times);

struct mb_saver_options {
    struct mb_checkpoint_model model; /* borrowed, but for comm: until destroy */
    struct mb_comm *comm;             /* borrowed; the saver's thread alone uses it */
    uint64_t stall_ms;                /* so long nothing may be written; 0: 10 min */
    mb_saver_cb cb;                   /* may be NULL */
    void *arg;
};

struct mb_saver;

/* Bytes of host memory that the snapshot of this rank takes. */
uint64_t mb_saver_bytes(const struct mb_checkpoint_model *m, struct mb_comm *comm);

/* Takes the memory and touches it, so that no save pays for that. MB_ENOMEM says how much is
 * needed and how much the machine has. */
/* Whether a save without a saver finds its memory, of a model that ranks share: MB_ENOMEM now, and
 * not at the first save. */
int mb_saver_fits(const struct mb_checkpoint_model *m, struct mb_comm *comm, struct mb_err *err);
int mb_saver_create(const struct mb_saver_options *o, struct mb_saver **out, struct mb_err *err);
/* Waits for a save in flight, as mb_saver_wait() does; what a disk that hangs still uses is not
 * freed. NULL is legal. */
void mb_saver_destroy(struct mb_saver *s);

/* Collective in that every rank starts the same saves. dir and state are copied; what is saved is
 * complete: the streams of the device that wrote it are synchronised. */
int mb_saver_start(struct mb_saver *s, const char *dir, const struct mb_checkpoint_state *state,
                   struct mb_err *err);
/* Before weights or optimizer change: returns when they have been copied. */
void mb_saver_wait_copied(struct mb_saver *s);
/* 1: a save has failed; mb_saver_wait() says how. Never blocks. */
int mb_saver_has_failed(struct mb_saver *s);
/* Until nothing is in flight, however long that takes while something is written on some rank.
 * MB_ETIMEOUT, naming the file: nothing was, for stall_ms, or nothing moved at all for twice that.
 */
int mb_saver_wait(struct mb_saver *s, struct mb_err *err);

#endif
