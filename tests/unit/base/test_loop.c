/* A turn of a loop comes back when a callback has run, whichever kind; alarm() ends the test where
 * one does not. */
#include "base/loop.h"

#include <unistd.h>
#include "base/clock.h"
#include "tests/unit/base/cmocka_all.h"

struct place {
    uv_loop_t loop;
    uv_async_t async; /* keeps the loop alive, as the socket of a client does */
    uv_timer_t timer;
    int is_done;
};

static void on_async(uv_async_t *async)
{
    ((struct place *)async->data)->is_done = 1;
}

static void on_timer(uv_timer_t *timer)
{
    ((struct place *)timer->data)->is_done = 1;
}

static int set_up(void **state)
{
    static struct place p;

    uv_loop_init(&p.loop);
    uv_async_init(&p.loop, &p.async, on_async);
    uv_timer_init(&p.loop, &p.timer);
    p.async.data = p.timer.data = &p;
    p.is_done = 0;
    *state = &p;
    alarm(60);
    return 0;
}

static int tear_down(void **state)
{
    struct place *p = *state;

    alarm(0);
    uv_close((uv_handle_t *)&p->async, NULL);
    uv_close((uv_handle_t *)&p->timer, NULL);
    uv_run(&p->loop, UV_RUN_DEFAULT);
    return uv_loop_close(&p->loop);
}

static void wait_for(struct place *p)
{
    while (!p->is_done)
        mb_loop_turn(&p->loop);
}

static void test_a_timer_that_is_due_already(void **state)
{
    struct place *p = *state;

    for (int i = 0; i < 100; i++) {
        p->is_done = 0;
        uv_timer_start(&p->timer, on_timer, 0, 0);
        wait_for(p);
    }
}

static void test_a_timer_is_waited_for_asleep(void **state)
{
    struct place *p = *state;
    uint64_t begun_ms = mb_mono_ms();
    int turns = 0;

    uv_timer_start(&p->timer, on_timer, 200, 0);
    for (; !p->is_done; turns++)
        mb_loop_turn(&p->loop);
    assert_in_range(mb_mono_ms() - begun_ms, 190, 5000);
    assert_in_range(turns, 1, 10);
}

static void send_later(void *arg)
{
    usleep(50000);
    uv_async_send(arg);
}

static void test_another_thread(void **state)
{
    struct place *p = *state;
    uv_thread_t thread;

    for (int i = 0; i < 3; i++) {
        p->is_done = 0;
        uv_thread_create(&thread, send_later, &p->async);
        wait_for(p);
        uv_thread_join(&thread);
    }
}

static void on_readable(uv_poll_t *poll, int status, int events)
{
    (void)events;
    assert_int_equal(status, 0);
    uv_poll_stop(poll);
    ((struct place *)poll->data)->is_done = 1;
}

static void watch(uv_timer_t *timer)
{
    uv_poll_start(timer->data, UV_READABLE, on_readable);
}

/* The kernel hears of the socket in the next turn only, which must not sleep before. */
static void test_a_socket_that_a_callback_begins_to_watch(void **state)
{
    struct place *p = *state;
    uv_poll_t poll;
    int fds[2];

    assert_int_equal(pipe(fds), 0);
    assert_int_equal(write(fds[1], "x", 1), 1);
    uv_poll_init(&p->loop, &poll, fds[0]);
    poll.data = p;
    p->timer.data = &poll;
    uv_timer_start(&p->timer, watch, 0, 0);
    wait_for(p);
    uv_close((uv_handle_t *)&poll, NULL);
    mb_loop_turn(&p->loop);
    close(fds[0]);
    close(fds[1]);
}

static void test_nothing_to_wait_for(void **state)
{
    struct place *p = *state;

    uv_unref((uv_handle_t *)&p->async);
    mb_loop_turn(&p->loop);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_timer_that_is_due_already, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_timer_is_waited_for_asleep, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_another_thread, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_socket_that_a_callback_begins_to_watch, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_nothing_to_wait_for, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
