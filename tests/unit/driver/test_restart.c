/* Whether an attempt is followed by another: classes, pauses, what only comes again. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "base/err.h"
#include "cli/driver/restart.h"

static struct mb_failure exits(uint32_t rank, int status)
{
    return (struct mb_failure){.kind = MB_FAILURE_RANK,
                               .rank = rank,
                               .exit_code = status,
                               .iteration = -1,
                               .saved = -1,
                               .ran_ms = 10};
}

static struct mb_failure killed(uint32_t rank, int sig)
{
    struct mb_failure f = exits(rank, 128 + sig);

    f.signal = sig;
    return f;
}

static struct mb_failure node(void)
{
    return (struct mb_failure){
        .kind = MB_FAILURE_NODE, .code = MB_EUNAVAIL, .iteration = -1, .saved = -1};
}

static struct mb_restart_decision decide(struct mb_restart *r, struct mb_failure f)
{
    struct mb_restart_decision d;

    mb_restart_decide(r, &f, 0, &d);
    assert_true(d.again || d.why_not[0] || r->max_restarts == 0 || f.kind == MB_FAILURE_NONE);
    return d;
}

static void test_classes(void **state)
{
    static const struct {
        int status;
        enum mb_exit_class class;
    } rows[] = {
        {1, MB_EXIT_CRASH},
        {2, MB_EXIT_CRASH},
        {64, MB_EXIT_PERMANENT},
        {65, MB_EXIT_PERMANENT},
        {66, MB_EXIT_PERMANENT},
        {69, MB_EXIT_TRANSIENT},
        {74, MB_EXIT_TRANSIENT},
        {75, MB_EXIT_TRANSIENT},
        {77, MB_EXIT_PERMANENT},
        {78, MB_EXIT_PERMANENT},
        {126, MB_EXIT_PERMANENT},
        {127, MB_EXIT_PERMANENT},
        {128 + SIGKILL, MB_EXIT_LOST},
        {128 + SIGTERM, MB_EXIT_LOST},
        {128 + SIGSEGV, MB_EXIT_CRASH},
        {255, MB_EXIT_CRASH},
    };
    struct mb_failure f;

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        f = exits(0, rows[i].status);
        assert_int_equal(mb_restart_class(&f), rows[i].class);
    }
    f = killed(0, SIGKILL);
    assert_int_equal(mb_restart_class(&f), MB_EXIT_LOST);
    f.is_out_of_memory = 1; /* the kernel's killer */
    assert_int_equal(mb_restart_class(&f), MB_EXIT_MEMORY);
    f = killed(0, SIGSEGV);
    assert_int_equal(mb_restart_class(&f), MB_EXIT_CRASH);
    f = exits(0, 2);
    f.is_usage = 1;
    assert_int_equal(mb_restart_class(&f), MB_EXIT_PERMANENT);
    f = node();
    assert_int_equal(mb_restart_class(&f), MB_EXIT_LOST);
    f = (struct mb_failure){.kind = MB_FAILURE_REQUEST, .code = MB_EDENIED};
    assert_int_equal(mb_restart_class(&f), MB_EXIT_PERMANENT);
    f.code = MB_EUNAVAIL;
    assert_int_equal(mb_restart_class(&f), MB_EXIT_TRANSIENT);
    f.code = MB_ENOMEM;
    assert_int_equal(mb_restart_class(&f), MB_EXIT_MEMORY);
    assert_string_equal(mb_restart_class_name(MB_EXIT_LOST), "lost");
    assert_string_equal(mb_restart_class_name(MB_EXIT_N_CLASSES), "?");
}

static void test_budget(void **state)
{
    struct mb_restart none = {.delay_ms = 100}, r = {.max_restarts = 3, .delay_ms = 100};
    struct mb_restart_decision d = decide(&none, killed(0, SIGKILL));

    (void)state;
    assert_false(d.again);
    assert_string_equal(d.why_not, "");
    for (int i = 0; i < 3; i++)
        assert_true(decide(&r, killed(0, SIGKILL)).again);
    d = decide(&r, killed(0, SIGKILL));
    assert_false(d.again);
    assert_non_null(strstr(d.why_not, "--max-restarts 3"));
    assert_false(decide(&r, (struct mb_failure){.kind = MB_FAILURE_NONE}).again);
}

static void test_permanent(void **state)
{
    struct mb_restart r = {.max_restarts = 1000, .delay_ms = 1};

    (void)state;
    assert_false(decide(&r, exits(0, 64)).again);
    assert_int_equal(r.restarts, 0);
}

static void test_the_same_crash(void **state)
{
    struct mb_restart r = {.max_restarts = 1000, .delay_ms = 1};
    struct mb_failure f = exits(3, 1), other;

    (void)state;
    f.iteration = 40;
    f.ran_ms = 3600000;
    assert_true(decide(&r, f).again);
    other = f;
    other.iteration = 41; /* one further: bad luck */
    assert_true(decide(&r, other).again);
    other.rank = 2; /* another rank */
    assert_true(decide(&r, other).again);
    assert_true(decide(&r, killed(2, SIGKILL)).again);
    assert_true(decide(&r, f).again);
    assert_false(decide(&r, f).again);

    /* All ranks fail, and each time another one is first to say it. */
    r = (struct mb_restart){.max_restarts = 1000, .delay_ms = 1};
    for (uint32_t rank = 0; rank < MB_RESTART_SAME_MAX; rank++) {
        f.rank = rank;
        assert_int_equal(decide(&r, f).again, rank + 1 < MB_RESTART_SAME_MAX);
    }

    /* Ranks that report nothing: by the checkpoint, and only soon after the launch. */
    r = (struct mb_restart){.max_restarts = 1000, .delay_ms = 1};
    f = exits(0, 1);
    f.ran_ms = MB_RESTART_SOON_MS;
    assert_true(decide(&r, f).again);
    f.ran_ms = 5;
    assert_true(decide(&r, f).again);
    f.saved = 20;
    assert_true(decide(&r, f).again);
    assert_false(decide(&r, f).again);

    /* Never of what somebody killed. */
    r = (struct mb_restart){.max_restarts = 1000, .delay_ms = 1};
    for (int i = 0; i < 10; i++)
        assert_true(decide(&r, killed(0, SIGKILL)).again);
}

static void test_memory(void **state)
{
    struct mb_restart r = {.max_restarts = 1000, .delay_ms = 1};
    struct mb_failure a = exits(0, 1), b = exits(5, 70);

    (void)state;
    a.is_out_of_memory = b.is_out_of_memory = 1;
    b.iteration = 7;
    assert_true(decide(&r, a).again);
    assert_false(decide(&r, b).again); /* wherever it runs out */
}

static void test_pause(void **state)
{
    struct mb_restart r = {.max_restarts = 1000000, .delay_ms = 100};
    struct mb_failure f = killed(0, SIGKILL);
    struct mb_restart_decision d;

    (void)state;
    for (uint64_t want = 100; want < MB_RESTART_DELAY_MAX_MS; want *= 2)
        assert_int_equal(decide(&r, f).delay_ms, want);
    for (int i = 0; i < 100; i++)
        assert_int_equal(decide(&r, f).delay_ms, MB_RESTART_DELAY_MAX_MS);
    f.saved = 10; /* progress */
    assert_int_equal(decide(&r, f).delay_ms, 100);
    assert_int_equal(decide(&r, f).delay_ms, 200);
    for (uint64_t random = 0; random < 1000; random += 7) { /* jitter is bounded */
        r.in_vain = 0;
        f.saved++;
        mb_restart_decide(&r, &f, random, &d);
        assert_in_range(d.delay_ms, 100, 125);
    }
}

static void test_group(void **state)
{
    struct mb_restart r = {.max_restarts = 10, .delay_ms = 1};

    (void)state;
    assert_true(decide(&r, killed(0, SIGKILL)).keep_group);
    assert_false(decide(&r, node()).keep_group);
    r.delay_ms = MB_RESTART_KEEP_MS + 1;
    assert_false(decide(&r, killed(0, SIGKILL)).keep_group);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_classes),   cmocka_unit_test(test_budget),
        cmocka_unit_test(test_permanent), cmocka_unit_test(test_the_same_crash),
        cmocka_unit_test(test_memory),    cmocka_unit_test(test_pause),
        cmocka_unit_test(test_group),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
