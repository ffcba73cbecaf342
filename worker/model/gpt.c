/*
 * The model's step.
 *
 * Forward: embed, dropout; per layer norm, qkv, attention, projection, residual, norm, fc1, gelu,
 * fc2, residual; final norm; output and loss. Backward: the same list from its end, with d_residual
 * the gradient of the residual stream: each branch reads it (through its dropout) and each norm
 * adds to it.
 *
 * Failure paths:
 *  1. A token or label outside the vocabulary is refused before anything is enqueued.
 *  2. What fails on the device is returned by mb_gpt_take_loss(); sums and gradients are then
 * undefined.
 *  3. mb_gpt_create() undoes what it did, in reverse order, by mb_gpt_destroy().
 */
#include "worker/model/gpt.h"

#include "base/alloc.h"
#include "worker/model/gpt_internal.h"

/* Dropouts of a layer; site 0 is that of the embedding. */
enum { SITE_ATTENTION = 1, SITE_PROJ = 2, SITE_MLP = 3, SITES_PER_LAYER = 3 };

/* What one pass needs beside the model; step NULL: no dropout. */
struct pass {
    struct mb_gpt *m;
    const struct mb_gpt_step *step;
};

struct mb_attention_shape mb_gpt_attention_shape(const struct mb_gpt *m)
{
    return (struct mb_attention_shape){.n_samples = m->micro_batch,
                                       .seq = m->c.seq,
                                       .n_heads = m->c.n_heads,
                                       .n_groups = m->c.n_groups,
                                       .head_dim = m->c.hidden / m->c.n_heads};
}

int mb_gpt_create(struct mb_device *dev, const struct mb_gpt_config *c, size_t micro_batch,
                  struct mb_gpt **out, struct mb_err *err)
{
    int rc = mb_gpt_config_check(c, err);
    if (rc != 0)
        return rc;
    if (micro_batch == 0 || micro_batch > ((size_t)1 << 30) / c->seq)
        return mb_err_set(err, MB_EINVAL,
                          "micro batch size is %zu: it must be positive, with at most 2^30 tokens "
                          "of %zu a sample",
                          micro_batch, c->seq);
    struct mb_gpt *m = mb_calloc(1, sizeof(*m));
    if (m == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory creating the model");
    m->dev = dev;
    m->c = *c;
    m->c.ffn_hidden = c->ffn_hidden ? c->ffn_hidden : 4 * c->hidden;
    m->c.n_groups = c->n_groups ? c->n_groups : c->n_heads;
    m->micro_batch = micro_batch;
    m->n_tokens = micro_batch * c->seq;
    rc = mb_gpt_params_create(m, err);
    if (rc == 0)
        rc = mb_gpt_plan_create(m, err);
    if (rc != 0)
        goto out;
    m->host_ones = mb_calloc(m->n_tokens, sizeof(float));
    if (m->host_ones == NULL) {
        rc = mb_err_set(err, MB_ENOMEM, "out of memory for a batch of %zu tokens", m->n_tokens);
        goto out;
    }
    for (size_t i = 0; i < m->n_tokens; i++)
        m->host_ones[i] = 1;
    dev->ops->zero(dev->ctx, dev->stream, m->arena, m->arena_bytes);
    rc = mb_gpt_params_draw(m, err);
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
    mb_free(m->params);
    mb_free(m->layers);
    mb_free(m->host_ones);
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
    return m->weights;
}

float *mb_gpt_grads(struct mb_gpt *m)
{
    return m->grads;
}

/* --- pieces of both directions --- */

static struct mb_dropout dropout_at(const struct pass *p, float probability, uint32_t site,
                                    size_t elements_per_sample)
{
    if (p->step == NULL)
        return (struct mb_dropout){0};
    return (struct mb_dropout){.seed = p->m->c.seed,
                               .iteration = (uint32_t)p->step->iteration,
                               .site = site,
                               .first_element = p->step->first_sample * elements_per_sample,
                               .probability = probability};
}

static struct mb_dropout hidden_dropout(const struct pass *p, uint32_t site)
{
    return dropout_at(p, p->m->c.hidden_dropout, site, p->m->c.seq * p->m->c.hidden);
}

static struct mb_dropout attention_dropout(const struct pass *p, uint32_t site)
{
    const struct mb_gpt_config *c = &p->m->c;
    return dropout_at(p, c->attention_dropout, site, c->n_heads * c->seq * c->seq);
}

static uint32_t site_of(size_t layer, uint32_t site)
{
    return (uint32_t)layer * SITES_PER_LAYER + site;
}

static void dropout_add(const struct pass *p, const float *x, const float *residual, float *out,
                        uint32_t site)
{
    const struct mb_device *dev = p->m->dev;
    struct mb_dropout_add a = {.x = x,
                               .residual = residual,
                               .out = out,
                               .n = p->m->n_tokens * p->m->c.hidden,
                               .dropout = hidden_dropout(p, site)};
    dev->ops->dropout_add(dev->ctx, dev->stream, &a);
}

static void norm_forward(struct mb_gpt *m, struct mb_gpt_pair at, const float *x, float *out,
                         float *mean, float *rstd)
{
    struct mb_layernorm_forward a = {.x = x,
                                     .weight = m->weights + at.weight,
                                     .bias = m->weights + at.bias,
                                     .out = out,
                                     .mean = mean,
                                     .rstd = rstd,
                                     .n_rows = m->n_tokens,
                                     .hidden = m->c.hidden,
                                     .eps = m->c.norm_eps};
    m->dev->ops->layernorm_forward(m->dev->ctx, m->dev->stream, &a);
}

/* Adds to d_residual. */
static void norm_backward(struct mb_gpt *m, struct mb_gpt_pair at, const float *x,
                          const float *mean, const float *rstd, const float *d_out)
{
    struct mb_layernorm_backward a = {.x = x,
                                      .weight = m->weights + at.weight,
                                      .mean = mean,
                                      .rstd = rstd,
                                      .d_out = d_out,
                                      .d_x = m->d_residual,
                                      .d_weight = m->grads + at.weight,
                                      .d_bias = m->grads + at.bias,
                                      .n_rows = m->n_tokens,
                                      .hidden = m->c.hidden};
    m->dev->ops->layernorm_backward(m->dev->ctx, m->dev->stream, &a);
}

static void linear_forward(struct mb_gpt *m, struct mb_gpt_pair at, const float *x, size_t n_in,
                           float *out, size_t n_out)
{
    struct mb_linear_forward a = {.x = x,
                                  .weight = m->weights + at.weight,
                                  .bias = m->weights + at.bias,
                                  .out = out,
                                  .n_rows = m->n_tokens,
                                  .n_in = n_in,
                                  .n_out = n_out};
    m->dev->ops->linear_forward(m->dev->ctx, m->dev->stream, &a);
}

static void linear_backward(struct mb_gpt *m, struct mb_gpt_pair at, const float *x, size_t n_in,
                            const float *d_out, size_t n_out, float *d_x)
{
    struct mb_linear_backward a = {.x = x,
                                   .weight = m->weights + at.weight,
                                   .d_out = d_out,
                                   .d_x = d_x,
                                   .d_weight = m->grads + at.weight,
                                   .d_bias = m->grads + at.bias,
                                   .n_rows = m->n_tokens,
                                   .n_in = n_in,
                                   .n_out = n_out};
    m->dev->ops->linear_backward(m->dev->ctx, m->dev->stream, &a);
}

static size_t qkv_width(const struct mb_gpt *m)
{
    return m->c.hidden + 2 * m->c.n_groups * (m->c.hidden / m->c.n_heads);
}

/* --- forward --- */

static void embed(const struct pass *p)
{
    struct mb_gpt *m = p->m;
    struct mb_embedding_forward a = {.token = m->tokens,
                                     .token_weight = m->weights + m->word_embedding,
                                     .position_weight = m->weights + m->position_embedding,
                                     .out = m->embedded,
                                     .n_tokens = m->n_tokens,
                                     .seq = m->c.seq,
                                     .hidden = m->c.hidden,
                                     .vocab = m->c.padded_vocab};
    m->dev->ops->embedding_forward(m->dev->ctx, m->dev->stream, &a);
    if (p->step != NULL && m->c.hidden_dropout > 0)
        dropout_add(p, m->embedded, NULL, m->embedded, 0);
}

static void layer_forward(const struct pass *p, size_t l)
{
    struct mb_gpt *m = p->m;
    const struct mb_device *dev = m->dev;
    struct mb_gpt_layer *y = &m->layers[l];
    const size_t h = m->c.hidden, ffn = m->c.ffn_hidden;

    norm_forward(m, y->norm1, y->in, y->norm1_out, y->mean1, y->rstd1);
    linear_forward(m, y->qkv, y->norm1_out, h, y->qkv_out, qkv_width(m));
    struct mb_attention_forward attention = {.shape = mb_gpt_attention_shape(m),
                                             .qkv = y->qkv_out,
                                             .out = y->attention_out,
                                             .log_sum = y->log_sum,
                                             .scratch = m->attention_scratch,
                                             .dropout =
                                                 attention_dropout(p, site_of(l, SITE_ATTENTION))};
    dev->ops->attention_forward(dev->ctx, dev->stream, &attention);
    linear_forward(m, y->proj, y->attention_out, h, m->d_a, h);
    dropout_add(p, m->d_a, y->in, y->middle, site_of(l, SITE_PROJ));

    norm_forward(m, y->norm2, y->middle, y->norm2_out, y->mean2, y->rstd2);
    linear_forward(m, y->fc1, y->norm2_out, h, y->fc1_out, ffn);
    struct mb_gelu gelu = {
        .x = y->fc1_out, .out = y->gelu_out, .n = m->n_tokens * ffn, .form = m->c.gelu};
    dev->ops->gelu_forward(dev->ctx, dev->stream, &gelu);
    linear_forward(m, y->fc2, y->gelu_out, ffn, m->d_a, h);
    dropout_add(p, m->d_a, y->middle, y->out, site_of(l, SITE_MLP));
}

/* Up to the final norm; d_a serves as scratch for the branches' outputs. */
static void forward(const struct pass *p)
{
    struct mb_gpt *m = p->m;
    embed(p);
    for (size_t l = 0; l < m->c.n_layers; l++)
        layer_forward(p, l);
    norm_forward(m, m->final_norm, m->layers[m->c.n_layers - 1].out, m->final_out, m->final_mean,
                 m->final_rstd);
}

/* Output and loss; d_a becomes the gradient of final_out if d is set. */
static void output_and_loss(struct mb_gpt *m, int d, double grad_scale)
{
    struct mb_cross_entropy a = {.x = m->final_out,
                                 .weight = m->weights + m->output_weight,
                                 .label = m->labels,
                                 .mask = m->mask,
                                 .loss_sum = m->loss_sum,
                                 .d_x = d ? m->d_a : NULL,
                                 .d_weight = d ? m->grads + m->output_weight : NULL,
                                 .scratch = m->head_scratch,
                                 .n_tokens = m->n_tokens,
                                 .hidden = m->c.hidden,
                                 .vocab = m->c.padded_vocab,
                                 .grad_scale = (float)grad_scale};
    m->dev->ops->cross_entropy(m->dev->ctx, m->dev->stream, &a);
}

/* --- backward --- */

/* The gradient of a branch's output: d_residual itself, or d_residual through the branch's dropout
 * in d_a. */
static const float *branch_gradient(const struct pass *p, uint32_t site)
{
    if (p->m->c.hidden_dropout <= 0)
        return p->m->d_residual;
    dropout_add(p, p->m->d_residual, NULL, p->m->d_a, site);
    return p->m->d_a;
}

static void layer_backward(const struct pass *p, size_t l)
{
    struct mb_gpt *m = p->m;
    const struct mb_device *dev = m->dev;
    const struct mb_gpt_layer *y = &m->layers[l];
    const size_t h = m->c.hidden, ffn = m->c.ffn_hidden;

    const float *d_mlp = branch_gradient(p, site_of(l, SITE_MLP));
    linear_backward(m, y->fc2, y->gelu_out, ffn, d_mlp, h, m->d_ffn);
    struct mb_gelu gelu = {.x = y->fc1_out,
                           .d_out = m->d_ffn,
                           .out = m->d_ffn,
                           .n = m->n_tokens * ffn,
                           .form = m->c.gelu};
    dev->ops->gelu_backward(dev->ctx, dev->stream, &gelu);
    linear_backward(m, y->fc1, y->norm2_out, h, m->d_ffn, ffn, m->d_a);
    norm_backward(m, y->norm2, y->middle, y->mean2, y->rstd2, m->d_a);

    const float *d_proj = branch_gradient(p, site_of(l, SITE_PROJ));
    linear_backward(m, y->proj, y->attention_out, h, d_proj, h, m->d_b);
    struct mb_attention_backward attention = {.shape = mb_gpt_attention_shape(m),
                                              .qkv = y->qkv_out,
                                              .out = y->attention_out,
                                              .log_sum = y->log_sum,
                                              .d_out = m->d_b,
                                              .d_qkv = m->d_qkv,
                                              .scratch = m->attention_scratch,
                                              .dropout =
                                                  attention_dropout(p, site_of(l, SITE_ATTENTION))};
    dev->ops->attention_backward(dev->ctx, dev->stream, &attention);
    linear_backward(m, y->qkv, y->norm1_out, h, m->d_qkv, qkv_width(m), m->d_a);
    norm_backward(m, y->norm1, y->in, y->mean1, y->rstd1, m->d_a);
}

static void grads_final(const struct pass *p, size_t begin, size_t end)
{
    if (p->step->grads_final != NULL)
        p->step->grads_final(p->step->arg, begin, end);
}

static void backward(const struct pass *p)
{
    struct mb_gpt *m = p->m;
    const struct mb_device *dev = m->dev;
    const size_t n_layers = m->c.n_layers;
    dev->ops->zero(dev->ctx, dev->stream, m->d_residual, m->n_tokens * m->c.hidden * sizeof(float));
    norm_backward(m, m->final_norm, m->layers[n_layers - 1].out, m->final_mean, m->final_rstd,
                  m->d_a);
    grads_final(p, m->layers_end, m->n_elements);
    for (size_t l = n_layers; l-- > 0;) {
        layer_backward(p, l);
        grads_final(p, m->layers[l].begin, m->layers[l].end);
    }
    struct mb_embedding_backward embedding = {.token = m->tokens,
                                              .d_out = branch_gradient(p, 0),
                                              .d_token_weight = m->grads + m->word_embedding,
                                              .d_position_weight = m->grads + m->position_embedding,
                                              .n_tokens = m->n_tokens,
                                              .seq = m->c.seq,
                                              .hidden = m->c.hidden,
                                              .vocab = m->c.padded_vocab};
    dev->ops->embedding_backward(dev->ctx, dev->stream, &embedding);
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
        for (size_t i = 0; i < m->n_tokens; i++)
            if (lists[k].id[i] < 0 || (size_t)lists[k].id[i] >= m->c.vocab)
                return mb_err_set(
                    err, MB_EINVAL,
                    "%s %d at sample %zu, position %zu is outside the vocabulary of %zu",
                    lists[k].what, lists[k].id[i], i / m->c.seq, i % m->c.seq, m->c.vocab);
    return 0;
}

static int load_batch(struct mb_gpt *m, const struct mb_gpt_batch *b, struct mb_err *err)
{
    int rc = check_batch(m, b, err);
    if (rc != 0)
        return rc;
    const struct mb_device *dev = m->dev;
    const float *mask = b->loss_mask ? b->loss_mask : m->host_ones;
    dev->ops->copy_in(dev->ctx, dev->stream, m->tokens, b->tokens, m->n_tokens * sizeof(int32_t));
    dev->ops->copy_in(dev->ctx, dev->stream, m->labels, b->labels, m->n_tokens * sizeof(int32_t));
    dev->ops->copy_in(dev->ctx, dev->stream, m->mask, mask, m->n_tokens * sizeof(float));
    for (size_t i = 0; i < m->n_tokens; i++)
        m->mask_sum += (double)mask[i];
    return 0;
}

void mb_gpt_zero_grads(struct mb_gpt *m)
{
    m->dev->ops->zero(m->dev->ctx, m->dev->stream, m->grads, m->n_elements * sizeof(float));
}

int mb_gpt_forward_backward(struct mb_gpt *m, const struct mb_gpt_batch *batch,
                            const struct mb_gpt_step *step, struct mb_err *err)
{
    int rc = load_batch(m, batch, err);
    if (rc != 0)
        return rc;
    const struct pass p = {.m = m, .step = step};
    forward(&p);
    output_and_loss(m, 1, step->grad_scale);
    backward(&p);
    return 0;
}

int mb_gpt_forward(struct mb_gpt *m, const struct mb_gpt_batch *batch, struct mb_err *err)
{
    int rc = load_batch(m, batch, err);
    if (rc != 0)
        return rc;
    const struct pass p = {.m = m, .step = NULL};
    forward(&p);
    output_and_loss(m, 0, 0);
    return 0;
}

int mb_gpt_take_loss(struct mb_gpt *m, double *loss_sum, double *n_tokens, struct mb_err *err)
{
    const struct mb_device *dev = m->dev;
    double sum = 0;
    dev->ops->copy_out(dev->ctx, dev->stream, &sum, m->loss_sum, sizeof(sum));
    dev->ops->zero(dev->ctx, dev->stream, m->loss_sum, sizeof(sum));
    double mask_sum = m->mask_sum;
    m->mask_sum = 0;
    int rc = dev->ops->synchronize(dev->ctx, dev->stream, err);
    if (rc != 0)
        return mb_err_wrap(err, "training step");
    *loss_sum = sum;
    *n_tokens = mask_sum;
    return 0;
}
