/*
 * A byte pipe between two processes of one host: one writer, one reader, a bounded ring in shared
 * memory. The memory is a memfd: it has no name, so nothing is left behind however a process ends.
 * Nobody blocks here: try_write and try_read move what they can. Before it sleeps a side says so
 * with the arm functions; the other side's next move then returns `ring` 1 and must wake it through
 * the socket between them.
 */
#ifndef MOBULA_WORKER_PARALLEL_COMM_SHM_H
#define MOBULA_WORKER_PARALLEL_COMM_SHM_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum { MB_SHM_COOKIE_BYTES = 16 };

struct mb_shm; /* two pipes, one per direction */

/* A fresh pair; *fd is the memfd, to be closed once the peer has it open. The peer may read as
 * side 1, the creator is side 0. */
int mb_shm_create(struct mb_shm **out, int *fd, uint8_t cookie[MB_SHM_COOKIE_BYTES],
                  struct mb_err *err);
/* Open the peer's memfd through /proc; MB_EUNAVAIL if it cannot be reached (another namespace) or
 * is not the pair with that cookie. */
int mb_shm_attach(int64_t pid, int fd, const uint8_t cookie[MB_SHM_COOKIE_BYTES],
                  struct mb_shm **out, struct mb_err *err);
void mb_shm_destroy(struct mb_shm *s); /* NULL is legal */

/* Bytes moved, 0 when full or empty. *ring is set to 1 when the peer must be woken. */
size_t mb_shm_try_write(struct mb_shm *s, const void *p, size_t n, int *ring);
size_t mb_shm_try_read(struct mb_shm *s, void *p, size_t n, int *ring);

/* Announce sleep; 1 if meanwhile there is something to do and sleeping would be wrong. */
int mb_shm_arm_write(struct mb_shm *s);
int mb_shm_arm_read(struct mb_shm *s);

#endif
