/* The inside of the uploader, shared by its files only: upload.c (files, parts, commits, life),
 * upload_prepare.c (fence and foreign manifests), upload_lost.c (nodes that are gone),
 * upload_seals.c (the tracker file). */
#ifndef MOBULA_AGENT_UPLOAD_UPLOAD_INTERNAL_H
#define MOBULA_AGENT_UPLOAD_UPLOAD_INTERNAL_H

#include "agent/upload/commit.h"
#include "agent/upload/journal.h"
#include "agent/upload/manifest.h"
#include "agent/upload/plan.h"
#include "agent/upload/tracker.h"
#include "agent/upload/upload.h"
#include "base/s3/store.h"

enum { UPLOAD_IN_FLIGHT_MAX = 4, UPLOAD_SMALL_TIMEOUT_MS = 60000 };

struct transfer {
    struct mb_upload *u;
    struct mb_plan_iteration *it; /* NULL: free slot */
    struct mb_plan_file *file;
    char *key;
    char *path;
    uint64_t last_bytes;
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
    struct mb_plan_iteration *preparing; /* whose foreign manifest is looked for */
    struct mb_plan_iteration *prepared;  /* ... and was: its files may go */
    uint64_t prepared_ms;
    struct mb_plan_iteration *part_it; /* whose part file is in flight */
    uint32_t *lost;                    /* [n_lost] nodes that send nothing any more */
    size_t n_lost;
    struct mb_plan_iteration *lost_it; /* whose part of a lost node is looked for */
    struct transfer transfers[UPLOAD_IN_FLIGHT_MAX];
    uv_timer_t timer;
    uint64_t not_before_ms; /* back-off after a failure */
    uint64_t status_at_ms;
    uint64_t released_at_ms; /* 0: somebody waits */
    uint64_t sent_bytes;
    int was_busy;
    int closing;
    int parts_open; /* of the close */
    void (*close_cb)(void *arg);
    void *close_arg;
};

struct mb_manifest_writer upload_writer(const struct mb_upload *u);
/* The iteration will not be durable: into the journal, and told. */
void upload_drop(struct mb_upload *u, struct mb_plan_iteration *it, const char *what,
                 const char *why);
void upload_back_off(struct mb_upload *u, unsigned failures);
void upload_kick(struct mb_upload *u); /* start what can be started */

/* ---- upload_prepare.c ---- */
/* u->prepared is the iteration when its files may go; upload_kick() follows either way. */
void upload_prepare(struct mb_upload *u, struct mb_plan_iteration *it);

/* ---- upload_lost.c ---- */
void upload_look_for_lost(struct mb_upload *u);

/* ---- upload_seals.c ---- */
void upload_on_sealed(void *arg, int64_t iteration, const char *dir, struct mb_walk *w);
/* For a driver that may not have heard of them, and has to pass them on. */
void upload_repeat_seals(struct mb_upload *u);

#endif
