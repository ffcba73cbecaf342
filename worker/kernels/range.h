/*
 * Named stretches of time for a profiler (NVTX on NVIDIA GPUs): what the trainer was doing when a
 * kernel was launched. They nest, and each that begins is ended by the same thread. Costs one test
 * of a flag while nobody profiles.
 */
#ifndef MOBULA_WORKER_KERNELS_RANGE_H
#define MOBULA_WORKER_KERNELS_RANGE_H

#include "worker/kernels/backend.h"

/* Longer names are cut. */
enum { MB_RANGE_NAME_MAX = 64 };

void mb_range_begin(const struct mb_device *dev, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
void mb_range_end(const struct mb_device *dev);

#endif
