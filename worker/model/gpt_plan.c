/*
 * The plan of device memory. lay_out() runs twice over the same list: first without a base, to
 * measure and to name the parts, then with the arena's base, to set the pointers. So the printed
 * plan cannot differ from what is used. Parts of the same name (those of the layers) are printed as
 * one line.
 */
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"
#include "worker/model/gpt_internal.h"

enum { ALIGN_BYTES = 64 };

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

static void lay_out_layer(struct cursor *c, struct mb_gpt_layer *y)
{
    const struct mb_gpt_config *k = &c->m->c;
    const size_t tokens = c->m->n_tokens, wide = tokens * k->hidden;
    const size_t qkv = k->hidden + 2 * k->n_groups * (k->hidden / k->n_heads);
    y->norm1_out = take_floats(c, "activations: norms", wide);
    y->mean1 = take_floats(c, "activations: norms", tokens);
    y->rstd1 = take_floats(c, "activations: norms", tokens);
    y->norm2_out = take_floats(c, "activations: norms", wide);
    y->mean2 = take_floats(c, "activations: norms", tokens);
    y->rstd2 = take_floats(c, "activations: norms", tokens);
    y->qkv_out = take_floats(c, "activations: attention", tokens * qkv);
    y->log_sum = take_floats(c, "activations: attention", tokens * k->n_heads);
    y->attention_out = take_floats(c, "activations: attention", wide);
    y->fc1_out = take_floats(c, "activations: mlp", tokens * k->ffn_hidden);
    y->gelu_out = take_floats(c, "activations: mlp", tokens * k->ffn_hidden);
    y->middle = take_floats(c, "activations: residual stream", wide);
    y->out = take_floats(c, "activations: residual stream", wide);
}

static void lay_out(struct cursor *c)
{
    struct mb_gpt *m = c->m;
    const struct mb_gpt_config *k = &m->c;
    const size_t tokens = m->n_tokens, wide = tokens * k->hidden;
    const size_t qkv = k->hidden + 2 * k->n_groups * (k->hidden / k->n_heads);
    const struct mb_attention_shape shape = mb_gpt_attention_shape(m);
    const struct mb_backend *ops = m->dev->ops;

    m->weights = take_floats(c, "weights", m->n_elements);
    m->grads = take_floats(c, "gradients", m->n_elements);
    m->tokens = take(c, "batch", tokens, sizeof(int32_t));
    m->labels = take(c, "batch", tokens, sizeof(int32_t));
    m->mask = take_floats(c, "batch", tokens);
    m->loss_sum = take(c, "batch", 1, sizeof(double));
    m->embedded = take_floats(c, "activations: residual stream", wide);
    for (size_t l = 0; l < k->n_layers; l++) {
        lay_out_layer(c, &m->layers[l]);
        m->layers[l].in = l == 0 ? m->embedded : m->layers[l - 1].out;
    }
    m->final_out = take_floats(c, "activations: norms", wide);
    m->final_mean = take_floats(c, "activations: norms", tokens);
    m->final_rstd = take_floats(c, "activations: norms", tokens);
    m->d_residual = take_floats(c, "gradients of activations", wide);
    m->d_a = take_floats(c, "gradients of activations", wide);
    m->d_b = take_floats(c, "gradients of activations", wide);
    m->d_qkv = take_floats(c, "gradients of activations", tokens * qkv);
    m->d_ffn = take_floats(c, "gradients of activations", tokens * k->ffn_hidden);
    m->attention_scratch = take_floats(c, "scratch: attention", ops->attention_scratch(&shape));
    m->head_scratch = take_floats(c, "scratch: output and loss",
                                  ops->cross_entropy_scratch(tokens, k->hidden, k->padded_vocab));
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

int mb_gpt_print_plan(const struct mb_gpt *m, struct mb_buf *out)
{
    char size[16];
    int rc = mb_buf_printf(out, "%-32s %12s %16s\n", "device memory", "size", "bytes");
    for (size_t i = 0; rc == 0 && i < m->n_plan; i++)
        rc = mb_buf_printf(out, "%-32s %12s %16zu\n", m->plan[i].name,
                           mb_human_bytes(m->plan[i].size_bytes, size), m->plan[i].size_bytes);
    if (rc == 0)
        rc = mb_buf_printf(out, "%-32s %12s %16zu\n", "total", mb_human_bytes(m->arena_bytes, size),
                           m->arena_bytes);
    return rc;
}
