/*
 * The table of operations: everything the trainer asks of a device.
 *
 * A backend is a shared object that exports mb_backend_table(); backend.h opens it. Every operation
 * takes the device's context and a stream and may return before it has run: operations of one
 * stream run in the order of the calls, and a failure (a fault of the device, a matrix product that
 * refused) is kept and returned by the next synchronize() of that stream. So operations return
 * nothing, and a caller never reads results before synchronize(). The argument struct of a call is
 * read before the call returns; the memory it points to must stay until the stream is synchronised.
 *
 * Pointers in argument structs are device memory from alloc() unless a comment says host. Matrices
 * are row-major and dense. A token or label outside the vocabulary makes the operation fail, not
 * fault. Where the vocabulary is spread over ranks, weights have the rows [first, first + vocab) of
 * a vocabulary of all_vocab, and ids lie below that; all_vocab 0: vocab is all of it, first is 0.
 * "+=" in a comment means that the operation adds to what is there. A token is a row: row =
 * sample * seq + position. A pointer to void is of the call's dtype: activations and their
 * gradients, and the weights of matrix products. Everything else is fp32 whatever the dtype:
 * statistics, gradients of weights, the optimizer's state; sums are formed in fp32 at least. Shapes
 * are the caller's promise (assert), and so is that a matrix begins at 16 bytes, as what alloc()
 * gives does; its rows, and flat ranges of fp32, may begin anywhere. Sizes that come from people
 * are checked where the model is created. Threads: a context is used by one thread at a time, but
 * for copy_out(), join() and synchronize() on a stream that no other thread uses: an asynchronous
 * save reads memory that the operations running meanwhile do not change.
 */
#ifndef MOBULA_WORKER_KERNELS_OP_H
#define MOBULA_WORKER_KERNELS_OP_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum { MB_BACKEND_ABI = 15 }; /* raised with every change of this header */

enum mb_dtype { MB_DTYPE_F32 = 0, MB_DTYPE_BF16 = 1, MB_DTYPE_F16 = 2 };

static inline size_t mb_dtype_size(enum mb_dtype dtype)
{
    return dtype == MB_DTYPE_F32 ? 4 : 2;
}

/* The vocabulary's size where `vocab` rows of it are here. */
static inline size_t mb_all_vocab(size_t all_vocab, size_t vocab)
{
    return all_vocab > 0 ? all_vocab : vocab;
}

/* What a backend may lack: the model asks before it is made, and names what is missing. */
enum mb_feature {
    MB_FEATURE_RMSNORM = 1,
    MB_FEATURE_SWIGLU = 2,
    MB_FEATURE_ROPE = 4,
    MB_FEATURE_NO_POSITIONS = 8,    /* embeddings without weights of positions */
    MB_FEATURE_SPREAD_SAMPLES = 16, /* attention where a sample's rows are on several ranks */
    MB_FEATURE_FP8 = 32             /* products in fp8; the device has a say, too: fp8_check() */
};

struct mb_context;     /* one open device, defined by the backend */
struct mb_stream;      /* one ordered queue of operations, defined by the backend */
struct mb_graph;       /* operations that were captured, defined by the backend */
struct mb_collectives; /* collective.h */

/* What is another number each time that captured operations run (graph_begin); device memory, read
 * when they run. */
struct mb_pass {
    uint64_t first_sample; /* of the global batch's, sample 0 of this pass */
    uint32_t iteration;
    float grad_scale;
};

/* Dropout. Element e of site s in iteration i is kept or not as a pure function of (seed, i, s, e),
 * so that it does not depend on how samples are spread over ranks. probability 0 switches it off.
 */
struct mb_dropout {
    uint64_t seed;
    uint32_t iteration;
    uint32_t site;          /* which of the model's dropouts: layer and place */
    uint64_t first_element; /* global index of the tensor's first element */
    float probability;      /* of dropping, [0, 1) */
    /* NULL, or the iteration is pass->iteration, and first_element that of the pass's first sample,
     * whose elements come behind those of the samples before, so many each. */
    const struct mb_pass *pass;
    uint64_t sample_elements;
};

/* As it is now, pass NULL; where device memory is the host's. */
static inline struct mb_dropout mb_dropout_now(const struct mb_dropout *d)
{
    struct mb_dropout now = *d;
    if (d->pass != NULL) {
        now.iteration = d->pass->iteration;
        now.first_element += d->pass->first_sample * d->sample_elements;
        now.pass = NULL;
    }
    return now;
}

/* out[t] = token_weight[token[t]] + position_weight[t % seq], or the first alone; zeros for a token
 * whose row is another rank's, so that the sum over ranks is what one rank would have made */
struct mb_embedding_forward {
    const int32_t *token;         /* [n_tokens], each below the vocabulary's size */
    const float *token_weight;    /* [vocab, hidden], or NULL: both weights are in halves */
    const float *position_weight; /* [>= seq, hidden], or NULL */
    /* The halves (split.h), shaped as the weights; NULL where those are not. */
    const uint16_t *token_upper, *token_lower, *position_upper, *position_lower;
    void *out; /* [n_tokens, hidden] */
    size_t n_tokens, seq, hidden, vocab;
    size_t first, all_vocab;
    enum mb_dtype dtype;
};

struct mb_embedding_backward {
    const int32_t *token;     /* [n_tokens] */
    const void *d_out;        /* [n_tokens, hidden] */
    float *d_token_weight;    /* += [vocab, hidden] */
    float *d_position_weight; /* += [>= seq, hidden], or NULL; of all tokens */
    size_t n_tokens, seq, hidden, vocab;
    size_t first, all_vocab;
    enum mb_dtype dtype;
};

/* LayerNorm over the last dimension: biased variance, eps inside the root. */
struct mb_layernorm_forward {
    const void *x;       /* [n_rows, hidden] */
    const float *weight; /* [hidden] */
    const float *bias;   /* [hidden] */
    void *out;           /* [n_rows, hidden] */
    float *mean;         /* [n_rows], kept for backward */
    float *rstd;         /* [n_rows], 1 / sqrt(variance + eps), kept for backward */
    size_t n_rows, hidden;
    float eps;
    enum mb_dtype dtype;
};

struct mb_layernorm_backward {
    const void *x;       /* [n_rows, hidden] */
    const float *weight; /* [hidden] */
    const float *mean;   /* [n_rows] */
    const float *rstd;   /* [n_rows] */
    const void *d_out;   /* [n_rows, hidden] */
    void *d_x;           /* += [n_rows, hidden] */
    float *d_weight;     /* += [hidden] */
    float *d_bias;       /* += [hidden] */
    float *d_x_sum;      /* += [hidden], d_x as it is now summed over rows, or NULL: the bias
                            gradient of the linear layer before, whose rows are in hand */
    size_t n_rows, hidden;
    enum mb_dtype dtype;
};

/* RMSNorm over the last dimension: out = x * weight / sqrt(mean of x^2 + eps). */
struct mb_rmsnorm_forward {
    const void *x;       /* [n_rows, hidden] */
    const float *weight; /* [hidden] */
    void *out;           /* [n_rows, hidden] */
    float *rstd;         /* [n_rows], 1 / sqrt(mean of x^2 + eps), kept for backward */
    float *amax;         /* of out (struct mb_fp8_scale), or NULL; bf16 with MB_FEATURE_FP8 */
    size_t n_rows, hidden;
    float eps;
    enum mb_dtype dtype;
};

struct mb_rmsnorm_backward {
    const void *x;       /* [n_rows, hidden] */
    const float *weight; /* [hidden] */
    const float *rstd;   /* [n_rows] */
    const void *d_out;   /* [n_rows, hidden] */
    void *d_x;           /* += [n_rows, hidden] */
    float *d_weight;     /* += [hidden] */
    float *amax;         /* of d_x as it is now, as above */
    size_t n_rows, hidden;
    enum mb_dtype dtype;
};

/*
 * Matrices in fp8. The numbers of one matrix are multiplied with a power of two, 2^s, before they
 * are rounded (to nearest even): s is the largest from -126 to 126 for which amax, the magnitude of
 * its largest number, still fits the format, less margin; 0 where all are 0. Of a matrix with an
 * infinite number or a NaN the inverse, 2^-s, is NaN, and so is every product with it.
 * e4m3 has numbers to 448 and three bits behind the first, e5m2 to 57344 and two.
 */
enum mb_fp8_format { MB_FP8_NONE = 0, MB_FP8_E4M3 = 1, MB_FP8_E5M2 = 2 };

struct mb_fp8_scale { /* in device memory */
    float amax;       /* operations that have it as argument make it larger where they have to */
    /* 2^-s, written by fp8_quantize; where cuBLASLt takes it from */
    float inverse __attribute__((aligned(16)));
};

/* The same matrix twice, as products want it: the dimension that is summed over last. Each of
 * rows and columns begins at 16 bytes; both dimensions are multiples of 16. */
struct mb_fp8_matrix {
    uint8_t *rows;    /* [n_rows, n_columns] */
    uint8_t *columns; /* [n_columns, n_rows] */
    struct mb_fp8_scale *scale;
    enum mb_fp8_format format;
};

/* amax = the larger of itself and the magnitudes of x[0..n); a NaN is larger than all */
struct mb_fp8_amax {
    const void *x; /* bf16 [n] */
    float *amax;
    size_t n;
};

/* out = x, with out.scale->amax as it is; rows or columns that are NULL are not written. */
struct mb_fp8_quantize {
    const void *x; /* bf16 [n_rows, n_columns] */
    struct mb_fp8_matrix out;
    size_t n_rows, n_columns;
    int margin;
};

/* As mb_linear_forward in bf16, but that x and weight are in fp8: x.rows and weight.rows are read.
 * Sums are formed in what the device calls fast accumulation. */
struct mb_fp8_linear_forward {
    struct mb_fp8_matrix x, weight; /* [n_rows, n_in], [n_out, n_in] */
    const void *bias;               /* [n_out], or NULL */
    const void *residual;           /* [n_rows, n_out], or NULL; not out itself */
    void *out;                      /* [n_rows, n_out] */
    size_t n_rows, n_in, n_out;
};

/* As mb_linear_backward without GELU; x.columns, weight.columns and both of d_out's are read. Sums
 * are formed in fp32. */
struct mb_fp8_linear_backward {
    struct mb_fp8_matrix x, weight, d_out; /* not both of x and d_out are in e5m2 */
    const void *bf16_d_out;                /* [n_rows, n_out], for d_bias */
    void *d_x;                             /* = [n_rows, n_in], bf16 */
    float *d_weight;                       /* += [n_out, n_in], or = */
    int sets_d_weight;
    float *d_bias; /* += [n_out], or NULL */
    size_t n_rows, n_in, n_out;
};

enum mb_gelu_form { MB_GELU_TANH = 0, MB_GELU_ERF = 1 };

/* out = x weight^T + bias + residual. With gelu_out, which excludes a residual, gelu(out) is
 * written there as well. */
struct mb_linear_forward {
    const void *x;        /* [n_rows, n_in] */
    const void *weight;   /* [n_out, n_in] */
    const void *bias;     /* [n_out], or NULL */
    const void *residual; /* [n_rows, n_out], or NULL; not out itself */
    void *out;            /* [n_rows, n_out] */
    void *gelu_out;       /* [n_rows, n_out], or NULL */
    size_t n_rows, n_in, n_out;
    enum mb_gelu_form form;
    enum mb_dtype dtype;
};

/* With gelu_x, x was gelu(gelu_x), and d_x is the gradient of gelu_x. Of d_x, and d_weight with
 * d_bias, one may be NULL: that is left out. */
struct mb_linear_backward {
    const void *x;      /* [n_rows, n_in] */
    const void *gelu_x; /* [n_rows, n_in], or NULL */
    const void *weight; /* [n_out, n_in] */
    const void *d_out;  /* [n_rows, n_out] */
    void *d_x;          /* = [n_rows, n_in], or NULL */
    float *d_weight;    /* += [n_out, n_in], or =, or NULL */
    int sets_d_weight;  /* 1: =, what was there is not read */
    float *d_bias;      /* += [n_out], or NULL */
    size_t n_rows, n_in, n_out;
    enum mb_gelu_form form;
    enum mb_dtype dtype;
};

/* forward: out = gelu(x); backward: out = d_out * gelu'(x), out may be d_out. */
struct mb_gelu {
    const void *x;     /* [n] */
    const void *d_out; /* [n], backward only */
    void *out;         /* [n] */
    size_t n;
    enum mb_gelu_form form;
    enum mb_dtype dtype;
};

/* The gated MLP's activation: a row of x holds n gates, then n values; out = silu(gate) * value
 * with silu(g) = g / (1 + exp(-g)). */
struct mb_swiglu_forward {
    const void *x; /* [n_rows, 2 n] */
    void *out;     /* [n_rows, n] */
    float *amax;   /* of out, as mb_rmsnorm_forward's */
    size_t n_rows, n;
    enum mb_dtype dtype;
};

struct mb_swiglu_backward {
    const void *x;     /* [n_rows, 2 n] */
    const void *d_out; /* [n_rows, n] */
    void *d_x;         /* = [n_rows, 2 n] */
    float *amax;       /* of d_x, as above */
    size_t n_rows, n;
    enum mb_dtype dtype;
};

/* out = residual + dropout(x). Without residual it is dropout alone, which is also its own
 * backward: applied to the gradient with the same mb_dropout. out may be x or residual. */
struct mb_dropout_add {
    const void *x;        /* [n] */
    const void *residual; /* [n], or NULL */
    void *out;            /* [n] */
    size_t n;
    struct mb_dropout dropout;
    enum mb_dtype dtype;
};

/* Causal self-attention, softmax(q k^T / sqrt(head_dim)) v, dropout after the softmax. A row of qkv
 * holds, per query group, the queries of its heads, then one key, then one value (Megatron's
 * linear_qkv). dropout.first_element counts score elements [sample, head, seq, seq]. */
struct mb_attention_shape {
    size_t n_samples, seq, n_heads, n_groups, head_dim; /* n_groups divides n_heads */
};

/* Rotary positions, in place on the queries and keys of qkv (values stay): of each head the first
 * rotary_dim channels are taken as pairs (c, c + rotary_dim / 2), and the row of position p turns
 * pair c by the angle whose cosine and sine are cosine[p][c] and sine[p][c]:
 *   a' = a cos - b sin;  b' = b cos + a sin
 * The gradient goes through the same turn backwards: with inverse the angle is negative, on d_qkv.
 * Cosine and sine are rounded to the dtype, products are formed in fp32. */
struct mb_rope {
    struct mb_attention_shape shape;
    void *qkv;           /* [n_samples * seq, (n_heads + 2 * n_groups) * head_dim] */
    const float *cosine; /* [seq, rotary_dim / 2] */
    const float *sine;   /* [seq, rotary_dim / 2] */
    size_t rotary_dim;   /* even, from 2 to head_dim */
    int inverse;
    enum mb_dtype dtype;
};

struct mb_attention_forward {
    struct mb_attention_shape shape;
    const void *qkv; /* [n_samples * seq, (n_heads + 2 * n_groups) * head_dim] */
    void *out;       /* [n_samples * seq, n_heads * head_dim] */
    float *log_sum;  /* [n_samples, n_heads, seq]: log of the softmax's denominator */
    float *scratch;  /* attention_scratch() floats */
    struct mb_dropout dropout;
    enum mb_dtype dtype;
};

struct mb_attention_backward {
    struct mb_attention_shape shape;
    const void *qkv, *out;     /* of the forward call */
    const float *log_sum;      /* of the forward call */
    const void *d_out;         /* shaped as out */
    void *d_qkv;               /* = shaped as qkv */
    float *scratch;            /* attention_scratch() floats */
    struct mb_dropout dropout; /* that of the forward call */
    enum mb_dtype dtype;
};

/*
 * The same attention where every sample's rows are spread over ranks, so many on each: a call sees
 * the queries of this rank and the keys and values of one, and the results of all calls are joined.
 * A rank has two stretches of each sample, seq / 2 rows each, the earlier one first. A query sees
 * the keys at its own position and before; the first forward call is with the rank's own, where
 * each sees one at least.
 */
struct mb_stretches {
    size_t first, second; /* positions in the sample of row 0 and of row seq / 2 */
};

struct mb_attention_part {
    struct mb_attention_shape shape; /* seq: rows of a sample on one rank, even */
    struct mb_stretches queries, keys;
    const void *qkv; /* as above; of it the queries are read */
    const void *kv;  /* [n_samples * seq, 2 * n_groups * head_dim], per group a key, then a value */
    float *scratch;  /* attention_scratch() floats */
    /* dropout.first_element counts score elements [sample, head, seq, seq] of whole samples and of
     * all_heads heads, of which the first here is the first. */
    size_t all_heads, all_seq;
    struct mb_dropout dropout;
    enum mb_dtype dtype;
};

/* out and log_sum become those over the keys of this call, and with joins over those of the calls
 * before as well. */
struct mb_attention_part_forward {
    struct mb_attention_part part;
    void *out;
    float *log_sum; /* [n_samples, n_heads, seq] */
    int joins;
};

/* With what all forward calls gave together. */
struct mb_attention_part_backward {
    struct mb_attention_part part;
    const void *out, *d_out;
    const float *log_sum;
    void *d_qkv; /* shaped as qkv: of the queries = or, with joins, +=; the rest is left alone */
    float *d_kv; /* = shaped as kv, fp32: this call's share of a sum over ranks */
    int joins;
};

/* Between qkv, or its gradient, and a matrix of keys and values alone. */
struct mb_keys_values {
    struct mb_attention_shape shape;
    void *qkv;
    void *kv; /* as above; fp32 where it is a gradient */
    enum mb_dtype dtype;
};

/* The output layer and its loss in one: logits = x weight^T, cross entropy over all vocab rows
 * (rows that only pad the vocabulary are logits as well). The logits [n_tokens, vocab] never exist
 * as a whole. loss_sum gains the sum over tokens of mask * loss. With d_x the gradient of
 * grad_scale * that sum is computed too.
 *
 * Where the vocabulary is spread over n_parts ranks it takes two calls. The first, with part
 * statistics, only writes its own: part[0][t] = log of the sum of exp(logit) over its rows,
 * part[1][t] = the label's logit, 0 if another rank has it. The second has those of all ranks in
 * parts: loss_sum gains the whole loss on every rank, d_x is this rank's share of a sum over ranks.
 */
struct mb_cross_entropy {
    const void *x;        /* [n_tokens, hidden] */
    const void *weight;   /* [vocab, hidden] */
    const int32_t *label; /* [n_tokens], each below the vocabulary's size */
    const float *mask;    /* [n_tokens] */
    double *loss_sum;     /* += [1] */
    void *d_x;            /* = [n_tokens, hidden], or NULL: loss only */
    float *d_weight;      /* += [vocab, hidden], or =; NULL with d_x */
    int sets_d_weight;    /* 1: =, what was there is not read */
    float *scratch;       /* cross_entropy_scratch() floats */
    float *part;          /* = [2, n_tokens]: the first of two calls; else NULL */
    const float *parts;   /* [n_parts, 2, n_tokens]: the second of two calls; else NULL */
    size_t n_parts;
    size_t n_tokens, hidden, vocab;
    size_t first, all_vocab;
    float grad_scale;
    const struct mb_pass *pass; /* NULL, or grad_scale is pass->grad_scale */
    enum mb_dtype dtype;
};

/* AdamW with decoupled weight decay and bias correction over segments of flat buffers:
 *   g = grad_scale * grad;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
 *   w -= lr * (m / (1 - b1^step) / (sqrt(v / (1 - b2^step)) + eps) + decay * w) */
struct mb_segment {
    size_t begin, end; /* elements of weight and grad; state element = element - state_begin */
    int decay;         /* 1: weight_decay applies */
};

struct mb_adamw {
    float *weight;               /* whole parameter buffer, or NULL: it is in halves */
    uint16_t *upper, *lower;     /* the halves (split.h), flat as weight; NULL with weight */
    const float *grad;           /* whole gradient buffer */
    float *exp_avg, *exp_avg_sq; /* the shard's state, its first element is state_begin */
    size_t state_begin;
    const struct mb_segment *segments; /* host, [n_segments] */
    size_t n_segments;
    int64_t step; /* from 1 */
    double lr, beta1, beta2, eps, weight_decay;
    float grad_scale; /* clipping coefficient */
};

/* SGD with momentum over segments of flat buffers, weight decay as part of the gradient
 * (torch.optim.SGD):
 *   g = grad_scale * grad + decay * w;  b = momentum b + g;  w -= lr * b */
struct mb_sgd {
    float *weight; /* as mb_adamw's, and so are the next six */
    uint16_t *upper, *lower;
    const float *grad;
    float *momentum_buffer;
    size_t state_begin;
    const struct mb_segment *segments;
    size_t n_segments;
    double lr, momentum, weight_decay;
    float grad_scale;
};

struct mb_backend {
    uint32_t abi;      /* MB_BACKEND_ABI of the build; always the first field */
    const char *name;  /* "cpu", "cuda" */
    uint32_t dtypes;   /* bit 1 << dtype: calls of that dtype are provided; fp32 always is */
    uint32_t features; /* of enum mb_feature; the ops of one that is missing are NULL */

    /* --- life and memory. These fail at once, through err. --- */
    int (*open)(int device_index, struct mb_context **out, struct mb_err *err);
    void (*close)(
        struct mb_context *ctx); /* NULL is legal; frees what alloc gave and still lives */
    /* One line for the log: device, matrix library, threads. Valid until close. */
    const char *(*describe)(struct mb_context *ctx);
    int (*alloc)(struct mb_context *ctx, size_t size_bytes, void **out, struct mb_err *err);
    void (*free)(struct mb_context *ctx, void *p); /* NULL is legal */
    /* What alloc() gave and free() did not take back, and the most that this ever was. */
    void (*allocated)(struct mb_context *ctx, size_t *now_bytes, size_t *most_bytes,
                      size_t *n_blocks);
    /* Of the device, everybody's use counted; NULL where it is the host's memory. */
    void (*memory)(struct mb_context *ctx, size_t *used_bytes, size_t *total_bytes);
    int (*stream_create)(struct mb_context *ctx, struct mb_stream **out, struct mb_err *err);
    void (*stream_destroy)(struct mb_context *ctx, struct mb_stream *stream);
    /* Wait for all operations of the stream; returns the first failure among them, once. */
    int (*synchronize)(struct mb_context *ctx, struct mb_stream *stream, struct mb_err *err);

    /* --- sizes, for the plan of memory at start. Floats. --- */
    size_t (*attention_scratch)(const struct mb_attention_shape *shape);
    size_t (*cross_entropy_scratch)(size_t n_tokens, size_t hidden, size_t vocab);

    /* --- movement. Host memory of copy_in is read before the call returns; that of copy_out is
     * written by the time synchronize() returns. --- */
    void (*copy_in)(struct mb_context *, struct mb_stream *, void *dst, const void *host,
                    size_t size_bytes);
    void (*copy_out)(struct mb_context *, struct mb_stream *, void *host, const void *src,
                     size_t size_bytes);
    void (*zero)(struct mb_context *, struct mb_stream *, void *dst, size_t size_bytes);

    /* --- operations --- */
    void (*embedding_forward)(struct mb_context *, struct mb_stream *,
                              const struct mb_embedding_forward *);
    void (*embedding_backward)(struct mb_context *, struct mb_stream *,
                               const struct mb_embedding_backward *);
    void (*layernorm_forward)(struct mb_context *, struct mb_stream *,
                              const struct mb_layernorm_forward *);
    void (*layernorm_backward)(struct mb_context *, struct mb_stream *,
                               const struct mb_layernorm_backward *);
    void (*rmsnorm_forward)(struct mb_context *, struct mb_stream *,
                            const struct mb_rmsnorm_forward *);
    void (*rmsnorm_backward)(struct mb_context *, struct mb_stream *,
                             const struct mb_rmsnorm_backward *);
    void (*linear_forward)(struct mb_context *, struct mb_stream *,
                           const struct mb_linear_forward *);
    void (*linear_backward)(struct mb_context *, struct mb_stream *,
                            const struct mb_linear_backward *);
    /* At once: 0, or MB_EUNSUPPORTED with what the device lacks. */
    int (*fp8_check)(struct mb_context *, struct mb_err *err);
    void (*fp8_amax)(struct mb_context *, struct mb_stream *, const struct mb_fp8_amax *);
    void (*fp8_quantize)(struct mb_context *, struct mb_stream *, const struct mb_fp8_quantize *);
    void (*fp8_linear_forward)(struct mb_context *, struct mb_stream *,
                               const struct mb_fp8_linear_forward *);
    void (*fp8_linear_backward)(struct mb_context *, struct mb_stream *,
                                const struct mb_fp8_linear_backward *);
    void (*gelu_forward)(struct mb_context *, struct mb_stream *, const struct mb_gelu *);
    void (*gelu_backward)(struct mb_context *, struct mb_stream *, const struct mb_gelu *);
    void (*swiglu_forward)(struct mb_context *, struct mb_stream *,
                           const struct mb_swiglu_forward *);
    void (*swiglu_backward)(struct mb_context *, struct mb_stream *,
                            const struct mb_swiglu_backward *);
    void (*rope)(struct mb_context *, struct mb_stream *, const struct mb_rope *);
    void (*dropout_add)(struct mb_context *, struct mb_stream *, const struct mb_dropout_add *);
    void (*attention_forward)(struct mb_context *, struct mb_stream *,
                              const struct mb_attention_forward *);
    void (*attention_backward)(struct mb_context *, struct mb_stream *,
                               const struct mb_attention_backward *);
    void (*attention_part_forward)(struct mb_context *, struct mb_stream *,
                                   const struct mb_attention_part_forward *);
    void (*attention_part_backward)(struct mb_context *, struct mb_stream *,
                                    const struct mb_attention_part_backward *);
    /* kv = what qkv has; and, of gradients, the other way: the queries of qkv are left alone */
    void (*keys_values_take)(struct mb_context *, struct mb_stream *,
                             const struct mb_keys_values *);
    void (*keys_values_put)(struct mb_context *, struct mb_stream *, const struct mb_keys_values *);
    void (*cross_entropy)(struct mb_context *, struct mb_stream *, const struct mb_cross_entropy *);
    void (*adamw)(struct mb_context *, struct mb_stream *, const struct mb_adamw *);
    void (*sgd)(struct mb_context *, struct mb_stream *, const struct mb_sgd *);
    /* *n_zeros += how many of x[0..n) are 0, of either sign */
    void (*count_zeros)(struct mb_context *, struct mb_stream *, const float *x, size_t n,
                        double *n_zeros);
    /* sum += the squares of x[0..n), accumulated in double */
    void (*squared_norm)(struct mb_context *, struct mb_stream *, const float *x, size_t n,
                         double *sum);
    /* x *= a */
    void (*scale)(struct mb_context *, struct mb_stream *, float *x, size_t n, float a);
    /* y += a x */
    void (*axpy)(struct mb_context *, struct mb_stream *, float *y, const float *x, size_t n,
                 float a);
    /* fp32 in halves (split.h), and back */
    void (*split)(struct mb_context *, struct mb_stream *, uint16_t *upper, uint16_t *lower,
                  const float *x, size_t n);
    void (*join)(struct mb_context *, struct mb_stream *, float *x, const uint16_t *upper,
                 const uint16_t *lower, size_t n);
    /* fp32 rounded to fp16, to nearest even, infinite beyond its largest number; both begin at 16
     * bytes */
    void (*narrow)(struct mb_context *, struct mb_stream *, uint16_t *out, const float *x,
                   size_t n);
    /* fp32 rounded to bf16, to nearest even, a NaN quiet; and back */
    void (*to_bf16)(struct mb_context *, struct mb_stream *, uint16_t *out, const float *x,
                    size_t n);
    void (*from_bf16)(struct mb_context *, struct mb_stream *, float *out, const uint16_t *x,
                      size_t n);

    /* --- operations that are enqueued again and again; NULL: this device has no such thing --- */
    /* 0, or it is as if nobody had asked. What the calling thread enqueues on the stream up to
     * graph_end() is kept instead of run, with its arguments; what those point to in device memory
     * is read when it runs. Only operations and zero(), each of a kind and shape that has run
     * before. */
    int (*graph_begin)(struct mb_context *, struct mb_stream *, struct mb_err *err);
    /* To be given to graph_destroy(). NULL: it failed, and nothing of it has run. */
    struct mb_graph *(*graph_end)(struct mb_context *, struct mb_stream *, struct mb_err *err);
    void (*graph_run)(struct mb_context *, struct mb_stream *, struct mb_graph *);
    void (*graph_destroy)(struct mb_context *, struct mb_graph *); /* NULL is legal */

    /* --- for a profiler that runs this process; NULL: nothing on this device would see it --- */
    /* Nested ranges of the calling thread's time; name is read before the call returns. */
    void (*range_begin)(struct mb_context *, const char *name);
    void (*range_end)(struct mb_context *);
    /* on 1: it is to record from here, 0: up to here. */
    int (*profiler)(struct mb_context *, int on, struct mb_err *err);

    /* Between devices of this kind; NULL: its memory is the host's, which moves data itself. */
    const struct mb_collectives *collectives;
};

/* The one symbol that a backend exports. */
const struct mb_backend *mb_backend_table(void);

#endif
