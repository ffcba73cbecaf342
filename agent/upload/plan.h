/*
 * What has to be sent, in which order, and how far it is. Pure: no clock, file or store.
 *
 * An iteration is COLLECTING until every local rank reported it, then UPLOADING until every file is
 * in the store, PART once this node's part file is, and COMMITTED when the manifest and the pointer
 * are. Files are sent small ones first (one lost worker must not cost many small files), then the
 * biggest, so that the last transfer in flight is not a long one. The oldest iteration goes first.
 */
#ifndef MOBULA_AGENT_UPLOAD_PLAN_H
#define MOBULA_AGENT_UPLOAD_PLAN_H

#include <stddef.h>
#include <stdint.h>
#include "agent/upload/upload.h"
#include "base/err.h"

enum mb_plan_state {
    MB_PLAN_COLLECTING,
    MB_PLAN_UPLOADING,
    MB_PLAN_PART,
    MB_PLAN_COMMITTED,
    MB_PLAN_DROPPED, /* given up: incomplete, abandoned or failed */
    MB_PLAN_N_STATES
};

enum mb_plan_event {
    MB_PLAN_EV_SEALED,    /* every local rank reported */
    MB_PLAN_EV_PART_SENT, /* the part file is in the store */
    MB_PLAN_EV_COMMITTED,
    MB_PLAN_EV_DROPPED,
    MB_PLAN_N_EVENTS
};

enum mb_plan_file_state { MB_PLAN_FILE_WAITING, MB_PLAN_FILE_SENDING, MB_PLAN_FILE_DONE };

struct mb_plan_file {
    char *path;
    uint64_t size_bytes;
    uint64_t crc64nvme;
    int has_crc;
    enum mb_plan_file_state state;
    char *upload_id; /* of an unfinished multipart upload; NULL: none */
    uint64_t sent_bytes;
    unsigned failures;
};

struct mb_plan_iteration {
    int64_t iteration;
    enum mb_plan_state state;
    char *dir;
    uint8_t *reported; /* by index into the plan's ranks */
    struct mb_plan_file *files;
    size_t n_files;
    size_t n_lost_seen; /* lost nodes whose part is in the store; the shell's */
    char *error;        /* why it was dropped; NULL: none */
};

struct mb_plan;

/* ranks: those of this node, copied. */
int mb_plan_create(const uint32_t *ranks, size_t n_ranks, struct mb_plan **out, struct mb_err *err);
void mb_plan_destroy(struct mb_plan *p); /* NULL is legal */

/* A rank's files. MB_EEXIST (err cleared by the caller): it reported this iteration already;
 * MB_EINVAL: not a rank of this node, or a path that leaves the directory; MB_EFULL: 256 iterations
 * pending. */
int mb_plan_saved(struct mb_plan *p, int64_t iteration, uint32_t rank, const char *dir,
                  const struct mb_upload_file *files, size_t n, struct mb_err *err);

/* The iteration; one that no rank reported becomes COLLECTING without files, so that it can be
 * DROPPED and told like any other. NULL: no memory. */
struct mb_plan_iteration *mb_plan_note(struct mb_plan *p, int64_t iteration);

/* The next file to send, marked as SENDING; 0: there is none now. */
int mb_plan_next(struct mb_plan *p, struct mb_plan_iteration **it, struct mb_plan_file **file);
void mb_plan_file_done(struct mb_plan_file *f, uint64_t crc64nvme);
void mb_plan_file_again(struct mb_plan_file *f); /* back to WAITING */
int mb_plan_files_done(const struct mb_plan_iteration *it);

/* MB_ESTATE: not possible in this state. error is copied, for DROPPED; NULL otherwise. */
int mb_plan_event(struct mb_plan_iteration *it, enum mb_plan_event event, const char *error,
                  struct mb_err *err);

/* COMMITTED: its files are forgotten, the iteration itself is not. */
void mb_plan_shed(struct mb_plan_iteration *it);

struct mb_plan_iteration *mb_plan_find(struct mb_plan *p, int64_t iteration);
size_t mb_plan_count(const struct mb_plan *p);
struct mb_plan_iteration *mb_plan_at(struct mb_plan *p, size_t i); /* in order of iteration */
int mb_plan_is_busy(const struct mb_plan *p); /* something is neither COMMITTED nor DROPPED */
void mb_plan_status(const struct mb_plan_iteration *it, struct mb_upload_status *out);
const char *mb_plan_state_name(enum mb_plan_state s);

#endif
