/*
 * Operations in fp16 (half.h). Each is the same three steps:
 *  1. a list of its operands with their sizes: which are read, which are written;
 *  2. those that are read, widened; the operation of fp32 on a copy of its struct;
 *  3. those that were written, rounded.
 * Failure: memory for the operands is refused; the stream fails and nothing is computed.
 */
#include "worker/kernels/cpu/half.h"

#include <assert.h>
#include "base/half.h"

enum use { READS = 1, WRITES = 2, ROUNDS = 4 /* of fp32: read as rounded to fp16 */ };

struct operand {
    const void *p; /* NULL: there is none */
    size_t n;
    enum use use;
    float *wide; /* NULL with p */
};

/* Without a branch, so that it becomes vector code; as mb_f16_float(). */
static inline float widen_one(uint16_t h)
{
    /* The bits as those of a number 2^112 times smaller; what is infinite stays so. */
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, size = (uint32_t)(h & 0x7fff) << 13;
    const uint32_t top = size >= 0x0f800000u ? 0x7f800000u : 0;
    const float scaled = mb_bits_float(size) * 0x1p112f;
    return mb_bits_float(sign | top | mb_float_bits(scaled));
}

static void widen_all(float *restrict out, const uint16_t *restrict x, size_t n)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++)
        out[i] = widen_one(x[i]);
}

/* Without a branch; as mb_float_f16(). */
static inline uint16_t narrow_one(float x)
{
    const uint32_t bits = mb_float_bits(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    const uint32_t normal = (size + 0xfff + (size >> 13 & 1) - 0x38000000u) >> 13;
    const uint32_t tiny = mb_float_bits(mb_bits_float(size) + 0.5f) - 0x3f000000u;
    uint32_t h = size < 0x38800000u ? tiny : normal;
    h = size >= 0x477ff000u ? 0x7c00u : h;
    h = size > 0x7f800000u ? 0x7e00u : h;
    return (uint16_t)(sign | h);
}

static void narrow_all(uint16_t *restrict out, const float *restrict x, size_t n)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++)
        out[i] = narrow_one(x[i]);
}

void MB_CPU(narrow)(struct mb_context *ctx, struct mb_stream *stream, uint16_t *out, const float *x,
                    size_t n)
{
    (void)ctx;
    (void)stream;
    narrow_all(out, x, n);
}

static size_t padded(const struct operand *o)
{
    return o->p != NULL ? (o->n + 15) / 16 * 16 : 0; /* the next one begins at 64 bytes */
}

/* 1: all of it is there to compute with. */
static int widen(struct mb_context *ctx, struct mb_stream *stream, struct operand *o,
                 size_t n_operands)
{
    size_t total = 0;
    for (size_t i = 0; i < n_operands; i++)
        total += padded(&o[i]);
    float *at = mb_cpu_room(ctx, stream, total);
    if (at == NULL)
        return 0;
    for (size_t i = 0; i < n_operands; i++) {
        if (o[i].p == NULL)
            continue;
        o[i].wide = at;
        at += padded(&o[i]);
        if (o[i].use & READS)
            widen_all(o[i].wide, o[i].p, o[i].n);
        for (size_t k = 0; k < o[i].n && o[i].use & ROUNDS; k++)
            o[i].wide[k] = widen_one(narrow_one(((const float *)o[i].p)[k]));
    }
    return 1;
}

static void narrow(const struct operand *o, size_t n_operands)
{
    for (size_t i = 0; i < n_operands; i++)
        if (o[i].p != NULL && o[i].use & WRITES)
            narrow_all((uint16_t *)(uintptr_t)o[i].p, o[i].wide, o[i].n);
}

#define COUNT(o) (sizeof(o) / sizeof((o)[0]))

/* What follows the list `o` of an operation, whose struct `b` is made from `o` in between. */
#define WIDEN()                                                                                    \
    do {                                                                                           \
        if (!widen(ctx, stream, o, COUNT(o)))                                                      \
            return;                                                                                \
        b.dtype = MB_DTYPE_F32;                                                                    \
    } while (0)
#define COMPUTE(op)                                                                                \
    do {                                                                                           \
        MB_CPU(op)(ctx, stream, &b);                                                               \
        narrow(o, COUNT(o));                                                                       \
    } while (0)

#define HALF(op, args)                                                                             \
    void MB_CPU(half_##op)(struct mb_context * ctx, struct mb_stream * stream, const struct args *a)

HALF(embedding_forward, mb_embedding_forward)
{
    struct mb_embedding_forward b = *a;
    struct operand o[] = {{a->out, a->n_tokens * a->hidden, WRITES, NULL}};
    if (mb_cpu_check_ids(stream, "token", a->token, a->n_tokens,
                         mb_all_vocab(a->all_vocab, a->vocab)) != 0)
        return; /* nothing is written */
    WIDEN();
    b.out = o[0].wide;
    COMPUTE(embedding_forward);
}

HALF(embedding_backward, mb_embedding_backward)
{
    struct mb_embedding_backward b = *a;
    struct operand o[] = {{a->d_out, a->n_tokens * a->hidden, READS, NULL}};
    WIDEN();
    b.d_out = o[0].wide;
    COMPUTE(embedding_backward);
}

HALF(layernorm_forward, mb_layernorm_forward)
{
    struct mb_layernorm_forward b = *a;
    const size_t n = a->n_rows * a->hidden;
    struct operand o[] = {{a->x, n, READS, NULL}, {a->out, n, WRITES, NULL}};
    WIDEN();
    b.x = o[0].wide;
    b.out = o[1].wide;
    COMPUTE(layernorm_forward);
}

HALF(layernorm_backward, mb_layernorm_backward)
{
    struct mb_layernorm_backward b = *a;
    const size_t n = a->n_rows * a->hidden;
    struct operand o[] = {
        {a->x, n, READS, NULL}, {a->d_out, n, READS, NULL}, {a->d_x, n, READS | WRITES, NULL}};
    WIDEN();
    b.x = o[0].wide;
    b.d_out = o[1].wide;
    b.d_x = o[2].wide;
    COMPUTE(layernorm_backward);
}

HALF(rmsnorm_forward, mb_rmsnorm_forward)
{
    struct mb_rmsnorm_forward b = *a;
    const size_t n = a->n_rows * a->hidden;
    struct operand o[] = {{a->x, n, READS, NULL}, {a->out, n, WRITES, NULL}};
    WIDEN();
    b.x = o[0].wide;
    b.out = o[1].wide;
    COMPUTE(rmsnorm_forward);
}

HALF(rmsnorm_backward, mb_rmsnorm_backward)
{
    struct mb_rmsnorm_backward b = *a;
    const size_t n = a->n_rows * a->hidden;
    struct operand o[] = {
        {a->x, n, READS, NULL}, {a->d_out, n, READS, NULL}, {a->d_x, n, READS | WRITES, NULL}};
    WIDEN();
    b.x = o[0].wide;
    b.d_out = o[1].wide;
    b.d_x = o[2].wide;
    COMPUTE(rmsnorm_backward);
}

HALF(linear_forward, mb_linear_forward)
{
    struct mb_linear_forward b = *a;
    const size_t n = a->n_rows * a->n_out;
    struct operand o[] = {{a->x, a->n_rows * a->n_in, READS, NULL},
                          {a->weight, a->n_out * a->n_in, READS, NULL},
                          {a->bias, a->n_out, READS, NULL},
                          {a->residual, n, READS, NULL},
                          {a->out, n, WRITES, NULL},
                          {a->gelu_out, n, WRITES, NULL}};
    WIDEN();
    b.x = o[0].wide;
    b.weight = o[1].wide;
    b.bias = o[2].wide;
    b.residual = o[3].wide;
    b.out = o[4].wide;
    b.gelu_out = o[5].wide;
    COMPUTE(linear_forward);
}

HALF(linear_backward, mb_linear_backward)
{
    struct mb_linear_backward b = *a;
    const size_t n_x = a->n_rows * a->n_in;
    struct operand o[] = {{a->x, n_x, READS, NULL},
                          {a->gelu_x, n_x, READS, NULL},
                          {a->weight, a->n_out * a->n_in, READS, NULL},
                          {a->d_out, a->n_rows * a->n_out, READS, NULL},
                          {a->d_x, n_x, WRITES, NULL}};
    WIDEN();
    b.x = o[0].wide;
    b.gelu_x = o[1].wide;
    b.weight = o[2].wide;
    b.d_out = o[3].wide;
    b.d_x = o[4].wide;
    COMPUTE(linear_backward);
}

HALF(gelu_forward, mb_gelu)
{
    struct mb_gelu b = *a;
    struct operand o[] = {{a->x, a->n, READS, NULL}, {a->out, a->n, WRITES, NULL}};
    WIDEN();
    b.x = o[0].wide;
    b.out = o[1].wide;
    COMPUTE(gelu_forward);
}

HALF(gelu_backward, mb_gelu)
{
    struct mb_gelu b = *a;
    struct operand o[] = {
        {a->x, a->n, READS, NULL}, {a->d_out, a->n, READS, NULL}, {a->out, a->n, WRITES, NULL}};
    WIDEN();
    b.x = o[0].wide;
    b.d_out = o[1].wide;
    b.out = o[2].wide;
    COMPUTE(gelu_backward);
}

HALF(swiglu_forward, mb_swiglu_forward)
{
    struct mb_swiglu_forward b = *a;
    const size_t n = a->n_rows * a->n;
    struct operand o[] = {{a->x, 2 * n, READS, NULL}, {a->out, n, WRITES, NULL}};
    WIDEN();
    b.x = o[0].wide;
    b.out = o[1].wide;
    COMPUTE(swiglu_forward);
}

HALF(swiglu_backward, mb_swiglu_backward)
{
    struct mb_swiglu_backward b = *a;
    const size_t n = a->n_rows * a->n;
    struct operand o[] = {
        {a->x, 2 * n, READS, NULL}, {a->d_out, n, READS, NULL}, {a->d_x, 2 * n, WRITES, NULL}};
    WIDEN();
    b.x = o[0].wide;
    b.d_out = o[1].wide;
    b.d_x = o[2].wide;
    COMPUTE(swiglu_backward);
}

HALF(dropout_add, mb_dropout_add)
{
    struct mb_dropout_add b = *a;
    struct operand o[] = {
        {a->x, a->n, READS, NULL}, {a->residual, a->n, READS, NULL}, {a->out, a->n, WRITES, NULL}};
    WIDEN();
    b.x = o[0].wide;
    b.residual = o[1].wide;
    b.out = o[2].wide;
    COMPUTE(dropout_add);
}

/* ---- attention ---- */

/* Elements of qkv, of out, and of keys and values alone. */
static size_t qkv_size(const struct mb_attention_shape *s)
{
    return s->n_samples * s->seq * (s->n_heads + 2 * s->n_groups) * s->head_dim;
}

static size_t out_size(const struct mb_attention_shape *s)
{
    return s->n_samples * s->seq * s->n_heads * s->head_dim;
}

static size_t kv_size(const struct mb_attention_shape *s)
{
    return s->n_samples * s->seq * 2 * s->n_groups * s->head_dim;
}

HALF(rope, mb_rope)
{
    struct mb_rope b = *a;
    const size_t n = a->shape.seq * a->rotary_dim / 2;
    struct operand o[] = {{a->qkv, qkv_size(&a->shape), READS | WRITES, NULL},
                          {a->cosine, n, ROUNDS, NULL},
                          {a->sine, n, ROUNDS, NULL}};
    WIDEN();
    b.qkv = o[0].wide;
    b.cosine = o[1].wide;
    b.sine = o[2].wide;
    COMPUTE(rope);
}

HALF(attention_forward, mb_attention_forward)
{
    struct mb_attention_forward b = *a;
    struct operand o[] = {{a->qkv, qkv_size(&a->shape), READS, NULL},
                          {a->out, out_size(&a->shape), WRITES, NULL}};
    WIDEN();
    b.qkv = o[0].wide;
    b.out = o[1].wide;
    COMPUTE(attention_forward);
}

HALF(attention_backward, mb_attention_backward)
{
    struct mb_attention_backward b = *a;
    struct operand o[] = {{a->qkv, qkv_size(&a->shape), READS, NULL},
                          {a->out, out_size(&a->shape), READS, NULL},
                          {a->d_out, out_size(&a->shape), READS, NULL},
                          {a->d_qkv, qkv_size(&a->shape), WRITES, NULL}};
    WIDEN();
    b.qkv = o[0].wide;
    b.out = o[1].wide;
    b.d_out = o[2].wide;
    b.d_qkv = o[3].wide;
    COMPUTE(attention_backward);
}

HALF(attention_part_forward, mb_attention_part_forward)
{
    struct mb_attention_part_forward f = *a;
    const struct mb_attention_shape *s = &a->part.shape;
    struct operand o[] = {{a->part.qkv, qkv_size(s), READS, NULL},
                          {a->part.kv, kv_size(s), READS, NULL},
                          {a->out, out_size(s), a->joins ? READS | WRITES : WRITES, NULL}};
    if (!widen(ctx, stream, o, COUNT(o)))
        return;
    f.part.dtype = MB_DTYPE_F32;
    f.part.qkv = o[0].wide;
    f.part.kv = o[1].wide;
    f.out = o[2].wide;
    MB_CPU(attention_part_forward)(ctx, stream, &f);
    narrow(o, COUNT(o));
}

HALF(attention_part_backward, mb_attention_part_backward)
{
    struct mb_attention_part_backward f = *a;
    const struct mb_attention_shape *s = &a->part.shape;
    struct operand o[] = {
        {a->part.qkv, qkv_size(s), READS, NULL},
        {a->part.kv, kv_size(s), READS, NULL},
        {a->out, out_size(s), READS, NULL},
        {a->d_out, out_size(s), READS, NULL},
        {a->d_qkv, qkv_size(s), READS | WRITES, NULL}, /* keys and values are left alone */
    };
    if (!widen(ctx, stream, o, COUNT(o)))
        return;
    f.part.dtype = MB_DTYPE_F32;
    f.part.qkv = o[0].wide;
    f.part.kv = o[1].wide;
    f.out = o[2].wide;
    f.d_out = o[3].wide;
    f.d_qkv = o[4].wide;
    MB_CPU(attention_part_backward)(ctx, stream, &f);
    narrow(o, COUNT(o));
}

HALF(keys_values_take, mb_keys_values)
{
    struct mb_keys_values b = *a;
    struct operand o[] = {{a->qkv, qkv_size(&a->shape), READS, NULL},
                          {a->kv, kv_size(&a->shape), WRITES, NULL}};
    WIDEN();
    b.qkv = o[0].wide;
    b.kv = o[1].wide;
    COMPUTE(keys_values_take);
}

/* Of gradients: kv is fp32. */
HALF(keys_values_put, mb_keys_values)
{
    struct mb_keys_values b = *a;
    struct operand o[] = {{a->qkv, qkv_size(&a->shape), READS | WRITES, NULL}};
    WIDEN();
    b.qkv = o[0].wide;
    COMPUTE(keys_values_put);
}

HALF(cross_entropy, mb_cross_entropy)
{
    struct mb_cross_entropy b = *a;
    const size_t n = a->n_tokens * a->hidden;
    struct operand o[] = {{a->x, n, READS, NULL},
                          {a->weight, a->vocab * a->hidden, READS, NULL},
                          {a->d_x, n, WRITES, NULL}};
    if (mb_cpu_check_ids(stream, "label", a->label, a->n_tokens,
                         mb_all_vocab(a->all_vocab, a->vocab)) != 0)
        return; /* nothing is written */
    WIDEN();
    b.x = o[0].wide;
    b.weight = o[1].wide;
    b.d_x = o[2].wide;
    COMPUTE(cross_entropy);
}
