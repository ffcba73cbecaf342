/*
 * Graphs for a device that has none: operations between graph_begin and graph_end are kept with
 * copies of their arguments, and run by graph_run. So what a pass freezes on the host shows on the
 * CPU, too. Copies to and from the host, and waiting, fail the test while it records.
 */
#ifndef MOBULA_TESTS_KERNELS_RECORDER_H
#define MOBULA_TESTS_KERNELS_RECORDER_H

#include "worker/kernels/backend.h"

/* The device's table with graphs of this kind; valid until the next call. One at a time. */
const struct mb_backend *recorder_over(const struct mb_backend *inner);
/* The nth capture from now on fails, and those after it; 0: none. */
void recorder_fails_at(size_t n);
/* Graphs run so far, and operations in the newest that was captured; both of any device that was
 * given. */
size_t recorder_runs(void);
size_t recorder_operations(void);
/* The table of a device that has graphs of its own, with its runs counted; and with captures in
 * which somebody waits for the device, which must not be. */
const struct mb_backend *recorder_counts(const struct mb_backend *inner);
const struct mb_backend *recorder_breaks(const struct mb_backend *inner);

#endif
