/*
 * The list of 1F1B, a pass at a time.
 *
 *  1. Passes are counted: the first n_ahead are forward passes, each sent on at once. Then forward
 *     and backward passes take turns, and what a forward pass gave is sent when the gradient of the
 *     backward pass behind it has come: the next stage gives that one first. The rest are backward
 *     passes.
 *  2. A pass is a list of acts, of which the first and the last stage leave out those with a stage
 *     that is not there.
 *  3. Micro batches end in the order in which they began, so slots are taken in turns.
 * Failure: memory, when it is made.
 */
#include "worker/parallel/pipeline_impl.h"

#include <string.h>
#include "base/alloc.h"

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t n_behind(const struct mb_pipeline *p)
{
    return p->at.n_stages - p->at.stage - 1;
}

/* Forward passes before the first backward pass but one. */
static uint64_t n_ahead(const struct mb_pipeline *p)
{
    return p->only_forward ? p->n_micro_batches : smaller(n_behind(p), p->n_micro_batches);
}

uint64_t mb_pipeline_in_flight(struct mb_pipeline_place at, uint64_t n_micro_batches)
{
    const uint64_t ahead = at.n_chunks > 1 ? mb_interleaved_ahead(at) : at.n_stages - at.stage - 1;
    const uint64_t n = smaller(ahead + 1, n_micro_batches * at.n_chunks);
    return n > 0 ? n : 1;
}

int mb_pipeline_init(struct mb_pipeline *p, struct mb_pipeline_place at, uint64_t most,
                     struct mb_err *err)
{
    *p = (struct mb_pipeline){.at = at, .n_slots = mb_pipeline_in_flight(at, most)};
    if (at.n_chunks > 1) {
        p->holds = mb_calloc(p->n_slots, sizeof *p->holds);
        if (p->holds == NULL) {
            return mb_err_set(err, MB_ENOMEM, "out of memory for a pipeline's schedule");
        }
    }
    return 0;
}

void mb_pipeline_close(struct mb_pipeline *p)
{
    mb_free(p->holds);
    *p = (struct mb_pipeline){0};
}

void mb_pipeline_start(struct mb_pipeline *p, uint64_t n_micro_batches, int only_forward)
{
    p->n_micro_batches = n_micro_batches;
    p->only_forward = only_forward;
    p->pass = 0;
    p->n_steps = p->part = 0;
    if (p->holds != NULL) {
        memset(p->holds, 0, p->n_slots * sizeof *p->holds);
    }
}

static int is_there(const struct mb_pipeline *p, enum mb_pipeline_act act)
{
    switch (act) {
    case MB_PIPELINE_RECEIVE_INPUT:
    case MB_PIPELINE_SEND_GRADIENT:
        return p->at.stage > 0;
    case MB_PIPELINE_SEND_OUTPUT:
    case MB_PIPELINE_RECEIVE_GRADIENT:
        return n_behind(p) > 0;
    case MB_PIPELINE_FORWARD:
    case MB_PIPELINE_BACKWARD:
        break;
    }
    return 1;
}

static void add(struct mb_pipeline *p, enum mb_pipeline_act act, uint64_t k)
{
    const uint64_t n = p->only_forward ? 1 : mb_pipeline_in_flight(p->at, p->n_micro_batches);
    if (is_there(p, act)) {
        p->steps[p->n_steps++] =
            (struct mb_pipeline_step){.act = act, .micro_batch = k, .slot = k % n};
    }
}

/* The acts of the next pass. */
static int list(struct mb_pipeline *p)
{
    const uint64_t pass = p->pass, n_passes = (p->only_forward ? 1 : 2) * p->n_micro_batches;
    const uint64_t ahead = n_ahead(p), turns = p->n_micro_batches - ahead;
    const uint64_t turn = pass >= ahead ? (pass - ahead) / 2 : 0;
    const int in_turns = pass >= ahead && turn < turns;
    if (pass == n_passes) {
        return 0;
    }
    p->pass++;
    if (pass < ahead || (in_turns && (pass - ahead) % 2 == 0)) {
        const uint64_t k = in_turns ? ahead + turn : pass;
        add(p, MB_PIPELINE_RECEIVE_INPUT, k);
        add(p, MB_PIPELINE_FORWARD, k);
        if (!in_turns) {
            add(p, MB_PIPELINE_SEND_OUTPUT, k);
        }
        return 1;
    }
    const uint64_t k = in_turns ? turn : pass - p->n_micro_batches;
    add(p, MB_PIPELINE_RECEIVE_GRADIENT, k);
    if (in_turns) {
        add(p, MB_PIPELINE_SEND_OUTPUT, ahead + turn);
    }
    add(p, MB_PIPELINE_BACKWARD, k);
    add(p, MB_PIPELINE_SEND_GRADIENT, k);
    return 1;
}

int mb_pipeline_next(struct mb_pipeline *p, struct mb_pipeline_step *out)
{
    while (p->part == p->n_steps) {
        p->n_steps = p->part = 0;
        if (!(p->at.n_chunks > 1 ? mb_interleaved_list(p) : list(p))) {
            return 0;
        }
    }
    *out = p->steps[p->part++];
    return 1;
}
