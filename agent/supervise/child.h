/* Starting processes with nothing of ours but what they are meant to get. libc only. */
#ifndef MOBULA_AGENT_SUPERVISE_CHILD_H
#define MOBULA_AGENT_SUPERVISE_CHILD_H

#include <sys/types.h>
#include "agent/supervise/spec.h"

struct mb_exec {
    const char *program;     /* NULL: argv[0] */
    const char *const *argv; /* NULL-terminated; a program without a slash is found by PATH */
    const char *const *env;  /* NULL: this process's */
    const char *cwd;         /* NULL: stays */
    const char *log_path;    /* stdout and stderr are appended to it, stdin is /dev/null; NULL: all
                                three are inherited */
    int pass_fd[2];          /* stay open across exec under their numbers; -1: none */
    const char *fd_env[2];   /* "NAME" that gets each number; NULL with -1 */
    int death_signal;        /* sent when the parent dies; 0: none */
    int cgroup_fd;           /* mb_cgroup_join_fd(), closed at exec; 0 or less: none */
    uint32_t nofile;         /* soft and hard limit of open files; 0: inherited */
    int no_core;             /* no core file, whatever is inherited */
    int holds_term;          /* SIGTERM waits until the program takes it, instead of ending it */
};

/* Forks and executes in a new session, signals at their defaults. The pid, or -1 with a line in
 * text[MB_SUP_TEXT_MAX] when anything failed up to and including exec. */
pid_t mb_child_exec(const struct mb_exec *x, char *text);

#endif
