/*
 * Work beside the loop, now and then, that may never end, such as a call to a driver or a disk that
 * hangs: each piece has a detached thread while it lasts, memory of its own, and can be left
 * behind. libuv's pool would keep four threads for good from its first use on, and lose them to
 * what hangs; where there is always something to do (transfers, packages), that is what to use.
 *
 * All calls on the loop's thread, but for mb_errand_send().
 */
#ifndef MOBULA_BASE_ERRAND_H
#define MOBULA_BASE_ERRAND_H

#include <stdint.h>
#include <uv.h>

struct mb_errand;

struct mb_errand_plan {
    void (*work)(void *load);               /* on the thread */
    void (*after)(void *owner, void *load); /* then on the loop; the errand is gone afterwards */
    void (*drop)(void *load);               /* at the very end, on either thread */
};

/* plan is static; load is the errand's from here on, also when it fails. NULL: no memory or no
 * thread to be had; load was dropped. */
struct mb_errand *mb_errand_start(uv_loop_t *loop, const struct mb_errand_plan *plan, void *owner,
                                  void *load);
/* after() is not called any more, and owner not used. The loop may be closed once it has run out;
 * the thread goes on for as long as it takes. NULL is legal. */
void mb_errand_leave(struct mb_errand *e);
/* One that nobody waits for. */
struct mb_errand_sent {
    void (*work)(void *load);
    void *load;
};
/* On any thread; needs no memory, so that what cleans up can be sent. s may lie in what work()
 * frees. 0: no thread was to be had, and work was not called. */
int mb_errand_send(struct mb_errand_sent *s);

/* Blocks until every thread of an errand in this process has nothing left to do: 1; 0: not within
 * ms. What still runs may be inside a library: then end by _exit(), which runs no destructors. */
int mb_errands_ended(uint64_t ms);

#endif
