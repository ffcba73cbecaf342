/*
 * All sources, one after the other.
 *
 * 1. open expands the words; nothing is read yet.
 * 2. next opens source after source. A plain regular file is cut (file.c). Anything else is a feed
 *    (feed.c); while one feed is used, the next source is opened too, if it becomes a feed, so that
 *    its first bytes are there when it is its turn.
 * 3. close gives back everything; pieces that were never loaded keep no descriptor.
 * Failures: of opening or of a first read: "--input NAME: ...". Later: marked failed_inside.
 */
#include "worker/data/input/input.h"

#include <pthread.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "worker/data/input/source.h"

#define DEFAULT_MAX_LINE_BYTES (1ull << 30)
#define DEFAULT_OUTAGE_MS      (5ull * 60 * 1000)

/* An opened source: one of both. */
struct opened {
    struct mb_file *file;
    struct mb_feed *feed;
};

struct mb_input {
    struct mb_sources sources;
    uint64_t max_line_bytes;
    uint64_t outage_ms;
    size_t current;
    uint64_t offset; /* of the current source: where the next piece begins */
    uint64_t line;   /* of the next piece if it is known, else 0 */
    int is_open;     /* now */
    int is_ahead;    /* ahead: source current + 1 was opened, with this outcome */
    int ahead_rc;
    struct mb_err ahead_err;
    struct mb_file **left; /* files behind us of which pieces are out */
    size_t n_left;

    pthread_mutex_t lock; /* of what follows: cancel and the counts come from any thread */
    struct opened now;
    struct opened ahead;
    int is_cancelled;
    uint64_t done_bytes;  /* of the sources before the current one */
    uint64_t file_bytes;  /* of the current one, if it is a file */
    uint64_t sized_bytes; /* of all sources whose size is known */
    size_t n_unsized;
};

int mb_input_open(const struct mb_input_options *options, struct mb_input **out, struct mb_err *err)
{
    struct mb_input *in = mb_calloc(1, sizeof(*in));
    int rc = 0;

    if (in == NULL)
        return mb_err_set(err, MB_ENOMEM, "--input: out of memory");
    pthread_mutex_init(&in->lock, NULL);
    in->max_line_bytes =
        options->max_line_bytes > 0 ? options->max_line_bytes : DEFAULT_MAX_LINE_BYTES;
    if (in->max_line_bytes < MB_INPUT_PIECE_BYTES)
        in->max_line_bytes = MB_INPUT_PIECE_BYTES;
    in->outage_ms = options->outage_ms > 0 ? options->outage_ms : DEFAULT_OUTAGE_MS;
    in->line = 1;
    for (size_t i = 0; rc == 0 && i < options->n_words; i++)
        rc = mb_sources_add(&in->sources, options->words[i], err);
    for (size_t i = 0; rc == 0 && i < in->sources.n; i++) {
        in->sized_bytes += in->sources.items[i].size_bytes;
        in->n_unsized += !in->sources.items[i].is_regular;
    }
    if (rc != 0) {
        mb_input_close(in);
        return rc;
    }
    *out = in;
    return 0;
}

static void opened_close(struct opened *o)
{
    mb_file_close(o->file);
    mb_feed_stop(o->feed);
    *o = (struct opened){0};
}

void mb_input_close(struct mb_input *in)
{
    if (in == NULL)
        return;
    opened_close(&in->now);
    opened_close(&in->ahead);
    for (size_t i = 0; i < in->n_left; i++)
        mb_file_close(in->left[i]);
    mb_free(in->left);
    mb_sources_close(&in->sources);
    pthread_mutex_destroy(&in->lock);
    mb_free(in);
}

/* ---- opening sources ---- */

static int open_stdin(struct mb_stream **out, struct mb_err *err)
{
    struct mb_stream *raw;
    int rc = mb_stream_fd_open(STDIN_FILENO, 0, &raw, err);

    return rc != 0 ? rc : mb_stream_decode(raw, "stdin", out, err);
}

static int open_remote(const struct mb_input *in, const struct mb_source *source,
                       struct mb_stream **out, struct mb_err *err)
{
    struct mb_stream *raw;
    int rc = source->kind == MB_SOURCE_HTTP
                 ? mb_stream_http_open(source->place, in->outage_ms, &raw, err)
                 : mb_stream_s3_open(source->place, in->outage_ms, &raw, err);

    return rc != 0 ? rc : mb_stream_decode(raw, source->name, out, err);
}

/* Source i; its bytes before `offset` are left out. */
static int open_source(const struct mb_input *in, size_t i, uint64_t offset, struct opened *o,
                       struct mb_err *err)
{
    const struct mb_source *source = &in->sources.items[i];
    struct mb_stream *stream = NULL;
    int rc;

    switch (source->kind) {
    case MB_SOURCE_STDIN:
        rc = open_stdin(&stream, err);
        break;
    case MB_SOURCE_HTTP:
    case MB_SOURCE_S3:
        rc = open_remote(in, source, &stream, err);
        break;
    case MB_SOURCE_FILE:
    default:
        rc = mb_file_open(source, &o->file, &stream, err);
        break;
    }
    if (rc == 1)
        rc = mb_file_seek(o->file, offset, err);
    else if (rc == 0)
        rc = mb_feed_start(stream, offset, in->max_line_bytes, &o->feed, err);
    if (rc != 0) {
        mb_err_wrap(err, "--input %s", source->name);
        opened_close(o);
    }
    return rc;
}

static void set_opened(struct mb_input *in, struct opened *where, struct opened o)
{
    pthread_mutex_lock(&in->lock);
    *where = o;
    if (in->is_cancelled && o.feed != NULL)
        mb_feed_cancel(o.feed);
    pthread_mutex_unlock(&in->lock);
}

static int open_current(struct mb_input *in, struct mb_err *err)
{
    struct opened o = {0};
    int rc;

    if (in->is_ahead) {
        rc = in->ahead_rc;
        if (rc != 0 && err != NULL)
            *err = in->ahead_err;
        o = in->ahead;
        set_opened(in, &in->ahead, (struct opened){0});
        in->is_ahead = 0;
    } else {
        rc = open_source(in, in->current, in->offset, &o, err);
    }
    if (rc != 0)
        return rc;
    set_opened(in, &in->now, o);
    in->is_open = 1;
    return 0;
}

/* Whoever writes one pipe after the other waits until this one is read to its end. */
static int is_pipe(const struct mb_source *source)
{
    struct stat st;

    return source->kind == MB_SOURCE_FILE && stat(source->place, &st) == 0 && !S_ISREG(st.st_mode);
}

/* The next source begins to be fetched and decompressed while this one is used up. */
static void open_ahead(struct mb_input *in)
{
    struct opened o = {0};

    if (in->is_ahead || in->now.feed == NULL || in->current + 1 >= in->sources.n ||
        is_pipe(&in->sources.items[in->current + 1]))
        return;
    in->ahead_rc = open_source(in, in->current + 1, 0, &o, &in->ahead_err);
    set_opened(in, &in->ahead, o);
    in->is_ahead = 1;
}

/* Takes a file whose pieces may still be out; closes earlier ones that are loaded by now. */
static int leave_file(struct mb_input *in, struct mb_file *file, struct mb_err *err)
{
    struct mb_file **grown;
    size_t n = 0;

    for (size_t i = 0; i < in->n_left; i++) {
        if (mb_file_is_used(in->left[i]))
            in->left[n++] = in->left[i];
        else
            mb_file_close(in->left[i]);
    }
    in->n_left = n;
    if (file == NULL)
        return 0;
    grown = mb_reallocarray(in->left, n + 1, sizeof(*grown));
    if (grown == NULL)
        return mb_err_set(err, MB_ENOMEM, "--input: out of memory");
    in->left = grown;
    in->left[in->n_left++] = file;
    return 0;
}

static int leave_current(struct mb_input *in, struct mb_err *err)
{
    const struct mb_source *source = &in->sources.items[in->current];
    uint64_t stored = source->size_bytes;
    struct opened o;
    int rc = leave_file(in, in->now.file, err);

    if (rc != 0)
        return rc;
    pthread_mutex_lock(&in->lock);
    if (in->now.file != NULL)
        stored = in->offset; /* it may have grown */
    else if (!source->is_regular)
        stored = atomic_load(&mb_feed_stream(in->now.feed)->done_bytes);
    in->n_unsized -= !source->is_regular;
    in->sized_bytes += stored - source->size_bytes;
    in->done_bytes += stored;
    in->file_bytes = 0;
    o = in->now;
    in->now = (struct opened){0};
    in->current++;
    pthread_mutex_unlock(&in->lock);
    mb_feed_stop(o.feed);
    in->is_open = 0;
    in->offset = 0;
    in->line = 1;
    return 0;
}

/* ---- pieces ---- */

int mb_input_seek(struct mb_input *in, const struct mb_input_place *to, struct mb_err *err)
{
    if (to->source > in->sources.n)
        return mb_err_set(err, MB_ESTATE, "--input: %u files were read, now there are %zu",
                          (unsigned)to->source, in->sources.n);
    for (size_t i = 0; i < to->source; i++)
        in->done_bytes += in->sources.items[i].size_bytes;
    in->current = to->source;
    in->offset = to->offset;
    in->line = to->line;
    return 0;
}

/* As mb_input_next() of the current source; 0 at its end. */
static int next_of_current(struct mb_input *in, struct mb_buf *text, struct mb_input_piece *piece,
                           struct mb_err *err)
{
    int rc;

    if (in->now.file != NULL) {
        piece->at.offset = in->offset;
        rc = mb_file_cut(in->now.file, in->max_line_bytes, &piece->at.offset, &piece->size_bytes,
                         err);
        piece->file = in->now.file;
        piece->failed_inside = 1;
    } else {
        open_ahead(in);
        rc = mb_feed_next(in->now.feed, text, &piece->failed_inside, err);
        piece->at.offset = in->offset;
        piece->size_bytes = text->len;
        piece->is_loaded = 1;
        if (rc < 0 && !piece->failed_inside)
            mb_err_wrap(err, "--input %s", in->sources.items[in->current].name);
    }
    return rc;
}

int mb_input_next(struct mb_input *in, struct mb_buf *text, struct mb_input_piece *piece,
                  struct mb_err *err)
{
    int rc = 0;

    while (rc == 0 && in->current < in->sources.n) {
        *piece = (struct mb_input_piece){
            .at = {.source = (uint32_t)in->current, .offset = in->offset, .line = in->line}};
        if (!in->is_open)
            rc = open_current(in, err);
        if (rc == 0)
            rc = next_of_current(in, text, piece, err);
        if (rc == 0)
            rc = leave_current(in, err);
        if (rc != 1)
            continue;
        in->offset = piece->at.offset + piece->size_bytes;
        in->line = 0;
        pthread_mutex_lock(&in->lock);
        in->file_bytes = in->now.file != NULL ? in->offset : 0;
        pthread_mutex_unlock(&in->lock);
    }
    return rc;
}

int mb_input_load(struct mb_input *in, struct mb_input_piece *piece, struct mb_buf *text,
                  struct mb_err *err)
{
    struct mb_file *file = piece->file;

    (void)in;
    if (piece->is_loaded)
        return 0;
    piece->is_loaded = 1;
    piece->file = NULL;
    return mb_file_load(file, piece->at.offset, piece->size_bytes, text, err);
}

void mb_input_cancel(struct mb_input *in)
{
    pthread_mutex_lock(&in->lock);
    in->is_cancelled = 1;
    if (in->now.feed != NULL)
        mb_feed_cancel(in->now.feed);
    if (in->ahead.feed != NULL)
        mb_feed_cancel(in->ahead.feed);
    pthread_mutex_unlock(&in->lock);
}

/* ---- what there is to know ---- */

size_t mb_input_n_sources(const struct mb_input *in)
{
    return in->sources.n;
}

const char *mb_input_name(const struct mb_input *in, uint32_t source)
{
    return in->sources.items[source].name;
}

int mb_input_identity(struct mb_input *in, struct mb_buf *out, struct mb_err *err)
{
    for (size_t i = 0; i < in->sources.n; i++) {
        int rc = mb_source_identity(&in->sources.items[i], out, err);
        if (rc != 0)
            return rc;
    }
    return 0;
}

/* Bytes of the current source; total may be 0. The lock is held. */
static uint64_t current_bytes(const struct mb_input *in, uint64_t *total)
{
    const struct mb_stream *stream;

    *total = 0;
    if (in->now.feed == NULL)
        return in->file_bytes;
    stream = mb_feed_stream(in->now.feed);
    *total = atomic_load(&stream->total_bytes);
    return atomic_load(&stream->done_bytes);
}

uint64_t mb_input_bytes_done(const struct mb_input *in)
{
    pthread_mutex_t *lock = (pthread_mutex_t *)&in->lock;
    uint64_t total;
    uint64_t done;

    pthread_mutex_lock(lock);
    done = in->done_bytes + current_bytes(in, &total);
    pthread_mutex_unlock(lock);
    return done;
}

uint64_t mb_input_bytes_total(const struct mb_input *in)
{
    pthread_mutex_t *lock = (pthread_mutex_t *)&in->lock;
    uint64_t total;
    uint64_t sum = 0;

    pthread_mutex_lock(lock);
    (void)current_bytes(in, &total);
    if (in->n_unsized == 0)
        sum = in->sized_bytes;
    else if (in->n_unsized == 1 && total > 0 && in->current < in->sources.n &&
             !in->sources.items[in->current].is_regular)
        sum = in->sized_bytes + total;
    pthread_mutex_unlock(lock);
    return sum;
}
