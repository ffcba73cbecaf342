/*
 * The processes below this one, as /proc shows them. libc only. With PR_SET_CHILD_SUBREAPER set,
 * "below" includes what was double-forked or moved to another session: only the parent chain
 * counts.
 */
#ifndef MOBULA_AGENT_SUPERVISE_PROCS_H
#define MOBULA_AGENT_SUPERVISE_PROCS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* A signal to the process of this pid and start time (state.h) and to no other that has its pid
 * meanwhile. 0, or -1 with errno: ESRCH when it is gone. */
int mb_procs_signal(int64_t pid, uint64_t start_ticks, int signal);

/* One signal to every descendant that is there at one moment, for which the tree stands still: what
 * their handlers start afterwards gets none. What was stopped before goes on as well. The number
 * signalled; -1 when /proc or memory fails: then nobody got it, ask again. */
int mb_procs_signal_tree(int signal);

/* SIGKILL to every descendant that is there now, but for the processes in keep and what is below
 * them. All are stopped first, again and again until none is new, so that a tree that forks as fast
 * as it is killed does not win. The number killed, or -1; call again until it is 0 and waitpid()
 * says ECHILD. */
int mb_procs_kill_tree(const pid_t *keep, size_t n_keep);

/* Is the memory of all descendants together above limit_bytes? Resident memory is summed first; if
 * that is above, what processes share is counted once (Pss). 1 or 0; -1 when /proc fails. */
int mb_procs_memory_exceeds(uint64_t limit_bytes);

#endif
