/* mobula checkpoint pull --plain: all objects below a URL as files, whatever they are. */
#ifndef MOBULA_CLI_CHECKPOINT_PULL_PLAIN_H
#define MOBULA_CLI_CHECKPOINT_PULL_PLAIN_H

#include <stdint.h>
#include "base/err.h"

struct mb_plain_result {
    uint64_t n_files, total_bytes, kept_bytes;
};

struct mb_plain_wishes {
    const char *files;     /* only keys that match; NULL: all. Borrowed */
    uint64_t retry_for_ms; /* as of mb_store_set_outage() */
    int json;
    int cached; /* files go through the page cache */
};

/* A file that is there with its object's size is kept; each appears when it is whole. Blocks;
 * progress is shown. No object: MB_ENOENT. */
int mb_checkpoint_pull_plain(const char *url, const char *dir, const struct mb_plain_wishes *wishes,
                             struct mb_plain_result *out, struct mb_err *err);

#endif
