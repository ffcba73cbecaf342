/* Work beside a loop: its thread is there while it lasts, and no longer. */
#include "base/aside.h"

#include <dirent.h>
#include <stdatomic.h>
#include <unistd.h>
#include "tests/unit/base/cmocka_all.h"

struct place {
    uv_loop_t loop;
    struct mb_aside a;
    atomic_int may_end;
    int n_worked, n_after, n_closed; /* n_worked: the thread's until after() */
    uv_thread_t worked_on;
};

static int n_threads(void)
{
    DIR *d = opendir("/proc/self/task");
    int n = 0;

    assert_non_null(d);
    for (struct dirent *e = readdir(d); e != NULL; e = readdir(d))
        n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

static void work(void *arg)
{
    struct place *p = arg;

    while (!atomic_load(&p->may_end))
        usleep(1000);
    p->worked_on = uv_thread_self();
    p->n_worked++;
}

static void after(void *arg)
{
    struct place *p = arg;

    p->n_after++;
}

static void closed(void *arg)
{
    struct place *p = arg;

    p->n_closed++;
}

static void begin(struct place *p)
{
    *p = (struct place){0};
    assert_int_equal(uv_loop_init(&p->loop), 0);
    assert_int_equal(mb_aside_init(&p->a, &p->loop), 0);
}

static void end(struct place *p)
{
    mb_aside_close(&p->a, closed, p);
    assert_int_equal(uv_run(&p->loop, UV_RUN_DEFAULT), 0);
    assert_int_equal(p->n_closed, 1);
    assert_int_equal(uv_loop_close(&p->loop), 0);
}

static void test_again_and_again(void **state)
{
    static struct place p;

    (void)state;
    begin(&p);
    assert_int_equal(uv_run(&p.loop, UV_RUN_DEFAULT), 0); /* nothing keeps it */
    for (int i = 0; i < 200; i++) {
        atomic_store(&p.may_end, 0);
        assert_int_equal(mb_aside_run(&p.a, work, after, &p), 1);
        assert_int_equal(mb_aside_run(&p.a, work, after, &p), 0); /* one at a time */
        assert_int_equal(p.n_after, i);
        atomic_store(&p.may_end, 1);
        assert_int_equal(uv_run(&p.loop, UV_RUN_DEFAULT), 0); /* it does, until after() */
        assert_int_equal(p.n_after, i + 1);
        assert_int_equal(p.n_worked, i + 1);
    }
    for (int i = 0; i < 5000 && n_threads() > 2; i++)
        usleep(1000);              /* a thread that was joined is in the list for a moment yet */
    assert_true(n_threads() <= 2); /* this one; a sanitizer has one of its own */
    end(&p);
}

static void test_closed_while_it_runs(void **state)
{
    static struct place p;

    (void)state;
    begin(&p);
    assert_int_equal(mb_aside_run(&p.a, work, after, &p), 1);
    mb_aside_close(&p.a, closed, &p);
    assert_int_equal(mb_aside_run(&p.a, work, after, &p), 0);
    uv_run(&p.loop, UV_RUN_NOWAIT);
    assert_int_equal(p.n_closed, 0);
    atomic_store(&p.may_end, 1);
    assert_int_equal(uv_run(&p.loop, UV_RUN_DEFAULT), 0);
    assert_int_equal(p.n_closed, 1);
    assert_int_equal(p.n_worked, 1);
    assert_int_equal(p.n_after, 0);
    assert_int_equal(uv_loop_close(&p.loop), 0);
}

static void test_another_thread(void **state)
{
    static struct place p;
    uv_thread_t self = uv_thread_self();

    (void)state;
    begin(&p);
    atomic_store(&p.may_end, 1);
    assert_int_equal(mb_aside_run(&p.a, work, after, &p), 1);
    assert_int_equal(uv_run(&p.loop, UV_RUN_DEFAULT), 0);
    assert_false(uv_thread_equal(&self, &p.worked_on));
    end(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_again_and_again),
        cmocka_unit_test(test_closed_while_it_runs),
        cmocka_unit_test(test_another_thread),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
