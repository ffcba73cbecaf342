/*
 * Serving log files to Ray's tools.
 *
 *  1. ListLogs: names relative to the root, at most three directories deep, that match the glob;
 *     at most LIST_MAX of them.
 *  2. StreamLog: the last `lines` lines (1000 if not said, -1: all) or [start_offset, end_offset),
 *     in chunks of 64 KiB; with keep_alive the file is followed until the caller goes away.
 *  3. An unsafe or absent name: NOT_FOUND that names it. A slow reader: nothing is read while 1 MiB
 *     waits in the stream.
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
#include "base/fs.h"
#include "base/str.h"
#include "proto/ray/reporter.pb-c.h"

enum {
    LIST_MAX = 1000,
    DEPTH_MAX = 3,
    CHUNK = 64 << 10,
    QUEUE_MAX = 1 << 20,
    CHUNKS_PER_TURN = 16,
    TICK_MS = 200,
    DEFAULT_LINES = 1000
};

int mb_log_name_is_safe(const char *name)
{
    return name[0] != '\0' && name[0] != '/' && strstr(name, "..") == NULL &&
           mb_ends_with(name, ".log");
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
    if (path != NULL)
        r->fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
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

static const struct mb_grpc_method methods[] = {
    {"/ray.rpc.LogService/ListLogs", &ray__rpc__list_logs_request__descriptor, on_list, NULL, 0},
    {"/ray.rpc.LogService/StreamLog", &ray__rpc__stream_log_request__descriptor, NULL, on_stream,
     0},
};

int mb_log_service_add(struct mb_grpc_server *srv, struct mb_log_service *s, struct mb_err *err)
{
    return mb_grpc_server_add(srv, methods, sizeof(methods) / sizeof(methods[0]), s, err);
}
