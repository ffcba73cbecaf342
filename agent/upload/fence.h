/*
 * Who may write below a store's prefix: the object .mobula/writers.json lists the gangs in the
 * order in which they were launched, each with its newest attempt that sent anything. A gang that
 * was only launched waits there, and the older ones go on with what they have saved; with its first
 * save it counts, and they stand back for good. A gang enters the list once, and never comes back
 * to its end. Loop-thread only.
 */
#ifndef MOBULA_AGENT_UPLOAD_FENCE_H
#define MOBULA_AGENT_UPLOAD_FENCE_H

#include <stddef.h>
#include <stdint.h>
#include "agent/upload/manifest.h"
#include "base/err.h"
#include "base/s3/store.h"

#define MB_FENCE_KEY ".mobula/writers.json"

enum { MB_FENCE_MAX = 64 }; /* older gangs than these are forgotten */

enum mb_fence_verdict {
    MB_FENCE_OURS,  /* nobody newer counts: nothing is written */
    MB_FENCE_ENTER, /* *out is to be put in its place */
    MB_FENCE_OVER   /* somebody newer counts: *out says who */
};

/* Who looks. */
struct mb_fence_writer {
    struct mb_manifest_writer id; /* its texts are borrowed */
    int64_t launched_unix_ms;     /* by its node's clock; 0: not known */
    int waits;                    /* it has nothing to send yet: takes its place, no more */
    int has_entered;              /* it was in the list before */
    int has_ended;                /* no rank of it runs on this node */
};

/* Pure. text: the object, n 0 for none. *out is owned by the caller, NULL with MB_FENCE_OURS.
 * MB_ECORRUPT: the object is damaged. */
int mb_fence_decide(const void *text, size_t n, const struct mb_fence_writer *writer,
                    enum mb_fence_verdict *verdict, char **out, struct mb_err *err);

/* err->code MB_OK: over is NULL if the writer counts, else who does instead, for people. Anything
 * else: not known, try again; MB_ECORRUPT: trying again would not help. Runs once, never from
 * inside the call; also when the store is closed. */
typedef void (*mb_fence_cb)(void *arg, const struct mb_err *err, const char *over);

/* store and the writer's texts are borrowed until cb. */
int mb_fence_look(struct mb_store *store, const struct mb_fence_writer *writer, mb_fence_cb cb,
                  void *arg, struct mb_err *err);

#endif
