/* Work that may hang: done, or left behind by a loop that is gone before it ends. Its thread is
 * there while it lasts, and no longer. */
#include "base/errand.h"

#include <dirent.h>
#include <stdatomic.h>
#include <unistd.h>
#include "base/alloc.h"
#include "tests/unit/base/cmocka_all.h"

enum { WAIT_MS = 60000 };

struct place {
    uv_loop_t loop;
    int n_after;
};

/* Outlives the place; what the thread counts is read when n_dropped says so. */
static atomic_int may_end, n_worked, n_dropped;

static void work(void *load)
{
    while (!atomic_load(&may_end))
        usleep(1000);
    *(int *)load += 1;
    atomic_fetch_add(&n_worked, 1);
}

static void after(void *owner, void *load)
{
    struct place *p = owner;

    assert_int_equal(*(int *)load, 42);
    p->n_after++;
}

static void drop(void *load)
{
    mb_free(load);
    atomic_fetch_add(&n_dropped, 1);
}

static const struct mb_errand_plan plan = {work, after, drop};

static struct mb_errand *start(struct place *p)
{
    int *load = mb_alloc(sizeof(*load));

    assert_non_null(load);
    *load = 41;
    return mb_errand_start(&p->loop, &plan, p, load);
}

static void begin(struct place *p)
{
    *p = (struct place){0};
    atomic_store(&may_end, 0);
    atomic_store(&n_worked, 0);
    atomic_store(&n_dropped, 0);
    assert_int_equal(uv_loop_init(&p->loop), 0);
}

static void end(struct place *p)
{
    assert_int_equal(uv_run(&p->loop, UV_RUN_DEFAULT), 0);
    assert_int_equal(uv_loop_close(&p->loop), 0);
}

static void wait_for(atomic_int *count, int value)
{
    for (int i = 0; i < WAIT_MS && atomic_load(count) < value; i++)
        usleep(1000);
    assert_int_equal(atomic_load(count), value);
}

static void test_several_at_once(void **state)
{
    struct place p;

    (void)state;
    begin(&p);
    for (int i = 0; i < 8; i++)
        assert_non_null(start(&p));
    atomic_store(&may_end, 1);
    end(&p);
    assert_int_equal(p.n_after, 8);
    assert_int_equal(atomic_load(&n_worked), 8);
    wait_for(&n_dropped, 8);
}

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

static void test_again_and_again(void **state)
{
    struct place p;

    (void)state;
    begin(&p);
    for (int i = 0; i < 200; i++) {
        atomic_store(&may_end, 0);
        assert_non_null(start(&p));
        assert_int_equal(p.n_after, i);
        assert_int_equal(mb_errands_ended(0), 0);
        atomic_store(&may_end, 1);
        assert_int_equal(uv_run(&p.loop, UV_RUN_DEFAULT), 0); /* the work keeps it, until after() */
        assert_int_equal(p.n_after, i + 1);
    }
    assert_int_equal(mb_errands_ended(WAIT_MS), 1);
    assert_int_equal(atomic_load(&n_dropped), 200);
    for (int i = 0; i < WAIT_MS && n_threads() > 2; i++)
        usleep(1000);              /* one that has ended is in the list for a moment yet */
    assert_true(n_threads() <= 2); /* this one; a sanitizer has one of its own */
    end(&p);
}

static void note_thread(void *load)
{
    *(uv_thread_t *)load = uv_thread_self();
}

static void test_another_thread(void **state)
{
    uv_thread_t self = uv_thread_self(), other = self;

    (void)state;
    struct mb_errand_sent sent = {note_thread, &other};
    mb_alloc_fail_nth(1); /* none is needed */
    assert_int_equal(mb_errand_send(&sent), 1);
    mb_alloc_fail_nth(0);
    assert_int_equal(mb_errands_ended(WAIT_MS), 1);
    assert_false(uv_thread_equal(&self, &other));
}

static void test_left_behind(void **state)
{
    struct place p;

    (void)state;
    begin(&p);
    mb_errand_leave(NULL);
    mb_errand_leave(start(&p));
    end(&p); /* the thread hangs yet */
    assert_int_equal(atomic_load(&n_dropped), 0);
    assert_int_equal(mb_errands_ended(20), 0);
    atomic_store(&may_end, 1);
    wait_for(&n_dropped, 1);
    assert_int_equal(atomic_load(&n_worked), 1);
    assert_int_equal(p.n_after, 0);
    assert_int_equal(mb_errands_ended(WAIT_MS), 1);
}

static void test_left_when_it_is_done(void **state)
{
    struct place p;
    struct mb_errand *e;

    (void)state;
    begin(&p);
    atomic_store(&may_end, 1);
    e = start(&p);
    wait_for(&n_worked, 1); /* the loop has not heard of it */
    mb_errand_leave(e);
    end(&p);
    wait_for(&n_dropped, 1);
    assert_int_equal(p.n_after, 0);
}

static void test_without_memory(void **state)
{
    struct place p;
    int *load = mb_alloc(sizeof(*load));

    (void)state;
    begin(&p);
    mb_alloc_fail_nth(1);
    assert_null(mb_errand_start(&p.loop, &plan, &p, load));
    mb_alloc_fail_nth(0);
    assert_int_equal(atomic_load(&n_dropped), 1);
    end(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_several_at_once),      cmocka_unit_test(test_again_and_again),
        cmocka_unit_test(test_another_thread),       cmocka_unit_test(test_left_behind),
        cmocka_unit_test(test_left_when_it_is_done), cmocka_unit_test(test_without_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
