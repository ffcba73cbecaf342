/*
 *  1. open the log's web socket at the offset that was printed last (at first: where the caller
 *     wants to begin); the server says where it begins, then sends the file's bytes;
 *  2. print them; their count is the offset;
 *  3. the socket ends: ask for the job. Ended and a clean close (1000): done. Not ended, or the
 *     close was not clean: connect again after 0.1 to 2 s, by offset: nothing is lost or repeated.
 *  A server that is not ours sends text from the beginning: what former connections printed is
 *     passed over.
 *  Another attempt of the gang: its number is said on stderr, and offsets are those of its log.
 *  Bytes that the server released meanwhile: said on stderr with their number. So is a log whose
 *     node is gone, with the store that it comes from and the byte up to which it is there.
 *  The server says that there is no such log: MB_ENOENT, at once; that it cannot begin at a time:
 *     MB_EUNSUPPORTED. That it cannot be read while the
 *     job has ended or nothing is followed: MB_ESTATE, at once.
 *  No answer for MB_FOLLOW_LOST_MS: MB_EUNAVAIL; the job itself is not touched. stdout closed:
 * MB_EIO.
 */
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/printable.h"
#include "base/str.h"
#include "cli/follow_rules.h"
#include "cli/job.h"

enum { BACKOFF_MIN_MS = 100, BACKOFF_MAX_MS = 2000, POSITION_MAX_BYTES = 16 << 10 };

struct follow {
    const struct mb_follow_opts *opts;
    uint64_t offset;     /* the next byte of the log; text: bytes printed so far */
    uint64_t skip_bytes; /* text: of this connection, printed by former ones */
    int has_offset;      /* offset counts: the server said it, or bytes came */
    int64_t attempt;     /* of a rank: whose log the offset is of; 0: not known */
    int is_text;         /* a server that knows no offsets */
    int status_code;
    int is_lost; /* the head does not answer, and that was said */
    int failed;  /* printing: err says why */
    long http_status;
    char detail[512];
    struct mb_wire *wire;
    struct mb_err *err;
};

static void show(struct follow *f, const void *p, size_t n)
{
    if (f->failed)
        return;
    f->failed = mb_log_lines_add(f->opts->lines, p, n, f->err) != 0;
    if (f->failed)
        mb_wire_hang_up(f->wire);
    f->offset += n;
    f->has_offset = 1;
}

static void on_binary(void *arg, const void *p, size_t n)
{
    show(arg, p, n);
}

static void say_former(int64_t attempt, const char *lost)
{
    char before[60];

    snprintf(before, sizeof(before), "mobula: attempt %" PRId64 ": ", attempt);
    mb_printable_say(stderr, before, lost, "\n");
}

/* The log of another attempt begins. */
static void turn_attempt(struct follow *f, int64_t attempt, const char *former_lost)
{
    if (f->attempt != 0) {
        f->failed = mb_log_lines_end(f->opts->lines, f->err) != 0;
        if (*former_lost != '\0')
            say_former(f->attempt, former_lost);
        fprintf(stderr, "mobula: attempt %" PRId64 " begins\n", attempt);
        f->offset = 0;
        f->has_offset = 1;
    }
    f->attempt = attempt;
}

/* What a position says beside it: "attempt" of a rank; "complete_to" and "source" of a log whose
 * node is gone, which comes from a store. */
static void take_rest(struct follow *f, const char *text)
{
    json_t *o = json_loads(text, 0, NULL);
    int64_t attempt = json_integer_value(json_object_get(o, "attempt"));

    if (attempt > 0 && attempt != f->attempt)
        turn_attempt(f, attempt, mb_job_text(o, "former_lost"));
    mb_job_say_source(o, -1);
    json_decref(o);
}

/* {"offset": N, "lost": L} of our own server; 0: some text. */
static int take_position(struct follow *f, const char *text, size_t n)
{
    char copy[POSITION_MAX_BYTES];
    uint64_t offset, lost;

    if (f->is_text || n >= sizeof(copy))
        return 0;
    memcpy(copy, text, n);
    copy[n] = '\0';
    if (sscanf(copy, "{\"offset\": %" SCNu64 ", \"lost\": %" SCNu64, &offset, &lost) != 2)
        return 0;
    take_rest(f, copy);
    if (f->has_offset && offset > f->offset)
        fprintf(stderr,
                "mobula: %" PRIu64 " bytes of the log were released before they were read\n",
                offset - f->offset);
    else if (!f->has_offset && offset > 0 && !f->opts->has_start)
        fprintf(stderr, "mobula: the first %" PRIu64 " bytes of the log were released\n", offset);
    f->offset = offset;
    f->has_offset = 1;
    return 1;
}

static void on_text(void *arg, const char *text, size_t n)
{
    struct follow *f = arg;

    if (take_position(f, text, n))
        return;
    f->is_text = 1;
    if (f->skip_bytes >= n) {
        f->skip_bytes -= n;
        return;
    }
    text += f->skip_bytes;
    n -= (size_t)f->skip_bytes;
    f->skip_bytes = 0;
    show(f, text, n);
}

static void on_end(void *arg, int status_code, long http_status, const char *detail)
{
    struct follow *f = arg;

    f->status_code = status_code;
    f->http_status = http_status;
    snprintf(f->detail, sizeof(f->detail), "%s", detail);
}

static char *url_of(const struct mb_rest *rest, const char *path, const struct follow *f)
{
    const struct mb_follow_opts *o = f->opts;
    struct mb_buf b = {0};
    int rc = mb_buf_printf(&b, "%s%s?format=bytes", rest->base_url, path);

    if (f->has_offset && !f->is_text)
        rc |= mb_buf_printf(&b, "&offset=%" PRIu64, f->offset);
    else if (o->since_unix_ms > 0)
        rc |= mb_buf_printf(&b, "&since_ms=%" PRIu64, o->since_unix_ms);
    else if (o->tail_lines >= 0)
        rc |= mb_buf_printf(&b, "&tail=%" PRId64, o->tail_lines);
    if (o->rank >= 0)
        rc |= mb_buf_printf(&b, "&rank=%" PRId64, o->rank);
    if (f->attempt > 0)
        rc |= mb_buf_printf(&b, "&attempt=%" PRId64, f->attempt);
    if (o->once)
        rc |= mb_buf_puts(&b, "&follow=0");
    if (rc == 0)
        return mb_buf_take(&b);
    mb_buf_close(&b);
    return NULL;
}

/* One connection, to its end. */
static int stream(struct mb_rest *rest, const char *path, struct follow *f, struct mb_err *err)
{
    static const struct mb_wire_ops ops = {
        .on_text = on_text, .on_binary = on_binary, .on_end = on_end};
    const char *headers[] = {rest->auth.len > 0 ? mb_buf_str(&rest->auth) : NULL, NULL};
    char *url = url_of(rest, path, f);
    int rc = url != NULL ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");

    f->wire = rest->wire;
    f->err = err;
    f->skip_bytes = f->is_text ? f->offset : 0;
    if (rc == 0)
        rc = mb_wire_follow(rest->wire, url, headers, &ops, f, err);
    if (rc != 0)
        mb_err_wrap(err, "%s", rest->base_url);
    mb_free(url);
    return rc == 0 && f->failed ? err->code : rc;
}

/* Whoever waits is told what for, once each time: on stderr, the log's own output stays as it is.
 */
static void say_lost(struct follow *f, int is_lost, const struct mb_err *err)
{
    if (is_lost && !f->is_lost)
        fprintf(stderr, "mobula: %s; trying again for %d s\n", err->text, MB_FOLLOW_LOST_MS / 1000);
    else if (!is_lost && f->is_lost)
        fprintf(stderr, "mobula: the head answers again\n");
    f->is_lost = is_lost;
}

/* There is no such log, or none with times: a close has one code for both, a piece has two. */
static int say_nowhere(struct mb_rest *rest, const char *id, const struct follow *f,
                       struct mb_err *err)
{
    struct mb_err why = {0};
    char query[160], rank[32] = "", attempt[32] = "", *path;
    json_t *piece = NULL;

    if (f->opts->since_unix_ms > 0 && !f->has_offset) {
        if (f->opts->rank >= 0)
            snprintf(rank, sizeof(rank), "&rank=%" PRId64, f->opts->rank);
        if (f->attempt > 0)
            snprintf(attempt, sizeof(attempt), "&attempt=%" PRId64, f->attempt);
        snprintf(query, sizeof(query), "/logs?limit=0&since_ms=%" PRIu64 "%s%s",
                 f->opts->since_unix_ms, rank, attempt);
        path = mb_job_path(id, query);
        if (path != NULL)
            mb_rest_json(rest, "GET", path, NULL, &piece, &why);
        json_decref(piece);
        mb_free(path);
    }
    return mb_err_set(err, why.code == MB_EUNSUPPORTED ? MB_EUNSUPPORTED : MB_ENOENT,
                      "the log of %s cannot be read: %s", id, f->detail);
}

static int give_up(struct mb_rest *rest, const char *id, const struct follow *f,
                   enum mb_follow_verdict verdict, struct mb_err *err)
{
    switch (verdict) {
    case MB_FOLLOW_NOWHERE:
        return say_nowhere(rest, id, f, err);
    case MB_FOLLOW_UNREADABLE:
        return mb_err_set(err, MB_ESTATE, "the log of %s cannot be read: %s", id, f->detail);
    case MB_FOLLOW_BROKEN:
        return mb_err_set(err, MB_EUNAVAIL, "the log of %s breaks off: %s", id, f->detail);
    case MB_FOLLOW_SILENT:
    case MB_FOLLOW_AGAIN:
    case MB_FOLLOW_DONE:
    default:
        return err->code; /* of the question for the job */
    }
}

/* 1: over; 0: connect again; negative: give up. */
static int judge(struct mb_rest *rest, const char *id, struct follow *f, uint64_t *seen_ms,
                 json_t **job, struct mb_err *err)
{
    enum mb_follow_verdict verdict;
    int rc = mb_job_get(rest, id, job, err);

    if (rc == MB_ENOENT || rc == MB_EDENIED)
        return rc;
    verdict =
        mb_follow_judge(&(struct mb_follow_end){.http_status = f->http_status,
                                                .status_code = f->status_code,
                                                .once = f->opts->once,
                                                .answers = rc == 0,
                                                .is_terminal = rc == 0 && mb_job_is_terminal(*job)},
                        mb_mono_ms(), seen_ms);
    if (verdict == MB_FOLLOW_DONE)
        return 1;
    if (rc == 0)
        json_decref(*job);
    *job = NULL;
    if (verdict != MB_FOLLOW_AGAIN)
        return give_up(rest, id, f, verdict, err);
    say_lost(f, rc != 0, err);
    return 0;
}

int mb_job_follow(struct mb_rest *rest, const char *id, const struct mb_follow_opts *opts,
                  json_t **job, struct mb_err *err)
{
    struct follow f = {.opts = opts, .attempt = opts->attempt};
    struct mb_err ignored;
    uint64_t seen_ms = mb_mono_ms();
    unsigned pause_ms = BACKOFF_MIN_MS;
    char *path = mb_job_path(id, "/logs/tail");
    int rc = path != NULL ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");

    *job = NULL;
    while (rc == 0) {
        uint64_t before = f.offset;

        rc = stream(rest, path, &f, err);
        if (rc == 0)
            rc = judge(rest, id, &f, &seen_ms, job, err);
        if (rc != 0)
            break;
        pause_ms = f.offset > before               ? BACKOFF_MIN_MS
                   : pause_ms * 2 > BACKOFF_MAX_MS ? BACKOFF_MAX_MS
                                                   : pause_ms * 2;
        poll(NULL, 0, (int)pause_ms);
    }
    mb_free(path);
    if (rc > 0)
        rc = mb_log_lines_end(opts->lines, err);
    else
        mb_log_lines_end(opts->lines, &ignored);
    if (rc != 0) {
        json_decref(*job);
        *job = NULL;
    }
    return rc;
}
