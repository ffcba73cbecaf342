/*
 * The model's step.
 *
 * Forward: embed, dropout; per layer norm, qkv, rotation, attention, projection, residual, norm,
 * fc1, activation, fc2, residual; final norm; output and loss. Backward: the same list from its
 * end, with d_residual the gradient of the residual stream: each branch reads it (through its
 * dropout) and each norm adds to it. A stage of a pipeline does its part of either list: it begins
 * with what another stage gave, and ends with what another stage gets.
 *
 * Failure paths:
 *  1. A token or label outside the vocabulary is refused before anything is enqueued.
 *  2. What fails on the device is returned by mb_gpt_take_loss(); sums and gradients are then
 * undefined.
 *  3. mb_gpt_create() undoes what it did, in reverse order, by mb_gpt_destroy().
 */
#include "worker/model/gpt.h"

#include <assert.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/kernels/range.h"
#include "worker/model/gpt_internal.h"

/* Dropouts of a layer; site 0 is that of the embedding. */
enum { SITE_ATTENTION = 1, SITE_PROJ = 2, SITE_MLP = 3, SITES_PER_LAYER = 3 };

static const struct mb_gpt_place WHOLE = {0, 0, 0}; /* of a rank that has all layers */

static const char *dtype_name(enum mb_dtype dtype)
{
    return dtype == MB_DTYPE_F16 ? "fp16" : dtype == MB_DTYPE_BF16 ? "bf16" : "fp32";
}

int mb_gpt_check(const struct mb_device *dev, const struct mb_gpt_config *c, size_t micro_batch,
                 struct mb_err *err)
{
    int rc = mb_gpt_config_check(c, err);
    if (rc != 0)
        return rc;
    if ((dev->ops->dtypes >> c->dtype & 1) == 0)
        return mb_err_set(err, MB_EUNSUPPORTED, "the %s backend has no %s", dev->ops->name,
                          dtype_name(c->dtype));
    rc = mb_gpt_parts_check(dev, c, err);
    if (rc != 0)
        return rc;
    if (micro_batch == 0 || micro_batch > ((size_t)1 << 30) / c->seq)
        return mb_err_set(err, MB_EINVAL,
                          "micro batch size is %zu: it must be positive, with at most 2^30 tokens "
                          "of %zu a sample",
                          micro_batch, c->seq);
    return 0;
}

int mb_gpt_create(struct mb_device *dev, const struct mb_gpt_config *c, size_t micro_batch,
                  struct mb_gpt **out, struct mb_err *err)
{
    int rc = mb_gpt_check(dev, c, micro_batch, err);
    if (rc != 0)
        return rc;
    struct mb_gpt *m = mb_calloc(1, sizeof(*m));
    if (m == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory creating the model");
    m->dev = dev;
    m->c = *c;
    mb_gpt_config_complete(&m->c);
    m->micro_batch = micro_batch;
    mb_gpt_group_init(m);
    rc = mb_gpt_params_create(m, err);
    if (rc == 0)
        rc = mb_gpt_fp8_create(m, err);
    if (rc == 0)
        rc = mb_gpt_plan_create(m, err);
    if (rc != 0)
        goto out;
    const size_t in_samples = micro_batch * c->seq;
    const int own = m->is_first && c->batch_positions && c->positions == MB_GPT_LEARNED;
    m->host_ones = mb_calloc(in_samples, sizeof(float));
    m->all_positions = own ? mb_calloc(m->n_slots * m->n_tokens, sizeof(int32_t)) : NULL;
    if (m->host_ones == NULL || (own && m->all_positions == NULL)) {
        rc = mb_err_set(err, MB_ENOMEM, "out of memory for a batch of %zu tokens", in_samples);
        goto out;
    }
    for (size_t i = 0; i < in_samples; i++)
        m->host_ones[i] = 1;
    dev->ops->zero(dev->ctx, dev->stream, m->arena, m->arena_bytes);
    rc = mb_gpt_params_draw(m, err);
    if (rc == 0)
        rc = mb_gpt_parts_fill(m, err);
    mb_gpt_weights_changed(m);
out:
    if (rc != 0)
        mb_gpt_destroy(m);
    else
        *out = m;
    return rc;
}

void mb_gpt_destroy(struct mb_gpt *m)
{
    if (m == NULL)
        return;
    m->dev->ops->free(m->dev->ctx, m->arena);
    mb_gpt_params_free(m);
    mb_free(m->fp8.weights);
    mb_free(m->host_ones);
    mb_free(m->all_positions);
    mb_free(m);
}

const struct mb_gpt_config *mb_gpt_config(const struct mb_gpt *m)
{
    return &m->c;
}

const struct mb_param *mb_gpt_params(const struct mb_gpt *m, size_t *n_params)
{
    *n_params = m->n_params;
    return m->params;
}

size_t mb_gpt_n_elements(const struct mb_gpt *m)
{
    return m->n_elements;
}

size_t mb_gpt_n_parameters(const struct mb_gpt *m)
{
    return m->n_parameters;
}

float *mb_gpt_weights(struct mb_gpt *m)
{
    return m->weights.whole;
}

const struct mb_master *mb_gpt_master(const struct mb_gpt *m)
{
    return &m->weights;
}

float *mb_gpt_grads(struct mb_gpt *m)
{
    return m->grads;
}

void mb_gpt_weights_changed(struct mb_gpt *m)
{
    if (m->rounded != NULL)
        m->dev->ops->narrow(m->dev->ctx, m->dev->stream, m->rounded, m->weights.whole,
                            m->n_elements);
    mb_gpt_parts_weights_changed(m);
    mb_gpt_fp8_weights_changed(m);
}

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

/* The chunk that is worked on: of the whole model's. */
static int is_first(const struct mb_gpt *m)
{
    return m->is_first && m->chunk == 0;
}

static uint32_t site_of(const struct mb_gpt *m, size_t layer, uint32_t site)
{
    return (uint32_t)mb_gpt_layer_number(m, layer) * SITES_PER_LAYER + site;
}

/* Of a strip's rows of the residual stream; x, residual and out begin with them. */
static void dropout_add(const struct mb_gpt_pass *p, const void *x, const void *residual, void *out,
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
            dropout_add(p, mb_gpt_row(m, out, strip.own), NULL,
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
        dropout_add(p, mb_gpt_row(m, m->d_a, strip.own), mb_gpt_row(m, residual, strip.stream),
                    mb_gpt_row(m, out, strip.stream), site, strip);
}

/* Of the layer's output. */
static void mlp_end(const struct mb_gpt_pass *p, size_t l, size_t s)
{
    const struct mb_gpt_layer *y = &p->m->layers[l];
    branch_end(p, y->middle, y->out, site_of(p->m, l, SITE_MLP), s);
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
    mb_gpt_attention_forward(p, y, site_of(m, l, SITE_ATTENTION));
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
            branch_end(p, y->in, y->middle, site_of(m, l, SITE_PROJ), s);
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

/* Of the chunk. */
static const struct mb_gpt_layer *top_layer(const struct mb_gpt *m)
{
    return &m->layers[mb_gpt_chunk_end(m) - 1];
}

/* Up to the final norm; d_a serves as scratch for the branches' outputs. */
static void forward(const struct mb_gpt_pass *p)
{
    struct mb_gpt *m = p->m;
    if (is_first(m))
        embed(p);
    for (size_t l = mb_gpt_chunk_begin(m); l < mb_gpt_chunk_end(m); l++) {
        mb_range_begin(m->dev, "layer %zu forward", l + 1);
        layer_forward(p, l, l > mb_gpt_chunk_begin(m) ? l - 1 : MB_GPT_NONE);
        mb_range_end(m->dev);
    }
    for (size_t s = 0; s < m->n_strips; s++) {
        mlp_end(p, mb_gpt_chunk_end(m) - 1, s);
        if (mb_gpt_is_last_chunk(m))
            mb_gpt_norm_forward(m, m->final_norm, top_layer(m)->out, m->final_out, m->final_mean,
                                m->final_rstd, NULL, s);
    }
    if (mb_gpt_is_last_chunk(m))
        mb_gpt_gather_end_all(m);
}

/* Output and loss; d_a becomes this rank's share of the gradient of final_out if d is set. */
static void output_and_loss(struct mb_gpt *m, int d, double grad_scale)
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

/* --- backward --- */

/* The gradient of a branch's output, of all tokens: d_residual itself, or in d_a what went through
 * the branch's dropout, or is being gathered. */
static const void *branch_gradient(const struct mb_gpt_pass *p, uint32_t site)
{
    struct mb_gpt *m = p->m;
    if (m->c.hidden_dropout <= 0 && !m->c.sequence_parallel)
        return m->d_residual;
    for (size_t s = 0; s < m->n_strips; s++) {
        const struct mb_gpt_strip strip = mb_gpt_strip_at(m, s);
        dropout_add(p, mb_gpt_row(m, m->d_residual, strip.stream), NULL,
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
    return y == top_layer(m) && !mb_gpt_is_last_chunk(m) ? y->fc2 : without_sum(m, y->fc2);
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

    mlp_backward(m, y, branch_gradient(p, site_of(m, l, SITE_MLP)));
    mb_gpt_norm_backward(m, y->norm2, y->middle, y->mean2, y->rstd2, m->d_a, sum_for(m, y->proj),
                         mb_gpt_fp8_d_amax(m, y, MB_GPT_PROJ));

    if (m->n_contexts > 1)
        mb_gpt_ring_backward_begin(m, y);
    const void *d_proj = branch_gradient(p, site_of(m, l, SITE_PROJ));
    mb_gpt_linear_backward(m, y, MB_GPT_PROJ, without_sum(m, y->proj), y->attention_out, NULL,
                           mb_gpt_attention_width(&m->part), d_proj, h, m->d_b, gathers(m));
    mb_gpt_attention_backward(p, y, site_of(m, l, SITE_ATTENTION));
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
    mb_gpt_norm_backward(m, m->final_norm, top_layer(m)->out, m->final_mean, m->final_rstd, m->d_a,
                         sum_for(m, top_layer(m)->fc2),
                         mb_gpt_fp8_d_amax(m, top_layer(m), MB_GPT_FC2));
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

static void forward_again(const struct mb_gpt_pass *p, size_t l)
{
    layer_forward(p, l, MB_GPT_NONE);
    for (size_t s = 0; s < p->m->n_strips; s++)
        mlp_end(p, l, s);
}

static void backward(const struct mb_gpt_pass *p)
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
            forward_again(p, l);
        layer_backward(p, l);
        mb_range_end(m->dev);
        grads_final(p, m->layers[l].begin, m->layers[l].end);
    }
    if (is_first(m))
        embedding_backward(p);
    if (m->chunk == 0)
        grads_final(p, 0, m->layers[0].begin);
}

/* --- entry points --- */

static int check_batch(const struct mb_gpt *m, const struct mb_gpt_batch *b, struct mb_err *err)
{
    const struct {
        const int32_t *id;
        const char *what;
    } lists[] = {{b->tokens, "token"}, {b->labels, "label"}};
    for (size_t k = 0; k < 2; k++)
        for (size_t i = 0; i < m->micro_batch * m->c.seq; i++)
            if (lists[k].id[i] < 0 || (size_t)lists[k].id[i] >= m->c.vocab)
                return mb_err_set(
                    err, MB_EINVAL,
                    "%s %d at sample %zu, position %zu is outside the vocabulary of %zu",
                    lists[k].what, lists[k].id[i], i / m->c.seq, i % m->c.seq, m->c.vocab);
    return 0;
}

/* What this chunk needs of the rows from one on. The number of them. */
static size_t load_run(struct mb_gpt *m, const struct mb_gpt_batch *b, size_t row)
{
    const struct mb_device *dev = m->dev;
    const struct mb_gpt_run run = mb_gpt_run_at(m, row);
    if (is_first(m))
        dev->ops->copy_in(dev->ctx, dev->stream, m->tokens + row, b->tokens + run.in_batch,
                          run.n * sizeof(int32_t));
    if (is_first(m) && m->positions != NULL)
        memcpy(m->positions + row, b->positions + run.in_batch, run.n * sizeof(int32_t));
    if (!mb_gpt_is_last_chunk(m))
        return run.n;
    const float *mask = (b->loss_mask ? b->loss_mask : m->host_ones) + run.in_batch;
    dev->ops->copy_in(dev->ctx, dev->stream, m->labels + row, b->labels + run.in_batch,
                      run.n * sizeof(int32_t));
    dev->ops->copy_in(dev->ctx, dev->stream, m->mask + row, mask, run.n * sizeof(float));
    for (size_t i = 0; i < run.n; i++)
        m->mask_sum += (double)mask[i];
    return run.n;
}

static int load_batch(struct mb_gpt *m, const struct mb_gpt_batch *b, struct mb_err *err)
{
    int rc = is_first(m) || mb_gpt_is_last_chunk(m) ? check_batch(m, b, err) : 0;
    if (rc == 0)
        rc = mb_gpt_group_wait(m, err); /* copying may wait for the device */
    if (rc != 0)
        return rc;
    for (size_t row = 0; row < m->n_tokens;)
        row += load_run(m, b, row);
    return 0;
}

/* What follows works on this chunk and this micro batch. */
static void select_place(struct mb_gpt *m, struct mb_gpt_place at)
{
    const struct mb_gpt_slot *slot = &m->slots[at.slot];
    assert(at.slot < m->n_slots && at.chunk < m->n_chunks && m->d_residuals[at.gradient] != NULL);
    m->chunk = at.chunk;
    m->layers = slot->layers;
    m->tokens = slot->tokens;
    m->embedded = slot->embedded;
    m->positions = m->all_positions != NULL ? m->all_positions + at.slot * m->n_tokens : NULL;
    m->d_residual = m->d_residuals[at.gradient];
}

/* Zero from *at to the weight of a product, which is left alone: *at is behind it. */
static void zero_up_to(struct mb_gpt *m, size_t *at, size_t weight, size_t n)
{
    if (weight > *at)
        m->dev->ops->zero(m->dev->ctx, m->dev->stream, m->grads + *at,
                          (weight - *at) * sizeof(float));
    *at = weight + n;
}

void mb_gpt_zero_grads(struct mb_gpt *m)
{
    const struct mb_gpt_config *c = &m->part;
    const size_t h = m->c.hidden, output = c->padded_vocab * h;
    size_t at = 0;
    if (m->is_last && !m->c.untie_output)
        zero_up_to(m, &at, m->output_weight, output);
    for (size_t l = 0; l < m->part.n_layers; l++) {
        const struct mb_gpt_layer *y = &m->layers[l];
        zero_up_to(m, &at, y->qkv.weight, mb_gpt_qkv_width(c) * h);
        zero_up_to(m, &at, y->proj.weight, mb_gpt_attention_width(c) * h);
        zero_up_to(m, &at, y->fc1.weight, mb_gpt_fc1_width(c) * h);
        zero_up_to(m, &at, y->fc2.weight, c->ffn_hidden * h);
    }
    if (m->is_last && m->c.untie_output)
        zero_up_to(m, &at, m->output_weight, output);
    zero_up_to(m, &at, m->n_elements, 0);
    m->n_old_chunks = m->n_chunks;
}

struct mb_gpt_ports mb_gpt_ports(const struct mb_gpt *m, struct mb_gpt_place at)
{
    const struct mb_gpt_slot *s = &m->slots[at.slot];
    assert(at.slot < m->n_slots && m->d_residuals[at.gradient] != NULL);
    return (struct mb_gpt_ports){.in = s->embedded,
                                 .out = s->layers[m->chunk_layers - 1].out,
                                 .gradient = m->d_residuals[at.gradient],
                                 .n = m->n_rows * m->c.hidden};
}

int mb_gpt_stage_forward(struct mb_gpt *m, struct mb_gpt_place at, const struct mb_gpt_batch *batch,
                         const struct mb_gpt_step *step, struct mb_err *err)
{
    select_place(m, at);
    int rc = load_batch(m, batch, err);
    if (rc != 0)
        return rc;
    const struct mb_gpt_pass p = {.m = m, .step = step};
    forward(&p);
    if (step == NULL && mb_gpt_is_last_chunk(m))
        output_and_loss(m, 0, 0);
    return 0;
}

void mb_gpt_stage_backward(struct mb_gpt *m, struct mb_gpt_place at, const struct mb_gpt_step *step)
{
    const struct mb_gpt_pass p = {.m = m, .step = step};
    select_place(m, at);
    if (mb_gpt_is_last_chunk(m)) {
        mb_range_begin(m->dev, "output and loss");
        output_and_loss(m, 1, step->grad_scale);
        mb_range_end(m->dev);
    }
    backward(&p);
    if (mb_gpt_has_old_grads(m)) /* the chunks behind this one have had their first before */
        m->n_old_chunks = m->chunk;
}

int mb_gpt_forward_backward(struct mb_gpt *m, const struct mb_gpt_batch *batch,
                            const struct mb_gpt_step *step, struct mb_err *err)
{
    assert(m->is_first && m->is_last);
    int rc = mb_gpt_stage_forward(m, WHOLE, batch, step, err);
    if (rc == 0)
        mb_gpt_stage_backward(m, WHOLE, step);
    return rc;
}

int mb_gpt_forward(struct mb_gpt *m, const struct mb_gpt_batch *batch, struct mb_err *err)
{
    assert(m->is_first && m->is_last);
    return mb_gpt_stage_forward(m, WHOLE, batch, NULL, err);
}

int mb_gpt_logits(struct mb_gpt *m, const struct mb_gpt_batch *batch, void *logits,
                  struct mb_err *err)
{
    const double mask_sum = m->mask_sum;
    assert(m->is_first && m->is_last);
    select_place(m, WHOLE);
    int rc = load_batch(m, batch, err);
    m->mask_sum = mask_sum; /* this is no loss */
    if (rc != 0)
        return rc;
    const struct mb_gpt_pass p = {.m = m, .step = NULL};
    forward(&p);
    struct mb_linear_forward output =
        mb_gpt_linear_of(m, (struct mb_gpt_pair){m->output_weight, MB_GPT_NONE}, m->final_out,
                         m->c.hidden, logits, m->part.padded_vocab);
    m->dev->ops->linear_forward(m->dev->ctx, m->dev->stream, &output);
    return 0;
}

int mb_gpt_take_loss(struct mb_gpt *m, double *loss_sum, double *n_tokens, struct mb_err *err)
{
    const struct mb_device *dev = m->dev;
    double sum = 0;
    int rc = mb_gpt_group_wait(m, err);
    if (rc != 0)
        return mb_err_wrap(err, "training step");
    dev->ops->copy_out(dev->ctx, dev->stream, &sum, m->loss_sum, sizeof(sum));
    dev->ops->zero(dev->ctx, dev->stream, m->loss_sum, sizeof(sum));
    double mask_sum = m->mask_sum;
    m->mask_sum = 0;
    rc = dev->ops->synchronize(dev->ctx, dev->stream, err);
    if (rc != 0)
        return mb_err_wrap(err, "training step");
    *loss_sum = sum;
    *n_tokens = mask_sum;
    return 0;
}
