/*
 * How far the upload of a gang's checkpoint is: every node speaks for its own files only. Pure.
 */
#ifndef MOBULA_CLI_DRIVER_UPLOADS_H
#define MOBULA_CLI_DRIVER_UPLOADS_H

#include <stddef.h>
#include <stdint.h>

/* What one node said last; total_bytes 0: nothing yet. */
struct mb_drv_upload {
    int64_t iteration;
    uint64_t done_bytes;
    uint64_t total_bytes;
};

/* The sums of the nodes that are at the newest iteration: a node that has not come to it yet would
 * add the bytes of an older one. */
void mb_drv_uploads_sum(const struct mb_drv_upload *nodes, size_t n, uint64_t *done_bytes,
                        uint64_t *total_bytes);

#endif
