/*
 * Attention over this rank's heads.
 *
 * Dropout counts score elements [sample, head, seq, seq] over all heads of the model, so that what
 * is dropped does not depend on how heads are spread over ranks. An operation counts through its
 * samples without a gap: where heads of other ranks lie between them, each sample is a call.
 */
#include "worker/model/gpt_internal.h"

struct mb_attention_shape mb_gpt_attention_shape(const struct mb_gpt *m)
{
    return (struct mb_attention_shape){.n_samples = m->micro_batch,
                                       .seq = m->part.seq,
                                       .n_heads = m->part.n_heads,
                                       .n_groups = m->part.n_groups,
                                       .head_dim = m->c.head_dim};
}

struct mb_dropout mb_gpt_dropout_at(const struct mb_gpt_pass *p, float probability, uint32_t site,
                                    size_t elements_per_sample)
{
    if (p->step == NULL)
        return (struct mb_dropout){0};
    if (p->m->captures)
        return (struct mb_dropout){.seed = p->m->c.seed,
                                   .site = site,
                                   .probability = probability,
                                   .pass = p->m->pass,
                                   .sample_elements = elements_per_sample};
    return (struct mb_dropout){.seed = p->m->c.seed,
                               .iteration = (uint32_t)p->step->iteration,
                               .site = site,
                               .first_element = p->step->first_sample * elements_per_sample,
                               .probability = probability};
}

/* One call: samples [first, first + n_samples). */
struct call {
    struct mb_attention_shape shape;
    struct mb_dropout dropout;
    size_t qkv, out; /* bytes from the start */
    size_t log_sum;  /* elements */
};

static size_t n_calls(const struct mb_gpt_pass *p)
{
    const struct mb_gpt *m = p->m;
    return m->n_parts > 1 && p->step != NULL && m->c.attention_dropout > 0 ? m->micro_batch : 1;
}

static struct call call_at(const struct mb_gpt_pass *p, size_t k, uint32_t site)
{
    const struct mb_gpt *m = p->m;
    const size_t head = m->c.seq * m->c.seq, n = m->micro_batch / n_calls(p), first = k * n;
    const size_t row_bytes = m->c.seq * mb_dtype_size(m->c.dtype);
    struct call a = {.shape = mb_gpt_attention_shape(m),
                     .dropout =
                         mb_gpt_dropout_at(p, m->c.attention_dropout, site, m->c.n_heads * head),
                     .qkv = first * row_bytes * mb_gpt_qkv_width(&m->part),
                     .out = first * row_bytes * mb_gpt_attention_width(&m->part),
                     .log_sum = first * m->c.seq * m->part.n_heads};
    a.shape.n_samples = n;
    a.dropout.first_element += (first * m->c.n_heads + m->own_part * m->part.n_heads) * head;
    return a;
}

void mb_gpt_attention_forward(const struct mb_gpt_pass *p, const struct mb_gpt_layer *y,
                              uint32_t site)
{
    const struct mb_gpt *m = p->m;
    if (m->n_contexts > 1) {
        mb_gpt_ring_forward(p, y, site);
        return;
    }
    for (size_t k = 0; k < n_calls(p); k++) {
        const struct call at = call_at(p, k, site);
        struct mb_attention_forward a = {.shape = at.shape,
                                         .qkv = (const char *)y->qkv_out + at.qkv,
                                         .out = (char *)y->attention_out + at.out,
                                         .log_sum = y->log_sum + at.log_sum,
                                         .scratch = m->attention_scratch,
                                         .dropout = at.dropout,
                                         .dtype = m->c.dtype};
        m->dev->ops->attention_forward(m->dev->ctx, m->dev->stream, &a);
    }
}

void mb_gpt_attention_backward(const struct mb_gpt_pass *p, const struct mb_gpt_layer *y,
                               uint32_t site)
{
    const struct mb_gpt *m = p->m;
    if (m->n_contexts > 1) {
        mb_gpt_ring_backward(p, y, site);
        return;
    }
    for (size_t k = 0; k < n_calls(p); k++) {
        const struct call at = call_at(p, k, site);
        struct mb_attention_backward a = {.shape = at.shape,
                                          .qkv = (const char *)y->qkv_out + at.qkv,
                                          .out = (const char *)y->attention_out + at.out,
                                          .log_sum = y->log_sum + at.log_sum,
                                          .d_out = (const char *)m->d_b + at.out,
                                          .d_qkv = (char *)m->d_qkv + at.qkv,
                                          .scratch = m->attention_scratch,
                                          .dropout = at.dropout,
                                          .dtype = m->c.dtype};
        m->dev->ops->attention_backward(m->dev->ctx, m->dev->stream, &a);
    }
}
