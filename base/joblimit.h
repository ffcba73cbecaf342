/*
 * Values of a job's limits, the same for a flag of `mobula job submit` and for the variable that
 * the agent reads, so that what is wrong is refused before the job is taken. Pure; any thread.
 */
#ifndef MOBULA_BASE_JOBLIMIT_H
#define MOBULA_BASE_JOBLIMIT_H

#include <stdint.h>
#include "base/err.h"

enum { MB_JOBLIMIT_LOG_MIN_BYTES = 256 << 10 };

/* what names the flag or variable in the error. MB_EINVAL: no number with a unit, or out of
 * bounds; *out is 0 then. */
int mb_joblimit_memory(const char *s, const char *what, uint64_t *out_bytes, struct mb_err *err);
/* 0: no cap. */
int mb_joblimit_log(const char *s, const char *what, uint64_t *out_bytes, struct mb_err *err);
int mb_joblimit_nofile(const char *s, const char *what, uint64_t *out, struct mb_err *err);

#endif
