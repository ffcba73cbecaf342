/*
 * Writing that may be slow but must not stand still. The files of a save are written by a thread of
 * their own; meanwhile the ranks tell each other, a few times a second at most, how far they are.
 * So a save has as long as it needs while bytes of any rank reach the disk, ranks that are through
 * wait for the others beyond the communicator's time-out, and a disk that hangs fails the save on
 * all ranks.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_WATCH_H
#define MOBULA_WORKER_CHECKPOINT_WATCH_H

#include <pthread.h>
#include <stdint.h>
#include "base/err.h"
#include "worker/parallel/comm.h"

/* How far a save is. May be read by any thread. */
struct mb_checkpoint_progress {
    pthread_mutex_t lock; /* guards all below */
    uint64_t n_bytes;     /* that this rank has written, over all saves */
    uint64_t n_moves;     /* grows with what any rank does */
    char file[256];       /* that is being written */
    int is_left;          /* the save has failed without its writer, which ends as soon as it can */
};

void mb_checkpoint_progress_init(struct mb_checkpoint_progress *p);
void mb_checkpoint_progress_close(struct mb_checkpoint_progress *p);
void mb_checkpoint_progress_file(struct mb_checkpoint_progress *p, const char *path);
/* struct mb_checkpoint_progress: n bytes more. MB_ECANCELED: nobody waits for the writer any more,
 * and what it was given may be gone. */
int mb_checkpoint_progress_add(void *p, uint64_t n);
/* A step that writes no file, of whatever rank. */
void mb_checkpoint_progress_move(struct mb_checkpoint_progress *p);
uint64_t mb_checkpoint_progress_moves(struct mb_checkpoint_progress *p, char file[256]);

/* Collective. write(arg) runs in a thread and notes its progress in p; its outcome is returned. No
 * byte of any rank for stall_ms: MB_ETIMEOUT, naming the file, on the ranks that have not finished,
 * MB_EUNAVAIL on the others. *hangs is then 1 where the thread still runs: what it uses must not be
 * freed; it calls release(arg) if it ever ends. */
int mb_checkpoint_watch(struct mb_comm *comm, struct mb_checkpoint_progress *p, uint64_t stall_ms,
                        int (*write)(void *arg, struct mb_err *err), void (*release)(void *arg),
                        void *arg, int *hangs, struct mb_err *err);

#endif
