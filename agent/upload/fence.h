/*
 * The fence between the attempts of one gang, in the store: .mobula/attempt-<gang> names the newest
 * attempt that sent anything. Every attempt after the first writes it before its first file, so
 * that a node that comes back with an older one (it hung, it was cut off) stands back. A run of one
 * attempt leaves no such object. Loop-thread only.
 */
#ifndef MOBULA_AGENT_UPLOAD_FENCE_H
#define MOBULA_AGENT_UPLOAD_FENCE_H

#include <stdint.h>
#include "base/err.h"
#include "base/s3/store.h"

/* err->code MB_OK: newest is the attempt that counts; if it is not the caller's, the caller's is
 * over. Anything else: not known, try again. Runs once, never from inside the call; also when the
 * store is closed. */
typedef void (*mb_fence_cb)(void *arg, const struct mb_err *err, int64_t newest);

/* store is borrowed until cb. gang: hexadecimal. */
int mb_fence_look(struct mb_store *store, const char *gang, uint32_t attempt, mb_fence_cb cb,
                  void *arg, struct mb_err *err);

/* Pure: what the object has to say after an attempt looked at it: the same (nothing is written), or
 * the attempt (it is put). found: 0 for none. */
int64_t mb_fence_newest(int64_t found, uint32_t attempt);

#endif
