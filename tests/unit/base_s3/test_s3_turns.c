/* The queue of parts: who is prepared and sent, in which order, and what an end lets go on. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/s3/s3.h"

enum { N = 64 };

struct part {
    struct s3 *s;
    struct s3_turn turn;
    int n_prepared, n_sent;
    int ends_at_once;
};

static char told[N * 8];

static void on_send(void *arg)
{
    struct part *p = arg;

    p->n_sent++;
    snprintf(told + strlen(told), sizeof told - strlen(told), "%d ", (int)p->turn.order);
    if (p->ends_at_once)
        s3_turn_end(p->s, &p->turn);
}

static void on_prepare(void *arg)
{
    struct part *p = arg;

    p->n_prepared++;
    if (p->ends_at_once)
        s3_turn_end(p->s, &p->turn);
}

static void part_init(struct s3 *s, struct part *p, int order, int priority)
{
    memset(p, 0, sizeof *p);
    p->s = s;
    p->turn.order = (uint64_t)order;
    p->turn.priority = priority;
}

static unsigned count(const struct part *parts, enum s3_turn_state state)
{
    unsigned n = 0;

    for (int i = 0; i < N; i++)
        n += parts[i].turn.state == state;
    return n;
}

static void check(const struct s3 *s, const struct part *parts)
{
    unsigned held = count(parts, S3_TURN_HOLDS) + count(parts, S3_TURN_WAITS_2);

    assert_int_equal(s->turns.n_held, held);
    assert_int_equal(s->turns.n_sending, count(parts, S3_TURN_SENDS));
}

static void test_order(void **state)
{
    static struct part parts[N];
    static const int order[] = {5, 5, 6, 7, 7, 8};
    static const int priority[] = {0, 0, 0, -1, 0, -1};
    struct s3 s = {.parallel = 1};

    (void)state;
    told[0] = 0;
    part_init(&s, &parts[10], 1, 0);
    s3_turn_send(&s, &parts[10].turn, on_send, &parts[10]); /* takes the connection */
    for (int i = 0; i < 6; i++) {
        part_init(&s, &parts[i], order[i], priority[i]);
        s3_turn_send(&s, &parts[i].turn, on_send, &parts[i]);
    }
    s3_turn_end(&s, &parts[10].turn);
    for (int round = 0; round < 6; round++)
        for (int i = 0; i < 6; i++)
            if (parts[i].turn.state == S3_TURN_SENDS) {
                s3_turn_end(&s, &parts[i].turn);
                break;
            }
    assert_string_equal(told, "1 7 8 5 5 6 7 ");
    check(&s, parts);
}

static void test_bounds(void **state)
{
    static struct part parts[N];
    struct s3 s = {.parallel = 4};

    (void)state;
    for (int i = 0; i < N; i++) {
        part_init(&s, &parts[i], i, 0);
        s3_turn_prepare(&s, &parts[i].turn, on_prepare, &parts[i]);
    }
    assert_int_equal(count(parts, S3_TURN_HOLDS), 4 + S3_AHEAD);
    for (int i = 0; i < 4 + S3_AHEAD; i++)
        s3_turn_send(&s, &parts[i].turn, on_send, &parts[i]);
    assert_int_equal(count(parts, S3_TURN_SENDS), 4);
    assert_int_equal(count(parts, S3_TURN_WAITS_2), 4);
    check(&s, parts);
    s.parallel = 1; /* the server is slow: nothing new until it is below */
    for (int i = 0; i < 3; i++)
        s3_turn_end(&s, &parts[i].turn);
    assert_int_equal(count(parts, S3_TURN_SENDS), 1);
    s.parallel = 16;
    s3_turns_run(&s);
    assert_int_equal(count(parts, S3_TURN_SENDS), 5);
    check(&s, parts);
}

/* Ends inside go(): no recursion, everybody had a turn. */
static void test_ends_at_once(void **state)
{
    static struct part parts[N];
    struct s3 s = {.parallel = 1};

    (void)state;
    told[0] = 0;
    for (int i = 0; i < N; i++) {
        part_init(&s, &parts[i], i, 0);
        parts[i].ends_at_once = i > 0;
        if (i % 2)
            s3_turn_prepare(&s, &parts[i].turn, on_prepare, &parts[i]);
        else
            s3_turn_send(&s, &parts[i].turn, on_send, &parts[i]);
    }
    s3_turn_end(&s, &parts[0].turn);
    for (int i = 0; i < N; i++)
        assert_int_equal(parts[i].n_prepared + parts[i].n_sent, 1);
    assert_int_equal(s.turns.n_held + s.turns.n_sending, 0);
    assert_null(s.turns.first[0]);
    assert_null(s.turns.last[1]);
}

/* Parts that wait take their new place at once; what is sent goes on. */
static void test_priority_changes(void **state)
{
    static struct part parts[N];
    struct s3 s = {.parallel = 1};

    (void)state;
    told[0] = 0;
    for (int i = 0; i < 12; i++) {
        part_init(&s, &parts[i], i, 0);
        if (i < 6)
            s3_turn_send(&s, &parts[i].turn, on_send, &parts[i]);
        else
            s3_turn_prepare(&s, &parts[i].turn, on_prepare, &parts[i]);
    }
    assert_int_equal(parts[11].n_prepared, 0);
    s3_turn_set_priority(&s, &parts[4].turn, -1);
    s3_turn_set_priority(&s, &parts[11].turn, -1);
    s3_turn_set_priority(&s, &parts[0].turn, 1); /* it is sent: that is not taken back */
    s3_turn_set_priority(&s, &parts[5].turn, -1);
    s3_turn_set_priority(&s, &parts[5].turn, 0);
    for (int round = 0; round < 6; round++)
        for (int i = 0; i < 6; i++)
            if (parts[i].turn.state == S3_TURN_SENDS) {
                s3_turn_end(&s, &parts[i].turn);
                assert_true(parts[11].n_prepared || !parts[6].n_prepared);
                break;
            }
    assert_string_equal(told, "0 4 1 2 3 5 ");
    assert_int_equal(parts[11].n_prepared, 1);
    check(&s, parts);
}

/* Any history leaves the counts as they should be, and never more than the bounds. */
static void test_random(void **state)
{
    static struct part parts[N];
    struct s3 s = {.parallel = 4};

    (void)state;
    srand(1);
    for (int i = 0; i < N; i++)
        part_init(&s, &parts[i], i, i % 3);
    for (int step = 0; step < 200000; step++) {
        struct part *p = &parts[rand() % N];
        int what = rand() % 4;

        if (rand() % 8 == 0)
            s3_turn_set_priority(&s, &p->turn, rand() % 3);

        told[0] = 0;
        if (rand() % 100 == 0) {
            s.parallel = 1 + (unsigned)(rand() % 16);
            s3_turns_run(&s);
        }
        if (what == 0)
            s3_turn_end(&s, &p->turn);
        else if (what == 1 && p->turn.state == S3_TURN_NONE)
            s3_turn_prepare(&s, &p->turn, on_prepare, p);
        else if (p->turn.state == S3_TURN_HOLDS || (what == 2 && p->turn.state == S3_TURN_NONE))
            s3_turn_send(&s, &p->turn, on_send, p);
        assert_true(s.turns.n_sending <= S3_MAX_CONNECTIONS);
        /* who could go on, does */
        assert_true(!s.turns.first[1] || s.turns.n_sending >= s.parallel);
        assert_true(!s.turns.first[0] ||
                    s.turns.n_held + s.turns.n_sending >= s.parallel + S3_AHEAD);
        if (step % 100 == 0)
            check(&s, parts);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order),  cmocka_unit_test(test_priority_changes),
        cmocka_unit_test(test_bounds), cmocka_unit_test(test_ends_at_once),
        cmocka_unit_test(test_random),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
