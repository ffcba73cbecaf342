/*
 *  1. open the log's web socket: the server sends the whole log, then what is new;
 *  2. print it, but for the bytes that a former connection printed already;
 *  3. the socket ends: ask for the job. Ended and a clean close (1000): done. Not ended, or the
 *     close was not clean: connect again after 0.1 to 2 s.
 *  No answer for FOLLOW_LOST_MS: MB_EUNAVAIL; the job itself is not touched. stdout closed: MB_EIO.
 */
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/str.h"
#include "cli/job.h"

enum { FOLLOW_LOST_MS = 300 * 1000, BACKOFF_MIN_MS = 100, BACKOFF_MAX_MS = 2000, CLEAN = 1000 };

struct follow {
    uint64_t printed_bytes; /* over all connections */
    uint64_t skip_bytes;    /* of this connection, printed by former ones */
    int ended, status_code, broken_pipe;
    long http_status;
    char detail[512];
    struct mb_ws_client *ws;
};

static void on_text(void *arg, const char *text, size_t n)
{
    struct follow *f = arg;

    if (f->skip_bytes >= n) {
        f->skip_bytes -= n;
        return;
    }
    text += f->skip_bytes;
    n -= (size_t)f->skip_bytes;
    f->skip_bytes = 0;
    if (f->broken_pipe)
        return;
    if (fwrite(text, 1, n, stdout) != n || fflush(stdout) != 0) {
        f->broken_pipe = 1;
        mb_ws_client_close(f->ws);
    }
    f->printed_bytes += n;
}

static void on_end(void *arg, int status_code, long http_status, const char *detail)
{
    struct follow *f = arg;

    f->ended = 1;
    f->status_code = status_code;
    f->http_status = http_status;
    snprintf(f->detail, sizeof(f->detail), "%s", detail);
}

/* One connection, to its end. */
static int stream(struct mb_rest *rest, const char *url, struct follow *f, struct mb_err *err)
{
    static const struct mb_ws_client_ops ops = {.on_text = on_text, .on_end = on_end};
    const char *headers[] = {rest->auth.len > 0 ? mb_buf_str(&rest->auth) : NULL, NULL};
    int rc;

    f->ended = 0;
    f->skip_bytes = f->printed_bytes;
    rc = mb_ws_connect(&rest->loop, url, headers, &ops, f, &f->ws, err);
    while (rc == 0 && !f->ended)
        uv_run(&rest->loop, UV_RUN_ONCE);
    return rc;
}

/* 1: over; 0: connect again; negative: give up. */
static int judge(struct mb_rest *rest, const char *id, const struct follow *f, uint64_t *seen_ms,
                 json_t **job, struct mb_err *err)
{
    int rc = mb_job_get(rest, id, job, err);

    if (rc == MB_ENOENT || rc == MB_EDENIED)
        return rc;
    if (rc != 0)
        return mb_mono_ms() - *seen_ms > FOLLOW_LOST_MS ? rc : 0;
    if (mb_job_is_terminal(*job) && f->status_code == CLEAN && f->http_status == 0)
        return 1;
    if (f->http_status >= 400 && f->http_status < 500 && mb_job_is_terminal(*job)) {
        json_decref(*job);
        return mb_err_set(err, MB_ESTATE, "the log of %s cannot be followed: status %ld %s", id,
                          f->http_status, f->detail);
    }
    if (!mb_job_is_terminal(*job))
        *seen_ms = mb_mono_ms();
    json_decref(*job);
    *job = NULL;
    if (mb_mono_ms() - *seen_ms > FOLLOW_LOST_MS)
        return mb_err_set(err, MB_EUNAVAIL, "the log of %s breaks off: %s", id, f->detail);
    return 0;
}

int mb_job_follow(struct mb_rest *rest, const char *id, json_t **job, struct mb_err *err)
{
    struct follow f = {0};
    uint64_t seen_ms = mb_mono_ms();
    unsigned pause_ms = BACKOFF_MIN_MS;
    char *path = mb_job_path(id, "/logs/tail");
    char *url = path != NULL ? mb_asprintf("%s%s", rest->base_url, path) : NULL;
    int rc = url != NULL ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");

    *job = NULL;
    if (rc == 0 && mb_starts_with(rest->base_url, "https://"))
        rc = mb_err_set(err, MB_EUNSUPPORTED, "%s: logs can be followed over http only",
                        rest->base_url);
    while (rc == 0) {
        uint64_t before = f.printed_bytes;

        rc = stream(rest, url, &f, err);
        if (rc == 0 && f.broken_pipe)
            rc = mb_err_set(err, MB_EIO, "standard output is closed");
        if (rc == 0)
            rc = judge(rest, id, &f, &seen_ms, job, err);
        if (rc != 0)
            break;
        pause_ms = f.printed_bytes > before        ? BACKOFF_MIN_MS
                   : pause_ms * 2 > BACKOFF_MAX_MS ? BACKOFF_MAX_MS
                                                   : pause_ms * 2;
        poll(NULL, 0, (int)pause_ms);
    }
    mb_free(path);
    mb_free(url);
    return rc > 0 ? 0 : rc;
}
