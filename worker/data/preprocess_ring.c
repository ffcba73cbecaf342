/*
 * Chunk number i lives in slot i % n_slots: taken <= handed <= filled <= taken + n_slots.
 *
 * 1. The reader thread fills the next free slot: a piece of the input, whose bytes may still be in
 *    its file. It waits while all slots are full, or while the texts on their way have as many
 * bytes as are allowed (one longer than that goes alone).
 * 2. A worker takes the oldest slot that is filled, loads its bytes and turns them into tokens.
 * 3. The caller takes chunks back in the order in which they were read; taking one gives the slot
 *    of the one before it back.
 * An error of the input is a chunk of its own, the last one: so what is wrong before it is found
 * first. stop() wakes everybody and joins.
 */
#include <pthread.h>
#include <string.h>
#include <time.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "worker/data/preprocess_private.h"

enum { FREE_BYTES = 32 << 20, BYTES_PER_WORKER = 4 << 20 };

enum slot_state { SLOT_FREE, SLOT_FILLED, SLOT_DONE };

struct slot {
    enum slot_state state;
    struct mb_chunk chunk;
};

struct worker {
    struct mb_ring *ring;
    struct mb_chunk_worker tools;
    pthread_t thread;
    int is_running;
};

struct mb_ring {
    struct mb_input *input;
    pthread_mutex_t lock;
    pthread_cond_t has_filled, has_done, has_space;
    int n_conds; /* that were made */
    struct slot *slots;
    size_t n_slots;
    uint64_t filled, handed, taken;
    uint64_t bytes, max_bytes; /* of text in slots that are not free */
    int at_end, stops, holds;  /* holds: the caller has chunk number `taken` */
    struct worker *workers;
    unsigned n_workers;
    pthread_t reader;
    int reads;
};

/* ---- workers ---- */

static void work_on(struct worker *w, struct mb_chunk *c)
{
    c->rc = 0;
    c->n_lines = 0;
    c->lacks_place = 1;
    if (!c->piece.is_loaded)
        c->rc = mb_input_load(w->ring->input, &c->piece, &c->text, &c->err);
    if (c->rc == 0)
        mb_chunk_run(&w->tools, c);
}

static void *work(void *arg)
{
    struct worker *w = arg;
    struct mb_ring *r = w->ring;

    pthread_mutex_lock(&r->lock);
    for (;;) {
        struct slot *slot;

        while (!r->stops && r->handed == r->filled && !r->at_end)
            pthread_cond_wait(&r->has_filled, &r->lock);
        if (r->stops || r->handed == r->filled)
            break;
        slot = &r->slots[r->handed++ % r->n_slots];
        if (slot->state == SLOT_DONE) /* an error of the input */
            continue;
        pthread_mutex_unlock(&r->lock);
        work_on(w, &slot->chunk);
        pthread_mutex_lock(&r->lock);
        slot->state = SLOT_DONE;
        pthread_cond_signal(&r->has_done);
    }
    pthread_mutex_unlock(&r->lock);
    return NULL;
}

/* ---- reader ---- */

/* Waits for a free slot. NULL: stop. */
static struct slot *wait_space(struct mb_ring *r)
{
    struct slot *slot = NULL;

    pthread_mutex_lock(&r->lock);
    while (!r->stops && r->filled - r->taken >= r->n_slots)
        pthread_cond_wait(&r->has_space, &r->lock);
    if (!r->stops)
        slot = &r->slots[r->filled % r->n_slots];
    pthread_mutex_unlock(&r->lock);
    return slot;
}

/* Lets the workers have the slot, once its bytes are allowed. 0: stop. */
static int hand_over(struct mb_ring *r, struct slot *slot, enum slot_state state)
{
    uint64_t n = slot->chunk.piece.size_bytes;
    int goes_on;

    pthread_mutex_lock(&r->lock);
    while (!r->stops && r->bytes > 0 && r->bytes + n > r->max_bytes)
        pthread_cond_wait(&r->has_space, &r->lock);
    r->bytes += n;
    slot->state = state;
    r->filled++;
    pthread_cond_signal(state == SLOT_DONE ? &r->has_done : &r->has_filled);
    goes_on = !r->stops;
    pthread_mutex_unlock(&r->lock);
    return goes_on;
}

static void *read_input(void *arg)
{
    struct mb_ring *r = arg;
    struct slot *slot;

    while ((slot = wait_space(r)) != NULL) {
        struct mb_chunk *c = &slot->chunk;
        int rc;

        c->piece = (struct mb_input_piece){0};
        rc = mb_input_next(r->input, &c->text, &c->piece, &c->err);
        if (rc == 0)
            break;
        if (rc < 0) {
            c->rc = rc;
            c->n_lines = 0;
            c->lacks_place = c->piece.failed_inside;
            c->piece.size_bytes = 0;
            hand_over(r, slot, SLOT_DONE);
            break;
        }
        if (!hand_over(r, slot, SLOT_FILLED))
            break;
    }
    pthread_mutex_lock(&r->lock);
    r->at_end = 1;
    pthread_cond_broadcast(&r->has_filled);
    pthread_cond_signal(&r->has_done);
    pthread_mutex_unlock(&r->lock);
    return NULL;
}

/* ---- the caller ---- */

static int make_conds(struct mb_ring *r)
{
    pthread_cond_t *const conds[] = {&r->has_filled, &r->has_done, &r->has_space};
    int rc = 0;

    for (; rc == 0 && r->n_conds < 3; r->n_conds += rc == 0)
        rc = mb_cond_init(conds[r->n_conds]);
    return rc;
}

static int start_workers(struct mb_ring *r, const struct mb_ring_options *o, struct mb_err *err)
{
    for (unsigned i = 0; i < r->n_workers; i++) {
        struct worker *w = &r->workers[i];
        int rc;

        w->ring = r;
        w->tools = *o->tools;
        rc = mb_chunk_worker_init(&w->tools, o->keys, o->n_keys, err);
        if (rc != 0)
            return rc;
        rc = pthread_create(&w->thread, NULL, work, w);
        if (rc != 0)
            return mb_err_sys(err, rc, "start of thread %u of %u", i + 1, r->n_workers);
        w->is_running = 1;
    }
    return 0;
}

static int make_slots(struct mb_ring *r, const struct mb_ring_options *o)
{
    r->slots = mb_calloc(2 * (size_t)o->workers + 2, sizeof(*r->slots));
    r->workers = mb_calloc(o->workers, sizeof(*r->workers));
    if (r->slots == NULL || r->workers == NULL)
        return MB_ENOMEM;
    r->n_slots = 2 * (size_t)o->workers + 2;
    r->n_workers = o->workers;
    r->max_bytes = FREE_BYTES + (uint64_t)BYTES_PER_WORKER * o->workers;
    for (size_t i = 0; i < r->n_slots; i++) {
        if (mb_chunk_init(&r->slots[i].chunk, o->n_keys, o->n_lanes) != 0)
            return MB_ENOMEM;
    }
    return 0;
}

int mb_ring_start(const struct mb_ring_options *o, struct mb_ring **out, struct mb_err *err)
{
    struct mb_ring *r = mb_calloc(1, sizeof(*r));
    int rc;

    if (r == NULL)
        return mb_err_set(err, MB_ENOMEM, "preprocess: out of memory");
    r->input = o->input;
    pthread_mutex_init(&r->lock, NULL);
    rc = make_conds(r);
    if (rc != 0)
        rc = mb_err_sys(err, rc, "preprocess: condition");
    else if (make_slots(r, o) != 0)
        rc = mb_err_set(err, MB_ENOMEM, "preprocess: out of memory");
    else
        rc = start_workers(r, o, err);
    if (rc == 0) {
        int code = pthread_create(&r->reader, NULL, read_input, r);
        r->reads = code == 0;
        rc = code == 0 ? 0 : mb_err_sys(err, code, "start of the reading thread");
    }
    if (rc != 0) {
        mb_ring_stop(r);
        return rc;
    }
    *out = r;
    return 0;
}

static void give_back(struct mb_ring *r)
{
    struct slot *slot = &r->slots[r->taken % r->n_slots];

    mb_chunk_trim(&slot->chunk);
    r->bytes -= slot->chunk.piece.size_bytes;
    slot->state = SLOT_FREE;
    r->taken++;
    r->holds = 0;
    pthread_cond_signal(&r->has_space);
}

int mb_ring_take(struct mb_ring *r, unsigned timeout_ms, struct mb_chunk **out)
{
    struct timespec until;
    struct slot *slot;
    int rc = 0, late = 0;

    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += (long)(timeout_ms % 1000) * 1000000L;
    until.tv_sec += timeout_ms / 1000 + until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    pthread_mutex_lock(&r->lock);
    if (r->holds)
        give_back(r);
    slot = &r->slots[r->taken % r->n_slots];
    while (!late && slot->state != SLOT_DONE && !(r->at_end && r->taken == r->filled))
        late = pthread_cond_timedwait(&r->has_done, &r->lock, &until) != 0;
    if (slot->state == SLOT_DONE)
        rc = r->holds = 1;
    else if (!(r->at_end && r->taken == r->filled))
        rc = MB_ETIMEOUT;
    pthread_mutex_unlock(&r->lock);
    if (rc == 1)
        *out = &slot->chunk;
    return rc;
}

void mb_ring_stop(struct mb_ring *r)
{
    if (r == NULL)
        return;
    pthread_mutex_lock(&r->lock);
    r->stops = 1;
    if (r->n_conds == 3) {
        pthread_cond_broadcast(&r->has_filled);
        pthread_cond_broadcast(&r->has_space);
    }
    pthread_mutex_unlock(&r->lock);
    if (r->reads) {
        mb_input_cancel(r->input);
        pthread_join(r->reader, NULL);
    }
    for (unsigned i = 0; i < r->n_workers; i++) {
        if (r->workers[i].is_running)
            pthread_join(r->workers[i].thread, NULL);
        mb_chunk_worker_close(&r->workers[i].tools);
    }
    for (size_t i = 0; i < r->n_slots; i++)
        mb_chunk_close(&r->slots[i].chunk);
    if (r->n_conds > 0)
        pthread_cond_destroy(&r->has_filled);
    if (r->n_conds > 1)
        pthread_cond_destroy(&r->has_done);
    if (r->n_conds > 2)
        pthread_cond_destroy(&r->has_space);
    pthread_mutex_destroy(&r->lock);
    mb_free(r->slots);
    mb_free(r->workers);
    mb_free(r);
}
