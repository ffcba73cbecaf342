/*
 * What a supervisor knows about its children, kept in the file "state" of the attempt directory:
 * whoever finds no supervisor any more reads here how it ended. Replaced atomically at each change.
 * libc only.
 */
#ifndef MOBULA_AGENT_SUPERVISE_STATE_H
#define MOBULA_AGENT_SUPERVISE_STATE_H

#include <stddef.h>
#include <stdint.h>
#include "agent/supervise/cgroup.h"
#include "agent/supervise/spec.h"

enum mb_sup_phase {
    MB_SUP_WAITING, /* not started yet */
    MB_SUP_RUNNING,
    MB_SUP_EXITED, /* code and signal are valid */
    MB_SUP_FAILED  /* could not be started: counts as exited with code 127 */
};

struct mb_sup_child_state {
    enum mb_sup_phase phase;
    int64_t pid;          /* 0 while waiting or when it could not be started */
    uint64_t start_ticks; /* field 22 of /proc/PID/stat: with pid it names one process for ever */
    int code;             /* exit status, 0 when a signal ended it */
    int signal;           /* 0: it exited by itself */
};

struct mb_sup_state {
    int64_t supervisor_pid;
    uint64_t supervisor_ticks;
    size_t n_children;
    struct mb_sup_child_state children[MB_SUP_CHILDREN_MAX];
    struct mb_cgroup group; /* of the children */
    int all_exited;         /* nothing the children started is left either */
    char proof[48];         /* how that was looked at, e.g. "wait+cgroup-v2"; "" before */
    char
        reason[MB_SUP_TEXT_MAX]; /* why the tree was ended; "" = the children ended by themselves */
};

/* Both relative to dir_fd. 0, or -1 with a line in text[MB_SUP_TEXT_MAX]. */
int mb_sup_state_write(const struct mb_sup_state *state, int dir_fd, char *text);
int mb_sup_state_read(int dir_fd, struct mb_sup_state *out, char *text);

/* Start time of a process in clock ticks since boot, zombies included; 0: there is none. */
uint64_t mb_sup_start_ticks(int64_t pid);
/* 1 if this very process still runs (a zombie does not). */
int mb_sup_is_running(int64_t pid, uint64_t start_ticks);
/* It is there, and stands: by SIGSTOP and its like, or under a debugger. */
int mb_sup_is_stopped(int64_t pid, uint64_t start_ticks);

#endif
