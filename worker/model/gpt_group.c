/*
 * Which part of the model a rank has, and what the ranks of a tensor group do together. An
 * operation of the group comes after what was enqueued before, and what is enqueued next comes
 * after it, without the host waiting where data are on devices. A failure is the communicator's,
 * which keeps it until mb_gpt_group_wait().
 */
#include "worker/model/gpt_internal.h"

/* Of a pipeline. */
static void stage_init(struct mb_gpt *m)
{
    const size_t n_stages = m->c.n_stages > 0 ? m->c.n_stages : 1;
    m->part.n_layers /= n_stages;
    m->n_chunks = m->c.n_chunks > 0 ? m->c.n_chunks : 1;
    m->chunk_layers = m->part.n_layers / m->n_chunks;
    if (m->part.recompute_layers > m->chunk_layers)
        m->part.recompute_layers = m->chunk_layers;
    m->is_first = m->c.own_stage == 0;
    m->is_last = m->c.own_stage + 1 == n_stages;
    const int one = (m->is_last && m->n_chunks == 1) || m->c.n_in_flight == 0;
    m->n_slots = one ? 1 : m->c.n_in_flight;
}

size_t mb_gpt_layer_number(const struct mb_gpt *m, size_t l)
{
    const size_t n_stages = m->c.n_stages > 0 ? m->c.n_stages : 1;
    const size_t stretch = l / m->chunk_layers * n_stages + m->c.own_stage;
    return stretch * m->chunk_layers + l % m->chunk_layers;
}

void mb_gpt_group_init(struct mb_gpt *m)
{
    const struct mb_comm *group = m->c.tensor_group;
    m->n_parts = mb_gpt_tensor_parts(&m->c);
    m->own_part = group != NULL ? mb_comm_rank(group) : 0;
    m->n_contexts = mb_gpt_context_parts(&m->c);
    m->own_context = m->c.context_group != NULL ? mb_comm_rank(m->c.context_group) : 0;
    m->part = m->c;
    m->part.n_heads /= m->n_parts;
    m->part.n_groups /= m->n_parts;
    m->part.ffn_hidden /= m->n_parts;
    m->part.padded_vocab /= m->n_parts;
    m->part.seq /= m->n_contexts;
    m->n_tokens = m->micro_batch * m->part.seq;
    stage_init(m);
    m->n_rows = m->c.sequence_parallel ? m->n_tokens / m->n_parts : m->n_tokens;
    m->first_row = m->c.sequence_parallel ? m->n_rows * m->own_part : 0;
}

void *mb_gpt_own_rows(const struct mb_gpt *m, void *x)
{
    return (char *)x + m->first_row * m->c.hidden * mb_dtype_size(m->c.dtype);
}

static void sum_whole(struct mb_gpt *m, void *x)
{
    if (m->n_parts == 1)
        return;
    mb_comm_allreduce(m->c.tensor_group, m->dev, x, m->n_tokens * m->c.hidden,
                      mb_gpt_comm_type(m->c.dtype), MB_COMM_SUM);
    mb_comm_join(m->c.tensor_group, m->dev);
}

void mb_gpt_sum_shares(struct mb_gpt *m, void *x)
{
    if (m->n_parts == 1 || !m->c.sequence_parallel) {
        sum_whole(m, x);
        return;
    }
    mb_comm_reduce_scatter(m->c.tensor_group, m->dev, x, m->n_tokens * m->c.hidden,
                           mb_gpt_comm_type(m->c.dtype), MB_COMM_SUM);
    mb_comm_join(m->c.tensor_group, m->dev);
}

void mb_gpt_gather_rows(struct mb_gpt *m, void *x)
{
    if (m->n_parts == 1 || !m->c.sequence_parallel)
        return;
    mb_comm_allgather(m->c.tensor_group, m->dev, x, m->n_tokens * m->c.hidden,
                      mb_gpt_comm_type(m->c.dtype));
    mb_comm_join(m->c.tensor_group, m->dev);
}

void mb_gpt_gather_loss_parts(struct mb_gpt *m)
{
    mb_comm_allgather(m->c.tensor_group, m->dev, m->loss_parts, m->n_parts * 2 * m->n_tokens,
                      MB_COMM_F32);
    mb_comm_join(m->c.tensor_group, m->dev);
}

void mb_gpt_sum_norm_gradient(struct mb_gpt *m, struct mb_gpt_norm_at norm)
{
    const size_t offsets[] = {norm.at.weight, norm.at.bias};
    if (m->n_parts == 1 || !m->c.sequence_parallel)
        return;
    for (size_t i = 0; i < 2; i++)
        if (offsets[i] != MB_GPT_NONE)
            mb_comm_allreduce(m->c.tensor_group, m->dev, m->grads + offsets[i], m->c.hidden,
                              MB_COMM_F32, MB_COMM_SUM);
    mb_comm_join(m->c.tensor_group, m->dev);
}

int mb_gpt_group_wait(struct mb_gpt *m, struct mb_err *err)
{
    int rc = m->n_parts > 1 ? mb_comm_synchronize(m->c.tensor_group, err) : 0;
    return rc == 0 && m->n_contexts > 1 ? mb_comm_synchronize(m->c.context_group, err) : rc;
}
