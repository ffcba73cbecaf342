/* A gang of two nodes with two ranks each, for tests of what its driver decides. */
#ifndef MOBULA_TESTS_UNIT_DRIVER_GANG_H
#define MOBULA_TESTS_UNIT_DRIVER_GANG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "cli/driver/state.h"

enum { NODES = 2, PER_NODE = 2, RANKS = NODES * PER_NODE };

static inline struct mb_drv *make(int is_worker, int has_url)
{
    const struct mb_drv_config c = {
        .n_nodes = NODES, .ranks_per_node = PER_NODE, .is_worker = is_worker, .has_url = has_url};
    struct mb_drv *d = mb_drv_create(&c);

    assert_non_null(d);
    return d;
}

static inline int say(struct mb_drv *d, struct mb_drv_event e)
{
    return mb_drv_step(d, &e);
}

#define SAY(d, k, ...) say(d, (struct mb_drv_event){.kind = MB_DRV_##k, __VA_ARGS__})

/* Everything up to the phase where ranks run. */
static inline void bring_up(struct mb_drv *d)
{
    assert_int_equal(SAY(d, CONNECTED), MB_DRV_DO_OWN);
    assert_int_equal(SAY(d, OWNED), MB_DRV_DO_RESERVE);
    assert_int_equal(SAY(d, RESERVED), MB_DRV_DO_DIAL);
    assert_int_equal(SAY(d, HELLO, .node = 1), 0);
    assert_int_equal(SAY(d, HELLO, .node = 0), MB_DRV_DO_LAUNCH);
    SAY(d, LAUNCHED, .node = 0);
    SAY(d, LAUNCHED, .node = 1);
    for (uint32_t r = 0; r < RANKS && mb_drv_phase(d) == MB_DRV_RENDEZVOUS; r++)
        assert_int_equal(SAY(d, ENDPOINT, .rank = r), r + 1 == RANKS ? MB_DRV_DO_START : 0);
    assert_int_equal(mb_drv_phase(d), MB_DRV_RUN);
}

static inline void wind_down(struct mb_drv *d)
{
    SAY(d, NODE_ENDED, .node = 0);
    assert_true(SAY(d, NODE_ENDED, .node = 1) & MB_DRV_DO_RELEASE);
    assert_int_equal(SAY(d, RELEASED), MB_DRV_DO_FINISH);
    assert_int_equal(mb_drv_phase(d), MB_DRV_OVER);
}

static inline void ends_and_asks(struct mb_drv *d)
{
    SAY(d, NODE_ENDED, .node = 0);
    assert_int_equal(SAY(d, NODE_ENDED, .node = 1), MB_DRV_DO_ASK_STORE);
    assert_int_equal(mb_drv_phase(d), MB_DRV_END);
}

#endif
