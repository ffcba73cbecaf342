/*
 * The forward pass: embed, dropout; per layer norm, qkv, rotation, attention, projection, residual,
 * norm, fc1, activation, fc2, residual; final norm; output and loss. A stage of a pipeline does its
 * part of that list: it begins with what another stage gave, and ends with what another stage gets.
 * Sums over ranks that share the model begin behind the product of a strip and end before what
 * needs them. Everything is enqueued; failures are the device's and the communicator's.
 */
#include "worker/kernels/range.h"
#include "worker/model/gpt_internal.h"

/* --- pieces of both directions --- */

/* Of rows from row in_batch of the whole micro batch on. */
static struct mb_dropout hidden_dropout(const struct mb_gpt_pass *p, size_t in_batch, uint32_t site)
{
    struct mb_dropout d =
        mb_gpt_dropout_at(p, p->m->c.hidden_dropout, site, p->m->c.seq * p->m->c.hidden);
    d.first_element += in_batch * p->m->c.hidden;
    return d;
}

static int has_hidden_dropout(const struct mb_gpt_pass *p)
{
    return p->step != NULL && p->m->c.hidden_dropout > 0;
}

uint32_t mb_gpt_site(const struct mb_gpt *m, size_t layer, uint32_t site)
{
    return (uint32_t)mb_gpt_layer_number(m, layer) * MB_GPT_SITES_PER_LAYER + site;
}

void mb_gpt_dropout_add(const struct mb_gpt_pass *p, const void *x, const void *residual, void *out,
                        uint32_t site, struct mb_gpt_strip strip)
{
    const struct mb_gpt *m = p->m;
    const struct mb_device *dev = m->dev;
    for (size_t i = 0; i < strip.n_stream;) {
        const struct mb_gpt_run run = mb_gpt_run_at(m, strip.own + i);
        const size_t n = run.n < strip.n_stream - i ? run.n : strip.n_stream - i;
        struct mb_dropout_add a = {.x = mb_gpt_row(m, x, i),
                                   .residual = residual != NULL ? mb_gpt_row(m, residual, i) : NULL,
                                   .out = mb_gpt_row(m, out, i),
                                   .n = n * m->c.hidden,
                                   .dropout = hidden_dropout(p, run.in_batch, site),
                                   .dtype = m->c.dtype};
        dev->ops->dropout_add(dev->ctx, dev->stream, &a);
        i += n;
    }
}

/* --- forward --- */

static void embed(const struct mb_gpt_pass *p)
{
    struct mb_gpt *m = p->m;
    const struct mb_master *w = &m->weights;
    const int learned = m->c.positions == MB_GPT_LEARNED;
    void *out = m->c.sequence_parallel ? m->d_a : m->embedded;
    for (size_t row = 0; row < m->n_tokens;) {
        const struct mb_gpt_run run = mb_gpt_embedded_run_at(m, row);
        const size_t position = m->position_embedding + run.position * m->c.hidden;
        struct mb_embedding_forward a = {.token = m->tokens + row,
                                         .out = (char *)out +
                                                row * m->c.hidden * mb_dtype_size(m->c.dtype),
                                         .n_tokens = run.n,
                                         .seq = m->c.seq,
                                         .hidden = m->c.hidden,
                                         .vocab = m->part.padded_vocab,
                                         .first = m->own_part * m->part.padded_vocab,
                                         .all_vocab = m->c.padded_vocab,
                                         .dtype = m->c.dtype};
        if (w->whole != NULL) {
            a.token_weight = w->whole + m->word_embedding;
            a.position_weight = learned ? w->whole + position : NULL;
        } else {
            a.token_upper = w->upper + m->word_embedding;
            a.token_lower = w->lower + m->word_embedding;
            a.position_upper = learned ? w->upper + position : NULL;
            a.position_lower = learned ? w->lower + position : NULL;
        }
        m->dev->ops->embedding_forward(m->dev->ctx, m->dev->stream, &a);
        row += run.n;
    }
    for (size_t s = 0; s < m->n_strips; s++)
        mb_gpt_sum_begin(m, out, s);
    for (size_t s = 0; s < m->n_strips; s++) {
        const struct mb_gpt_strip strip = mb_gpt_strip_at(m, s);
        mb_gpt_sum_end(m, s);
        if (m->c.sequence_parallel || has_hidden_dropout(p))
            mb_gpt_dropout_add(p, mb_gpt_row(m, out, strip.own), NULL,
                               mb_gpt_row(m, m->embedded, strip.stream), 0, strip);
    }
}

/* A branch's output is not the residual stream itself: something comes between. */
static int is_apart(const struct mb_gpt_pass *p)
{
    return p->m->c.sequence_parallel || has_hidden_dropout(p);
}

/* out = residual + dropout(the linear layer of x), of strip s, up to where ranks form the sum;
 * without dropout the product adds the residual. Of ranks that each have a share of the product the
 * first adds what is added once. */
static void branch_begin(const struct mb_gpt_pass *p, const struct mb_gpt_layer *y,
                         enum mb_gpt_linear which, const void *x, size_t n_in, const void *residual,
                         void *out, size_t s)
{
    struct mb_gpt *m = p->m;
    const struct mb_gpt_pair at = which == MB_GPT_PROJ ? y->proj : y->fc2;
    const int apart = is_apart(p);
    struct mb_linear_forward a =
        mb_gpt_linear_of(m, at, x, n_in, apart ? m->d_a : out, m->c.hidden);
    a.residual = apart || m->own_part > 0 ? NULL : residual;
    a.bias = m->own_part > 0 ? NULL : a.bias;
    mb_gpt_linear_forward(m, y, which, a, mb_gpt_strip_at(m, s));
    mb_gpt_sum_begin(m, a.out, s);
}

/* The rest of it. */
static void branch_end(const struct mb_gpt_pass *p, const void *residual, void *out, uint32_t site,
                       size_t s)
{
    struct mb_gpt *m = p->m;
    const struct mb_gpt_strip strip = mb_gpt_strip_at(m, s);
    mb_gpt_sum_end(m, s);
    if (is_apart(p))
        mb_gpt_dropout_add(p, mb_gpt_row(m, m->d_a, strip.own),
                           mb_gpt_row(m, residual, strip.stream), mb_gpt_row(m, out, strip.stream),
                           site, strip);
}

/* Of the layer's output. */
static void mlp_end(const struct mb_gpt_pass *p, size_t l, size_t s)
{
    const struct mb_gpt_layer *y = &p->m->layers[l];
    branch_end(p, y->middle, y->out, mb_gpt_site(p->m, l, MB_GPT_SITE_MLP), s);
}

/* fc1 and the activation behind it, of a strip. */
static void fc1_forward(struct mb_gpt *m, const struct mb_gpt_layer *y, struct mb_gpt_strip strip)
{
    const size_t width = mb_gpt_fc1_width(&m->part);
    struct mb_linear_forward fc1 =
        mb_gpt_linear_of(m, y->fc1, y->norm2_out, m->c.hidden, y->fc1_out, width);
    fc1.gelu_out = m->c.swiglu ? NULL : y->activation;
    mb_gpt_linear_forward(m, y, MB_GPT_FC1, fc1, strip);
    if (!m->c.swiglu)
        return;
    struct mb_swiglu_forward a = {
        .x = mb_gpt_rows_from(m, y->fc1_out, strip.first, width),
        .out = mb_gpt_rows_from(m, y->activation, strip.first, m->part.ffn_hidden),
        .amax = mb_gpt_fp8_x_amax(m, y, MB_GPT_FC2),
        .n_rows = strip.n,
        .n = m->part.ffn_hidden,
        .dtype = m->c.dtype};
    m->dev->ops->swiglu_forward(m->dev->ctx, m->dev->stream, &a);
}

/* A strip is gathered beside the products of the one before. */
static size_t strips_ahead(const struct mb_gpt *m)
{
    return m->n_parts > 1 && m->c.sequence_parallel && m->n_strips > 1;
}

/* below: the layer whose output is the input and not there yet, or MB_GPT_NONE. */
static void attention_branch(const struct mb_gpt_pass *p, size_t l, size_t below)
{
    struct mb_gpt *m = p->m;
    struct mb_gpt_layer *y = &m->layers[l];
    const size_t ahead = strips_ahead(m);
    const struct mb_linear_forward qkv = mb_gpt_linear_of(m, y->qkv, y->norm1_out, m->c.hidden,
                                                          y->qkv_out, mb_gpt_qkv_width(&m->part));
    for (size_t s = 0; s < m->n_strips + ahead; s++) {
        if (s < m->n_strips) {
            if (below != MB_GPT_NONE)
                mlp_end(p, below, s);
            mb_gpt_norm_forward(m, y->norm1, y->in, y->norm1_out, y->mean1, y->rstd1,
                                mb_gpt_fp8_x_amax(m, y, MB_GPT_QKV), s);
        }
        if (s >= ahead) {
            mb_gpt_gather_end(m, s - ahead);
            mb_gpt_linear_forward(m, y, MB_GPT_QKV, qkv, mb_gpt_strip_at(m, s - ahead));
        }
    }
    mb_gpt_rotate(m, y->qkv_out, 0);
    mb_gpt_attention_forward(p, y, mb_gpt_site(m, l, MB_GPT_SITE_ATTENTION));
    for (size_t s = 0; s < m->n_strips; s++)
        branch_begin(p, y, MB_GPT_PROJ, y->attention_out, mb_gpt_attention_width(&m->part), y->in,
                     y->middle, s);
}

/* The sums of the layer's output have begun when it returns. */
static void mlp_branch(const struct mb_gpt_pass *p, size_t l)
{
    struct mb_gpt *m = p->m;
    struct mb_gpt_layer *y = &m->layers[l];
    const size_t ahead = strips_ahead(m);
    for (size_t s = 0; s < m->n_strips + ahead; s++) {
        if (s < m->n_strips) {
            branch_end(p, y->in, y->middle, mb_gpt_site(m, l, MB_GPT_SITE_PROJ), s);
            mb_gpt_norm_forward(m, y->norm2, y->middle, y->norm2_out, y->mean2, y->rstd2,
                                mb_gpt_fp8_x_amax(m, y, MB_GPT_FC1), s);
        }
        if (s >= ahead) {
            mb_gpt_gather_end(m, s - ahead);
            fc1_forward(m, y, mb_gpt_strip_at(m, s - ahead));
            branch_begin(p, y, MB_GPT_FC2, y->activation, m->part.ffn_hidden, y->middle, y->out,
                         s - ahead);
        }
    }
}

/* But for mlp_end(). */
static void layer_forward(const struct mb_gpt_pass *p, size_t l, size_t below)
{
    mb_gpt_fp8_forward_begins(p->m, &p->m->layers[l]);
    attention_branch(p, l, below);
    mlp_branch(p, l);
}

const struct mb_gpt_layer *mb_gpt_top_layer(const struct mb_gpt *m)
{
    return &m->layers[mb_gpt_chunk_end(m) - 1];
}

void mb_gpt_layer_forward_again(const struct mb_gpt_pass *p, size_t l)
{
    layer_forward(p, l, MB_GPT_NONE);
    for (size_t s = 0; s < p->m->n_strips; s++)
        mlp_end(p, l, s);
}

void mb_gpt_pass_forward(const struct mb_gpt_pass *p)
{
    struct mb_gpt *m = p->m;
    if (mb_gpt_is_first_chunk(m))
        embed(p);
    for (size_t l = mb_gpt_chunk_begin(m); l < mb_gpt_chunk_end(m); l++) {
        mb_range_begin(m->dev, "layer %zu forward", l + 1);
        layer_forward(p, l, l > mb_gpt_chunk_begin(m) ? l - 1 : MB_GPT_NONE);
        mb_range_end(m->dev);
    }
    for (size_t s = 0; s < m->n_strips; s++) {
        mlp_end(p, mb_gpt_chunk_end(m) - 1, s);
        if (mb_gpt_is_last_chunk(m))
            mb_gpt_norm_forward(m, m->final_norm, mb_gpt_top_layer(m)->out, m->final_out,
                                m->final_mean, m->final_rstd, NULL, s);
    }
    if (mb_gpt_is_last_chunk(m))
        mb_gpt_gather_end_all(m);
}

void mb_gpt_output_and_loss(struct mb_gpt *m, int d, double grad_scale)
{
    struct mb_cross_entropy a = {.x = m->final_out,
                                 .weight = mb_gpt_weight_at(m, m->output_weight),
                                 .label = m->labels,
                                 .mask = m->mask,
                                 .loss_sum = m->loss_sum,
                                 .d_x = d ? m->d_a : NULL,
                                 .d_weight = d ? m->grads + m->output_weight : NULL,
                                 .sets_d_weight = mb_gpt_has_old_grads(m),
                                 .scratch = m->head_scratch,
                                 .n_tokens = m->n_tokens,
                                 .hidden = m->c.hidden,
                                 .vocab = m->part.padded_vocab,
                                 .first = m->own_part * m->part.padded_vocab,
                                 .all_vocab = m->c.padded_vocab,
                                 .grad_scale = (float)grad_scale,
                                 .pass = m->captures && d ? m->pass : NULL,
                                 .dtype = m->c.dtype};
    if (m->n_parts > 1) {
        struct mb_cross_entropy own = a;
        own.part = m->loss_parts + m->own_part * 2 * m->n_tokens;
        own.d_x = NULL;
        own.d_weight = NULL;
        m->dev->ops->cross_entropy(m->dev->ctx, m->dev->stream, &own);
        mb_gpt_gather_loss_parts(m);
        a.parts = m->loss_parts;
        a.n_parts = m->n_parts;
    }
    m->dev->ops->cross_entropy(m->dev->ctx, m->dev->stream, &a);
}
