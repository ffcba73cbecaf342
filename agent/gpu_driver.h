/*
 * Counting this machine's devices at the start of an agent (resources.h) without waiting for a
 * driver that hangs: it is asked on a thread, once, and either answers or is said to be silent
 * after a while; then it may still answer. Loop-thread only.
 */
#ifndef MOBULA_AGENT_GPU_DRIVER_H
#define MOBULA_AGENT_GPU_DRIVER_H

#include <uv.h>
#include "agent/amd.h"
#include "agent/nvml.h"

struct mb_gpu_driver;

struct mb_gpu_found {
    struct mb_gpus gpus;
    struct mb_nvml *nvml; /* NULL: none of NVIDIA's */
    struct mb_amd amd;
};

struct mb_gpu_driver_ops {
    /* Once, and the last that is heard. err: as mb_gpus_detect(), its code MB_OK else. found is
     * borrowed. */
    void (*on_answer)(void *arg, const struct mb_err *err, const struct mb_gpu_found *found);
    void (*on_silence)(void *arg); /* once, if there is no answer yet */
};

/* Neither is called from inside. MB_ENOMEM. */
int mb_gpu_driver_ask(uv_loop_t *loop, uint64_t patience_ms, const struct mb_gpu_driver_ops *ops,
                      void *arg, struct mb_gpu_driver **out, struct mb_err *err);
/* Nothing is called any more but cb, after which the memory is freed; NULL calls it at once. A call
 * that hangs is left behind. */
void mb_gpu_driver_close(struct mb_gpu_driver *d, void (*cb)(void *arg), void *arg);

#endif
