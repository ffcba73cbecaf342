/*
 * One pass: 1. read pid, state and parent of every process from /proc; 2. sort by pid; 3. mark the
 * children of the root, then theirs, until a round marks nothing; 4. append what is marked.
 *
 * A whole scan of /proc is used instead of /proc/PID/task/TID/children, because that file may skip
 * a child while a sibling exits, and a rank that misses its SIGTERM loses its checkpoint.
 * Zombies are taken along: one whose other threads go on (the first thread left) looks like one.
 * What can still be missed is a process whose parent died between the reads: it is our child by
 * then, and the next pass sees it. So signalling makes a second pass, and killing is repeated by
 * the caller until the kernel says that no child is left.
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
#include <unistd.h>
#include "agent/supervise/state.h"

enum { STAT_MAX_BYTES = 1024, TICKS_FIELD = 22, STOP_PASSES = 64 };

struct proc {
    pid_t pid;
    pid_t ppid;
    uint64_t ticks; /* its start time */
    int marked;
};

/* The text of /proc/PID/stat from the state letter on (field 3): the command name before it may
 * hold spaces and parentheses. NULL when the process is gone. */
static char *read_stat(long long pid, char buf[STAT_MAX_BYTES])
{
    char path[64];
    char *close_paren;
    ssize_t n;
    int fd;

    snprintf(path, sizeof(path), "/proc/%lld/stat", pid);
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

/* From the state letter on. */
static uint64_t ticks_of(const char *p)
{
    for (int field = 3; field < TICKS_FIELD; field++) {
        p = strchr(p, ' ');
        if (p == NULL)
            return 0;
        p++;
    }
    return strtoull(p, NULL, 10);
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

static int by_pid(const void *a, const void *b)
{
    const struct proc *x = a, *y = b;

    return x->pid < y->pid ? -1 : x->pid > y->pid;
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
            struct proc key = {.pid = all[i].ppid};
            const struct proc *parent = bsearch(&key, all, n, sizeof(*all), by_pid);

            if (all[i].marked || all[i].pid == root || contains(keep, n_keep, all[i].pid))
                continue;
            if (all[i].ppid == root || (parent != NULL && parent->marked)) {
                all[i].marked = 1;
                changed = 1;
            }
        }
    }
}

static int is_known(const struct proc *procs, size_t n, const struct proc *p)
{
    for (size_t i = 0; i < n; i++) {
        if (procs[i].pid == p->pid && procs[i].ticks == p->ticks)
            return 1;
    }
    return 0;
}

/* Adds the descendants that are not in procs yet (malloc'ed, grown). The number added, or -1. */
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

int mb_procs_signal(int64_t pid, uint64_t start_ticks, int signal)
{
    int fd = (int)syscall(SYS_pidfd_open, (pid_t)pid, 0), rc;

    if (fd < 0 && errno != ENOSYS && errno != EPERM) /* EPERM: a filter of system calls */
        return -1;
    if (fd >= 0 && mb_sup_start_ticks(pid) != start_ticks) {
        close(fd);
        errno = ESRCH;
        return -1;
    }
    rc = fd < 0 ? kill((pid_t)pid, signal)
                : (int)syscall(SYS_pidfd_send_signal, fd, signal, NULL, 0);
    if (fd >= 0)
        close(fd);
    return rc;
}

int mb_procs_signal_tree(int signal)
{
    struct proc *procs = NULL;
    size_t n = 0;

    for (int pass = 0; pass < 2; pass++) {
        size_t done = n;

        if (collect(NULL, 0, &procs, &n) < 0) {
            free(procs);
            return -1;
        }
        for (size_t i = done; i < n; i++) /* what is gone meanwhile needs none */
            mb_procs_signal(procs[i].pid, procs[i].ticks, signal);
    }
    free(procs);
    return (int)n;
}

int mb_procs_kill_tree(const pid_t *keep, size_t n_keep)
{
    struct proc *procs = NULL;
    size_t n = 0;
    int added = 1;

    for (int pass = 0; pass < STOP_PASSES && added > 0; pass++) {
        size_t done = n;

        added = collect(keep, n_keep, &procs, &n);
        for (size_t i = done; i < n; i++)
            mb_procs_signal(procs[i].pid, procs[i].ticks, SIGSTOP);
    }
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
