/*
 * The linear layers of a layer: where their weights and gradients lie, which strip of the rows they
 * take, in bf16 or in fp8, and in what order their gradients are formed, so that ranks gather and
 * sum beside products.
 */
#include "worker/model/gpt_internal.h"

const void *mb_gpt_weight_at(const struct mb_gpt *m, size_t offset)
{
    const uint16_t *narrow = m->rounded != NULL ? m->rounded : m->weights.upper;
    return narrow != NULL ? (const void *)(narrow + offset)
                          : (const void *)(m->weights.whole + offset);
}

int mb_gpt_has_old_grads(const struct mb_gpt *m)
{
    return m->chunk < m->n_old_chunks;
}

struct mb_linear_forward mb_gpt_linear_of(const struct mb_gpt *m, struct mb_gpt_pair at,
                                          const void *x, size_t n_in, void *out, size_t n_out)
{
    return (struct mb_linear_forward){.x = x,
                                      .weight = mb_gpt_weight_at(m, at.weight),
                                      .bias = at.bias != MB_GPT_NONE ? mb_gpt_weight_at(m, at.bias)
                                                                     : NULL,
                                      .out = out,
                                      .n_rows = m->n_tokens,
                                      .n_in = n_in,
                                      .n_out = n_out,
                                      .form = m->c.gelu,
                                      .dtype = m->c.dtype};
}

void *mb_gpt_rows_from(const struct mb_gpt *m, const void *x, size_t row, size_t n)
{
    return x == NULL ? NULL : (char *)(uintptr_t)x + row * n * mb_dtype_size(m->c.dtype);
}

void mb_gpt_linear_forward(struct mb_gpt *m, const struct mb_gpt_layer *y, enum mb_gpt_linear which,
                           struct mb_linear_forward a, struct mb_gpt_strip strip)
{
    a.x = mb_gpt_rows_from(m, a.x, strip.first, a.n_in);
    a.residual = mb_gpt_rows_from(m, a.residual, strip.first, a.n_out);
    a.out = mb_gpt_rows_from(m, a.out, strip.first, a.n_out);
    a.gelu_out = mb_gpt_rows_from(m, a.gelu_out, strip.first, a.n_out);
    a.n_rows = strip.n;
    if (m->c.fp8 != MB_GPT_NO_FP8)
        mb_gpt_fp8_forward(m, y, which, &a);
    else
        m->dev->ops->linear_forward(m->dev->ctx, m->dev->stream, &a);
}

/* The gradient of the input of the rows of a strip. */
static void input_backward(struct mb_gpt *m, struct mb_linear_backward a, struct mb_gpt_strip strip)
{
    a.gelu_x = mb_gpt_rows_from(m, a.gelu_x, strip.first, a.n_in);
    a.d_out = mb_gpt_rows_from(m, a.d_out, strip.first, a.n_out);
    a.d_x = mb_gpt_rows_from(m, a.d_x, strip.first, a.n_in);
    a.d_weight = NULL;
    a.d_bias = NULL;
    a.n_rows = strip.n;
    m->dev->ops->linear_backward(m->dev->ctx, m->dev->stream, &a);
}

/* First the gradient of the input, strip by strip, then that of the weights, beside which ranks
 * form sums. */
static void backward_together(struct mb_gpt *m, struct mb_linear_backward a,
                              enum mb_gpt_together what)
{
    for (size_t s = 0; s < m->n_strips; s++) {
        if (what == MB_GPT_GATHERS)
            mb_gpt_gather_end(m, s);
        input_backward(m, a, mb_gpt_strip_at(m, s));
        if (what == MB_GPT_SUMS)
            mb_gpt_sum_begin(m, a.d_x, s);
    }
    a.d_x = NULL;
    m->dev->ops->linear_backward(m->dev->ctx, m->dev->stream, &a);
}

/* In fp8 both gradients come from one conversion. */
static void fp8_backward(struct mb_gpt *m, const struct mb_gpt_layer *y, enum mb_gpt_linear which,
                         const struct mb_linear_backward *a, enum mb_gpt_together what)
{
    if (what == MB_GPT_GATHERS)
        mb_gpt_gather_end_all(m);
    mb_gpt_fp8_backward(m, y, which, a);
    for (size_t s = 0; s < m->n_strips && what == MB_GPT_SUMS; s++)
        mb_gpt_sum_begin(m, a->d_x, s);
}

void mb_gpt_linear_backward(struct mb_gpt *m, const struct mb_gpt_layer *y,
                            enum mb_gpt_linear which, struct mb_gpt_pair at, const void *x,
                            const void *gelu_x, size_t n_in, const void *d_out, size_t n_out,
                            void *d_x, enum mb_gpt_together what)
{
    struct mb_linear_backward a = {.x = x,
                                   .gelu_x = gelu_x,
                                   .weight = mb_gpt_weight_at(m, at.weight),
                                   .d_out = d_out,
                                   .d_x = d_x,
                                   .d_weight = m->grads + at.weight,
                                   .sets_d_weight = mb_gpt_has_old_grads(m),
                                   .d_bias = at.bias != MB_GPT_NONE ? m->grads + at.bias : NULL,
                                   .n_rows = m->n_tokens,
                                   .n_in = n_in,
                                   .n_out = n_out,
                                   .form = m->c.gelu,
                                   .dtype = m->c.dtype};
    if (m->c.fp8 != MB_GPT_NO_FP8)
        fp8_backward(m, y, which, &a, what);
    else if (what != MB_GPT_NOTHING && m->n_parts > 1)
        backward_together(m, a, what);
    else
        m->dev->ops->linear_backward(m->dev->ctx, m->dev->stream, &a);
}
