/*
 *  1. On rank 0 a thread writes the files (megatron/split.h). What it needs of weights and moments
 *     it asks of the thread that called, which alone uses device and communicator.
 *  2. That one looks after itself first. What it does not have it asks of all ranks by a broadcast;
 *     whose range of the flat buffer it is sends it.
 *  3. While nothing is asked for, it tells them twice a second that bytes are written; at last,
 * that the writer has ended, well or not. Failures: what the splitter and the disk say. A rank that
 * dies fails the broadcast, and then every request: the writer ends. A disk that hangs is left
 * alone with its thread. A rank that cannot copy from its device sends zeros and says so at the
 * end, so that nobody waits for it.
 */
#include "worker/checkpoint/torch_save.h"

#include <assert.h>
#include <pthread.h>
#include <string.h>
#include <time.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "worker/checkpoint/common.h"
#include "worker/checkpoint/megatron/split.h"
#include "worker/checkpoint/watch.h"
#include "worker/checkpoint/weights.h"

enum { ROUND_MS = 500, MS_PER_S = 1000, NS_PER_MS = 1000000 };

/* Elements [begin, begin + n) of the whole model's flat buffer; n: MB_CHECKPOINT_PIECE at most. */
struct request {
    enum mb_weights_kind what;
    size_t begin, n;
    float *out;
};

/* What rank 0 tells the others. */
enum order { GOES_ON, GIVE, END };

struct message {
    int64_t order, moved, what, begin, n;
};

enum { MESSAGE_WORDS = sizeof(struct message) / sizeof(int64_t) };

/* On rank 0, shared with the thread; whoever ends last frees it. */
struct writing {
    const struct mb_checkpoint_model *m;
    const char *dir;
    struct mb_st_tensor *tensors;
    struct mb_weights_source source;
    struct mb_weights weights;
    struct mb_splitter *splitter;
    void (*release)(void *arg);
    void *arg;

    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t changed;
    struct request request;
    int is_asked, is_answered; /* the request; is_answered: its outcome is rc */
    int has_ended;             /* the thread; its outcome is rc */
    int is_left;               /* the writing is given up */
    int is_alone;              /* and nobody waits for the thread any more */
    int rc;
    struct mb_err err;
    uint64_t n_bytes;
    struct mb_checkpoint_saved files;
};

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "checkpoint: out of memory");
}

/* ---- what a rank has ---- */

static int has(const struct mb_checkpoint_model *m, enum mb_weights_kind what, size_t begin,
               size_t n)
{
    return what == MB_WEIGHTS_WEIGHT || (begin >= m->state_begin && begin + n <= m->state_end);
}

static int copy_own(const struct mb_checkpoint_model *m, enum mb_weights_kind what, size_t begin,
                    size_t n, float *out, struct mb_err *err)
{
    struct mb_device *d = m->dev;
    const int is_weight = what == MB_WEIGHTS_WEIGHT;
    const float *from = is_weight                    ? m->weights.whole
                        : what == MB_WEIGHTS_EXP_AVG ? m->exp_avg
                                                     : m->exp_avg_sq;
    const size_t at = is_weight ? begin : begin - m->state_begin;
    if (d == NULL) {
        memcpy(out, from + at, n * sizeof *out);
        return 0;
    }
    if (is_weight) {
        mb_master_copy_out(d, &m->weights, at, n, out);
    } else {
        d->ops->copy_out(d->ctx, d->stream, out, from + at, n * sizeof *out);
    }
    return d->ops->synchronize(d->ctx, d->stream, err);
}

/* Of a range the part that a rank saves. */
static size_t overlap(const struct mb_checkpoint_model *m, uint32_t rank, size_t begin, size_t n,
                      size_t *from)
{
    size_t first, last;
    mb_comm_range(m->n_elements, mb_comm_world_size(m->comm), rank, &first, &last);
    *from = first > begin ? first : begin;
    last = last < begin + n ? last : begin + n;
    return last > *from ? last - *from : 0;
}

/* ---- the other ranks ---- */

static int tell(struct mb_comm *comm, struct message *message, struct mb_err *err)
{
    mb_comm_broadcast(comm, NULL, message, MESSAGE_WORDS, MB_COMM_I64, 0);
    return mb_comm_synchronize(comm, err);
}

static int give(const struct mb_checkpoint_model *m, const struct message *message, float *piece,
                struct mb_err *of_copy, int *copy_rc, struct mb_err *err)
{
    size_t from;
    const size_t n =
        overlap(m, mb_comm_rank(m->comm), (size_t)message->begin, (size_t)message->n, &from);
    if (n == 0) {
        return 0;
    }
    if (*copy_rc == 0) {
        *copy_rc = copy_own(m, (enum mb_weights_kind)message->what, from, n, piece, of_copy);
    }
    mb_comm_send(m->comm, NULL, piece, n, MB_COMM_F32, 0);
    return mb_comm_synchronize(m->comm, err);
}

static int follow(const struct mb_checkpoint_model *m, struct mb_err *err)
{
    struct message message = {.order = GOES_ON};
    struct mb_err of_copy = {0};
    float *piece = mb_calloc(MB_CHECKPOINT_PIECE, sizeof *piece);
    int copy_rc = 0;
    int rc = mb_checkpoint_agree(m->comm, piece != NULL ? 0 : no_memory(err), "saving a checkpoint",
                                 err);
    while (rc == 0 && message.order != END) {
        rc = tell(m->comm, &message, err);
        if (rc == 0 && message.order == GIVE) {
            rc = give(m, &message, piece, &of_copy, &copy_rc, err);
        }
        if (rc == 0 && message.moved && m->progress != NULL) {
            mb_checkpoint_progress_move(m->progress);
        }
    }
    mb_free(piece);
    if (rc == 0 && copy_rc != 0) {
        *err = of_copy;
        rc = copy_rc;
    }
    return rc;
}

/* ---- rank 0: the writer ---- */

static int read_source(void *arg, enum mb_weights_kind what, size_t tensor, uint64_t from, size_t n,
                       float *out, struct mb_err *err)
{
    struct writing *w = arg;
    const struct mb_checkpoint_model *m = w->m;
    const size_t begin = m->tensors[tensor].offset + (size_t)from;
    if (m->dev == NULL && has(m, what, begin, n)) {
        return copy_own(m, what, begin, n, out, err);
    }
    pthread_mutex_lock(&w->lock);
    w->request = (struct request){what, begin, n, out};
    w->is_asked = 1;
    w->is_answered = 0;
    pthread_cond_broadcast(&w->changed);
    while (!w->is_answered && !w->is_left) {
        pthread_cond_wait(&w->changed, &w->lock);
    }
    int rc = w->is_answered ? w->rc : mb_err_set(&w->err, MB_ECANCELED, "cancelled");
    if (rc != 0) {
        *err = w->err;
    }
    pthread_mutex_unlock(&w->lock);
    return rc;
}

static int wrote(void *arg, uint64_t n_bytes, struct mb_err *err)
{
    struct writing *w = arg;
    pthread_mutex_lock(&w->lock);
    w->n_bytes += n_bytes;
    const int is_left = w->is_left;
    pthread_mutex_unlock(&w->lock);
    return is_left ? mb_err_set(err, MB_ECANCELED, "cancelled") : 0;
}

/* Also a sign that the disk moves: fsync may take longer than all writing. */
static int finished(void *arg, const char *path, uint64_t size_bytes, uint64_t crc64nvme,
                    struct mb_err *err)
{
    struct writing *w = arg;
    int rc = mb_checkpoint_note_file(&w->files, path, size_bytes, crc64nvme, err);
    return rc == 0 ? wrote(w, 1, err) : rc;
}

static void free_writing(struct writing *w)
{
    mb_splitter_close(w->splitter);
    mb_checkpoint_saved_close(&w->files);
    mb_free(w->tensors);
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    mb_free(w);
}

static void *thread_main(void *arg)
{
    struct writing *w = arg;
    struct mb_err err = {0};
    int rc = mb_splitter_write_files(w->splitter, w->dir, &err);
    pthread_mutex_lock(&w->lock);
    w->rc = rc;
    w->err = err;
    w->has_ended = 1;
    pthread_cond_broadcast(&w->changed);
    const int is_alone = w->is_alone;
    pthread_mutex_unlock(&w->lock);
    if (is_alone) {
        w->release(w->arg);
        free_writing(w);
    }
    return NULL;
}

/* ---- rank 0: the caller ---- */

static int list_tensors(struct writing *w, struct mb_err *err)
{
    const struct mb_checkpoint_model *m = w->m;
    uint64_t at = 0;
    w->tensors = mb_calloc(m->n_tensors + 1, sizeof *w->tensors);
    if (w->tensors == NULL) {
        return no_memory(err);
    }
    for (size_t i = 0; i < m->n_tensors; i++) {
        const struct mb_checkpoint_tensor *t = &m->tensors[i];
        const uint64_t n_bytes = t->n * sizeof(float);
        w->tensors[i] = (struct mb_st_tensor){.name = t->name,
                                              .dtype = MB_ST_F32,
                                              .n_dims = t->n_dims,
                                              .shape = {t->shape[0], t->shape[1]},
                                              .begin = at,
                                              .end = at + n_bytes};
        at += n_bytes;
    }
    return 0;
}

static int start_thread(struct writing *w, struct mb_err *err)
{
    pthread_attr_t attr;
    pthread_t thread;
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    const int failed = pthread_create(&thread, &attr, thread_main, w);
    pthread_attr_destroy(&attr);
    return failed == 0 ? 0 : mb_err_sys(err, failed, "checkpoint: thread");
}

static int create(struct writing *w, const struct mb_checkpoint_state *state, struct mb_err *err)
{
    const struct mb_checkpoint_torch *t = w->m->torch;
    const struct mb_splitter_options o = {.tp = t->tp,
                                          .pp = t->pp,
                                          .n_chunks = t->n_chunks,
                                          .dtype = t->dtype,
                                          .is_local = t->is_local,
                                          .is_the_runs = 1,
                                          .wrote = wrote,
                                          .finished = finished,
                                          .arg = w};
    int rc = list_tensors(w, err);
    if (rc == 0) {
        w->source = (struct mb_weights_source){w->tensors, w->m->n_tensors, read_source, w};
        w->weights =
            (struct mb_weights){.source = &w->source, .has_optimizer = w->m->exp_avg != NULL};
        rc = mb_splitter_create(w->dir, &w->weights, state, &o, &w->splitter, err);
    }
    return rc;
}

enum event { NOTHING, ASKED, ENDED };

/* Waits ROUND_MS at most. moved: bytes since the call before. */
static enum event wait_event(struct writing *w, struct request *r, uint64_t *n_bytes, int *moved)
{
    const uint64_t until_ms = mb_mono_ms() + ROUND_MS;
    const struct timespec ts = {.tv_sec = (time_t)(until_ms / MS_PER_S),
                                .tv_nsec = (long)(until_ms % MS_PER_S) * NS_PER_MS};
    pthread_mutex_lock(&w->lock);
    while (!w->is_asked && !w->has_ended && mb_mono_ms() < until_ms) {
        pthread_cond_timedwait(&w->changed, &w->lock, &ts);
    }
    const enum event event = w->has_ended ? ENDED : w->is_asked ? ASKED : NOTHING;
    w->is_asked = 0;
    *r = w->request;
    *moved |= w->n_bytes != *n_bytes;
    *n_bytes = w->n_bytes;
    pthread_mutex_unlock(&w->lock);
    return event;
}

/* comm_rc: what the communicator said. */
static int fetch(struct writing *w, const struct request *r, int *comm_rc, struct mb_err *err)
{
    const struct mb_checkpoint_model *m = w->m;
    struct message message = {GIVE, 1, (int64_t)r->what, (int64_t)r->begin, (int64_t)r->n};
    int rc = 0;
    *comm_rc = tell(m->comm, &message, err);
    for (uint32_t rank = 0; rank < mb_comm_world_size(m->comm) && *comm_rc == 0; rank++) {
        size_t from;
        const size_t n = overlap(m, rank, r->begin, r->n, &from);
        float *out = r->out + (from - r->begin);
        if (n > 0 && rank == 0) {
            rc = copy_own(m, r->what, from, n, out, err);
        } else if (n > 0) {
            mb_comm_recv(m->comm, NULL, out, n, MB_COMM_F32, rank);
        }
    }
    if (*comm_rc == 0) {
        struct mb_err of_comm;
        *comm_rc = mb_comm_synchronize(m->comm, &of_comm);
        if (*comm_rc != 0) {
            *err = of_comm;
        }
    }
    return *comm_rc != 0 ? *comm_rc : rc;
}

static void answer(struct writing *w, int rc, const struct mb_err *err)
{
    pthread_mutex_lock(&w->lock);
    w->rc = rc;
    w->err = *err;
    w->is_answered = 1;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

static void leave(struct writing *w)
{
    pthread_mutex_lock(&w->lock);
    w->is_left = 1;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

/* Until the writer has ended, 1; or nothing was written for too long, 0. comm_err: what the
 * communicator said. */
static int serve(struct writing *w, int *comm_rc, struct mb_err *comm_err)
{
    const struct mb_checkpoint_model *m = w->m;
    uint64_t n_bytes = 0, moved_ms = mb_mono_ms(), told_ms = moved_ms;
    int moved = 0;
    for (;;) {
        struct request r;
        struct mb_err err = {0};
        const enum event event = wait_event(w, &r, &n_bytes, &moved);
        const uint64_t now_ms = mb_mono_ms();
        if (event == ENDED) {
            return 1;
        }
        if (moved || event == ASKED) {
            moved_ms = now_ms;
            if (m->progress != NULL) {
                mb_checkpoint_progress_move(m->progress);
            }
        }
        if (event == ASKED && *comm_rc == 0) {
            int rc = has(m, r.what, r.begin, r.n) ? copy_own(m, r.what, r.begin, r.n, r.out, &err)
                                                  : fetch(w, &r, comm_rc, &err);
            answer(w, rc, &err);
            *comm_err = *comm_rc != 0 ? err : *comm_err;
        }
        if (m->stall_ms > 0 && now_ms - moved_ms >= m->stall_ms) {
            return 0;
        }
        if (*comm_rc == 0 && (moved || m->stall_ms > 0) && now_ms - told_ms >= ROUND_MS) {
            struct message message = {.order = GOES_ON, .moved = moved};
            *comm_rc = tell(m->comm, &message, comm_err);
            told_ms = now_ms;
            moved = 0;
        }
        if (*comm_rc != 0) {
            leave(w);
        }
    }
}

/* Takes w. */
static int lead(struct writing *w, struct mb_checkpoint_saved *out, int *hangs, struct mb_err *err)
{
    const struct mb_checkpoint_model *m = w->m;
    struct mb_err comm_err = {0};
    int comm_rc = 0;
    const int ended = serve(w, &comm_rc, &comm_err);
    pthread_mutex_lock(&w->lock);
    const int has_ended = ended || w->has_ended;
    w->is_left = w->is_alone = !has_ended;
    int rc = w->rc;
    if (has_ended && rc != 0) {
        *err = w->err;
    }
    pthread_mutex_unlock(&w->lock);
    if (!has_ended) {
        *hangs = 1;
        rc = mb_err_set(err, MB_ETIMEOUT, "%s: nothing was written for %.1f s: the disk hangs",
                        w->dir, (double)m->stall_ms / MS_PER_S);
    } else if (rc == 0) {
        out->files = w->files.files;
        out->n_files = w->files.n_files;
        w->files = (struct mb_checkpoint_saved){0};
    }
    if (comm_rc != 0) { /* says more than that the writing was cancelled */
        *err = comm_err;
        rc = comm_rc;
    }
    if (has_ended) {
        free_writing(w);
    }
    return rc;
}

int mb_torch_save_check(const char *name, const struct mb_checkpoint_model *m,
                        const struct mb_checkpoint_state *state, struct mb_err *err)
{
    struct writing w = {.m = m, .dir = name};
    int rc = create(&w, state, err);
    if (rc == 0) {
        rc = mb_splitter_check(w.splitter, err);
    }
    mb_splitter_close(w.splitter);
    mb_free(w.tensors);
    return rc;
}

int mb_torch_save(const struct mb_checkpoint_model *m, const char *iter_dir,
                  const struct mb_checkpoint_state *state, void (*release)(void *arg), void *arg,
                  struct mb_checkpoint_saved *out, int *hangs, struct mb_err *err)
{
    struct message end = {.order = END};
    struct mb_err of_comm;
    assert(m->layout == NULL && (m->exp_avg == NULL || m->exp_avg_sq != NULL));
    *hangs = 0;
    if (mb_comm_rank(m->comm) != 0) {
        return follow(m, err);
    }
    struct writing *w = mb_calloc(1, sizeof *w);
    int rc = w != NULL ? 0 : no_memory(err);
    if (rc == 0) {
        *w = (struct writing){.m = m, .dir = iter_dir, .release = release, .arg = arg};
        pthread_mutex_init(&w->lock, NULL);
        mb_cond_init(&w->changed);
        rc = create(w, state, err);
    }
    rc = mb_checkpoint_agree(m->comm, rc, "saving a checkpoint", err);
    if (rc != 0) {
        if (w != NULL) {
            free_writing(w);
        }
        return rc;
    }
    rc = start_thread(w, err);
    if (rc != 0) {
        free_writing(w);
    } else {
        rc = lead(w, out, hangs, err);
    }
    const int told = tell(m->comm, &end, &of_comm);
    if (rc == 0 && told != 0) {
        *err = of_comm;
        rc = told;
    }
    return rc;
}
