/*
 * Waiting on a loop for what its callbacks do:
 *
 *     while (!is_done)
 *         mb_loop_turn(&loop);
 */
#ifndef MOBULA_BASE_LOOP_H
#define MOBULA_BASE_LOOP_H

#include <uv.h>

/*
 * One turn: waits for an event or a timer, runs its callbacks, returns. Unlike uv_run(loop,
 * UV_RUN_ONCE) it never falls asleep behind a callback: libuv before 1.45 runs due timers first and
 * waits for an event in the same call, so that one who waits for what a timer's callback did may
 * wait for ever (1.45 changed that order). A loop with nothing to wait for returns at once. On the
 * loop's thread.
 */
void mb_loop_turn(uv_loop_t *loop);

#endif
