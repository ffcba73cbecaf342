/*
 * What a directory has to push: an iteration that its tracker file seals, or plain files. Blocking.
 *
 * A checkpoint directory is one of Megatron's: latest_checkpointed_iteration.txt and iter_NNNNNNN/.
 * A tracker that is empty, half-written or names a directory that is not there is an error, and so
 * is an iteration of mobula's own format without all its files (its state.json tells how many).
 */
#ifndef MOBULA_AGENT_UPLOAD_PUSH_SOURCE_H
#define MOBULA_AGENT_UPLOAD_PUSH_SOURCE_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

struct mb_push_file {
    char *path;     /* below root */
    uint64_t print; /* of path, size, inode and its times: states of walk.h */
    uint64_t size_bytes;
    uint64_t crc64nvme; /* once sent, or found there */
    char *etag;         /* what the store has under its name; NULL: nothing */
    char *done_etag;    /* of the object that "done" in the journal is about; NULL: not noted */
    char *upload_id;    /* of an unfinished upload of this file; NULL: none */
    char *stale_id;     /* of one that holds parts of other bytes: to be aborted */
    uint8_t was_begun;  /* an upload was about to begin and its id was never noted */
    uint8_t was_done;   /* the journal says so */
    uint8_t is_sending, is_done, is_last, n_failures;
};

struct mb_push_source {
    int64_t iteration;          /* -1: plain files */
    char *root;                 /* the iteration's directory, or the one given */
    struct mb_push_file *files; /* by path, strictly ascending */
    size_t n_files;
    uint64_t total_bytes;
    int held_fd, is_held; /* the agent leaves it here while it is read (evict.h) */
};

/* iteration: -1 for the one that the tracker names. is_plain: whatever is there, all files. */
int mb_push_source_read(const char *dir, int64_t iteration, int is_plain,
                        struct mb_push_source *out, struct mb_err *err);
/* MB_ESTATE: a file is another one now, so what was sent may be a mixture of two saves. One that is
 * gone was not replaced: its bytes are with whoever has read them. */
int mb_push_source_is_same(const struct mb_push_source *s, struct mb_err *err);
void mb_push_source_close(struct mb_push_source *s);
struct mb_push_file *mb_push_source_find(struct mb_push_source *s, const char *path);

#endif
