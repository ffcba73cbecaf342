/*
 * Makes the checkpoints that one attempt saves on this node durable in an object store. Loop-thread
 * only; no callback runs inside a call of this module, none after mb_upload_close() has reported.
 *
 * The gang takes its place among those that write there at once (fence.h).
 *
 * Life of an iteration here: every local rank reports its files -> files are uploaded (many at
 * a time, small ones first, then the biggest) -> this node's part file -> whoever sees all parts
 * writes the manifest and moves the latest pointer -> committed. Each step is in the journal
 * DIR/upload.journal before it counts, so that a killed agent goes on where it was.
 */
#ifndef MOBULA_AGENT_UPLOAD_UPLOAD_H
#define MOBULA_AGENT_UPLOAD_UPLOAD_H

#include <stddef.h>
#include <stdint.h>
#include <uv.h>
#include "base/err.h"

struct mb_upload;

struct mb_upload_file {
    const char *path; /* relative to the iteration's directory */
    uint64_t size_bytes;
    uint64_t crc64nvme;
    int has_crc;      /* 0: not known yet, the store's answer is taken */
    int64_t mtime_ns; /* of the file when it was sealed; 0: not known, its trainer reports what it
                         saves */
};

struct mb_upload_status {
    int64_t iteration;
    uint64_t done_bytes;
    uint64_t total_bytes;
    int shards_durable;
    int committed;
    const char *error;         /* "" = none */
    uint64_t parts_done;       /* requests that carry data: one of a small file, */
    uint64_t parts_total;      /* several of a big one */
    uint64_t rate_bytes_per_s; /* as told with the deadline; 0: not known */
    uint64_t eta_ms;           /* until all its data is sent; UINT64_MAX: not known */
    int is_left;               /* it cannot be sent before the deadline, whatever waits for it */
    int never;        /* with an error: this node's part is not in the store and never will be */
    uint64_t retries; /* requests sent again, and files, since the uploader was opened */
};

struct mb_upload_opts {    /* copied */
    const char *dir;       /* where the journal lies */
    const char *url;       /* of the store */
    const char *local_dir; /* what workers save into */
    const char *job_id;
    const char *placement_group; /* hexadecimal, of the gang's first attempt: one run is told from
                                  * the next of its name, and its attempts are counted by it */
    uint32_t attempt;
    uint32_t node_rank;
    uint32_t num_nodes;
    uint32_t world_size;
    const uint32_t *ranks; /* of this node */
    size_t n_ranks;
    /* Iterations are sealed by the tracker file of the first node instead of mb_upload_saved();
     * other nodes hear of it through mb_upload_seal(). */
    int watch_tracker;
    uint32_t keep_last; /* checkpoints in the store; 0: all. What the pointer names stays */
    /* Durable iterations in local_dir; 0: all. The tracker file's stays, and what is not durable,
     * and what somebody reads or writes (evict.h). */
    uint32_t local_keep_last;
    /* No rank runs any more: what is in the journal is sent. The directory may be another job's by
     * now, so nothing new is looked for. */
    int has_ended;
};

struct mb_upload_ops {
    void (*on_status)(void *arg, const struct mb_upload_status *status);
    /* The tracker file sealed an iteration: to be told to the other nodes. prints: of the files
     * that this node sends, ascending. */
    void (*on_sealed)(void *arg, int64_t iteration, const uint64_t *prints, size_t n);
    void (*on_idle)(void *arg); /* nothing is left to do at present */
};

/* Replays the journal when there is one. MB_ECORRUPT: the journal is damaged, and the text says
 * where; MB_EINVAL: the url. */
int mb_upload_create(uv_loop_t *loop, const struct mb_upload_opts *opts,
                     const struct mb_upload_ops *ops, void *arg, struct mb_upload **out,
                     struct mb_err *err);
/* A rank's shards of an iteration are on disk. When this returns 0 it is in the journal. The dir is
 * that of the iteration. Reporting the same twice is harmless. */
int mb_upload_saved(struct mb_upload *u, int64_t iteration, uint32_t rank, const char *dir,
                    const struct mb_upload_file *files, size_t n, struct mb_err *err);
/* The first node sealed an iteration: what this node has of it, and is not among prints, is sent.
 * Being told twice is harmless. A failure has given the iteration up, and told so. */
int mb_upload_seal(struct mb_upload *u, int64_t iteration, const uint64_t *prints, size_t n,
                   struct mb_err *err);
/* Look at the tracker file now: what it named is sealed before a rank's end is told. */
void mb_upload_look(struct mb_upload *u);
/* The same when none is left that could write on: what it names and is not there is given up. */
void mb_upload_last_look(struct mb_upload *u);
/* The processes are gone: the tracker file is looked at for the last time, and iterations that some
 * local rank never reported are given up. */
void mb_upload_no_more(struct mb_upload *u);
/* Nobody waits any more: other nodes' parts are waited for 30 s longer at most. */
void mb_upload_release(struct mb_upload *u);
/* Drop what is not durable; idle follows, within_ms later at most: what its unfinished uploads left
 * in the store is taken away until then. 0: as long as the store takes something away every 20 s.
 */
void mb_upload_abandon(struct mb_upload *u, uint64_t within_ms);
/* No rank of any node is left, and some node has saved nothing newer: what is newer is dropped. */
void mb_upload_newest_on_all(struct mb_upload *u, int64_t iteration);
/* These nodes are gone: what they have not sent by now never comes, so an iteration without their
 * parts is dropped. Being told again is harmless. */
int mb_upload_lost(struct mb_upload *u, const uint32_t *nodes, size_t n, struct mb_err *err);
/* Another node has given the iteration up before it had sent its part: nobody's is of use. why: of
 * whom, for the text. Also before it is saved here; being told again is harmless. */
void mb_upload_given_up(struct mb_upload *u, int64_t iteration, const char *why);
/* Another node cannot send it before the deadline (or can, after all): what all nodes can goes
 * first. */
void mb_upload_left(struct mb_upload *u, int64_t iteration, int is_left);
/* What has to be in the store by then (0: no deadline), at this rate (0: not known): the newest
 * iteration that can be goes first, older ones after it. Without a deadline the oldest goes first.
 */
void mb_upload_deadline(struct mb_upload *u, int64_t deadline_unix_ms, uint64_t rate_bytes_per_s);
/* What is neither committed nor dropped, oldest first: how many, and the first max of them. */
size_t mb_upload_pending(const struct mb_upload *u, struct mb_upload_status *out, size_t max);
int mb_upload_is_busy(const struct mb_upload *u);
uint64_t mb_upload_sent_bytes(const struct mb_upload *u); /* since this agent started */
/* Everything known, through on_status, for a driver that dialled again. */
void mb_upload_repeat(struct mb_upload *u);
void mb_upload_close(struct mb_upload *u, void (*cb)(void *arg), void *arg);

#endif
