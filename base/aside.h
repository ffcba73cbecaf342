/*
 * A short piece of work beside the loop, now and then: a thread of its own while it lasts, none in
 * between. libuv's pool would keep four threads for good from its first use on; where there is
 * always something to do (transfers, packages), that is what to use.
 *
 * All calls on the loop's thread. One piece at a time.
 */
#ifndef MOBULA_BASE_ASIDE_H
#define MOBULA_BASE_ASIDE_H

#include <uv.h>

struct mb_aside {
    uv_async_t done;
    uv_thread_t thread;
    void (*work)(void *arg);
    void (*after)(void *arg);
    void (*closed)(void *arg);
    void *arg, *closed_arg;
    int is_running, is_closing;
};

/* Keeps nobody from ending the loop while nothing runs. 0, or libuv's error. */
int mb_aside_init(struct mb_aside *a, uv_loop_t *loop);
/* work(arg) on the thread, then after(arg) on the loop. 1: it runs; 0: something does already, or
 * there is no thread to be had, and neither will be called. */
int mb_aside_run(struct mb_aside *a, void (*work)(void *arg), void (*after)(void *arg), void *arg);
/* closed(arg) once what runs has ended, whose after() is not called any more; a is the caller's
 * again then. */
void mb_aside_close(struct mb_aside *a, void (*closed)(void *arg), void *arg);

#endif
