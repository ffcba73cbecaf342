/* The queue of jobs: order, bounds, verdicts, words, and a seeded random walk with its invariants.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <math.h>
#include "base/alloc.h"
#include "gcs/job_queue.h"

enum { CPU, GPU, MEMORY, KINDS };

static const struct mb_job_amount totals[KINDS] = {
    {MB_JOB_CPU, 4, 0}, {MB_JOB_GPU, 2, 1}, {MB_JOB_MEMORY, 1 << 30, 0}};

/* The wish is the name of the node. */
static int may_use(void *arg, const struct mb_job_ticket *t, const char *node)
{
    (void)arg;
    return strcmp(t->wish.what, node) == 0;
}

static struct mb_job_queue *make(size_t max_running, size_t max_waiting)
{
    struct mb_job_queue_opts opts = {.max_running = max_running,
                                     .max_waiting = max_waiting,
                                     .totals = totals,
                                     .n_totals = KINDS,
                                     .may_use = may_use};
    struct mb_job_queue *q = NULL;

    assert_int_equal(mb_job_queue_create(&opts, &q, NULL), 0);
    mb_job_queue_set_free(q, MB_JOB_HEAD_NODE, MB_JOB_GPU, 2);
    return q;
}

static void join(struct mb_job_queue *q, struct mb_job_ticket *t, double cpus, double gpus,
                 uint64_t now_ms)
{
    struct mb_job_amount needs[] = {{MB_JOB_CPU, cpus, 0}, {MB_JOB_GPU, gpus, 0}};

    assert_int_equal(mb_job_queue_add(q, t, needs, 2, 0, now_ms, 0, NULL), 0);
    mb_job_queue_ready(t);
}

static const char *reason(struct mb_job_ticket *t)
{
    static char text[512];
    struct mb_buf b = {0};

    assert_int_equal(mb_job_queue_reason(t, &b), 0);
    snprintf(text, sizeof text, "%s", mb_buf_str(&b));
    mb_buf_close(&b);
    return text;
}

static void starts(struct mb_job_queue *q, const struct mb_job_ticket *expected)
{
    struct mb_job_ticket *t;
    enum mb_job_queue_action action = mb_job_queue_next(q, 1, &t);

    assert_int_equal(action, expected ? MB_JOB_QUEUE_START : MB_JOB_QUEUE_NOTHING);
    assert_ptr_equal(t, expected);
    assert_null(mb_job_queue_invariant(q));
}

static void first_come_first_served(void **state)
{
    struct mb_job_queue *q = make(2, 10);
    struct mb_job_ticket a = {0}, b = {0}, c = {0}, d = {0};

    (void)state;
    join(q, &a, 0, 0, 0);
    join(q, &b, 0, 0, 0);
    join(q, &c, 0, 0, 0);
    join(q, &d, 0, 0, 0);
    starts(q, &a);
    starts(q, &b);
    starts(q, NULL);
    assert_string_equal(reason(&d), "It is number 2 of 2 in the queue: 2 jobs run, which is the "
                                    "bound (--max-running-jobs).");
    mb_job_queue_leave(&b);
    starts(q, &c);
    mb_job_queue_leave(&c);
    mb_job_queue_leave(&a);
    starts(q, &d);
    starts(q, NULL);
    mb_job_queue_leave(&d);
    mb_job_queue_leave(&d); /* in no place: legal */
    assert_int_equal(mb_job_queue_running(q), 0);
    mb_job_queue_destroy(q);
}

/* What a waiting job lacks is set aside; what it does not need, others may take. */
static void overtaking_delays_nobody(void **state)
{
    struct mb_job_queue *q = make(10, 10);
    struct mb_job_ticket a = {0}, wide = {0}, small = {0}, gpu = {0}, none = {0};

    (void)state;
    join(q, &a, 3, 0, 0);
    starts(q, &a);
    join(q, &wide, 4, 0, 0);  /* waits for CPUs */
    join(q, &small, 1, 0, 0); /* would fit, but takes what wide waits for */
    join(q, &gpu, 0, 0.5, 0); /* takes nothing of that; half a GPU is a whole one */
    join(q, &none, 0, 0, 0);
    starts(q, &gpu);
    starts(q, &none);
    starts(q, NULL);
    assert_string_equal(reason(&wide), "It is number 1 of 2 in the queue: it needs 4 CPUs, 1 of 4 "
                                       "free.");
    assert_string_equal(reason(&small), "It is number 2 of 2 in the queue: what is free is kept "
                                        "for jobs before it.");
    mb_job_queue_leave(&a);
    starts(q, &wide);
    starts(q, NULL);
    mb_job_queue_leave(&wide);
    starts(q, &small);
    mb_job_queue_leave(&small);
    mb_job_queue_leave(&gpu);
    mb_job_queue_leave(&none);
    mb_job_queue_destroy(q);
}

/* One place is kept for those that wait for resources, so that a stream of small jobs does not take
 * every place as it becomes free. */
static void a_place_is_kept(void **state)
{
    struct mb_job_queue *q = make(2, 10);
    struct mb_job_ticket a = {0}, wide = {0}, b = {0};

    (void)state;
    join(q, &a, 1, 0, 0);
    starts(q, &a);
    join(q, &wide, 4, 0, 0);
    join(q, &b, 0, 0, 0);
    starts(q, NULL);
    mb_job_queue_leave(&a);
    starts(q, &wide);
    starts(q, &b);
    mb_job_queue_destroy(q);
}

static void bounds(void **state)
{
    struct mb_job_queue *q = make(1, 2);
    struct mb_job_ticket t[4] = {{0}};
    struct mb_err err = {0};

    (void)state;
    join(q, &t[0], 0, 0, 0);
    join(q, &t[1], 0, 0, 0);
    assert_int_equal(mb_job_queue_add(q, &t[2], NULL, 0, 0, 0, 0, &err), MB_EFULL);
    assert_non_null(strstr(err.text, "2 jobs wait already"));
    assert_int_equal(t[2].place, MB_JOB_PLACE_NONE);
    assert_int_equal(mb_job_queue_add(q, &t[2], NULL, 0, 0, 0, 1, &err), 0);
    assert_int_equal(t[2].place, MB_JOB_PLACE_COMING);
    starts(q, &t[0]);
    mb_job_queue_adopt(q, &t[3], MB_JOB_HEAD_NODE, NULL,
                       0); /* beyond max_running: it runs, whatever the bound */
    assert_int_equal(mb_job_queue_running(q), 2);
    mb_job_queue_leave(&t[0]);
    starts(q, NULL);
    mb_job_queue_leave(&t[3]);
    starts(q, &t[1]);
    mb_job_queue_leave(&t[1]);
    starts(q, NULL); /* the last is not stored yet */
    mb_job_queue_ready(&t[2]);
    starts(q, &t[2]);
    assert_null(mb_job_queue_invariant(q));
    mb_job_queue_destroy(q);
}

static void what_never_fits_is_shown_before_it_fails(void **state)
{
    struct mb_job_queue *q = make(4, 10);
    struct mb_job_amount nobody = {"whale", 1, 0};
    struct mb_job_ticket wide = {0}, strange = {0}, after = {0}, *t;

    (void)state;
    join(q, &wide, 999, 3, 0);
    assert_int_equal(mb_job_queue_add(q, &strange, &nobody, 1, 0, 0, 0, NULL), 0);
    mb_job_queue_ready(&strange);
    join(q, &after, 4, 0, 0);
    starts(q, &after); /* what never fits keeps nothing from anybody */
    starts(q, NULL);
    assert_string_equal(reason(&wide), "It needs 999 CPUs, the cluster has 4; it needs 3 GPUs, the "
                                       "cluster has 2 on one node.");
    mb_job_queue_seen(&wide, 100);
    mb_job_queue_seen(&wide, 400); /* the first look counts */
    assert_int_equal(mb_job_queue_next(q, 100 + MB_JOB_QUEUE_SEEN_MS - 1, &t),
                     MB_JOB_QUEUE_NOTHING);
    assert_int_equal(mb_job_queue_next(q, 100 + MB_JOB_QUEUE_SEEN_MS, &t), MB_JOB_QUEUE_NEVER_FITS);
    assert_ptr_equal(t, &wide);
    mb_job_queue_leave(t);
    assert_int_equal(mb_job_queue_next(q, MB_JOB_QUEUE_UNSEEN_MS - 1, &t), MB_JOB_QUEUE_NOTHING);
    assert_int_equal(mb_job_queue_next(q, MB_JOB_QUEUE_UNSEEN_MS, &t), MB_JOB_QUEUE_NEVER_FITS);
    assert_ptr_equal(t, &strange);
    assert_non_null(strstr(reason(t), "needs 1 whale, the cluster has 0"));
    mb_job_queue_leave(t);
    mb_job_queue_destroy(q);
}

static void a_wait_may_have_an_end(void **state)
{
    struct mb_job_queue *q = make(1, 10);
    struct mb_job_ticket a = {0}, b = {0}, *t;

    (void)state;
    join(q, &a, 0, 0, 0);
    starts(q, &a);
    assert_int_equal(mb_job_queue_add(q, &b, NULL, 0, 5000, 1000, 0, NULL), 0);
    mb_job_queue_ready(&b);
    assert_int_equal(mb_job_queue_next(q, 5999, &t), MB_JOB_QUEUE_NOTHING);
    assert_int_equal(mb_job_queue_next(q, 6250, &t), MB_JOB_QUEUE_TIMED_OUT);
    assert_ptr_equal(t, &b);
    mb_job_queue_leave(t);
    assert_int_equal(mb_job_queue_waiting(q), 0);
    mb_job_queue_destroy(q);
}

static void gpus_that_others_took(void **state)
{
    struct mb_job_queue *q = make(4, 10);
    struct mb_job_ticket a = {0}, b = {0};

    (void)state;
    mb_job_queue_set_free(q, MB_JOB_HEAD_NODE, MB_JOB_GPU, 1);
    join(q, &a, 0, 2, 0);
    join(q, &b, 0, 1, 0);
    starts(q, NULL);
    assert_non_null(strstr(reason(&a), "it needs 2 GPUs, 1 of 2 free"));
    mb_job_queue_set_free(q, MB_JOB_HEAD_NODE, MB_JOB_GPU, 2);
    starts(q, &a);
    mb_job_queue_put_back(&a, 0, NULL); /* a gang was faster */
    mb_job_queue_set_free(q, MB_JOB_HEAD_NODE, MB_JOB_GPU, 0);
    starts(q, NULL);
    assert_non_null(strstr(reason(&a), "number 1 of 2"));
    mb_job_queue_set_free(q, MB_JOB_HEAD_NODE, MB_JOB_GPU, 2);
    starts(q, &a);
    starts(q, NULL);
    mb_job_queue_destroy(q);
}

/* Those that cannot start yet keep their order and what they need, and hold nobody else up. */
static void who_is_put_back_holds_nobody_up(void **state)
{
    struct mb_job_queue *q = make(20, 10);
    struct mb_job_ticket a = {0}, b = {0}, c = {0}, d = {0}, *t;

    (void)state;
    join(q, &a, 1, 0, 0);
    join(q, &b, 1, 0, 0);
    join(q, &c, 2, 0, 0);
    join(q, &d, 1, 0, 0);
    starts(q, &a);
    mb_job_queue_put_back(&a, UINT64_MAX, "its package comes");
    starts(q, &b);
    mb_job_queue_put_back(&b, 300, "its GPUs were taken");
    starts(q, &c);
    starts(q, NULL); /* d would fit, but takes what a or b waits for */
    assert_string_equal(reason(&a), "It is number 1 of 3 in the queue: its package comes.");
    assert_string_equal(reason(&b), "It is number 2 of 3 in the queue: its GPUs were taken.");
    assert_int_equal(mb_job_queue_next(q, 299, &t), MB_JOB_QUEUE_NOTHING);
    assert_int_equal(mb_job_queue_next(q, 300, &t), MB_JOB_QUEUE_START);
    assert_ptr_equal(t, &b);
    starts(q, NULL);
    mb_job_queue_release(q);
    starts(q, &a);
    mb_job_queue_leave(&c);
    starts(q, &d);
    mb_job_queue_destroy(q);
}

/* ---- several nodes ---- */

static void add_node(struct mb_job_queue *q, const char *name, double cpus, double gpus)
{
    struct mb_job_amount has[] = {{MB_JOB_CPU, cpus, 0}, {MB_JOB_GPU, gpus, 1}};
    int is_new;

    assert_int_equal(mb_job_queue_node(q, name, has, 2, &is_new, NULL), 0);
    assert_int_equal(is_new, 0);
    mb_job_queue_set_free(q, name, MB_JOB_GPU, gpus);
}

static void starts_on(struct mb_job_queue *q, const struct mb_job_ticket *t, const char *node)
{
    starts(q, t);
    assert_string_equal(mb_job_queue_node_of(t), node);
}

/* Ray's rule: nothing asked for is the head; else the head if it fits, or where it does. */
static void the_head_comes_first_then_the_emptiest(void **state)
{
    struct mb_job_queue *q = make(20, 20);
    struct mb_job_ticket a = {0}, b = {0}, c = {0}, d = {0}, e = {0}, plain = {0};

    (void)state;
    add_node(q, "one", 4, 0);
    add_node(q, "two", 4, 0);
    join(q, &a, 3, 0, 0);
    starts_on(q, &a, MB_JOB_HEAD_NODE);
    join(q, &b, 2, 0, 0);
    starts_on(q, &b, "one");
    join(q, &c, 1, 0, 0);
    starts_on(q, &c, MB_JOB_HEAD_NODE);
    join(q, &d, 1, 0, 0);
    starts_on(q, &d, "two");
    join(q, &e, 2, 0, 0);
    starts_on(q, &e, "one");
    join(q, &plain, 0, 0, 0);
    mb_job_queue_wish(&plain, &(struct mb_job_wish){.is_plain = 1});
    starts_on(q, &plain, MB_JOB_HEAD_NODE);
    assert_null(mb_job_queue_node_of(&(struct mb_job_ticket){0}));
    mb_job_queue_destroy(q);
}

static double taken_of(const struct mb_job_queue *q, const char *node, const char *name)
{
    struct mb_job_amount total;
    double taken;

    for (size_t k = 0; mb_job_queue_look(q, node, k, &total, &taken); k++)
        if (strcmp(total.name, name) == 0)
            return taken;
    return -1;
}

/* What is free there is said of it alone, with how many others there are; each one can be looked
 * at. */
static void which_node_is_meant(void **state)
{
    struct mb_job_queue *q = make(20, 20);
    struct mb_job_ticket h = {0}, one = {0}, waits = {0}, wide = {0};

    (void)state;
    add_node(q, "0123456789abcdef", 5, 0);
    join(q, &h, 4, 1, 0);
    starts_on(q, &h, MB_JOB_HEAD_NODE);
    join(q, &one, 4, 0, 0);
    starts_on(q, &one, "0123456789abcdef");
    assert_true(taken_of(q, MB_JOB_HEAD_NODE, MB_JOB_CPU) == 4);
    assert_true(taken_of(q, MB_JOB_HEAD_NODE, MB_JOB_GPU) == 1);
    assert_true(taken_of(q, "0123456789abcdef", MB_JOB_CPU) == 4);
    assert_true(taken_of(q, "0123456789abcdef", MB_JOB_GPU) == 0);
    assert_true(taken_of(q, "nobody", MB_JOB_CPU) == -1);
    join(q, &waits, 2, 0, 0);
    starts(q, NULL);
    assert_string_equal(reason(&waits), "It is number 1 of 1 in the queue: it needs 2 CPUs, 1 of 5 "
                                        "free on node 0123456789ab, one of 2 that could take it.");
    join(q, &wide, 5, 0, 0);
    starts(q, NULL);
    assert_string_equal(reason(&wide), "It is number 2 of 2 in the queue: it needs 5 CPUs, 1 of 5 "
                                       "free.");
    mb_job_queue_node_gone(q, "0123456789abcdef");
    starts(q, NULL);
    assert_string_equal(reason(&waits),
                        "It is number 1 of 2 in the queue: it needs 2 CPUs, 0 of 4 free.");
    mb_job_queue_destroy(q);
}

/* A job keeps one node for itself, not every one where it could run. */
static void who_waits_is_pinned_to_one_node(void **state)
{
    struct mb_job_queue *q = make(20, 20);
    struct mb_job_ticket h = {0}, one = {0}, two = {0}, wide = {0}, small = {0}, behind = {0};

    (void)state;
    add_node(q, "one", 4, 0);
    add_node(q, "two", 4, 0);
    join(q, &h, 4, 0, 0);
    starts_on(q, &h, MB_JOB_HEAD_NODE);
    join(q, &one, 3, 0, 0);
    starts_on(q, &one, "one");
    join(q, &two, 2, 0, 0);
    starts_on(q, &two, "two");
    join(q, &wide, 4, 0, 0); /* lacks least on two */
    starts(q, NULL);
    assert_string_equal(reason(&wide), "It is number 1 of 1 in the queue: it needs 4 CPUs, 2 of 4 "
                                       "free on node two, one of 3 that could take it.");
    join(q, &small, 1, 0, 0);
    starts_on(q, &small, "one");
    join(q, &behind, 1, 0, 0);
    starts(q, NULL);
    mb_job_queue_leave(&one); /* now it would lack less there, but a pin stays */
    starts_on(q, &behind, "one");
    mb_job_queue_leave(&two);
    starts_on(q, &wide, "two");
    mb_job_queue_destroy(q);
}

static void nodes_come_and_go(void **state)
{
    struct mb_job_queue *q = make(20, 20);
    struct mb_job_amount whale[] = {{"whale", 1, 0}, {MB_JOB_GPU, 1, 0}};
    struct mb_job_amount has[] = {{"whale", 1, 0}, {MB_JOB_GPU, 1, 1}};
    struct mb_job_ticket t = {0}, wide = {0}, *due;
    int is_new;

    (void)state;
    assert_int_equal(mb_job_queue_add(q, &t, whale, 2, 0, 0, 0, NULL), 0);
    mb_job_queue_ready(&t);
    mb_job_queue_settled(q, 0);
    assert_non_null(strstr(reason(&t), "nodes have not told yet what they have"));
    assert_int_equal(mb_job_queue_next(q, 20000, &due), MB_JOB_QUEUE_NOTHING);
    mb_job_queue_settled(q, 1);
    assert_string_equal(reason(&t), "It needs 1 whale, the cluster has 0 on one node.");
    assert_int_equal(mb_job_queue_node(q, "sea", has, 2, &is_new, NULL), 0);
    assert_int_equal(is_new, 1);
    mb_job_queue_set_needs(&t, whale, 2);
    starts(q, NULL); /* its GPUs are not told yet */
    mb_job_queue_set_free(q, "sea", MB_JOB_GPU, 1);
    starts_on(q, &t, "sea");
    mb_job_queue_set_free(q, "sea", MB_JOB_GPU, 1); /* an older word: the unit is promised */
    join(q, &wide, 0, 1, 0);
    starts_on(q, &wide, MB_JOB_HEAD_NODE);
    mb_job_queue_confirm(&t);
    mb_job_queue_node_gone(q, "sea");
    assert_null(mb_job_queue_invariant(q));
    assert_string_equal(mb_job_queue_node_of(&t), "sea");
    mb_job_queue_put_back(&t, 0, NULL);
    assert_null(mb_job_queue_invariant(q));
    starts(q, NULL);
    assert_string_equal(reason(&t), "It needs 1 whale, the cluster has 0 on one node.");
    mb_job_queue_node_gone(q, "sea");
    mb_job_queue_node_gone(q, MB_JOB_HEAD_NODE);
    mb_job_queue_leave(&t);
    mb_job_queue_adopt(q, &t, "nowhere", whale, 2);
    assert_string_equal(mb_job_queue_node_of(&t), MB_JOB_HEAD_NODE);
    mb_job_queue_destroy(q);
}

/* Who needs that node waits for it; who does not goes elsewhere. */
static void a_node_that_is_closed(void **state)
{
    struct mb_job_queue *q = make(20, 20);
    struct mb_job_ticket plain = {0}, wide = {0}, any = {0};

    (void)state;
    add_node(q, "one", 2, 0);
    mb_job_queue_close_node(q, MB_JOB_HEAD_NODE, 1);
    mb_job_queue_close_node(q, "nowhere", 1);
    join(q, &plain, 0, 0, 0);
    mb_job_queue_wish(&plain, &(struct mb_job_wish){.is_plain = 1});
    join(q, &wide, 3, 0, 0);
    join(q, &any, 1, 0, 0);
    starts_on(q, &any, "one");
    starts(q, NULL);
    assert_string_equal(reason(&plain), "It is number 1 of 2 in the queue: its node is not "
                                        "registered yet.");
    mb_job_queue_close_node(q, MB_JOB_HEAD_NODE, 0);
    starts_on(q, &plain, MB_JOB_HEAD_NODE);
    starts_on(q, &wide, MB_JOB_HEAD_NODE);
    mb_job_queue_destroy(q);
}

static void a_wish_for_a_node(void **state)
{
    struct mb_job_queue *q = make(20, 20);
    struct mb_job_wish impatient = {.what = "moon"}, patient = {.what = "moon", .is_patient = 1};
    struct mb_job_ticket a = {0}, b = {0}, c = {0}, *due;

    (void)state;
    join(q, &a, 1, 0, 0);
    mb_job_queue_wish(&a, &impatient);
    join(q, &b, 1, 0, 0);
    mb_job_queue_wish(&b, &patient);
    starts(q, NULL);
    assert_string_equal(reason(&a), "It needs moon, the cluster has none.");
    assert_string_equal(
        reason(&b), "It is number 2 of 2 in the queue: it waits for moon that has what it needs.");
    assert_int_equal(mb_job_queue_next(q, MB_JOB_QUEUE_UNSEEN_MS, &due), MB_JOB_QUEUE_NEVER_FITS);
    assert_ptr_equal(due, &a);
    mb_job_queue_leave(&a);
    add_node(q, "moon", 1, 0);
    starts_on(q, &b, "moon");
    join(q, &c, 2, 0, 0);
    mb_job_queue_wish(&c, &impatient);
    assert_string_equal(reason(&c), "It needs 2 CPUs, the cluster has 1 on one node that is moon.");
    mb_job_queue_destroy(q);
}

/* ---- a long line before many nodes ---- */

enum { MANY_NODES = 100, LONG_LINE = 10000, ROUND_WALKS = 20 };

/* Every CPU is held; all in line wait for one, on any of the nodes. */
static struct mb_job_queue *make_long_line(struct mb_job_ticket *line, struct mb_job_ticket *busy)
{
    struct mb_job_queue *q = make(2 * MANY_NODES, 2 * LONG_LINE);
    struct mb_job_amount needs[] = {{MB_JOB_CPU, 4, 0}};
    char name[16];

    for (int i = 1; i < MANY_NODES; i++) {
        snprintf(name, sizeof name, "n%d", i);
        add_node(q, name, 4, 0);
        mb_job_queue_adopt(q, &busy[i], name, needs, 1);
    }
    mb_job_queue_adopt(q, &busy[0], MB_JOB_HEAD_NODE, needs, 1);
    for (int i = 0; i < LONG_LINE; i++)
        join(q, &line[i], 1 + i % 4, 0, 0);
    return q;
}

/* Walks until one is due, at most a round of them. */
static void is_due(struct mb_job_queue *q, uint64_t now_ms, enum mb_job_queue_action action,
                   const struct mb_job_ticket *expected)
{
    struct mb_job_ticket *t = NULL;
    enum mb_job_queue_action got = MB_JOB_QUEUE_NOTHING;

    for (int i = 0; i < ROUND_WALKS && got == MB_JOB_QUEUE_NOTHING; i++)
        got = mb_job_queue_next(q, now_ms, &t);
    assert_int_equal(got, action);
    assert_ptr_equal(t, expected);
    assert_null(mb_job_queue_invariant(q));
}

static void the_last_of_a_long_line_has_his_turn(void **state)
{
    static struct mb_job_ticket line[LONG_LINE], busy[MANY_NODES];
    struct mb_job_queue *q = make_long_line(line, busy);
    struct mb_job_ticket gpu = {0}, never = {0}, hurried = {0}, *t;
    struct mb_job_amount cpu[] = {{MB_JOB_CPU, 1, 0}};

    (void)state;
    join(q, &gpu, 0, 1, 0); /* fits: nobody before it asks for one */
    is_due(q, 1, MB_JOB_QUEUE_START, &gpu);
    join(q, &never, 99, 0, 0);
    is_due(q, MB_JOB_QUEUE_UNSEEN_MS, MB_JOB_QUEUE_NEVER_FITS, &never);
    mb_job_queue_leave(&never);
    assert_int_equal(mb_job_queue_add(q, &hurried, cpu, 1, 1000, 0, 0, NULL), 0);
    mb_job_queue_ready(&hurried);
    is_due(q, 1000, MB_JOB_QUEUE_TIMED_OUT, &hurried);
    mb_job_queue_leave(&hurried);

    /* Amid a round: the first of the line is still the first to have what becomes free. */
    assert_int_equal(mb_job_queue_next(q, 1, &t), MB_JOB_QUEUE_NOTHING);
    mb_job_queue_leave(&busy[7]);
    starts_on(q, &line[0], "n7");
    for (int i = 0; i < LONG_LINE; i++)
        mb_job_queue_leave(&line[i]); /* also the one at which a round stands */
    is_due(q, 1, MB_JOB_QUEUE_NOTHING, NULL);
    mb_job_queue_destroy(q);
}

static void there_is_room_for_so_many_kinds(void **state)
{
    struct mb_job_queue *q = make(1, 1);
    struct mb_job_amount has[MB_JOB_QUEUE_KINDS_MAX];
    struct mb_err err = {0};
    int is_new;

    (void)state;
    for (int i = 0; i < MB_JOB_QUEUE_KINDS_MAX; i++) {
        has[i] = (struct mb_job_amount){.amount = 1};
        snprintf(has[i].name, sizeof has[i].name, "kind-%d", i);
    }
    assert_int_equal(mb_job_queue_node(q, "one", has, MB_JOB_QUEUE_KINDS_MAX, &is_new, &err),
                     MB_EFULL);
    assert_int_equal(is_new, 1);
    assert_non_null(strstr(err.text, "kind-"));
    mb_job_queue_destroy(q);
}

/* ---- the random walk ---- */

enum { JOBS = 40, STEPS = 4000, SEEDS = 50, WALK_RUNNING = 6, WALK_WAITING = 20 };

struct walk {
    struct mb_job_queue *q;
    struct mb_job_ticket t[JOBS];
    uint64_t order[JOBS]; /* when it joined */
    uint64_t n_joined, now_ms;
    double gpus_elsewhere;
    uint32_t random;
};

static uint32_t draw(struct walk *w, uint32_t below)
{
    w->random = w->random * 1664525u + 1013904223u;
    return (w->random >> 8) % below;
}

static double used(const struct walk *w, int kind)
{
    double sum = 0;

    for (int i = 0; i < JOBS; i++)
        if (w->t[i].place == MB_JOB_PLACE_RUNNING)
            sum += w->t[i].need[kind];
    return sum;
}

static double amount_free(const struct walk *w, int kind)
{
    return totals[kind].amount - used(w, kind) - (kind == GPU ? w->gpus_elsewhere : 0);
}

/* Nobody who waits before the one that started has less of what he needs than he had. */
static void check_start(const struct walk *w, int started, const double before[KINDS])
{
    for (int i = 0; i < JOBS; i++) {
        if (w->t[i].place != MB_JOB_PLACE_WAITING || w->order[i] > w->order[started] ||
            w->t[i].need[CPU] > totals[CPU].amount || w->t[i].need[GPU] > totals[GPU].amount)
            continue;
        for (int k = 0; k < KINDS; k++)
            assert_true(fmin(w->t[i].need[k], amount_free(w, k)) >=
                        fmin(w->t[i].need[k], before[k]) - 1e-6);
    }
}

static void pump(struct walk *w)
{
    double before[KINDS];
    struct mb_job_ticket *t;
    enum mb_job_queue_action action;

    mb_job_queue_set_free(w->q, MB_JOB_HEAD_NODE, MB_JOB_GPU, amount_free(w, GPU));
    for (;;) {
        for (int k = 0; k < KINDS; k++)
            before[k] = amount_free(w, k);
        action = mb_job_queue_next(w->q, w->now_ms, &t);
        if (action == MB_JOB_QUEUE_NOTHING)
            return;
        if (action == MB_JOB_QUEUE_START)
            check_start(w, (int)(t - w->t), before);
        if (action == MB_JOB_QUEUE_START)
            mb_job_queue_confirm(t);
        else
            mb_job_queue_leave(t);
        for (int k = 0; k < KINDS; k++)
            assert_true(amount_free(w, k) > -1e-6);
        assert_true(mb_job_queue_running(w->q) <= WALK_RUNNING);
    }
}

static void step(struct walk *w)
{
    int i = (int)draw(w, JOBS);
    struct mb_job_ticket *t = &w->t[i];
    struct mb_job_amount needs[] = {{MB_JOB_CPU, draw(w, 55) / 10.0, 0},
                                    {MB_JOB_GPU, draw(w, 4) == 0 ? draw(w, 4) : 0, 0}};
    const char *broken;

    w->now_ms += draw(w, 300);
    if (t->place == MB_JOB_PLACE_NONE &&
        mb_job_queue_add(w->q, t, needs, draw(w, 3), draw(w, 2) ? 60000 : 0, w->now_ms, 0, NULL) ==
            0) {
        w->order[i] = ++w->n_joined;
        mb_job_queue_ready(t);
    } else if (t->place == MB_JOB_PLACE_RUNNING || draw(w, 20) == 0) {
        mb_job_queue_leave(t);
    } else {
        mb_job_queue_seen(t, w->now_ms);
    }
    if (draw(w, 5) == 0) /* a gang takes GPUs, or gives them back */
        w->gpus_elsewhere = fmin(draw(w, 3), totals[GPU].amount - used(w, GPU));
    pump(w);
    broken = mb_job_queue_invariant(w->q);
    if (broken)
        fail_msg("%s", broken);
}

/* Everything ends: whoever waits for something possible has then run. */
static void drain(struct walk *w)
{
    w->gpus_elsewhere = 0;
    while (mb_job_queue_running(w->q) + mb_job_queue_waiting(w->q) > 0) {
        size_t before = mb_job_queue_running(w->q) + mb_job_queue_waiting(w->q);

        w->now_ms += MB_JOB_QUEUE_UNSEEN_MS;
        for (int i = 0; i < JOBS; i++)
            if (w->t[i].place == MB_JOB_PLACE_RUNNING)
                mb_job_queue_leave(&w->t[i]);
        pump(w);
        assert_true(mb_job_queue_waiting(w->q) < before);
    }
}

static void random_walk(void **state)
{
    (void)state;
    for (uint32_t seed = 1; seed <= SEEDS; seed++) {
        static struct walk w;

        w = (struct walk){.q = make(WALK_RUNNING, WALK_WAITING), .random = seed, .now_ms = 1};
        for (int i = 0; i < STEPS; i++)
            step(&w);
        drain(&w);
        mb_job_queue_destroy(w.q);
    }
}

static void allocations_fail(void **state)
{
    struct mb_job_queue_opts opts = {
        .max_running = 1, .max_waiting = 1, .totals = totals, .n_totals = KINDS};
    struct mb_job_queue *q = NULL;
    struct mb_job_ticket t = {0};
    struct mb_buf b = {0};

    (void)state;
    mb_alloc_fail_nth(1);
    assert_int_equal(mb_job_queue_create(&opts, &q, NULL), MB_ENOMEM);
    mb_alloc_fail_nth(0);
    q = make(1, 1);
    join(q, &t, 5, 0, 0);
    for (unsigned long nth = 1;; nth++) {
        mb_alloc_fail_nth(nth);
        int rc = mb_job_queue_reason(&t, &b);
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        mb_buf_close(&b);
        assert_int_equal(rc, failed ? MB_ENOMEM : 0);
        if (!failed)
            break;
    }
    opts.n_totals = MB_JOB_QUEUE_KINDS_MAX + 1;
    assert_int_equal(mb_job_queue_create(&opts, &q, NULL), MB_EINVAL);
    mb_job_queue_destroy(q);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_come_first_served),
        cmocka_unit_test(overtaking_delays_nobody),
        cmocka_unit_test(a_place_is_kept),
        cmocka_unit_test(bounds),
        cmocka_unit_test(what_never_fits_is_shown_before_it_fails),
        cmocka_unit_test(a_wait_may_have_an_end),
        cmocka_unit_test(gpus_that_others_took),
        cmocka_unit_test(who_is_put_back_holds_nobody_up),
        cmocka_unit_test(the_head_comes_first_then_the_emptiest),
        cmocka_unit_test(which_node_is_meant),
        cmocka_unit_test(who_waits_is_pinned_to_one_node),
        cmocka_unit_test(nodes_come_and_go),
        cmocka_unit_test(a_node_that_is_closed),
        cmocka_unit_test(a_wish_for_a_node),
        cmocka_unit_test(the_last_of_a_long_line_has_his_turn),
        cmocka_unit_test(there_is_room_for_so_many_kinds),
        cmocka_unit_test(random_walk),
        cmocka_unit_test(allocations_fail),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
