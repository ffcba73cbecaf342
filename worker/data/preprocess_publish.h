/*
 * Where preprocess writes when --output-prefix is s3://BUCKET/KEY: to a local prefix in a scratch
 * directory, from which the files go to the bucket when all are whole.
 *
 * All files of all keys are sent first; the objects change only then, one after the other: an old
 * .idx is deleted, .bin appears, .idx appears. So an .idx is never there with a .bin that is not
 * its own, and whatever fails while bytes are sent leaves the objects as they were. Blocking, one
 * thread.
 */
#ifndef MOBULA_WORKER_DATA_PREPROCESS_PUBLISH_H
#define MOBULA_WORKER_DATA_PREPROCESS_PUBLISH_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

struct mb_publish;

struct mb_publish_options {
    const char *prefix;      /* of the command line */
    const char *scratch_dir; /* NULL: TMPDIR, else /tmp */
    const char *const *keys; /* the files are PREFIX_KEY_document.bin and .idx */
    size_t n_keys;
    int (*cancelled_cb)(void *ctx); /* asked often; non-zero ends with MB_ECANCELED; may be NULL */
    void *ctx;
};

/* Checks URL and keys of the account and makes the scratch directory. Its name follows from the
 * URL, so that a later run finds what an earlier one left. A prefix that is no URL stays itself. */
int mb_publish_open(const struct mb_publish_options *o, struct mb_publish **out,
                    struct mb_err *err);
const char *mb_publish_local_prefix(const struct mb_publish *p); /* what to write to; borrowed */
/* After the local files are whole: sends them and removes them here. Nothing to do for a local
 * prefix. After a failure they stay, and the text says where. */
int mb_publish_run(struct mb_publish *p, struct mb_err *err);
/* Removes the scratch directory if nothing is in it. NULL is legal. */
void mb_publish_close(struct mb_publish *p);

#endif
