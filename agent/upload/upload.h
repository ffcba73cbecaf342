/*
 * Makes the checkpoints that one attempt saves on this node durable in an object store. Loop-thread
 * only; no callback runs inside a call of this module, none after mb_upload_close() has reported.
 *
 * Life of an iteration here: every local rank reports its files -> files are uploaded (at most 4 at
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
    int has_crc; /* 0: not known yet, the store's answer is taken */
};

struct mb_upload_status {
    int64_t iteration;
    uint64_t done_bytes;
    uint64_t total_bytes;
    int shards_durable;
    int committed;
    const char *error; /* "" = none */
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
 * Being told twice is harmless. */
int mb_upload_seal(struct mb_upload *u, int64_t iteration, const uint64_t *prints, size_t n,
                   struct mb_err *err);
/* Look at the tracker file now: what it names is sealed before a rank's end is told. */
void mb_upload_look(struct mb_upload *u);
/* The processes are gone: iterations that some local rank never reported are given up. */
void mb_upload_no_more(struct mb_upload *u);
/* Nobody waits any more: other nodes' parts are waited for 30 s longer at most. */
void mb_upload_release(struct mb_upload *u);
void mb_upload_abandon(struct mb_upload *u); /* drop what is not durable; idle follows */
/* No rank of any node is left, and some node has saved nothing newer: what is newer is dropped. */
void mb_upload_newest_on_all(struct mb_upload *u, int64_t iteration);
/* These nodes are gone: what they have not sent by now never comes, so an iteration without their
 * parts is dropped. Being told again is harmless. */
int mb_upload_lost(struct mb_upload *u, const uint32_t *nodes, size_t n, struct mb_err *err);
int mb_upload_is_busy(const struct mb_upload *u);
uint64_t mb_upload_sent_bytes(const struct mb_upload *u); /* since this agent started */
/* Everything known, through on_status, for a driver that dialled again. */
void mb_upload_repeat(struct mb_upload *u);
void mb_upload_close(struct mb_upload *u, void (*cb)(void *arg), void *arg);

#endif
