/*
 * Serving log files to Ray's tools, and to the head of our own.
 *
 *  1. ListLogs: names relative to the root, at most three directories deep, that match the glob;
 *     at most LIST_MAX of them.
 *  2. StreamLog: the last `lines` lines (1000 if not said, -1: all) or [start_offset, end_offset),
 *     in chunks of 64 KiB; with keep_alive the file is followed until the caller goes away.
 *  3. An unsafe or absent name: NOT_FOUND that names it. A slow reader: nothing is read while 1 MiB
 *     waits in the stream.
 *  4. mobula.v1 ReadLog: one piece at a time, so the asker sets the pace. At the end of the file it
 *     waits for more; at most WAITS_MAX callers do, more are answered at once.
 */
#include "agent/log_service.h"

#include <dirent.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/logfile.h"
#include "base/str.h"
#include "proto/mobula/agent.pb-c.h"
#include "proto/ray/reporter.pb-c.h"

enum {
    LIST_MAX = 1000,
    DEPTH_MAX = 3,
    CHUNK = 64 << 10,
    QUEUE_MAX = 1 << 20,
    CHUNKS_PER_TURN = 16,
    TICK_MS = 200,
    DEFAULT_LINES = 1000,
    READ_MAX_BYTES = 256 << 10,
    READ_TIMES_MAX = 4096,
    WAITS_MAX = 1024,
    WAIT_MAX_MS = 10000,
    WAIT_LOOK_MS = 50
};

int mb_log_name_is_safe(const char *name)
{
    for (const char *part = name; part != NULL; part = strchr(part, '/')) {
        part += *part == '/';
        if (strncmp(part, "..", 2) == 0 && (part[2] == '/' || part[2] == '\0'))
            return 0;
    }
    return name[0] != '\0' && name[0] != '/' && mb_ends_with(name, ".log");
}

int mb_log_exists(const char *root, const char *name)
{
    char *path = mb_log_name_is_safe(name) ? mb_path_join(root, name) : NULL;
    int exists = path != NULL && mb_fs_exists(path);

    mb_free(path);
    return exists;
}

/* ---- ListLogs ---- */

struct listing {
    const char *glob;
    char *names[LIST_MAX];
    size_t n;
};

static void list_dir(struct listing *l, const char *root, const char *below, int depth)
{
    char *path = mb_path_join(root, below);
    DIR *dir = path != NULL ? opendir(path) : NULL;
    struct dirent *e;

    while (dir != NULL && l->n < LIST_MAX && (e = readdir(dir)) != NULL) {
        char *name;

        if (e->d_name[0] == '.')
            continue;
        name = below[0] != '\0' ? mb_path_join(below, e->d_name) : mb_strdup(e->d_name);
        if (name == NULL)
            break;
        if (e->d_type == DT_DIR && depth < DEPTH_MAX)
            list_dir(l, root, name, depth + 1);
        if (e->d_type == DT_REG && mb_log_name_is_safe(name) &&
            (l->glob[0] == '\0' || fnmatch(l->glob, name, 0) == 0) && l->n < LIST_MAX)
            l->names[l->n++] = name;
        else
            mb_free(name);
    }
    if (dir != NULL)
        closedir(dir);
    mb_free(path);
}

static void on_list(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    const struct mb_log_service *s = arg;
    const Ray__Rpc__ListLogsRequest *q = (const void *)request;
    Ray__Rpc__ListLogsReply reply = RAY__RPC__LIST_LOGS_REPLY__INIT;
    struct listing *l = mb_calloc(1, sizeof(*l));

    if (l == NULL) {
        mb_grpc_reply_error(req, MB_GRPC_RESOURCE_EXHAUSTED, "the agent is out of memory");
        return;
    }
    l->glob = q->glob_filter;
    list_dir(l, s->root, "", 0);
    reply.log_files = l->names;
    reply.n_log_files = l->n;
    mb_grpc_reply(req, &reply.base);
    for (size_t i = 0; i < l->n; i++)
        mb_free(l->names[i]);
    mb_free(l);
}

/* ---- StreamLog ---- */

struct reader {
    const struct mb_log_service *service;
    struct mb_grpc_stream *stream;
    int fd; /* -1: no request yet */
    int64_t at;
    int64_t end; /* -1: the end of the file */
    int keep_alive;
    uv_timer_t timer;
};

/* Where the last n lines begin. */
static int64_t last_lines(int fd, int64_t size, int32_t lines)
{
    char chunk[4096];
    int64_t at = size;
    int32_t left = lines;

    if (lines < 0)
        return 0;
    while (at > 0) {
        size_t want = at < (int64_t)sizeof(chunk) ? (size_t)at : sizeof(chunk);
        ssize_t got = pread(fd, chunk, want, at - (int64_t)want);

        if (got != (ssize_t)want)
            return 0;
        for (size_t i = want; i-- > 0;)
            if (chunk[i] == '\n' && at - (int64_t)want + (int64_t)i != size - 1 && --left <= 0)
                return at - (int64_t)want + (int64_t)i + 1;
        at -= (int64_t)want;
    }
    return 0;
}

static void on_tick(uv_timer_t *t)
{
    struct reader *r = t->data;
    char chunk[CHUNK];

    for (int i = 0; i < CHUNKS_PER_TURN; i++) {
        Ray__Rpc__StreamLogReply reply = RAY__RPC__STREAM_LOG_REPLY__INIT;
        size_t want = sizeof(chunk);
        ssize_t got;

        if (mb_grpc_stream_queued_bytes(r->stream) > QUEUE_MAX)
            return;
        if (r->end >= 0 && r->end - r->at < (int64_t)want)
            want = r->end > r->at ? (size_t)(r->end - r->at) : 0;
        got = pread(r->fd, chunk, want, r->at);
        if (got <= 0) {
            if (!r->keep_alive || r->end >= 0)
                mb_grpc_stream_finish(r->stream, MB_GRPC_OK, "");
            return;
        }
        reply.data.data = (uint8_t *)chunk;
        reply.data.len = (size_t)got;
        if (mb_grpc_stream_send(r->stream, &reply.base, NULL) != MB_OK)
            return;
        r->at += got;
    }
}

static void on_request(void *arg, struct mb_grpc_stream *s, const ProtobufCMessage *msg)
{
    struct reader *r = arg;
    const Ray__Rpc__StreamLogRequest *q = (const void *)msg;
    char *path;
    struct stat st;

    if (r->fd >= 0)
        return;
    path = mb_log_name_is_safe(q->log_file_name) ? mb_path_join(r->service->root, q->log_file_name)
                                                 : NULL;
    if (path != NULL && mb_logfile_fd(path, O_RDONLY, &r->fd, NULL) != 0)
        r->fd = -1;
    mb_free(path);
    if (r->fd < 0 || fstat(r->fd, &st) != 0) {
        char text[300];

        snprintf(text, sizeof(text), "no log file %.200s on this node", q->log_file_name);
        mb_grpc_stream_finish(s, MB_GRPC_NOT_FOUND, text);
        return;
    }
    r->keep_alive = q->keep_alive;
    r->end = q->_end_offset_case ? q->end_offset : -1;
    r->at = q->_start_offset_case
                ? q->start_offset
                : last_lines(r->fd, st.st_size, q->_lines_case ? q->lines : DEFAULT_LINES);
    uv_timer_start(&r->timer, on_tick, 0, TICK_MS);
}

static void on_timer_closed(uv_handle_t *h)
{
    mb_free(h->data);
}

static void on_end(void *arg, struct mb_grpc_stream *s, int status, const char *detail)
{
    struct reader *r = arg;

    (void)s;
    (void)status;
    (void)detail;
    if (r->fd >= 0)
        close(r->fd);
    uv_close((uv_handle_t *)&r->timer, on_timer_closed);
}

static const struct mb_grpc_stream_ops stream_ops = {on_request, NULL, on_end};

static void on_stream(void *arg, struct mb_grpc_stream *s)
{
    struct mb_log_service *service = arg;
    struct reader *r = mb_calloc(1, sizeof(*r));

    if (r == NULL) {
        mb_grpc_stream_finish(s, MB_GRPC_RESOURCE_EXHAUSTED, "the agent is out of memory");
        return;
    }
    r->service = service;
    r->stream = s;
    r->fd = -1;
    uv_timer_init(service->loop, &r->timer);
    r->timer.data = r;
    mb_grpc_stream_accept(s, &ray__rpc__stream_log_request__descriptor, &stream_ops, r);
}

/* ---- ReadLog ---- */

/* A call that waits for more output. */
struct mb_log_wait {
    struct mb_log_wait *next;
    struct mb_log_service *service;
    struct mb_grpc_req *req;
    struct mb_logfile file;
    uint64_t offset, until_ms;
    uint32_t max_bytes;
    int gone;
    uv_timer_t timer;
};

static void reply_times(const struct mb_logfile *f, uint64_t from, Mobula__V1__ReadLogReply *reply)
{
    static struct mb_logfile_time times[READ_TIMES_MAX]; /* loop thread only */
    static uint64_t offsets[READ_TIMES_MAX], unix_ms[READ_TIMES_MAX];
    size_t n = mb_logfile_times(f, from, times, READ_TIMES_MAX);

    for (size_t i = 0; i < n; i++) {
        offsets[i] = times[i].offset;
        unix_ms[i] = times[i].unix_ms;
    }
    reply->n_time_offsets = reply->n_times_unix_ms = n;
    reply->time_offsets = offsets;
    reply->times_unix_ms = unix_ms;
}

static void reply_piece(struct mb_grpc_req *req, const struct mb_logfile *f, uint64_t offset,
                        uint32_t max_bytes, int times)
{
    static uint8_t piece[READ_MAX_BYTES]; /* loop thread only */
    Mobula__V1__ReadLogReply reply = MOBULA__V1__READ_LOG_REPLY__INIT;
    size_t max = max_bytes < sizeof(piece) ? max_bytes : sizeof(piece);
    long n = mb_logfile_read(f, &offset, piece, max);

    if (n < 0) {
        mb_grpc_reply_error(req, MB_GRPC_INTERNAL, "the log cannot be read");
        return;
    }
    if ((size_t)n == sizeof(piece)) /* text is cut at whole characters */
        n = (long)mb_utf8_floor(piece, (size_t)n);
    reply.offset = offset;
    reply.data.data = piece;
    reply.data.len = (size_t)n;
    reply.first_offset = mb_logfile_first(f);
    reply.size = mb_logfile_size(f);
    if (times)
        reply_times(f, offset, &reply);
    mb_grpc_reply(req, &reply.base);
}

static void on_wait_closed(uv_handle_t *h)
{
    mb_free(h->data);
}

static void end_wait(struct mb_log_wait *w)
{
    struct mb_log_service *s = w->service;

    for (struct mb_log_wait **at = &s->waits; *at != NULL; at = &(*at)->next) {
        if (*at == w) {
            *at = w->next;
            break;
        }
    }
    s->n_waits--;
    reply_piece(w->req, &w->file, w->offset, w->max_bytes, 0);
    mb_logfile_close(&w->file);
    uv_close((uv_handle_t *)&w->timer, on_wait_closed);
}

static void on_wait_look(uv_timer_t *t)
{
    struct mb_log_wait *w = t->data;

    if (w->gone || mb_mono_ms() >= w->until_ms || mb_logfile_size(&w->file) != w->offset)
        end_wait(w);
}

void mb_log_service_close(struct mb_log_service *s)
{
    s->is_closing = 1;
    while (s->waits != NULL)
        end_wait(s->waits);
}

static void on_wait_cancel(void *arg)
{
    struct mb_log_wait *w = arg;

    w->gone = 1; /* answered at the next look */
}

/* Takes the file; 0: cannot, ask again. */
static int begin_wait(struct mb_log_service *s, struct mb_grpc_req *req, const struct mb_logfile *f,
                      const Mobula__V1__ReadLogRequest *q, uint64_t offset)
{
    struct mb_log_wait *w =
        s->n_waits < WAITS_MAX && !s->is_closing ? mb_calloc(1, sizeof(*w)) : NULL;
    uint32_t wait_ms = q->wait_ms < WAIT_MAX_MS ? q->wait_ms : WAIT_MAX_MS;

    if (w == NULL)
        return 0;
    *w = (struct mb_log_wait){.next = s->waits,
                              .service = s,
                              .req = req,
                              .file = *f,
                              .offset = offset,
                              .until_ms = mb_mono_ms() + wait_ms,
                              .max_bytes = q->max_bytes};
    s->waits = w;
    s->n_waits++;
    uv_timer_init(s->loop, &w->timer);
    w->timer.data = w;
    uv_timer_start(&w->timer, on_wait_look, WAIT_LOOK_MS, WAIT_LOOK_MS);
    mb_grpc_req_on_cancel(req, on_wait_cancel, w);
    return 1;
}

static void on_read(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_log_service *s = arg;
    const Mobula__V1__ReadLogRequest *q = (const void *)request;
    char *path = mb_log_name_is_safe(q->name) ? mb_path_join(s->root, q->name) : NULL;
    struct mb_logfile f;
    struct mb_err err;
    uint64_t offset = q->offset;

    if (path == NULL || mb_logfile_open(path, &f, &err) != MB_OK) {
        mb_grpc_reply_error(req, MB_GRPC_NOT_FOUND, "no log file %.200s on this node", q->name);
        mb_free(path);
        return;
    }
    mb_free(path);
    if (q->since_unix_ms > 0)
        offset = mb_logfile_since(&f, q->since_unix_ms);
    else if (q->tail_lines > 0)
        offset = mb_logfile_last_lines(&f, q->tail_lines);
    if (offset > mb_logfile_size(&f))
        offset = mb_logfile_size(&f);
    if (q->wait_ms > 0 && q->max_bytes > 0 && mb_logfile_size(&f) == offset &&
        begin_wait(s, req, &f, q, offset))
        return;
    reply_piece(req, &f, offset, q->max_bytes, q->times);
    mb_logfile_close(&f);
}

static const struct mb_grpc_method methods[] = {
    {"/mobula.v1.NodeAgent/ReadLog", &mobula__v1__read_log_request__descriptor, on_read, NULL, 0},
    {"/ray.rpc.LogService/ListLogs", &ray__rpc__list_logs_request__descriptor, on_list, NULL, 0},
    {"/ray.rpc.LogService/StreamLog", &ray__rpc__stream_log_request__descriptor, NULL, on_stream,
     0},
};

int mb_log_service_add(struct mb_grpc_server *srv, struct mb_log_service *s, struct mb_err *err)
{
    return mb_grpc_server_add(srv, methods, sizeof(methods) / sizeof(methods[0]), s, err);
}
