/*
 * Work beside the loop that may never end, such as a call to a driver that hangs: each piece has a
 * detached thread and memory of its own, and can be left behind. Where the work is sure to end,
 * aside.h is simpler.
 *
 * All calls on the loop's thread.
 */
#ifndef MOBULA_BASE_ERRAND_H
#define MOBULA_BASE_ERRAND_H

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

#endif
