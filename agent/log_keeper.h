/*
 * Keeps the log files of this node's drivers and ranks: notes when they had which size, holds them
 * below their cap by releasing their front, and sends them to the job's object store while they
 * grow and when they end. The writers know nothing of it. Loop-thread only.
 *
 * Objects: URL/logs/<job>/<driver | rank-N/attempt>/<first byte, 20 digits>.log, in order the whole
 * log (docs/formats.md).
 */
#ifndef MOBULA_AGENT_LOG_KEEPER_H
#define MOBULA_AGENT_LOG_KEEPER_H

#include <stdint.h>
#include <uv.h>
#include "base/err.h"

struct mb_log_keeper;
struct mb_kept_log;

enum { MB_LOG_CAP_DEFAULT = 1 << 30 };

/* cap_bytes: of each log whose job says nothing, 0: none, -1: MB_LOG_CAP_DEFAULT where `dir` (of
 * the logs) is on a filesystem that can release the front of a file. MB_EUNSUPPORTED: it cannot,
 * and a cap was asked for. */
int mb_log_keeper_create(uv_loop_t *loop, const char *dir, int64_t cap_bytes,
                         struct mb_log_keeper **out, struct mb_err *err);
/* Logs still kept are let go; cb when nothing of ours is in flight. */
void mb_log_keeper_close(struct mb_log_keeper *k, void (*cb)(void *arg), void *arg);

/* What all logs with a store would have to send if they ended now. NULL: nothing. */
uint64_t mb_log_keeper_owes(const struct mb_log_keeper *k);
/* 1: nothing is sent, what is on its way is given up and sent again later: the link is for what is
 * worth more. The ends of logs are put off by it. 0: they go on. */
void mb_log_keeper_hold(struct mb_log_keeper *k, int hold);

/* A value of MOBULA_LOG_MAX_BYTES: 0 or at least MB_LOG_PLAN_CAP_MIN. NULL gives -1, as below. */
int mb_log_cap_parse(const char *value, int64_t *out, struct mb_err *err);

/* A value of MOBULA_LOG_WAIT, a duration of 1 s to an hour. NULL gives 0: MB_LOG_WAIT_DEFAULT_MS.
 */
enum { MB_LOG_WAIT_DEFAULT_MS = 15000 };
int mb_log_wait_parse(const char *value, uint64_t *out_ms, struct mb_err *err);

struct mb_kept_log_opts {
    const char *path;     /* need not exist yet */
    int is_new;           /* 1: forget what an earlier file of this name left */
    int64_t cap_bytes;    /* -1: what the keeper was given; counts with is_new only */
    uint64_t wait_ms;     /* at the end, for a store that takes nothing; 0: the default */
    const char *key;      /* below URL/logs/ */
    const char *url;      /* NULL or "": none, or it is in url_file */
    const char *url_file; /* NULL: none. Looked for until it is there: its first line is the URL */
};
int mb_log_keeper_add(struct mb_log_keeper *k, const struct mb_kept_log_opts *opts,
                      struct mb_kept_log **out, struct mb_err *err);
/* The writer is gone. 1: nothing is left to do; 0: cb follows, once, when the rest is in the store
 * or that was given up (said in the log): after wait_ms in which nothing arrived there, or four
 * times that. Either way the handle dies with it. */
int mb_kept_log_end(struct mb_kept_log *log, void (*cb)(void *arg), void *arg);
/* Once it has ended, or when it does, nobody waits for it longer than until then (mb_mono_ms());
 * 0: no such bound. */
void mb_kept_log_hurry(struct mb_kept_log *log, uint64_t by_ms);
/* Somebody stopped its job: the same, also while logs are held; the earlier of two. */
void mb_kept_log_stop(struct mb_kept_log *log, uint64_t by_ms);
/* Before mb_kept_log_end(): late is told once, with its arg, when that takes more than a second,
 * and for what it waits. */
void mb_kept_log_tell_late(struct mb_kept_log *log, void (*late)(void *arg, const char *text));
/* Before mb_kept_log_end(): lost is told, with its arg and before its cb, what of the log is not in
 * the store: what was released to keep it below its cap before the store had it, and the rest when
 * that is given up. Once each, in this order. Without a store, from within that call: what was
 * released. An agent that was restarted meanwhile knows all of it. */
void mb_kept_log_tell_lost(struct mb_kept_log *log, void (*lost)(void *arg, const char *text));
/* Let go without waiting: another agent goes on, or nobody cares. NULL is legal. */
void mb_kept_log_drop(struct mb_kept_log *log);

#endif
