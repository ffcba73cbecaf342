/*
 * The control group of one supervisor's children: what is in it can be killed in one step, however
 * fast it forks. libc only.
 *
 * A group is a directory "mobula-PID-TICKS" (of its supervisor) in the control group that init was
 * started in, so it never leaves a limit that somebody else has set. v2 hands controllers on from a
 * group only while no process sits in it; where init is alone in its group (a pod, a service with
 * Delegate=yes) it therefore moves to a leaf "mobula-init" beside those of its supervisors, which
 * are born in there.
 * v2: cgroup.kill. Else the v1 freezer: freeze, SIGKILL to each, thaw. Where neither can be written
 * kind is MB_CGROUP_NONE and only the parent chain counts (procs.h). MOBULA_CGROUP=off, v1 or auto
 * in the environment of mobula-init restricts the choice.
 * Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/freezer-subsystem.rst of Linux.
 */
#ifndef MOBULA_AGENT_SUPERVISE_CGROUP_H
#define MOBULA_AGENT_SUPERVISE_CGROUP_H

#include <stdint.h>

enum mb_cgroup_kind { MB_CGROUP_NONE, MB_CGROUP_V1, MB_CGROUP_V2 };

enum { MB_CGROUP_DIR_MAX = 512 };

struct mb_cgroup {
    enum mb_cgroup_kind kind;
    char dir[MB_CGROUP_DIR_MAX]; /* "" with MB_CGROUP_NONE */
    int has_memory_limit;        /* the kernel enforces it */
};

/* For init, before it starts anything: if it is alone in a v2 group that has the memory controller
 * to give, it moves to the leaf and has that handed on. Never fails; otherwise nothing is changed.
 */
void mb_cgroup_take_seat(void);
/* And at its end, when it is alone again: everything is as it was. */
void mb_cgroup_leave_seat(void);

/* Makes the group of supervisor (pid, ticks); memory_limit_bytes 0: none. Never fails: what is not
 * possible shows in *out. */
void mb_cgroup_create(struct mb_cgroup *out, int64_t pid, uint64_t ticks,
                      uint64_t memory_limit_bytes);
/* The group that the supervisor (pid, ticks), started where we were, would have made;
 * MB_CGROUP_NONE when there is none. */
void mb_cgroup_find(struct mb_cgroup *out, int64_t pid, uint64_t ticks);
/* From what a state file says; only directories of our naming are taken. */
void mb_cgroup_open(struct mb_cgroup *out, const char *kind, const char *dir);

/* A descriptor to write "0" to, which puts the writer into the group; -1: none. */
int mb_cgroup_join_fd(const struct mb_cgroup *g);
/* SIGKILL to all that is in it. 0, or -1 when the kernel refused. */
int mb_cgroup_kill(const struct mb_cgroup *g);
/* 1: no live process is in it or below (also when it is gone). */
int mb_cgroup_is_empty(const struct mb_cgroup *g);
/* How often the kernel killed in it for memory. */
unsigned mb_cgroup_oom_kills(const struct mb_cgroup *g);
/* Removes it if it is empty; then kind is NONE. 0, or -1: still in use. */
int mb_cgroup_remove(struct mb_cgroup *g);

const char *mb_cgroup_kind_name(enum mb_cgroup_kind kind); /* "none", "cgroup-v1", "cgroup-v2" */

#endif
