/*
 * A job's log over HTTP.
 *
 * Whole: {"logs": "..."}, what the file held when the request came, escaped on the fly in small
 *   pieces: the file is never in memory. A released front is said in the first line, and so is a
 *   log whose node is gone: from which store it is read, and up to which byte it is there.
 * Piece (?offset=, ?tail=, ?since_ms=, ?limit=, ?rank=): {"offset": N, "logs": "...",
 *   "next_offset": M, "first_offset": F, "size": S}; with ?format=bytes each byte
 *   of the log is the character of its number in "logs", and "format" says so; of a rank also
 * "attempt", which one's log it is
 *   (?attempt=; else the newest), "newest_attempt", and the "world_size" of that attempt. Offsets
 * count bytes of the file, not of the text, in which bytes that are no UTF-8 are replaced: go on at
 * next_offset. Of a log that is read from a store also "source": its URL there, "complete_to": the
 * byte behind the last one there. Times (?times=1): {"offset": N, "times": [[offset, unix_ms],
 * ...]}, at most 4096 pairs: the bytes before the offset were written before the time. Failure
 * paths:
 *  1. A number that is none: 400 with its name. No such rank or attempt: 404. Its node does not
 * answer, or is gone and no store has the log: 503. ?since_ms= of a log in a store: 501. The answer
 * begins when the first piece is there, so that all of this can be told by its status.
 *  2. The node of a rank goes away amid the answer: the connection breaks off, the JSON is not
 *     whole.
 */
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"
#include "gcs/log_source.h"
#include "gcs/services.h"
#include "gcs/text.h"

enum { PIECE_BYTES = 16384, HEAD_MAX_BYTES = 16384 };

/* ---- what is asked for ---- */

static int query_number(struct mb_http_req *req, const char *name, int64_t max, int64_t *out)
{
    const char *text = mb_http_req_query(req, name);
    struct mb_err err;

    if (!text || mb_parse_i64(text, 0, max, name, out, &err) == 0)
        return 0;
    mb_http_reply_text(req, 400, "%s", err.text);
    return MB_EINVAL;
}

int head_logs_query(struct mb_http_req *req, struct log_start *start, int64_t *rank)
{
    int64_t offset = 0, since_ms = 0, tail = -1, attempt = 0;

    *rank = -1;
    if (query_number(req, "offset", INT64_MAX / 4, &offset) != 0 ||
        query_number(req, "since_ms", INT64_MAX, &since_ms) != 0 ||
        query_number(req, "tail", INT64_MAX, &tail) != 0 ||
        query_number(req, "rank", INT32_MAX, rank) != 0 ||
        query_number(req, "attempt", INT32_MAX, &attempt) != 0)
        return MB_EINVAL;
    if (attempt > 0 && *rank < 0) {
        mb_http_reply_text(req, 400, "attempt: of a rank only, there is one log of the driver");
        return MB_EINVAL;
    }
    *start = (struct log_start){.attempt = attempt,
                                .offset = (uint64_t)offset,
                                .since_unix_ms = (uint64_t)since_ms,
                                .tail_lines = tail > 0 ? (uint64_t)tail : 0,
                                .has_tail = tail >= 0};
    return 0;
}

/* ---- the answer, as it is pulled ---- */

enum phase { WAITING, BEFORE, INSIDE, AFTER, OVER };

struct head_log_answer {
    struct head_log_answer *behind; /* of those that wait */
    struct mb_head *h;
    struct mb_http_req *req;
    struct log_source *source;
    int is_piece;
    int as_bytes;  /* ?format=bytes */
    int resumable; /* the connection waits for us */
    enum phase phase;
    uint64_t begin, next, end; /* bytes of the file; end: not beyond it */
    uint64_t limit;
};

static void begin_answer(struct head_log_answer *a);

static void on_ready(void *arg)
{
    struct head_log_answer *a = arg;

    if (a->phase == WAITING) {
        begin_answer(a);
    } else if (a->resumable) {
        a->resumable = 0;
        mb_http_resume(a->req);
    }
}

/* text as the inside of a JSON string; out has MB_TEXT_ESCAPE_MAX times its length. */
static long put_text(const char *text, char *out)
{
    size_t used;

    return (long)mb_text_json(text, strlen(text), 1, out, &used);
}

/* The first piece is there: what comes is known now. */
static long put_begin(struct head_log_answer *a, const struct log_piece *p, char *buf)
{
    uint64_t size = head_log_size(a->source);

    a->begin = a->next = p->offset;
    a->end =
        a->limit < UINT64_MAX - a->begin && a->begin + a->limit < size ? a->begin + a->limit : size;
    a->phase = INSIDE;
    if (a->is_piece)
        return snprintf(buf, HEAD_MAX_BYTES, "{\"offset\": %llu, \"logs\": \"",
                        (unsigned long long)a->begin);
    long n = snprintf(buf, HEAD_MAX_BYTES, "{\"logs\": \"");
    const struct log_origin *origin = head_log_origin(a->source);
    if (origin) {
        char line[LOG_ORIGIN_TEXT_BYTES];
        head_log_origin_text(origin, line, sizeof line);
        n += put_text(line, buf + n);
    }
    if (a->begin > 0)
        n += snprintf(buf + n, 200,
                      "[mobula: the first %llu bytes of this log were released to keep its "
                      "size]\\n",
                      (unsigned long long)a->begin);
    return n;
}

/* Amid the log bytes are not there any more: said where they are missing. */
static long put_gap(struct head_log_answer *a, uint64_t offset, char *buf)
{
    uint64_t lost = offset - a->next;

    a->next = offset;
    return snprintf(buf, HEAD_MAX_BYTES, "[mobula: %llu bytes before this were released]\\n",
                    (unsigned long long)lost);
}

static long put_end(struct head_log_answer *a, char *buf)
{
    const struct log_origin *origin = head_log_origin(a->source);
    const struct log_attempt *attempt = head_log_attempt(a->source);
    long n;

    a->phase = OVER;
    if (!a->is_piece)
        return snprintf(buf, HEAD_MAX_BYTES, "\"}");
    n = snprintf(buf, HEAD_MAX_BYTES,
                 "\", \"next_offset\": %llu, \"first_offset\": %llu, \"size\": %llu",
                 (unsigned long long)a->next, (unsigned long long)head_log_first(a->source),
                 (unsigned long long)head_log_size(a->source));
    if (attempt->world_size > 0)
        n += snprintf(
            buf + n, 200, ", \"attempt\": %lld, \"newest_attempt\": %lld, \"world_size\": %lld",
            (long long)attempt->number, (long long)attempt->newest, (long long)attempt->world_size);
    if (a->as_bytes)
        n += snprintf(buf + n, 30, ", \"format\": \"bytes\"");
    if (origin) {
        n += snprintf(buf + n, 100, ", \"complete_to\": %llu, \"source\": \"",
                      (unsigned long long)origin->complete_to);
        n += put_text(origin->url, buf + n);
        buf[n++] = '"';
    }
    buf[n++] = '}';
    return n;
}

static long pull(void *arg, void *buf, size_t max)
{
    struct head_log_answer *a = arg;
    struct log_piece p;
    struct mb_err err = {0};
    size_t want = max / MB_TEXT_ESCAPE_MAX, used;

    if (a->phase == AFTER)
        return put_end(a, buf);
    if (a->phase == OVER)
        return MB_HTTP_PULL_END;
    if (head_log_peek(a->source, want < PIECE_BYTES ? want : PIECE_BYTES, &p, &err) != 0)
        return err.code;
    if (p.n == 0 && !p.at_end) {
        a->resumable = 1;
        return 0;
    }
    if (a->phase == BEFORE)
        return put_begin(a, &p, buf);
    if (!a->is_piece && p.n > 0 && p.offset > a->next && p.offset < a->end)
        return put_gap(a, p.offset, buf);
    if (p.offset != a->next || p.n == 0 || p.offset >= a->end) { /* the end, or a released gap */
        a->phase = AFTER;
        return put_end(a, buf);
    }
    if (p.n > a->end - p.offset)
        p.n = (size_t)(a->end - p.offset);
    size_t out;
    if (a->as_bytes)
        out = mb_text_json_bytes(p.data, used = p.n, buf);
    else
        out = mb_text_json(p.data, p.n, p.offset + p.n >= a->end || p.n < 4, buf, &used);
    head_log_advance(a->source, used);
    a->next += used;
    return (long)out;
}

static void free_answer(void *arg)
{
    struct head_log_answer *a = arg;

    head_log_close(a->source);
    mb_free(a);
}

/* ---- times ---- */

static void on_times(void *arg, const struct log_times *times, const struct mb_err *err)
{
    struct mb_http_req *req = arg;
    json_t *list = json_array();

    if (err->code != 0) {
        json_decref(list);
        mb_http_reply_text(req, err->code == MB_ENOENT ? 404 : 503, "%s", err->text);
        return;
    }
    for (size_t i = 0; i < times->n; i++)
        json_array_append_new(list, json_pack("[I, I]", (json_int_t)times->offsets[i],
                                              (json_int_t)times->unix_ms[i]));
    mb_http_reply_json(req, 200,
                       json_pack("{s:I, s:o}", "offset", (json_int_t)times->offset, "times", list));
}

/* ---- the request ---- */

static int status_of(int rc)
{
    return rc == MB_ENOENT ? 404 : rc == MB_EUNAVAIL ? 503 : rc == MB_EUNSUPPORTED ? 501 : 500;
}

static void leave(struct head_log_answer *a)
{
    for (struct head_log_answer **at = &a->h->log_answers; *at; at = &(*at)->behind) {
        if (*at == a) {
            *at = a->behind;
            return;
        }
    }
}

/* When the first piece is there. */
static void begin_answer(struct head_log_answer *a)
{
    struct log_piece p;
    struct mb_err err = {0};
    int rc = head_log_peek(a->source, 1, &p, &err);

    if (rc != 0) {
        leave(a);
        mb_http_reply_text(a->req, status_of(rc), "%s", err.text);
        free_answer(a);
    } else if (p.n > 0 || p.at_end) {
        leave(a);
        a->phase = BEFORE;
        mb_http_reply_stream(a->req, 200, "application/json; charset=utf-8", pull, free_answer, a);
    }
}

static int is_bytes(struct mb_http_req *req)
{
    const char *format = mb_http_req_query(req, "format");

    return format && strcmp(format, "bytes") == 0;
}

void head_logs_reply(struct mb_head *h, struct mb_http_req *req, struct head_job *job)
{
    static const char *const piece_words[] = {"offset", "tail", "since_ms", "limit", "rank", NULL};
    struct head_log_answer *a;
    struct log_start start;
    struct mb_err err = {0};
    int64_t rank, limit = INT64_MAX;

    if (head_logs_query(req, &start, &rank) != 0 ||
        query_number(req, "limit", INT64_MAX, &limit) != 0)
        return;
    if (mb_http_req_query(req, "times")) {
        head_log_times(h, job->id, rank, &start, on_times, req);
        return;
    }
    start.is_one = 1;
    a = mb_calloc(1, sizeof *a);
    if (!a || head_log_open(h, job->id, rank, &start, on_ready, a, &a->source, &err) != 0) {
        mb_free(a);
        mb_http_reply_text(req, 500, "out of memory");
        return;
    }
    a->h = h;
    a->behind = h->log_answers;
    h->log_answers = a;
    a->req = req;
    a->limit = (uint64_t)limit;
    for (int i = 0; piece_words[i]; i++)
        a->is_piece |= mb_http_req_query(req, piece_words[i]) != NULL;
    a->as_bytes = a->is_piece && is_bytes(req);
    begin_answer(a);
}

void head_log_answers_close(struct mb_head *h)
{
    while (h->log_answers) {
        struct head_log_answer *a = h->log_answers;

        leave(a);
        mb_http_reply_text(a->req, 503, "the head is stopping");
        free_answer(a);
    }
}
