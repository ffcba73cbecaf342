/*
 * Looks at the memory (or, where NVML does not say that, the processes) of GPUs that jobs gave
 * back, and tells the ledger which are free and which are not (gpu_watch.h decides). NVML is asked
 * on a thread for each device, twice a second while it is unconfirmed and once at the start; a call
 * that hangs holds nobody else. Loop-thread only.
 *
 * Baselines, unconfirmed devices and what they are called are kept in NODE_DIR/gpus.json: a
 * restarted agent goes on, also while the driver does not answer.
 */
#ifndef MOBULA_AGENT_GPU_KEEPER_H
#define MOBULA_AGENT_GPU_KEEPER_H

#include <jansson.h>
#include <uv.h>
#include "agent/ledger.h"
#include "agent/nvml.h"

struct mb_gpu_keeper;

/* The devices that the last agent of this node had, as far as it is known: count 0 otherwise. */
void mb_gpu_keeper_former(const char *node_dir, struct mb_gpus *out);

struct mb_gpu_keeper_opts {
    struct mb_ledger *ledger;   /* it has loaded its bundles, and has devices; borrowed */
    const struct mb_gpus *gpus; /* what they are called; borrowed */
    const char *node_dir;
    struct mb_nvml *nvml; /* borrowed for the call; NULL: the driver has not answered yet, ... */
    uint64_t asked_ms;    /* ... and was asked then (monotonic) */
    void (*on_changed)(void *arg); /* what is available has changed */
    void *arg;
};

/* MB_ENOMEM, MB_EIO: the file is there and cannot be used; devices that are in doubt would be given
 * away. */
int mb_gpu_keeper_create(uv_loop_t *loop, const struct mb_gpu_keeper_opts *opts,
                         struct mb_gpu_keeper **out, struct mb_err *err);
/* The driver has answered after all. nvml is borrowed for the call. */
void mb_gpu_keeper_begin(struct mb_gpu_keeper *k, struct mb_nvml *nvml);
/* The ledger may have new unconfirmed devices. NULL is legal. */
void mb_gpu_keeper_look(struct mb_gpu_keeper *k);
/* [{"gpu": 0, "reason": "..."}] of those in quarantine; NULL is legal. */
json_t *mb_gpu_keeper_json(const struct mb_gpu_keeper *k);
/* Memory is freed after cb; NULL calls it at once. A call that hangs is left behind. */
void mb_gpu_keeper_close(struct mb_gpu_keeper *k, void (*cb)(void *arg), void *arg);

#endif
