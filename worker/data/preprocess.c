/*
 * Reading, tokenizing on threads, writing in order.
 *
 * 1. Open the input, load the tokenizer, open the outputs under temporary names, start the workers.
 * 2. The calling thread reads chunks into a ring of slots and writes finished chunks in the order
 * they were read; workers take the oldest chunk that is ready. The ring bounds memory: when all
 * slots are full, nothing is read.
 * 3. At the end all outputs are made whole and fsynced, then renamed.
 * The first bad line in input order, a read or write error, or a cancellation stops everything: the
 * workers are joined, the temporary files removed, earlier output files stay as they were.
 */
#include <pthread.h>
#include <string.h>
#include <time.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "worker/data/preprocess_private.h"

enum { MAX_WORKERS = 1024, DEFAULT_LOG_INTERVAL = 1000, CANCEL_POLL_MS = 100 };

enum slot_state { SLOT_FREE, SLOT_READY, SLOT_DONE };

struct slot {
    enum slot_state state;
    struct mb_chunk chunk;
};

/* Chunk number i lives in slot i % n_slots: written <= taken <= filled <= written + n_slots. */
struct pool {
    pthread_mutex_t lock;
    pthread_cond_t has_ready;
    pthread_cond_t has_done;
    struct slot *slots;
    size_t n_slots;
    uint64_t filled;
    uint64_t taken;
    uint64_t written;
    int stops;
};

struct worker {
    struct pool *pool;
    struct mb_chunk_worker tools;
    pthread_t thread;
    int is_running;
};

struct run {
    const struct mb_preprocess_options *o;
    const char *const *keys;
    size_t n_keys;
    uint64_t log_interval;
    struct mb_input *input;
    struct mb_tokenizer *tokenizer;
    struct mb_index_writer **writers; /* one per key */
    struct worker *workers;
    struct pool pool;
    struct mb_preprocess_progress progress;
    uint64_t started_us;
};

static void *work(void *arg)
{
    struct worker *w = arg;
    struct pool *pool = w->pool;

    pthread_mutex_lock(&pool->lock);
    for (;;) {
        struct slot *slot;

        while (!pool->stops && pool->taken == pool->filled)
            pthread_cond_wait(&pool->has_ready, &pool->lock);
        if (pool->stops)
            break;
        slot = &pool->slots[pool->taken++ % pool->n_slots];
        pthread_mutex_unlock(&pool->lock);
        mb_chunk_run(&w->tools, &slot->chunk);
        pthread_mutex_lock(&pool->lock);
        slot->state = SLOT_DONE;
        pthread_cond_signal(&pool->has_done);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static int check_options(struct run *r, struct mb_err *err)
{
    static const char *const text_only[] = {"text"};
    const struct mb_preprocess_options *o = r->o;

    if (o->input == NULL || o->output_prefix == NULL)
        return mb_err_set(err, MB_EINVAL, "--input and --output-prefix are required");
    if (o->workers < 1 || o->workers > MAX_WORKERS)
        return mb_err_set(err, MB_EINVAL, "--workers %u is outside 1 to %d", o->workers,
                          MAX_WORKERS);
    r->keys = o->n_json_keys > 0 ? o->json_keys : text_only;
    r->n_keys = o->n_json_keys > 0 ? o->n_json_keys : 1;
    r->log_interval = o->log_interval > 0 ? o->log_interval : DEFAULT_LOG_INTERVAL;
    for (size_t a = 0; a < r->n_keys; a++) {
        for (size_t b = 0; b < a; b++) {
            if (strcmp(r->keys[a], r->keys[b]) == 0)
                return mb_err_set(err, MB_EINVAL, "--json-keys: %s is given twice", r->keys[a]);
        }
    }
    return 0;
}

static int open_outputs(struct run *r, struct mb_err *err)
{
    enum mb_index_dtype dtype = mb_index_dtype_for_vocab(mb_tokenizer_vocab_size(r->tokenizer));

    r->writers = mb_calloc(r->n_keys, sizeof(struct mb_index_writer *));
    if (r->writers == NULL)
        return mb_err_set(err, MB_ENOMEM, "preprocess: out of memory");
    for (size_t k = 0; k < r->n_keys; k++) {
        char *prefix = mb_asprintf("%s_%s_document", r->o->output_prefix, r->keys[k]);
        int rc;

        if (prefix == NULL)
            return mb_err_set(err, MB_ENOMEM, "preprocess: out of memory");
        rc = mb_index_writer_create(prefix, dtype, &r->writers[k], err);
        mb_free(prefix);
        if (rc != 0) {
            mb_err_wrap(err, "--output-prefix");
            return rc;
        }
    }
    return 0;
}

static int make_slots(struct run *r, struct mb_err *err)
{
    struct pool *pool = &r->pool;

    pool->slots = mb_calloc(2 * (size_t)r->o->workers + 2, sizeof(*pool->slots));
    if (pool->slots == NULL)
        return mb_err_set(err, MB_ENOMEM, "preprocess: out of memory");
    pool->n_slots = 2 * (size_t)r->o->workers + 2;
    for (size_t i = 0; i < pool->n_slots; i++) {
        if (mb_chunk_init(&pool->slots[i].chunk, r->n_keys) != 0)
            return mb_err_set(err, MB_ENOMEM, "preprocess: out of memory");
    }
    return 0;
}

static int start_workers(struct run *r, struct mb_err *err)
{
    r->workers = mb_calloc(r->o->workers, sizeof(*r->workers));
    if (r->workers == NULL)
        return mb_err_set(err, MB_ENOMEM, "preprocess: out of memory");
    for (unsigned i = 0; i < r->o->workers; i++) {
        struct worker *w = &r->workers[i];
        int rc;

        w->pool = &r->pool;
        w->tools.path = r->o->input;
        w->tools.tokenizer = r->tokenizer;
        w->tools.dtype = mb_index_dtype_for_vocab(mb_tokenizer_vocab_size(r->tokenizer));
        w->tools.append_eod = r->o->append_eod;
        rc = mb_chunk_worker_init(&w->tools, r->keys, r->n_keys, err);
        if (rc != 0)
            return rc;
        rc = pthread_create(&w->thread, NULL, work, w);
        if (rc != 0)
            return mb_err_sys(err, rc, "start of thread %u of %u", i + 1, r->o->workers);
        w->is_running = 1;
    }
    return 0;
}

static int set_up(struct run *r, struct mb_err *err)
{
    int rc = check_options(r, err);

    if (rc != 0)
        return rc;
    if (r->o->opening_cb != NULL)
        r->o->opening_cb(r->o->ctx, r->o->input);
    rc = mb_input_open(r->o->input, &r->input, err);
    if (rc == 0)
        rc = mb_tokenizer_create(&r->o->tokenizer, &r->tokenizer, err);
    if (rc == 0 && r->o->append_eod && mb_tokenizer_eod(r->tokenizer) < 0)
        rc = mb_err_set(err, MB_EINVAL, "--append-eod: the tokenizer has no eod token");
    if (rc == 0)
        rc = open_outputs(r, err);
    if (rc == 0)
        rc = make_slots(r, err);
    if (rc == 0)
        rc = start_workers(r, err);
    return rc;
}

static void tear_down(struct run *r)
{
    struct pool *pool = &r->pool;

    pthread_mutex_lock(&pool->lock);
    pool->stops = 1;
    pthread_cond_broadcast(&pool->has_ready);
    pthread_mutex_unlock(&pool->lock);
    for (unsigned i = 0; r->workers != NULL && i < r->o->workers; i++) {
        if (r->workers[i].is_running)
            pthread_join(r->workers[i].thread, NULL);
        mb_chunk_worker_close(&r->workers[i].tools);
    }
    for (size_t i = 0; i < pool->n_slots; i++)
        mb_chunk_close(&pool->slots[i].chunk);
    for (size_t k = 0; r->writers != NULL && k < r->n_keys; k++)
        mb_index_writer_destroy(r->writers[k]);
    mb_free(pool->slots);
    mb_free(r->workers);
    mb_free(r->writers);
    mb_tokenizer_destroy(r->tokenizer);
    mb_input_close(r->input);
}

static void report(struct run *r)
{
    r->progress.elapsed_s = (double)(mb_mono_us() - r->started_us) * 1e-6;
    r->progress.input_bytes_done = mb_input_bytes_done(r->input);
    r->progress.input_bytes_total = mb_input_bytes_total(r->input);
    if (r->o->progress_cb != NULL)
        r->o->progress_cb(r->o->ctx, &r->progress);
}

static int write_key(struct run *r, size_t k, const struct mb_chunk *c, struct mb_err *err)
{
    const struct mb_chunk_key *key = &c->keys[k];
    size_t n_documents = key->n_sequences.len / sizeof(uint32_t);
    const int32_t *lengths = (const void *)key->lengths.data;
    const uint8_t *tokens = key->tokens.data;
    size_t token_bytes = mb_index_dtype_size(r->workers[0].tools.dtype);

    for (size_t d = 0; d < n_documents; d++) {
        uint32_t n;
        size_t size_bytes = 0;
        int rc = 0;

        memcpy(&n, key->n_sequences.data + d * sizeof(n), sizeof(n));
        for (uint32_t i = 0; i < n; i++)
            size_bytes += (size_t)lengths[i] * token_bytes;
        if (n > 0)
            rc = mb_index_writer_add_raw(r->writers[k], tokens, size_bytes, lengths, n, err);
        if (rc == 0)
            rc = mb_index_writer_end_document(r->writers[k], err);
        if (rc != 0)
            return rc;
        if (n > 0) {
            lengths += n;
            tokens += size_bytes;
        }
    }
    return 0;
}

static void count_documents(struct run *r, const struct mb_chunk *c)
{
    size_t n = c->documents.len / sizeof(struct mb_chunk_document);

    r->progress.n_tokens = 0;
    for (size_t k = 0; k < r->n_keys; k++)
        r->progress.n_tokens += mb_index_writer_n_tokens(r->writers[k]);
    for (size_t i = 0; i < n; i++) {
        struct mb_chunk_document d;

        memcpy(&d, c->documents.data + i * sizeof(d), sizeof(d));
        r->progress.n_documents++;
        r->progress.json_chars += d.json_chars;
        r->progress.text_bytes += d.text_bytes;
        if (r->progress.n_documents % r->log_interval == 0)
            report(r);
    }
}

static int write_chunk(struct run *r, const struct mb_chunk *c, struct mb_err *err)
{
    if (c->rc != 0) {
        if (err != NULL)
            *err = c->err;
        return c->rc;
    }
    for (size_t k = 0; k < r->n_keys; k++) {
        int rc = write_key(r, k, c, err);
        if (rc != 0)
            return rc;
    }
    count_documents(r, c);
    return 0;
}

/* Wait until chunk number `written` is done, or a while, so that a cancellation is noticed. */
static int wait_done(struct run *r)
{
    struct pool *pool = &r->pool;
    struct slot *slot = &pool->slots[pool->written % pool->n_slots];
    struct timespec until;
    int is_done;

    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += CANCEL_POLL_MS * 1000000L;
    if (until.tv_nsec >= 1000000000L) {
        until.tv_nsec -= 1000000000L;
        until.tv_sec++;
    }
    pthread_mutex_lock(&pool->lock);
    if (slot->state != SLOT_DONE)
        pthread_cond_timedwait(&pool->has_done, &pool->lock, &until);
    is_done = slot->state == SLOT_DONE;
    pthread_mutex_unlock(&pool->lock);
    return is_done;
}

/* 1: chunk number `written` is done; asks without waiting. */
static int is_done(struct run *r)
{
    struct pool *pool = &r->pool;
    int done;

    pthread_mutex_lock(&pool->lock);
    done = pool->written < pool->filled &&
           pool->slots[pool->written % pool->n_slots].state == SLOT_DONE;
    pthread_mutex_unlock(&pool->lock);
    return done;
}

/* Reads the next chunk into its slot: 1, or 0 at the end of the input. */
static int fill(struct run *r, struct mb_err *err)
{
    struct pool *pool = &r->pool;
    struct slot *slot = &pool->slots[pool->filled % pool->n_slots];
    int rc = mb_input_next(r->input, &slot->chunk.text, &slot->chunk.first_line, err);

    if (rc != 1)
        return rc;
    pthread_mutex_lock(&pool->lock);
    slot->state = SLOT_READY;
    pool->filled++;
    pthread_cond_signal(&pool->has_ready);
    pthread_mutex_unlock(&pool->lock);
    return 1;
}

static int write_next(struct run *r, struct mb_err *err)
{
    struct pool *pool = &r->pool;
    struct slot *slot = &pool->slots[pool->written % pool->n_slots];
    int rc = write_chunk(r, &slot->chunk, err);

    slot->state = SLOT_FREE; /* no worker looks at it before it is filled again */
    pool->written++;
    return rc;
}

static int stream(struct run *r, struct mb_err *err)
{
    struct pool *pool = &r->pool;
    int at_end = 0;
    int rc = 0;

    while (rc == 0 && !(at_end && pool->written == pool->filled)) {
        if (r->o->cancelled_cb != NULL && r->o->cancelled_cb(r->o->ctx)) {
            rc = mb_err_set(err, MB_ECANCELED, "preprocess: cancelled; no output file was changed");
        } else if (is_done(r)) {
            rc = write_next(r, err);
        } else if (!at_end && pool->filled - pool->written < pool->n_slots) {
            int got = fill(r, err);
            at_end = got == 0;
            rc = got < 0 ? got : 0;
        } else {
            (void)wait_done(r);
        }
    }
    return rc;
}

static int finish(struct run *r, struct mb_err *err)
{
    int rc = 0;

    for (size_t k = 0; rc == 0 && k < r->n_keys; k++)
        rc = mb_index_writer_prepare(r->writers[k], err);
    for (size_t k = 0; rc == 0 && k < r->n_keys; k++)
        rc = mb_index_writer_commit(r->writers[k], err);
    return rc;
}

int mb_preprocess_run(const struct mb_preprocess_options *o, struct mb_preprocess_progress *total,
                      struct mb_err *err)
{
    struct run r = {.o = o,
                    .pool = {.lock = PTHREAD_MUTEX_INITIALIZER,
                             .has_ready = PTHREAD_COND_INITIALIZER,
                             .has_done = PTHREAD_COND_INITIALIZER}};
    uint64_t begun_us = mb_mono_us();
    int rc = set_up(&r, err);

    r.started_us = mb_mono_us();
    if (rc == 0 && o->started_cb != NULL)
        o->started_cb(o->ctx, (double)(r.started_us - begun_us) * 1e-6);
    if (rc == 0)
        rc = stream(&r, err);
    if (rc == 0)
        rc = finish(&r, err);
    r.progress.elapsed_s = (double)(mb_mono_us() - r.started_us) * 1e-6;
    if (rc == 0 && total != NULL)
        *total = r.progress;
    tear_down(&r);
    return rc;
}
