/* A quarantine ends by itself: whoever still held the memory may end late. */
#include "agent/gpu_watch.h"

#include <stdio.h>

enum { MIB = 1 << 20 };

static const uint64_t slack[] = {[MB_GPU_BY_MEMORY] = MB_GPU_SLACK_BYTES, [MB_GPU_BY_NOTHING] = 0};

int mb_gpu_watch_idle(struct mb_gpu_watch *w, const struct mb_gpu_sample *used)
{
    if (w->is_watched || used->measure == MB_GPU_BY_NOTHING ||
        (w->has_baseline && w->baseline.measure == used->measure &&
         w->baseline.value <= used->value))
        return 0;
    w->baseline = *used;
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

static uint64_t baseline_of(const struct mb_gpu_watch *w, const struct mb_gpu_sample *used)
{
    return w->has_baseline && w->baseline.measure == used->measure ? w->baseline.value : 0;
}

static int is_free(const struct mb_gpu_watch *w, const struct mb_gpu_sample *used)
{
    return w->is_new || used->measure == MB_GPU_BY_NOTHING ||
           used->value <= baseline_of(w, used) + slack[used->measure];
}

static void say_why(struct mb_gpu_watch *w, const char *name, const struct mb_gpu_sample *used)
{
    static const struct {
        uint64_t unit;
        const char *words, *symbol;
    } units[] = {[MB_GPU_BY_MEMORY] = {MIB, "MiB still in use", " MiB"},
                 [MB_GPU_BY_PROCESSES] = {1, "processes still on it", ""}};

    if (used == NULL)
        snprintf(w->reason, sizeof(w->reason), "GPU %s: the driver does not say what is in use",
                 name);
    else
        snprintf(w->reason, sizeof(w->reason),
                 "GPU %s: %llu %s %d s after its job's processes ended (baseline %llu%s)", name,
                 (unsigned long long)(used->value / units[used->measure].unit),
                 units[used->measure].words, MB_GPU_PATIENCE_MS / 1000,
                 (unsigned long long)(baseline_of(w, used) / units[used->measure].unit),
                 units[used->measure].symbol);
}

enum mb_gpu_verdict mb_gpu_watch_sample(struct mb_gpu_watch *w, const char *name,
                                        const struct mb_gpu_sample *used, uint64_t now_ms)
{
    w->is_silent = 0;
    if (used != NULL && is_free(w, used)) {
        int is_first = w->is_new;

        w->is_watched = w->is_new = w->is_quarantined = 0;
        w->reason[0] = '\0';
        if (is_first)
            mb_gpu_watch_idle(w, used);
        return MB_GPU_FREE;
    }
    if (!w->is_quarantined && now_ms - w->since_ms < MB_GPU_PATIENCE_MS)
        return MB_GPU_WAIT;
    w->is_quarantined = 1;
    say_why(w, name, used);
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
