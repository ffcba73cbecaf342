/*
 * The agent's side of mobula-init: start supervisors, adopt those a former agent left, hear what
 * becomes of their children. Loop-thread only; no callback runs inside the call that caused it,
 * and none after mb_supervisor_close().
 *
 * Life of one attempt: start or adopt -> on_started / on_start_failed per child (and on_report for
 * those with a report socket) -> on_exit per child -> on_all_exited, when nothing of the tree is
 * left -> mb_supervisor_release() once the agent has kept what it needs -> close.
 * An adopted attempt gets the same callbacks for what already happened, in the same order.
 */
#ifndef MOBULA_AGENT_SUPERVISOR_H
#define MOBULA_AGENT_SUPERVISOR_H

#include <stdint.h>
#include <uv.h>
#include "agent/supervise/spec.h"
#include "base/err.h"

/* ---- the front process ---- */
struct mb_init;

/* From the inherited socket of MOBULA_INIT_FD; MB_ENOENT when there is none. on_lost runs once if
 * the front process is gone: the agent should end, its supervisors are ending by themselves. */
int mb_init_open(uv_loop_t *loop, void (*on_lost)(void *arg), void *arg, struct mb_init **out,
                 struct mb_err *err);
/* The agent is up: from now on init restarts it whatever its exit status. */
int mb_init_ready(struct mb_init *init, struct mb_err *err);
/* The pid and start ticks of the front process, for node.json. */
void mb_init_identity(const struct mb_init *init, int64_t *pid, uint64_t *start_ticks);
/* How long a launch may take from now on (launch_watch.h); 0: MB_LAUNCH_TIMEOUT_MS. */
void mb_init_set_launch_timeout(struct mb_init *init, uint64_t timeout_ms);
/* Spawns without an answer fail with MB_ECANCELED first. Memory is freed after cb. */
void mb_init_close(struct mb_init *init, void (*cb)(void *arg), void *arg);

/* ---- one supervisor ---- */
struct mb_supervisor;

struct mb_supervisor_ops {
    /* The supervisor could not be started, reached or understood, or took too long to launch all
     * children (MB_ETIMEOUT; some may have been told as started): nothing of it is left, nothing
     * else follows, close it. */
    void (*on_error)(void *arg, const struct mb_err *err);
    void (*on_started)(void *arg, unsigned child, int64_t pid, uint64_t start_ticks);
    /* The supervisor begins to end the tree, with the reason of on_all_exited; exits that follow
     * are its doing. Not called when the children end by themselves. May be NULL. */
    void (*on_ending)(void *arg, const char *reason);
    /* exec or the log file failed; on_exit with code 127 follows. */
    void (*on_start_failed)(void *arg, unsigned child, const char *text);
    /* The agent's end of child's report socket: taken by the callee, already non-blocking. The
     * supervisor keeps the same socket for the next agent, so consume whole frames only: read with
     * MSG_PEEK, then take exactly the frames that are handled. NULL: no fds are asked for. */
    void (*on_report)(void *arg, unsigned child, int fd);
    /* signal 0: exited by itself with code; else code is 0. */
    void (*on_exit)(void *arg, unsigned child, int code, int signal);
    /* Nothing of the tree is left. reason: "" when it ended by itself, else why it was ended,
     * e.g. "stop requested", "child 3 failed", "supervisor died". */
    void (*on_all_exited)(void *arg, const char *reason);
};

/* Writes spec->dir/spec (the directory must exist) and asks init to start its supervisor. Spec and
 * ops are borrowed for the call / until close. */
int mb_supervisor_start(struct mb_init *init, const struct mb_sup_spec *spec,
                        const struct mb_supervisor_ops *ops, void *arg, struct mb_supervisor **out,
                        struct mb_err *err);
/* Connect to the supervisor of an attempt directory; if it is gone, replay its state file.
 * MB_ENOENT: there is neither socket nor state in dir. */
int mb_supervisor_adopt(struct mb_init *init, const char *dir, const struct mb_supervisor_ops *ops,
                        void *arg, struct mb_supervisor **out, struct mb_err *err);
/* Signal (0: the spec's) to the whole tree, SIGKILL to what is left after grace_ms. Remembered if
 * the connection is not there yet; a second stop can only shorten the grace. */
void mb_supervisor_stop(struct mb_supervisor *s, int signal, uint32_t grace_ms);
void mb_supervisor_kill(struct mb_supervisor *s);
/* After on_all_exited: the agent has noted everything, the supervisor may end. */
void mb_supervisor_release(struct mb_supervisor *s);
/* Only this connection ends; children are not touched. Freed after cb (cb may be NULL). */
void mb_supervisor_close(struct mb_supervisor *s, void (*cb)(void *arg), void *arg);

#endif
