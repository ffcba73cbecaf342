/*
 * The list of the interleaved schedule, a turn at a time.
 *
 *  1. A stage's forward passes are numbered: p micro batches through chunk 0, the same through
 *     chunk 1, and so on to the last chunk, then the next p micro batches. Backward passes are
 *     numbered alike, with the chunks from the last one down.
 *  2. In turn n a stage takes forward pass n, if there is one, and backward pass n - ahead, if
 * there is one. Then comes its exchange: the output of pass n goes on, the input of pass n + 1
 * comes; so do the gradients, the other way. A turn before the first only gets an input.
 *  3. What stage r sends in its turn n, stage r + 1 receives in its turn n - 1, and stage 0
 * receives from the last one, p - 1, in turn n + p - 1; gradients likewise. So in each case it is
 * on both sides the exchange of the same number n + r. Within one, outputs come before gradients,
 * and of either the transfers between an even stage and the next one first, then those from odd
 * ones, then, with an odd p, from the last one to the first. All transfers have one order
 * therefore, of which every stage's list is a part: whoever waits, waits for one that comes earlier
 * in it.
 *  4. Micro batches end in another order than they began, so a slot is looked for: free is one
 * whose backward pass is over. A gradient travels while the next one is computed: there are two.
 * Failure: none.
 */
#include "worker/parallel/pipeline_impl.h"

#include <assert.h>

/* One of a stage's passes of a direction. */
struct pass {
    uint64_t chunk, micro_batch;
    uint64_t forward; /* the number of the forward pass with the same two */
};

uint64_t mb_interleaved_ahead(struct mb_pipeline_place at)
{
    return 2 * (at.n_stages - at.stage - 1) + (at.n_chunks - 1) * at.n_stages;
}

static struct pass pass_of(const struct mb_pipeline *p, uint64_t number, int is_backward)
{
    const uint64_t n = p->at.n_stages, v = p->at.n_chunks;
    const uint64_t round = number / (n * v), place = number % n;
    const uint64_t nth = number % (n * v) / n, chunk = is_backward ? v - 1 - nth : nth;
    return (struct pass){chunk, round * n + place, (round * v + chunk) * n + place};
}

static uint64_t find(const struct mb_pipeline *p, uint64_t content)
{
    uint64_t s = 0;
    while (s < p->n_slots && p->holds[s] != content) {
        s++;
    }
    assert(s < p->n_slots);
    return s;
}

/* Of a forward pass. */
static uint64_t slot_of(const struct mb_pipeline *p, uint64_t forward)
{
    return p->only_forward ? forward % 2 : find(p, forward + 1);
}

static void add(struct mb_pipeline *p, enum mb_pipeline_act act, uint64_t number)
{
    const int is_backward = act == MB_PIPELINE_RECEIVE_GRADIENT || act == MB_PIPELINE_BACKWARD ||
                            act == MB_PIPELINE_SEND_GRADIENT;
    const struct pass s = pass_of(p, number, is_backward);
    const int is_first = p->at.stage == 0 && s.chunk == 0;
    const int is_last = p->at.stage + 1 == p->at.n_stages && s.chunk + 1 == p->at.n_chunks;
    const int is_there =
        act == MB_PIPELINE_RECEIVE_INPUT || act == MB_PIPELINE_SEND_GRADIENT
            ? !is_first
            : act == MB_PIPELINE_FORWARD || act == MB_PIPELINE_BACKWARD || !is_last;
    if (is_there) {
        /* The slot of a gradient that is sent is another's by then, and none of its matter. */
        const uint64_t slot = act == MB_PIPELINE_SEND_GRADIENT ? 0 : slot_of(p, s.forward);
        p->steps[p->n_steps++] = (struct mb_pipeline_step){
            act, s.micro_batch, s.chunk, slot, is_backward ? (unsigned)(number % 2) : 0};
    }
}

/* The place of the transfers between a stage and the next one among those of one exchange. */
static int order_of(const struct mb_pipeline *p, uint64_t stage)
{
    return stage % 2 == 0 && stage + 1 == p->at.n_stages ? 2 : (int)(stage % 2);
}

static int sends_first(const struct mb_pipeline *p)
{
    const uint64_t own = p->at.stage, before = (own + p->at.n_stages - 1) % p->at.n_stages;
    return order_of(p, own) < order_of(p, before);
}

/* Of outputs: from the stage before, and to the next one. */
static void exchange_outputs(struct mb_pipeline *p, uint64_t sent, uint64_t received,
                             uint64_t n_passes)
{
    for (int i = 0; i < 2; i++) {
        const int is_send = sends_first(p) == (i == 0);
        if (is_send && sent < n_passes) {
            add(p, MB_PIPELINE_SEND_OUTPUT, sent);
        } else if (!is_send && received < n_passes) {
            add(p, MB_PIPELINE_RECEIVE_INPUT, received);
        }
    }
}

/* Of gradients: from the next stage, and to the one before. */
static void exchange_gradients(struct mb_pipeline *p, uint64_t sent, uint64_t received,
                               uint64_t n_passes)
{
    for (int i = 0; i < 2; i++) {
        const int is_receive = sends_first(p) == (i == 0);
        if (is_receive && received < n_passes) {
            add(p, MB_PIPELINE_RECEIVE_GRADIENT, received);
        } else if (!is_receive && sent < n_passes) {
            add(p, MB_PIPELINE_SEND_GRADIENT, sent);
        }
    }
}

int mb_interleaved_list(struct mb_pipeline *p)
{
    const uint64_t n_passes = p->n_micro_batches * p->at.n_chunks;
    const uint64_t ahead = p->only_forward ? UINT64_MAX / 2 : mb_interleaved_ahead(p->at);
    const uint64_t n_turns = p->only_forward ? n_passes : n_passes + ahead;
    /* The turn before the first is 0 here. Numbers below 0 are none of a pass. */
    const uint64_t next = p->pass, turn = next - 1;
    assert(p->n_micro_batches % p->at.n_stages == 0);
    if (next > n_turns) {
        return 0;
    }
    p->pass++;
    if (next > 0 && turn < n_passes) {
        add(p, MB_PIPELINE_FORWARD, turn);
    }
    if (next > ahead) {
        add(p, MB_PIPELINE_BACKWARD, turn - ahead);
        p->holds[slot_of(p, pass_of(p, turn - ahead, 1).forward)] = 0;
    }
    if (next < n_passes && !p->only_forward) {
        p->holds[find(p, 0)] = next + 1;
    }
    exchange_outputs(p, turn, next, n_passes);
    exchange_gradients(p, turn - ahead, next - ahead, n_passes);
    return 1;
}
