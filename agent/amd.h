/*
 * AMD's devices by the files of their kernel driver: which there are, and what they are doing.
 * Blocking, some ms a device; of a driver that hangs for good.
 */
#ifndef MOBULA_AGENT_AMD_H
#define MOBULA_AGENT_AMD_H

#include "agent/gpu_visible.h"
#include "agent/nvml.h"

#define MB_AMD_SYS_CLASS "/sys/class"

struct mb_amd {
    unsigned n;
    struct {
        unsigned node; /* of the topology, in whose order HIP counts */
        char dir[128]; /* of its figures; "": the driver does not say where */
        char word[MB_GPU_WORD_MAX];
    } at[MB_GPUS_MAX];
};

/* All of the machine's, in HIP's order, at most MB_GPUS_MAX; no driver: none. sys_class:
 * MB_AMD_SYS_CLASS, or what a test made. */
void mb_amd_find(const char *sys_class, struct mb_amd *out);
/* Leaves those of all that are ours. */
void mb_amd_choose(struct mb_amd *all, const struct mb_gpu_choice *ours);
/* What the driver does not say stays 0. */
void mb_amd_usage(const struct mb_amd *a, unsigned device, struct mb_gpu_usage *out);

#endif
