/*
 * The model's life and its step: a micro batch is loaded, then gpt_forward.c and gpt_backward.c
 * enqueue the passes.
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
    rc = mb_gpt_graphs_create(m, err);
    if (rc == 0)
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
    mb_gpt_graphs_free(m);
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

static void weights_changed(const struct mb_gpt_pass *p)
{
    struct mb_gpt *m = p->m;
    if (m->rounded != NULL)
        m->dev->ops->narrow(m->dev->ctx, m->dev->stream, m->rounded, m->weights.whole,
                            m->n_elements);
    mb_gpt_parts_weights_changed(m);
    mb_gpt_fp8_weights_changed(m);
}

void mb_gpt_weights_changed(struct mb_gpt *m)
{
    const struct mb_gpt_pass p = {.m = m, .step = NULL};
    mb_gpt_graph_run(&p, MB_GPT_WEIGHTS_CHANGED, WHOLE, weights_changed);
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
    if (mb_gpt_is_first_chunk(m))
        dev->ops->copy_in(dev->ctx, dev->stream, m->tokens + row, b->tokens + run.in_batch,
                          run.n * sizeof(int32_t));
    if (mb_gpt_is_first_chunk(m) && m->positions != NULL)
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
    int rc = mb_gpt_is_first_chunk(m) || mb_gpt_is_last_chunk(m) ? check_batch(m, b, err) : 0;
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

static void zero_grads(const struct mb_gpt_pass *p)
{
    struct mb_gpt *m = p->m;
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
}

void mb_gpt_zero_grads(struct mb_gpt *m)
{
    const struct mb_gpt_pass p = {.m = m, .step = NULL};
    mb_gpt_graph_run(&p, MB_GPT_ZERO_GRADS, WHOLE, zero_grads);
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

/* Forward passes have the same products, whatever they are for; backward passes set gradients or
 * add to them. */
enum { FORWARD_PASS, SETTING_PASS, ADDING_PASS };

static unsigned begin_kind(struct mb_gpt *m, int kind)
{
    m->tunes = (m->kinds_run >> kind & 1) == 0;
    return 1u << kind;
}

static void end_kind(struct mb_gpt *m, unsigned kind)
{
    m->kinds_run |= kind;
    m->tunes = 0;
}

static void enqueue_evaluation(const struct mb_gpt_pass *p)
{
    mb_gpt_pass_forward(p);
    if (mb_gpt_is_last_chunk(p->m))
        mb_gpt_output_and_loss(p->m, 0, 0);
}

static void enqueue_backward(const struct mb_gpt_pass *p)
{
    struct mb_gpt *m = p->m;
    if (mb_gpt_is_last_chunk(m)) {
        mb_range_begin(m->dev, "output and loss");
        mb_gpt_output_and_loss(m, 1, p->step->grad_scale);
        mb_range_end(m->dev);
    }
    mb_gpt_pass_backward(p);
}

int mb_gpt_stage_forward(struct mb_gpt *m, struct mb_gpt_place at, const struct mb_gpt_batch *batch,
                         const struct mb_gpt_step *step, struct mb_err *err)
{
    select_place(m, at);
    int rc = load_batch(m, batch, err);
    if (rc != 0)
        return rc;
    const struct mb_gpt_pass p = {.m = m, .step = step};
    const unsigned kind = begin_kind(m, FORWARD_PASS);
    mb_gpt_graph_pass(m, step);
    if (step == NULL)
        mb_gpt_graph_run(&p, MB_GPT_EVALUATION, at, enqueue_evaluation);
    else
        mb_gpt_graph_run(&p, MB_GPT_FORWARD, at, mb_gpt_pass_forward);
    end_kind(m, kind);
    return 0;
}

void mb_gpt_stage_backward(struct mb_gpt *m, struct mb_gpt_place at, const struct mb_gpt_step *step)
{
    const struct mb_gpt_pass p = {.m = m, .step = step};
    select_place(m, at);
    const unsigned kind = begin_kind(m, mb_gpt_has_old_grads(m) ? SETTING_PASS : ADDING_PASS);
    mb_gpt_graph_pass(m, step);
    mb_gpt_graph_run(&p, MB_GPT_BACKWARD, at, enqueue_backward);
    end_kind(m, kind);
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
    mb_gpt_pass_forward(&p);
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
