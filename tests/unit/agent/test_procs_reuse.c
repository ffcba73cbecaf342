/* A list of processes in which one pid is there twice: who had it has ended, another has it now.
 * Its functions are procs.c's own; that a pid comes back within one halt cannot be brought about.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "agent/supervise/procs.c"

static void test_a_pid_that_came_back_is_known(void **state)
{
    struct proc procs[] = {
        {.pid = 7, .ticks = 1}, {.pid = 5, .ticks = 3}, {.pid = 5, .ticks = 2}, {.pid = 9}};
    const size_t n = sizeof(procs) / sizeof(*procs);

    (void)state;
    for (size_t seen = 1; seen <= n; seen++) {
        qsort(procs, seen, sizeof(*procs), by_pid);
        for (size_t i = 0; i < seen; i++)
            assert_true(is_known(procs, seen, &procs[i]));
        for (size_t i = seen; i < n; i++)
            assert_false(is_known(procs, seen, &procs[i]));
    }
    assert_true(find(procs, n, 5)->ticks == 3);
    assert_true(find(procs, n, 7)->ticks == 1);
    assert_null(find(procs, n, 4));
    assert_null(find(procs, n, 8));
    assert_null(find(procs, n, 10));
    assert_null(find(procs, 0, 5));
}

/* It is not waited for: who has the pid now was not meant. */
static void test_another_with_the_pid_is_not_waited_for(void **state)
{
    struct proc self = {.pid = getpid(), .ticks = mb_sup_start_ticks(getpid()), .halted_ms = 1};
    struct proc former = self;

    (void)state;
    former.ticks--;
    assert_int_equal(state_of(&self), 'R');
    assert_int_equal(state_of(&former), 'T');
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_pid_that_came_back_is_known),
        cmocka_unit_test(test_another_with_the_pid_is_not_waited_for),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
