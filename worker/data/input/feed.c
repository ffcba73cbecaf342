/*
 * A stream, read and cut into pieces on its own thread.
 *
 * 1. The thread drops skip_bytes, then fills a buffer to MB_INPUT_PIECE_BYTES and posts it up to
 * its last newline; what follows is the beginning of the next one. A line that does not fit makes
 * its buffer grow, up to max_line_bytes.
 * 2. At most QUEUE_PIECES wait; then the thread waits. next swaps the caller's buffer against the
 *    oldest piece, so that buffers circulate and nothing is copied.
 * 3. The end, or an error, is posted last.
 * stop and cancel make a waiting read return; the thread then ends.
 */
#include <pthread.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/data/input/source.h"

enum { QUEUE_PIECES = 4 };

struct mb_feed {
    struct mb_stream *stream;
    uint64_t skip_bytes;
    uint64_t max_line_bytes;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct mb_buf queue[QUEUE_PIECES]; /* ring: posted pieces, then free buffers */
    uint64_t n_posted;
    uint64_t n_taken;
    int stops;
    int has_ended;
    int rc;
    struct mb_err err;
    struct mb_buf rest; /* the beginning of a line; the thread's own */
};

/* The next free buffer, or NULL when the feed is stopped. */
static struct mb_buf *wait_free(struct mb_feed *f)
{
    struct mb_buf *free_one = NULL;

    pthread_mutex_lock(&f->lock);
    while (!f->stops && f->n_posted - f->n_taken == QUEUE_PIECES)
        pthread_cond_wait(&f->changed, &f->lock);
    if (!f->stops)
        free_one = &f->queue[f->n_posted % QUEUE_PIECES];
    pthread_mutex_unlock(&f->lock);
    return free_one;
}

static void post(struct mb_feed *f)
{
    pthread_mutex_lock(&f->lock);
    f->n_posted++;
    pthread_cond_broadcast(&f->changed);
    pthread_mutex_unlock(&f->lock);
}

static int drop(struct mb_feed *f)
{
    const struct mb_stream_ops *ops = f->stream->ops;
    uint8_t block[32 * 1024];
    int rc = MB_EUNSUPPORTED;

    if (f->skip_bytes > 0 && ops->seek != NULL)
        rc = ops->seek(f->stream, f->skip_bytes, &f->err);
    if (rc != MB_EUNSUPPORTED)
        return rc;
    for (uint64_t left = f->skip_bytes; left > 0;) {
        size_t want = left < sizeof(block) ? (size_t)left : sizeof(block);
        ssize_t got = ops->read(f->stream, block, want, &f->err);

        if (got < 0)
            return (int)got;
        if (got == 0)
            return mb_err_set(&f->err, MB_ESTATE, "shorter than when it was left");
        left -= (uint64_t)got;
    }
    return 0;
}

/* Fills b with whole lines: 1, or 0 when these are the last ones (perhaps none). */
static int fill(struct mb_feed *f, struct mb_buf *b)
{
    const uint8_t *newline = NULL;
    size_t searched = 0;

    mb_buf_reset(b);
    if (mb_buf_add(b, f->rest.data, f->rest.len) != 0)
        return mb_err_set(&f->err, MB_ENOMEM, "out of memory");
    mb_buf_reset(&f->rest);
    for (;;) {
        size_t want = b->len < MB_INPUT_PIECE_BYTES ? MB_INPUT_PIECE_BYTES : 2 * b->len;

        if (b->len > f->max_line_bytes)
            return mb_err_set(&f->err, MB_EINVAL, MB_LONG_LINE_TEXT,
                              (unsigned long long)f->max_line_bytes);
        if (want > f->max_line_bytes)
            want = (size_t)f->max_line_bytes + 1;
        if (mb_buf_reserve(b, want - b->len + MB_INPUT_PAD_BYTES) != 0)
            return mb_err_set(&f->err, MB_ENOMEM, "out of memory");
        while (b->len < want) {
            ssize_t got = f->stream->ops->read(f->stream, b->data + b->len, want - b->len, &f->err);
            if (got < 0)
                return (int)got;
            if (got == 0)
                return 0;
            b->len += (size_t)got;
        }
        newline = memrchr(b->data + searched, '\n', b->len - searched);
        if (newline != NULL)
            break;
        searched = b->len;
    }
    if (mb_buf_add(&f->rest, newline + 1, (size_t)(b->data + b->len - newline - 1)) != 0)
        return mb_err_set(&f->err, MB_ENOMEM, "out of memory");
    b->len = (size_t)(newline + 1 - b->data);
    return 1;
}

/* What is whole of a piece that an error cut is worth handing out: bad lines before the error are
 * told first, and the error gets its line. */
static void keep_whole_lines(struct mb_buf *b)
{
    const uint8_t *newline = b->len > 0 ? memrchr(b->data, '\n', b->len) : NULL;

    b->len = newline != NULL ? (size_t)(newline + 1 - b->data) : 0;
}

static void *run(void *arg)
{
    struct mb_feed *f = arg;
    int rc = drop(f);
    int more = rc == 0;

    while (more) {
        struct mb_buf *b = wait_free(f);

        if (b == NULL)
            break;
        rc = fill(f, b);
        more = rc == 1;
        if (rc < 0)
            keep_whole_lines(b);
        if (b->len > 0)
            post(f);
    }
    pthread_mutex_lock(&f->lock);
    f->has_ended = 1;
    f->rc = rc < 0 ? rc : 0;
    pthread_cond_broadcast(&f->changed);
    pthread_mutex_unlock(&f->lock);
    return NULL;
}

int mb_feed_start(struct mb_stream *stream, uint64_t skip_bytes, uint64_t max_line_bytes,
                  struct mb_feed **out, struct mb_err *err)
{
    struct mb_feed *f = mb_calloc(1, sizeof(*f));
    int rc;

    if (f == NULL) {
        stream->ops->close(stream);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    f->stream = stream;
    f->skip_bytes = skip_bytes;
    f->max_line_bytes = max_line_bytes;
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->changed, NULL);
    rc = pthread_create(&f->thread, NULL, run, f);
    if (rc != 0) {
        stream->ops->close(stream);
        mb_free(f);
        return mb_err_sys(err, rc, "start of the reading thread");
    }
    *out = f;
    return 0;
}

int mb_feed_next(struct mb_feed *f, struct mb_buf *text, int *inside, struct mb_err *err)
{
    int rc;

    pthread_mutex_lock(&f->lock);
    while (!f->stops && !f->has_ended && f->n_taken == f->n_posted)
        pthread_cond_wait(&f->changed, &f->lock);
    *inside = f->n_taken > 0 || f->skip_bytes > 0;
    if (f->stops) {
        rc = mb_err_set(err, MB_ECANCELED, "cancelled");
    } else if (f->n_taken < f->n_posted) {
        struct mb_buf *oldest = &f->queue[f->n_taken % QUEUE_PIECES];
        struct mb_buf kept = *text;

        *text = *oldest;
        *oldest = kept;
        f->n_taken++;
        pthread_cond_broadcast(&f->changed);
        rc = 1;
    } else {
        rc = f->rc;
        if (rc != 0 && err != NULL)
            *err = f->err;
    }
    pthread_mutex_unlock(&f->lock);
    return rc;
}

void mb_feed_cancel(struct mb_feed *f)
{
    pthread_mutex_lock(&f->lock);
    f->stops = 1;
    pthread_cond_broadcast(&f->changed);
    pthread_mutex_unlock(&f->lock);
    f->stream->ops->cancel(f->stream);
}

const struct mb_stream *mb_feed_stream(const struct mb_feed *f)
{
    return f->stream;
}

void mb_feed_stop(struct mb_feed *f)
{
    if (f == NULL)
        return;
    mb_feed_cancel(f);
    pthread_join(f->thread, NULL);
    f->stream->ops->close(f->stream);
    for (size_t i = 0; i < QUEUE_PIECES; i++)
        mb_buf_close(&f->queue[i]);
    mb_buf_close(&f->rest);
    pthread_cond_destroy(&f->changed);
    pthread_mutex_destroy(&f->lock);
    mb_free(f);
}
