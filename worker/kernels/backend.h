/*
 * Opening a backend: a shared object with a table of operations (op.h), one device of it, one
 * stream. The object is opened by absolute path and never searched for, so that what runs is what
 * was installed. Threads: the one that opened a device uses and closes it.
 */
#ifndef MOBULA_WORKER_KERNELS_BACKEND_H
#define MOBULA_WORKER_KERNELS_BACKEND_H

#include "base/err.h"
#include "worker/kernels/op.h"

struct mb_device {
    const struct mb_backend *ops; /* borrowed from the library */
    struct mb_context *ctx;
    struct mb_stream *stream; /* the compute stream */
    void *library;
    int tells_ranges; /* 1: range.h tells a profiler; set by the owner */
};

/* path is absolute; device_index is the local device (always 0 for the CPU). On failure *out is
 * untouched: MB_EINVAL (relative path), MB_ENOENT (no such file), MB_EUNSUPPORTED (no backend, or
 * built for another ABI), or what the backend says of its device. */
int mb_backend_open(const char *path, int device_index, struct mb_device *out, struct mb_err *err);

/* Ends stream, context and library; legal on a zeroed struct and twice. */
void mb_backend_close(struct mb_device *dev);

#endif
