/* The log file of a driver: its first line and its last ones. Blocking, a few kB. */
#ifndef MOBULA_AGENT_JOB_LOG_H
#define MOBULA_AGENT_JOB_LOG_H

#include "base/buf.h"
#include "base/err.h"

enum { MB_JOB_LOG_TAIL_LINES = 10, MB_JOB_LOG_TAIL_MAX_BYTES = 20000 };

/* A new file that holds "Running entrypoint for job ID: ENTRYPOINT\n" (Ray's clients look for it,
 * exactly once). */
int mb_job_log_begin(const char *path, const char *id, const char *entrypoint, struct mb_err *err);

/* Fills out with the last 10 lines, of the last 20,000 bytes: UTF-8 without a NUL in any case. */
int mb_job_log_tail(const char *path, struct mb_buf *out, struct mb_err *err);

#endif
