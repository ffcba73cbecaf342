/* A loop for tests: run it until something is true, or fail. */
#ifndef MOBULA_TESTS_GCS_LOOP_H
#define MOBULA_TESTS_GCS_LOOP_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <uv.h>

static void loop_expired(uv_timer_t *t)
{
    *(int *)t->data = 1;
}

/* Runs until *flag is not 0; fails the test after 60 s. */
static inline void loop_until(uv_loop_t *loop, const int *flag)
{
    int expired = 0;
    uv_timer_t timer;

    uv_timer_init(loop, &timer);
    timer.data = &expired;
    uv_timer_start(&timer, loop_expired, 60000, 0);
    while (!*flag && !expired)
        uv_run(loop, UV_RUN_ONCE);
    int done = *flag;
    uv_close((uv_handle_t *)&timer, NULL);
    while (uv_is_active((uv_handle_t *)&timer) || uv_run(loop, UV_RUN_NOWAIT) < 0)
        continue;
    if (!done)
        fail_msg("what the test waits for did not happen within 60 s");
}

#endif
