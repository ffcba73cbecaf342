/*
 * The tail of a log over a WebSocket.
 *
 *  1. Every 50 ms, and while there is more at once, the log is read on from the follower's offset
 *     until its end or until the client does not take it; then on_writable goes on. Of the log no
 *     more than what the client is given next is read (mb_ws_room()), so one that does not read
 *     costs a frame.
 *  2. The job is terminal and that is committed: what is left is sent, then the close frame 1000
 *     with the job's state as its reason. So whoever sees the close finds a terminal state, also
 *     after a crash of this head. A driver whose log is sent to a store is terminal only after
 * that.
 *  3. ?offset= ?tail= ?since_ms= ?rank= ?attempt=: where to begin, and in which log; the logs of
 *     later attempts of the rank follow. ?follow=0: the end of the log is the end of the stream.
 *  4. ?format=bytes, for clients that resume: binary frames with the file's own bytes, so that
 *     their count is the offset. A text frame {"offset": N, "lost": L} comes first and again when
 *     L bytes were released before this follower took them. Of a rank it has "attempt", and comes
 *     again when another attempt's log begins; "former_lost" says why the former one is not whole.
 *     Without it: text frames, bytes that are no UTF-8 replaced; a loss is said in a line.
 * Failure paths:
 *  5. No log yet (PENDING): looked for again at every turn; a job without any log closes when it is
 *     terminal.
 *  6. A log whose node is gone is read from the job's store, and that is said: in a line, or as
 *     {"offset": N, "lost": 0, "complete_to": M, "source": URL} between the bytes. No store has it:
 *     of a rank close 1011 with the reason. A driver's job is about to end, and its state comes
 *     first; then a line says it, before the close 1000. A log that will never be: 4404.
 *  7. The client goes away: on_close frees the follower.
 */
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/log_source.h"
#include "gcs/services.h"
#include "gcs/text.h"

enum { POLL_MS = 50, PIECE_BYTES = MB_WS_SEND_MAX_BYTES };
/* What one follower, and all of them, send in a turn of the loop before whoever else has a turn. */
enum { TURN_BYTES = 64 * PIECE_BYTES, ALL_TURNS_BYTES = 8 * TURN_BYTES };
enum { NO_SUCH_LOG = 4404 }; /* close status of our own: there is no sense in asking again */

struct head_follow {
    struct head_follow *next;
    struct mb_head *h;
    struct mb_ws *ws; /* NULL once it is closed */
    uv_timer_t timer;
    struct log_source *source;
    uint64_t next_offset;
    int began;       /* next_offset counts */
    int as_bytes;    /* ?format=bytes */
    int once;        /* ?follow=0 */
    int final;       /* the job is terminal, and that is committed */
    int ending;      /* the close frame is queued */
    unsigned told;   /* number of the origin that was said */
    int64_t attempt; /* that was said; 0: none */
    int64_t rank;    /* -1: the driver */
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

/* ---- what is sent ---- */

static int say_position(struct head_follow *f, uint64_t offset, uint64_t lost, struct mb_err *err)
{
    const struct log_attempt *attempt = head_log_attempt(f->source);
    char text[200 + MB_TEXT_ESCAPE_MAX * sizeof attempt->lost];
    size_t used, n;

    if (!f->as_bytes) {
        n = (size_t)snprintf(text, sizeof text, "[mobula: %llu bytes before this were released]\n",
                             (unsigned long long)lost);
        return mb_ws_send_text(f->ws, text, n, err);
    }
    n = (size_t)snprintf(text, sizeof text, "{\"offset\": %llu, \"lost\": %llu",
                         (unsigned long long)offset, (unsigned long long)lost);
    if (attempt->number > 0)
        n += (size_t)snprintf(text + n, 50, ", \"attempt\": %lld", (long long)attempt->number);
    if (attempt->lost[0] != '\0') {
        n += (size_t)snprintf(text + n, 50, ", \"former_lost\": \"");
        n += mb_text_json(attempt->lost, strlen(attempt->lost), 1, text + n, &used);
        text[n++] = '"';
    }
    text[n++] = '}';
    return mb_ws_send_text(f->ws, text, n, err);
}

/* Another attempt's log begins: its offsets have nothing to do with those before. */
static int turn_attempt(struct head_follow *f, struct mb_err *err)
{
    const struct log_attempt *attempt = head_log_attempt(f->source);
    char text[MB_ERR_TEXT_MAX + 100];
    int is_first = f->attempt == 0, n, rc = 0;

    if (attempt->number == f->attempt)
        return 0;
    if (!is_first && !f->as_bytes) {
        n = snprintf(text, sizeof text, "[mobula: attempt %lld begins%s%s]\n",
                     (long long)attempt->number, attempt->lost[0] != '\0' ? "; " : "",
                     attempt->lost);
        rc = mb_ws_send_text(f->ws, text, (size_t)n, err);
    }
    if (rc != 0)
        return rc;
    f->attempt = attempt->number;
    f->began = f->began && !f->as_bytes; /* its number is said with the position */
    if (!is_first)
        f->next_offset = 0;
    return 0;
}

static int say_origin(struct head_follow *f, const struct log_origin *o, uint64_t offset,
                      struct mb_err *err)
{
    char text[LOG_ORIGIN_TEXT_BYTES + MB_TEXT_ESCAPE_MAX * sizeof o->url];
    size_t used, n;

    if (f->as_bytes) {
        n = (size_t)snprintf(
            text, sizeof text,
            "{\"offset\": %llu, \"lost\": 0, \"complete_to\": %llu, \"source\": \"",
            (unsigned long long)offset, (unsigned long long)o->complete_to);
        n += mb_text_json(o->url, strlen(o->url), 1, text + n, &used);
        text[n++] = '"';
        text[n++] = '}';
    } else {
        n = (size_t)head_log_origin_text(o, text, sizeof text);
    }
    return mb_ws_send_text(f->ws, text, n, err);
}

static int send_piece(struct head_follow *f, struct log_piece *p, struct mb_err *err)
{
    uint64_t lost = p->offset > f->next_offset ? p->offset - f->next_offset : 0;
    int rc = 0;

    if (f->as_bytes ? !f->began || p->offset != f->next_offset : lost > 0)
        rc = say_position(f, p->offset, f->began ? lost : 0, err);
    if (rc != 0)
        return rc;
    f->began = 1;
    f->next_offset = p->offset;
    if (p->n == 0)
        return 0;
    rc = f->as_bytes ? mb_ws_send_binary(f->ws, p->data, p->n, err)
                     : mb_ws_send_text(f->ws, p->data, p->n, err);
    if (rc == 0) {
        head_log_advance(f->source, p->n);
        f->next_offset += p->n;
    }
    return rc;
}

/* The log cannot be read. 1: that is the end of it, in order; 0: the socket is closed with the
 * reason, or the job's end is waited for. */
static int give_up(struct head_follow *f, const struct mb_err *why)
{
    struct mb_err err;
    int is_lost_driver = f->rank < 0 && why->code == MB_EUNAVAIL && !f->once;

    if (is_lost_driver && !f->final)
        return 0; /* whose state follows its node's */
    if (is_lost_driver && !f->as_bytes) {
        char line[MB_ERR_TEXT_MAX + 20];
        int n = snprintf(line, sizeof line, "[mobula: %s]\n", why->text);
        if (mb_ws_send_text(f->ws, line, (size_t)n, &err) == 0)
            return 1;
    }
    /* MB_ESTATE: the client is about to be gone, which is no fault of the log. */
    if (why->code != MB_EUNAVAIL && why->code != MB_ENOENT && why->code != MB_EUNSUPPORTED &&
        why->code != MB_ESTATE)
        mb_warn("jobs", "job=%s log tail broken: %s", f->id, why->text);
    end_follow(f, why->code == MB_ENOENT || why->code == MB_EUNSUPPORTED ? NO_SUCH_LOG : 1011,
               why->text);
    return 0;
}

static size_t turn_bytes(const struct mb_head *h)
{
    size_t each = ALL_TURNS_BYTES / (h->n_follows > 0 ? h->n_follows : 1);

    return each > TURN_BYTES ? TURN_BYTES : each < PIECE_BYTES ? PIECE_BYTES : each;
}

/* 1: everything there is was sent; 0: not yet, *more says whether this turn alone is over. */
static int send_pieces(struct head_follow *f, int *more)
{
    struct mb_err err = {0};
    struct log_piece p;
    size_t turn = 0;

    while (turn < turn_bytes(f->h)) {
        size_t room = mb_ws_room(f->ws);
        if (room == 0)
            return 0;
        int rc = head_log_peek(f->source, room, &p, &err);
        int at_end = p.at_end;
        const struct log_origin *origin = rc == 0 ? head_log_origin(f->source) : NULL;

        if (rc == 0 && (p.n > 0 || at_end))
            rc = turn_attempt(f, &err);
        if (rc == 0 && origin && origin->number != f->told && (p.n > 0 || at_end)) {
            rc = say_origin(f, origin, p.offset, &err);
            if (rc == 0)
                f->told = origin->number;
        }
        if (rc == 0 && p.n == 0 && (!at_end || f->began))
            return at_end;
        if (rc == 0) {
            turn += p.n;
            rc = send_piece(f, &p, &err);
        }
        if (rc == MB_EFULL)
            return 0;
        if (rc != 0)
            return give_up(f, &err);
        if (at_end)
            return 1;
    }
    *more = 1;
    return 0;
}

static const char *state_of(const struct head_follow *f)
{
    const struct head_job *job = head_job_find(f->h, f->id);

    return job ? mb_job_state_name(job->state) : "";
}

static void on_follow_timer(uv_timer_t *timer);

static void advance(struct head_follow *f)
{
    int more = 0;

    if (f->ending || !f->ws)
        return;
    int done = send_pieces(f, &more);
    if (done && (f->final || f->once))
        end_follow(f, 1000, f->final ? state_of(f) : "");
    else if (more && !f->ending) /* after whoever else has something to do */
        uv_timer_start(&f->timer, on_follow_timer, 0, POLL_MS);
}

static void on_follow_timer(uv_timer_t *timer)
{
    advance(timer->data);
}

static void on_ready(void *arg)
{
    advance(arg);
}

static void on_writable(void *arg, struct mb_ws *ws)
{
    (void)ws;
    advance(arg);
}

/* ---- begin and end ---- */

static void on_follow_freed(uv_handle_t *handle)
{
    mb_free(handle->data);
}

static void on_ws_close(void *arg, struct mb_ws *ws)
{
    struct head_follow *f = arg;

    (void)ws;
    f->ws = NULL;
    for (struct head_follow **at = &f->h->follows; *at; at = &(*at)->next) {
        if (*at == f) {
            *at = f->next;
            f->h->n_follows--;
            break;
        }
    }
    head_log_close(f->source);
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
            if (!f->final)
                head_log_recheck(f->source);
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

static struct head_follow *new_follow(struct mb_head *h, struct mb_http_req *req, const char *id,
                                      const struct log_start *start, int64_t rank)
{
    const char *format = mb_http_req_query(req, "format");
    const char *follow = mb_http_req_query(req, "follow");
    size_t n = strlen(id) + 1;
    struct head_follow *f = mb_calloc(1, sizeof *f + n);
    struct log_start from = *start;
    struct mb_err err;

    from.is_one = follow && strcmp(follow, "0") == 0;
    if (!f || head_log_open(h, id, rank, &from, on_ready, f, &f->source, &err) != 0) {
        mb_free(f);
        return NULL;
    }
    f->h = h;
    f->as_bytes = format && strcmp(format, "bytes") == 0;
    f->once = from.is_one;
    f->rank = rank;
    if (!f->once)
        head_log_be_patient(f->source);
    /* A start that was named counts as known: a later first byte is a loss. */
    f->next_offset = start->offset;
    memcpy(f->id, id, n);
    return f;
}

void head_logs_follow(struct mb_head *h, struct mb_http_req *req, struct head_job *job)
{
    static const struct mb_ws_ops ops = {.on_writable = on_writable, .on_close = on_ws_close};
    size_t n = strlen(job->id) + 1;
    struct opened *o;
    struct head_follow *f;
    struct log_start start;
    struct mb_err err = {0};
    int64_t rank;

    if (head_logs_query(req, &start, &rank) != 0)
        return;
    f = new_follow(h, req, job->id, &start, rank);
    o = mb_calloc(1, sizeof *o + n);
    if (!f || !o) {
        if (f)
            head_log_close(f->source);
        mb_free(f);
        mb_free(o);
        mb_http_reply_text(req, 500, "out of memory");
        return;
    }
    /* Whoever asked for the last lines, or since when, knows that there is more before. */
    if (!f->as_bytes && (start.has_tail || start.since_unix_ms))
        f->next_offset = UINT64_MAX;
    o->h = h;
    memcpy(o->id, job->id, n);
    int terminal = mb_job_is_terminal(job->state);
    if (mb_http_upgrade(req, &ops, f, &f->ws, &err) != 0) { /* answered by the upgrade */
        head_log_close(f->source);
        mb_free(f);
        mb_free(o);
        return;
    }
    uv_timer_init(h->loop, &f->timer);
    f->timer.data = f;
    f->next = h->follows;
    h->follows = f;
    h->n_follows++;
    uv_timer_start(&f->timer, on_follow_timer, 0, POLL_MS);
    if (!terminal || mb_tables_barrier(h->store, on_open_committed, o, &err) != 0)
        mb_free(o);
}

void head_logs_close(struct mb_head *h)
{
    for (struct head_follow *f = h->follows; f; f = f->next)
        end_follow(f, 1001, "the head is stopping");
    head_log_answers_close(h);
}
