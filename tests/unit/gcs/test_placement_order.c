/* The queue of placement groups: order, priorities, what is kept for whom, and what is said. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>
#include "base/alloc.h"
#include "gcs/placement.h"

static const char *name_of(void *arg, const uint8_t id[MB_NODE_ID_BYTES])
{
    static char name[2];

    (void)arg;
    name[0] = (char)('a' + id[0] - 1);
    return name;
}

static void node(struct mb_placement *p, uint8_t id, double gpus)
{
    uint8_t node_id[MB_NODE_ID_BYTES] = {id};
    struct mb_gcs_resource total[] = {{"mobula_slot", gpus}, {"mobula_gpu", gpus}};

    assert_int_equal(mb_placement_node_up(p, node_id, total, 2, NULL), 0);
}

static void named(struct mb_placement *p, uint8_t id, size_t n_nodes, double gpus, const char *name)
{
    struct mb_gcs_resource r[] = {{"mobula_slot", gpus}, {"mobula_gpu", gpus}};
    struct mb_gcs_bundle bundles[8];
    struct mb_gcs_pg pg = {.id = {id}, .bundles = bundles, .n_bundles = n_nodes, .name = name};

    pg.strategy = n_nodes > 1 ? MB_PG_STRICT_SPREAD : MB_PG_PACK;
    for (size_t i = 0; i < n_nodes; i++)
        bundles[i] = (struct mb_gcs_bundle){.resources = r, .n_resources = 2};
    assert_int_equal(mb_placement_add(p, &pg, NULL), 0);
}

static void gang(struct mb_placement *p, uint8_t id, size_t n_nodes, double gpus)
{
    char name[32];

    snprintf(name, sizeof name, "mobula-g%u", id);
    named(p, id, n_nodes, gpus, name);
}

static void settle(struct mb_placement *p, uint64_t now_ms)
{
    struct mb_place_action a;
    struct mb_err err = {0};

    while (mb_placement_next(p, now_ms, &a)) {
        if (a.kind != MB_PLACE_CHANGED)
            mb_placement_result(p, a.pg_id, a.ticket, MB_PLACE_OK, now_ms);
        assert_int_equal(mb_placement_check(p, &err), 0);
    }
}

static int has_started(const struct mb_placement *p, uint8_t id)
{
    uint8_t pg_id[MB_PG_ID_BYTES] = {id};

    return mb_placement_get(p, pg_id, NULL)->state == MB_PG_CREATED;
}

static void end(struct mb_placement *p, uint8_t id, uint64_t now_ms)
{
    uint8_t pg_id[MB_PG_ID_BYTES] = {id};

    assert_int_equal(mb_placement_remove(p, pg_id), 0);
    settle(p, now_ms);
}

static void assert_reason(const struct mb_placement *p, uint8_t id, const char *expected)
{
    uint8_t pg_id[MB_PG_ID_BYTES] = {id};
    struct mb_buf b = {0};

    assert_int_equal(mb_placement_reason(p, pg_id, name_of, NULL, &b), 0);
    assert_string_equal(mb_buf_str(&b), expected);
    mb_buf_close(&b);
}

/* ---- order ---- */

static void backfill_lets_a_later_gang_start(void **state)
{
    struct mb_placement *p = mb_placement_create(1);

    (void)state;
    node(p, 1, 4);
    node(p, 2, 4);
    gang(p, 1, 1, 4);
    settle(p, 1);
    gang(p, 2, 2, 4);
    gang(p, 3, 1, 2);
    settle(p, 2);
    assert_false(has_started(p, 2));
    assert_true(has_started(p, 3));
    mb_placement_destroy(p);
}

/* The action after those that only tell. */
static struct mb_place_action next_asked(struct mb_placement *p, uint64_t now_ms)
{
    struct mb_place_action a;

    do {
        assert_int_equal(mb_placement_next(p, now_ms, &a), 1);
    } while (a.kind == MB_PLACE_CHANGED);
    return a;
}

/* Nodes come back one after the other: who needs two of them is not overtaken in between. */
static void what_comes_back_is_not_taken_apart(void **state)
{
    struct mb_placement *p = mb_placement_create(1);
    struct mb_place_action back[2];
    uint8_t first[MB_PG_ID_BYTES] = {1};

    (void)state;
    node(p, 1, 4);
    node(p, 2, 4);
    gang(p, 1, 2, 4);
    settle(p, 1);
    gang(p, 2, 2, 4);
    gang(p, 3, 1, 1);
    settle(p, 2);
    assert_int_equal(mb_placement_remove(p, first), 0);
    for (int i = 0; i < 2; i++) {
        back[i] = next_asked(p, 10);
        assert_int_equal(back[i].kind, MB_PLACE_RETURN);
    }
    for (int i = 0; i < 2; i++) {
        assert_false(has_started(p, 2));
        mb_placement_result(p, first, back[i].ticket, MB_PLACE_OK, 11);
        settle(p, 11);
        assert_false(has_started(p, 3));
    }
    assert_true(has_started(p, 2));
    node(p, 3, 4);
    settle(p, 20);
    assert_true(has_started(p, 3));
    gang(p, 4, 2, 4);
    gang(p, 5, 1, 4);
    settle(p, 30);
    end(p, 3, 40); /* one comes back, and two are needed: backfill as ever */
    assert_false(has_started(p, 4));
    assert_true(has_started(p, 5));
    end(p, 2, 50);
    assert_true(has_started(p, 4));
    mb_placement_destroy(p);
}

/* A node that does not take back, that drains or that is gone is not waited for. */
static void what_may_never_come_back_keeps_nobody(void **state)
{
    uint8_t first[MB_PG_ID_BYTES] = {1}, second_node[MB_NODE_ID_BYTES] = {2};
    struct mb_gcs_resource none[] = {{"mobula_slot", 0}, {"mobula_gpu", 0}};

    (void)state;
    for (int how = 0; how < 3; how++) {
        struct mb_placement *p = mb_placement_create(1);
        struct mb_place_action back[2];

        node(p, 1, 4);
        node(p, 2, 4);
        gang(p, 1, 2, 4);
        settle(p, 1);
        gang(p, 2, 2, 4);
        gang(p, 3, 1, 1);
        settle(p, 2);
        assert_int_equal(mb_placement_remove(p, first), 0);
        back[0] = next_asked(p, 10);
        back[1] = next_asked(p, 10);
        if (memcmp(back[0].node_id, second_node, sizeof second_node) == 0) {
            struct mb_place_action a = back[0];
            back[0] = back[1];
            back[1] = a;
        }
        mb_placement_result(p, first, back[0].ticket, MB_PLACE_OK, 11);
        settle(p, 11);
        assert_false(has_started(p, 3)); /* the second one is on its way */
        if (how == 0)
            mb_placement_result(p, first, back[1].ticket, MB_PLACE_FAILED, 12);
        else if (how == 1)
            mb_placement_node_view(p, second_node, none, 2, 1);
        else
            mb_placement_node_dead(p, second_node);
        settle(p, 12);
        assert_true(has_started(p, 3));
        assert_false(has_started(p, 2));
        mb_placement_destroy(p);
    }
}

static void strict_order_does_not(void **state)
{
    struct mb_placement *p = mb_placement_create(1);

    (void)state;
    mb_placement_set_order(p, MB_PLACE_STRICT, 0);
    node(p, 1, 4);
    node(p, 2, 4);
    gang(p, 1, 1, 4);
    settle(p, 1);
    gang(p, 2, 2, 4);
    gang(p, 3, 1, 2);
    settle(p, 2);
    assert_false(has_started(p, 2));
    assert_false(has_started(p, 3));
    assert_reason(p, 3, "waiting behind mobula-g2, which came earlier (strict order)");
    /* Nothing is due for a group that only an event can help. */
    assert_true(mb_placement_due_ms(p) > 2);
    end(p, 1, 10);
    assert_true(has_started(p, 2));
    assert_false(has_started(p, 3));
    end(p, 2, 20);
    assert_true(has_started(p, 3));
    mb_placement_destroy(p);
}

static void strict_order_passes_over_what_can_never_start(void **state)
{
    struct mb_placement *p = mb_placement_create(1);

    (void)state;
    mb_placement_set_order(p, MB_PLACE_STRICT, 0);
    node(p, 1, 4);
    gang(p, 1, 1, 8);
    gang(p, 2, 2, 1);
    gang(p, 3, 1, 1);
    settle(p, 1);
    assert_true(has_started(p, 3));
    node(p, 2, 4); /* now the second could, and nobody overtakes it any more */
    settle(p, 2);
    assert_true(has_started(p, 2));
    mb_placement_destroy(p);
}

static void a_cancelled_gang_blocks_nobody(void **state)
{
    struct mb_placement *p = mb_placement_create(1);

    (void)state;
    mb_placement_set_order(p, MB_PLACE_STRICT, 0);
    node(p, 1, 4);
    gang(p, 1, 1, 2);
    gang(p, 2, 1, 4);
    gang(p, 3, 1, 2);
    settle(p, 1);
    assert_false(has_started(p, 3));
    end(p, 2, 2);
    assert_true(has_started(p, 3));
    mb_placement_destroy(p);
}

/* A stream of small gangs, two at a time, never leaves the node empty: without the bound the large
 * one would never start. */
static void nobody_starves(void **state)
{
    for (int by_time = 0; by_time < 2; by_time++) {
        struct mb_placement *p = mb_placement_create(1);
        uint64_t now = 1;
        uint8_t next = 2;
        unsigned overtaken;

        (void)state;
        mb_placement_set_order(p, MB_PLACE_BACKFILL, by_time ? 5000 : UINT64_MAX / 2);
        node(p, 1, 4);
        gang(p, 200, 1, 2);
        gang(p, 201, 1, 2);
        settle(p, now);
        gang(p, 1, 1, 4);
        settle(p, now);
        end(p, 200, now);
        for (overtaken = 0; overtaken < 100; overtaken++) {
            now += 1000;
            gang(p, next, 1, 2);
            settle(p, now);
            if (!has_started(p, next))
                break;
            end(p, next == 2 ? 201 : (uint8_t)(next - 1), now);
            next++;
        }
        assert_int_equal(overtaken, by_time ? 4 : MB_PLACE_OVERTAKES);
        assert_reason(p, next, "waiting: what is free is kept for mobula-g1, which waits longer");
        assert_reason(p, 1, "waiting for 2 more mobula_gpu on 1 node: node a has 2 free of 4");
        end(p, (uint8_t)(next - 1), now);
        assert_true(has_started(p, 1));
        end(p, 1, now);
        assert_true(has_started(p, next));
        mb_placement_destroy(p);
    }
}

static void what_is_not_needed_is_not_kept(void **state)
{
    struct mb_placement *p = mb_placement_create(1);

    (void)state;
    mb_placement_set_order(p, MB_PLACE_BACKFILL, 0);
    node(p, 1, 8);
    node(p, 2, 8);
    node(p, 3, 2);
    gang(p, 1, 2, 6);
    settle(p, 1);
    gang(p, 2, 2, 4);
    settle(p, 2);
    assert_false(has_started(p, 2));
    gang(p, 3, 1, 2); /* beside what is kept */
    gang(p, 4, 1, 2);
    settle(p, 3);
    assert_true(has_started(p, 3));
    assert_false(has_started(p, 4));
    end(p, 1, 4);
    assert_true(has_started(p, 2));
    assert_true(has_started(p, 4)); /* four are left beside it */
    mb_placement_destroy(p);
}

static void gangs_share_a_node_by_gpu(void **state)
{
    struct mb_placement *p = mb_placement_create(1);

    (void)state;
    node(p, 1, 4);
    node(p, 2, 4);
    for (uint8_t i = 1; i <= 4; i++)
        gang(p, i, 2, 1);
    settle(p, 1);
    for (uint8_t i = 1; i <= 4; i++)
        assert_true(has_started(p, i));
    gang(p, 5, 2, 1);
    settle(p, 2);
    assert_reason(p, 5,
                  "waiting for 2 more mobula_gpu on 2 nodes: node a has 0 free of 4, node b has 0 "
                  "free of 4");
    mb_placement_destroy(p);
}

/* ---- priorities ---- */

static void priorities_go_first(void **state)
{
    struct mb_placement *p = mb_placement_create(1);

    (void)state;
    mb_placement_set_order(p, MB_PLACE_STRICT, 0);
    node(p, 1, 4);
    gang(p, 1, 1, 4);
    settle(p, 1);
    named(p, 2, 1, 4, "mobula-low@priority=-5");
    named(p, 3, 1, 4, "mobula-plain");
    named(p, 4, 1, 4, "mobula-high@priority=10");
    named(p, 5, 1, 4, "mobula-high2@priority=10");
    settle(p, 2);
    assert_reason(p, 3, "waiting behind mobula-high, which has a higher priority");
    assert_reason(p, 5, "waiting behind mobula-high, which came earlier (strict order)");
    const uint8_t order[] = {1, 4, 5, 3, 2};
    for (size_t i = 0; i + 1 < sizeof order; i++) {
        end(p, order[i], 10 + i);
        assert_true(has_started(p, order[i + 1]));
    }
    mb_placement_destroy(p);
}

static void names_carry_priorities(void **state)
{
    struct mb_placement *p = mb_placement_create(1);
    struct mb_gcs_resource r = {"mobula_slot", 1};
    struct mb_gcs_bundle b = {.resources = &r, .n_resources = 1};
    struct mb_gcs_pg again = {.id = {9}, .bundles = &b, .n_bundles = 1};
    struct mb_place_info info;
    struct mb_err err = {0};

    (void)state;
    assert_int_equal(mb_placement_priority_of("mobula-x@priority=7"), 7);
    assert_int_equal(mb_placement_priority_of("mobula-x@priority=-1000"), -1000);
    assert_int_equal(mb_placement_priority_of("mobula-x@priority=1001"), 0);
    assert_int_equal(mb_placement_priority_of("mobula-x@priority="), 0);
    assert_int_equal(mb_placement_priority_of("mobula-x@priority=1@priority=2"), 2);
    assert_int_equal(mb_placement_priority_of("other-x@priority=7"), 0);
    assert_int_equal(mb_placement_priority_of("mobula-x"), 0);
    assert_int_equal(mb_placement_priority_of(NULL), 0);
    named(p, 1, 1, 1, "mobula-x@priority=7");
    again.name = "mobula-x";
    assert_int_equal(mb_placement_add(p, &again, &err), MB_EEXIST);
    again.name = "mobula-x@priority=8";
    assert_int_equal(mb_placement_add(p, &again, &err), MB_EEXIST);
    again.name = "mobula-xy@priority=8";
    assert_int_equal(mb_placement_add(p, &again, &err), 0);
    assert_int_equal(mb_placement_at(p, 0, &info)->id[0], 9);
    assert_int_equal(info.priority, 8);
    assert_int_equal(info.ahead, 0);
    mb_placement_at(p, 1, &info);
    assert_int_equal(info.ahead, 1);
    mb_placement_destroy(p);
}

/* The store gives groups back by their ids. */
static void a_restart_keeps_the_order(void **state)
{
    struct mb_placement *p = mb_placement_create(1);
    struct mb_gcs_resource r = {"mobula_slot", 1};
    struct mb_gcs_bundle b = {.resources = &r, .n_resources = 1};

    (void)state;
    for (uint8_t i = 0; i < 5; i++) {
        const uint64_t created[] = {30, 10, 50, 20, 40};
        struct mb_gcs_pg pg = {.id = {i}, .bundles = &b, .n_bundles = 1, .name = ""};
        pg.created_unix_ms = created[i];
        assert_int_equal(mb_placement_restore(p, &pg, NULL), 0);
    }
    for (size_t i = 0; i < 5; i++)
        assert_int_equal(mb_placement_at(p, i, NULL)->created_unix_ms, 10 * (i + 1));
    mb_placement_destroy(p);
}

/* ---- reasons ---- */

static void reasons_name_what_is_missing(void **state)
{
    struct mb_placement *p = mb_placement_create(1);
    uint8_t b[MB_NODE_ID_BYTES] = {2};

    (void)state;
    gang(p, 1, 1, 2);
    settle(p, 1);
    assert_reason(p, 1, "waiting for 1 node with 2 mobula_gpu: no node is alive");
    node(p, 1, 4);
    node(p, 2, 4);
    settle(p, 2);
    assert_true(has_started(p, 1));
    assert_reason(p, 1, "");
    gang(p, 2, 1, 8);
    gang(p, 3, 3, 1);
    gang(p, 4, 2, 4);
    settle(p, 3);
    assert_reason(p, 2,
                  "waiting for 1 node with 8 mobula_gpu: node a has 4 mobula_gpu, node b has 4 "
                  "mobula_gpu");
    assert_reason(p, 3, "waiting for 1 more node with 1 mobula_gpu: 2 of 3 such nodes are alive");
    assert_reason(p, 4, "waiting for 2 more mobula_gpu on 1 node: node a has 2 free of 4");
    mb_placement_node_view(p, b, NULL, 0, 1); /* it drains */
    settle(p, 4);
    assert_reason(p, 4, "waiting for 1 more node with 4 mobula_gpu: 1 of 2 such nodes are alive");
    end(p, 4, 5);
    assert_reason(p, 4, "");
    mb_placement_destroy(p);
}

static void a_refusal_is_said(void **state)
{
    struct mb_placement *p = mb_placement_create(1);
    struct mb_place_action a;

    (void)state;
    node(p, 1, 4);
    gang(p, 1, 1, 4);
    while (mb_placement_next(p, 1, &a))
        if (a.kind == MB_PLACE_PREPARE)
            mb_placement_result(p, a.pg_id, a.ticket, MB_PLACE_REFUSED, 1);
    assert_reason(p, 1,
                  "waiting for nodes to confirm: one refused or is giving back what it held; "
                  "trying again");
    mb_placement_destroy(p);
}

static void a_gang_without_its_driver(void **state)
{
    struct mb_placement *p = mb_placement_create(1);
    const uint8_t two[MB_PG_ID_BYTES] = {2}, three[MB_PG_ID_BYTES] = {3};

    (void)state;
    mb_placement_set_order(p, MB_PLACE_STRICT, 0);
    node(p, 1, 4);
    gang(p, 1, 1, 4);
    settle(p, 1);
    gang(p, 2, 1, 4);
    named(p, 3, 1, 4, "of-ray");
    mb_placement_attend(p, two, 1, 2);
    settle(p, 2);
    mb_placement_attend(p, two, 0, 10);
    mb_placement_attend(p, two, 0, 5000); /* away since 10 */
    mb_placement_attend(p, three, 0, 10); /* Ray's clients need not wait */
    settle(p, 10);
    assert_reason(p, 2, "its driver is away; it leaves the queue soon");
    end(p, 1, 20);
    assert_false(has_started(p, 2));
    assert_true(has_started(p, 3)); /* it holds nobody up */
    assert_int_equal(mb_placement_due_ms(p), 10 + MB_PLACE_ORPHAN_MS);
    settle(p, 9 + MB_PLACE_ORPHAN_MS);
    assert_int_equal(mb_placement_get(p, two, NULL)->state, MB_PG_PENDING);
    mb_placement_attend(p, two, 1, 9 + MB_PLACE_ORPHAN_MS); /* a head that was restarted */
    end(p, 3, 50000);
    assert_true(has_started(p, 2));
    mb_placement_attend(p, two, 0, 60000); /* whoever runs need not wait */
    settle(p, 200000);
    assert_true(has_started(p, 2));
    gang(p, 4, 1, 4);
    settle(p, 200000);
    const uint8_t four[MB_PG_ID_BYTES] = {4};
    mb_placement_attend(p, four, 0, 200000);
    settle(p, 200000 + MB_PLACE_ORPHAN_MS);
    assert_int_equal(mb_placement_get(p, four, NULL)->state, MB_PG_REMOVED);
    mb_placement_destroy(p);
}

/* A new head: drivers find it in another order than they had. */
static void a_driver_that_finds_the_new_head_late(void **state)
{
    const uint8_t two[MB_PG_ID_BYTES] = {2}, three[MB_PG_ID_BYTES] = {3};

    (void)state;
    for (int is_strict = 0; is_strict < 2; is_strict++) {
        for (int comes = 0; comes < 2; comes++) {
            struct mb_placement *old = mb_placement_create(1), *p = mb_placement_create(1);
            struct mb_err err;

            mb_placement_set_order(p, is_strict ? MB_PLACE_STRICT : MB_PLACE_BACKFILL, 60000);
            gang(old, 2, 1, 4);
            gang(old, 3, 1, 4);
            assert_int_equal(mb_placement_restore(p, mb_placement_get(old, two, NULL), &err), 0);
            assert_int_equal(mb_placement_restore(p, mb_placement_get(old, three, NULL), &err), 0);
            mb_placement_attend(p, two, 0, 100000);
            mb_placement_attend(p, three, 0, 100000);
            node(p, 1, 4);
            mb_placement_attend(p, three, 1, 100010);
            settle(p, 100010);
            assert_false(has_started(p, 2));
            assert_int_equal(has_started(p, 3), !is_strict);
            if (comes) {
                mb_placement_attend(p, two, 1, 100020);
                settle(p, 100020);
                assert_int_equal(has_started(p, 2), is_strict);
                assert_int_equal(has_started(p, 3), !is_strict);
                mb_placement_attend(p, two, 0, 100030); /* from now on it holds nobody up */
            }
            settle(p, 100030 + MB_PLACE_ORPHAN_MS);
            assert_int_equal(has_started(p, 3), !is_strict || !comes);
            mb_placement_destroy(p);
            mb_placement_destroy(old);
        }
    }
}

static void memory_runs_out(void **state)
{
    uint8_t pg_id[MB_PG_ID_BYTES] = {2};
    struct mb_placement *p = mb_placement_create(1);
    int rc = MB_ENOMEM;

    (void)state;
    mb_placement_set_order(p, MB_PLACE_BACKFILL, 0);
    node(p, 1, 4);
    gang(p, 1, 1, 2);
    settle(p, 1);
    gang(p, 2, 1, 4);
    for (unsigned nth = 1; rc == MB_ENOMEM && nth < 100; nth++) {
        struct mb_buf b = {0};
        mb_alloc_fail_nth(nth);
        settle(p, 1 + nth);
        mb_alloc_fail_nth(nth);
        rc = mb_placement_reason(p, pg_id, name_of, NULL, &b);
        mb_alloc_fail_nth(0);
        assert_int_equal(b.len > 0, rc == 0);
        mb_buf_close(&b);
    }
    assert_int_equal(rc, 0);
    settle(p, 2000);
    gang(p, 3, 1, 2); /* kept, whatever failed before */
    settle(p, 2001);
    assert_false(has_started(p, 3));
    end(p, 1, 2002);
    assert_true(has_started(p, 2));
    mb_placement_destroy(p);
}

/* In strict order, too, a gang that no turn could help is told what is missing, not who is first.
 */
static void what_never_fits_is_not_behind_anybody(void **state)
{
    struct mb_placement *p = mb_placement_create(1);

    (void)state;
    mb_placement_set_order(p, MB_PLACE_STRICT, 0);
    node(p, 1, 2);
    node(p, 2, 2);
    gang(p, 1, 2, 2);
    settle(p, 1000);
    assert_true(has_started(p, 1));
    gang(p, 2, 1, 1);
    gang(p, 3, 3, 1);
    gang(p, 4, 1, 8);
    gang(p, 5, 1, 1);
    settle(p, 2000);
    assert_reason(p, 3, "waiting for 1 more node with 1 mobula_gpu: 2 of 3 such nodes are alive");
    assert_reason(p, 4,
                  "waiting for 1 node with 8 mobula_gpu: node a has 2 mobula_gpu, node b has 2 "
                  "mobula_gpu");
    assert_reason(p, 5, "waiting behind mobula-g2, which came earlier (strict order)");
    mb_placement_destroy(p);
}

static size_t nodes_for(const struct mb_placement *p, uint8_t id)
{
    uint8_t pg_id[MB_PG_ID_BYTES] = {id};

    return mb_placement_nodes_for(p, pg_id);
}

/* What a gang that may shrink needs to know: free nodes, and those it has. */
static void nodes_for_a_gang_that_may_shrink(void **state)
{
    struct mb_placement *p = mb_placement_create(1);
    const uint8_t first[MB_NODE_ID_BYTES] = {1};

    (void)state;
    for (uint8_t id = 1; id <= 3; id++)
        node(p, id, 2);
    gang(p, 1, 1, 2);
    settle(p, 1000);
    gang(p, 2, 3, 2);
    settle(p, 1000);
    assert_int_equal(nodes_for(p, 1), 0); /* it does not wait */
    assert_int_equal(nodes_for(p, 9), 0);
    assert_int_equal(nodes_for(p, 2), 2);
    end(p, 1, 2000);
    assert_true(has_started(p, 2));
    mb_placement_node_dead(p, first);
    settle(p, 3000);
    assert_int_equal(nodes_for(p, 2), 2); /* its own two */
    node(p, 4, 1);
    assert_int_equal(nodes_for(p, 2), 2); /* too small */
    mb_placement_destroy(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(backfill_lets_a_later_gang_start),
        cmocka_unit_test(what_comes_back_is_not_taken_apart),
        cmocka_unit_test(what_may_never_come_back_keeps_nobody),
        cmocka_unit_test(strict_order_does_not),
        cmocka_unit_test(strict_order_passes_over_what_can_never_start),
        cmocka_unit_test(a_cancelled_gang_blocks_nobody),
        cmocka_unit_test(nobody_starves),
        cmocka_unit_test(what_is_not_needed_is_not_kept),
        cmocka_unit_test(gangs_share_a_node_by_gpu),
        cmocka_unit_test(priorities_go_first),
        cmocka_unit_test(names_carry_priorities),
        cmocka_unit_test(a_restart_keeps_the_order),
        cmocka_unit_test(reasons_name_what_is_missing),
        cmocka_unit_test(a_refusal_is_said),
        cmocka_unit_test(a_gang_without_its_driver),
        cmocka_unit_test(a_driver_that_finds_the_new_head_late),
        cmocka_unit_test(memory_runs_out),
        cmocka_unit_test(what_never_fits_is_not_behind_anybody),
        cmocka_unit_test(nodes_for_a_gang_that_may_shrink),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
