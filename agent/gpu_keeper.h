/*
 * Looks at the memory of GPUs that jobs gave back, and tells the ledger which are free and which
 * are not (gpu_watch.h decides). NVML is asked on a thread for each device, twice a second while it
 * is unconfirmed and once at the start; a call that hangs holds nobody else. Loop-thread only.
 *
 * Baselines and unconfirmed devices are kept in NODE_DIR/gpus.json: a restarted agent goes on.
 */
#ifndef MOBULA_AGENT_GPU_KEEPER_H
#define MOBULA_AGENT_GPU_KEEPER_H

#include <jansson.h>
#include <uv.h>
#include "agent/ledger.h"

struct mb_gpu_keeper;

/* After the ledger has loaded its bundles; ledger is borrowed. on_changed: what is available has
 * changed. *out is NULL where there is no NVML: then devices count as free when they are given
 * back. MB_ENOMEM, MB_EIO: NVML, or the file, is there and cannot be used; devices that are in
 * doubt would be given away. */
int mb_gpu_keeper_create(uv_loop_t *loop, struct mb_ledger *ledger, const char *node_dir,
                         void (*on_changed)(void *arg), void *arg, struct mb_gpu_keeper **out,
                         struct mb_err *err);
/* The ledger may have new unconfirmed devices. NULL is legal. */
void mb_gpu_keeper_look(struct mb_gpu_keeper *k);
/* [{"gpu": 0, "reason": "..."}] of those in quarantine; NULL is legal. */
json_t *mb_gpu_keeper_json(const struct mb_gpu_keeper *k);
/* Memory is freed after cb; NULL calls it at once. A call that hangs is left behind. */
void mb_gpu_keeper_close(struct mb_gpu_keeper *k, void (*cb)(void *arg), void *arg);

#endif
