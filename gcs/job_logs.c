/*
 * A job's log over HTTP: the whole file as {"logs": "..."}, and the tail over a WebSocket.
 *
 * Whole file: the size at the start is what is sent, escaped on the fly in small pieces.
 * Tail:
 *  1. Every 50 ms the file is read from the follower's offset on, in pieces of whole UTF-8
 *     sequences, until its end or until the socket's queue is full; then on_writable goes on.
 *  2. The job is terminal and that is committed: what is left is sent, then the close frame 1000.
 *     So whoever sees the close finds a terminal state, also after a crash of this head.
 * Failure paths:
 *  3. No log yet (PENDING): looked for again at every turn; a job without any log closes when it is
 *     terminal. A file that became shorter is read from its start again.
 *  4. The client goes away: on_close frees the follower.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/services.h"
#include "gcs/text.h"

enum { POLL_MS = 50, PIECE_BYTES = 16384, TURN_BYTES = 16 * PIECE_BYTES };

static int open_log(struct mb_head *h, const char *id, struct mb_err *err)
{
    char *path = NULL;
    int rc = h->runner->log_path(h->runner->self, id, &path, err);

    if (rc != 0)
        return rc;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        rc = mb_err_sys(err, errno, "log %s", path);
    mb_free(path);
    return rc != 0 ? rc : fd;
}

/* ---- the whole file ---- */

struct whole {
    int fd; /* -1: there is no log */
    uint64_t offset, size;
    int phase; /* 0: before the text, 1: in it, 2: after it */
};

static long put_literal(struct whole *w, char *buf, const char *text)
{
    size_t n = strlen(text);

    memcpy(buf, text, n);
    w->phase++;
    return (long)n;
}

static long pull_whole(void *arg, void *buf, size_t max)
{
    struct whole *w = arg;
    char in[PIECE_BYTES];
    size_t want = max / MB_TEXT_ESCAPE_MAX, used;

    if (w->phase == 0)
        return put_literal(w, buf, "{\"logs\": \"");
    if (w->phase == 2)
        return put_literal(w, buf, "\"}");
    if (w->phase > 2)
        return MB_HTTP_PULL_END;
    if (want > sizeof in)
        want = sizeof in;
    if (want > w->size - w->offset)
        want = (size_t)(w->size - w->offset);
    ssize_t n = want > 0 ? pread(w->fd, in, want, (off_t)w->offset) : 0;
    if (n < 0)
        return MB_EIO;
    if (n == 0) { /* the end, or the file became shorter */
        w->phase = 2;
        return pull_whole(w, buf, max);
    }
    int at_end = w->offset + (uint64_t)n >= w->size;
    size_t out = mb_text_json(in, (size_t)n, at_end, buf, &used);
    w->offset += used;
    return (long)out;
}

static void free_whole(void *arg)
{
    struct whole *w = arg;

    if (w->fd >= 0)
        close(w->fd);
    mb_free(w);
}

void head_logs_reply(struct mb_head *h, struct mb_http_req *req, struct head_job *job)
{
    struct mb_err err = {0};
    struct whole *w = mb_calloc(1, sizeof *w);
    struct stat st;

    if (!w) {
        mb_http_reply_text(req, 500, "out of memory");
        return;
    }
    w->fd = open_log(h, job->id, &err);
    if (w->fd < 0 && w->fd != MB_ENOENT) {
        mb_free(w);
        mb_http_reply_text(req, 500, "%s", err.text);
        return;
    }
    if (w->fd >= 0 && fstat(w->fd, &st) == 0)
        w->size = (uint64_t)st.st_size;
    mb_http_reply_stream(req, 200, "application/json; charset=utf-8", pull_whole, free_whole, w);
}

/* ---- the tail ---- */

struct head_follow {
    struct head_follow *next;
    struct mb_head *h;
    struct mb_ws *ws; /* NULL once it is closed */
    uv_timer_t timer;
    int fd;
    uint64_t offset;
    int final;  /* the job is terminal, and that is committed */
    int ending; /* the close frame is queued */
    char id[];
};

static void end_follow(struct head_follow *f, int status, const char *reason)
{
    if (f->ending || !f->ws)
        return;
    f->ending = 1;
    uv_timer_stop(&f->timer);
    mb_ws_close(f->ws, status, reason);
}

/* Whole UTF-8 sequences only, except at the very end. Bytes that are none are sent as they are: the
 * WebSocket layer replaces them. */
static size_t sendable(const char *buf, size_t n, int at_end)
{
    return at_end ? n : mb_utf8_floor(buf, n);
}

/* 1: everything there is was sent; 0: the queue is full or this turn is over. */
static int send_pieces(struct head_follow *f)
{
    char buf[PIECE_BYTES];
    size_t turn = 0;
    struct stat st;

    if (fstat(f->fd, &st) == 0 && (uint64_t)st.st_size < f->offset)
        f->offset = 0;
    while (turn < TURN_BYTES) {
        struct mb_err err = {0};
        ssize_t n = pread(f->fd, buf, sizeof buf, (off_t)f->offset);
        if (n <= 0)
            return 1;
        size_t k = sendable(buf, (size_t)n, f->final && (size_t)n < sizeof buf);
        if (k == 0)
            return 1;
        int rc = mb_ws_send_text(f->ws, buf, k, &err);
        if (rc == MB_EFULL)
            return 0;
        if (rc != 0) {
            mb_warn("jobs", "job=%s log tail broken: %s", f->id, err.text);
            end_follow(f, 1011, "internal error");
            return 0;
        }
        f->offset += k;
        turn += k;
    }
    return 0;
}

static void advance(struct head_follow *f)
{
    struct mb_err err = {0};
    int done = 1;

    if (f->ending || !f->ws)
        return;
    if (f->fd < 0) {
        int fd = open_log(f->h, f->id, &err);
        f->fd = fd >= 0 ? fd : -1;
        if (fd < 0 && fd != MB_ENOENT) {
            mb_warn("jobs", "job=%s %s", f->id, err.text);
            end_follow(f, 1011, "log not readable");
            return;
        }
    }
    if (f->fd >= 0)
        done = send_pieces(f);
    if (f->final && done)
        end_follow(f, 1000, "");
}

static void on_follow_timer(uv_timer_t *timer)
{
    advance(timer->data);
}

static void on_writable(void *arg, struct mb_ws *ws)
{
    (void)ws;
    advance(arg);
}

static void on_follow_freed(uv_handle_t *handle)
{
    struct head_follow *f = handle->data;

    if (f->fd >= 0)
        close(f->fd);
    mb_free(f);
}

static void on_ws_close(void *arg, struct mb_ws *ws)
{
    struct head_follow *f = arg;

    (void)ws;
    f->ws = NULL;
    for (struct head_follow **at = &f->h->follows; *at; at = &(*at)->next) {
        if (*at == f) {
            *at = f->next;
            break;
        }
    }
    uv_close((uv_handle_t *)&f->timer, on_follow_freed);
}

void head_logs_job_changed(struct mb_head *h, const char *id)
{
    const struct head_job *job = head_job_find(h, id);

    if (job && !mb_job_is_terminal(job->state))
        return;
    for (struct head_follow *f = h->follows, *next; f; f = next) {
        next = f->next;
        if (strcmp(f->id, id) == 0) {
            f->final = 1;
            advance(f);
        }
    }
}

struct opened {
    struct mb_head *h;
    char id[];
};

/* Everything that was written when the follower came is committed. */
static void on_open_committed(void *arg, const struct mb_err *err)
{
    struct opened *o = arg;

    if (err->code == 0 && !o->h->stopping)
        head_logs_job_changed(o->h, o->id);
    mb_free(o);
}

void head_logs_follow(struct mb_head *h, struct mb_http_req *req, struct head_job *job)
{
    static const struct mb_ws_ops ops = {.on_writable = on_writable, .on_close = on_ws_close};
    size_t n = strlen(job->id) + 1;
    struct head_follow *f = mb_calloc(1, sizeof *f + n);
    struct opened *o = mb_calloc(1, sizeof *o + n);
    struct mb_err err = {0};

    if (!f || !o) {
        mb_free(f);
        mb_free(o);
        mb_http_reply_text(req, 500, "out of memory");
        return;
    }
    f->h = o->h = h;
    f->fd = -1;
    memcpy(f->id, job->id, n);
    memcpy(o->id, job->id, n);
    int terminal = mb_job_is_terminal(job->state);
    if (mb_http_upgrade(req, &ops, f, &f->ws, &err) != 0) { /* answered by the upgrade */
        mb_free(f);
        mb_free(o);
        return;
    }
    uv_timer_init(h->loop, &f->timer);
    f->timer.data = f;
    f->next = h->follows;
    h->follows = f;
    uv_timer_start(&f->timer, on_follow_timer, 0, POLL_MS);
    if (!terminal || mb_tables_barrier(h->store, on_open_committed, o, &err) != 0)
        mb_free(o);
}

void head_logs_close(struct mb_head *h)
{
    for (struct head_follow *f = h->follows; f; f = f->next)
        end_follow(f, 1001, "the head is stopping");
}
