/*
 * The 1F1B schedule and the interleaved one: in which order passes come and what a stage keeps,
 * that no order of transfers can stop it, how long it takes; alone and over the host's carrier.
 */
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <setjmp.h>
#include <cmocka.h>
#include "base/alloc.h"
#include "tests/unit/worker/comm_world.h"
#include "worker/parallel/comm.h"
#include "worker/parallel/pipeline.h"

enum { STAGES_MAX = 9, CHUNKS_MAX = 4, MICRO_MAX = 13, FORWARD_TIME = 1, BACKWARD_TIME = 2 };
enum { PASSES_MAX = 4 * STAGES_MAX * CHUNKS_MAX, SLOTS_MAX = 3 * STAGES_MAX * CHUNKS_MAX };

static void make(struct mb_pipeline *p, uint64_t stage, uint64_t n_stages, uint64_t n_chunks,
                 uint64_t n_micro, int only_forward)
{
    const struct mb_pipeline_place at = {stage, n_stages, n_chunks};
    struct mb_err err;
    assert_int_equal(mb_pipeline_init(p, at, n_micro, &err), 0);
    mb_pipeline_start(p, n_micro, only_forward);
}

/* Every micro batch once in each direction, in order, with no more of them kept than was said. */
static void check_passes(uint32_t stage, uint32_t n_stages, uint64_t n_micro, int only_forward)
{
    struct mb_pipeline p;
    struct mb_pipeline_step s;
    uint64_t forward = 0, backward = 0, most = 0;
    const uint64_t behind = n_stages - stage - 1;
    make(&p, stage, n_stages, 1, n_micro, only_forward);
    while (mb_pipeline_next(&p, &s)) {
        assert_int_equal(s.chunk, 0);
        assert_int_equal(s.gradient, 0);
        assert_int_equal(s.slot, s.micro_batch % (only_forward ? 1 : p.n_slots));
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
        assert_int_equal(most, p.n_slots);
    }
    mb_pipeline_close(&p);
}

static uint64_t in_flight(uint64_t stage, uint64_t n_stages, uint64_t n_chunks, uint64_t n_micro)
{
    return mb_pipeline_in_flight((struct mb_pipeline_place){stage, n_stages, n_chunks}, n_micro);
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
    assert_int_equal(in_flight(0, 4, 1, 8), 4);
    assert_int_equal(in_flight(3, 4, 1, 8), 1);
    assert_int_equal(in_flight(0, 4, 1, 2), 2);
    assert_int_equal(in_flight(0, 4, 1, 0), 1);
    assert_int_equal(in_flight(0, 4, 2, 8), 11);
    assert_int_equal(in_flight(3, 4, 2, 8), 5);
    assert_int_equal(in_flight(0, 4, 2, 4), 8);
}

/* ---- chunks ---- */

struct pass {
    int is_backward;
    uint64_t chunk, micro_batch;
};

/* As megatron-core's schedules.py numbers them: get_model_chunk_id, and a counter of each chunk. */
static struct pass nth(uint64_t n_stages, uint64_t n_chunks, uint64_t number, int is_backward)
{
    struct pass out = {is_backward, 0, 0};
    uint64_t seen[CHUNKS_MAX] = {0};
    for (uint64_t i = 0; i <= number; i++) {
        out.chunk = i % (n_stages * n_chunks) / n_stages;
        out.chunk = is_backward ? n_chunks - out.chunk - 1 : out.chunk;
        out.micro_batch = seen[out.chunk]++;
    }
    return out;
}

/* Warm-up, steady state, cool-down, as its forward_backward_pipelining_with_interleaving. */
static size_t order_of(uint64_t stage, uint64_t p, uint64_t v, uint64_t m, int only_forward,
                       struct pass *out)
{
    const uint64_t total = m * v;
    uint64_t n_warm = (p - stage - 1) * 2 + (v - 1) * p;
    size_t n = 0;
    n_warm = only_forward || n_warm > total ? total : n_warm;
    for (uint64_t k = 0; k < n_warm; k++) {
        out[n++] = nth(p, v, k, 0);
    }
    for (uint64_t k = 0; k < total - n_warm; k++) {
        out[n++] = nth(p, v, n_warm + k, 0);
        out[n++] = nth(p, v, k, 1);
    }
    for (uint64_t k = total - n_warm; k < total && !only_forward; k++) {
        out[n++] = nth(p, v, k, 1);
    }
    return n;
}

/* What lies in the slots: 1 + chunk * MICRO + micro batch; 0: nothing. */
struct kept {
    uint64_t in_slot[SLOTS_MAX];
    uint64_t alive, most;
};

static void check_slot(struct kept *k, const struct mb_pipeline *p,
                       const struct mb_pipeline_step *s)
{
    const uint64_t content = 1 + s->chunk * p->n_micro_batches + s->micro_batch;
    assert_true(s->slot < p->n_slots);
    switch (s->act) {
    case MB_PIPELINE_RECEIVE_INPUT:
        assert_int_equal(k->in_slot[s->slot], 0);
        k->in_slot[s->slot] = content;
        return;
    case MB_PIPELINE_FORWARD:
        assert_true(k->in_slot[s->slot] ==
                    (p->at.stage == 0 && s->chunk == 0 ? 0 : content)); /* its input has come */
        k->in_slot[s->slot] = content;
        k->alive++;
        k->most = k->alive > k->most ? k->alive : k->most;
        return;
    case MB_PIPELINE_SEND_OUTPUT:
    case MB_PIPELINE_RECEIVE_GRADIENT:
        assert_int_equal(k->in_slot[s->slot], content);
        return;
    case MB_PIPELINE_BACKWARD:
        assert_int_equal(k->in_slot[s->slot], content);
        k->in_slot[s->slot] = 0;
        k->alive--;
        return;
    case MB_PIPELINE_SEND_GRADIENT:
        return;
    }
}

static void check_chunks(uint64_t stage, uint64_t n_stages, uint64_t v, uint64_t m)
{
    struct pass want[2 * PASSES_MAX * CHUNKS_MAX];
    const size_t n = order_of(stage, n_stages, v, m, 0, want);
    struct kept kept = {0};
    struct mb_pipeline p;
    struct mb_pipeline_step s;
    size_t at = 0;
    make(&p, stage, n_stages, v, m, 0);
    for (int times = 0; times < 2; times++) { /* a second batch is like the first */
        at = 0;
        mb_pipeline_start(&p, m, 0);
        while (mb_pipeline_next(&p, &s)) {
            check_slot(&kept, &p, &s);
            if (s.act == MB_PIPELINE_FORWARD || s.act == MB_PIPELINE_BACKWARD) {
                assert_true(at < n);
                assert_int_equal(s.act == MB_PIPELINE_BACKWARD, want[at].is_backward);
                assert_int_equal(s.chunk, want[at].chunk);
                assert_int_equal(s.micro_batch, want[at].micro_batch);
                at++;
            }
        }
        assert_int_equal(at, n);
        assert_int_equal(kept.alive, 0);
    }
    uint64_t most = (n_stages - stage - 1) * 2 + (v - 1) * n_stages + 1;
    most = most < m * v ? most : m * v;
    assert_int_equal(kept.most, most);
    assert_int_equal(in_flight(stage, n_stages, v, m), most);
    mb_pipeline_start(&p, m, 1);
    assert_int_equal(order_of(stage, n_stages, v, m, 1, want), m * v);
    for (at = 0; mb_pipeline_next(&p, &s);) {
        assert_true(s.slot < 2);
        if (s.act == MB_PIPELINE_FORWARD) {
            assert_int_equal(s.chunk, want[at].chunk);
            assert_int_equal(s.micro_batch, want[at++].micro_batch);
        }
    }
    assert_int_equal(at, m * v);
    mb_pipeline_close(&p);
}

static void chunks_take_megatrons_order(void **state)
{
    (void)state;
    for (uint64_t n = 2; n <= STAGES_MAX; n++) {
        for (uint64_t v = 2; v <= CHUNKS_MAX; v++) {
            for (uint64_t m = n; m <= 4 * n; m += n) {
                for (uint64_t s = 0; s < n; s++) {
                    check_chunks(s, n, v, m);
                }
            }
        }
    }
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

/* A send lasts until the receiver is there, and takes no time else. upper: the stage whose input it
 * is, or whose gradient. 1: both have gone on. */
static int meet(struct stage *from, struct stage *to, const struct stage *upper,
                enum mb_pipeline_act send, enum mb_pipeline_act receive)
{
    const struct stage *lower = upper == to ? from : to;
    if (from->is_over || to->is_over || from->now.act != send || to->now.act != receive) {
        return 0;
    }
    assert_int_equal(from->now.micro_batch, to->now.micro_batch);
    assert_int_equal(upper->now.chunk, lower->now.chunk + (upper->p.at.stage == 0));
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
static uint64_t run(uint32_t n, uint64_t n_chunks, uint64_t n_micro, int only_forward)
{
    struct stage stages[STAGES_MAX] = {0};
    uint64_t end = 0;
    for (uint32_t s = 0; s < n; s++) {
        make(&stages[s].p, s, n, n_chunks, n_micro, only_forward);
        next(&stages[s]);
    }
    for (int moved = 1; moved;) {
        moved = 0;
        for (uint32_t s = 0; s < n; s++) {
            struct stage *lower = &stages[s], *upper = &stages[(s + 1) % n];
            moved |= compute(lower);
            moved |= meet(lower, upper, upper, MB_PIPELINE_SEND_OUTPUT, MB_PIPELINE_RECEIVE_INPUT);
            moved |=
                meet(upper, lower, upper, MB_PIPELINE_SEND_GRADIENT, MB_PIPELINE_RECEIVE_GRADIENT);
        }
    }
    for (uint32_t s = 0; s < n; s++) {
        assert_true(stages[s].is_over); /* else it waits for ever */
        end = stages[s].time > end ? stages[s].time : end;
        mb_pipeline_close(&stages[s].p);
    }
    return end;
}

/* The bubble is (p - 1) passes of each direction, whatever the number of micro batches. */
static void it_takes_as_long_as_the_formula_says(void **state)
{
    (void)state;
    for (uint32_t n = 1; n <= STAGES_MAX; n++) {
        for (uint64_t m = 1; m <= MICRO_MAX; m++) {
            assert_int_equal(run(n, 1, m, 0), (m + n - 1) * (FORWARD_TIME + BACKWARD_TIME));
            assert_int_equal(run(n, 1, m, 1), (m + n - 1) * FORWARD_TIME);
        }
    }
}

/* With chunks the bubble is as many passes, which are shorter. */
static void chunks_wait_as_long_as_the_formula_says(void **state)
{
    (void)state;
    for (uint32_t n = 2; n <= STAGES_MAX; n++) {
        for (uint64_t v = 2; v <= CHUNKS_MAX; v++) {
            for (uint64_t m = n; m <= 4 * n; m += n) {
                const uint64_t passes = m * v + n - 1;
                assert_int_equal(run(n, v, m, 0), passes * (FORWARD_TIME + BACKWARD_TIME));
                assert_int_equal(run(n, v, m, 1), passes * FORWARD_TIME);
            }
        }
    }
}

/* ---- over the carrier ---- */

enum { BIG = 600 * 1000 /* floats, more than the carrier holds on its way */ };

static atomic_int wrong;

struct shape {
    uint64_t n_chunks, n_micro;
};

static void fill(float *x, float value)
{
    for (size_t i = 0; i < BIG; i++) {
        x[i] = value;
    }
}

static int is_filled(const float *x, float value)
{
    return x[0] == value && x[BIG / 2] == value && x[BIG - 1] == value;
}

/* A stage's memory: of each slot what came in and what goes out; the gradients. */
struct memory {
    float *in, *out, *gradient;
};

static void transfer(struct mb_comm *c, const struct memory *m, const struct mb_pipeline_step *s)
{
    const uint32_t rank = mb_comm_rank(c), n = mb_comm_world_size(c);
    float *gradient = m->gradient + s->gradient * BIG;
    if (s->act == MB_PIPELINE_RECEIVE_INPUT) {
        mb_comm_recv(c, NULL, m->in + s->slot * BIG, BIG, MB_COMM_F32, (rank + n - 1) % n);
    } else if (s->act == MB_PIPELINE_SEND_OUTPUT) {
        mb_comm_send(c, NULL, m->out + s->slot * BIG, BIG, MB_COMM_F32, (rank + 1) % n);
    } else if (s->act == MB_PIPELINE_RECEIVE_GRADIENT) {
        mb_comm_recv(c, NULL, gradient, BIG, MB_COMM_F32, (rank + 1) % n);
    } else {
        mb_comm_send(c, NULL, gradient, BIG, MB_COMM_F32, (rank + n - 1) % n);
    }
}

/* Each chunk adds 1 forward and doubles backward. Waits where the trainer does: for what comes. */
static void pass_micro_batches(struct mb_comm *c, void *arg)
{
    const struct shape *shape = arg;
    const uint64_t rank = mb_comm_rank(c), n = mb_comm_world_size(c);
    const uint64_t n_all = n * shape->n_chunks;
    struct mb_pipeline p;
    struct mb_pipeline_step s;
    struct mb_err err;
    make(&p, rank, n, shape->n_chunks, shape->n_micro, 0);
    const struct memory m = {mb_calloc(p.n_slots * BIG, sizeof(float)),
                             mb_calloc(p.n_slots * BIG, sizeof(float)),
                             mb_calloc(2 * BIG, sizeof(float))};
    while (mb_pipeline_next(&p, &s)) {
        const uint64_t place = s.chunk * n + rank; /* of all chunks */
        float *gradient = m.gradient + s.gradient * BIG;
        const float k = (float)s.micro_batch;
        if (s.act == MB_PIPELINE_FORWARD) {
            wrong |= place > 0 && !is_filled(m.in + s.slot * BIG, 1000 * k + (float)place);
            fill(m.out + s.slot * BIG, 1000 * k + (float)(place + 1));
        } else if (s.act == MB_PIPELINE_BACKWARD) {
            const float factor = (float)(1u << (n_all - place - 1));
            wrong |= place + 1 < n_all && !is_filled(gradient, (k + 1) * factor);
            wrong |= !is_filled(m.out + s.slot * BIG, 1000 * k + (float)(place + 1));
            fill(gradient, (k + 1) * 2 * factor);
        } else {
            transfer(c, &m, &s);
            if (s.act == MB_PIPELINE_RECEIVE_INPUT || s.act == MB_PIPELINE_RECEIVE_GRADIENT) {
                wrong |= mb_comm_synchronize(c, &err) != 0;
            }
        }
    }
    wrong |= mb_comm_synchronize(c, &err) != 0;
    mb_comm_barrier(c);
    wrong |= mb_comm_synchronize(c, &err) != 0;
    mb_free(m.in);
    mb_free(m.out);
    mb_free(m.gradient);
    mb_pipeline_close(&p);
}

static void transfers_of_any_size_pass(void **state)
{
    (void)state;
    static const uint64_t TCP_ONLY[] = {0, ~0ULL, 2}; /* shared memory, TCP, both */
    for (uint32_t n = 2; n <= 4; n++) {
        for (size_t k = 0; k < 3; k++) {
            struct shape shape = {1, 7};
            struct comm_world w = {.n = n,
                                   .timeout_ms = 60000,
                                   .tcp_only = TCP_ONLY[k],
                                   .body = pass_micro_batches,
                                   .arg = &shape};
            assert_int_equal(comm_world_run(&w), 0);
            assert_int_equal(atomic_load(&wrong), 0);
            shape = (struct shape){2 + (n == 2), n == 2 ? 4U : n};
            assert_int_equal(comm_world_run(&w), 0);
            assert_int_equal(atomic_load(&wrong), 0);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_micro_batch_passes_once),
        cmocka_unit_test(chunks_take_megatrons_order),
        cmocka_unit_test(it_takes_as_long_as_the_formula_says),
        cmocka_unit_test(chunks_wait_as_long_as_the_formula_says),
        cmocka_unit_test(transfers_of_any_size_pass),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
