/*
 * Is a GPU free again after the processes that used it have ended? Pure: samples and the time come
 * in, a verdict goes out. One struct a device.
 *
 *   after its job                        verdict
 *   used <= baseline + slack             FREE        memory; or, without slack, processes on it
 *   the driver says neither, for good    FREE        there is nothing to wait for
 *   more, or no sample, for < 30 s       WAIT        nobody gets the device meanwhile
 *   the same after 30 s                  QUARANTINE  with a reason; FREE as soon as a sample is
 *   the driver was asked 30 s ago        QUARANTINE  likewise, whether there was a job or not
 *
 * The baseline is the least that was seen in use while no job had the device, so a display or a
 * driver's own reservation counts as free. A device that has none is not given out before its first
 * sample, unless a job had it when the agent began: then the baseline is 0. So it is when the
 * driver says something else than when the baseline was taken.
 */
#ifndef MOBULA_AGENT_GPU_WATCH_H
#define MOBULA_AGENT_GPU_WATCH_H

#include <stdint.h>

enum { MB_GPU_REASON_MAX = 160, MB_GPU_PATIENCE_MS = 30000 };

/* Contexts that the driver keeps differ by some tens of MiB; what a job forgets is more. */
#define MB_GPU_SLACK_BYTES ((uint64_t)512 << 20)

enum mb_gpu_verdict { MB_GPU_FREE, MB_GPU_WAIT, MB_GPU_QUARANTINE };

enum mb_gpu_measure { MB_GPU_BY_MEMORY, MB_GPU_BY_PROCESSES, MB_GPU_BY_NOTHING };

/* What is in use. */
struct mb_gpu_sample {
    enum mb_gpu_measure measure;
    uint64_t value; /* bytes, or processes */
};

struct mb_gpu_watch {
    struct mb_gpu_sample baseline;
    int has_baseline;
    int is_watched;    /* a job's processes have ended, no FREE since */
    int is_new;        /* watched, but no job had it: the first sample is the baseline */
    uint64_t since_ms; /* monotonic: when they ended */
    int is_quarantined;
    int is_silent;                  /* in quarantine since the driver does not return */
    char reason[MB_GPU_REASON_MAX]; /* of the quarantine; "" without one */
};

/* A sample while no job has the device. 1: the baseline has changed. */
int mb_gpu_watch_idle(struct mb_gpu_watch *w, const struct mb_gpu_sample *used);
/* Nobody has had it, and it has no baseline. */
void mb_gpu_watch_first(struct mb_gpu_watch *w, uint64_t now_ms);
/* Its job's processes have ended. */
void mb_gpu_watch_begin(struct mb_gpu_watch *w, uint64_t now_ms);
/* used NULL: the driver gave no answer. name: of the device, for the reason. Only while
 * is_watched. */
enum mb_gpu_verdict mb_gpu_watch_sample(struct mb_gpu_watch *w, const char *name,
                                        const struct mb_gpu_sample *used, uint64_t now_ms);
/* The driver was asked at asked_ms and has not returned yet. Any time; FREE: only if the device
 * was. */
enum mb_gpu_verdict mb_gpu_watch_silence(struct mb_gpu_watch *w, const char *name,
                                         uint64_t asked_ms, uint64_t now_ms);

#endif
