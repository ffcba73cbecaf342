#include "cli/driver/uploads.h"

void mb_drv_uploads_sum(const struct mb_drv_upload *nodes, size_t n, uint64_t *done_bytes,
                        uint64_t *total_bytes)
{
    int64_t newest = INT64_MIN;

    *done_bytes = *total_bytes = 0;
    for (size_t i = 0; i < n; i++) {
        if (nodes[i].total_bytes == 0 || nodes[i].iteration < newest)
            continue;
        if (nodes[i].iteration > newest)
            *done_bytes = *total_bytes = 0;
        newest = nodes[i].iteration;
        *done_bytes += nodes[i].done_bytes;
        *total_bytes += nodes[i].total_bytes;
    }
}
