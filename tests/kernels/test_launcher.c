/* A thread that makes calls for its owner: each once, in order, and what they write is seen. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <semaphore.h>
#include <time.h>
#include "worker/kernels/launcher.h"

enum { CALLS = 20000, LONG_MS = 60 * 1000, SHORT_MS = 20 };

struct call {
    uint64_t n, sum; /* no atomics: is_idle() orders them */
    pthread_t thread;
};

static void add(void *arg)
{
    struct call *c = arg;
    c->sum += c->n;
    c->thread = pthread_self();
}

static struct mb_launcher *launcher(void)
{
    struct mb_launcher *l = NULL;
    struct mb_err err = {0};
    assert_int_equal(mb_launcher_create(&l, &err), 0);
    return l;
}

static void test_calls(void **state)
{
    struct mb_launcher *l = launcher();
    struct call c = {0};
    (void)state;
    assert_true(mb_launcher_is_idle(l));
    for (c.n = 1; c.n <= CALLS; c.n++) {
        mb_launcher_post(l, add, &c);
        assert_true(mb_launcher_wait(l, LONG_MS));
    }
    assert_int_equal(c.sum, (uint64_t)CALLS * (CALLS + 1) / 2);
    assert_false(pthread_equal(c.thread, pthread_self()));
    assert_int_equal(mb_launcher_destroy(l), 1);
}

/* The thread sleeps meanwhile, and is woken. */
static void test_after_a_pause(void **state)
{
    const struct timespec pause = {.tv_nsec = 5 * 1000 * 1000};
    struct mb_launcher *l = launcher();
    struct call c = {.n = 1};
    (void)state;
    for (unsigned i = 0; i < 20; i++) {
        nanosleep(&pause, NULL);
        mb_launcher_post(l, add, &c);
        assert_true(mb_launcher_wait(l, LONG_MS));
    }
    assert_int_equal(c.sum, 20);
    assert_int_equal(mb_launcher_destroy(l), 1);
}

static void hang(void *arg)
{
    sem_t *both = arg;
    sem_wait(&both[0]);
    sem_post(&both[1]);
}

/* A call that does not return holds nobody up; one that does in the end ends its thread. */
static void test_a_call_that_hangs(void **state)
{
    struct mb_launcher *l = launcher();
    static sem_t both[2];
    (void)state;
    sem_init(&both[0], 0, 0);
    sem_init(&both[1], 0, 0);
    mb_launcher_post(l, hang, both);
    assert_false(mb_launcher_wait(l, SHORT_MS));
    assert_false(mb_launcher_is_idle(l));
    assert_int_equal(mb_launcher_destroy(l), 0);
    sem_post(&both[0]);
    sem_wait(&both[1]);
}

/* The same with a thread for the one call. */
static void test_one_call(void **state)
{
    static sem_t both[2];
    struct call c = {.n = 7};
    (void)state;
    assert_int_equal(mb_launcher_call(add, &c, LONG_MS), 1);
    assert_int_equal(c.sum, 7);
    assert_false(pthread_equal(c.thread, pthread_self()));
    sem_init(&both[0], 0, 0);
    sem_init(&both[1], 0, 0);
    assert_int_equal(mb_launcher_call(hang, both, SHORT_MS), 0);
    sem_post(&both[0]);
    sem_wait(&both[1]);
}

static void test_never_used(void **state)
{
    (void)state;
    assert_int_equal(mb_launcher_destroy(launcher()), 1);
    assert_int_equal(mb_launcher_destroy(NULL), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_calls),
        cmocka_unit_test(test_after_a_pause),
        cmocka_unit_test(test_a_call_that_hangs),
        cmocka_unit_test(test_one_call),
        cmocka_unit_test(test_never_used),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
