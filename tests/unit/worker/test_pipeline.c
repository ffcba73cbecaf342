/*
 * The 1F1B schedule: what a stage keeps, that no order of transfers can stop it, how long it takes;
 * alone and over the host's carrier.
 */
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <setjmp.h>
#include <cmocka.h>
#include "base/alloc.h"
#include "tests/unit/worker/comm_world.h"
#include "worker/parallel/comm.h"
#include "worker/parallel/pipeline.h"

enum { STAGES_MAX = 9, MICRO_MAX = 13, FORWARD_TIME = 1, BACKWARD_TIME = 2 };

/* Every micro batch once in each direction, in order, with no more of them kept than was said. */
static void check_passes(uint32_t stage, uint32_t n_stages, uint64_t n_micro, int only_forward)
{
    struct mb_pipeline p;
    struct mb_pipeline_step s;
    uint64_t forward = 0, backward = 0, most = 0;
    const uint64_t behind = n_stages - stage - 1;
    mb_pipeline_start(&p, stage, n_stages, n_micro, only_forward);
    while (mb_pipeline_next(&p, &s)) {
        if (s.act == MB_PIPELINE_FORWARD) {
            assert_int_equal(s.micro_batch, forward++);
        } else if (s.act == MB_PIPELINE_BACKWARD) {
            /* One forward, one backward, as soon as every later stage has something to do. */
            const uint64_t soonest = backward + behind + 1;
            assert_int_equal(forward, soonest < n_micro ? soonest : n_micro);
            assert_int_equal(s.micro_batch, backward++);
        }
        most = forward - backward > most ? forward - backward : most;
    }
    assert_int_equal(forward, n_micro);
    assert_int_equal(backward, only_forward ? 0 : n_micro);
    if (!only_forward) {
        assert_int_equal(most, mb_pipeline_in_flight(stage, n_stages, n_micro));
    }
}

static void every_micro_batch_passes_once(void **state)
{
    (void)state;
    for (uint32_t n = 1; n <= STAGES_MAX; n++) {
        for (uint64_t m = 1; m <= MICRO_MAX; m++) {
            for (uint32_t s = 0; s < n; s++) {
                check_passes(s, n, m, 0);
                check_passes(s, n, m, 1);
            }
        }
    }
    assert_int_equal(mb_pipeline_in_flight(0, 4, 8), 4);
    assert_int_equal(mb_pipeline_in_flight(3, 4, 8), 1);
    assert_int_equal(mb_pipeline_in_flight(0, 4, 2), 2);
    assert_int_equal(mb_pipeline_in_flight(0, 4, 0), 1);
}

/* ---- stages that wait for each other ---- */

struct stage {
    struct mb_pipeline p;
    struct mb_pipeline_step now;
    int is_over;
    uint64_t time;
};

static void next(struct stage *s)
{
    s->is_over = !mb_pipeline_next(&s->p, &s->now);
}

/* A send lasts until the receiver is there, and takes no time else. 1: both have gone on. */
static int meet(struct stage *from, struct stage *to, enum mb_pipeline_act send,
                enum mb_pipeline_act receive)
{
    if (from->is_over || to->is_over || from->now.act != send || to->now.act != receive) {
        return 0;
    }
    assert_int_equal(from->now.micro_batch, to->now.micro_batch);
    from->time = to->time = from->time > to->time ? from->time : to->time;
    next(from);
    next(to);
    return 1;
}

static int compute(struct stage *s)
{
    if (s->is_over || (s->now.act != MB_PIPELINE_FORWARD && s->now.act != MB_PIPELINE_BACKWARD)) {
        return 0;
    }
    s->time += s->now.act == MB_PIPELINE_FORWARD ? FORWARD_TIME : BACKWARD_TIME;
    next(s);
    return 1;
}

/* Until all stages are through; when the last of them was. */
static uint64_t run(uint32_t n, uint64_t n_micro, int only_forward)
{
    struct stage stages[STAGES_MAX] = {0};
    uint64_t end = 0;
    for (uint32_t s = 0; s < n; s++) {
        mb_pipeline_start(&stages[s].p, s, n, n_micro, only_forward);
        next(&stages[s]);
    }
    for (int moved = 1; moved;) {
        moved = 0;
        for (uint32_t s = 0; s < n; s++) {
            moved |= compute(&stages[s]);
            if (s + 1 < n) {
                moved |= meet(&stages[s], &stages[s + 1], MB_PIPELINE_SEND_OUTPUT,
                              MB_PIPELINE_RECEIVE_INPUT);
                moved |= meet(&stages[s + 1], &stages[s], MB_PIPELINE_SEND_GRADIENT,
                              MB_PIPELINE_RECEIVE_GRADIENT);
            }
        }
    }
    for (uint32_t s = 0; s < n; s++) {
        assert_true(stages[s].is_over); /* else it waits for ever */
        end = stages[s].time > end ? stages[s].time : end;
    }
    return end;
}

/* The bubble is (p - 1) passes of each direction, whatever the number of micro batches. */
static void it_takes_as_long_as_the_formula_says(void **state)
{
    (void)state;
    for (uint32_t n = 1; n <= STAGES_MAX; n++) {
        for (uint64_t m = 1; m <= MICRO_MAX; m++) {
            assert_int_equal(run(n, m, 0), (m + n - 1) * (FORWARD_TIME + BACKWARD_TIME));
            assert_int_equal(run(n, m, 1), (m + n - 1) * FORWARD_TIME);
        }
    }
}

/* ---- over the carrier ---- */

enum { BIG = 600 * 1000 /* floats, more than the carrier holds on its way */, N_MICRO = 7 };

static atomic_int wrong;

static void fill(float *x, float value)
{
    for (size_t i = 0; i < BIG; i++) {
        x[i] = value;
    }
}

/* Each stage adds 1 forward and doubles backward. */
static void pass_micro_batches(struct mb_comm *c, void *arg)
{
    const uint32_t rank = mb_comm_rank(c), n = mb_comm_world_size(c);
    struct mb_pipeline p;
    struct mb_pipeline_step s;
    struct mb_err err;
    float *x = mb_alloc(N_MICRO * BIG * sizeof *x), *gradient = mb_alloc(BIG * sizeof *gradient);
    (void)arg;
    mb_pipeline_start(&p, rank, n, N_MICRO, 0);
    while (mb_pipeline_next(&p, &s)) {
        float *own = x + s.micro_batch * BIG;
        const float k = (float)s.micro_batch;
        switch (s.act) {
        case MB_PIPELINE_RECEIVE_INPUT:
            mb_comm_recv(c, NULL, own, BIG, MB_COMM_F32, rank - 1);
            break;
        case MB_PIPELINE_SEND_OUTPUT:
            mb_comm_send(c, NULL, own, BIG, MB_COMM_F32, rank + 1);
            break;
        case MB_PIPELINE_RECEIVE_GRADIENT:
            mb_comm_recv(c, NULL, gradient, BIG, MB_COMM_F32, rank + 1);
            break;
        case MB_PIPELINE_SEND_GRADIENT:
            mb_comm_send(c, NULL, gradient, BIG, MB_COMM_F32, rank - 1);
            break;
        case MB_PIPELINE_FORWARD:
            wrong |= mb_comm_synchronize(c, &err) != 0;
            wrong |= rank > 0 && (own[0] != 100 * k + (float)rank || own[BIG - 1] != own[0]);
            fill(own, 100 * k + (float)(rank + 1));
            break;
        case MB_PIPELINE_BACKWARD:
            wrong |= mb_comm_synchronize(c, &err) != 0;
            wrong |= rank + 1 < n && (gradient[0] != (k + 1) * (float)(1 << (n - rank - 1)) ||
                                      gradient[BIG - 1] != gradient[0]);
            fill(gradient, (k + 1) * (float)(1 << (n - rank)));
            break;
        }
    }
    wrong |= mb_comm_synchronize(c, &err) != 0;
    mb_comm_barrier(c);
    wrong |= mb_comm_synchronize(c, &err) != 0;
    mb_free(x);
    mb_free(gradient);
}

static void transfers_of_any_size_pass(void **state)
{
    (void)state;
    static const uint64_t TCP_ONLY[] = {0, ~0ULL, 2}; /* shared memory, TCP, both */
    for (uint32_t n = 2; n <= 4; n++) {
        for (size_t k = 0; k < 3; k++) {
            struct comm_world w = {
                .n = n, .timeout_ms = 60000, .tcp_only = TCP_ONLY[k], .body = pass_micro_batches};
            assert_int_equal(comm_world_run(&w), 0);
            assert_int_equal(atomic_load(&wrong), 0);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_micro_batch_passes_once),
        cmocka_unit_test(it_takes_as_long_as_the_formula_says),
        cmocka_unit_test(transfers_of_any_size_pass),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
