/*
 *  1. start opens the log, writes Ray's two header lines, spawns, and reports RUNNING from a timer,
 *     so that no event comes from inside start.
 *  2. The child's end is reported with its status and, after a failure, the log's last lines.
 *  3. stop sends SIGTERM to the session, SIGKILL 3 s later.
 */
#include "shell_runner.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/fs.h"

struct driver {
    struct driver *next;
    struct shell_runner *r;
    uv_process_t process;
    uv_timer_t timer;
    char *id;
    char *log;
    int alive;
    int open_handles;
};

struct shell_runner {
    uv_loop_t *loop;
    char *dir;
    char node[64];
    char http[64];
    mb_job_event_cb cb;
    void *arg;
    struct driver *drivers;
    struct mb_job_runner iface;
};

static struct driver *find(struct shell_runner *r, const char *id)
{
    for (struct driver *d = r->drivers; d; d = d->next)
        if (strcmp(d->id, id) == 0)
            return d;
    return NULL;
}

static void set_listener(void *self, mb_job_event_cb cb, void *arg)
{
    struct shell_runner *r = self;

    r->cb = cb;
    r->arg = arg;
}

/* The last ten lines, as Ray quotes them. */
static char *last_lines(const char *path)
{
    struct mb_buf b = {0};
    char *out;

    if (mb_fs_read(path, 64 << 20, &b, NULL) != 0 || b.len == 0) {
        mb_buf_close(&b);
        return mb_strdup("");
    }
    size_t at = b.len, lines = 0;
    while (at > 0 && b.len - at < 20000) {
        if (b.data[at - 1] == '\n' && at != b.len && ++lines == 10)
            break;
        at--;
    }
    out = mb_strndup((const char *)b.data + at, b.len - at);
    mb_buf_close(&b);
    return out;
}

static void on_handle_closed(uv_handle_t *h)
{
    struct driver *d = h->data;

    d->open_handles--;
}

static void on_child_exit(uv_process_t *p, int64_t status, int signal_number)
{
    struct driver *d = p->data;
    int code = signal_number ? -signal_number : (int)status;
    char *tail = code != 0 ? last_lines(d->log) : NULL;
    struct mb_job_event e = {.submission_id = d->id,
                             .kind = MB_JOB_EVENT_EXITED,
                             .exit_code = code,
                             .text = "",
                             .log_tail = tail ? tail : ""};

    d->alive = 0;
    uv_close((uv_handle_t *)p, on_handle_closed);
    uv_close((uv_handle_t *)&d->timer, on_handle_closed);
    d->r->cb(d->r->arg, &e);
    mb_free(tail);
}

static void on_running(uv_timer_t *t)
{
    struct driver *d = t->data;
    struct mb_job_event e = {.submission_id = d->id,
                             .kind = MB_JOB_EVENT_RUNNING,
                             .pid = d->process.pid,
                             .text = "",
                             .log_tail = ""};

    d->r->cb(d->r->arg, &e);
}

static void on_kill(uv_timer_t *t)
{
    struct driver *d = t->data;

    if (d->alive)
        kill(-d->process.pid, SIGKILL);
}

static int start(void *self, const struct mb_job_spec *spec, struct mb_err *err)
{
    struct shell_runner *r = self;
    struct driver *d = mb_calloc(1, sizeof *d);
    char *argv[] = {"/bin/sh", "-c", (char *)(uintptr_t)spec->entrypoint, NULL};
    char *address = mb_asprintf("RAY_ADDRESS=%s", spec->ray_address);
    char *env[] = {"PATH=/usr/bin:/bin", "PYTHONUNBUFFERED=1", address, NULL};
    uv_stdio_container_t io[3] = {{.flags = UV_IGNORE}};

    if (!d)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    d->r = r;
    d->id = mb_strdup(spec->submission_id);
    d->log = mb_asprintf("%s/job-driver-%s.log", r->dir, d->id);
    int fd = open(d->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd < 0)
        return mb_err_sys(err, errno, "%s", d->log);
    dprintf(fd, "Runtime env is setting up.\nRunning entrypoint for job %s: %s\n", d->id,
            spec->entrypoint);
    io[1].flags = io[2].flags = UV_INHERIT_FD;
    io[1].data.fd = io[2].data.fd = fd;
    uv_process_options_t o = {.file = argv[0],
                              .args = argv,
                              .env = env,
                              .exit_cb = on_child_exit,
                              .stdio = io,
                              .stdio_count = 3,
                              .flags = UV_PROCESS_DETACHED};
    uv_timer_init(r->loop, &d->timer);
    d->timer.data = d->process.data = d;
    d->open_handles = 2;
    d->next = r->drivers;
    r->drivers = d;
    int rc = uv_spawn(r->loop, &d->process, &o);
    close(fd);
    mb_free(address);
    if (rc != 0) {
        uv_close((uv_handle_t *)&d->timer, on_handle_closed);
        uv_close((uv_handle_t *)&d->process, on_handle_closed);
        return mb_err_set(err, MB_EIO, "spawn: %s", uv_strerror(rc));
    }
    d->alive = 1;
    uv_timer_start(&d->timer, on_running, 0, 0);
    return 0;
}

static int stop(void *self, const char *id, struct mb_err *err)
{
    struct driver *d = find(self, id);

    if (!d || !d->alive)
        return mb_err_set(err, MB_ENOENT, "no driver");
    kill(-d->process.pid, SIGTERM);
    uv_timer_start(&d->timer, on_kill, 3000, 0);
    return 0;
}

static enum mb_job_adopt adopt(void *self, const char *id)
{
    return find(self, id) ? MB_JOB_ADOPT_RUNNING : MB_JOB_ADOPT_UNKNOWN;
}

static void stop_unwanted(void *self, int (*is_wanted)(void *arg, const char *id), void *arg)
{
    struct shell_runner *r = self;
    struct mb_err err;

    for (const struct driver *d = r->drivers; d; d = d->next)
        if (d->alive && !is_wanted(arg, d->id))
            stop(r, d->id, &err);
}

static int log_path(void *self, const char *id, char **out, struct mb_err *err)
{
    struct shell_runner *r = self;

    *out = mb_asprintf("%s/job-driver-%s.log", r->dir, id);
    if (!*out || !mb_fs_exists(*out)) {
        mb_free(*out);
        *out = NULL;
        return mb_err_set(err, MB_ENOENT, "no log yet");
    }
    return 0;
}

static void forget(void *self, const char *id)
{
    struct mb_err err = {0};
    char *path = NULL;

    if (log_path(self, id, &path, &err) == 0)
        unlink(path);
    mb_free(path);
}

static const char *http_address(void *self)
{
    return ((struct shell_runner *)self)->http;
}

static const char *node_id_hex(void *self)
{
    return ((struct shell_runner *)self)->node;
}

struct shell_runner *shell_runner_create(uv_loop_t *loop, const char *dir)
{
    struct shell_runner *r = mb_calloc(1, sizeof *r);

    if (!r)
        return NULL;
    r->loop = loop;
    r->dir = mb_strdup(dir);
    r->iface = (struct mb_job_runner){.self = r,
                                      .set_listener = set_listener,
                                      .start = start,
                                      .stop = stop,
                                      .adopt = adopt,
                                      .stop_unwanted = stop_unwanted,
                                      .log_path = log_path,
                                      .forget = forget,
                                      .http_address = http_address,
                                      .node_id_hex = node_id_hex};
    return r;
}

const struct mb_job_runner *shell_runner_get(const struct shell_runner *r)
{
    return &r->iface;
}

void shell_runner_set_node(struct shell_runner *r, const char *node, const char *http)
{
    snprintf(r->node, sizeof r->node, "%s", node);
    snprintf(r->http, sizeof r->http, "%s", http);
}

void shell_runner_stop(struct shell_runner *r)
{
    for (struct driver *d = r->drivers; d; d = d->next)
        if (d->alive)
            kill(-d->process.pid, SIGKILL);
}

void shell_runner_destroy(struct shell_runner *r)
{
    for (struct driver *d = r->drivers, *next; d; d = next) {
        next = d->next;
        mb_free(d->id);
        mb_free(d->log);
        mb_free(d);
    }
    mb_free(r->dir);
    mb_free(r);
}
