/*
 * NVIDIA's devices through NVML, loaded at run time: those that CUDA_VISIBLE_DEVICES leaves us,
 * numbered from 0 as the ledger numbers them. Where that is not set, NVIDIA_VISIBLE_DEVICES counts
 * if it says "none" or "void", as images do that must not see any. Blocking: some ms a device, and
 * for good when the driver hangs. What is asked of an open one may be asked on several threads.
 */
#ifndef MOBULA_AGENT_NVML_H
#define MOBULA_AGENT_NVML_H

#include <stdint.h>
#include "agent/gpu_watch.h"
#include "agent/resources.h"
#include "base/err.h"

struct mb_nvml;

/* MB_OK and NULL: no library, no driver or no device; gpus stays as it is then. MB_EIO, MB_EINVAL
 * as mb_gpus_detect(). */
int mb_nvml_open(const struct mb_gpu_lists *lists, struct mb_gpus *gpus, struct mb_nvml **out,
                 struct mb_err *err);
/* One more holder, each of which closes it; on any thread. */
struct mb_nvml *mb_nvml_share(struct mb_nvml *n);
/* Never blocks: the last one has a thread end it (errand.h). NULL is legal. */
void mb_nvml_close(struct mb_nvml *n);

unsigned mb_nvml_count(const struct mb_nvml *n);
/* Memory, or where the driver does not say it (some devices that share the CPU's, some parts),
 * processes, or nothing; nothing too of a device that is not among ours. MB_EIO: no answer. */
int mb_nvml_in_use(struct mb_nvml *n, unsigned device, struct mb_gpu_sample *out);

/* Bits of nvmlClocksEventReasons. */
enum {
    MB_GPU_THROTTLE_POWER_CAP = 0x4,
    MB_GPU_THROTTLE_HW = 0x8,
    MB_GPU_THROTTLE_THERMAL = 0x20,
    MB_GPU_THROTTLE_HW_THERMAL = 0x40,
    MB_GPU_THROTTLE_POWER_BRAKE = 0x80
};

struct mb_gpu_usage {
    char name[96], uuid[96], word[MB_GPU_WORD_MAX];
    unsigned percent; /* of time in which a kernel ran */
    uint64_t used_bytes, total_bytes;
    unsigned power_mw, power_limit_mw, temperature_c, sm_clock_mhz;
    int has_ecc; /* since the driver was loaded: */
    uint64_t ecc_corrected, ecc_uncorrected;
    uint64_t throttle; /* reasons for which clocks are lower now, bits */
};

/* What the driver does not say stays 0. */
void mb_nvml_usage(struct mb_nvml *n, unsigned device, struct mb_gpu_usage *out);

#endif
