/*
 * Which of a machine's devices a list like CUDA_VISIBLE_DEVICES names. Pure.
 *
 * As NVIDIA defines it: numbers in the driver's order, GPU-UUIDs or unique beginnings of them, MIG
 * identifiers; an empty list, and what stands behind a -1, names none. Where CUDA would drop the
 * rest without a word (a device that is not there, one that is named twice), this is an error: a
 * node that comes up with too few GPUs is worse than one that says why.
 */
#ifndef MOBULA_AGENT_GPU_VISIBLE_H
#define MOBULA_AGENT_GPU_VISIBLE_H

#include "base/err.h"

enum { MB_GPUS_MAX = 64, MB_GPU_WORD_MAX = 96, MB_GPU_PART = -1 };

struct mb_gpu_choice {
    unsigned n;
    struct {
        int device; /* the driver's number; MB_GPU_PART: a part of one, by its word */
        char word[MB_GPU_WORD_MAX]; /* what a process' own list has to say */
    } at[MB_GPUS_MAX];
};

struct mb_gpu_known {
    unsigned n_devices;
    char uuid[MB_GPUS_MAX][MB_GPU_WORD_MAX];        /* "": not known */
    int (*has_part)(void *arg, const char *mig_id); /* NULL: there are none */
    void *arg;
};

/* list NULL: all devices, at most MB_GPUS_MAX. name: of the variable, for errors. MB_EINVAL. */
int mb_gpus_choose(const char *name, const char *list, const struct mb_gpu_known *known,
                   struct mb_gpu_choice *out, struct mb_err *err);

#endif
