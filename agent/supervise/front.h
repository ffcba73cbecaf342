/* `mobula-init agent`: the front process of a node (PID 1 in a pod). libc only; blocks
 * until the agent and every supervisor have ended. Changes the process's signals; once a process.
 */
#ifndef MOBULA_AGENT_SUPERVISE_FRONT_H
#define MOBULA_AGENT_SUPERVISE_FRONT_H

#include <stdint.h>

struct mb_front_opts {
    const char *run_dir; /* init.pid, and agent.log when daemonized */
    int daemonize;
    int secret_fd;            /* for every agent, in MOBULA_SECRET_FD, and nobody else; -1: none */
    uint32_t grace_ms;        /* for the agent after SIGTERM, then again for its supervisors */
    uint32_t killed_after_ms; /* a pod: how long after its SIGTERM we are killed; 0: nobody does */
    char *const *agent_argv;  /* NULL-terminated */
};

/* The exit status of the process. */
int mb_front_main(const struct mb_front_opts *opts);

#endif
