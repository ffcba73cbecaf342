/*
 * Fetches the newest whole checkpoint of a store into a local directory. Loop-thread only.
 *
 * latest pointer -> manifest -> files: each is written under a temporary name, checked for size and
 * CRC64NVME, and renamed; a file that is there already and matches is not fetched. The local
 * tracker file is written last. A checkpoint that is partial or damaged is named in a log line, and
 * the one before it is taken; without a pointer, the newest whole one; one that is removed while it
 * is fetched (keep-last) is left for the newer one which the pointer names by then.
 */
#ifndef MOBULA_AGENT_UPLOAD_PULL_H
#define MOBULA_AGENT_UPLOAD_PULL_H

#include <stdint.h>
#include <uv.h>
#include "base/err.h"

struct mb_pull;

/* iteration -1: the store holds no checkpoint (no error): no pointer, and no whole manifest. */
typedef void (*mb_pull_cb)(void *arg, const struct mb_err *err, int64_t iteration);

/* outage_ms: how long a store that does not answer is asked again, by every request
 * (mb_store_set_outage()); 0: for as long as each has time, of a file a day. */
int mb_pull_start(uv_loop_t *loop, const char *url, const char *local_dir, uint64_t outage_ms,
                  mb_pull_cb cb, void *arg, struct mb_pull **out, struct mb_err *err);
/* Right after the start: files of the manifest for which wants() says 0 are not fetched. That they
 * are there with their sizes is still asked, so that pulls of different files find the same
 * checkpoint whole or not; bytes that were changed in place only who fetches them can see. */
void mb_pull_set_filter(struct mb_pull *p, int (*wants)(void *arg, const char *path), void *arg);
/* Right after the start: this one, and no other in its place. */
void mb_pull_set_iteration(struct mb_pull *p, int64_t iteration);

/* Right after the start: files go past the page cache (mb_store_get_file's is_direct). */
void mb_pull_set_direct(struct mb_pull *p);

struct mb_pull_status {
    int64_t iteration; /* that is fetched now; -1: not known yet */
    uint64_t total_bytes, done_bytes;
    uint64_t kept_bytes; /* of done_bytes: were on disk already */
    size_t n_files, n_done;
    unsigned n_bad;  /* newer iterations that were not whole */
    const char *why; /* the newest of them was not; "": none. Borrowed */
};
void mb_pull_status(const struct mb_pull *p, struct mb_pull_status *out);
void mb_pull_cancel(struct mb_pull *p); /* cb still runs once, soon, with MB_ECANCELED */
/* For who exits without waiting for that, right now: temporary files and locks go. What cannot be
 * removed the next pull removes. */
void mb_pull_clear(struct mb_pull *p);

#endif
