/*
 * The front process of a node.
 *
 *  1. become subreaper, take the signals, open the life pipe, write init.pid;
 *  2. start the agent with one end of a socket; it says "ready" when the node is up;
 *  3. on "spawn PATH" start a supervisor and answer when it listens or says why it cannot; on
 *     "drop PATH" kill it if it has not answered yet: it hangs, and nobody waits for it;
 *  4. the agent crashed: start it again after a back-off of 0.1 to 5 s; supervisors stay;
 *  5. the agent exited 0, or with 64..78 (what it was asked is wrong) before it was ever ready, or
 *     cannot be executed: end, with that status;
 *  6. SIGTERM or SIGINT: the agent gets SIGTERM and the grace, then the supervisors get SIGTERM and
 *     the grace, then whatever is below us is killed until the kernel says that nothing is. An
 *     agent that is still there after its grace is told once more, which makes it leave the
 *     cluster at once. A signal sent with a value (sigqueue) says in milliseconds after how long
 *     its sender pushes: the agent has 3/4 of that, everything together 7/8. Without one
 *     --killed-after-ms says after how long we are killed: the agent has all of it but 6 s,
 *     everything together all but 2 s (of short times 3/4 and 7/8). Either way the agent hears how
 *     long it has, by a value with its own SIGTERM. A second signal skips the waiting. SIGHUP is
 *     forwarded to the agent. An agent that crashes in its grace is started again and told what is
 *     left of it: what gangs have saved is still to be sent.
 *
 * A supervisor that was killed leaves its processes to us (subreaper): they are killed at once,
 * since nobody could tell any more how they end. While we stop, its socket goes as well. Other
 * orphans are reaped when they end. We are killed: the agent gets SIGTERM from the kernel and sees
 * its socket close, supervisors see the life pipe hang up, and all end what they own.
 */
#include "agent/supervise/front.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "agent/supervise/cgroup.h"
#include "agent/supervise/child.h"
#include "agent/supervise/clock.h"
#include "agent/supervise/file.h"
#include "agent/supervise/procs.h"
#include "agent/supervise/protocol.h"
#include "agent/supervise/secrets.h"
#include "agent/supervise/state.h"
#include "agent/supervise/sender.h"

enum {
    DEAD_MAX = 64,          /* killed supervisors whose control group is not removed yet */
    SUPERVISORS_MAX = 1024, /* at the bound a spawn is refused */
    BACKOFF_MIN_MS = 100,
    BACKOFF_MAX_MS = 5000,
    STABLE_MS = 60 * 1000, /* an agent that lived this long starts again without back-off */
    KILL_AGAIN_MS = 20,
    LEAVE_MS = 3000,     /* for an agent that stops waiting for its gangs */
    LEAVE_ALL_MS = 6000, /* ... and its supervisors, before we are killed ... */
    LAST_MS = 2000,      /* ... and what is left of them */
    STATUS_CANNOT_RUN = 66,
    STATUS_CANNOT_START = 71
};

enum phase { SERVING, STOPPING_AGENT, STOPPING_SUPERVISORS, KILLING };

struct supervisor_slot {
    pid_t pid;      /* 0: free */
    int ready_fd;   /* -1: it has answered */
    uint64_t ticks; /* its start time: with pid the name of its control group */
    char *spec;     /* path, its socket is beside it */
};

struct dead_supervisor {
    pid_t pid; /* 0: free */
    uint64_t ticks;
};

struct front {
    const struct mb_front_opts *opts;
    enum phase phase;
    uint64_t phase_ends_ms;
    uint64_t all_by_ms; /* when supervisors are killed, if the signal said so; 0: it did not */
    int agent_told_twice;
    int agent_is_timed; /* it hears how much time it has */
    int restart_due;    /* it is to be started, also while it stops */
    int signal_fd, self_fd;
    int life_fds[2]; /* [1] is held by this process only */
    pid_t agent_pid; /* 0: not running */
    int agent_sock;  /* -1: none */
    int ever_ready;
    uint64_t agent_started_ms, agent_restart_ms, backoff_ms;
    int status;     /* of this process at the end */
    int strays_due; /* a supervisor was killed: what it left must go */
    uint64_t strays_again_ms;
    char **supervisor_env; /* ours without the keys of an object store: jobs can read it */
    struct supervisor_slot supervisors[SUPERVISORS_MAX];
    struct dead_supervisor dead[DEAD_MAX];
    size_t next_dead;
    struct pollfd poll_fds[SUPERVISORS_MAX + 2];
};

static void say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static void say(const char *fmt, ...)
{
    char text[MB_SUP_PACKET_MAX];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    fprintf(stderr, "mobula-init: %s\n", text);
}

static void enter(struct front *f, enum phase phase, uint64_t ends_ms)
{
    f->phase = phase;
    f->phase_ends_ms = ends_ms;
}

/* ---- supervisors ---- */

static int n_supervisors(const struct front *f)
{
    int n = 0;

    for (size_t i = 0; i < SUPERVISORS_MAX; i++)
        n += f->supervisors[i].pid != 0;
    return n;
}

static void answer(struct front *f, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void answer(struct front *f, const char *fmt, ...)
{
    char packet[MB_SUP_PACKET_MAX + MB_SUP_TEXT_MAX];
    va_list ap;
    int n;

    va_start(ap, fmt);
    n = vsnprintf(packet, sizeof(packet), fmt, ap);
    va_end(ap);
    if (n >= (int)sizeof(packet))
        n = (int)sizeof(packet) - 1;
    if (f->agent_sock >= 0 &&
        send(f->agent_sock, packet, (size_t)n, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
        say("answer to the agent lost: %s", strerror(errno));
}

static void spawn(struct front *f, const char *path)
{
    char self[32], text[MB_SUP_TEXT_MAX] = "out of memory";
    const char *argv[] = {"mobula-init", "supervise", path, NULL};
    struct mb_exec x = {.program = self, /* this very binary, also after an upgrade on disk */
                        .argv = argv,
                        .env = (const char *const *)f->supervisor_env,
                        .pass_fd = {-1, f->life_fds[0]},
                        .fd_env = {MB_READY_FD_ENV, MB_LIFE_FD_ENV}};
    struct supervisor_slot *slot = NULL;
    int ready[2] = {-1, -1};

    for (size_t i = 0; i < SUPERVISORS_MAX && slot == NULL; i++) {
        if (f->supervisors[i].pid == 0)
            slot = &f->supervisors[i];
    }
    if (f->phase != SERVING || slot == NULL) {
        answer(f, "error %s\n%s", path,
               slot == NULL ? "too many supervisors on this node" : "the node is stopping");
        return;
    }
    snprintf(self, sizeof(self), "/proc/self/fd/%d", f->self_fd);
    slot->spec = strdup(path);
    if (slot->spec != NULL && pipe2(ready, O_CLOEXEC) == 0) {
        x.pass_fd[0] = ready[1];
        slot->pid = mb_child_exec(&x, text);
        close(ready[1]);
    }
    if (slot->pid <= 0) {
        answer(f, "error %s\n%s", path, text);
        if (ready[0] >= 0)
            close(ready[0]);
        free(slot->spec);
        *slot = (struct supervisor_slot){.ready_fd = -1};
        return;
    }
    slot->ready_fd = ready[0];
    slot->ticks = mb_sup_start_ticks(slot->pid);
}

/* From now on nothing is to be told of it. */
static void close_answer(struct supervisor_slot *slot)
{
    close(slot->ready_fd);
    slot->ready_fd = -1;
}

/* What it has started goes when its end is seen. */
static void drop(struct front *f, const char *path)
{
    for (size_t i = 0; i < SUPERVISORS_MAX; i++) {
        struct supervisor_slot *slot = &f->supervisors[i];

        if (slot->pid == 0 || slot->ready_fd < 0 || strcmp(slot->spec, path) != 0)
            continue;
        say("supervisor %d has not answered and nobody waits for it: killing it", (int)slot->pid);
        close_answer(slot);
        kill(slot->pid, SIGKILL);
    }
}

/* The supervisor said "ok", why not, or died without a word. */
static void supervisor_answered(struct front *f, struct supervisor_slot *slot)
{
    char text[MB_SUP_TEXT_MAX];
    ssize_t n = read(slot->ready_fd, text, sizeof(text) - 1);

    if (n < 0 && errno == EINTR)
        return;
    text[n > 0 ? n : 0] = '\0';
    if (strcmp(text, "ok") == 0)
        answer(f, "ok %d %s", (int)slot->pid, slot->spec);
    else
        answer(f, "error %s\n%s", slot->spec, n > 0 ? text : "the supervisor died at once");
    close_answer(slot);
}

/* In one step, so that nothing it forks meanwhile is missed. */
static void kill_group_of(pid_t pid, uint64_t ticks)
{
    struct mb_cgroup group;

    mb_cgroup_find(&group, pid, ticks);
    if (mb_cgroup_kill(&group) != 0)
        say("%s cannot be killed: %s", group.dir, strerror(errno));
}

/* The number of groups of killed supervisors that are still in use. */
static int remove_dead_groups(struct front *f)
{
    int n = 0;

    for (size_t i = 0; i < DEAD_MAX; i++) {
        struct mb_cgroup group;

        if (f->dead[i].pid == 0)
            continue;
        mb_cgroup_find(&group, f->dead[i].pid, f->dead[i].ticks);
        if (mb_cgroup_remove(&group) == 0)
            f->dead[i].pid = 0;
        else
            n++;
    }
    return n;
}

/* Of one that could not do it, with no agent to come after us that looks what became of it. While
 * there is one it does that: its files may be where nothing answers. */
static void remove_socket(const struct front *f, const struct supervisor_slot *slot)
{
    const char *name = strrchr(slot->spec, '/') + 1;
    char path[MB_SUP_PACKET_MAX];

    if (f->phase == SERVING)
        return;
    snprintf(path, sizeof(path), "%.*s%s", (int)(name - slot->spec), slot->spec, MB_SUP_SOCKET);
    unlink(path);
}

static void supervisor_ended(struct front *f, struct supervisor_slot *slot, int status)
{
    if (slot->ready_fd >= 0)
        supervisor_answered(f, slot);
    if (WIFSIGNALED(status)) {
        say("supervisor %d was ended by signal %d: killing what it left", (int)slot->pid,
            WTERMSIG(status));
        kill_group_of(slot->pid, slot->ticks);
        f->dead[f->next_dead++ % DEAD_MAX] =
            (struct dead_supervisor){.pid = slot->pid, .ticks = slot->ticks};
        f->strays_due = 1;
        remove_socket(f, slot);
    }
    free(slot->spec);
    *slot = (struct supervisor_slot){.ready_fd = -1};
}

/* Kills what is below us but neither the agent's nor a supervisor's; again until there is none. */
static void kill_strays(struct front *f)
{
    pid_t keep[SUPERVISORS_MAX + 1];
    size_t n = 0;

    if (!f->strays_due || mb_sup_now_ms() < f->strays_again_ms)
        return;
    if (f->agent_pid > 0)
        keep[n++] = f->agent_pid;
    for (size_t i = 0; i < SUPERVISORS_MAX; i++) {
        if (f->supervisors[i].pid != 0)
            keep[n++] = f->supervisors[i].pid;
    }
    f->strays_due = mb_procs_kill_tree(keep, n) != 0;
    f->strays_due |= remove_dead_groups(f) != 0;
    f->strays_again_ms = mb_sup_now_ms() + KILL_AGAIN_MS;
}

/* ---- agent ---- */

static void start_agent(struct front *f)
{
    char text[MB_SUP_TEXT_MAX];
    struct mb_exec x = {.argv = (const char *const *)f->opts->agent_argv,
                        .pass_fd = {-1, f->opts->secret_fd},
                        .fd_env = {MB_INIT_FD_ENV, MB_SECRET_FD_ENV},
                        .death_signal = SIGTERM,
                        .holds_term = f->phase == STOPPING_AGENT};
    int pair[2];

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
        say("socketpair: %s", strerror(errno));
        f->agent_restart_ms = mb_sup_now_ms() + BACKOFF_MAX_MS;
        f->restart_due = 1;
        return;
    }
    x.pass_fd[0] = pair[1];
    f->agent_started_ms = mb_sup_now_ms();
    f->agent_pid = mb_child_exec(&x, text);
    close(pair[1]);
    if (f->agent_pid > 0) {
        f->agent_sock = pair[0];
        return;
    }
    close(pair[0]);
    f->agent_pid = 0;
    say("%s", text);
    f->status = STATUS_CANNOT_RUN;
    enter(f, STOPPING_AGENT, mb_sup_now_ms());
}

/* By a signal that is none of those that we tell it to end with. */
static int has_crashed(int status)
{
    return WIFSIGNALED(status) && WTERMSIG(status) != SIGTERM && WTERMSIG(status) != SIGINT;
}

static void agent_ended(struct front *f, int status)
{
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    int in_grace = f->phase == STOPPING_AGENT && !f->agent_told_twice && f->ever_ready &&
                   mb_sup_now_ms() < f->phase_ends_ms;
    int wanted = f->phase == SERVING ? code == 0 || (!f->ever_ready && code >= 64 && code <= 78)
                                     : !in_grace || !has_crashed(status);

    f->agent_pid = 0;
    if (f->agent_sock >= 0)
        close(f->agent_sock);
    f->agent_sock = -1;
    if (wanted) {
        f->status = code;
        if (f->phase == SERVING)
            enter(f, STOPPING_AGENT, mb_sup_now_ms());
        return;
    }
    if (mb_sup_now_ms() - f->agent_started_ms >= STABLE_MS || f->backoff_ms == 0)
        f->backoff_ms = BACKOFF_MIN_MS;
    say("the agent ended with status %d; starting it again in %llu ms", code,
        (unsigned long long)f->backoff_ms);
    f->restart_due = 1;
    f->agent_restart_ms = mb_sup_now_ms() + f->backoff_ms;
    f->backoff_ms = f->backoff_ms * 2 > BACKOFF_MAX_MS ? BACKOFF_MAX_MS : f->backoff_ms * 2;
}

static void agent_said(struct front *f)
{
    char packet[MB_SUP_PACKET_MAX + 1];
    ssize_t n = recv(f->agent_sock, packet, sizeof(packet) - 1, MSG_DONTWAIT);

    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) { /* it is ending, or closed its end: SIGCHLD tells the rest */
        close(f->agent_sock);
        f->agent_sock = -1;
        return;
    }
    packet[n] = '\0';
    if (strcmp(packet, "ready") == 0)
        f->ever_ready = 1;
    else if (strncmp(packet, "spawn /", 7) == 0 && strlen(packet) == (size_t)n &&
             strchr(packet, '\n') == NULL)
        spawn(f, packet + 6);
    else if (strncmp(packet, "drop /", 6) == 0 && strlen(packet) == (size_t)n)
        drop(f, packet + 5);
    else
        answer(f, "error -\nnot a request that this mobula-init knows");
}

/* ---- events ---- */

static void reap(struct front *f, int *none_left)
{
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG);

        if (pid < 0 && errno == EINTR)
            continue;
        *none_left = pid < 0;
        if (pid <= 0)
            return;
        if (pid == f->agent_pid) {
            agent_ended(f, status);
            continue;
        }
        for (size_t i = 0; i < SUPERVISORS_MAX; i++) {
            if (f->supervisors[i].pid == pid)
                supervisor_ended(f, &f->supervisors[i], status);
        }
    }
}

/* With the time that is left of its grace, if it plans with that. */
static void tell_agent_to_end(const struct front *f)
{
    uint64_t now = mb_sup_now_ms();
    union sigval value = {0};

    if (f->agent_is_timed && f->phase_ends_ms > now)
        value.sival_int = (int)(f->phase_ends_ms - now);
    if (f->agent_pid > 0)
        sigqueue(f->agent_pid, SIGTERM, value);
}

/* pushed_after_ms: 0, not said. */
static void begin_stop(struct front *f, int pushed_after_ms)
{
    uint64_t now = mb_sup_now_ms(), grace_ms = f->opts->grace_ms;
    uint64_t killed_ms = f->opts->killed_after_ms;

    if (pushed_after_ms > 0) {
        grace_ms = (uint64_t)pushed_after_ms * 3 / 4;
        f->all_by_ms = now + (uint64_t)pushed_after_ms * 7 / 8;
    } else if (killed_ms > 0) {
        grace_ms = killed_ms - (killed_ms / 4 < LEAVE_ALL_MS ? killed_ms / 4 : LEAVE_ALL_MS);
        f->all_by_ms = now + killed_ms - (killed_ms / 8 < LAST_MS ? killed_ms / 8 : LAST_MS);
    }
    f->agent_is_timed = pushed_after_ms > 0 || killed_ms > 0;
    f->restart_due &= f->ever_ready; /* it has crashed just now: what it was at goes on */
    f->agent_restart_ms = now;
    enter(f, STOPPING_AGENT, now + grace_ms);
    tell_agent_to_end(f);
}

static void take_signals(struct front *f)
{
    struct signalfd_siginfo info;

    while (read(f->signal_fd, &info, sizeof(info)) == (ssize_t)sizeof(info)) {
        if (info.ssi_signo == SIGCHLD || !mb_sender_counts(&info))
            continue;
        if (info.ssi_signo == SIGHUP) {
            if (f->agent_pid > 0)
                kill(f->agent_pid, SIGHUP);
        } else if (f->phase == SERVING) {
            begin_stop(f, info.ssi_code == SI_QUEUE ? info.ssi_int : 0);
        } else if (f->phase != KILLING) {
            enter(f, KILLING, mb_sup_now_ms());
        }
    }
}

/* Moves on when a phase is over. 1: nothing is left, end. */
static int advance(struct front *f, int none_left)
{
    uint64_t now = mb_sup_now_ms();

    if (f->phase <= STOPPING_AGENT && f->restart_due && now >= f->agent_restart_ms) {
        f->restart_due = 0;
        start_agent(f);
        if (f->phase == STOPPING_AGENT)
            tell_agent_to_end(f);
    }
    if (f->phase == SERVING)
        return 0;
    if (f->phase == STOPPING_AGENT && f->agent_pid != 0 && now >= f->phase_ends_ms &&
        !f->agent_told_twice) {
        f->agent_told_twice = 1;
        kill(f->agent_pid, SIGTERM);
        f->phase_ends_ms = now + LEAVE_MS;
    }
    if (f->phase == STOPPING_AGENT &&
        ((f->agent_pid == 0 && !f->restart_due) || now >= f->phase_ends_ms)) {
        if (f->agent_pid != 0) {
            say("the agent did not end in time: killing it");
            kill(f->agent_pid, SIGKILL);
        }
        for (size_t i = 0; i < SUPERVISORS_MAX; i++) {
            if (f->supervisors[i].pid != 0)
                kill(f->supervisors[i].pid, SIGTERM);
        }
        enter(f, STOPPING_SUPERVISORS, f->all_by_ms != 0 ? f->all_by_ms : now + f->opts->grace_ms);
    }
    if (f->phase == STOPPING_SUPERVISORS &&
        ((f->agent_pid == 0 && n_supervisors(f) == 0) || now >= f->phase_ends_ms))
        enter(f, KILLING, now);
    if (f->phase == KILLING && !none_left && now >= f->phase_ends_ms) {
        for (size_t i = 0; i < SUPERVISORS_MAX; i++)
            if (f->supervisors[i].pid != 0)
                kill_group_of(f->supervisors[i].pid, f->supervisors[i].ticks);
        mb_procs_kill_tree(NULL, 0);
        f->phase_ends_ms = now + KILL_AGAIN_MS;
    }
    return f->phase == KILLING && none_left;
}

static int poll_timeout(const struct front *f)
{
    uint64_t now = mb_sup_now_ms(), at = UINT64_MAX;

    if (f->phase != SERVING)
        at = f->phase_ends_ms;
    if (f->phase <= STOPPING_AGENT && f->restart_due && f->agent_restart_ms < at)
        at = f->agent_restart_ms;
    if (f->strays_due && f->strays_again_ms < at)
        at = f->strays_again_ms;
    if (at == UINT64_MAX)
        return -1;
    return at <= now ? 0 : at - now > 60000 ? 60000 : (int)(at - now);
}

static void turn(struct front *f)
{
    struct supervisor_slot *waiting[SUPERVISORS_MAX];
    nfds_t n = 0;
    int agent_sock = f->agent_sock;

    f->poll_fds[n++] = (struct pollfd){.fd = f->signal_fd, .events = POLLIN};
    f->poll_fds[n++] = (struct pollfd){.fd = agent_sock, .events = POLLIN};
    for (size_t i = 0; i < SUPERVISORS_MAX; i++) {
        if (f->supervisors[i].pid == 0 || f->supervisors[i].ready_fd < 0)
            continue;
        waiting[n - 2] = &f->supervisors[i];
        f->poll_fds[n++] = (struct pollfd){.fd = f->supervisors[i].ready_fd, .events = POLLIN};
    }
    if (poll(f->poll_fds, n, poll_timeout(f)) <= 0)
        return; /* a deadline, or a signal that the next turn reads */
    for (nfds_t i = 2; i < n; i++) {
        if (f->poll_fds[i].revents != 0)
            supervisor_answered(f, waiting[i - 2]);
    }
    if (f->poll_fds[1].revents != 0)
        agent_said(f);
    if (f->poll_fds[0].revents != 0)
        take_signals(f);
}

/* ---- start and end ---- */

static int write_pid_file(const struct front *f)
{
    char path[4096], text[64];
    int n = snprintf(text, sizeof(text), "%d %llu\n", (int)getpid(),
                     (unsigned long long)mb_sup_start_ticks(getpid()));

    if (snprintf(path, sizeof(path), "%s/%s", f->opts->run_dir, MB_INIT_PID_FILE) >=
        (int)sizeof(path)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    return mb_file_replace(AT_FDCWD, path, text, (size_t)n, 1);
}

static int set_up(struct front *f)
{
    sigset_t mask;

    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigaddset(&mask, SIGTERM);
    sigaddset(&mask, SIGINT);
    sigaddset(&mask, SIGHUP);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    f->signal_fd = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    f->self_fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    if (f->signal_fd < 0 || f->self_fd < 0 || prctl(PR_SET_CHILD_SUBREAPER, 1) != 0 ||
        pipe2(f->life_fds, O_CLOEXEC) != 0 || write_pid_file(f) != 0) {
        say("cannot start in %s: %s", f->opts->run_dir, strerror(errno));
        return -1;
    }
    mb_cgroup_take_seat();
    return 0;
}

/* The parent waits until the daemon is set up and takes over its verdict. Returns in the daemon. */
static int daemonize(const struct mb_front_opts *opts)
{
    char path[4096];
    int fds[2], log_fd, null_fd;
    unsigned char status = STATUS_CANNOT_START;
    pid_t pid;

    snprintf(path, sizeof(path), "%s/agent.log", opts->run_dir);
    log_fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    null_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (log_fd < 0 || null_fd < 0 || pipe2(fds, O_CLOEXEC) != 0 || (pid = fork()) < 0) {
        say("cannot go to the background: %s: %s", path, strerror(errno));
        exit(STATUS_CANNOT_START);
    }
    if (pid > 0) {
        ssize_t n;

        close(fds[1]);
        do {
            n = read(fds[0], &status, 1);
        } while (n < 0 && errno == EINTR);
        if (n != 1 || status != 0)
            say("see %s", path);
        exit(status);
    }
    setsid();
    dup2(null_fd, STDIN_FILENO);
    dup2(log_fd, STDOUT_FILENO);
    dup2(log_fd, STDERR_FILENO);
    close(fds[0]);
    return fds[1];
}

/* Before anything else, forks inherit it. Jobs are the same user: what is not dumpable opens
 * /proc/PID/fd and /proc/PID/environ to none of them. */
static int keep_secret(int fd)
{
    if (fd < 0 && !mb_has_store_keys(environ))
        return 0;
    if (prctl(PR_SET_DUMPABLE, 0) == 0 && (fd < 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) == 0))
        return 0;
    say("--secret-fd %d: %s", fd, strerror(errno));
    return -1;
}

int mb_front_main(const struct mb_front_opts *opts)
{
    static struct front f; /* zeroed, and too large for a stack */
    int none_left = 0, up_fd;
    unsigned char status = 0;
    char path[4096];

    if (keep_secret(opts->secret_fd) != 0)
        return STATUS_CANNOT_START;
    f.supervisor_env = mb_without_store_keys(environ);
    if (f.supervisor_env == NULL) {
        say("out of memory");
        return STATUS_CANNOT_START;
    }
    up_fd = opts->daemonize ? daemonize(opts) : -1;
    f.opts = opts;
    f.agent_sock = -1;
    f.restart_due = 1;
    for (size_t i = 0; i < SUPERVISORS_MAX; i++)
        f.supervisors[i].ready_fd = -1;
    if (set_up(&f) != 0)
        return STATUS_CANNOT_START;
    if (up_fd >= 0) {
        if (write(up_fd, &status, 1) != 1)
            say("whoever started us is gone");
        close(up_fd);
    }
    do {
        turn(&f);
        reap(&f, &none_left);
        kill_strays(&f);
    } while (!advance(&f, none_left));
    remove_dead_groups(&f);
    mb_cgroup_leave_seat();
    snprintf(path, sizeof(path), "%s/%s", opts->run_dir, MB_INIT_PID_FILE);
    unlink(path);
    close(f.signal_fd);
    close(f.self_fd);
    close(f.life_fds[0]);
    close(f.life_fds[1]);
    free(f.supervisor_env);
    return f.status;
}
