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

struct mb_plan_iteration;

struct mb_plan_file {
    struct mb_plan_iteration *owner;
    char *path;
    uint64_t size_bytes;
    uint64_t crc64nvme;
    int has_crc;
    int64_t mtime_ns;              /* as in struct mb_upload_file */
    enum mb_plan_file_state state; /* changed by the functions below only */
    char *upload_id;               /* of an unfinished multipart upload; NULL: none */
    uint64_t sent_bytes;
    unsigned failures;
    /* The shell's: */
    char *etag;           /* of the object that is to be replaced; NULL: there is none */
    unsigned conflicts;   /* another object was there when it came to that */
    int look_first;       /* it may be there already */
    int may_have_uploads; /* whose ids were lost with the process that began them */
    int was_aborted;      /* the journal says that none of its uploads is left */
};

struct mb_plan_iteration {
    int64_t iteration;
    enum mb_plan_state state;
    char *dir;
    uint8_t *reported; /* by index into the plan's ranks */
    struct mb_plan_file *files;
    size_t n_files;
    size_t n_done;          /* of its files */
    size_t n_begun;         /* so many first files are not WAITING */
    char *place;            /* where its files go (claim.h); NULL: not known yet */
    char *part_etag;        /* of the part that ours replaces; NULL: none */
    int was_replayed;       /* it comes from the journal */
    int was_listed;         /* what the store has of it is known */
    unsigned failures;      /* of what comes before its first file */
    int gives_up;           /* DROPPED: transfers in flight end */
    size_t replay_at;       /* where the journal's last record was found */
    unsigned part_failures; /* of the part's write; the shell's */
    size_t n_lost_seen;     /* lost nodes whose part is in the store; the shell's */
    uint64_t dir_state; /* mb_walk_state() of dir when it was sealed; the shell's; 0: not known */
    uint64_t commit_at_ms; /* not before; this and the next are the shell's */
    uint64_t commit_wait_ms;
    int is_left;          /* this node has no time for it; the shell's */
    int is_left_by_other; /* another node has none: whoever can choose takes another one */
    int never;            /* DROPPED before this node's part was in the store */
    char *error;          /* why it was dropped; NULL: none */
};

struct mb_plan;

/* What is known of the gang as a whole. */
struct mb_plan_gang {
    int64_t launched_unix_ms; /* 0: not known */
    int has_entered;          /* it was in the store's list of writers (fence.h) */
};

/* ranks: those of this node, copied. */
int mb_plan_create(const uint32_t *ranks, size_t n_ranks, struct mb_plan **out, struct mb_err *err);
void mb_plan_destroy(struct mb_plan *p); /* NULL is legal */
struct mb_plan_gang *mb_plan_gang(struct mb_plan *p);

/* A rank's files. MB_EEXIST (err cleared by the caller): it reported this iteration already;
 * MB_EINVAL: not a rank of this node, or a path that leaves the directory; MB_EFULL: 256 iterations
 * pending. */
int mb_plan_saved(struct mb_plan *p, int64_t iteration, uint32_t rank, const char *dir,
                  const struct mb_upload_file *files, size_t n, struct mb_err *err);

/* A report in pieces: files [at, at + n) of one whose end comes with mb_plan_saved_after(), which
 * has the rest. A piece with at 0 begins anew. MB_ECORRUPT: a piece is missing. */
int mb_plan_more(struct mb_plan *p, int64_t iteration, uint32_t rank, size_t at,
                 const struct mb_upload_file *files, size_t n, struct mb_err *err);
int mb_plan_saved_after(struct mb_plan *p, int64_t iteration, uint32_t rank, size_t n_before,
                        const char *dir, const struct mb_upload_file *files, size_t n,
                        struct mb_err *err);
/* COMMITTED by an earlier process, and nothing else is known of it. NULL: no memory. */
struct mb_plan_iteration *mb_plan_recall(struct mb_plan *p, int64_t iteration);

/* The iteration; one that no rank reported becomes COLLECTING without files, so that it can be
 * DROPPED and told like any other. NULL: no memory. */
struct mb_plan_iteration *mb_plan_note(struct mb_plan *p, int64_t iteration);

/* 1: all its data is sent within left_ms at this rate (0: not known), if it goes before all others.
 */
int mb_plan_has_time(const struct mb_plan_iteration *it, uint64_t left_ms,
                     uint64_t rate_bytes_per_s);
/* The newest iteration that fits, and that no other node leaves; -1: none does. */
int64_t mb_plan_choose(const struct mb_plan *p, uint64_t left_ms, uint64_t rate_bytes_per_s);
/* Its files go first from now on; -1: the oldest iteration's. */
void mb_plan_prefer(struct mb_plan *p, int64_t iteration);
int mb_plan_is_preferred(const struct mb_plan *p, const struct mb_plan_iteration *it);
/* When all data of an iteration is sent, in the present order; UINT64_MAX: not known. */
uint64_t mb_plan_eta_ms(const struct mb_plan *p, const struct mb_plan_iteration *it,
                        uint64_t rate_bytes_per_s);

/* The next file to send, marked as SENDING; 0: there is none now. */
int mb_plan_next(struct mb_plan *p, struct mb_plan_iteration **it, struct mb_plan_file **file);
void mb_plan_file_done(struct mb_plan_file *f, uint64_t crc64nvme);
void mb_plan_file_back(struct mb_plan_file *f);  /* to WAITING, through no fault of its own */
void mb_plan_file_again(struct mb_plan_file *f); /* the same after a failure, from the beginning */
/* How many failures of one step there are with this one, which ended with code; MB_PLAN_TRIES_MAX:
 * it is given up. A store that is away or silent is no fault of what was sent, and is asked as
 * often as it takes: such a failure is never the last one. */
enum { MB_PLAN_TRIES_MAX = 5 };
unsigned mb_plan_count_failure(unsigned failures, int code);
/* An upload of it is open, or may be. */
int mb_plan_file_is_open(const struct mb_plan_file *f);
int mb_plan_files_done(const struct mb_plan_iteration *it);

/* MB_ESTATE: not possible in this state. error is copied, for DROPPED; NULL otherwise. */
int mb_plan_event(struct mb_plan_iteration *it, enum mb_plan_event event, const char *error,
                  struct mb_err *err);

/* Where its files go: noted once; MB_ESTATE: it was another place before. */
int mb_plan_place(struct mb_plan_iteration *it, const char *place, struct mb_err *err);

/* COMMITTED: its files are forgotten, the iteration itself is not. */
void mb_plan_shed(struct mb_plan_iteration *it);

struct mb_plan_iteration *mb_plan_find(struct mb_plan *p, int64_t iteration);
size_t mb_plan_count(const struct mb_plan *p);
const uint32_t *mb_plan_ranks(const struct mb_plan *p, size_t *n);
struct mb_plan_iteration *mb_plan_at(struct mb_plan *p, size_t i); /* in order of iteration */
int mb_plan_is_full(const struct mb_plan *p); /* another iteration would be MB_EFULL */
int mb_plan_is_busy(const struct mb_plan *p); /* something is neither COMMITTED nor DROPPED */
/* part_bytes: mb_store_part_bytes(). */
void mb_plan_status(const struct mb_plan_iteration *it, uint64_t part_bytes,
                    struct mb_upload_status *out);
const char *mb_plan_state_name(enum mb_plan_state s);

#endif
