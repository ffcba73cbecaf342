/*
 * What a node hears of its own end from outside: a notice (spot, preemption, maintenance) in a file
 * or at a URL, and the durations that a pod is given by its chart.
 *
 *   file   it exists: the notice is there. Empty: at once. Else when the node goes: a moment
 *          (base/moment.h; a duration counts from when the file was written), or what a URL
 *          answers.
 *   URL    asked every 5 s, without a proxy. 404: no notice. EC2's spot/instance-action and
 *          termination-time, GCE's preempted and maintenance-event, or a moment.
 *
 * Where both say one, the earlier counts. What was said stays said.
 */
#ifndef MOBULA_AGENT_NOTICE_H
#define MOBULA_AGENT_NOTICE_H

#include <stddef.h>
#include <stdint.h>
#include <uv.h>
#include "base/err.h"

/* ---- pure ---- */

/* 1: it is a notice, *unix_ms is when the node goes, 0: soon. 0: it says that there is none.
 * MB_EPROTO: neither. written_ms: what a duration counts from. */
int mb_notice_read(const char *text, size_t n, uint64_t written_ms, uint64_t *unix_ms,
                   struct mb_err *err);

/* What both sources said last. */
enum mb_notice_source { MB_NOTICE_FILE, MB_NOTICE_URL, MB_NOTICE_N_SOURCES };
struct mb_notice_times { /* zeroed: nothing was said */
    int has_said[MB_NOTICE_N_SOURCES];
    uint64_t unix_ms[MB_NOTICE_N_SOURCES];
    int was_told;
    uint64_t told_ms; /* the earliest of them; 0, which is soon, is the earliest of all */
};
/* 1: told_ms is another one now, and is to be told. 0: nothing new. */
int mb_notice_take(struct mb_notice_times *t, enum mb_notice_source from, uint64_t unix_ms);

/* MOBULA_ACTIVE_DEADLINE_SECONDS: when a RayJob's activeDeadlineSeconds are over, as far as a pod
 * can know. The job's clock started before the pod did: MOBULA_START_ALLOWANCE_SECONDS (120) are
 * taken off, and MOBULA_DEADLINE_MARGIN_SECONDS (0), together half of it at most. 0: none.
 * MB_EINVAL: not a number of seconds. get: like getenv. */
int mb_notice_active_deadline(const char *(*get)(const char *name), uint64_t started_unix_ms,
                              uint64_t *unix_ms, struct mb_err *err);

/* ---- the shell ---- */

struct mb_notice;
struct mb_notice_opts { /* borrowed */
    const char *file;   /* NULL: none */
    const char *url;    /* NULL: none */
};
/* on_notice: the node goes at unix_ms, 0: soon; again only when the time has become another. */
int mb_notice_start(uv_loop_t *loop, const struct mb_notice_opts *opts,
                    void (*on_notice)(void *arg, uint64_t unix_ms), void *arg,
                    struct mb_notice **out, struct mb_err *err);
void mb_notice_stop(struct mb_notice *n, void (*cb)(void *arg), void *arg); /* n is freed */

#endif
