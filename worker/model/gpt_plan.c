/*
 * The plan of device memory. lay_out() runs twice over the same list: first without a base, to
 * measure and to name the parts, then with the arena's base, to set the pointers. So the plan that
 * is printed before anything is taken cannot differ from what is used. Parts of the same name
 * (those of the layers) are printed as one line.
 */
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"
#include "worker/model/gpt_internal.h"

enum { ALIGN_BYTES = 256 }; /* what matrix products on GPUs like best */

static const double MAX_BYTES = 1152921504606846976.0; /* 2^60 */

struct cursor {
    struct mb_gpt *m;
    char *base; /* NULL: only measure */
    size_t used_bytes;
    double exact_bytes; /* the same without overflow */
};

static void *take(struct cursor *c, const char *name, size_t n, size_t element_bytes)
{
    size_t size = (n * element_bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
    void *p = c->base ? c->base + c->used_bytes : NULL;
    c->used_bytes += size;
    c->exact_bytes += (double)n * (double)element_bytes;
    if (c->base != NULL)
        return p;
    struct mb_gpt *m = c->m;
    size_t i = 0;
    while (i < m->n_plan && strcmp(m->plan[i].name, name) != 0)
        i++;
    if (i == m->n_plan)
        m->plan[m->n_plan++] = (struct mb_gpt_plan_part){.name = name};
    m->plan[i].size_bytes += size;
    return p;
}

static float *take_floats(struct cursor *c, const char *name, size_t n)
{
    return take(c, name, n, sizeof(float));
}

/* Activations and their gradients are of the model's dtype. */
static void *take_typed(struct cursor *c, const char *name, size_t n)
{
    return take(c, name, n, mb_dtype_size(c->m->c.dtype));
}

/* RMSNorm has none. */
static float *take_mean(struct cursor *c, size_t rows)
{
    return c->m->c.norm == MB_GPT_LAYERNORM ? take_floats(c, "activations: norms", rows) : NULL;
}

/* Everything but input and output: of layers that compute forward again, one at a time, whatever
 * their slot; and of those with the same place in chunks of one slot. */
static void share_activations(struct mb_gpt_layer *y, const struct mb_gpt_layer *first)
{
    y->norm1_out = first->norm1_out;
    y->mean1 = first->mean1;
    y->rstd1 = first->rstd1;
    y->norm2_out = first->norm2_out;
    y->mean2 = first->mean2;
    y->rstd2 = first->rstd2;
    y->qkv_out = first->qkv_out;
    y->log_sum = first->log_sum;
    y->attention_out = first->attention_out;
    y->fc1_out = first->fc1_out;
    y->activation = first->activation;
    y->middle = first->middle;
    for (size_t i = 0; i < MB_GPT_LINEARS; i++)
        y->fp8_x[i] = first->fp8_x[i];
    y->fp8_x_scales = first->fp8_x_scales;
}

/* What the linear layers keep of their inputs in fp8. */
static void lay_out_fp8_inputs(struct cursor *c, struct mb_gpt_layer *y)
{
    for (size_t i = 0; i < MB_GPT_LINEARS; i++) {
        size_t n_in, n_out;
        mb_gpt_fp8_sizes(c->m, (enum mb_gpt_linear)i, &n_in, &n_out);
        y->fp8_x[i] = take(c, "activations: fp8", c->m->n_tokens * n_in, 1);
    }
    y->fp8_x_scales = take(c, "activations: fp8", MB_GPT_LINEARS, sizeof(struct mb_fp8_scale));
}

/* What products alone read; in fp8 they have read it when they are done, and one for all, the first
 * layer's, is enough. */
static void *take_input(struct cursor *c, const char *name, size_t n, int is_first, void *of_first)
{
    return c->m->c.fp8 == MB_GPT_NO_FP8 || is_first ? take_typed(c, name, n) : of_first;
}

/* Of the first chunk. */
static void lay_out_layer(struct cursor *c, const struct mb_gpt_slot *slot, size_t l)
{
    struct mb_gpt_layer *y = &slot->layers[l], *first = &c->m->slots[0].layers[0];
    const struct mb_gpt_config *k = &c->m->part;
    const size_t tokens = c->m->n_tokens, rows = c->m->n_rows, wide = tokens * k->hidden;
    y->out = take_typed(c, "activations: residual stream", rows * k->hidden);
    y->in = l == 0 ? slot->embedded : slot->layers[l - 1].out;
    if (y != first && l < k->recompute_layers) {
        share_activations(y, first);
        return;
    }
    y->norm1_out = take_input(c, "activations: norms", wide, y == first, first->norm1_out);
    y->mean1 = take_mean(c, rows);
    y->rstd1 = take_floats(c, "activations: norms", rows);
    y->norm2_out = take_input(c, "activations: norms", wide, y == first, first->norm2_out);
    y->mean2 = take_mean(c, rows);
    y->rstd2 = take_floats(c, "activations: norms", rows);
    y->qkv_out = take_typed(c, "activations: attention", tokens * mb_gpt_qkv_width(k));
    y->log_sum = take_floats(c, "activations: attention", tokens * k->n_heads);
    y->attention_out = take_typed(c, "activations: attention", tokens * mb_gpt_attention_width(k));
    y->fc1_out = take_typed(c, "activations: mlp", tokens * mb_gpt_fc1_width(k));
    y->activation =
        take_input(c, "activations: mlp", tokens * k->ffn_hidden, y == first, first->activation);
    y->middle = take_typed(c, "activations: residual stream", rows * k->hidden);
    if (k->fp8 != MB_GPT_NO_FP8)
        lay_out_fp8_inputs(c, y);
}

/* What the weights do not say: angles of rotary positions, norms' weights as they are used. */
static void lay_out_tables(struct cursor *c)
{
    struct mb_gpt *m = c->m;
    const struct mb_gpt_config *k = &m->c;
    if (k->positions == MB_GPT_ROPE) {
        const size_t n = m->part.seq * mb_rope_dim(&k->rope, k->head_dim) / 2;
        m->cosine = take_floats(c, "rotary positions", n);
        m->sine = take_floats(c, "rotary positions", n);
    }
    const size_t norms = (2 * m->part.n_layers + 1) * k->hidden;
    const int halves = k->dtype == MB_DTYPE_BF16;
    if (k->norm_1p || halves)
        m->norm_weights = take_floats(c, "weights of norms", norms);
    if (k->norm_1p)
        m->ones = take_floats(c, "weights of norms", k->hidden);
    if (halves && k->norm == MB_GPT_LAYERNORM)
        m->norm_biases = take_floats(c, "weights of norms", norms);
}

/* What a micro batch keeps. */
static void lay_out_slot(struct cursor *c, struct mb_gpt_slot *slot)
{
    const struct mb_gpt *m = c->m;
    if (m->is_first)
        slot->tokens = take(c, "batch", m->n_tokens, sizeof(int32_t));
    slot->embedded = take_typed(c, "activations: residual stream", m->n_rows * m->c.hidden);
    for (size_t l = 0; l < m->chunk_layers; l++)
        lay_out_layer(c, slot, l);
    for (size_t l = m->chunk_layers; l < m->part.n_layers; l++) { /* a slot is one chunk's */
        const struct mb_gpt_layer *same = &slot->layers[l - m->chunk_layers];
        slot->layers[l].in = same->in;
        slot->layers[l].out = same->out;
        share_activations(&slot->layers[l], same);
    }
}

/* The last stage's. */
static void lay_out_output(struct cursor *c)
{
    struct mb_gpt *m = c->m;
    const struct mb_gpt_config *k = &m->part;
    const size_t tokens = m->n_tokens;
    m->labels = take(c, "batch", tokens, sizeof(int32_t));
    m->mask = take_floats(c, "batch", tokens);
    if (m->n_parts > 1)
        m->loss_parts = take_floats(c, "scratch: output and loss", m->n_parts * 2 * tokens);
    m->final_out = take_typed(c, "activations: norms", tokens * k->hidden);
    m->final_mean = take_mean(c, m->n_rows);
    m->final_rstd = take_floats(c, "activations: norms", m->n_rows);
    m->head_scratch =
        take_floats(c, "scratch: output and loss",
                    m->dev->ops->cross_entropy_scratch(tokens, k->hidden, k->padded_vocab));
}

static void lay_out_ring(struct cursor *c)
{
    struct mb_gpt *m = c->m;
    const size_t n = m->n_tokens * 2 * m->part.n_groups * m->part.head_dim;
    for (size_t i = 0; i < 2; i++)
        m->ring_kv[i] = take_typed(c, "ring of keys and values", n);
    for (size_t i = 0; i < 3; i++)
        m->ring_d_kv[i] = take_floats(c, "ring of keys and values", n);
}

static void lay_out_weights(struct cursor *c)
{
    struct mb_gpt *m = c->m;
    const size_t n = m->n_elements;
    if (m->c.dtype != MB_DTYPE_BF16) {
        m->weights.whole = take_floats(c, "weights", n);
        if (m->c.dtype == MB_DTYPE_F16)
            m->rounded = take(c, "weights: fp16, for products", n, sizeof(uint16_t));
        return;
    }
    m->weights.upper = take(c, "weights: bf16, for products", n, sizeof(uint16_t));
    m->weights.lower = take(c, "weights: the rest of fp32", n, sizeof(uint16_t));
    m->weights.window = take_floats(c, "scratch: weights in fp32", MB_MASTER_WINDOW);
}

static void lay_out_fp8(struct cursor *c)
{
    struct mb_gpt *m = c->m;
    const size_t n = m->part.n_layers * MB_GPT_LINEARS, most = mb_gpt_fp8_largest(m);
    m->fp8.weight_scales = take(c, "weights: fp8, for products", n, sizeof(struct mb_fp8_scale));
    for (size_t i = 0; i < n; i++) {
        size_t n_in, n_out;
        mb_gpt_fp8_sizes(m, (enum mb_gpt_linear)(i % MB_GPT_LINEARS), &n_in, &n_out);
        m->fp8.weights[i] = (struct mb_fp8_matrix){
            .rows = take(c, "weights: fp8, for products", n_in * n_out, 1),
            .columns = take(c, "weights: fp8, for products", n_in * n_out, 1),
            .scale = c->base != NULL ? m->fp8.weight_scales + i : NULL,
            .format = MB_FP8_E4M3};
    }
    m->fp8.d_scales = take(c, "scratch: fp8", n, sizeof(struct mb_fp8_scale));
    m->fp8.rows = take(c, "scratch: fp8", most, 1);
    m->fp8.columns = take(c, "scratch: fp8", most, 1);
}

static void lay_out(struct cursor *c)
{
    struct mb_gpt *m = c->m;
    const struct mb_gpt_config *k = &m->part;
    const size_t tokens = m->n_tokens, rows = m->n_rows, wide = tokens * k->hidden;
    const struct mb_attention_shape shape = mb_gpt_attention_shape(m);
    const struct mb_backend *ops = m->dev->ops;

    lay_out_weights(c);
    m->grads = take_floats(c, "gradients", m->n_elements);
    m->loss_sum = take(c, "batch", 1, sizeof(double));
    if (m->c.graphs)
        m->pass = take(c, "batch", 1, sizeof(*m->pass));
    if (m->c.fp8 != MB_GPT_NO_FP8)
        lay_out_fp8(c);
    lay_out_tables(c);
    for (size_t s = 0; s < m->n_slots; s++)
        lay_out_slot(c, &m->slots[s]);
    if (m->is_last)
        lay_out_output(c);
    for (size_t i = 0; i < (m->n_chunks > 1 ? 2 : 1); i++)
        m->d_residuals[i] = take_typed(c, "gradients of activations", rows * k->hidden);
    m->d_residual = m->d_residuals[0];
    m->d_a = take_typed(c, "gradients of activations", wide);
    m->d_b = take_typed(c, "gradients of activations", tokens * mb_gpt_attention_width(k));
    m->d_qkv = take_typed(c, "gradients of activations", tokens * mb_gpt_qkv_width(k));
    m->d_fc1 = take_typed(c, "gradients of activations", tokens * mb_gpt_fc1_width(k));
    m->d_activation =
        k->swiglu ? take_typed(c, "gradients of activations", tokens * k->ffn_hidden) : m->d_fc1;
    m->attention_scratch = take_floats(c, "scratch: attention", ops->attention_scratch(&shape));
    if (m->n_contexts > 1)
        lay_out_ring(c);
}

int mb_gpt_plan_create(struct mb_gpt *m, struct mb_err *err)
{
    struct cursor measure = {.m = m};
    lay_out(&measure);
    if (measure.exact_bytes > MAX_BYTES)
        return mb_err_set(
            err, MB_ENOMEM,
            "the model needs %.2g bytes of device memory with micro batches of %zu samples",
            measure.exact_bytes, m->micro_batch);
    m->arena_bytes = measure.used_bytes;
    int rc = m->dev->ops->alloc(m->dev->ctx, m->arena_bytes, &m->arena, err);
    if (rc != 0) {
        char size[16];
        return mb_err_wrap(err,
                           "the model needs %s of device memory with micro batches of %zu samples",
                           mb_human_bytes(m->arena_bytes, size), m->micro_batch);
    }
    struct cursor place = {.m = m, .base = m->arena};
    lay_out(&place);
    return 0;
}

static size_t max_of(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Of a linear layer's backward pass, which has most: input, its GELU's, output, both gradients. */
static size_t widened_linear(const struct mb_gpt *m, size_t n_in, size_t n_out, int has_gelu)
{
    return m->n_tokens * ((has_gelu ? 3 : 2) * n_in + n_out) + n_in * n_out;
}

/* The same of a forward pass that adds bias and residual, or gives a GELU's output. */
static size_t widened_forward(const struct mb_gpt *m, size_t n_in, size_t n_out)
{
    return m->n_tokens * (n_in + 2 * n_out) + n_in * n_out + n_out;
}

static size_t widened(const struct mb_gpt *m)
{
    const struct mb_gpt_config *k = &m->part;
    const size_t h = k->hidden, attention = mb_gpt_attention_width(k), qkv = mb_gpt_qkv_width(k);
    const size_t fc1 = mb_gpt_fc1_width(k);
    size_t n = widened_linear(m, h, qkv, 0);
    n = max_of(n, widened_linear(m, attention, h, 0));
    n = max_of(n, widened_linear(m, h, fc1, 0));
    n = max_of(n, widened_linear(m, k->ffn_hidden, h, !k->swiglu));
    n = max_of(n, widened_forward(m, h, fc1));
    n = max_of(n, widened_forward(m, k->ffn_hidden, h));
    n = max_of(n, m->n_tokens * 2 * (qkv + attention));
    n = max_of(n, m->n_tokens * (k->swiglu ? 5 : 3) * k->ffn_hidden);
    if (m->is_last)
        n = max_of(n, 2 * m->n_tokens * h + k->padded_vocab * h);
    return n;
}

int mb_gpt_measure(struct mb_device *dev, const struct mb_gpt_config *c, size_t micro_batch,
                   struct mb_gpt_sizes *out, struct mb_err *err)
{
    struct mb_gpt m = {.dev = dev, .c = *c, .micro_batch = micro_batch};
    int rc = mb_gpt_check(dev, c, micro_batch, err);
    if (rc != 0)
        return rc;
    mb_gpt_config_complete(&m.c);
    mb_gpt_group_init(&m);
    rc = mb_gpt_params_create(&m, err);
    if (rc != 0)
        return rc;
    rc = mb_gpt_fp8_create(&m, err);
    if (rc != 0)
        goto out;
    struct cursor measure = {.m = &m};
    lay_out(&measure);
    *out = (struct mb_gpt_sizes){.n_parts = m.n_plan,
                                 .total_bytes = measure.exact_bytes > MAX_BYTES
                                                    ? measure.exact_bytes
                                                    : (double)measure.used_bytes,
                                 .n_elements = m.n_elements,
                                 .widened = widened(&m),
                                 .batch_floats = micro_batch * c->seq};
    memcpy(out->parts, m.plan, sizeof(m.plan));
out:
    mb_free(m.fp8.weights);
    mb_gpt_params_free(&m);
    return rc;
}
