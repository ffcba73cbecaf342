/*
 * What this machine has: accelerators (NVIDIA through NVML, loaded at run time; AMD through the
 * topology files of its kernel driver) and CPUs. Blocking, start-up only; a driver that hangs does
 * so for good, so devices are counted on a thread (gpu_driver.h).
 */
#ifndef MOBULA_AGENT_RESOURCES_H
#define MOBULA_AGENT_RESOURCES_H

#include <stdint.h>
#include "agent/gpu_visible.h"
#include "base/buf.h"
#include "base/err.h"

enum mb_gpu_vendor { MB_GPU_NONE, MB_GPU_NVIDIA, MB_GPU_AMD };

struct mb_gpus {
    enum mb_gpu_vendor vendor; /* of the machine's, whether or not some are ours */
    unsigned count;            /* of ours: those that the environment lets us see */
    char model[96];            /* of the first one, for the accelerator label; "" if unknown */
    struct mb_gpu_choice chosen;
    const char *list_name, *list; /* that variable; NULL: it is not set, all are ours. Borrowed */
};

/* The lists of visible devices of this process; NULL: not set. Borrowed. */
struct mb_gpu_lists {
    const char *cuda, *hip, *image; /* image: NVIDIA_VISIBLE_DEVICES */
};

/* Before a thread counts: an environment may not change while one reads it. */
struct mb_gpu_lists mb_gpu_lists_read(void);

struct mb_nvml;
struct mb_amd;

/* No driver means no devices, which is no error; a driver that is there and fails is (MB_EIO), and
 * a list of visible devices that names one that is not there (MB_EINVAL). *nvml: for the caller to
 * close; NULL where the devices are not NVIDIA's. *amd: AMD's among those chosen. */
int mb_gpus_detect(const struct mb_gpu_lists *lists, struct mb_gpus *out, struct mb_nvml **nvml,
                   struct mb_amd *amd, struct mb_err *err);
/* What the variable of visible devices calls this one; a number where nothing is known of it. gpus
 * may be NULL. */
int mb_gpus_put(const struct mb_gpus *gpus, unsigned device, struct mb_buf *out);

/* CPUs this process may run on, at least 1. */
unsigned mb_cpus_detect(void);
/* Bytes of memory that processes here may use: the machine's, or the control group's limit. */
uint64_t mb_memory_detect(void);
/* Bytes that count against a control group's limit, without what the kernel would give back at once
 * (inactive pages of files); 0: there is no such group. */
uint64_t mb_memory_used(void);
/* The environment variable that limits a process to devices of this vendor. */
const char *mb_gpu_visible_env(enum mb_gpu_vendor vendor);
/* The variable that has to say MB_GPU_ORDER so that a process counts devices as we do; NULL: none
 * is needed. CUDA alone puts the fastest first, NVML goes by the bus. */
#define MB_GPU_ORDER "PCI_BUS_ID"
const char *mb_gpu_order_env(enum mb_gpu_vendor vendor);

#endif
