/*
 * What this machine is doing, as Ray's dashboard shows it for every node: CPU, memory, disks,
 * network, GPUs. Reading blocks (files of /proc: some ms); the rest is pure.
 */
#ifndef MOBULA_AGENT_HARDWARE_H
#define MOBULA_AGENT_HARDWARE_H

#include <jansson.h>
#include <stdint.h>
#include "agent/nvml.h"

/* Counters since some beginning, and what is true now. What the machine does not say is 0. */
struct mb_hardware {
    uint64_t at_ms; /* monotonic */
    uint64_t unix_ms;
    uint64_t boot_unix_s;
    unsigned n_cpus, n_cores;
    uint64_t cpu_busy_ticks, cpu_ticks;
    uint64_t host_bytes, host_used_bytes; /* the machine */
    uint64_t mem_bytes, mem_used_bytes;   /* the control group, where it has a limit */
    uint64_t shm_bytes;
    double load[3];
    uint64_t sent_bytes, received_bytes;                      /* without loopback */
    uint64_t disk_bytes[2], disk_ops[2];                      /* read, written; whole devices */
    uint64_t space_bytes, space_used_bytes, space_free_bytes; /* of the node's directory */
    uint64_t agent_rss_bytes, agent_vm_bytes, agent_ticks;
    unsigned n_gpus;
    struct mb_gpu_usage gpus[MB_GPUS_MAX];
};

/* proc: "/proc"; dir: any path on the file system that fills. GPUs are left to gpu_figures.h. */
void mb_hardware_read(const char *proc, const char *dir, struct mb_hardware *out);
/* As Ray 2.60's dashboard reads it; speeds are since before, which may be NULL. NULL: no memory. */
json_t *mb_hardware_json(const struct mb_hardware *now, const struct mb_hardware *before,
                         const char *hostname, const char *ip, const char *dir);

#endif
