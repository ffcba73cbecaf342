/* Aborting the unfinished uploads of one key; for s3_abort.c and s3_upload.c. */
#ifndef MOBULA_BASE_S3_SWEEP_H
#define MOBULA_BASE_S3_SWEEP_H

#include <stddef.h>
#include <stdint.h>
#include "base/s3/internal.h"

struct s3_sweep;

/* All uploads of op's key that began at since_unix_s (the server's clock) or later, but keep (NULL:
 * none), which is borrowed. done comes once, from the loop. */
int s3_sweep_start(struct mb_store_op *op, const char *keep, int64_t since_unix_s,
                   void (*done)(void *arg, const struct mb_err *err, size_t n_aborted), void *arg,
                   struct s3_sweep **out, struct mb_err *err);
void s3_sweep_cancel(struct s3_sweep *w);

#endif
