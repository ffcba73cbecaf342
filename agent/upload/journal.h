/*
 * The uploader's memory across a SIGKILL: an append-only file of records, each with its length and
 * CRC32C, written before the step it notes counts, and flushed beside it (flusher.h); "done" with
 * what follows it. What a machine that loses power has not flushed is looked for in the store, and
 * not sent again where it is. When most of it is of iterations that are durable, it is written anew
 * without them.
 *
 * File: "mobula-journal 1\n", then per record u32 length, u32 CRC32C of the payload
 * (little-endian), payload: one JSON object whose "r" names it:
 *
 *   launched   unix_ms: of the gang, as a whole; the first record
 *   entered    the gang is in the store's list of writers (fence.h)
 *   saved      iteration, rank, dir, files [{path, size, crc, has_crc, mtime_ns}], before: so many
 *              files of this report are in the "files" records before it (0 if absent)
 *   files      iteration, rank, at, files: a piece of a long report, counts with its "saved" only
 *   place      iteration, data: where its files go inside the iteration's directory
 *   begin      iteration, path, upload_id: a multipart upload is open under this id
 *   aborted    iteration, path: no unfinished upload of it is left
 *   done       iteration, path, crc: the file is in the store
 *   part       iteration: this node's part file is in the store
 *   committed  iteration: manifest and pointer are there; needs no "saved" before it
 *   dropped    iteration, error: given up; needs no "saved" before it
 *
 * Blocking, a few kB at a time, but for the report of a rank with many files.
 */
#ifndef MOBULA_AGENT_UPLOAD_JOURNAL_H
#define MOBULA_AGENT_UPLOAD_JOURNAL_H

#include <stddef.h>
#include <stdint.h>
#include "agent/upload/plan.h"
#include "base/buf.h"
#include "base/err.h"

enum { MB_JOURNAL_RECORD_MAX = 16 << 20 };

/* ---- pure ---- */
typedef int (*mb_journal_record_cb)(void *arg, const void *payload, size_t n, struct mb_err *err);
/* Hands every whole record to cb, in order. *valid_bytes: where the next record belongs; bytes
 * after it are a torn tail (the write the kill interrupted). MB_ECORRUPT, naming the offset: a
 * record that is not the last one fails its check. A negative return of cb ends the scan with it.
 */
int mb_journal_scan(const void *p, size_t n, mb_journal_record_cb cb, void *arg,
                    size_t *valid_bytes, struct mb_err *err);
/* Append one framed record. */
int mb_journal_frame(struct mb_buf *out, const void *payload, size_t n);
/* Apply one record to a plan. */
int mb_journal_apply(struct mb_plan *plan, const void *payload, size_t n, struct mb_err *err);

/* ---- the file ---- */
struct mb_journal;

/* Opens or creates; replays into plan; a torn tail is cut off. */
int mb_journal_open(const char *path, struct mb_plan *plan, struct mb_journal **out,
                    struct mb_err *err);
void mb_journal_close(struct mb_journal *j); /* NULL is legal */
/* Writes it anew from the plan, if it is long and most of it is of no use any more; nothing
 * otherwise. A failure leaves it as it is. */
int mb_journal_shorten(struct mb_journal *j, struct mb_plan *plan, struct mb_err *err);

int mb_journal_launched(struct mb_journal *j, int64_t unix_ms, struct mb_err *err);
int mb_journal_entered(struct mb_journal *j, struct mb_err *err);
int mb_journal_saved(struct mb_journal *j, int64_t iteration, uint32_t rank, const char *dir,
                     const struct mb_upload_file *files, size_t n, struct mb_err *err);
int mb_journal_place(struct mb_journal *j, int64_t iteration, const char *place,
                     struct mb_err *err);
int mb_journal_aborted(struct mb_journal *j, int64_t iteration, const char *path,
                       struct mb_err *err);
int mb_journal_begin(struct mb_journal *j, int64_t iteration, const char *path,
                     const char *upload_id, struct mb_err *err);
int mb_journal_done(struct mb_journal *j, int64_t iteration, const char *path, uint64_t crc64nvme,
                    struct mb_err *err);
int mb_journal_part(struct mb_journal *j, int64_t iteration, struct mb_err *err);
int mb_journal_committed(struct mb_journal *j, int64_t iteration, struct mb_err *err);
int mb_journal_dropped(struct mb_journal *j, int64_t iteration, const char *error,
                       struct mb_err *err);

#endif
