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
    uint64_t parts_done;
    uint64_t parts_total;
    uint64_t rate_bytes_per_s; /* 0: not known */
    uint64_t eta_ms;           /* UINT64_MAX: not known */
    int is_committed;
    int is_given_up; /* it never will be durable */
    int is_left;     /* it cannot be sent before the deadline */
};

/* Of the nodes that are at the newest iteration that no node has given up: a node that has not come
 * to it yet would add the bytes of an older one. eta_ms is that of the last one to be done. */
struct mb_drv_uploads {
    int64_t iteration; /* -1: none */
    uint64_t done_bytes;
    uint64_t total_bytes;
    uint64_t parts_done;
    uint64_t parts_total;
    uint64_t rate_bytes_per_s;
    uint64_t eta_ms;
    int is_left;      /* by some node */
    int64_t given_up; /* newest iteration that is; -1: none */
};

void mb_drv_uploads_sum(const struct mb_drv_upload *nodes, size_t n, struct mb_drv_uploads *out);

enum { MB_DRV_UPLOADS_TEXT_MAX = 200 };

/* "uploading iteration 40: 41 of 64 parts, done in 12 s, deadline in 310 s"; "" when nothing of
 * saved is on its way. What is given up says so, also beside an older one. durable: newest
 * iteration that is. deadline_unix_ms 0: none. */
void mb_drv_uploads_text(const struct mb_drv_uploads *u, int64_t saved, int64_t durable,
                         uint64_t deadline_unix_ms, uint64_t now_unix_ms,
                         char out[MB_DRV_UPLOADS_TEXT_MAX]);

#endif
