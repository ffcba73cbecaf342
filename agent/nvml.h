/*
 * NVIDIA's devices through NVML, loaded at run time: those that CUDA_VISIBLE_DEVICES leaves us,
 * numbered from 0 as the ledger numbers them. Where that is not set, NVIDIA_VISIBLE_DEVICES counts
 * if it says "none" or "void", as images do that must not see any. Blocking: some ms a device, and
 * for good when the driver hangs. What is asked of an open one may be asked on several threads.
 */
#ifndef MOBULA_AGENT_NVML_H
#define MOBULA_AGENT_NVML_H

#include <stdint.h>
#include "agent/resources.h"
#include "base/err.h"

/* No library, no driver, no device: out stays as it is. MB_EIO, MB_EINVAL as mb_gpus_detect(). */
int mb_nvml_detect(struct mb_gpus *out, struct mb_err *err);

struct mb_nvml;

/* MB_OK and NULL: there is none. MB_EIO: there is one, and it fails. */
int mb_nvml_open(struct mb_nvml **out, struct mb_err *err);
/* One more holder, each of which closes it; on any thread. */
struct mb_nvml *mb_nvml_share(struct mb_nvml *n);
void mb_nvml_close(struct mb_nvml *n); /* NULL is legal */

/* What CUDA_VISIBLE_DEVICES calls it; "" for a number that is none of ours. */
const char *mb_nvml_word(const struct mb_nvml *n, unsigned device);
/* MB_EIO: the driver gives no answer. */
int mb_nvml_used_bytes(struct mb_nvml *n, unsigned device, uint64_t *out);

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
