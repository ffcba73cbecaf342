/*
 * One attempt as the agent sees it.
 *
 *  start: 1. write the spec; 2. init starts the supervisor and says when it listens; 3. connect,
 *  "hello", "fds"; 4. events become callbacks, each fact once however often it is replayed.
 *  adopt: 3. and 4., or without a supervisor: the same callbacks from its state file.
 *
 *  Not every child is launched in the time for it (launch_watch.h): init hangs, or the supervisor,
 *  or a child before its exec. The spec goes, so that nothing of it starts later; a supervisor that
 *  is there is killed, and what it started as in c., then on_error.
 *
 *  The connection breaks (supervisor killed, or it dropped us):
 *   a. the state file says all-exited: the missing callbacks come from it;
 *   b. the supervisor lives: connect again, for at most RECONNECT_MS, then on_error;
 *   c. it is dead: the kernel kills its children and init what they left. Init may be dead too, so
 *      its control group is killed here as well; wait until that is empty and the recorded pids are
 *      gone (after ORPHANS_MS kill those here too), then report them as killed and "supervisor
 *      died".
 *
 *  A supervisor that its own job has stopped (SIGSTOP) does not hear that it should end the job: it
 *  is sent SIGCONT with each request, and one that stands again when its time is over is killed,
 *  which is c.
 *
 *  on_exit and on_all_exited are held back until the report sockets arrived: a child that ended
 *  before we connected may have said why, and release loses the sockets.
 */
#include "agent/supervisor.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include "agent/init.h"
#include "agent/launch_watch.h"
#include "agent/supervise/procs.h"
#include "agent/supervise/protocol.h"
#include "agent/supervise/state.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"

enum {
    CHECK_MS = 50,
    RECONNECT_MS = 5000,
    ORPHANS_MS = 5000,
    STANDS_MS = 5000, /* beyond the grace of a stop: then a supervisor that stands is killed */
    PACKETS_A_TURN = 64
};

enum phase {
    SPAWNING,  /* init has not answered */
    CONNECTED, /* events come from the supervisor */
    BROKEN,    /* no connection: the timer looks what became of it */
    FINISHED,  /* on_all_exited or on_error was given */
    CLOSING
};

struct mb_supervisor {
    const struct mb_supervisor_ops *ops;
    void *arg;
    uv_loop_t *loop;
    struct mb_init *init;
    struct mb_init_spawn spawn; /* of SPAWNING */
    char *dir, *spec_path;
    enum phase phase;
    uv_timer_t timer;
    uv_poll_t poll;
    int fd; /* -1: not connected; then poll is not initialised */
    int n_handles;
    uint64_t broken_since_ms;
    struct mb_launch_watch launch;
    struct mb_err lost;        /* of a launch that took too long; code 0: none did */
    struct mb_sup_state state; /* what was heard or read */
    unsigned char told_start[MB_SUP_CHILDREN_MAX];
    unsigned char told_exit[MB_SUP_CHILDREN_MAX];
    unsigned char told_report[MB_SUP_CHILDREN_MAX];
    unsigned char heard_exit[MB_SUP_CHILDREN_MAX];
    unsigned exits[MB_SUP_CHILDREN_MAX]; /* children in the order they ended */
    size_t n_exits, n_exits_told;
    int fds_complete, told_ending;
    int stop_due, kill_due, stop_signal; /* asked while there was no connection */
    uint32_t stop_grace_ms;
    uint64_t stands_at_ms; /* when to look whether it stands; 0: nothing was asked of it */
    void (*on_closed)(void *arg);
    void *on_closed_arg;
};

static void look_what_became_of_it(uv_timer_t *timer);
static void on_due(uv_timer_t *timer);
static int read_state(struct mb_supervisor *s, struct mb_sup_state *out,
                      char text[MB_SUP_TEXT_MAX]);

/* ---- facts to callbacks, each once ---- */

static int is_over(const struct mb_supervisor *s)
{
    return s->phase == FINISHED || s->phase == CLOSING;
}

static void tell_error(struct mb_supervisor *s, const struct mb_err *err)
{
    if (is_over(s))
        return;
    s->phase = FINISHED;
    uv_timer_stop(&s->timer);
    s->ops->on_error(s->arg, err);
}

static void tell_started(struct mb_supervisor *s, unsigned child, int64_t pid, uint64_t ticks)
{
    if (is_over(s) || s->told_start[child])
        return;
    s->told_start[child] = 1;
    s->ops->on_started(s->arg, child, pid, ticks);
}

static void tell_ending(struct mb_supervisor *s, const char *reason)
{
    if (is_over(s) || s->told_ending || reason[0] == '\0')
        return;
    s->told_ending = 1;
    if (s->ops->on_ending != NULL)
        s->ops->on_ending(s->arg, reason);
}

static void tell_start_failed(struct mb_supervisor *s, unsigned child, const char *text)
{
    if (is_over(s) || s->told_start[child])
        return;
    s->told_start[child] = 1;
    s->ops->on_start_failed(s->arg, child, text);
}

static void tell_exit(struct mb_supervisor *s, unsigned child, int code, int sig)
{
    if (is_over(s) || s->told_exit[child])
        return;
    s->told_exit[child] = 1;
    s->ops->on_exit(s->arg, child, code, sig);
}

static int is_held(const struct mb_supervisor *s)
{
    return s->phase == CONNECTED && s->ops->on_report != NULL && !s->fds_complete;
}

/* Who failed first matters, so the order stays. */
static void tell_exits(struct mb_supervisor *s)
{
    while (!is_held(s) && s->n_exits_told < s->n_exits) {
        unsigned child = s->exits[s->n_exits_told++];

        tell_exit(s, child, s->state.children[child].code, s->state.children[child].signal);
    }
}

static void tell_all_exited(struct mb_supervisor *s)
{
    if (is_over(s) || !s->state.all_exited || is_held(s))
        return;
    s->phase = FINISHED;
    uv_timer_stop(&s->timer);
    s->ops->on_all_exited(s->arg, s->state.reason);
}

/* Everything s->state holds that was not told yet. */
static void tell_state(struct mb_supervisor *s)
{
    tell_ending(s, s->state.reason);
    tell_exits(s);
    for (unsigned i = 0; i < s->state.n_children; i++) {
        const struct mb_sup_child_state *c = &s->state.children[i];

        if (c->phase == MB_SUP_FAILED)
            tell_start_failed(s, i, "it could not be started, see its supervisor's log");
        else if (c->phase != MB_SUP_WAITING)
            tell_started(s, i, c->pid, c->start_ticks);
        if (c->phase == MB_SUP_EXITED || c->phase == MB_SUP_FAILED)
            tell_exit(s, i, c->code, c->signal);
    }
    tell_all_exited(s);
}

/* ---- the time that a launch has ---- */

static int has_launched(const struct mb_sup_state *state)
{
    for (size_t i = 0; i < state->n_children; i++)
        if (state->children[i].phase == MB_SUP_WAITING)
            return 0;
    return state->n_children > 0;
}

/* Before BROKEN the timer is the launch's, and that of what was asked of the supervisor. */
static void watch(struct mb_supervisor *s)
{
    uint64_t wait_ms, stands_in_ms, now_ms = mb_mono_ms();

    if (s->phase > CONNECTED)
        return;
    if (has_launched(&s->state))
        mb_launch_reached(&s->launch, MB_LAUNCH_DONE);
    wait_ms = mb_launch_wait_ms(&s->launch, now_ms);
    stands_in_ms = s->stands_at_ms == 0       ? UINT64_MAX
                   : s->stands_at_ms > now_ms ? s->stands_at_ms - now_ms
                                              : 0;
    if (stands_in_ms < wait_ms)
        wait_ms = stands_in_ms;
    if (wait_ms == UINT64_MAX)
        uv_timer_stop(&s->timer);
    else
        uv_timer_start(&s->timer, on_due, wait_ms, 0);
}

/* ---- a supervisor that stands ---- */

/* 0: its pid is not known, since it has said and written nothing yet. */
static int64_t supervisor_of(struct mb_supervisor *s, uint64_t *ticks)
{
    struct mb_sup_state written;
    char text[MB_SUP_TEXT_MAX];

    *ticks = s->state.supervisor_ticks;
    if (s->state.supervisor_pid != 0)
        return s->state.supervisor_pid;
    if (read_state(s, &written, text) != 0)
        return 0;
    *ticks = written.supervisor_ticks;
    return written.supervisor_pid;
}

static void let_it_go_on(struct mb_supervisor *s, uint64_t within_ms)
{
    uint64_t ticks;
    int64_t pid = supervisor_of(s, &ticks);

    if (pid > 0)
        mb_procs_signal(pid, ticks, SIGCONT);
    s->stands_at_ms = mb_mono_ms() + within_ms + STANDS_MS;
    watch(s);
}

/* One that does not stand waits for a process that takes no signal, and will say so. */
static void kill_if_it_stands(struct mb_supervisor *s)
{
    uint64_t ticks;
    int64_t pid = supervisor_of(s, &ticks);

    s->stands_at_ms = mb_mono_ms() + STANDS_MS;
    if (pid <= 0 || !mb_sup_is_stopped(pid, ticks))
        return;
    mb_warn("supervisor",
            "%s: supervisor %lld was stopped by a signal, again after SIGCONT: killed", s->dir,
            (long long)pid);
    mb_procs_signal(pid, ticks, SIGKILL);
}

/* ---- the connection ---- */

static void send_msg(struct mb_supervisor *s, const struct mb_sup_msg *m)
{
    char packet[MB_SUP_PACKET_MAX];
    size_t n = mb_sup_msg_format(m, packet);

    if (send(s->fd, packet, n, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
        mb_warn("supervisor", "%s: request lost: %s", s->dir, strerror(errno));
}

static void send_what_is_due(struct mb_supervisor *s)
{
    struct mb_sup_msg m = {
        .type = MB_SUP_MSG_STOP, .grace_ms = s->stop_grace_ms, .signal = s->stop_signal};

    if (s->stop_due)
        send_msg(s, &m);
    m = (struct mb_sup_msg){.type = MB_SUP_MSG_KILL};
    if (s->kill_due)
        send_msg(s, &m);
    if (s->stop_due || s->kill_due)
        let_it_go_on(s, s->kill_due ? 0 : s->stop_grace_ms);
    s->stop_due = s->kill_due = 0;
}

static void take_event(struct mb_supervisor *s, const struct mb_sup_msg *m, int fd)
{
    struct mb_sup_child_state *c =
        &s->state.children[m->child < s->state.n_children ? m->child : 0];

    switch (m->type) {
    case MB_SUP_MSG_STARTED:
        *c = (struct mb_sup_child_state){.phase = MB_SUP_RUNNING, .pid = m->pid};
        c->start_ticks = m->ticks;
        watch(s);
        tell_started(s, m->child, m->pid, m->ticks);
        break;
    case MB_SUP_MSG_START_FAILED:
        c->phase = MB_SUP_FAILED;
        watch(s);
        tell_start_failed(s, m->child, m->text);
        break;
    case MB_SUP_MSG_EXIT:
        if (c->phase != MB_SUP_FAILED)
            c->phase = MB_SUP_EXITED;
        c->code = m->code;
        c->signal = m->signal;
        if (!s->heard_exit[m->child])
            s->exits[s->n_exits++] = m->child;
        s->heard_exit[m->child] = 1;
        tell_exits(s);
        break;
    case MB_SUP_MSG_ENDING:
        tell_ending(s, m->text);
        break;
    case MB_SUP_MSG_ALL_EXITED:
        s->state.all_exited = 1;
        snprintf(s->state.reason, sizeof(s->state.reason), "%s", m->text);
        tell_all_exited(s);
        break;
    case MB_SUP_MSG_FD:
        if (fd >= 0 && !is_over(s) && !s->told_report[m->child]) {
            s->told_report[m->child] = 1;
            fcntl(fd, F_SETFL, O_NONBLOCK);
            s->ops->on_report(s->arg, m->child, fd);
        } else if (fd >= 0) {
            close(fd);
        }
        break;
    case MB_SUP_MSG_FDS:
        s->fds_complete = 1;
        tell_exits(s);
        tell_all_exited(s);
        break;
    default: /* replayed: a fact without a callback */
        break;
    }
}

/* 1: a packet was taken; 0: none is there; -1: the connection is of no use any more. */
static int take_packet(struct mb_supervisor *s)
{
    char packet[MB_SUP_PACKET_MAX];
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec iov = {.iov_base = packet, .iov_len = sizeof(packet)};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = control.space,
                         .msg_controllen = sizeof(control.space)};
    struct cmsghdr *head;
    struct mb_sup_msg m;
    ssize_t n = recvmsg(s->fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    int fd = -1;

    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    if (n <= 0)
        return -1;
    head = CMSG_FIRSTHDR(&msg);
    if (head != NULL && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS)
        memcpy(&fd, CMSG_DATA(head), sizeof(int));
    if (mb_sup_msg_parse(packet, (size_t)n, &m) == 0 && m.type == MB_SUP_MSG_HELLO &&
        m.version == MB_SUP_PROTOCOL && m.child <= MB_SUP_CHILDREN_MAX) {
        s->state.supervisor_pid = m.pid;
        s->state.supervisor_ticks = m.ticks;
        s->state.n_children = m.child;
        return 1;
    }
    if (mb_sup_msg_parse(packet, (size_t)n, &m) != 0 || m.type == MB_SUP_MSG_HELLO ||
        s->state.n_children == 0 || m.child >= s->state.n_children) {
        if (fd >= 0)
            close(fd);
        mb_warn("supervisor", "%s: not our protocol", s->dir);
        return -1;
    }
    take_event(s, &m, fd);
    return 1;
}

/* Of the timer, and of each socket's handle; the last one frees what was closed. */
static void on_handle_closed(uv_handle_t *handle)
{
    struct mb_supervisor *s = handle->data;

    if (--s->n_handles == 0 && s->phase == CLOSING) {
        void (*cb)(void *arg) = s->on_closed;
        void *arg = s->on_closed_arg;

        mb_free(s->dir);
        mb_free(s->spec_path);
        mb_free(s);
        if (cb != NULL)
            cb(arg);
    }
}

/* The handle goes before the socket: uv_close() takes the descriptor out of the loop's epoll set by
 * its number, and by then the number may be that of another supervisor's socket. */
static void disconnect(struct mb_supervisor *s)
{
    if (s->fd < 0)
        return;
    uv_close((uv_handle_t *)&s->poll, on_handle_closed);
    close(s->fd);
    s->fd = -1;
}

static void on_readable(uv_poll_t *handle, int status, int events)
{
    struct mb_supervisor *s = handle->data;
    int rc = status < 0 ? -1 : 1;

    (void)events;
    for (int i = 0; i < PACKETS_A_TURN && rc == 1 && s->fd >= 0; i++)
        rc = take_packet(s);
    if (rc >= 0 || s->fd < 0)
        return;
    disconnect(s);
    if (is_over(s))
        return;
    s->phase = BROKEN;
    s->broken_since_ms = mb_mono_ms();
    uv_timer_start(&s->timer, look_what_became_of_it, 0, CHECK_MS);
}

/* errno-like: 0, or what connect said. */
static int connect_socket(const char *dir, int *out)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    int dir_fd = open(dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
    int fd, rc = 0;

    if (dir_fd < 0)
        return errno;
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        rc = errno;
        close(dir_fd);
        return rc;
    }
    /* The directory's own path may be longer than a socket address holds. */
    snprintf(addr.sun_path, sizeof(addr.sun_path), "/proc/self/fd/%d/%s", dir_fd, MB_SUP_SOCKET);
    if (connect(fd, (struct sockaddr *)&addr, sizeof(addr)) != 0) {
        rc = errno;
        close(fd);
    } else {
        *out = fd;
    }
    close(dir_fd);
    return rc;
}

/* 0: greeted, events will come; else errno. */
static int connect_now(struct mb_supervisor *s)
{
    struct mb_sup_msg m = {.type = MB_SUP_MSG_HELLO, .version = MB_SUP_PROTOCOL};
    int fd = -1;
    int rc = connect_socket(s->dir, &fd);

    if (rc != 0)
        return rc;
    if (s->n_handles == 2) { /* a former socket's handle: only one is ever in use */
        close(fd);
        return EBUSY;
    }
    if (uv_poll_init(s->loop, &s->poll, fd) != 0) {
        close(fd);
        return EIO;
    }
    s->poll.data = s;
    s->n_handles++;
    s->fd = fd;
    s->phase = CONNECTED;
    s->fds_complete = 0;
    mb_launch_reached(&s->launch, MB_LAUNCH_LISTENS);
    watch(s);
    uv_poll_start(&s->poll, UV_READABLE, on_readable);
    send_msg(s, &m);
    m = (struct mb_sup_msg){.type = MB_SUP_MSG_FDS};
    if (s->ops->on_report != NULL)
        send_msg(s, &m);
    send_what_is_due(s);
    return 0;
}

/* ---- without a supervisor ---- */

static int read_state(struct mb_supervisor *s, struct mb_sup_state *out, char text[MB_SUP_TEXT_MAX])
{
    int dir_fd = open(s->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc;

    if (dir_fd < 0) {
        snprintf(text, MB_SUP_TEXT_MAX, "%s", strerror(errno));
        return -1;
    }
    rc = mb_sup_state_read(dir_fd, out, text);
    close(dir_fd);
    return rc;
}

/* How many of the recorded children still run; with kill_them they get SIGKILL. */
static unsigned count_orphans(const struct mb_sup_state *state, int kill_them)
{
    unsigned n = 0;

    for (size_t i = 0; i < state->n_children; i++) {
        const struct mb_sup_child_state *c = &state->children[i];

        if (c->phase != MB_SUP_RUNNING || !mb_sup_is_running(c->pid, c->start_ticks))
            continue;
        n++;
        if (kill_them)
            mb_procs_signal(c->pid, c->start_ticks, SIGKILL);
    }
    return n;
}

/* 1: the control group of a dead supervisor still has processes; they are being killed. */
static int has_group_left(struct mb_supervisor *s, int is_late)
{
    if (s->state.group.kind == MB_CGROUP_NONE)
        return 0;
    if (mb_cgroup_kill(&s->state.group) != 0 && is_late)
        mb_warn("supervisor", "%s cannot be killed: %s", s->state.group.dir, strerror(errno));
    return mb_cgroup_remove(&s->state.group) != 0 && !is_late;
}

/* 1: its supervisor lives on. D state takes no signal: then it ends as soon as it leaves that. */
static int supervisor_resists(struct mb_supervisor *s, int is_late)
{
    if (!mb_sup_is_running(s->state.supervisor_pid, s->state.supervisor_ticks))
        return 0;
    mb_procs_signal(s->state.supervisor_pid, s->state.supervisor_ticks, SIGKILL);
    if (is_late)
        mb_warn("supervisor", "%s: supervisor %lld does not end", s->dir,
                (long long)s->state.supervisor_pid);
    return !is_late;
}

static void take_as_died(struct mb_supervisor *s)
{
    int dir_fd = open(s->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    if (dir_fd >= 0) { /* nobody listens there any more */
        unlinkat(dir_fd, MB_SUP_SOCKET, 0);
        close(dir_fd);
    }
    for (size_t i = 0; i < s->state.n_children; i++) {
        struct mb_sup_child_state *c = &s->state.children[i];

        if (c->phase == MB_SUP_WAITING) { /* it was never born */
            c->phase = MB_SUP_FAILED;
            c->code = 127;
        } else if (c->phase == MB_SUP_RUNNING) {
            c->phase = MB_SUP_EXITED;
            c->signal = SIGKILL;
        }
    }
    s->state.all_exited = 1;
    snprintf(s->state.reason, sizeof(s->state.reason), "supervisor died");
}

/* Timer of phase BROKEN. */
static void look_what_became_of_it(uv_timer_t *timer)
{
    struct mb_supervisor *s = timer->data;
    uint64_t waited_ms = mb_mono_ms() - s->broken_since_ms;
    char text[MB_SUP_TEXT_MAX];
    struct mb_err err;

    if (s->n_handles == 2) /* the broken socket's handle first */
        return;
    if (read_state(s, &s->state, text) != 0) {
        mb_err_set(&err, MB_EUNAVAIL, "supervisor in %s is gone: %s", s->dir, text);
        tell_error(s, s->lost.code != 0 ? &s->lost : &err);
        return;
    }
    if (s->state.all_exited) {
        tell_state(s);
        return;
    }
    if (s->lost.code != 0) {
        if (supervisor_resists(s, waited_ms > ORPHANS_MS))
            return;
    } else if (mb_sup_is_running(s->state.supervisor_pid, s->state.supervisor_ticks)) {
        int rc = connect_now(s);

        if (rc != 0 && waited_ms > RECONNECT_MS) {
            mb_err_set(&err, MB_EUNAVAIL, "supervisor %lld in %s does not answer: %s",
                       (long long)s->state.supervisor_pid, s->dir, strerror(rc));
            tell_error(s, &err);
        }
        return;
    }
    if (has_group_left(s, waited_ms > ORPHANS_MS) ||
        count_orphans(&s->state, waited_ms > ORPHANS_MS) > 0)
        return;
    take_as_died(s);
    if (s->lost.code != 0)
        tell_error(s, &s->lost);
    else
        tell_state(s);
}

/* ---- life ---- */

static struct mb_supervisor *create(struct mb_init *init, const char *dir,
                                    const struct mb_supervisor_ops *ops, void *arg)
{
    struct mb_supervisor *s = mb_calloc(1, sizeof(*s));

    if (s == NULL)
        return NULL;
    s->ops = ops;
    s->arg = arg;
    s->init = init;
    s->loop = mb_init_loop(init);
    s->fd = -1;
    s->dir = mb_strdup(dir);
    s->spec_path = mb_path_join(dir, "spec");
    if (s->dir == NULL || s->spec_path == NULL) {
        mb_free(s->dir);
        mb_free(s->spec_path);
        mb_free(s);
        return NULL;
    }
    uv_timer_init(s->loop, &s->timer);
    s->timer.data = s;
    s->n_handles = 1;
    mb_launch_begin(&s->launch, mb_init_launch_timeout_ms(init), mb_mono_ms());
    return s;
}

static void on_spawned(void *arg, const struct mb_err *err)
{
    struct mb_supervisor *s = arg;

    if (err != NULL) {
        struct mb_err wrapped = *err;

        mb_err_wrap(&wrapped, "supervisor in %s", s->dir);
        tell_error(s, &wrapped);
        return;
    }
    if (connect_now(s) == 0)
        return;
    s->phase = BROKEN;
    s->broken_since_ms = mb_mono_ms();
    uv_timer_start(&s->timer, look_what_became_of_it, 0, CHECK_MS);
}

/* Nothing of it starts any more: a supervisor looks for its spec after it has written its state, so
 * either it finds none or we find that. One without a state is init's to kill. */
static void lose_launch(struct mb_supervisor *s)
{
    char text[MB_SUP_TEXT_MAX], why[MB_ERR_TEXT_MAX];
    uint64_t ignored;
    int64_t pid;

    mb_init_identity(s->init, &pid, &ignored);
    if (s->phase == SPAWNING)
        mb_init_spawn_drop(s->init, &s->spawn);
    unlink(s->spec_path);
    if (read_state(s, &s->state, text) == 0) {
        mb_launch_reached(&s->launch, MB_LAUNCH_LISTENS);
        pid = s->state.supervisor_pid;
    }
    mb_launch_lost_text(&s->launch, pid, why, sizeof(why));
    mb_err_set(&s->lost, MB_ETIMEOUT, "%s", why);
    mb_warn("supervisor", "%s: %s", s->dir, why);
    disconnect(s);
    s->phase = BROKEN;
    s->broken_since_ms = mb_mono_ms();
    uv_timer_start(&s->timer, look_what_became_of_it, 0, CHECK_MS);
}

/* Timer of the phases before BROKEN. What was launched is in the state, also where the supervisor
 * hangs since, or init before it could say that there is one. */
static void on_due(uv_timer_t *timer)
{
    struct mb_supervisor *s = timer->data;
    char text[MB_SUP_TEXT_MAX];

    if (s->stands_at_ms != 0 && mb_mono_ms() >= s->stands_at_ms)
        kill_if_it_stands(s);
    if (!mb_launch_is_lost(&s->launch, mb_mono_ms())) {
        watch(s);
    } else if (read_state(s, &s->state, text) != 0 || !has_launched(&s->state)) {
        lose_launch(s);
    } else if (s->phase == SPAWNING) {
        mb_init_spawn_detach(s->init, &s->spawn);
        on_spawned(s, NULL);
    } else {
        watch(s);
    }
}

int mb_supervisor_start(struct mb_init *init, const struct mb_sup_spec *spec,
                        const struct mb_supervisor_ops *ops, void *arg, struct mb_supervisor **out,
                        struct mb_err *err)
{
    struct mb_supervisor *s = create(init, spec->dir, ops, arg);
    char text[MB_SUP_TEXT_MAX];
    int rc;

    if (s == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    s->spawn = (struct mb_init_spawn){.path = s->spec_path, .cb = on_spawned, .arg = s};
    if (mb_sup_spec_write(spec, s->spec_path, text) != 0)
        rc = mb_err_set(err, MB_EIO, "%s", text);
    else
        rc = mb_init_spawn(init, &s->spawn, err);
    if (rc != 0) {
        mb_supervisor_close(s, NULL, NULL);
        return rc;
    }
    watch(s);
    *out = s;
    return 0;
}

int mb_supervisor_adopt(struct mb_init *init, const char *dir, const struct mb_supervisor_ops *ops,
                        void *arg, struct mb_supervisor **out, struct mb_err *err)
{
    struct mb_supervisor *s = create(init, dir, ops, arg);
    char text[MB_SUP_TEXT_MAX];

    if (s == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    if (connect_now(s) != 0) {
        int rc = read_state(s, &s->state, text);

        /* Asked for and not there yet? Without its spec it will not start; it looks for that after
         * it has written its state, so that one of us sees the other. */
        if (rc != 0 && unlink(s->spec_path) == 0)
            rc = read_state(s, &s->state, text);
        if (rc != 0) {
            mb_supervisor_close(s, NULL, NULL);
            return mb_err_set(err, MB_ENOENT, "no supervisor in %s: %s", dir, text);
        }
        s->phase = BROKEN;
        s->broken_since_ms = mb_mono_ms();
        uv_timer_start(&s->timer, look_what_became_of_it, 0, CHECK_MS);
    }
    *out = s;
    return 0;
}

void mb_supervisor_stop(struct mb_supervisor *s, int signal, uint32_t grace_ms)
{
    if (s->stop_due && grace_ms > s->stop_grace_ms)
        return;
    s->stop_due = 1;
    s->stop_signal = signal;
    s->stop_grace_ms = grace_ms;
    if (s->fd >= 0)
        send_what_is_due(s);
}

void mb_supervisor_kill(struct mb_supervisor *s)
{
    s->kill_due = 1;
    if (s->fd >= 0)
        send_what_is_due(s);
}

void mb_supervisor_release(struct mb_supervisor *s)
{
    struct mb_sup_msg m = {.type = MB_SUP_MSG_RELEASE};

    if (s->fd >= 0)
        send_msg(s, &m);
}

void mb_supervisor_close(struct mb_supervisor *s, void (*cb)(void *arg), void *arg)
{
    if (s->phase == SPAWNING)
        mb_init_spawn_detach(s->init, &s->spawn);
    s->phase = CLOSING;
    s->on_closed = cb;
    s->on_closed_arg = arg;
    disconnect(s);
    uv_close((uv_handle_t *)&s->timer, on_handle_closed);
}
