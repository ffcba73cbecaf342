/*
 * Master weights, fp32, flat: as one array, or in halves (split.h) where the upper ones are what
 * products read. What is outside of the device sees fp32 in either case.
 *
 * Everything enqueues on dev->stream. The window is scratch of one stream at a time: whoever uses
 * another stream (a save beside the steps) has ended before the weights change.
 */
#ifndef MOBULA_WORKER_KERNELS_MASTER_H
#define MOBULA_WORKER_KERNELS_MASTER_H

#include <stddef.h>
#include <stdint.h>
#include "worker/kernels/backend.h"

enum { MB_MASTER_WINDOW = 1 << 22 }; /* floats */

struct mb_master {
    float *whole;            /* NULL: in halves */
    uint16_t *upper, *lower; /* NULL: whole */
    float *window;           /* with halves [MB_MASTER_WINDOW] */
};

/* Elements [begin, begin + n) to or from host memory, as copy_out() and copy_in() of op.h. */
void mb_master_copy_out(const struct mb_device *dev, const struct mb_master *w, size_t begin,
                        size_t n, float *host);
void mb_master_copy_in(const struct mb_device *dev, const struct mb_master *w, size_t begin,
                       size_t n, const float *host);
/* sum += the squares of elements [begin, begin + n) */
void mb_master_squared_norm(const struct mb_device *dev, const struct mb_master *w, size_t begin,
                            size_t n, double *sum);

#endif
