/*
 * LOG.gaps: what of a log was released before its store had it, for the agent that comes after this
 * one (docs/formats.md).
 */
#ifndef MOBULA_AGENT_LOG_GAPS_H
#define MOBULA_AGENT_LOG_GAPS_H

#include "agent/log_plan.h"
#include "base/err.h"

/* Into the plan, or with is_new forgets it. A negative return: MB_ENOMEM, or it cannot be read; one
 * that is damaged is said and counts for none. */
int mb_log_gaps_open(const char *log_path, int is_new, struct mb_log_plan *p, struct mb_err *err);
int mb_log_gaps_save(const char *log_path, const struct mb_log_plan *p, struct mb_err *err);

#endif
