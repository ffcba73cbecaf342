/*
 * One log that the head reads for a client: a driver's file on this machine, or a rank's on any
 * node of its gang. Inside of the head; loop-thread only.
 */
#ifndef MOBULA_GCS_LOG_SOURCE_H
#define MOBULA_GCS_LOG_SOURCE_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"
#include "gcs/health.h"

struct mb_head;
struct log_source;

/* Where a reader begins: since_unix_ms, else tail_lines, else offset; of a rank in this attempt. */
struct log_start {
    int64_t attempt; /* 0: the newest that there is then */
    int is_one;      /* this attempt's log alone; else the next one's follows, from its byte 0 */
    uint64_t offset, since_unix_ms, tail_lines;
    int has_tail; /* tail_lines counts, 0 too */
};

struct log_piece {
    const void *data; /* until the next call */
    size_t n;
    uint64_t offset; /* of data: later than expected when bytes were released */
    int at_end;      /* n is 0 because the file ends here (so far) */
};

/* A log whose node is gone, and which is read from the job's object store. */
struct log_origin {
    unsigned number;      /* another one: it was changed to a store again */
    char node_hex[9];     /* of the node that had it */
    int is_forgotten;     /* it lives, and has removed the log */
    char url[2048];       /* of the log's pieces */
    uint64_t complete_to; /* the byte behind the last one that is there; what came after is lost */
};

/* Which attempt of a rank the last piece is of. */
struct log_attempt {
    int64_t number;             /* 0: none yet, or a driver's */
    int64_t newest, world_size; /* the newest known then; of this one */
    char lost[MB_ERR_TEXT_MAX]; /* why the former one is not whole; "": it is */
};

/* rank -1: the driver. ready runs, from the loop, when a piece that was not there yet may be.
 * A log that does not exist yet is no error: it is empty so far. */
int head_log_open(struct mb_head *h, const char *job_id, int64_t rank,
                  const struct log_start *start, void (*ready)(void *arg), void *arg,
                  struct log_source **out, struct mb_err *err);
/* At most max bytes; with n == 0 and not at_end they are being fetched: ready follows. MB_ENOENT:
 * there will be none. MB_EUNAVAIL: the node with the log does not answer, or is gone, and no store
 * has it. MB_EUNSUPPORTED: it begins at a time, and is in a store, which knows none. */
int head_log_peek(struct log_source *s, size_t max, struct log_piece *out, struct mb_err *err);
void head_log_advance(struct log_source *s, size_t n);
/* The writer is gone: the next end that is told was looked for after this call. */
void head_log_recheck(struct log_source *s);
uint64_t head_log_first(const struct log_source *s); /* as of the last peek */
uint64_t head_log_size(const struct log_source *s);
const struct log_attempt *head_log_attempt(const struct log_source *s); /* as of the last peek */
/* NULL: it is read from its file. As of the last peek that gave bytes or the end; borrowed. */
const struct log_origin *head_log_origin(const struct log_source *s);
/* For people: a line, at most LOG_ORIGIN_TEXT_BYTES with its zero. Returns its length. */
enum { LOG_ORIGIN_TEXT_BYTES = 1024 };
int head_log_origin_text(const struct log_origin *o, char *buf, size_t max);
/* Of a reader that looks again by itself: a node that does not answer is asked again, until it does
 * or is declared dead. One that is neither after LOG_SILENT_MAX_MS: MB_EUNAVAIL. */
enum { LOG_SILENT_MAX_MS = MB_HEALTH_DOUBT_MAX_MS + MB_HEALTH_BOUND_MS + 1000 };
void head_log_be_patient(struct log_source *s);
void head_log_close(struct log_source *s); /* NULL is legal; ready runs no more */

/* Which bytes were written when: cb once, with n pairs, from the loop or inside this call. Of a log
 * that is in a store only nothing is known: no pairs. */
struct log_times {
    uint64_t offset;
    const uint64_t *offsets, *unix_ms;
    size_t n;
};
typedef void (*log_times_cb)(void *arg, const struct log_times *times, const struct mb_err *err);
void head_log_times(struct mb_head *h, const char *job_id, int64_t rank,
                    const struct log_start *from, log_times_cb cb, void *arg);

#endif
