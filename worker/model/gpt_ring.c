/*
 * Attention of a context group. A sample's rows are cut into 2 n stretches for n ranks; rank r has
 * the stretches r and 2 n - 1 - r, as in Megatron-LM: an early one, which sees little, and a late
 * one, which sees much.
 *
 *  1. Forward: every rank begins with its own keys and values, and sends them to the next rank
 *     while it computes with them; what has come from the rank before is the next turn's. After n
 *     turns every query has met all keys, and nothing but the queries' own results is kept.
 *  2. Backward: keys and values go round again, the first time before their attention's gradient is
 *     come to (mb_gpt_ring_backward_begin()); so turn 1 is first, and the own ones, which nobody
 * has to be waited for, are last. The gradient follows them a turn behind: a rank adds its share to
 *     what has come and sends that on, and what has come after n turns is for its own keys and
 *     values; its own share of that is computed meanwhile. So its terms are added in the order of
 *     the ranks from behind the owner on, the owner's last, whatever the run.
 *  3. In host memory a rank's transfers run one after the other: even places send first, odd ones
 *     receive first, so that some neighbour is always there for whom a send waits. Between devices
 *     both run at once.
 * Failures are the communicator's, which keeps them until mb_gpt_group_wait().
 */
#include "worker/model/gpt_internal.h"

struct mb_gpt_run mb_gpt_run_at(const struct mb_gpt *m, size_t row)
{
    const size_t seq = m->part.seq, half = seq / 2, sample = row / seq, i = row % seq;
    if (m->n_contexts == 1)
        return (struct mb_gpt_run){m->n_tokens - row, row, row % m->c.seq};
    const size_t stretch = i < half ? m->own_context : 2 * m->n_contexts - 1 - m->own_context;
    const size_t position = stretch * half + i % half;
    return (struct mb_gpt_run){half - i % half, sample * m->c.seq + position, position};
}

struct mb_gpt_run mb_gpt_embedded_run_at(const struct mb_gpt *m, size_t row)
{
    struct mb_gpt_run run = mb_gpt_run_at(m, row);
    if (m->positions == NULL)
        return run;
    const int32_t *at = m->positions + row;
    size_t n = 1;
    while (n < run.n && at[n] == at[0] + (int32_t)n)
        n++;
    run.n = n;
    run.position = (size_t)at[0];
    return run;
}

static struct mb_stretches stretches_of(const struct mb_gpt *m, size_t rank)
{
    const size_t half = m->part.seq / 2;
    return (struct mb_stretches){rank * half, (2 * m->n_contexts - 1 - rank) * half};
}

/* With the keys and values that are here after so many turns. */
static struct mb_attention_part part_at(const struct mb_gpt_pass *p, const struct mb_gpt_layer *y,
                                        uint32_t site, size_t turn)
{
    const struct mb_gpt *m = p->m;
    const size_t all = m->c.n_heads * m->c.seq * m->c.seq;
    struct mb_attention_part a = {
        .shape = mb_gpt_attention_shape(m),
        .queries = stretches_of(m, m->own_context),
        .keys = stretches_of(m, (m->own_context + m->n_contexts - turn) % m->n_contexts),
        .qkv = y->qkv_out,
        .kv = m->ring_kv[turn % 2],
        .scratch = m->attention_scratch,
        .all_heads = m->c.n_heads,
        .all_seq = m->c.seq,
        .dropout = mb_gpt_dropout_at(p, m->c.attention_dropout, site, all),
        .dtype = m->c.dtype};
    a.dropout.first_element += m->own_part * m->part.n_heads * m->c.seq * m->c.seq;
    return a;
}

static size_t n_elements(const struct mb_gpt *m)
{
    return m->n_tokens * 2 * m->part.n_groups * m->part.head_dim;
}

/* One to the next rank, another from the rank before. */
static void pass_on(const struct mb_gpt *m, void *out, void *in, enum mb_comm_type type)
{
    const uint32_t n = (uint32_t)m->n_contexts, own = (uint32_t)m->own_context;
    const uint32_t next = (own + 1) % n, before = (own + n - 1) % n;
    const int is_even = own % 2 == 0;
    struct mb_comm_transfer both[2];
    both[!is_even] = (struct mb_comm_transfer){1, out, n_elements(m), next};
    both[is_even] = (struct mb_comm_transfer){0, in, n_elements(m), before};
    mb_comm_exchange(m->c.context_group, m->dev, both, 2, type);
    mb_gpt_wait_tuning(m, m->c.context_group);
}

static void pass_keys_values_on(const struct mb_gpt *m, size_t turn)
{
    if (turn + 1 < m->n_contexts)
        pass_on(m, m->ring_kv[turn % 2], m->ring_kv[(turn + 1) % 2], mb_gpt_comm_type(m->c.dtype));
}

static void take_own(const struct mb_gpt *m, const struct mb_gpt_layer *y)
{
    struct mb_keys_values a = {.shape = mb_gpt_attention_shape(m),
                               .qkv = y->qkv_out,
                               .kv = m->ring_kv[0],
                               .dtype = m->c.dtype};
    m->dev->ops->keys_values_take(m->dev->ctx, m->dev->stream, &a);
}

void mb_gpt_ring_forward(const struct mb_gpt_pass *p, const struct mb_gpt_layer *y, uint32_t site)
{
    const struct mb_gpt *m = p->m;
    take_own(m, y);
    for (size_t turn = 0; turn < m->n_contexts; turn++) {
        struct mb_attention_part_forward a = {.part = part_at(p, y, site, turn),
                                              .out = y->attention_out,
                                              .log_sum = y->log_sum,
                                              .joins = turn > 0};
        pass_keys_values_on(m, turn);
        m->dev->ops->attention_part_forward(m->dev->ctx, m->dev->stream, &a);
        mb_comm_join(m->c.context_group, m->dev);
    }
}

void mb_gpt_ring_backward_begin(const struct mb_gpt *m, const struct mb_gpt_layer *y)
{
    take_own(m, y);
    pass_keys_values_on(m, 0);
}

/* With the keys and values that have come in a turn; 0: the rank's own, taken once more. */
static void add_queries_share(const struct mb_gpt_pass *p, const struct mb_gpt_layer *y,
                              uint32_t site, size_t turn, float *d_kv)
{
    const struct mb_gpt *m = p->m;
    struct mb_attention_part_backward a = {.part = part_at(p, y, site, turn),
                                           .out = y->attention_out,
                                           .log_sum = y->log_sum,
                                           .d_out = m->d_b,
                                           .d_qkv = m->d_qkv,
                                           .d_kv = d_kv,
                                           .joins = turn != 1};
    m->dev->ops->attention_part_backward(m->dev->ctx, m->dev->stream, &a);
}

void mb_gpt_ring_backward(const struct mb_gpt_pass *p, const struct mb_gpt_layer *y, uint32_t site)
{
    const struct mb_gpt *m = p->m;
    const struct mb_device *dev = m->dev;
    float *sum = m->ring_d_kv[0], *next = m->ring_d_kv[1], *share = m->ring_d_kv[2];
    mb_comm_join(m->c.context_group, m->dev);
    for (size_t turn = 1; turn <= m->n_contexts; turn++) {
        const int is_own = turn == m->n_contexts;
        if (is_own)
            take_own(m, y);
        else
            pass_keys_values_on(m, turn);
        if (turn > 1)
            pass_on(m, sum, next, MB_COMM_F32);
        add_queries_share(p, y, site, is_own ? 0 : turn, turn > 1 ? share : sum);
        mb_comm_join(m->c.context_group, m->dev);
        if (turn > 1) {
            float *passed = sum;
            sum = next;
            next = passed;
            dev->ops->axpy(dev->ctx, dev->stream, sum, share, n_elements(m), 1);
        }
    }
    struct mb_keys_values own = {
        .shape = mb_gpt_attention_shape(m), .qkv = m->d_qkv, .kv = sum, .dtype = m->c.dtype};
    dev->ops->keys_values_put(dev->ctx, dev->stream, &own);
}
