/*
 * Is the memory of a GPU free again after the processes that used it have ended? Pure: samples and
 * the time come in, a verdict goes out. One struct a device.
 *
 *   after its job                        verdict
 *   used <= baseline + slack             FREE
 *   more, or no sample, for < 30 s       WAIT        nobody gets the device meanwhile
 *   the same after 30 s                  QUARANTINE  with a reason; FREE as soon as a sample is
 *
 * The baseline is the least that was seen in use while no job had the device, so a display or a
 * driver's own reservation counts as free; before any such sample it is 0.
 */
#ifndef MOBULA_AGENT_GPU_WATCH_H
#define MOBULA_AGENT_GPU_WATCH_H

#include <stdint.h>

enum { MB_GPU_REASON_MAX = 160, MB_GPU_PATIENCE_MS = 30000 };

/* Contexts that the driver keeps differ by some tens of MiB; what a job forgets is more. */
#define MB_GPU_SLACK_BYTES ((uint64_t)512 << 20)

enum mb_gpu_verdict { MB_GPU_FREE, MB_GPU_WAIT, MB_GPU_QUARANTINE };

struct mb_gpu_watch {
    uint64_t baseline_bytes;
    int has_baseline;
    int is_watched;    /* a job's processes have ended, no FREE since */
    uint64_t since_ms; /* monotonic: when they ended */
    int is_quarantined;
    char reason[MB_GPU_REASON_MAX]; /* of the quarantine; "" without one */
};

/* A sample while no job has the device. */
void mb_gpu_watch_idle(struct mb_gpu_watch *w, uint64_t used_bytes);
/* Its job's processes have ended. */
void mb_gpu_watch_begin(struct mb_gpu_watch *w, uint64_t now_ms);
/* used_bytes NULL: the driver gave no answer. name: of the device, for the reason. Only while
 * is_watched. */
enum mb_gpu_verdict mb_gpu_watch_sample(struct mb_gpu_watch *w, const char *name,
                                        const uint64_t *used_bytes, uint64_t now_ms);

#endif
