/*
 *  1. The thread runs. The caller waits ROUND_MS, or until the thread is through.
 *  2. A round: who has not finished, whether some thread moved, and whether rank 0 finds that it is
 *     time to say so, or has seen no move for too long. All ranks see the same figures.
 *  3. It is time: the last rank that is at it says with what, and rank 0 says that.
 *  4. All are through: the end. No move for too long: the end as well; the thread is left alone.
 * Failures: run()'s own, at once and without more rounds; the communicator's (a rank died, or gave
 * up): the thread is waited for a second and then left alone, as one that does not move.
 */
#include "worker/parallel/long_step.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "base/alloc.h"
#include "base/clock.h"

enum { ROUND_MS = 250, GRACE_MS = 1000, MS_PER_S = 1000, NS_PER_MS = 1000000, SAY_AGAIN = 6 };
enum { WORDS = MB_LONG_STEP_DOING_MAX / sizeof(int64_t) };

/* Shared with the thread; whoever ends last frees it. */
struct running {
    struct mb_long_step *step;
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t ended;
    pthread_t thread;
    clockid_t clock; /* of the thread */
    int has_clock, has_ended, is_alone, rc;
    struct mb_err err;
};

/* What a round found. */
struct round {
    int64_t unfinished; /* a rank + 1, or 0 */
    int64_t moved, says, stalls;
};

enum { ROUND_WORDS = sizeof(struct round) / sizeof(int64_t) };

/* How the caller waits. */
struct waiting {
    uint64_t begun_ms, moved_ms, say_ms;
    uint64_t used_ns; /* by the thread, when it moved last */
};

void mb_long_step_init(struct mb_long_step *s)
{
    pthread_mutex_init(&s->lock, NULL);
    s->doing[0] = '\0';
}

void mb_long_step_close(struct mb_long_step *s)
{
    pthread_mutex_destroy(&s->lock);
}

void mb_long_step_begins(struct mb_long_step *s, const char *verb, const char *what)
{
    pthread_mutex_lock(&s->lock);
    snprintf(s->doing, sizeof s->doing, "%s %s", verb, what);
    pthread_mutex_unlock(&s->lock);
}

/* ---- the thread ---- */

static void free_running(struct running *r)
{
    pthread_cond_destroy(&r->ended);
    pthread_mutex_destroy(&r->lock);
    mb_free(r);
}

static void *thread_main(void *arg)
{
    struct running *r = arg;
    struct mb_err err = {0};
    pthread_mutex_lock(&r->lock);
    r->has_clock = pthread_getcpuclockid(pthread_self(), &r->clock) == 0;
    pthread_mutex_unlock(&r->lock);
    const int rc = r->step->run(r->step->arg, &err);
    pthread_mutex_lock(&r->lock);
    r->rc = rc;
    r->err = err;
    r->has_clock = 0; /* it ends with the thread */
    r->has_ended = 1;
    pthread_cond_signal(&r->ended);
    const int is_alone = r->is_alone;
    pthread_mutex_unlock(&r->lock);
    if (is_alone) {
        free_running(r);
    }
    return NULL;
}

static int start(struct mb_long_step *s, struct running **out, struct mb_err *err)
{
    pthread_attr_t attr;
    struct running *r = mb_calloc(1, sizeof *r);
    if (r == NULL) {
        return mb_err_set(err, MB_ENOMEM, "a long step: out of memory");
    }
    r->step = s;
    pthread_mutex_init(&r->lock, NULL);
    mb_cond_init(&r->ended);
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    const int failed = pthread_create(&r->thread, &attr, thread_main, r);
    pthread_attr_destroy(&attr);
    if (failed != 0) {
        free_running(r);
        return mb_err_sys(err, failed, "a long step: thread");
    }
    *out = r;
    return 0;
}

static int wait_round(struct running *r, uint64_t ms)
{
    const uint64_t until_ms = mb_mono_ms() + ms;
    const struct timespec ts = {.tv_sec = (time_t)(until_ms / MS_PER_S),
                                .tv_nsec = (long)(until_ms % MS_PER_S) * NS_PER_MS};
    pthread_mutex_lock(&r->lock);
    while (!r->has_ended && mb_mono_ms() < until_ms) {
        pthread_cond_timedwait(&r->ended, &r->lock, &ts);
    }
    const int has_ended = r->has_ended;
    pthread_mutex_unlock(&r->lock);
    return has_ended;
}

/* Whether the thread has used the processor since the call before. */
static int has_moved(struct running *r, struct waiting *w)
{
    struct timespec ts = {0};
    pthread_mutex_lock(&r->lock); /* while it is held the thread's clock does not end */
    const int is_read = r->has_clock && clock_gettime(r->clock, &ts) == 0;
    pthread_mutex_unlock(&r->lock);
    const uint64_t used_ns = (uint64_t)ts.tv_sec * MS_PER_S * NS_PER_MS + (uint64_t)ts.tv_nsec;
    const int moved = is_read && used_ns > w->used_ns;
    w->used_ns = moved ? used_ns : w->used_ns;
    return moved;
}

/* ---- the ranks ---- */

static int tell(struct mb_comm *comm, struct round *r, struct mb_err *err)
{
    mb_comm_allreduce(comm, NULL, r, ROUND_WORDS, MB_COMM_I64, MB_COMM_MAX);
    return mb_comm_synchronize(comm, err);
}

/* Rank's. */
static int get_doing(struct mb_comm *comm, struct mb_long_step *s, uint32_t rank, const char *what,
                     char out[MB_LONG_STEP_DOING_MAX], struct mb_err *err)
{
    int64_t words[WORDS] = {0};
    pthread_mutex_lock(&s->lock);
    snprintf((char *)words, sizeof words, "%s", s->doing[0] != '\0' ? s->doing : what);
    pthread_mutex_unlock(&s->lock);
    mb_comm_broadcast(comm, NULL, words, WORDS, MB_COMM_I64, rank);
    int rc = mb_comm_synchronize(comm, err);
    memcpy(out, words, sizeof words);
    out[MB_LONG_STEP_DOING_MAX - 1] = '\0';
    return rc;
}

static int say(struct mb_comm *comm, struct mb_long_step *s, const struct round *r,
               const char *what, struct waiting *w, struct mb_err *err)
{
    char doing[MB_LONG_STEP_DOING_MAX], text[MB_LONG_STEP_DOING_MAX + 96];
    const uint32_t rank = (uint32_t)(r->unfinished - 1);
    int rc = get_doing(comm, s, rank, what, doing, err);
    if (rc == 0 && mb_comm_rank(comm) == 0) {
        const uint64_t waited_ms = mb_mono_ms() - w->begun_ms;
        snprintf(text, sizeof text, "waiting for rank %" PRIu32 ", %.0f s so far: %s", rank,
                 (double)waited_ms / MS_PER_S, doing);
        s->say(s->say_arg, text);
        w->say_ms = waited_ms + SAY_AGAIN * s->say_ms;
    }
    return rc;
}

/* One round; *is_over 1: all are through, or nobody moves. */
static int go_round(struct mb_comm *comm, struct mb_long_step *s, const char *what, int has_ended,
                    int moved, struct waiting *w, struct round *r, struct mb_err *err)
{
    const uint64_t now_ms = mb_mono_ms();
    const int is_first = mb_comm_rank(comm) == 0;
    *r = (struct round){.unfinished = has_ended ? 0 : (int64_t)mb_comm_rank(comm) + 1,
                        .moved = moved,
                        .says = is_first && s->say != NULL && now_ms - w->begun_ms >= w->say_ms,
                        .stalls =
                            is_first && s->stall_ms > 0 && now_ms - w->moved_ms >= s->stall_ms};
    int rc = tell(comm, r, err);
    if (rc == 0 && r->moved) {
        w->moved_ms = now_ms;
        r->stalls = 0;
    }
    return rc == 0 && r->unfinished > 0 && r->says ? say(comm, s, r, what, w, err) : rc;
}

/* Takes r. */
static int end(struct running *r, int *hangs, struct mb_err *err)
{
    pthread_mutex_lock(&r->lock);
    const int has_ended = r->has_ended, rc = r->rc;
    r->is_alone = !has_ended; /* then it frees this */
    if (has_ended && rc != 0) {
        *err = r->err;
    }
    pthread_mutex_unlock(&r->lock);
    *hangs = !has_ended;
    if (has_ended) {
        free_running(r);
    }
    return has_ended ? rc : 0;
}

/* A rank died, or gave up: the run ends in seconds, whatever the thread is at. */
static void wait_briefly(struct running *r)
{
    const uint64_t until_ms = mb_mono_ms() + GRACE_MS;
    while (!wait_round(r, ROUND_MS) && mb_mono_ms() < until_ms) {
    }
}

int mb_long_step_run(struct mb_comm *comm, struct mb_long_step *s, const char *what, int *hangs,
                     struct mb_err *err)
{
    const uint64_t now_ms = mb_mono_ms();
    struct waiting w = {.begun_ms = now_ms, .moved_ms = now_ms, .say_ms = s->say_ms};
    struct running *r = NULL;
    struct round round = {.unfinished = 1};
    struct mb_err of_run = {0};
    char doing[MB_LONG_STEP_DOING_MAX] = "";
    *hangs = 0;
    s->doing[0] = '\0';
    int rc = start(s, &r, err);
    if (rc != 0) {
        return rc;
    }
    while (rc == 0 && round.unfinished > 0 && !round.stalls) {
        const int has_ended = wait_round(r, ROUND_MS);
        if (has_ended && r->rc != 0) { /* the thread does not touch it any more */
            return end(r, hangs, err);
        }
        rc = go_round(comm, s, what, has_ended, has_moved(r, &w), &w, &round, err);
    }
    if (rc == 0 && round.stalls) {
        rc = get_doing(comm, s, (uint32_t)(round.unfinished - 1), what, doing, err);
        rc = rc != 0
                 ? rc
                 : mb_err_set(err, MB_ETIMEOUT, "%s: rank %d stands still for %.0f s: %s", what,
                              (int)(round.unfinished - 1), (double)s->stall_ms / MS_PER_S, doing);
    } else if (rc != 0) {
        wait_briefly(r);
    }
    const int run_rc = end(r, hangs, &of_run);
    if (rc == 0 && run_rc != 0) {
        *err = of_run;
    }
    return rc != 0 ? rc : run_rc;
}
