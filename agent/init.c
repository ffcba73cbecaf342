/*
 * The agent's connection to the front process.
 *
 *  1. open: the inherited socket becomes non-blocking and is watched;
 *  2. spawn: the request goes out at once, the caller is remembered by the path of its spec;
 *  3. an answer "ok" or "error" finds its caller by that path and is told;
 *  4. EOF: the front process is gone; whoever waits is told so, then on_lost runs once;
 *  5. close: whoever waits gets MB_ECANCELED, then the socket closes.
 * A caller that lost interest detaches: its answer is dropped. One that waited too long has what
 * was spawned killed, too.
 */
#include "agent/init.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "agent/supervise/protocol.h"
#include "agent/supervise/state.h"
#include "agent/supervisor.h"
#include "base/alloc.h"
#include "base/log.h"
#include "base/str.h"

struct mb_init {
    uv_poll_t poll;
    int fd;
    int lost, closing;
    int64_t pid;
    uint64_t start_ticks;
    uint64_t launch_timeout_ms;    /* 0: the default */
    struct mb_init_spawn *waiting; /* newest first */
    void (*on_lost)(void *arg);
    void *on_lost_arg;
    void (*on_closed)(void *arg);
    void *on_closed_arg;
};

static void finish(struct mb_init *init, struct mb_init_spawn *spawn, const struct mb_err *err)
{
    mb_init_spawn_detach(init, spawn);
    spawn->cb(spawn->arg, err);
}

static void fail_all(struct mb_init *init, int code, const char *text)
{
    while (init->waiting != NULL) {
        struct mb_err err;

        mb_err_set(&err, code, "%s", text);
        finish(init, init->waiting, &err);
    }
}

static void lost(struct mb_init *init)
{
    init->lost = 1;
    uv_poll_stop(&init->poll);
    fail_all(init, MB_EUNAVAIL, "mobula-init is gone");
    if (!init->closing && init->on_lost != NULL)
        init->on_lost(init->on_lost_arg);
}

/* "ok PID PATH" or "error PATH\nTEXT" */
static void take_answer(struct mb_init *init, char *packet)
{
    struct mb_err err = {0};
    char *path, *text = NULL;

    if (mb_starts_with(packet, "ok ")) {
        path = strchr(packet + 3, ' ');
        path = path != NULL ? path + 1 : NULL;
    } else if (mb_starts_with(packet, "error ")) {
        path = packet + 6;
        text = strchr(path, '\n');
        if (text != NULL)
            *text++ = '\0';
        mb_err_set(&err, MB_ESTATE, "%s", text != NULL ? text : "mobula-init refused");
    } else {
        path = NULL;
    }
    for (struct mb_init_spawn *w = init->waiting; w != NULL && path != NULL; w = w->next) {
        if (strcmp(w->path, path) == 0) {
            finish(init, w, text != NULL ? &err : NULL);
            return;
        }
    }
    mb_warn("init", "an answer that nobody waits for: %.200s", packet);
}

static void on_readable(uv_poll_t *handle, int status, int events)
{
    struct mb_init *init = handle->data;
    char packet[MB_SUP_PACKET_MAX + MB_SUP_TEXT_MAX + 1];

    (void)events;
    if (status < 0) {
        lost(init);
        return;
    }
    while (!init->lost && !init->closing) {
        ssize_t n = recv(init->fd, packet, sizeof(packet) - 1, MSG_DONTWAIT);

        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (n <= 0) {
            lost(init);
            return;
        }
        packet[n] = '\0';
        take_answer(init, packet);
    }
}

int mb_init_open(uv_loop_t *loop, void (*on_lost)(void *arg), void *arg, struct mb_init **out,
                 struct mb_err *err)
{
    const char *value = getenv(MB_INIT_FD_ENV);
    struct mb_init *init;
    int64_t fd;
    int rc;

    if (value == NULL)
        return mb_err_set(err, MB_ENOENT, "%s is not set: start the agent through mobula-init",
                          MB_INIT_FD_ENV);
    if (mb_parse_i64(value, 3, 1 << 20, MB_INIT_FD_ENV, &fd, err) != 0)
        return MB_EINVAL;
    if (fcntl((int)fd, F_SETFD, FD_CLOEXEC) != 0 || fcntl((int)fd, F_SETFL, O_NONBLOCK) != 0)
        return mb_err_sys(err, errno, "%s %d", MB_INIT_FD_ENV, (int)fd);
    init = mb_calloc(1, sizeof(*init));
    if (init == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    init->fd = (int)fd;
    init->pid = getppid();
    init->start_ticks = mb_sup_start_ticks(init->pid);
    init->on_lost = on_lost;
    init->on_lost_arg = arg;
    rc = uv_poll_init(loop, &init->poll, init->fd);
    if (rc != 0) {
        mb_free(init);
        return mb_err_set(err, MB_EIO, "%s %d: %s", MB_INIT_FD_ENV, (int)fd, uv_strerror(rc));
    }
    init->poll.data = init;
    uv_poll_start(&init->poll, UV_READABLE, on_readable);
    *out = init;
    return 0;
}

static int send_text(struct mb_init *init, const char *text, struct mb_err *err)
{
    if (init->lost || init->closing)
        return mb_err_set(err, MB_EUNAVAIL, "mobula-init is gone");
    if (send(init->fd, text, strlen(text), MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
        return mb_err_sys(err, errno, "request to mobula-init");
    return 0;
}

int mb_init_ready(struct mb_init *init, struct mb_err *err)
{
    return send_text(init, "ready", err);
}

void mb_init_identity(const struct mb_init *init, int64_t *pid, uint64_t *start_ticks)
{
    *pid = init->pid;
    *start_ticks = init->start_ticks;
}

void mb_init_set_launch_timeout(struct mb_init *init, uint64_t timeout_ms)
{
    init->launch_timeout_ms = timeout_ms;
}

uint64_t mb_init_launch_timeout_ms(const struct mb_init *init)
{
    return init->launch_timeout_ms;
}

uv_loop_t *mb_init_loop(struct mb_init *init)
{
    return init->poll.loop;
}

int mb_init_spawn(struct mb_init *init, struct mb_init_spawn *spawn, struct mb_err *err)
{
    char *text = mb_asprintf("spawn %s", spawn->path);
    int rc;

    if (text == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    if (strlen(text) >= MB_SUP_PACKET_MAX || strchr(text, '\n') != NULL)
        rc = mb_err_set(err, MB_EINVAL, "path of a spec is too long or has a newline: %s",
                        spawn->path);
    else
        rc = send_text(init, text, err);
    mb_free(text);
    if (rc != 0)
        return rc;
    spawn->next = init->waiting;
    init->waiting = spawn;
    return 0;
}

void mb_init_spawn_detach(struct mb_init *init, struct mb_init_spawn *spawn)
{
    for (struct mb_init_spawn **at = &init->waiting; *at != NULL; at = &(*at)->next) {
        if (*at == spawn) {
            *at = spawn->next;
            return;
        }
    }
}

void mb_init_spawn_drop(struct mb_init *init, struct mb_init_spawn *spawn)
{
    char text[MB_SUP_PACKET_MAX];
    struct mb_err err;

    mb_init_spawn_detach(init, spawn);
    snprintf(text, sizeof(text), "drop %s", spawn->path); /* "spawn PATH" had room for it */
    if (send_text(init, text, &err) != 0)
        mb_warn("init", "%s", err.text);
}

static void on_poll_closed(uv_handle_t *handle)
{
    struct mb_init *init = handle->data;
    void (*cb)(void *arg) = init->on_closed;
    void *arg = init->on_closed_arg;

    close(init->fd);
    mb_free(init);
    if (cb != NULL)
        cb(arg);
}

void mb_init_close(struct mb_init *init, void (*cb)(void *arg), void *arg)
{
    init->closing = 1;
    init->on_closed = cb;
    init->on_closed_arg = arg;
    fail_all(init, MB_ECANCELED, "the agent is ending");
    uv_poll_stop(&init->poll);
    uv_close((uv_handle_t *)&init->poll, on_poll_closed);
}
