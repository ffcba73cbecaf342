/*
 * Fetches the newest whole checkpoint of a store into a local directory. Loop-thread only.
 *
 * latest pointer -> manifest -> files: each is written under a temporary name, checked for size and
 * CRC64NVME, and renamed; a file that is there already and matches is not fetched. The local
 * tracker file is written last. A checkpoint that is partial or damaged is named in a log line, and
 * the one before it is taken.
 */
#ifndef MOBULA_AGENT_UPLOAD_PULL_H
#define MOBULA_AGENT_UPLOAD_PULL_H

#include <stdint.h>
#include <uv.h>
#include "base/err.h"

struct mb_pull;

/* iteration -1: the store holds no checkpoint (no error). */
typedef void (*mb_pull_cb)(void *arg, const struct mb_err *err, int64_t iteration);

int mb_pull_start(uv_loop_t *loop, const char *url, const char *local_dir, mb_pull_cb cb, void *arg,
                  struct mb_pull **out, struct mb_err *err);
void mb_pull_cancel(struct mb_pull *p); /* cb still runs once, with MB_ECANCELED */

#endif
