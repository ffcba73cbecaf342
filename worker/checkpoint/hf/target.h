/*
 * A directory that appears under its name only when it is whole. Blocking; any thread.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_HF_TARGET_H
#define MOBULA_WORKER_CHECKPOINT_HF_TARGET_H

#include "base/err.h"

/* MB_EEXIST unless target is not there, or an empty directory. */
int mb_target_check(const char *target, struct mb_err *err);

/*
 * write fills TARGET.mobula-convert, which is renamed when it has returned 0, and removed else.
 * What a killed conversion left there goes first; MB_EEXIST if it is none. source is a directory
 * that is read: MB_EINVAL if it lies in there.
 */
int mb_target_write(const char *target, const char *source,
                    int (*write)(void *arg, const char *dir, struct mb_err *err), void *arg,
                    struct mb_err *err);

#endif
