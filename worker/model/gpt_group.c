/*
 * Which part of the model a rank has, and what the ranks of a tensor group do together. An
 * operation of the group comes after what was enqueued before, and what is enqueued next comes
 * after it, without the host waiting where data are on devices. A failure is the communicator's,
 * which keeps it until mb_gpt_group_wait().
 */
#include "worker/model/gpt_internal.h"

enum {
    STRIPS = 2,                 /* measured: docs/performance.md */
    STRIP_BYTES_MIN = 32 << 20, /* shorter sums do not come near the link's rate */
    STRIPS_MAX = MB_GPT_STRIPS_MAX
};

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

/* As many as are asked for, or fewer that all have the same rows. Sums in host memory gain nothing
 * by them, fp8's scales are those of whole matrices, and what is small takes longer in parts. */
static size_t count_strips(const struct mb_gpt *m)
{
    const size_t row_bytes = m->c.hidden * mb_dtype_size(m->c.dtype);
    const int on_device = m->dev != NULL && m->dev->ops->collectives != NULL;
    size_t n = m->c.n_strips < STRIPS_MAX ? m->c.n_strips : STRIPS_MAX;
    if (n == 0)
        n = on_device ? STRIPS : 1;
    if (m->n_parts == 1 || m->c.fp8 != MB_GPT_NO_FP8)
        return 1;
    while (m->c.n_strips == 0 && n > 1 && m->n_tokens * row_bytes / n < STRIP_BYTES_MIN)
        n--;
    while (m->n_rows % n != 0)
        n--;
    return n;
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
    m->n_strips = count_strips(m);
}

struct mb_gpt_strip mb_gpt_strip_at(const struct mb_gpt *m, size_t s)
{
    const size_t n = m->n_tokens / m->n_strips, n_own = m->n_rows / m->n_strips;
    const size_t before = m->c.sequence_parallel ? m->own_part * n_own : 0;
    return (struct mb_gpt_strip){s * n, n, s * n + before, s * n_own, n_own};
}

void *mb_gpt_row(const struct mb_gpt *m, const void *x, size_t row)
{
    return (char *)(uintptr_t)x + row * m->c.hidden * mb_dtype_size(m->c.dtype);
}

/* Host memory's carrier computes nothing on the device. */
int mb_gpt_is_tuning(const struct mb_gpt *m)
{
    return m->tunes && m->dev->ops->collectives != NULL;
}

void mb_gpt_wait_tuning(const struct mb_gpt *m, struct mb_comm *group)
{
    struct mb_err kept; /* by the group */
    if (mb_gpt_is_tuning(m))
        (void)mb_comm_synchronize(group, &kept);
}

void mb_gpt_sum_begin(struct mb_gpt *m, void *x, size_t s)
{
    const struct mb_gpt_strip strip = mb_gpt_strip_at(m, s);
    const enum mb_comm_type type = mb_gpt_comm_type(m->c.dtype);
    struct mb_comm *group = m->c.tensor_group;
    if (m->n_parts == 1)
        return;
    if (m->c.sequence_parallel)
        mb_comm_reduce_scatter(group, m->dev, mb_gpt_row(m, x, strip.first), strip.n * m->c.hidden,
                               type, MB_COMM_SUM);
    else
        mb_comm_allreduce(group, m->dev, mb_gpt_row(m, x, strip.first), strip.n * m->c.hidden, type,
                          MB_COMM_SUM);
    m->summed[s] = mb_comm_mark(group);
    mb_gpt_wait_tuning(m, group);
}

void mb_gpt_sum_end(struct mb_gpt *m, size_t s)
{
    if (m->n_parts > 1)
        mb_comm_join_until(m->c.tensor_group, m->dev, m->summed[s]);
}

void mb_gpt_gather_begin(struct mb_gpt *m, void *x, size_t s)
{
    const struct mb_gpt_strip strip = mb_gpt_strip_at(m, s);
    if (m->n_parts == 1 || !m->c.sequence_parallel)
        return;
    mb_comm_allgather(m->c.tensor_group, m->dev, mb_gpt_row(m, x, strip.first),
                      strip.n * m->c.hidden, mb_gpt_comm_type(m->c.dtype));
    m->gathered[s] = mb_comm_mark(m->c.tensor_group);
    mb_gpt_wait_tuning(m, m->c.tensor_group);
}

void mb_gpt_gather_end(struct mb_gpt *m, size_t s)
{
    if (m->n_parts > 1 && m->c.sequence_parallel)
        mb_comm_join_until(m->c.tensor_group, m->dev, m->gathered[s]);
}

void mb_gpt_gather_end_all(struct mb_gpt *m)
{
    mb_gpt_gather_end(m, m->n_strips - 1); /* they are done in their order */
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
