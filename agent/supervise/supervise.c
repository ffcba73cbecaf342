/*
 * The supervisor: one per job attempt on a node, child of init, owner of every process below it.
 *
 *  1. read the spec, become subreaper, listen in the attempt directory, write the first state,
 *     tell init "ok"; a failure here is told instead and nothing was started;
 *  2. start the children; what cannot be started counts as exited with code 127;
 *  3. loop: reap (also adopted orphans), hear agents, do what the plan says is due, write the state
 *     when it changed, then let agents read the new events: what they hear is already on disk;
 *  4. every child exited, the kernel says ECHILD and the control group is empty: all-exited. Wait
 * for an agent's release, so that report sockets keep their last bytes, then end. Without init
 * nobody will come: end.
 *
 *  Agent away: nothing changes, events wait in the log of events, report sockets stay open.
 *  Init killed: the life pipe hangs up; the tree is stopped with the spec's grace, then we end.
 *  State cannot be written (disk full): said on stderr, tried again at the next turn; connected
 *  agents still hear the truth.
 */
#include "agent/supervise/supervise.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "agent/supervise/child.h"
#include "agent/supervise/clients.h"
#include "agent/supervise/clock.h"
#include "agent/supervise/plan.h"
#include "agent/supervise/procs.h"
#include "agent/supervise/protocol.h"
#include "agent/supervise/state.h"
#include "agent/supervise/sender.h"

enum {
    STATE_RETRY_MS = 1000,
    MEMORY_LOOK_MS = 100, /* between two measurements, where the kernel keeps no limit for us */
    RELEASE_WAIT_MS = 3600 * 1000 /* an agent that is up asks within seconds */
};

struct supervisor {
    struct mb_sup_spec spec;
    struct mb_sup_plan plan;
    struct mb_sup_state state;
    struct mb_sup_clients clients;
    int dir_fd, signal_fd, life_fd;
    int state_dirty;
    int ending_told;
    int told_to_end; /* by a signal: init is stopping, no agent will come */
    uint64_t state_retry_ms;
    uint64_t memory_look_ms;             /* when memory is measured again; UINT64_MAX: never */
    uint64_t release_by_ms;              /* once all exited */
    int report_fds[MB_SUP_CHILDREN_MAX]; /* our ends; -1: none */
};

static void complain(const struct supervisor *s, const char *text)
{
    fprintf(stderr, "mobula-init supervise %s: %s\n", s->spec.dir, text);
}

/* ---- children ---- */

static size_t n_running(const struct supervisor *s)
{
    size_t n = 0;

    for (size_t i = 0; i < s->state.n_children; i++)
        n += s->state.children[i].phase == MB_SUP_RUNNING;
    return n;
}

static void child_exited(struct supervisor *s, unsigned index, int code, int signal)
{
    struct mb_sup_child_state *c = &s->state.children[index];
    struct mb_sup_msg m = {.type = MB_SUP_MSG_EXIT, .child = index, .code = code, .signal = signal};

    if (c->phase != MB_SUP_FAILED)
        c->phase = MB_SUP_EXITED;
    c->code = code;
    c->signal = signal;
    s->state_dirty = 1;
    mb_sup_clients_event(&s->clients, &m);
    if (code != 0 || signal != 0)
        mb_sup_plan_child_failed(&s->plan, index, mb_sup_now_ms());
}

static void child_failed(struct supervisor *s, unsigned index, const char *text)
{
    struct mb_sup_msg m = {.type = MB_SUP_MSG_START_FAILED, .child = index};

    snprintf(m.text, sizeof(m.text), "%s", text);
    complain(s, text);
    s->state.children[index].phase = MB_SUP_FAILED;
    mb_sup_clients_event(&s->clients, &m);
    child_exited(s, index, 127, 0);
}

static void start_child(struct supervisor *s, unsigned index)
{
    const struct mb_sup_child *spec = &s->spec.children[index];
    struct mb_sup_child_state *c = &s->state.children[index];
    struct mb_sup_msg m = {.type = MB_SUP_MSG_STARTED, .child = index};
    struct mb_exec x = {.argv = spec->argv,
                        .env = spec->env,
                        .cwd = spec->cwd,
                        .log_path = spec->log_path,
                        .pass_fd = {-1, -1},
                        .death_signal = SIGKILL, /* nobody could tell any more how it ends */
                        .nofile = s->spec.nofile,
                        .no_core = !s->spec.core_files};
    int pair[2] = {-1, -1};
    char text[MB_SUP_TEXT_MAX];
    pid_t pid;

    if (spec->want_report && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
        child_failed(s, index, "no report socket");
        return;
    }
    x.pass_fd[0] = pair[1];
    x.fd_env[0] = MB_REPORT_FD_ENV;
    x.cgroup_fd = mb_cgroup_join_fd(&s->state.group);
    pid = mb_child_exec(&x, text);
    if (x.cgroup_fd >= 0)
        close(x.cgroup_fd);
    if (pair[1] >= 0)
        close(pair[1]);
    s->report_fds[index] = pair[0];
    if (pid < 0) {
        child_failed(s, index, text);
        return;
    }
    c->phase = MB_SUP_RUNNING;
    c->pid = m.pid = pid;
    c->start_ticks = m.ticks = mb_sup_start_ticks(pid);
    s->state_dirty = 1;
    mb_sup_clients_event(&s->clients, &m);
}

/* ---- memory ---- */

static void kill_for_memory(struct supervisor *s)
{
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    uint64_t n = s->spec.memory_limit_bytes;
    char reason[MB_SUP_TEXT_MAX];
    size_t unit = 0;

    for (; n % 1024 == 0 && unit < 4; unit++)
        n /= 1024;
    snprintf(reason, sizeof(reason), "killed: memory limit of %llu %s", (unsigned long long)n,
             units[unit]);
    mb_sup_plan_kill(&s->plan, reason, mb_sup_now_ms());
    s->memory_look_ms = UINT64_MAX;
}

/* The kernel killed for the limit, or we measure that it is passed. */
static void look_at_memory(struct supervisor *s)
{
    if (s->memory_look_ms == UINT64_MAX || s->plan.state == MB_SUP_PLAN_KILLING)
        return;
    if (s->state.group.has_memory_limit) {
        if (mb_cgroup_oom_kills(&s->state.group) > 0)
            kill_for_memory(s);
        return;
    }
    if (mb_sup_now_ms() < s->memory_look_ms)
        return;
    s->memory_look_ms = mb_sup_now_ms() + MEMORY_LOOK_MS;
    if (mb_procs_memory_exceeds(s->spec.memory_limit_bytes) == 1)
        kill_for_memory(s);
}

/* ---- what ended ---- */

/* Reaps whatever ended. 1: not even an adopted process is left; 0: some are. */
static int reap(struct supervisor *s)
{
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG);

        if (pid < 0 && errno == EINTR)
            continue;
        if (pid <= 0)
            return pid < 0;
        if (WIFSIGNALED(status) && s->state.group.has_memory_limit)
            look_at_memory(s); /* its reason comes before "child failed" */
        for (unsigned i = 0; i < s->state.n_children; i++) {
            if (s->state.children[i].phase != MB_SUP_RUNNING || s->state.children[i].pid != pid)
                continue;
            child_exited(s, i, WIFEXITED(status) ? WEXITSTATUS(status) : 0,
                         WIFSIGNALED(status) ? WTERMSIG(status) : 0);
        }
    }
}

/* ---- what is asked for ---- */

static void stop(struct supervisor *s, const char *reason)
{
    mb_sup_plan_stop(&s->plan, reason, 0, s->spec.stop_grace_ms, mb_sup_now_ms());
}

static void take_signals(struct supervisor *s)
{
    struct signalfd_siginfo info;

    while (read(s->signal_fd, &info, sizeof(info)) == (ssize_t)sizeof(info)) {
        if (info.ssi_signo == SIGCHLD || !mb_sender_counts(&info))
            continue;
        /* A stop that an agent asked for goes on with its own deadline. */
        if (s->told_to_end)
            mb_sup_plan_kill(&s->plan, "signalled twice", mb_sup_now_ms());
        else
            stop(s, "supervisor was told to end");
        s->told_to_end = 1;
    }
}

static void take_requests(struct supervisor *s)
{
    struct mb_sup_msg m;

    while (mb_sup_clients_next(&s->clients, &m)) {
        if (m.type == MB_SUP_MSG_STOP)
            mb_sup_plan_stop(&s->plan, "stop requested", m.signal, m.grace_ms, mb_sup_now_ms());
        else if (m.type == MB_SUP_MSG_KILL)
            mb_sup_plan_kill(&s->plan, "kill requested", mb_sup_now_ms());
    }
}

static void act(struct supervisor *s)
{
    int rc = 0;

    switch (mb_sup_plan_tick(&s->plan, mb_sup_now_ms())) {
    case MB_SUP_ACT_SIGNAL:
        rc = mb_procs_signal_tree(s->plan.signal);
        if (rc < 0)
            mb_sup_plan_signal_failed(&s->plan, mb_sup_now_ms());
        else
            mb_sup_plan_signalled(&s->plan, mb_sup_now_ms());
        break;
    case MB_SUP_ACT_KILL:
        if (mb_cgroup_kill(&s->state.group) != 0)
            complain(s, "its control group cannot be killed");
        rc = mb_procs_kill_tree(NULL, 0);
        break;
    case MB_SUP_ACT_NONE:
        break;
    }
    if (rc < 0)
        complain(s, "cannot read /proc, trying again");
    if (s->plan.state != MB_SUP_PLAN_RUNNING && s->plan.reason[0] != '\0' && !s->ending_told) {
        struct mb_sup_msg m = {.type = MB_SUP_MSG_ENDING};

        snprintf(m.text, sizeof(m.text), "%s", s->plan.reason);
        mb_sup_clients_event(&s->clients, &m);
        s->ending_told = 1;
    }
}

static void all_exited(struct supervisor *s)
{
    struct mb_sup_msg m = {.type = MB_SUP_MSG_ALL_EXITED};

    snprintf(s->state.proof, sizeof(s->state.proof), "wait%s%s",
             s->state.group.kind != MB_CGROUP_NONE ? "+" : "",
             s->state.group.kind != MB_CGROUP_NONE ? mb_cgroup_kind_name(s->state.group.kind) : "");
    mb_cgroup_remove(&s->state.group);
    mb_sup_plan_nothing_left(&s->plan);
    s->state.all_exited = 1;
    snprintf(s->state.reason, sizeof(s->state.reason), "%s", s->plan.reason);
    snprintf(m.text, sizeof(m.text), "%s", s->plan.reason);
    s->state_dirty = 1;
    s->release_by_ms = mb_sup_now_ms() + RELEASE_WAIT_MS;
    mb_sup_clients_event(&s->clients, &m);
}

static void save_state(struct supervisor *s)
{
    char text[MB_SUP_TEXT_MAX];

    if (!s->state_dirty || mb_sup_now_ms() < s->state_retry_ms)
        return;
    if (mb_sup_state_write(&s->state, s->dir_fd, text) == 0) {
        s->state_dirty = 0;
        return;
    }
    complain(s, text);
    s->state_retry_ms = mb_sup_now_ms() + STATE_RETRY_MS;
}

/* ---- the loop ---- */

static int poll_timeout(const struct supervisor *s)
{
    uint64_t next = mb_sup_plan_next_ms(&s->plan), now = mb_sup_now_ms();

    if (s->state_dirty && s->state_retry_ms < next)
        next = s->state_retry_ms;
    if (s->state.all_exited && s->release_by_ms < next)
        next = s->release_by_ms;
    if (!s->state.all_exited && !s->state.group.has_memory_limit && s->memory_look_ms < next)
        next = s->memory_look_ms;
    if (next == UINT64_MAX)
        return -1;
    return next <= now ? 0 : next - now > 60000 ? 60000 : (int)(next - now);
}

/* May it end? Nothing is left, the state is on disk and an agent released it; or nobody will ever
 * come, and then an unwritable state (said on stderr) must not keep us. */
static int may_end(const struct supervisor *s)
{
    if (!s->state.all_exited)
        return 0;
    if (s->life_fd < 0 || s->told_to_end || mb_sup_now_ms() >= s->release_by_ms)
        return 1;
    return s->clients.released && !s->state_dirty;
}

static void turn(struct supervisor *s)
{
    struct pollfd fds[2 + MB_SUP_CLIENTS_POLL_MAX];
    nfds_t n = 2;

    fds[0] = (struct pollfd){.fd = s->signal_fd, .events = POLLIN};
    fds[1] = (struct pollfd){.fd = s->life_fd, .events = POLLIN};
    n += mb_sup_clients_poll(&s->clients, fds + 2);
    if (poll(fds, n, poll_timeout(s)) < 0 && errno != EINTR) {
        complain(s, strerror(errno));
        stop(s, "supervisor cannot poll");
    }
    if (fds[0].revents != 0)
        take_signals(s);
    if (fds[1].revents != 0) {
        close(s->life_fd);
        s->life_fd = -1;
        stop(s, "init died");
    }
    mb_sup_clients_read(&s->clients, fds + 2, n - 2);
    take_requests(s);
}

static void run(struct supervisor *s)
{
    for (unsigned i = 0; i < s->spec.n_children; i++)
        start_child(s, i);
    for (;;) {
        if (!s->state.all_exited) {
            int none_left = reap(s) && mb_cgroup_is_empty(&s->state.group);

            look_at_memory(s);
            if (n_running(s) == 0 && none_left)
                all_exited(s);
            else if (n_running(s) == 0)
                mb_sup_plan_leftovers(&s->plan, mb_sup_now_ms());
            act(s);
        }
        save_state(s);
        mb_sup_clients_flush(&s->clients, s->report_fds);
        if (may_end(s))
            return;
        turn(s);
    }
}

/* ---- start and end ---- */

static int inherited_fd(const char *name)
{
    const char *value = getenv(name);
    int fd = value != NULL ? atoi(value) : -1;

    if (fd < 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) != 0)
        return -1;
    unsetenv(name);
    return fd;
}

/* init waits for exactly one line. */
static void tell_init(int ready_fd, const char *text)
{
    ssize_t ignored;

    if (ready_fd < 0)
        return;
    ignored = write(ready_fd, text, strlen(text));
    (void)ignored; /* init is gone: the life pipe says so too */
    close(ready_fd);
}

static int set_up(struct supervisor *s, const char *spec_path, char *text)
{
    sigset_t mask;

    if (mb_sup_spec_read(spec_path, &s->spec, text) != 0)
        return -1;
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigaddset(&mask, SIGTERM);
    sigaddset(&mask, SIGINT);
    sigaddset(&mask, SIGHUP);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    s->dir_fd = open(s->spec.dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    s->signal_fd = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    if (s->dir_fd < 0 || s->signal_fd < 0 || fchdir(s->dir_fd) != 0 ||
        prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) {
        snprintf(text, MB_SUP_TEXT_MAX, "attempt directory: %s", strerror(errno));
        return -1;
    }
    s->state.supervisor_pid = getpid();
    s->state.supervisor_ticks = mb_sup_start_ticks(getpid());
    s->state.n_children = s->spec.n_children;
    mb_sup_plan_init(&s->plan, &s->spec);
    s->memory_look_ms = s->spec.memory_limit_bytes > 0 ? 0 : UINT64_MAX;
    mb_cgroup_create(&s->state.group, s->state.supervisor_pid, s->state.supervisor_ticks,
                     s->spec.memory_limit_bytes);
    if (mb_sup_state_write(&s->state, s->dir_fd, text) != 0)
        return -1;
    if (mb_sup_clients_listen(&s->clients, &s->state, text) != 0)
        return -1;
    if (access(spec_path, F_OK) != 0) { /* a new agent did not find us and took it away */
        snprintf(text, MB_SUP_TEXT_MAX, "spec %s: %s", spec_path, strerror(errno));
        return -1;
    }
    return 0;
}

int mb_supervise_main(const char *spec_path)
{
    static struct supervisor s; /* zeroed, and too large for a stack */
    char text[MB_SUP_TEXT_MAX] = "";
    int ready_fd = inherited_fd(MB_READY_FD_ENV);

    s.dir_fd = s.signal_fd = -1;
    s.life_fd = inherited_fd(MB_LIFE_FD_ENV);
    for (size_t i = 0; i < MB_SUP_CHILDREN_MAX; i++)
        s.report_fds[i] = -1;
    if (set_up(&s, spec_path, text) != 0) {
        fprintf(stderr, "mobula-init supervise: %s\n", text);
        tell_init(ready_fd, text);
        mb_cgroup_remove(&s.state.group);
        mb_sup_clients_close(&s.clients);
        mb_sup_spec_close(&s.spec);
        return 71;
    }
    prctl(PR_SET_NAME, "mobula-init"); /* exec through a descriptor named us by its number */
    tell_init(ready_fd, "ok");
    run(&s);
    mb_sup_clients_close(&s.clients);
    for (size_t i = 0; i < MB_SUP_CHILDREN_MAX; i++) {
        if (s.report_fds[i] >= 0)
            close(s.report_fds[i]);
    }
    if (s.life_fd >= 0)
        close(s.life_fd);
    close(s.signal_fd);
    close(s.dir_fd);
    mb_sup_spec_close(&s.spec);
    return 0;
}
