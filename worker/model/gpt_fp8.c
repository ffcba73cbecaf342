/*
 * The layers' linear layers with operands in fp8.
 *
 *  1. Weights: both copies are made when the weights have changed, so once a step.
 *  2. Forward: what writes the input forms its largest magnitude, or a reading of its own does; one
 * conversion gives the copy that this product takes, and the one that is kept for the gradient of
 * the weights, which is all that the backward pass reads of the input.
 *  3. Backward: the same of the gradient of the output; then both products.
 * Scales are of the tensor as it is, not of its history: nothing to keep in checkpoints, and a run
 * that goes on gives the bits of one that was not stopped. Ranks that share a layer have scales of
 * their own: each product undoes those of its own operands before sums over ranks are formed.
 * GELU and its gradient are passes of their own here.
 */
#include "base/alloc.h"
#include "worker/model/gpt_internal.h"

enum { MULTIPLE = 16 }; /* of cuBLASLt's products in fp8: every dimension */

void mb_gpt_fp8_sizes(const struct mb_gpt *m, enum mb_gpt_linear which, size_t *n_in, size_t *n_out)
{
    const struct mb_gpt_config *k = &m->part;
    const size_t sizes[MB_GPT_LINEARS][2] = {[MB_GPT_QKV] = {k->hidden, mb_gpt_qkv_width(k)},
                                             [MB_GPT_PROJ] = {mb_gpt_attention_width(k), k->hidden},
                                             [MB_GPT_FC1] = {k->hidden, mb_gpt_fc1_width(k)},
                                             [MB_GPT_FC2] = {k->ffn_hidden, k->hidden}};
    *n_in = sizes[which][0];
    *n_out = sizes[which][1];
}

size_t mb_gpt_fp8_largest(const struct mb_gpt *m)
{
    size_t most = 0;
    for (size_t i = 0; i < MB_GPT_LINEARS; i++) {
        size_t n_in, n_out;
        mb_gpt_fp8_sizes(m, (enum mb_gpt_linear)i, &n_in, &n_out);
        most = n_in > most ? n_in : most;
        most = n_out > most ? n_out : most;
    }
    return m->n_tokens * most;
}

static int check(const struct mb_gpt *m, struct mb_err *err)
{
    const struct {
        const char *what;
        size_t size;
    } sizes[] = {{"tokens of a micro batch", m->n_tokens},
                 {"the hidden size", m->part.hidden},
                 {"queries, keys and values", mb_gpt_qkv_width(&m->part)},
                 {"the attention's output", mb_gpt_attention_width(&m->part)},
                 {"the MLP's channels", m->part.ffn_hidden}};
    if (m->c.dtype != MB_DTYPE_BF16)
        return mb_err_set(err, MB_EINVAL, "FP8 needs bf16 for all that is not in FP8");
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        if (sizes[i].size % MULTIPLE != 0)
            return mb_err_set(err, MB_EINVAL,
                              "FP8 needs multiples of %d: of %s there are %zu on a rank", MULTIPLE,
                              sizes[i].what, sizes[i].size);
    return m->dev->ops->fp8_check(m->dev->ctx, err);
}

int mb_gpt_fp8_create(struct mb_gpt *m, struct mb_err *err)
{
    if (m->c.fp8 == MB_GPT_NO_FP8)
        return 0;
    int rc = check(m, err);
    if (rc != 0)
        return rc;
    m->fp8.weights = mb_calloc(m->part.n_layers * MB_GPT_LINEARS, sizeof(*m->fp8.weights));
    return m->fp8.weights != NULL ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory for FP8");
}

/* ---- conversions ---- */

static void find_amax(struct mb_gpt *m, const void *x, size_t n, float *amax)
{
    const struct mb_fp8_amax a = {.x = x, .amax = amax, .n = n};
    m->dev->ops->fp8_amax(m->dev->ctx, m->dev->stream, &a);
}

static void quantize(struct mb_gpt *m, const void *x, size_t n_rows, size_t n_columns,
                     const struct mb_fp8_matrix *out)
{
    const struct mb_fp8_quantize a = {
        .x = x, .out = *out, .n_rows = n_rows, .n_columns = n_columns, .margin = m->c.fp8_margin};
    m->dev->ops->fp8_quantize(m->dev->ctx, m->dev->stream, &a);
}

static void zero_scales(struct mb_gpt *m, struct mb_fp8_scale *scales, size_t n)
{
    m->dev->ops->zero(m->dev->ctx, m->dev->stream, scales, n * sizeof(*scales));
}

void mb_gpt_fp8_weights_changed(struct mb_gpt *m)
{
    if (m->c.fp8 == MB_GPT_NO_FP8)
        return;
    zero_scales(m, m->fp8.weight_scales, m->part.n_layers * MB_GPT_LINEARS);
    for (size_t l = 0; l < m->part.n_layers; l++) {
        const struct mb_gpt_layer *y = &m->layers[l];
        const struct mb_gpt_pair at[MB_GPT_LINEARS] = {[MB_GPT_QKV] = y->qkv,
                                                       [MB_GPT_PROJ] = y->proj,
                                                       [MB_GPT_FC1] = y->fc1,
                                                       [MB_GPT_FC2] = y->fc2};
        for (size_t i = 0; i < MB_GPT_LINEARS; i++) {
            const struct mb_fp8_matrix *to = &m->fp8.weights[l * MB_GPT_LINEARS + i];
            const void *weight = m->weights.upper + at[i].weight;
            size_t n_in, n_out;
            mb_gpt_fp8_sizes(m, (enum mb_gpt_linear)i, &n_in, &n_out);
            find_amax(m, weight, n_in * n_out, &to->scale->amax);
            quantize(m, weight, n_out, n_in, to);
        }
    }
}

/* ---- who forms the largest magnitude ---- */

/* RMSNorm of all rows does. */
static int norms_form_amax(const struct mb_gpt *m)
{
    return m->c.norm == MB_GPT_RMSNORM && !m->c.sequence_parallel;
}

static size_t number_of(const struct mb_gpt *m, const struct mb_gpt_layer *y,
                        enum mb_gpt_linear which)
{
    return (size_t)(y - m->layers) * MB_GPT_LINEARS + which;
}

float *mb_gpt_fp8_x_amax(const struct mb_gpt *m, const struct mb_gpt_layer *y,
                         enum mb_gpt_linear which)
{
    const int forms = which == MB_GPT_FC2    ? m->c.swiglu
                      : which == MB_GPT_PROJ ? 0 /* attention does not */
                                             : norms_form_amax(m);
    return m->c.fp8 != MB_GPT_NO_FP8 && forms ? &y->fp8_x_scales[which].amax : NULL;
}

float *mb_gpt_fp8_d_amax(const struct mb_gpt *m, const struct mb_gpt_layer *y,
                         enum mb_gpt_linear which)
{
    /* The gradient of a branch's output is that of the residual stream, if nothing is between. */
    int forms = norms_form_amax(m) && m->c.hidden_dropout <= 0;
    if (which == MB_GPT_QKV)
        forms = 0; /* attention and the turn of rotary positions do not */
    else if (which == MB_GPT_FC1)
        forms = m->c.swiglu;
    else if (which == MB_GPT_FC2 && y == &m->layers[mb_gpt_chunk_end(m) - 1])
        forms = forms && mb_gpt_is_last_chunk(m); /* else it is another chunk's */
    return m->c.fp8 != MB_GPT_NO_FP8 && forms ? &m->fp8.d_scales[number_of(m, y, which)].amax
                                              : NULL;
}

/* ---- both directions ---- */

void mb_gpt_fp8_forward_begins(struct mb_gpt *m, const struct mb_gpt_layer *y)
{
    if (m->c.fp8 != MB_GPT_NO_FP8)
        zero_scales(m, y->fp8_x_scales, MB_GPT_LINEARS);
}

void mb_gpt_fp8_backward_begins(struct mb_gpt *m)
{
    if (m->c.fp8 != MB_GPT_NO_FP8)
        zero_scales(m, m->fp8.d_scales, m->part.n_layers * MB_GPT_LINEARS);
}

void mb_gpt_fp8_forward(struct mb_gpt *m, const struct mb_gpt_layer *y, enum mb_gpt_linear which,
                        const struct mb_linear_forward *a)
{
    const struct mb_device *dev = m->dev;
    const struct mb_fp8_matrix x = {.rows = m->fp8.rows,
                                    .columns = y->fp8_x[which],
                                    .scale = &y->fp8_x_scales[which],
                                    .format = MB_FP8_E4M3};
    if (mb_gpt_fp8_x_amax(m, y, which) == NULL)
        find_amax(m, a->x, a->n_rows * a->n_in, &x.scale->amax);
    quantize(m, a->x, a->n_rows, a->n_in, &x);
    const struct mb_fp8_linear_forward product = {.x = x,
                                                  .weight = m->fp8.weights[number_of(m, y, which)],
                                                  .bias = a->bias,
                                                  .residual = a->residual,
                                                  .out = a->out,
                                                  .n_rows = a->n_rows,
                                                  .n_in = a->n_in,
                                                  .n_out = a->n_out};
    dev->ops->fp8_linear_forward(dev->ctx, dev->stream, &product);
    if (a->gelu_out == NULL)
        return;
    const struct mb_gelu gelu = {.x = a->out,
                                 .out = a->gelu_out,
                                 .n = a->n_rows * a->n_out,
                                 .form = a->form,
                                 .dtype = a->dtype};
    dev->ops->gelu_forward(dev->ctx, dev->stream, &gelu);
}

void mb_gpt_fp8_backward(struct mb_gpt *m, const struct mb_gpt_layer *y, enum mb_gpt_linear which,
                         const struct mb_linear_backward *a)
{
    const struct mb_device *dev = m->dev;
    const struct mb_fp8_matrix d_out = {.rows = m->fp8.rows,
                                        .columns = m->fp8.columns,
                                        .scale = &m->fp8.d_scales[number_of(m, y, which)],
                                        .format = m->c.fp8 == MB_GPT_FP8_HYBRID ? MB_FP8_E5M2
                                                                                : MB_FP8_E4M3};
    if (mb_gpt_fp8_d_amax(m, y, which) == NULL)
        find_amax(m, a->d_out, a->n_rows * a->n_out, &d_out.scale->amax);
    quantize(m, a->d_out, a->n_rows, a->n_out, &d_out);
    const struct mb_fp8_linear_backward products = {
        .x = {.columns = y->fp8_x[which], .scale = &y->fp8_x_scales[which], .format = MB_FP8_E4M3},
        .weight = m->fp8.weights[number_of(m, y, which)],
        .d_out = d_out,
        .bf16_d_out = a->d_out,
        .d_x = a->d_x,
        .d_weight = a->d_weight,
        .sets_d_weight = a->sets_d_weight,
        .d_bias = a->d_bias,
        .n_rows = a->n_rows,
        .n_in = a->n_in,
        .n_out = a->n_out};
    dev->ops->fp8_linear_backward(dev->ctx, dev->stream, &products);
    if (a->gelu_x == NULL)
        return;
    const struct mb_gelu gelu = {.x = a->gelu_x,
                                 .d_out = a->d_x,
                                 .out = a->d_x,
                                 .n = a->n_rows * a->n_in,
                                 .form = a->form,
                                 .dtype = a->dtype};
    dev->ops->gelu_backward(dev->ctx, dev->stream, &gelu);
}
