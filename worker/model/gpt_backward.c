/*
 * The backward pass: the forward pass's list from its end, with d_residual the gradient of the
 * residual stream: each branch reads it (through its dropout) and each norm adds to it. Layers that
 * keep nothing are computed forward once more before. What is final of the gradients is said as
 * soon as it is enqueued.
 */
#include "worker/kernels/range.h"
#include "worker/model/gpt_internal.h"

/* The gradient of a branch's output, of all tokens: d_residual itself, or in d_a what went through
 * the branch's dropout, or is being gathered. */
static const void *branch_gradient(const struct mb_gpt_pass *p, uint32_t site)
{
    struct mb_gpt *m = p->m;
    if (m->c.hidden_dropout <= 0 && !m->c.sequence_parallel)
        return m->d_residual;
    for (size_t s = 0; s < m->n_strips; s++) {
        const struct mb_gpt_strip strip = mb_gpt_strip_at(m, s);
        mb_gpt_dropout_add(p, mb_gpt_row(m, m->d_residual, strip.stream), NULL,
                           mb_gpt_row(m, m->d_a, strip.own), site, strip);
        mb_gpt_gather_begin(m, m->d_a, s);
    }
    return m->d_a;
}

/* The gradient of the bias of a branch's linear layer is the sum of the rows of d_residual, unless
 * there is dropout between, or other ranks have rows. The norm that writes d_residual last forms it
 * on its way. */
static int norm_sums_for(const struct mb_gpt *m, struct mb_gpt_pair branch)
{
    return m->c.norm == MB_GPT_LAYERNORM && m->c.hidden_dropout <= 0 && !m->c.sequence_parallel &&
           branch.bias != MB_GPT_NONE;
}

static float *sum_for(struct mb_gpt *m, struct mb_gpt_pair branch)
{
    return norm_sums_for(m, branch) ? m->grads + branch.bias : NULL;
}

/* The branch as its own backward sees it. */
static struct mb_gpt_pair without_sum(const struct mb_gpt *m, struct mb_gpt_pair branch)
{
    if (norm_sums_for(m, branch))
        branch.bias = MB_GPT_NONE;
    return branch;
}

/* Above the topmost layer of a chunk there is no norm of its own. */
static struct mb_gpt_pair fc2_without_sum(const struct mb_gpt *m, const struct mb_gpt_layer *y)
{
    return y == mb_gpt_top_layer(m) && !mb_gpt_is_last_chunk(m) ? y->fc2 : without_sum(m, y->fc2);
}

/* As what a branch's gradient comes. */
static enum mb_gpt_together gathers(const struct mb_gpt *m)
{
    return m->c.sequence_parallel ? MB_GPT_GATHERS : MB_GPT_NOTHING;
}

/* d_mlp is the gradient of fc2's output; d_a becomes this rank's share of norm2's. */
static void mlp_backward(struct mb_gpt *m, const struct mb_gpt_layer *y, const void *d_mlp)
{
    mb_gpt_linear_backward(m, y, MB_GPT_FC2, fc2_without_sum(m, y), y->activation,
                           m->c.swiglu ? NULL : y->fc1_out, m->part.ffn_hidden, d_mlp, m->c.hidden,
                           m->d_activation, gathers(m));
    if (m->c.swiglu) {
        struct mb_swiglu_backward a = {.x = y->fc1_out,
                                       .d_out = m->d_activation,
                                       .d_x = m->d_fc1,
                                       .amax = mb_gpt_fp8_d_amax(m, y, MB_GPT_FC1),
                                       .n_rows = m->n_tokens,
                                       .n = m->part.ffn_hidden,
                                       .dtype = m->c.dtype};
        m->dev->ops->swiglu_backward(m->dev->ctx, m->dev->stream, &a);
    }
    mb_gpt_linear_backward(m, y, MB_GPT_FC1, y->fc1, y->norm2_out, NULL, m->c.hidden, m->d_fc1,
                           mb_gpt_fc1_width(&m->part), m->d_a, MB_GPT_SUMS);
}

static void layer_backward(const struct mb_gpt_pass *p, size_t l)
{
    struct mb_gpt *m = p->m;
    const struct mb_gpt_layer *y = &m->layers[l];
    const size_t h = m->c.hidden;

    mlp_backward(m, y, branch_gradient(p, mb_gpt_site(m, l, MB_GPT_SITE_MLP)));
    mb_gpt_norm_backward(m, y->norm2, y->middle, y->mean2, y->rstd2, m->d_a, sum_for(m, y->proj),
                         mb_gpt_fp8_d_amax(m, y, MB_GPT_PROJ));

    if (m->n_contexts > 1)
        mb_gpt_ring_backward_begin(m, y);
    const void *d_proj = branch_gradient(p, mb_gpt_site(m, l, MB_GPT_SITE_PROJ));
    mb_gpt_linear_backward(m, y, MB_GPT_PROJ, without_sum(m, y->proj), y->attention_out, NULL,
                           mb_gpt_attention_width(&m->part), d_proj, h, m->d_b, gathers(m));
    mb_gpt_attention_backward(p, y, mb_gpt_site(m, l, MB_GPT_SITE_ATTENTION));
    mb_gpt_rotate(m, m->d_qkv, 1);
    mb_gpt_linear_backward(m, y, MB_GPT_QKV, y->qkv, y->norm1_out, NULL, h, m->d_qkv,
                           mb_gpt_qkv_width(&m->part), m->d_a, MB_GPT_SUMS);
    const struct mb_gpt_layer *below = l > mb_gpt_chunk_begin(m) ? y - 1 : NULL;
    mb_gpt_norm_backward(m, y->norm1, y->in, y->mean1, y->rstd1, m->d_a,
                         below != NULL ? sum_for(m, below->fc2) : NULL,
                         below != NULL ? mb_gpt_fp8_d_amax(m, below, MB_GPT_FC2) : NULL);
    if (p->step->is_last) {
        mb_gpt_sum_norm_gradient(m, y->norm1);
        mb_gpt_sum_norm_gradient(m, y->norm2);
    }
}

static void grads_final(const struct mb_gpt_pass *p, size_t begin, size_t end)
{
    if (p->step->grads_final != NULL && begin < end)
        p->step->grads_final(p->step->arg, begin, end);
}

/* From d_a, the share of the gradient of final_out, to d_residual. */
static void final_norm_backward(const struct mb_gpt_pass *p)
{
    struct mb_gpt *m = p->m;
    const struct mb_device *dev = m->dev;
    dev->ops->zero(dev->ctx, dev->stream, m->d_residual,
                   m->n_rows * m->c.hidden * mb_dtype_size(m->c.dtype));
    for (size_t s = 0; s < m->n_strips; s++)
        mb_gpt_sum_begin(m, m->d_a, s);
    mb_gpt_norm_backward(m, m->final_norm, mb_gpt_top_layer(m)->out, m->final_mean, m->final_rstd,
                         m->d_a, sum_for(m, mb_gpt_top_layer(m)->fc2),
                         mb_gpt_fp8_d_amax(m, mb_gpt_top_layer(m), MB_GPT_FC2));
    if (p->step->is_last)
        mb_gpt_sum_norm_gradient(m, m->final_norm);
}

static void embedding_backward(const struct mb_gpt_pass *p)
{
    struct mb_gpt *m = p->m;
    const char *d_out = branch_gradient(p, 0);
    mb_gpt_gather_end_all(m);
    for (size_t row = 0; row < m->n_tokens;) {
        const struct mb_gpt_run run = mb_gpt_embedded_run_at(m, row);
        struct mb_embedding_backward a = {
            .token = m->tokens + row,
            .d_out = d_out + row * m->c.hidden * mb_dtype_size(m->c.dtype),
            .d_token_weight = m->grads + m->word_embedding,
            .d_position_weight = m->c.positions == MB_GPT_LEARNED
                                     ? m->grads + m->position_embedding + run.position * m->c.hidden
                                     : NULL,
            .n_tokens = run.n,
            .seq = m->c.seq,
            .hidden = m->c.hidden,
            .vocab = m->part.padded_vocab,
            .first = m->own_part * m->part.padded_vocab,
            .all_vocab = m->c.padded_vocab,
            .dtype = m->c.dtype};
        m->dev->ops->embedding_backward(m->dev->ctx, m->dev->stream, &a);
        row += run.n;
    }
}

void mb_gpt_pass_backward(const struct mb_gpt_pass *p)
{
    struct mb_gpt *m = p->m;
    /* Of the last layer that is computed again everything is still there, if the backward pass
     * follows at once. */
    const size_t n_again =
        m->part.recompute_layers - (m->n_slots == 1 && m->part.recompute_layers > 0);
    const size_t begin = mb_gpt_chunk_begin(m);
    mb_gpt_fp8_backward_begins(m);
    if (mb_gpt_is_last_chunk(m))
        final_norm_backward(p);
    if (m->chunk + 1 == m->n_chunks)
        grads_final(p, m->layers_end, m->n_elements);
    for (size_t l = mb_gpt_chunk_end(m); l-- > begin;) {
        mb_range_begin(m->dev, "layer %zu backward", l + 1);
        if (l - begin < n_again)
            mb_gpt_layer_forward_again(p, l);
        layer_backward(p, l);
        mb_range_end(m->dev);
        grads_final(p, m->layers[l].begin, m->layers[l].end);
    }
    if (mb_gpt_is_first_chunk(m))
        embedding_backward(p);
    if (m->chunk == 0)
        grads_final(p, 0, m->layers[0].begin);
}
