/*
 * One timer looks at every kept log and does what log_plan.c says.
 *
 *  1. add: PATH.idx is opened (new, or what an earlier agent left: nothing is sent or released
 *     twice).
 *  2. A piece is read and sent with one put; when it is durable, PATH.idx says so.
 *     Logs that have something to send take turns.
 *  3. A release: the new first byte, a line's beginning if one is near, goes into PATH.idx, is
 *     flushed, and then a pool thread punches the hole. Readers look at PATH.idx after they read.
 *  4. What was released before the store had it is said when it is let go of, and noted in
 *     PATH.gaps as soon as it is certain: an agent that comes after this one knows it.
 *  5. end: the rest is sent; cb. A store that takes nothing for wait_ms, or is not ready after
 *     WAITS times that, or when it is told to hurry, is given up with a warning. What is not in the
 *     store then, for that or because it was released first, is told before cb; without a store,
 *     what was released.
 *  6. Held: the store of a log that sends is closed, which ends its request, and opened again when
 *     there is something to send. The ends of logs, hurried or not, wait as long as it lasts.
 *
 *  The filesystem cannot punch holes: found out at start, not when the disk is full.
 *  The log or its index cannot be read or written: said once, the log itself goes on.
 */
#include "agent/log_keeper.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "agent/log_gaps.h"
#include "agent/log_plan.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/joblimit.h"
#include "base/log.h"
#include "base/logfile.h"
#include "base/s3/store.h"
#include "base/str.h"

enum {
    TICK_MS = 250,
    WAIT_MIN_MS = 1000,
    WAIT_MAX_MS = 3600 * 1000,
    WAITS = 4,      /* of wait_ms, whatever arrives */
    LATE_MS = 1000, /* then it is said for what it waits */
    PUT_MS = 60000,
    PUTS_MAX = 2, /* pieces in memory at a time */
    LINE_MAX_BYTES = 64 << 10,
    HOLE_BYTES = 4096,
    URL_MAX_BYTES = 2048
};

#define RAISES_CAP "MOBULA_LOG_MAX_BYTES or --log-max-bytes raises it"

struct mb_kept_log {
    struct mb_kept_log *next;
    struct mb_log_keeper *keeper;
    char *path, *key, *url_file;
    struct mb_logfile file; /* fd -1 until the log exists */
    int index_fd;
    struct mb_log_plan plan;
    struct mb_store *store;
    uint64_t ship_end;
    uv_work_t work;
    uint64_t hole_begin, hole_end;
    int hole_errno;
    int ending, dropped, complained;
    int cut_said; /* that bytes go which the store does not have */
    int waits;    /* for its turn to send */
    uint64_t wait_ms, ended_ms, end_by_ms;
    uint64_t last_by_ms; /* the end, whatever arrives */
    char *paused_url;    /* of a store that was closed by a hold */
    int pausing;
    uint64_t hurry_ms; /* the end by then, whatever arrives; 0: no such bound */
    uint64_t stop_ms;  /* the same, and not put off by a hold; 0: nobody stopped it */
    void (*late)(void *arg, const char *text);
    void (*lost)(void *arg, const char *text);
    void (*end_cb)(void *arg);
    void *end_arg;
    int closing_store;
};

struct mb_log_keeper {
    uv_loop_t *loop;
    uv_timer_t timer;
    uint64_t cap_bytes;
    struct mb_kept_log *logs;
    unsigned puts, n_freed;
    int held;
    int closing;
    void (*closed_cb)(void *arg);
    void *closed_arg;
};

static void look_after(struct mb_kept_log *log);

/* ---- life ---- */

/* Does this filesystem release the front of a file? */
static int can_punch(const char *dir)
{
    char *path = mb_asprintf("%s/punch-XXXXXX", dir);
    char page[2 * HOLE_BYTES] = {1};
    int fd = path != NULL ? mkostemp(path, O_CLOEXEC) : -1;
    int ok = fd >= 0 && write(fd, page, sizeof(page)) == (ssize_t)sizeof(page) &&
             fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, HOLE_BYTES) == 0;

    if (fd >= 0) {
        unlink(path);
        close(fd);
    }
    mb_free(path);
    return ok;
}

int mb_log_cap_parse(const char *value, int64_t *out, struct mb_err *err)
{
    uint64_t bytes;

    *out = -1;
    if (value == NULL)
        return MB_OK;
    if (mb_joblimit_log(value, "MOBULA_LOG_MAX_BYTES", &bytes, err) != MB_OK)
        return MB_EINVAL;
    *out = (int64_t)bytes;
    return MB_OK;
}

int mb_log_wait_parse(const char *value, uint64_t *out_ms, struct mb_err *err)
{
    *out_ms = 0;
    if (value == NULL)
        return MB_OK;
    if (mb_parse_duration_ms(value, "MOBULA_LOG_WAIT", out_ms, err) != MB_OK)
        return MB_EINVAL;
    if (*out_ms < WAIT_MIN_MS || *out_ms > WAIT_MAX_MS)
        return mb_err_set(err, MB_EINVAL, "MOBULA_LOG_WAIT=%s: 1s to 1h", value);
    return MB_OK;
}

static void on_tick(uv_timer_t *t)
{
    struct mb_log_keeper *k = t->data;

    for (struct mb_kept_log *log = k->logs, *next; log != NULL; log = next) {
        unsigned n_freed = k->n_freed;

        next = log->next;
        look_after(log);
        if (k->n_freed != n_freed) /* whoever was told of an end may have dropped the next one */
            next = k->logs;
    }
    if (k->logs == NULL)
        uv_timer_stop(&k->timer);
}

int mb_log_keeper_create(uv_loop_t *loop, const char *dir, int64_t cap_bytes,
                         struct mb_log_keeper **out, struct mb_err *err)
{
    struct mb_log_keeper *k;

    if (cap_bytes != 0 && !can_punch(dir)) {
        if (cap_bytes > 0)
            return mb_err_set(err, MB_EUNSUPPORTED,
                              "--log-max-bytes: the filesystem of %s cannot release the front of a "
                              "file; put --temp-dir on ext4, xfs, btrfs or tmpfs, or say "
                              "--log-max-bytes 0",
                              dir);
        mb_warn("logs",
                "the filesystem of %s cannot release the front of a file: LOGS ARE NOT CAPPED, a "
                "job that prints without end fills the disk",
                dir);
        cap_bytes = 0;
    }
    k = mb_calloc(1, sizeof(*k));
    if (k == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory for the log keeper");
    k->loop = loop;
    k->cap_bytes = cap_bytes < 0 ? MB_LOG_CAP_DEFAULT : (uint64_t)cap_bytes;
    uv_timer_init(loop, &k->timer);
    k->timer.data = k;
    *out = k;
    return MB_OK;
}

static void on_timer_closed(uv_handle_t *h)
{
    struct mb_log_keeper *k = h->data;

    k->closed_cb(k->closed_arg);
    mb_free(k);
}

static void maybe_closed(struct mb_log_keeper *k)
{
    if (k->closing && k->logs == NULL && !uv_is_closing((uv_handle_t *)&k->timer))
        uv_close((uv_handle_t *)&k->timer, on_timer_closed);
}

void mb_log_keeper_close(struct mb_log_keeper *k, void (*cb)(void *arg), void *arg)
{
    k->closing = 1;
    k->closed_cb = cb;
    k->closed_arg = arg;
    for (struct mb_kept_log *log = k->logs, *next; log != NULL; log = next) {
        next = log->next;
        mb_kept_log_drop(log);
    }
    maybe_closed(k);
}

/* ---- one log: its store and its end ---- */

static void free_log(struct mb_kept_log *log)
{
    struct mb_log_keeper *k = log->keeper;

    for (struct mb_kept_log **at = &k->logs; *at != NULL; at = &(*at)->next) {
        if (*at == log) {
            *at = log->next;
            break;
        }
    }
    k->n_freed++;
    mb_logfile_close(&log->file);
    if (log->index_fd >= 0)
        close(log->index_fd);
    mb_free(log->path);
    mb_free(log->key);
    mb_free(log->url_file);
    mb_free(log->paused_url);
    mb_free(log);
}

static void on_store_closed(void *arg)
{
    struct mb_kept_log *log = arg;
    struct mb_log_keeper *k = log->keeper;
    void (*cb)(void *) = log->end_cb;
    void *cb_arg = log->end_arg;
    int tell = log->ending && !log->dropped;

    log->store = NULL;
    free_log(log);
    if (tell)
        cb(cb_arg);
    maybe_closed(k);
}

/* Frees it, later if a transfer or a pool thread still holds it. 1: at once; one that has ended,
 * and whose store a hold has closed, is told so. */
static int let_go(struct mb_kept_log *log)
{
    struct mb_log_keeper *k = log->keeper;
    void (*cb)(void *) = log->end_cb;
    void *cb_arg = log->end_arg;
    int tell = log->ending && !log->dropped;

    if (log->plan.releasing || log->closing_store || log->pausing)
        return 0;
    if (log->store != NULL) {
        log->closing_store = 1;
        mb_store_close(log->store, on_store_closed, log);
        return 0;
    }
    free_log(log);
    if (tell)
        cb(cb_arg);
    maybe_closed(k);
    return 1;
}

static const char *url_of(const struct mb_kept_log *log)
{
    if (log->store != NULL)
        return mb_store_url(log->store);
    return log->paused_url != NULL ? log->paused_url : "the store";
}

static void complain(struct mb_kept_log *log, const char *text)
{
    if (!log->complained)
        mb_warn("logs", "%s: %s", log->path, text);
    log->complained = 1;
}

static int set_url(struct mb_kept_log *log, const char *url, struct mb_err *err)
{
    int rc;

    if (url == NULL || url[0] == '\0' || log->store != NULL)
        return MB_OK;
    rc = mb_store_open(log->keeper->loop, url, &log->store, err);
    if (rc == MB_OK) {
        log->plan.has_url = 1;
        log->plan.ship_ms = mb_mono_ms();
    }
    mb_free(log->url_file);
    log->url_file = NULL;
    return rc;
}

static void look_for_url(struct mb_kept_log *log)
{
    struct mb_buf text = {0};
    struct mb_err err;

    if (log->url_file == NULL || !mb_fs_exists(log->url_file))
        return;
    if (mb_fs_read(log->url_file, URL_MAX_BYTES, &text, &err) == MB_OK) {
        text.data[strcspn(mb_buf_str(&text), "\n")] = '\0';
        if (set_url(log, mb_buf_str(&text), &err) != MB_OK)
            complain(log, err.text);
    } else {
        complain(log, err.text);
    }
    mb_buf_close(&text);
}

/* ---- held ---- */

/* What waits for the store waits for the hold. */
static void put_off_end(struct mb_kept_log *log, uint64_t now_ms)
{
    log->end_by_ms = now_ms + log->wait_ms;
    log->last_by_ms = now_ms + WAITS * log->wait_ms;
}

static void on_paused(void *arg)
{
    struct mb_kept_log *log = arg;

    log->store = NULL;
    log->pausing = 0;
    if (log->dropped)
        let_go(log);
}

static void pause_log(struct mb_kept_log *log)
{
    log->paused_url = mb_strdup(mb_store_url(log->store));
    if (log->paused_url == NULL) /* it is sent to its end */
        return;
    log->pausing = 1;
    mb_store_close(log->store, on_paused, log);
}

static void end_pause(struct mb_kept_log *log)
{
    struct mb_err err;

    if (log->paused_url == NULL || log->pausing)
        return;
    if (mb_store_open(log->keeper->loop, log->paused_url, &log->store, &err) != MB_OK) {
        complain(log, err.text);
        return;
    }
    mb_free(log->paused_url);
    log->paused_url = NULL;
    mb_log_plan_hurry(&log->plan);
}

void mb_log_keeper_hold(struct mb_log_keeper *k, int hold)
{
    if (k->held == hold)
        return;
    k->held = hold;
    for (struct mb_kept_log *log = k->logs; log != NULL; log = log->next) {
        log->plan.held = hold;
        put_off_end(log, mb_mono_ms());
        if (hold && log->plan.shipping && !log->closing_store && !log->pausing)
            pause_log(log);
    }
    if (!hold && k->logs != NULL)
        uv_timer_start(&k->timer, on_tick, 0, TICK_MS);
}

uint64_t mb_log_keeper_owes(const struct mb_log_keeper *k)
{
    uint64_t bytes = 0;

    for (const struct mb_kept_log *log = k != NULL ? k->logs : NULL; log != NULL; log = log->next)
        if (log->file.fd >= 0)
            bytes += mb_log_plan_owes(&log->plan, mb_logfile_size(&log->file));
    return bytes;
}

/* ---- what is lost ---- */

static void save_gaps(struct mb_kept_log *log)
{
    struct mb_err err;

    if (mb_log_gaps_save(log->path, &log->plan, &err) != MB_OK)
        complain(log, err.text);
}

/* An earlier agent's. */
static int open_gaps(struct mb_kept_log *log, int is_new, struct mb_err *err)
{
    int rc = mb_log_gaps_open(log->path, is_new, &log->plan, err);

    if (rc == MB_OK || rc == MB_ENOMEM)
        return rc;
    complain(log, err->text);
    return MB_OK;
}

static void save_head(struct mb_kept_log *log)
{
    struct mb_logfile_head head = {log->plan.first, log->plan.shipped, log->plan.cap_bytes};
    struct mb_err err;

    if (mb_logfile_head_write(log->index_fd, &head, &err) != MB_OK)
        complain(log, err.text);
}

static void save_rewound(struct mb_kept_log *log)
{
    save_head(log);
    save_gaps(log);
}

/* ---- one log: begin ---- */

int mb_log_keeper_add(struct mb_log_keeper *k, const struct mb_kept_log_opts *opts,
                      struct mb_kept_log **out, struct mb_err *err)
{
    struct mb_kept_log *log = mb_calloc(1, sizeof(*log));
    struct mb_logfile_head head;
    int rc = MB_ENOMEM;

    if (log == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    log->keeper = k;
    log->wait_ms = opts->wait_ms > 0 ? opts->wait_ms : MB_LOG_WAIT_DEFAULT_MS;
    log->index_fd = -1;
    log->file = (struct mb_logfile){-1, -1};
    log->work.data = log;
    log->path = mb_strdup(opts->path);
    log->key = mb_strdup(opts->key);
    log->url_file = mb_strdup(opts->url_file);
    if (log->path == NULL || log->key == NULL || (opts->url_file != NULL && log->url_file == NULL))
        mb_err_set(err, rc, "out of memory");
    else
        rc = mb_logfile_index_open(opts->path, opts->is_new, &log->index_fd, err);
    if (rc == MB_OK)
        rc = mb_logfile_head_read(log->index_fd, &head);
    if (rc == MB_OK && opts->is_new) {
        head.cap_bytes = opts->cap_bytes < 0 ? k->cap_bytes : (uint64_t)opts->cap_bytes;
        rc = mb_logfile_head_write(log->index_fd, &head, err);
    }
    if (rc != MB_OK) {
        free_log(log);
        return rc;
    }
    mb_log_plan_init(&log->plan, head.first, head.shipped, head.cap_bytes);
    rc = open_gaps(log, opts->is_new, err);
    if (rc == MB_OK)
        rc = set_url(log, opts->url, err);
    if (rc != MB_OK) {
        free_log(log);
        return rc;
    }
    log->plan.held = k->held;
    log->next = k->logs;
    k->logs = log;
    if (!uv_is_active((uv_handle_t *)&k->timer))
        uv_timer_start(&k->timer, on_tick, TICK_MS, TICK_MS);
    *out = log;
    return MB_OK;
}

/* ---- sending ---- */

/* What was released before the store had it, for people. */
static void describe_gaps(const struct mb_kept_log *log, char *text, size_t n)
{
    const struct mb_log_plan *p = &log->plan;
    char more[64] = "";

    if (p->n_gaps > 1)
        snprintf(more, sizeof(more), ", but for %llu of them,",
                 (unsigned long long)(p->gap_end - p->gap_begin - p->gap_bytes));
    snprintf(
        text, n,
        "bytes %llu to %llu of its log%s are not in %.500s: they were released to keep the log "
        "below its cap of %llu bytes before the store had them; " RAISES_CAP,
        (unsigned long long)p->gap_begin, (unsigned long long)p->gap_end, more, url_of(log),
        (unsigned long long)p->cap_bytes);
}

/* This log had a place: the next one that waits for one has it, and only then this one again. */
static void next_turn(const struct mb_kept_log *log)
{
    const struct mb_log_keeper *k = log->keeper;
    struct mb_kept_log *other = log->next;

    if (k->held)
        return;
    while (other != log && (other == NULL || !other->waits))
        other = other == NULL ? k->logs : other->next;
    if (other == log)
        return;
    other->waits = 0;
    look_after(other);
}

static void on_put(void *arg, const struct mb_store_result *r)
{
    struct mb_kept_log *log = arg;
    unsigned n_gaps = log->plan.n_gaps;
    char text[700];

    log->keeper->puts--;
    if (r->error == MB_OK) {
        mb_log_plan_shipped(&log->plan, log->ship_end, mb_mono_ms());
        log->end_by_ms = mb_mono_ms() + log->wait_ms;
        if (log->plan.n_gaps > n_gaps)
            save_gaps(log); /* before the head: said twice is better than never */
        save_head(log);
        if (log->plan.n_gaps > n_gaps) {
            describe_gaps(log, text, sizeof(text));
            mb_warn("logs", "%s: %s", log->path, text);
        }
    } else {
        mb_log_plan_ship_failed(&log->plan, mb_mono_ms());
        if (r->error != MB_ECANCELED)
            complain(log, r->text);
    }
    next_turn(log);
    if (!log->dropped && !log->closing_store && !log->pausing)
        look_after(log);
}

/* The plan knows one that fails here as failed: it comes again. */
static void ship(struct mb_kept_log *log, uint64_t begin, uint64_t end)
{
    size_t n = (size_t)(end - begin);
    void *piece = log->keeper->puts < PUTS_MAX ? mb_alloc(n) : NULL;
    uint64_t at = begin;
    char key[512];
    struct mb_err err = {.text = "out of memory"};
    int rc = MB_ENOMEM;

    log->waits = 0;

    snprintf(key, sizeof(key), "logs/%s/%020llu.log", log->key, (unsigned long long)begin);
    if (piece != NULL && mb_logfile_read(&log->file, &at, piece, n) == (long)n && at == begin)
        rc = mb_store_put(log->store, key, piece, n, MB_STORE_ALWAYS, NULL, PUT_MS, on_put, log,
                          &err);
    if (rc == MB_OK) {
        log->keeper->puts++;
        log->ship_end = end;
    } else if (log->keeper->puts < PUTS_MAX) {
        mb_log_plan_ship_failed(&log->plan, mb_mono_ms());
        complain(log, err.text);
    } else { /* not our turn yet */
        log->plan.shipping = 0;
        log->plan.ship_ms = 0;
        log->waits = 1;
    }
    mb_free(piece);
}

/* ---- releasing ---- */

static void do_punch(uv_work_t *work)
{
    struct mb_kept_log *log = work->data;
    int fd, rc = mb_logfile_fd(log->path, O_WRONLY, &fd, NULL);

    log->hole_errno = rc == 0 ? 0 : rc == MB_ENOENT ? ENOENT : EINVAL;
    if (rc != 0)
        return;
    if (fdatasync(log->index_fd) != 0 ||
        fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)log->hole_begin,
                  (off_t)(log->hole_end - log->hole_begin)) != 0)
        log->hole_errno = errno;
    close(fd);
}

static void on_punched(uv_work_t *work, int status)
{
    struct mb_kept_log *log = work->data;

    (void)status;
    if (log->hole_errno != 0)
        complain(log, strerror(log->hole_errno));
    mb_log_plan_released(&log->plan, log->plan.first);
    if (log->dropped)
        let_go(log);
}

/* Where the line that holds the byte before `at` ends, if that is near. */
static uint64_t line_after(const struct mb_kept_log *log, uint64_t at)
{
    static char buf[LINE_MAX_BYTES]; /* loop thread only */
    ssize_t n = pread(log->file.fd, buf, sizeof(buf), (off_t)at);
    const char *newline = n > 0 ? memchr(buf, '\n', (size_t)n) : NULL;

    return newline != NULL ? at + (uint64_t)(newline - buf) + 1 : at;
}

static void release(struct mb_kept_log *log, uint64_t end)
{
    uint64_t from = log->plan.first - log->plan.first % HOLE_BYTES;

    /* With a store the border is one of its segments, so that the pieces there stay whole. */
    if (!log->plan.has_url)
        end = line_after(log, end);
    else if (end > log->plan.shipped && !log->cut_said) {
        log->cut_said = 1;
        mb_warn("logs",
                "%s: %.500s has it up to byte %llu only and does not keep up: its front goes up to "
                "byte %llu to keep it below twice its cap of %llu bytes",
                log->path, url_of(log), (unsigned long long)log->plan.shipped,
                (unsigned long long)end, (unsigned long long)log->plan.cap_bytes);
    }
    log->plan.first = end;
    save_head(log);
    log->hole_begin = from;
    log->hole_end = end - end % HOLE_BYTES;
    if (log->hole_end <= log->hole_begin ||
        uv_queue_work(log->keeper->loop, &log->work, do_punch, on_punched) != 0)
        mb_log_plan_released(&log->plan, end);
}

/* ---- the turn ---- */

static void say_late(struct mb_kept_log *log)
{
    void (*late)(void *arg, const char *text) = log->late;
    char text[700];

    log->late = NULL;
    snprintf(text, sizeof(text),
             "the rest of its log is on its way to %.500s, which is waited for while it takes "
             "something, else for %llu s",
             url_of(log), (unsigned long long)log->wait_ms / 1000);
    late(log->end_arg, text);
}

void mb_kept_log_hurry(struct mb_kept_log *log, uint64_t by_ms)
{
    log->hurry_ms = by_ms;
}

void mb_kept_log_stop(struct mb_kept_log *log, uint64_t by_ms)
{
    if (log->stop_ms == 0 || by_ms < log->stop_ms)
        log->stop_ms = by_ms;
}

void mb_kept_log_tell_late(struct mb_kept_log *log, void (*late)(void *arg, const char *text))
{
    log->late = late;
}

void mb_kept_log_tell_lost(struct mb_kept_log *log, void (*lost)(void *arg, const char *text))
{
    log->lost = lost;
}

static void tell_lost(struct mb_kept_log *log, const char *text)
{
    if (log->lost != NULL)
        log->lost(log->end_arg, text);
}

static void tell_gaps(struct mb_kept_log *log)
{
    char text[700];

    if (log->plan.n_gaps == 0)
        return;
    describe_gaps(log, text, sizeof(text));
    tell_lost(log, text);
}

/* Nowhere else are they. */
static void tell_released(struct mb_kept_log *log)
{
    char text[200];

    if (log->plan.first == 0)
        return;
    snprintf(text, sizeof(text),
             "the first %llu bytes of its log were released to keep it below its cap of %llu "
             "bytes; " RAISES_CAP,
             (unsigned long long)log->plan.first, (unsigned long long)log->plan.cap_bytes);
    tell_lost(log, text);
}

static void give_up(struct mb_kept_log *log, uint64_t size, uint64_t seconds)
{
    char text[700];

    snprintf(text, sizeof(text), "bytes %llu to %llu of its log did not reach %.500s within %llu s",
             (unsigned long long)log->plan.shipped, (unsigned long long)size, url_of(log),
             (unsigned long long)seconds);
    mb_warn("logs", "%s: %s", log->path, text);
    tell_lost(log, text);
}

static void look_after(struct mb_kept_log *log)
{
    struct mb_log_step step;
    uint64_t now_ms = mb_mono_ms(), size;
    struct mb_err err;

    if (log->dropped || log->closing_store || log->pausing)
        return;
    if (log->file.fd < 0 && mb_logfile_open(log->path, &log->file, &err) != MB_OK) {
        log->file.fd = -1;
        return;
    }
    look_for_url(log);
    if (log->keeper->held)
        put_off_end(log, now_ms);
    else
        end_pause(log);
    log->plan.held = log->keeper->held || (log->plan.has_url && log->store == NULL);
    size = mb_logfile_size(&log->file);
    step = mb_log_plan_next(&log->plan, size, log->ending, now_ms);
    if (step.rewound)
        save_rewound(log);
    if (step.index && mb_logfile_index_add(log->index_fd, size, mb_unix_ms(), &err) != MB_OK)
        complain(log, err.text);
    if (step.ship)
        ship(log, step.ship_begin, step.ship_end);
    if (step.release)
        release(log, step.release_end);
    if (!log->ending)
        return;
    if (mb_log_plan_done(&log->plan, size)) {
        tell_gaps(log);
        let_go(log);
    } else if (!log->plan.releasing &&
               (now_ms >= log->end_by_ms || now_ms >= log->last_by_ms ||
                (log->stop_ms > 0 && now_ms >= log->stop_ms) ||
                (log->hurry_ms > 0 && now_ms >= log->hurry_ms && !log->keeper->held))) {
        tell_gaps(log);
        give_up(log, size, (now_ms - log->ended_ms) / 1000);
        let_go(log);
    } else if (log->late != NULL && now_ms >= log->ended_ms + LATE_MS) {
        say_late(log);
    }
}

int mb_kept_log_end(struct mb_kept_log *log, void (*cb)(void *arg), void *arg)
{
    struct mb_log_step step;
    struct mb_err err;
    uint64_t size;

    if (log->file.fd < 0 && mb_logfile_open(log->path, &log->file, &err) != MB_OK) {
        log->file.fd = -1;
        mb_kept_log_drop(log);
        return 1;
    }
    look_for_url(log);
    log->end_arg = arg;
    if (!log->plan.has_url) {
        size = mb_logfile_size(&log->file);
        step = mb_log_plan_next(&log->plan, size, 1, mb_mono_ms());
        if (step.rewound)
            save_rewound(log);
        if (step.index)
            mb_logfile_index_add(log->index_fd, size, mb_unix_ms(), &err);
        if (step.release)
            release(log, step.release_end); /* goes on without us */
        tell_released(log);
        mb_kept_log_drop(log);
        return 1;
    }
    log->ending = 1;
    log->ended_ms = mb_mono_ms();
    put_off_end(log, log->ended_ms);
    mb_log_plan_hurry(&log->plan);
    log->end_cb = cb;
    /* The next turn of the loop, since cb must not run inside this call. */
    uv_timer_start(&log->keeper->timer, on_tick, 0, TICK_MS);
    return 0;
}

void mb_kept_log_drop(struct mb_kept_log *log)
{
    if (log == NULL || log->dropped)
        return;
    log->dropped = 1;
    let_go(log);
}
