/*
 * The parts of the model that have several forms: norms and positions.
 *
 *  1. check: what a configuration needs and the backend lacks is named before memory is taken.
 *  2. fill: the tables of rotary positions, from the host.
 *  3. With norm_1p the stored weight w stands for 1 + w: the sums are formed anew after each change
 * of the weights, and a gradient by the sum is one by w.
 */
#include "base/alloc.h"
#include "worker/model/gpt_internal.h"

int mb_gpt_parts_check(const struct mb_device *dev, const struct mb_gpt_config *c,
                       struct mb_err *err)
{
    const struct {
        int needed;
        uint32_t feature;
        const char *what;
    } parts[] = {{c->norm == MB_GPT_RMSNORM, MB_FEATURE_RMSNORM, "RMSNorm"},
                 {c->swiglu, MB_FEATURE_SWIGLU, "SwiGLU"},
                 {c->positions == MB_GPT_ROPE, MB_FEATURE_ROPE, "rotary positions"},
                 {c->positions != MB_GPT_LEARNED, MB_FEATURE_NO_POSITIONS,
                  "embeddings without learned positions"},
                 {c->fp8 != MB_GPT_NO_FP8, MB_FEATURE_FP8, "FP8"},
                 {c->context_group != NULL && mb_comm_world_size(c->context_group) > 1,
                  MB_FEATURE_SPREAD_SAMPLES, "attention over samples on several ranks"}};
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++)
        if (parts[i].needed && (dev->ops->features & parts[i].feature) == 0)
            return mb_err_set(err, MB_EUNSUPPORTED, "the %s backend has no %s in this version",
                              dev->ops->name, parts[i].what);
    return 0;
}

static int fill_rope(struct mb_gpt *m, struct mb_err *err)
{
    const struct mb_device *dev = m->dev;
    const size_t dim = mb_rope_dim(&m->c.rope, m->c.head_dim), n = m->c.seq * dim / 2;
    const size_t half = dim / 2;
    float *cosine = mb_calloc(2 * n, sizeof(*cosine));
    if (cosine == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory for rotary positions");
    mb_rope_tables(&m->c.rope, dim, m->c.seq, cosine, cosine + n);
    for (size_t i = 0; i < m->part.seq;) { /* of a sample's rows, those that are here */
        const struct mb_gpt_run run = mb_gpt_run_at(m, i);
        const size_t rows = run.n < m->part.seq - i ? run.n : m->part.seq - i;
        const float *from = cosine + run.position * half;
        dev->ops->copy_in(dev->ctx, dev->stream, m->cosine + i * half, from,
                          rows * half * sizeof(float));
        dev->ops->copy_in(dev->ctx, dev->stream, m->sine + i * half, from + n,
                          rows * half * sizeof(float));
        i += rows;
    }
    mb_free(cosine);
    return 0;
}

int mb_gpt_parts_fill(struct mb_gpt *m, struct mb_err *err)
{
    const struct mb_device *dev = m->dev;
    const size_t h = m->c.hidden;
    float *ones = m->c.norm_1p ? mb_calloc(h, sizeof(*ones)) : NULL;
    if (m->c.norm_1p && ones == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory for the weights of norms");
    for (size_t i = 0; ones != NULL && i < h; i++)
        ones[i] = 1;
    if (ones != NULL)
        dev->ops->copy_in(dev->ctx, dev->stream, m->ones, ones, h * sizeof(*ones));
    mb_free(ones);
    return m->c.positions == MB_GPT_ROPE ? fill_rope(m, err) : 0;
}

static void add_one(struct mb_gpt *m, float *sum, const float *weight)
{
    const struct mb_device *dev = m->dev;
    const size_t h = m->c.hidden;
    dev->ops->zero(dev->ctx, dev->stream, sum, h * sizeof(float));
    dev->ops->axpy(dev->ctx, dev->stream, sum, m->ones, h, 1);
    dev->ops->axpy(dev->ctx, dev->stream, sum, weight, h, 1);
}

/* What a norm is computed with, of its weights as they are now. */
static void norm_changed(struct mb_gpt *m, struct mb_gpt_norm_at norm)
{
    const struct mb_device *dev = m->dev;
    const struct mb_master *w = &m->weights;
    const size_t h = m->c.hidden, at = norm.at.weight, bias = norm.at.bias;
    float *weight = m->norm_weights + norm.index * h;
    if (w->whole != NULL) {
        add_one(m, weight, w->whole + at);
        return;
    }
    if (m->norm_biases != NULL)
        dev->ops->join(dev->ctx, dev->stream, m->norm_biases + norm.index * h, w->upper + bias,
                       w->lower + bias, h);
    if (m->c.norm_1p) {
        dev->ops->join(dev->ctx, dev->stream, w->window, w->upper + at, w->lower + at, h);
        add_one(m, weight, w->window);
    } else {
        dev->ops->join(dev->ctx, dev->stream, weight, w->upper + at, w->lower + at, h);
    }
}

void mb_gpt_parts_weights_changed(struct mb_gpt *m)
{
    if (m->norm_weights == NULL)
        return;
    for (size_t l = 0; l < m->part.n_layers; l++) {
        norm_changed(m, m->layers[l].norm1);
        norm_changed(m, m->layers[l].norm2);
    }
    if (m->is_last)
        norm_changed(m, m->final_norm);
}

static const float *norm_weight(const struct mb_gpt *m, struct mb_gpt_norm_at norm)
{
    return m->norm_weights != NULL ? m->norm_weights + norm.index * m->c.hidden
                                   : m->weights.whole + norm.at.weight;
}

static const float *norm_bias(const struct mb_gpt *m, struct mb_gpt_norm_at norm)
{
    return m->norm_biases != NULL ? m->norm_biases + norm.index * m->c.hidden
                                  : m->weights.whole + norm.at.bias;
}

void mb_gpt_norm_forward(struct mb_gpt *m, struct mb_gpt_norm_at norm, const void *x, void *out,
                         float *mean, float *rstd, float *amax, size_t s)
{
    const struct mb_device *dev = m->dev;
    const struct mb_gpt_strip strip = mb_gpt_strip_at(m, s);
    struct mb_rmsnorm_forward rms = {.x = mb_gpt_row(m, x, strip.stream),
                                     .weight = norm_weight(m, norm),
                                     .out = mb_gpt_row(m, out, strip.own),
                                     .rstd = rstd + strip.stream,
                                     .amax = amax,
                                     .n_rows = strip.n_stream,
                                     .hidden = m->c.hidden,
                                     .eps = m->c.norm_eps,
                                     .dtype = m->c.dtype};
    if (m->c.norm == MB_GPT_RMSNORM) {
        dev->ops->rmsnorm_forward(dev->ctx, dev->stream, &rms);
    } else {
        struct mb_layernorm_forward a = {.x = rms.x,
                                         .weight = rms.weight,
                                         .bias = norm_bias(m, norm),
                                         .out = rms.out,
                                         .mean = mean + strip.stream,
                                         .rstd = rms.rstd,
                                         .n_rows = rms.n_rows,
                                         .hidden = m->c.hidden,
                                         .eps = m->c.norm_eps,
                                         .dtype = m->c.dtype};
        dev->ops->layernorm_forward(dev->ctx, dev->stream, &a);
    }
    mb_gpt_gather_begin(m, out, s);
}

/* Strip s of it. */
static void norm_backward(struct mb_gpt *m, struct mb_gpt_norm_at norm, const void *x,
                          const float *mean, const float *rstd, const void *d_out,
                          float *d_residual_sum, float *amax, size_t s)
{
    const struct mb_device *dev = m->dev;
    const struct mb_gpt_strip strip = mb_gpt_strip_at(m, s);
    struct mb_rmsnorm_backward rms = {.x = mb_gpt_row(m, x, strip.stream),
                                      .weight = norm_weight(m, norm),
                                      .rstd = rstd + strip.stream,
                                      .d_out = mb_gpt_row(m, d_out, strip.own),
                                      .d_x = mb_gpt_row(m, m->d_residual, strip.stream),
                                      .d_weight = m->grads + norm.at.weight,
                                      .amax = amax,
                                      .n_rows = strip.n_stream,
                                      .hidden = m->c.hidden,
                                      .dtype = m->c.dtype};
    if (m->c.norm == MB_GPT_RMSNORM) {
        dev->ops->rmsnorm_backward(dev->ctx, dev->stream, &rms);
        return;
    }
    struct mb_layernorm_backward a = {.x = rms.x,
                                      .weight = rms.weight,
                                      .mean = mean + strip.stream,
                                      .rstd = rms.rstd,
                                      .d_out = rms.d_out,
                                      .d_x = rms.d_x,
                                      .d_weight = rms.d_weight,
                                      .d_bias = m->grads + norm.at.bias,
                                      .d_x_sum = d_residual_sum,
                                      .n_rows = rms.n_rows,
                                      .hidden = m->c.hidden,
                                      .dtype = m->c.dtype};
    dev->ops->layernorm_backward(dev->ctx, dev->stream, &a);
}

void mb_gpt_norm_backward(struct mb_gpt *m, struct mb_gpt_norm_at norm, const void *x,
                          const float *mean, const float *rstd, void *d_share,
                          float *d_residual_sum, float *amax)
{
    for (size_t s = 0; s < m->n_strips; s++) {
        mb_gpt_sum_end(m, s);
        norm_backward(m, norm, x, mean, rstd, d_share, d_residual_sum, amax, s);
    }
}

void mb_gpt_rotate(struct mb_gpt *m, void *qkv, int inverse)
{
    if (m->c.positions != MB_GPT_ROPE)
        return;
    struct mb_rope a = {.shape = mb_gpt_attention_shape(m),
                        .qkv = qkv,
                        .cosine = m->cosine,
                        .sine = m->sine,
                        .rotary_dim = mb_rope_dim(&m->c.rope, m->c.head_dim),
                        .inverse = inverse,
                        .dtype = m->c.dtype};
    m->dev->ops->rope(m->dev->ctx, m->dev->stream, &a);
}
