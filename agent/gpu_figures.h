/*
 * What the driver says of this node's GPUs, read every 5 s on a thread: for Ray's
 * dashboard (hardware.h), for the node's page, for metrics, and by our own head for status.
 * Loop-thread only.
 */
#ifndef MOBULA_AGENT_GPU_FIGURES_H
#define MOBULA_AGENT_GPU_FIGURES_H

#include <jansson.h>
#include <uv.h>
#include "agent/amd.h"
#include "agent/nvml.h"
#include "base/buf.h"

struct mb_gpu_figures;

int mb_gpu_figures_create(uv_loop_t *loop, struct mb_gpu_figures **out, struct mb_err *err);
/* Once: looking begins, at NVIDIA's, or where nvml is NULL at those of amd. Borrowed for this call.
 */
void mb_gpu_figures_begin(struct mb_gpu_figures *f, struct mb_nvml *nvml, const struct mb_amd *amd);
/* Borrowed until the loop goes on; 0 before the first look has ended. f NULL is legal. */
unsigned mb_gpu_figures_latest(const struct mb_gpu_figures *f, const struct mb_gpu_usage **out);
/* Memory is freed after cb, NULL calls it at once; a call to a driver that hangs is left behind. */
void mb_gpu_figures_close(struct mb_gpu_figures *f, void (*cb)(void *arg), void *arg);

/* [{"gpu": 0, "device": "2", ...}]; what has no ECC has null for its errors. */
json_t *mb_gpu_usage_json(const struct mb_gpu_usage *gpus, unsigned n);
int mb_gpu_usage_metrics(const struct mb_gpu_usage *gpus, unsigned n, struct mb_buf *out);

#endif
