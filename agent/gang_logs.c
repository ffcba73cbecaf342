/*
 * Log files to the driver: the supervisor writes each rank's output straight to a file; here it is
 * read behind and sent as chunks with offsets.
 *
 *  1. Back-pressure: nothing is read while more than MB_GANG_LOG_QUEUE_MAX bytes wait in the
 * stream. The file holds what the driver has not taken; nothing is dropped.
 *  2. Chunks end at a line end where there is one. A line without end is sent when it has not
 *     grown for half a second, or its rank is gone.
 *  3. No driver: nothing is read; a new Hello says where to go on.
 *  4. The cap let go of bytes that were not read yet: the next chunk begins behind them.
 *  5. Beside that every log is kept (log_keeper.h) from its start; Ended waits until it is sent and
 *     says what is lost of it.
 */
#include "agent/gang_run.h"

#include <string.h>
#include "base/alloc.h"
#include "base/log.h"
#include "base/str.h"

enum { PARTIAL_LINE_MS = 500, CHUNKS_PER_TICK = 16 };

static int open_log(struct mb_gang_rank *rank)
{
    struct mb_err err;
    char *path;

    if (rank->log.fd >= 0)
        return 1;
    path = mb_gang_log_path(rank->run, rank->rank);
    if (path != NULL)
        mb_logfile_open(path, &rank->log, &err);
    mb_free(path);
    return rank->log.fd >= 0;
}

/* How many of the n bytes to send now. */
static size_t whole_lines(struct mb_gang_rank *rank, const uint8_t *p, size_t n, uint64_t now_ms)
{
    const uint8_t *end = memrchr(p, '\n', n);
    uint64_t size = rank->log_offset + n;

    if (end == NULL)
        end = memrchr(p, '\r', n);
    if (end != NULL)
        return (size_t)(end - p) + 1;
    if (rank->exited || now_ms == UINT64_MAX)
        return n;
    if (n == MB_GANG_LOG_CHUNK_MAX)
        return mb_utf8_floor(p, n);
    if (size != rank->log_seen_size) {
        rank->log_seen_size = size;
        rank->log_seen_ms = now_ms;
        return 0;
    }
    return now_ms - rank->log_seen_ms >= PARTIAL_LINE_MS ? n : 0;
}

/* One chunk; 1 if there may be more. */
static int pump_one(struct mb_gang_rank *rank, uint64_t now_ms)
{
    struct mb_gang_run *r = rank->run;
    uint8_t *p = r->owner->scratch;
    uint64_t at = rank->log_offset;
    long got = mb_logfile_read(&rank->log, &at, p, MB_GANG_LOG_CHUNK_MAX);
    size_t n;

    if (got <= 0 || at < rank->log_offset) /* truncated by its writer: until it is as long again */
        return 0;
    rank->log_offset = at;
    n = whole_lines(rank, p, (size_t)got, now_ms);
    if (n == 0 || mb_control_log(r, rank->rank, rank->log_offset, p, n) != MB_OK)
        return 0;
    rank->log_offset += n;
    return 1;
}

void mb_gang_logs_pump(struct mb_gang_run *r, uint64_t now_ms)
{
    if (r->stream == NULL)
        return;
    for (size_t i = 0; i < r->n_ranks; i++) {
        struct mb_gang_rank *rank = &r->ranks[i];
        int left = CHUNKS_PER_TICK;

        if (!open_log(rank))
            continue;
        while (left-- > 0 && r->stream != NULL &&
               mb_grpc_stream_queued_bytes(r->stream) < MB_GANG_LOG_QUEUE_MAX &&
               pump_one(rank, now_ms))
            ;
    }
}

int mb_gang_logs_drained(const struct mb_gang_rank *rank)
{
    return rank->log.fd < 0 || mb_logfile_size(&rank->log) <= rank->log_offset;
}

/* ---- cap and store ---- */

static int keep(struct mb_gang_rank *rank, int is_new, const char *max_bytes, const char *wait,
                struct mb_err *err)
{
    const struct mb_gang_run *r = rank->run;
    char *path = mb_gang_log_path(r, rank->rank);
    char *key = mb_asprintf("%s/rank-%u/%u", r->job_id, rank->rank, r->attempt);
    struct mb_kept_log_opts opts = {.path = path, .is_new = is_new, .key = key, .url = r->url};
    int rc = path != NULL && key != NULL ? MB_OK : mb_err_set(err, MB_ENOMEM, "out of memory");

    if (rc == MB_OK)
        rc = mb_log_cap_parse(max_bytes, &opts.cap_bytes, err);
    if (rc == MB_OK)
        rc = mb_log_wait_parse(wait, &opts.wait_ms, err);
    if (rc == MB_OK)
        rc = mb_log_keeper_add(r->owner->opts.logs, &opts, &rank->kept, err);
    mb_free(path);
    mb_free(key);
    return rc;
}

int mb_gang_logs_keep(struct mb_gang_rank *rank, const char *max_bytes, const char *wait,
                      struct mb_err *err)
{
    return keep(rank, 1, max_bytes, wait, err);
}

void mb_gang_logs_adopt(struct mb_gang_run *r)
{
    struct mb_err err;

    for (size_t i = 0; i < r->n_ranks; i++)
        if (keep(&r->ranks[i], 0, NULL, NULL, &err) != MB_OK)
            mb_warn("gang", "rank=%u: its log is neither capped nor sent: %s", r->ranks[i].rank,
                    err.text);
}

static void on_lost(void *arg, const char *text)
{
    struct mb_gang_rank *rank = arg;
    char *both = rank->lost != NULL ? mb_asprintf("%s; %s", rank->lost, text) : mb_strdup(text);

    if (both == NULL)
        return; /* the agent's log has it */
    mb_free(rank->lost);
    rank->lost = both;
}

static void on_sent(void *arg)
{
    struct mb_gang_rank *rank = arg;

    rank->kept = NULL;
}

void mb_gang_logs_end(struct mb_gang_run *r)
{
    uint64_t by_ms;

    for (size_t i = 0; i < r->n_ranks; i++) {
        struct mb_gang_rank *rank = &r->ranks[i];

        if (rank->kept == NULL)
            continue;
        mb_kept_log_tell_lost(rank->kept, on_lost);
        if (mb_kept_log_end(rank->kept, on_sent, rank))
            rank->kept = NULL;
    }
    by_ms = mb_gang_deadline_of_logs(r);
    if (by_ms > 0 && (r->logs_by_ms == 0 || by_ms < r->logs_by_ms))
        r->logs_by_ms = by_ms;
    if (r->logs_by_ms > 0)
        mb_gang_logs_hurry(r, r->logs_by_ms);
}

void mb_gang_logs_hurry(struct mb_gang_run *r, uint64_t by_ms)
{
    if (r->logs_by_ms == 0 || r->logs_by_ms > by_ms)
        r->logs_by_ms = by_ms;
    if (r->ended_by_ms > by_ms)
        r->ended_by_ms = by_ms;
    for (size_t i = 0; i < r->n_ranks; i++)
        if (r->ranks[i].kept != NULL)
            mb_kept_log_hurry(r->ranks[i].kept, by_ms);
}

void mb_gang_logs_stay(struct mb_gang_run *r)
{
    r->logs_by_ms = 0;
    for (size_t i = 0; i < r->n_ranks; i++)
        if (r->ranks[i].kept != NULL)
            mb_kept_log_hurry(r->ranks[i].kept, 0);
}

int mb_gang_logs_sent(const struct mb_gang_run *r)
{
    for (size_t i = 0; i < r->n_ranks; i++)
        if (r->ranks[i].kept != NULL)
            return 0;
    return 1;
}

int mb_gang_logs_owe(const struct mb_gang_run *r)
{
    for (size_t i = 0; i < r->n_ranks; i++)
        if (r->ranks[i].kept != NULL || r->ranks[i].lost != NULL)
            return 1;
    return 0;
}

void mb_gang_logs_drop(struct mb_gang_run *r)
{
    for (size_t i = 0; i < r->n_ranks; i++) {
        mb_kept_log_drop(r->ranks[i].kept);
        r->ranks[i].kept = NULL;
        mb_free(r->ranks[i].lost);
        r->ranks[i].lost = NULL;
    }
}
