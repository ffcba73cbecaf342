/* A quarantine ends by itself: whoever still held the memory may end late. */
#include "agent/gpu_watch.h"

#include <stdio.h>

enum { MIB = 1 << 20 };

int mb_gpu_watch_idle(struct mb_gpu_watch *w, uint64_t used_bytes)
{
    if (w->is_watched || (w->has_baseline && w->baseline_bytes <= used_bytes))
        return 0;
    w->baseline_bytes = used_bytes;
    w->has_baseline = 1;
    return 1;
}

void mb_gpu_watch_first(struct mb_gpu_watch *w, uint64_t now_ms)
{
    mb_gpu_watch_begin(w, now_ms);
    w->is_new = 1;
}

void mb_gpu_watch_begin(struct mb_gpu_watch *w, uint64_t now_ms)
{
    if (w->is_watched)
        return;
    w->is_watched = 1;
    w->since_ms = now_ms;
}

enum mb_gpu_verdict mb_gpu_watch_sample(struct mb_gpu_watch *w, const char *name,
                                        const uint64_t *used_bytes, uint64_t now_ms)
{
    uint64_t baseline = w->has_baseline ? w->baseline_bytes : 0;

    w->is_silent = 0;
    if (used_bytes != NULL && (w->is_new || *used_bytes <= baseline + MB_GPU_SLACK_BYTES)) {
        int is_first = w->is_new;

        w->is_watched = w->is_new = w->is_quarantined = 0;
        w->reason[0] = '\0';
        if (is_first)
            mb_gpu_watch_idle(w, *used_bytes);
        return MB_GPU_FREE;
    }
    if (!w->is_quarantined && now_ms - w->since_ms < MB_GPU_PATIENCE_MS)
        return MB_GPU_WAIT;
    w->is_quarantined = 1;
    if (used_bytes != NULL)
        snprintf(
            w->reason, sizeof(w->reason),
            "GPU %s: %llu MiB still in use %d s after its job's processes ended (baseline %llu "
            "MiB)",
            name, (unsigned long long)(*used_bytes / MIB), MB_GPU_PATIENCE_MS / 1000,
            (unsigned long long)(baseline / MIB));
    else
        snprintf(w->reason, sizeof(w->reason), "GPU %s: the driver does not say what is in use",
                 name);
    return MB_GPU_QUARANTINE;
}

enum mb_gpu_verdict mb_gpu_watch_silence(struct mb_gpu_watch *w, const char *name,
                                         uint64_t asked_ms, uint64_t now_ms)
{
    if (w->is_silent)
        return MB_GPU_QUARANTINE;
    if (now_ms - asked_ms < MB_GPU_PATIENCE_MS)
        return w->is_quarantined ? MB_GPU_QUARANTINE : w->is_watched ? MB_GPU_WAIT : MB_GPU_FREE;
    mb_gpu_watch_begin(w, now_ms);
    w->is_silent = w->is_quarantined = 1;
    snprintf(w->reason, sizeof(w->reason), "GPU %s: the driver has not answered for %d s", name,
             MB_GPU_PATIENCE_MS / 1000);
    return MB_GPU_QUARANTINE;
}
