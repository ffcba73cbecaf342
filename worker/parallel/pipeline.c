/*
 * The list of 1F1B, a pass at a time.
 *
 *  1. Passes are counted: the first n_ahead are forward passes, each sent on at once. Then forward
 *     and backward passes take turns, and what a forward pass gave is sent when the gradient of the
 *     backward pass behind it has come: the next stage gives that one first. The rest are backward
 *     passes.
 *  2. A pass is a list of acts, of which the first and the last stage leave out those with a stage
 *     that is not there.
 */
#include "worker/parallel/pipeline.h"

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t n_behind(const struct mb_pipeline *p)
{
    return p->n_stages - p->stage - 1;
}

/* Forward passes before the first backward pass but one. */
static uint64_t n_ahead(const struct mb_pipeline *p)
{
    return p->only_forward ? p->n_micro_batches : smaller(n_behind(p), p->n_micro_batches);
}

uint64_t mb_pipeline_in_flight(uint32_t stage, uint32_t n_stages, uint64_t n_micro_batches)
{
    uint64_t n = smaller(n_stages - stage, n_micro_batches);
    return n > 0 ? n : 1;
}

void mb_pipeline_start(struct mb_pipeline *p, uint32_t stage, uint32_t n_stages,
                       uint64_t n_micro_batches, int only_forward)
{
    *p = (struct mb_pipeline){.stage = stage,
                              .n_stages = n_stages,
                              .n_micro_batches = n_micro_batches,
                              .only_forward = only_forward};
}

static int is_there(const struct mb_pipeline *p, enum mb_pipeline_act act)
{
    switch (act) {
    case MB_PIPELINE_RECEIVE_INPUT:
    case MB_PIPELINE_SEND_GRADIENT:
        return p->stage > 0;
    case MB_PIPELINE_SEND_OUTPUT:
    case MB_PIPELINE_RECEIVE_GRADIENT:
        return n_behind(p) > 0;
    case MB_PIPELINE_FORWARD:
    case MB_PIPELINE_BACKWARD:
        break;
    }
    return 1;
}

/* The acts of a pass. */
static int list(const struct mb_pipeline *p, struct mb_pipeline_step out[4])
{
    const uint64_t ahead = n_ahead(p), turns = p->n_micro_batches - ahead;
    const uint64_t turn = p->pass >= ahead ? (p->pass - ahead) / 2 : 0;
    const int in_turns = p->pass >= ahead && turn < turns;
    if (p->pass < ahead || (in_turns && (p->pass - ahead) % 2 == 0)) {
        const uint64_t k = in_turns ? ahead + turn : p->pass;
        out[0] = (struct mb_pipeline_step){MB_PIPELINE_RECEIVE_INPUT, k};
        out[1] = (struct mb_pipeline_step){MB_PIPELINE_FORWARD, k};
        out[2] = (struct mb_pipeline_step){MB_PIPELINE_SEND_OUTPUT, k};
        return in_turns ? 2 : 3;
    }
    const uint64_t k = in_turns ? turn : p->pass - p->n_micro_batches;
    int n = 0;
    out[n++] = (struct mb_pipeline_step){MB_PIPELINE_RECEIVE_GRADIENT, k};
    if (in_turns) {
        out[n++] = (struct mb_pipeline_step){MB_PIPELINE_SEND_OUTPUT, ahead + turn};
    }
    out[n++] = (struct mb_pipeline_step){MB_PIPELINE_BACKWARD, k};
    out[n++] = (struct mb_pipeline_step){MB_PIPELINE_SEND_GRADIENT, k};
    return n;
}

int mb_pipeline_next(struct mb_pipeline *p, struct mb_pipeline_step *out)
{
    const uint64_t n_passes = (p->only_forward ? 1 : 2) * p->n_micro_batches;
    while (p->pass < n_passes) {
        struct mb_pipeline_step steps[4];
        const int n = list(p, steps);
        while (p->part < n) {
            *out = steps[p->part++];
            if (is_there(p, out->act)) {
                return 1;
            }
        }
        p->pass++;
        p->part = 0;
    }
    return 0;
}
