/*
 * What this machine has: accelerators (NVIDIA through NVML, loaded at run time; AMD through the
 * topology files of its kernel driver) and CPUs. Blocking, start-up only.
 */
#ifndef MOBULA_AGENT_RESOURCES_H
#define MOBULA_AGENT_RESOURCES_H

#include <stdint.h>
#include "base/err.h"

enum mb_gpu_vendor { MB_GPU_NONE, MB_GPU_NVIDIA, MB_GPU_AMD };

struct mb_gpus {
    enum mb_gpu_vendor vendor;
    unsigned count;
    char model[96]; /* of the first one, for the accelerator label; "" if unknown */
};

/* No driver means no devices, which is no error; a driver that is there and fails is (MB_EIO). */
int mb_gpus_detect(struct mb_gpus *out, struct mb_err *err);
/* Bytes in use on NVIDIA devices, from NVML; keeps the library open. Blocking (some ms each), one
 * caller at a time. MB_EIO: the driver gives no answer. */
struct mb_nvml;
/* MB_OK and NULL: there is none. MB_EIO: there is one, and it fails. */
int mb_nvml_open(struct mb_nvml **out, struct mb_err *err);
int mb_nvml_used_bytes(struct mb_nvml *n, unsigned device, uint64_t *out);
struct mb_gpu_usage {
    char name[96], uuid[96];
    unsigned percent; /* of time in which a kernel ran */
    uint64_t used_bytes, total_bytes;
    unsigned power_mw, temperature_c;
};
/* What the driver does not say stays 0. */
void mb_nvml_usage(struct mb_nvml *n, unsigned device, struct mb_gpu_usage *out);
void mb_nvml_close(struct mb_nvml *n);

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

/* For the test: AMD devices below a topology directory. */
unsigned mb_gpus_count_kfd(const char *topology_nodes_dir);

#endif
