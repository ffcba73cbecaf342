/*
 * What a push has done, across a SIGKILL: DIR/.mobula-push-HASH.journal (HASH: of the URL and the
 * iteration), locked while a push runs, gone when it is through. Records as in journal.h, by `r`:
 *
 *   push   url, iteration, writer: the first record
 *   intent path, print: a multipart upload of this file is about to begin
 *   begin  path, print, upload_id
 *   done   path, print, crc, etag: the object is there
 *   gone   path: what was begun for it is aborted
 *
 * print is the file's fingerprint: what is noted of other bytes under its name does not count.
 * Blocking, a few kB at a time.
 */
#ifndef MOBULA_AGENT_UPLOAD_PUSH_JOURNAL_H
#define MOBULA_AGENT_UPLOAD_PUSH_JOURNAL_H

#include "agent/upload/push_source.h"
#include "base/err.h"

struct mb_push_journal;

/* An unfinished upload of a file that is not in the directory any more. */
struct mb_push_orphan {
    char *path;
    char *upload_id; /* NULL: its id was never noted */
};

/* Replays into the files of source. Creates the journal, with a new writer, when there is none.
 * MB_ESTATE: another push of it runs; MB_EUNSUPPORTED: no locks on this file system; MB_ECORRUPT:
 * damage, with the offset; MB_EDENIED and so on: dir cannot be written. */
int mb_push_journal_open(const char *dir, const char *url, struct mb_push_source *source,
                         struct mb_push_journal **out, struct mb_err *err);
/* keep 0: the push is through, the file goes. NULL is legal. */
void mb_push_journal_close(struct mb_push_journal *j, int keep);

const char *mb_push_journal_path(const struct mb_push_journal *j);
/* 32 hexadecimal digits that tell this push, with all its resumptions, from others. */
const char *mb_push_journal_writer(const struct mb_push_journal *j);
const struct mb_push_orphan *mb_push_journal_orphans(const struct mb_push_journal *j, size_t *n);

int mb_push_journal_intent(struct mb_push_journal *j, const struct mb_push_file *f,
                           struct mb_err *err);
int mb_push_journal_begin(struct mb_push_journal *j, const struct mb_push_file *f,
                          const char *upload_id, struct mb_err *err);
int mb_push_journal_done(struct mb_push_journal *j, const struct mb_push_file *f, const char *etag,
                         struct mb_err *err);
int mb_push_journal_gone(struct mb_push_journal *j, const char *path, struct mb_err *err);

/* Pure: one record onto the files; for the replay and its tests. orphans of unknown paths are added
 * to j, which may be NULL. */
int mb_push_journal_apply(struct mb_push_journal *j, struct mb_push_source *source,
                          const void *payload, size_t n, struct mb_err *err);

#endif
