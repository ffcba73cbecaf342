/*
 * Saving while training goes on.
 *
 *  1. create: the snapshot's memory, every page of it touched; a stream of the device; the thread.
 *  2. start: wait for the save before, copy directory and counters, wake the thread.
 *  3. The thread copies weights (rank 0) and its range of the optimizer, or its share of a model
 *     that ranks share, out of the device. The
 *     training loop, which meanwhile computes gradients, waits for the end of that before it
 *     changes them: what it waits is the stall, together with 2.
 *  4. Ranks that share a model exchange their shares. The thread saves the snapshot as a model in
 * host memory, over its own communicator.
 *  5. Ranks tell each other stall, time and bytes; the callback hears of it.
 * Failures: a copy, a write, a disk that hangs (watch.h), a rank that died: the save fails on all
 * ranks, the checkpoint before stays what the tracker names, and the failure is kept. The thread
 * takes part in the agreement also when its copy failed, so that nobody waits for it.
 */
#include "worker/checkpoint/saver.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/str.h"
#include "worker/checkpoint/common.h"
#include "worker/checkpoint/snapshot.h"
#include "worker/checkpoint/watch.h"

enum { MS_PER_S = 1000, NS_PER_MS = 1000000, LOOK_MS = 500, STALL_MS = 600000 };

enum phase { IDLE, COPYING, WRITING };

struct mb_saver {
    struct mb_saver_options o;
    struct mb_device dev;        /* of the training, with a stream of our own */
    struct mb_snapshot snapshot; /* points into `memory` */
    float *memory;
    struct mb_checkpoint_progress progress;
    pthread_t thread;
    int has_thread;

    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t changed;
    enum phase phase;
    int closing;
    int hangs; /* a thread that may never end uses memory, dir and state */
    char *dir;
    struct mb_checkpoint_state state;
    uint64_t started_us;
    uint64_t stall_us; /* of the save in flight, so far */
    struct mb_err failure;
};

/* ---- memory ---- */

uint64_t mb_saver_bytes(const struct mb_checkpoint_model *m, struct mb_comm *comm)
{
    return mb_snapshot_floats(m, comm) * sizeof(float);
}

int mb_saver_fits(const struct mb_checkpoint_model *m, struct mb_comm *comm, struct mb_err *err)
{
    char need[16], have[16];
    uint64_t bytes = mb_saver_bytes(m, comm), there = mb_memory_available("");

    if (bytes <= there) {
        return 0;
    }
    return mb_err_set(err, MB_ENOMEM,
                      "--save: ranks that share a model join its parts in host memory, which needs "
                      "%s here, and %s are available",
                      mb_human_bytes(bytes, need), mb_human_bytes(there, have));
}

/* The kernel promises more than there is and kills whoever takes it: refuse what cannot fit. */
static int take_memory(struct mb_saver *s, struct mb_err *err)
{
    char need[16], have[16];
    uint64_t bytes = mb_saver_bytes(&s->o.model, s->o.comm), there = mb_memory_available("");
    s->memory = bytes <= there ? mb_alloc(bytes) : NULL;
    if (s->memory == NULL) {
        return mb_err_set(err, MB_ENOMEM,
                          "--async-save: the snapshot of a checkpoint needs %s of host memory, %s "
                          "are available; without --async-save a save needs %s",
                          mb_human_bytes(bytes, need), mb_human_bytes(there, have),
                          s->o.model.layout == NULL ? "none" : "as much, but only while it lasts");
    }
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t from = ((uintptr_t)s->memory + page - 1) & ~(page - 1);
    if (bytes > 2 * page) { /* only a hint: fewer faults now, fewer TLB misses in each copy */
        (void)madvise((void *)from, (bytes - page) & ~(page - 1), MADV_HUGEPAGE);
    }
    memset(s->memory, 0, bytes);
    return 0;
}

static void lay_out(struct mb_saver *s)
{
    mb_snapshot_lay_out(&s->snapshot, &s->o.model, s->o.comm, s->memory);
    s->snapshot.model.stall_ms = s->o.stall_ms;
    s->snapshot.model.progress = &s->progress;
}

/* ---- the thread ---- */

static void set_phase(struct mb_saver *s, enum phase phase)
{
    pthread_mutex_lock(&s->lock);
    s->phase = phase;
    mb_checkpoint_progress_move(&s->progress);
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static int save(struct mb_saver *s, struct mb_err *err)
{
    struct mb_checkpoint_saved saved = {0};
    struct mb_checkpoint_times times = {0};
    int rc = mb_snapshot_copy(&s->snapshot, &s->o.model, &s->dev, err);
    set_phase(s, WRITING);
    rc = mb_checkpoint_agree(s->o.comm, rc, "saving a checkpoint", err);
    if (rc == 0) {
        rc = mb_snapshot_join(&s->snapshot, &s->o.model, err);
    }
    if (rc == 0) {
        rc = mb_checkpoint_save(&s->snapshot.model, s->dir, &s->state, &saved, err);
    }
    if (saved.hangs) {
        pthread_mutex_lock(&s->lock);
        s->hangs = 1;
        pthread_mutex_unlock(&s->lock);
    }
    if (rc != 0) {
        return mb_err_wrap(err, "checkpoint of iteration %lld", (long long)s->state.iteration);
    }
    /* It is on disk and all ranks know: that somebody dies now makes only the figures partial. */
    struct mb_err ignored;
    pthread_mutex_lock(&s->lock);
    times.own_stall_us = s->stall_us;
    pthread_mutex_unlock(&s->lock);
    times.write_us = mb_mono_us() - s->started_us;
    (void)mb_checkpoint_share_times(s->o.comm, &saved, &times, &ignored);
    if (s->o.cb != NULL) {
        s->o.cb(s->o.arg, s->state.iteration, &saved, &times);
    }
    mb_checkpoint_saved_close(&saved);
    return 0;
}

static void *thread_main(void *arg)
{
    struct mb_saver *s = arg;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (s->phase == IDLE && !s->closing) {
            pthread_cond_wait(&s->changed, &s->lock);
        }
        if (s->phase == IDLE) {
            break;
        }
        pthread_mutex_unlock(&s->lock);
        struct mb_err err = {0};
        int rc = save(s, &err);
        pthread_mutex_lock(&s->lock);
        if (rc != 0) {
            s->failure = err;
        }
        s->phase = IDLE;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* ---- the calls ---- */

int mb_saver_create(const struct mb_saver_options *o, struct mb_saver **out, struct mb_err *err)
{
    struct mb_saver *s = mb_calloc(1, sizeof *s);
    if (s == NULL) {
        return mb_err_set(err, MB_ENOMEM, "out of memory for asynchronous saves");
    }
    s->o = *o;
    s->o.stall_ms = o->stall_ms > 0 ? o->stall_ms : STALL_MS;
    mb_checkpoint_progress_init(&s->progress);
    s->dev = (struct mb_device){.ops = o->model.dev->ops, .ctx = o->model.dev->ctx};
    pthread_mutex_init(&s->lock, NULL);
    mb_cond_init(&s->changed);
    int rc = take_memory(s, err);
    if (rc == 0) {
        lay_out(s);
        rc = s->dev.ops->stream_create(s->dev.ctx, &s->dev.stream, err);
    }
    if (rc == 0) {
        int failed = pthread_create(&s->thread, NULL, thread_main, s);
        s->has_thread = failed == 0;
        rc = failed == 0 ? 0 : mb_err_sys(err, failed, "asynchronous saves: thread");
    }
    if (rc != 0) {
        mb_saver_destroy(s);
        return rc;
    }
    *out = s;
    return 0;
}

/* Locked, and released while it waits: until nothing is in flight, or nothing has moved for twice
 * stall_ms: the thread itself ends a save whose disk stalls for stall_ms, and knows more of it. */
static int wait_idle(struct mb_saver *s, struct mb_err *err)
{
    const uint64_t most_ms = 2 * s->o.stall_ms;
    char file[256];
    uint64_t moves = 0, moved_ms = mb_mono_ms();
    while (s->phase != IDLE) {
        uint64_t now_ms = mb_mono_ms(), now = mb_checkpoint_progress_moves(&s->progress, file);
        if (now != moves) {
            moves = now;
            moved_ms = now_ms;
        }
        if (now_ms - moved_ms >= most_ms) {
            return mb_err_set(err, MB_ETIMEOUT,
                              "checkpoint of iteration %lld: nothing has moved for %.1f s%s%s",
                              (long long)s->state.iteration, (double)most_ms / MS_PER_S,
                              file[0] != '\0' ? "; the last file is " : "", file);
        }
        uint64_t left_ms = most_ms - (now_ms - moved_ms);
        now_ms += left_ms < LOOK_MS ? left_ms : LOOK_MS;
        struct timespec ts = {.tv_sec = (time_t)(now_ms / MS_PER_S),
                              .tv_nsec = (long)(now_ms % MS_PER_S) * NS_PER_MS};
        pthread_cond_timedwait(&s->changed, &s->lock, &ts);
    }
    return 0;
}

/* 0: the thread is stuck in a disk. */
static int end_thread(struct mb_saver *s)
{
    struct mb_err err;
    pthread_mutex_lock(&s->lock);
    s->closing = 1;
    pthread_cond_broadcast(&s->changed);
    int rc = wait_idle(s, &err);
    pthread_mutex_unlock(&s->lock);
    if (rc != 0) {
        mb_error("saver", "%s; it is left alone", err.text);
        pthread_detach(s->thread);
        return 0;
    }
    pthread_join(s->thread, NULL);
    return 1;
}

void mb_saver_destroy(struct mb_saver *s)
{
    if (s == NULL || (s->has_thread && !end_thread(s))) {
        return;
    }
    if (s->hangs) { /* its writer uses the rest */
        s->dev.ops->stream_destroy(s->dev.ctx, s->dev.stream);
        return;
    }
    if (s->dev.stream != NULL) {
        s->dev.ops->stream_destroy(s->dev.ctx, s->dev.stream);
    }
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    mb_checkpoint_progress_close(&s->progress);
    mb_checkpoint_state_close(&s->state);
    mb_free(s->dir);
    mb_free(s->memory);
    mb_free(s);
}

/* Locked. */
static int kept_failure(const struct mb_saver *s, struct mb_err *err)
{
    return s->failure.code != 0 ? mb_err_set(err, s->failure.code, "%s", s->failure.text) : 0;
}

static int take_order(struct mb_saver *s, const char *dir, const struct mb_checkpoint_state *state,
                      struct mb_err *err)
{
    char *copy = mb_strdup(dir), *args = mb_strdup(state->args_json);
    if (copy == NULL || (args == NULL && state->args_json != NULL)) {
        mb_free(copy);
        mb_free(args);
        return mb_err_set(err, MB_ENOMEM, "checkpoint: out of memory");
    }
    mb_free(s->dir);
    mb_checkpoint_state_close(&s->state);
    s->dir = copy;
    s->state = *state;
    s->state.args_json = args;
    return 0;
}

int mb_saver_start(struct mb_saver *s, const char *dir, const struct mb_checkpoint_state *state,
                   struct mb_err *err)
{
    uint64_t from_us = mb_mono_us();
    pthread_mutex_lock(&s->lock);
    int rc = wait_idle(s, err);
    if (rc == 0) {
        rc = kept_failure(s, err);
    }
    if (rc == 0) {
        rc = take_order(s, dir, state, err);
    }
    if (rc == 0) {
        s->phase = COPYING;
        s->started_us = mb_mono_us();
        s->stall_us = s->started_us - from_us;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return rc;
}

void mb_saver_wait_copied(struct mb_saver *s)
{
    pthread_mutex_lock(&s->lock);
    if (s->phase == COPYING) {
        uint64_t from_us = mb_mono_us();
        while (s->phase == COPYING) {
            pthread_cond_wait(&s->changed, &s->lock);
        }
        s->stall_us += mb_mono_us() - from_us;
    }
    pthread_mutex_unlock(&s->lock);
}

int mb_saver_has_failed(struct mb_saver *s)
{
    pthread_mutex_lock(&s->lock);
    int failed = s->failure.code != 0;
    pthread_mutex_unlock(&s->lock);
    return failed;
}

int mb_saver_wait(struct mb_saver *s, struct mb_err *err)
{
    pthread_mutex_lock(&s->lock);
    int rc = wait_idle(s, err);
    if (rc == 0) {
        rc = kept_failure(s, err);
    }
    pthread_mutex_unlock(&s->lock);
    return rc;
}
