/*
 * One pass: 1. read pid, state and parent of every process from /proc; 2. sort by pid; 3. mark the
 * children of the root, then theirs, until a round marks nothing; 4. append what is marked.
 *
 * A whole scan of /proc is used instead of /proc/PID/task/TID/children, because that file may skip
 * a child while a sibling exits, and a rank that misses its SIGTERM loses its checkpoint.
 * Zombies are taken along: one whose other threads go on (the first thread left) looks like one.
 * What can still be missed is a process whose parent died between the reads, or that was born
 * behind them. So both a signal and a kill stop the tree first, pass after pass, until one finds
 * nothing new; killing is repeated by the caller, too, until the kernel says that no child is left.
 *
 * A signal goes to a tree that stands still for a second reason: what a handler starts (the mkdir,
 * the upload of a trap that saves) must not get the signal as well. Without the halt nothing tells
 * it from a child that was born before its parent was signalled: start times count hundredths of a
 * second. A parent that waits for children that stop (a shell with job control, sudo) must not see
 * that they did: it stands before its children are stopped, and they go on before it does.
 *
 * Between a read and a signal a grandchild may end, be reaped by its parent, and its pid go to a
 * process of somebody else. So a signal goes through a pidfd whose process still has the start time
 * that was read; kernels before 5.3 have none, there the pid must do.
 */
#include "agent/supervise/procs.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "agent/supervise/clock.h"
#include "agent/supervise/state.h"

enum {
    STAT_MAX_BYTES = 1024,
    THREADS_FIELD = 20, /* of /proc/PID/stat, as proc(5) counts */
    TICKS_FIELD = 22,
    STOP_PASSES = 64,
    FORK_MAX_MS = 50,
    CALL_MAX_MS = 200,
    HALT_MAX_MS = 2000
};

struct proc {
    pid_t pid;
    pid_t ppid;
    uint64_t ticks; /* its start time */
    int marked;
    int stands;         /* until it gets SIGCONT */
    uint64_t halted_ms; /* when it got SIGSTOP; 0: it did not */
};

/* The text of a stat file from the state letter on (field 3): the command name before it may hold
 * spaces and parentheses. NULL when the process, or thread, is gone. */
static char *read_stat_at(const char *path, char buf[STAT_MAX_BYTES])
{
    char *close_paren;
    ssize_t n;
    int fd;

    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    n = read(fd, buf, STAT_MAX_BYTES - 1);
    close(fd);
    if (n <= 0)
        return NULL;
    buf[n] = '\0';
    close_paren = strrchr(buf, ')');
    return close_paren != NULL && close_paren[1] == ' ' ? close_paren + 2 : NULL;
}

static char *read_stat(long long pid, char buf[STAT_MAX_BYTES])
{
    char path[64];

    snprintf(path, sizeof(path), "/proc/%lld/stat", pid);
    return read_stat_at(path, buf);
}

/* p: from the state letter on. */
static uint64_t field_of(const char *p, int wanted)
{
    for (int field = 3; field < wanted; field++) {
        p = strchr(p, ' ');
        if (p == NULL)
            return 0;
        p++;
    }
    return strtoull(p, NULL, 10);
}

static uint64_t ticks_of(const char *p)
{
    return field_of(p, TICKS_FIELD);
}

uint64_t mb_sup_start_ticks(int64_t pid)
{
    char buf[STAT_MAX_BYTES];
    const char *p = read_stat((long long)pid, buf);

    return p != NULL ? ticks_of(p) : 0;
}

int mb_sup_is_running(int64_t pid, uint64_t start_ticks)
{
    char buf[STAT_MAX_BYTES];
    const char *p = read_stat((long long)pid, buf);

    return p != NULL && *p != 'Z' && *p != 'X' && ticks_of(p) == start_ticks;
}

int mb_sup_is_stopped(int64_t pid, uint64_t start_ticks)
{
    char buf[STAT_MAX_BYTES];
    const char *p = read_stat((long long)pid, buf);

    return p != NULL && (*p == 'T' || *p == 't') && ticks_of(p) == start_ticks;
}

/* Of those that had one pid the last one comes last. */
static int by_pid(const void *a, const void *b)
{
    const struct proc *x = a, *y = b;

    if (x->pid != y->pid)
        return x->pid < y->pid ? -1 : 1;
    return (x->ticks > y->ticks) - (x->ticks < y->ticks);
}

/* The process that has the pid now. procs: sorted by pid. */
static struct proc *find(struct proc *procs, size_t n, pid_t pid)
{
    size_t from = 0;

    for (size_t to = n; from < to;) { /* the first beyond it */
        size_t middle = from + (to - from) / 2;

        if (procs[middle].pid <= pid)
            from = middle + 1;
        else
            to = middle;
    }
    return from > 0 && procs[from - 1].pid == pid ? &procs[from - 1] : NULL;
}

static int is_known(const struct proc *procs, size_t n, const struct proc *p)
{
    return n > 0 && bsearch(p, procs, n, sizeof(*procs), by_pid) != NULL;
}

static int read_all(struct proc **out, size_t *n_out)
{
    DIR *dir = opendir("/proc");
    struct proc *all = NULL;
    size_t n = 0, cap = 0;
    struct dirent *entry;

    if (dir == NULL)
        return -1;
    while ((entry = readdir(dir)) != NULL) {
        char buf[STAT_MAX_BYTES];
        char *stat_text;
        int pid, ppid;

        if (!isdigit((unsigned char)entry->d_name[0]))
            continue;
        pid = atoi(entry->d_name);
        stat_text = read_stat(pid, buf);
        if (stat_text == NULL || sscanf(stat_text + 1, "%d", &ppid) != 1)
            continue;
        if (n == cap) {
            size_t grown = cap == 0 ? 256 : cap * 2;
            struct proc *p = reallocarray(all, grown, sizeof(*p));

            if (p == NULL) {
                free(all);
                closedir(dir);
                return -1;
            }
            all = p;
            cap = grown;
        }
        all[n++] = (struct proc){.pid = pid, .ppid = ppid, .ticks = ticks_of(stat_text)};
    }
    closedir(dir);
    *out = all;
    *n_out = n;
    return 0;
}

static int contains(const pid_t *pids, size_t n, pid_t pid)
{
    for (size_t i = 0; i < n; i++) {
        if (pids[i] == pid)
            return 1;
    }
    return 0;
}

static void mark_below(pid_t root, const pid_t *keep, size_t n_keep, struct proc *all, size_t n)
{
    int changed = n > 0;

    if (n > 0)
        qsort(all, n, sizeof(*all), by_pid);
    while (changed) {
        changed = 0;
        for (size_t i = 0; i < n; i++) {
            const struct proc *parent = find(all, n, all[i].ppid);

            if (all[i].marked || all[i].pid == root || contains(keep, n_keep, all[i].pid))
                continue;
            if (all[i].ppid == root || (parent != NULL && parent->marked)) {
                all[i].marked = 1;
                changed = 1;
            }
        }
    }
}

/* Adds the descendants that are not in procs yet (sorted by pid, malloc'ed, grown) behind the
 * others, sorted by pid as well. The number added, or -1. */
static int collect(const pid_t *keep, size_t n_keep, struct proc **procs, size_t *n)
{
    struct proc *all = NULL, *grown;
    size_t n_all = 0, n_old = *n;

    if (read_all(&all, &n_all) != 0)
        return -1;
    mark_below(getpid(), keep, n_keep, all, n_all);
    grown = reallocarray(*procs, n_old + n_all + 1, sizeof(**procs));
    if (grown == NULL) {
        free(all);
        return -1;
    }
    *procs = grown;
    for (size_t i = 0; i < n_all; i++) {
        if (all[i].marked && !is_known(grown, n_old, &all[i]))
            grown[(*n)++] = all[i];
    }
    free(all);
    return (int)(*n - n_old);
}

/* Where there is no pidfd (kernels before 5.3, a filter of system calls, no descriptor left) the
 * time between the look and the signal must do. */
int mb_procs_signal(int64_t pid, uint64_t start_ticks, int signal)
{
    int fd = (int)syscall(SYS_pidfd_open, (pid_t)pid, 0), rc;

    if (fd < 0 && (errno == ESRCH || errno == EINVAL))
        return -1;
    if (mb_sup_start_ticks(pid) != start_ticks) {
        rc = -1;
        errno = ESRCH;
    } else {
        rc = fd < 0 ? kill((pid_t)pid, signal)
                    : (int)syscall(SYS_pidfd_send_signal, fd, signal, NULL, 0);
    }
    if (fd >= 0) {
        int saved = errno;

        close(fd);
        errno = saved;
    }
    return rc;
}

/* Parents before their children. */
static int by_age(const void *a, const void *b)
{
    const struct proc *const *x = a, *const *y = b;

    return (*x)->ticks != (*y)->ticks ? ((*x)->ticks < (*y)->ticks ? -1 : 1) : by_pid(*x, *y);
}

/* Of all, in the order of their age. The array is malloc'ed; NULL: out of memory. */
static struct proc **in_order(struct proc *procs, size_t n)
{
    struct proc **order = reallocarray(NULL, n + 1, sizeof(*order));

    for (size_t i = 0; order != NULL && i < n; i++)
        order[i] = &procs[i];
    if (order != NULL && n > 0)
        qsort(order, n, sizeof(*order), by_age);
    return order;
}

static void nap(long ns)
{
    const struct timespec some = {.tv_nsec = ns};

    nanosleep(&some, NULL);
}

static int is_standing(char state)
{
    return strchr("TtZX", state) != NULL;
}

/* Of all threads: that of one that could run, else D, else T. A process shows that of its first
 * thread, which may stand, wait or have left, while another one is still inside fork(). */
static char state_of_threads(pid_t pid)
{
    char path[320], buf[STAT_MAX_BYTES], state = 'T';
    const struct dirent *entry;
    DIR *dir;

    snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
    dir = opendir(path);
    if (dir == NULL)
        return errno == ENOENT || errno == ESRCH ? 'T' : 'D'; /* gone; not to be seen now */
    while (strchr("TD", state) != NULL && (entry = readdir(dir)) != NULL) {
        const char *text;

        if (!isdigit((unsigned char)entry->d_name[0]))
            continue;
        snprintf(path, sizeof(path), "/proc/%d/task/%s/stat", (int)pid, entry->d_name);
        text = read_stat_at(path, buf);
        if (text != NULL && !is_standing(*text))
            state = *text;
    }
    closedir(dir);
    return state;
}

/* Its state; 'T': it does nothing more until it gets SIGCONT. What cannot be stopped (a program of
 * another user) is not waited for, nor what is gone, whoever has its pid now. */
static char state_of(struct proc *p)
{
    char buf[STAT_MAX_BYTES], state = 'T';
    const char *text = p->stands || p->halted_ms == 0 ? NULL : read_stat(p->pid, buf);

    if (text != NULL && ticks_of(text) == p->ticks)
        state = field_of(text, THREADS_FIELD) > 1 ? state_of_threads(p->pid) : *text;
    p->stands = is_standing(state);
    return p->stands ? 'T' : state;
}

/* In a system call that cannot be interrupted (D) it does not see its children; when it comes out
 * of it, it stops first. */
static void wait_for_parent(struct proc *parent, uint64_t until_ms)
{
    while (parent != NULL && strchr("TD", state_of(parent)) == NULL && mb_sup_now_ms() < until_ms)
        nap(200000);
}

/* Do all stand, so that none can be born any more? One in D may be inside fork(), which does not
 * take long; the parent of a vfork() waits so for a child that stands, others for a disk that may
 * never answer. One that could run waits for a processor: it is waited for. */
static int all_stand(struct proc *procs, size_t n)
{
    uint64_t now_ms = mb_sup_now_ms();
    int all = 1;

    for (size_t i = 0; i < n; i++)
        procs[i].marked = 0;
    for (size_t i = 0; i < n; i++) {
        struct proc *parent = find(procs, n, procs[i].ppid);

        if (parent != NULL)
            parent->marked = 1;
    }
    for (size_t i = 0; i < n && all; i++) {
        char state = state_of(&procs[i]);

        all = state == 'T' ||
              (state == 'D' &&
               now_ms > procs[i].halted_ms + (procs[i].marked ? FORK_MAX_MS : CALL_MAX_MS));
    }
    return all;
}

/* One pass: stops what is below this process and was not found before, and sorts it in. until_ms:
 * how long to wait that its parents stand; 0: not at all. The number found, or -1. */
static int halt_pass(const pid_t *keep, size_t n_keep, uint64_t until_ms, struct proc **procs,
                     size_t *n)
{
    size_t n_old = *n, n_new;
    int added = collect(keep, n_keep, procs, n);
    struct proc *found, **order;

    if (added <= 0)
        return added;
    found = *procs + n_old;
    n_new = *n - n_old;
    order = in_order(found, n_new);
    for (size_t i = 0; order != NULL && i < n_new; i++) {
        struct proc *parent = find(found, n_new, order[i]->ppid);

        if (until_ms > 0)
            wait_for_parent(parent != NULL ? parent : find(*procs, n_old, order[i]->ppid),
                            until_ms);
        if (mb_procs_signal(order[i]->pid, order[i]->ticks, SIGSTOP) == 0)
            order[i]->halted_ms = mb_sup_now_ms();
    }
    free(order);
    qsort(*procs, *n, sizeof(**procs), by_pid);
    return order != NULL ? added : -1;
}

/* Until a pass finds nothing new while all stand: one that was stopped inside fork() finishes that
 * first. A tree that does not stand in time gets its signal as far as it was seen. */
static int halt_tree(struct proc **procs, size_t *n)
{
    uint64_t until_ms = mb_sup_now_ms() + HALT_MAX_MS;
    int stood, added;

    do {
        stood = all_stand(*procs, *n);
        added = halt_pass(NULL, 0, until_ms, procs, n);
        if (added == 0 && !stood)
            nap(1000000);
    } while (added >= 0 && (added > 0 || !stood) && mb_sup_now_ms() < until_ms);
    return added < 0 ? -1 : 0;
}

int mb_procs_signal_tree(int signal)
{
    struct proc *procs = NULL, **order;
    size_t n = 0;
    int rc = halt_tree(&procs, &n);

    order = in_order(procs, n);
    rc = order == NULL ? -1 : rc;
    for (size_t i = 0; rc == 0 && i < n; i++) /* what is gone meanwhile needs none */
        mb_procs_signal(procs[i].pid, procs[i].ticks, signal);
    for (size_t i = n; i > 0; i--) {
        const struct proc *p = order != NULL ? order[i - 1] : &procs[i - 1];

        mb_procs_signal(p->pid, p->ticks, SIGCONT);
    }
    free(order);
    free(procs);
    return rc == 0 ? (int)n : -1;
}

int mb_procs_kill_tree(const pid_t *keep, size_t n_keep)
{
    struct proc *procs = NULL;
    size_t n = 0;
    int added = 1;

    for (int pass = 0; pass < STOP_PASSES && added > 0; pass++)
        added = halt_pass(keep, n_keep, 0, &procs, &n);
    for (size_t i = 0; i < n; i++)
        mb_procs_signal(procs[i].pid, procs[i].ticks, SIGKILL);
    free(procs);
    return added < 0 && n == 0 ? -1 : (int)n;
}

/* ---- memory ---- */

static uint64_t resident_bytes(pid_t pid)
{
    unsigned long long pages = 0;
    char path[64];
    FILE *f;

    snprintf(path, sizeof(path), "/proc/%d/statm", (int)pid);
    f = fopen(path, "re");
    if (f == NULL)
        return 0;
    if (fscanf(f, "%*s %llu", &pages) != 1)
        pages = 0;
    fclose(f);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* What it shares counts by its part; where the kernel does not say, all that is resident. */
static uint64_t proportional_bytes(pid_t pid)
{
    unsigned long long kib = 0;
    char path[64], line[128];
    int found = 0;
    FILE *f;

    snprintf(path, sizeof(path), "/proc/%d/smaps_rollup", (int)pid);
    f = fopen(path, "re");
    while (f != NULL && !found && fgets(line, sizeof(line), f) != NULL)
        found = sscanf(line, "Pss: %llu", &kib) == 1;
    if (f != NULL)
        fclose(f);
    return found ? kib * 1024 : resident_bytes(pid);
}

int mb_procs_memory_exceeds(uint64_t limit_bytes)
{
    uint64_t (*const measures[])(pid_t) = {resident_bytes, proportional_bytes};
    struct proc *procs = NULL;
    size_t n = 0;
    int above = 1;

    if (collect(NULL, 0, &procs, &n) < 0) {
        free(procs);
        return -1;
    }
    for (int m = 0; m < 2 && above; m++) {
        uint64_t sum = 0;

        for (size_t i = 0; i < n; i++)
            sum += measures[m](procs[i].pid);
        above = sum > limit_bytes;
    }
    free(procs);
    return above;
}
