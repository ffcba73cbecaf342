/* The inside of the uploader, shared by its files only: upload.c (commits, life), upload_prepare.c
 * (fence and claim), upload_enter.c (the place in the list of writers), upload_files.c (files and
 * parts), upload_clean.c (what is left of dropped iterations), upload_sweep.c (unfinished uploads),
 * upload_retain.c (older checkpoints), upload_evict.c (older ones on this node), upload_lost.c
 * (nodes that are gone), upload_seals.c (the tracker file). */
#ifndef MOBULA_AGENT_UPLOAD_UPLOAD_INTERNAL_H
#define MOBULA_AGENT_UPLOAD_UPLOAD_INTERNAL_H

#include "agent/upload/commit.h"
#include "agent/upload/fence.h"
#include "agent/upload/journal.h"
#include "agent/upload/manifest.h"
#include "agent/upload/plan.h"
#include "agent/upload/tracker.h"
#include "agent/upload/upload.h"
#include "base/s3/store.h"

enum {
    UPLOAD_IN_FLIGHT_MAX = MB_STORE_FILES_AT_ONCE,
    /* What is preferred begins as many, beside those of others that are on their way. */
    UPLOAD_TRANSFERS_MAX = 4 * UPLOAD_IN_FLIGHT_MAX,
    UPLOAD_TRIES_MAX = MB_PLAN_TRIES_MAX,
    UPLOAD_SMALL_TIMEOUT_MS = 60000,
    /* How long a look at the claim counts; so no request is repeated for longer. */
    UPLOAD_PREPARED_MS = 10000,
    /* How long unfinished uploads of dropped iterations are tried to be aborted after the last one
     * that was. */
    UPLOAD_CLEAN_MS = 20000
};

/* Smaller files go in one request, to any store; and those of other uploaders went in one, too. */
#define UPLOAD_MAY_BE_CUT_BYTES ((uint64_t)5 << 20)
#define UPLOAD_WAS_CUT_BYTES    ((uint64_t)64 << 20)

struct transfer {
    struct mb_upload *u;
    struct mb_plan_iteration *it; /* NULL: free slot */
    struct mb_plan_file *file;
    struct mb_store_op *op; /* while the file itself is sent */
    char *key;
    char *path;
    uint64_t last_bytes;
    uint64_t crc64nvme, size_bytes; /* of what was sent */
};

struct mb_upload {
    uv_loop_t *loop;
    struct mb_upload_opts opts;
    char *dir, *url, *local_dir, *job_id, *placement_group;
    uint32_t *ranks;
    const struct mb_upload_ops *ops;
    void *arg;
    struct mb_plan *plan;
    struct mb_journal *journal;
    struct mb_store *store;
    struct mb_tracker *tracker;
    struct mb_commit *commit; /* of commit_it, one at a time */
    struct mb_plan_iteration *commit_it;
    struct mb_plan_iteration *preparing; /* whose claim is looked at */
    struct mb_plan_iteration *prepared;  /* ... and was: its files may go */
    uint64_t prepared_ms;
    int has_ended;              /* no rank runs on this node any more */
    int is_entering, is_fenced; /* upload_enter.c asks; has heard no */
    unsigned enter_failures;
    uint64_t enter_at_ms;               /* not before */
    int no_conditions;                  /* the store takes no conditional writes */
    char *part_text;                    /* of part_it */
    struct mb_plan_iteration *clean_it; /* whose upload is being aborted, and which */
    struct mb_plan_file *clean_file;
    uint64_t clean_until_ms, clean_bound_ms; /* never beyond that one; 0: there is none */
    uint64_t clean_at_ms;                    /* not before */
    struct mb_plan_iteration *part_it;       /* whose part file is in flight */
    uint32_t *lost;                          /* [n_lost] nodes that send nothing any more */
    size_t n_lost;
    struct mb_plan_iteration *lost_it; /* whose part of a lost node is looked for */
    struct transfer transfers[UPLOAD_TRANSFERS_MAX];
    uv_timer_t timer;
    uint64_t not_before_ms; /* back-off after a failure */
    uint64_t status_at_ms;
    uint64_t released_at_ms; /* 0: somebody waits */
    uint64_t sent_bytes;
    uint64_t retries;         /* of files; of requests the store counts */
    int64_t deadline_unix_ms; /* 0: none */
    uint64_t rate_bytes_per_s;
    int retain_wanted; /* the pointer moved: older checkpoints may go */
    struct upload_retain *retain;
    int evict_wanted; /* something is durable: older iterations of local_dir may go */
    struct upload_evict *evict;
    int shorten_wanted; /* something in the journal is of no use any more */
    int was_busy;
    int closing;
    int parts_open; /* of the close */
    void (*close_cb)(void *arg);
    void *close_arg;
};

void upload_tell(struct mb_upload *u, const struct mb_plan_iteration *it);
struct mb_manifest_writer upload_writer(const struct mb_upload *u);
/* The iteration will not be durable: into the journal, and told. */
void upload_drop(struct mb_upload *u, struct mb_plan_iteration *it, const char *what,
                 const char *why);
/* The same for one that may not even be known yet: noted, so that a driver that comes back hears of
 * it, too. Nothing, if it is committed or dropped. */
void upload_refuse(struct mb_upload *u, int64_t iteration, const char *what, const char *why);
void upload_back_off(struct mb_upload *u, unsigned failures);
void upload_kick(struct mb_upload *u); /* start what can be started */

/* ---- upload_prepare.c ---- */
/* 1: its files and its part may go. 0: upload_kick() follows when that is known. */
int upload_is_prepared(struct mb_upload *u, struct mb_plan_iteration *it);
/* The store takes no conditional writes: said once. */
void upload_lose_conditions(struct mb_upload *u);
/* The claim has to be looked at again before the next write. */
void upload_look_again(struct mb_upload *u);

/* ---- upload_enter.c ---- */
/* waits: nothing is to be sent yet. */
struct mb_fence_writer upload_fence_writer(const struct mb_upload *u, int waits);
void upload_note_launch(struct mb_upload *u); /* nothing, if that is in the journal */
void upload_enter(struct mb_upload *u);       /* nothing, if it has entered */
void upload_has_entered(struct mb_upload *u);

/* ---- upload_files.c ---- */
void upload_files(struct mb_upload *u); /* begins what may be begun, in the plan's order */
void upload_part(struct mb_upload *u, struct mb_plan_iteration *it);

/* ---- upload_clean.c ---- */
/* The iteration comes from the journal: what its process knew besides is lost. */
void upload_replayed(struct mb_plan_iteration *it);
void upload_clean(struct mb_upload *u);
void upload_clean_on(struct mb_upload *u); /* there is something to clean, or it goes on */
int upload_is_cleaning(const struct mb_upload *u);

/* ---- upload_sweep.c ---- */
/* Aborts the unfinished uploads of a file's key, unless the claim is somebody else's by now: then
 * nothing, and code is MB_EEXIST. cb runs once, never from inside the call; also when the store is
 * closed. */
typedef void (*upload_sweep_cb)(void *arg, int code, const char *text);
int upload_sweep(struct mb_upload *u, const struct mb_plan_iteration *it, const char *key,
                 upload_sweep_cb cb, void *arg, struct mb_err *err);

/* ---- upload_lost.c ---- */
void upload_look_for_lost(struct mb_upload *u);

/* ---- upload_seals.c ---- */
extern const struct mb_tracker_ops upload_tracker_ops; /* their arg is the mb_upload */
/* For a driver that may not have heard of them, and has to pass them on. */
void upload_repeat_seals(struct mb_upload *u);

/* ---- upload_retain.c ---- */
void upload_retain(struct mb_upload *u);
void upload_retain_close(struct mb_upload *u); /* its requests have come back */

/* ---- upload_evict.c ---- */
int64_t upload_newest_committed(const struct mb_upload *u); /* -1: none */
int upload_wants_evict(const struct mb_upload *u);          /* there may be something to remove */
void upload_evict(struct mb_upload *u);
void upload_evict_stop(struct mb_upload *u);       /* a removal that has begun ends soon */
int upload_is_evicting(const struct mb_upload *u); /* a worker thread has it */
void upload_evict_close(struct mb_upload *u);      /* none has it */

/* ---- upload.c ---- */
void upload_part_closed(struct mb_upload *u); /* of the close */

#endif
