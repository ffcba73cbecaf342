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
 * fault. "+=" in a comment means that the operation adds to what is there. A token is a row: row =
 * sample * seq + position. Shapes are the caller's promise (assert), sizes that come from people
 * are checked where the model is created. Threads: a context is used by one thread at a time.
 */
#ifndef MOBULA_WORKER_KERNELS_OP_H
#define MOBULA_WORKER_KERNELS_OP_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum { MB_BACKEND_ABI = 1 }; /* raised with every change of this header */

enum mb_dtype { MB_DTYPE_F32 = 0, MB_DTYPE_BF16 = 1 };

struct mb_context; /* one open device, defined by the backend */
struct mb_stream;  /* one ordered queue of operations, defined by the backend */

/* Dropout. Element e of site s in iteration i is kept or not as a pure function of (seed, i, s, e),
 * so that it does not depend on how samples are spread over ranks. probability 0 switches it off.
 */
struct mb_dropout {
    uint64_t seed;
    uint32_t iteration;
    uint32_t site;          /* which of the model's dropouts: layer and place */
    uint64_t first_element; /* global index of the tensor's first element */
    float probability;      /* of dropping, [0, 1) */
};

/* out[t] = tokens_weight[token[t]] + position_weight[t % seq] */
struct mb_embedding_forward {
    const int32_t *token;         /* [n_tokens], each in [0, vocab) */
    const float *token_weight;    /* [vocab, hidden] */
    const float *position_weight; /* [>= seq, hidden] */
    float *out;                   /* [n_tokens, hidden] */
    size_t n_tokens, seq, hidden, vocab;
};

struct mb_embedding_backward {
    const int32_t *token;     /* [n_tokens] */
    const float *d_out;       /* [n_tokens, hidden] */
    float *d_token_weight;    /* += [vocab, hidden] */
    float *d_position_weight; /* += [>= seq, hidden] */
    size_t n_tokens, seq, hidden, vocab;
};

/* LayerNorm over the last dimension: biased variance, eps inside the root. */
struct mb_layernorm_forward {
    const float *x;      /* [n_rows, hidden] */
    const float *weight; /* [hidden] */
    const float *bias;   /* [hidden] */
    float *out;          /* [n_rows, hidden] */
    float *mean;         /* [n_rows], kept for backward */
    float *rstd;         /* [n_rows], 1 / sqrt(variance + eps), kept for backward */
    size_t n_rows, hidden;
    float eps;
};

struct mb_layernorm_backward {
    const float *x;      /* [n_rows, hidden] */
    const float *weight; /* [hidden] */
    const float *mean;   /* [n_rows] */
    const float *rstd;   /* [n_rows] */
    const float *d_out;  /* [n_rows, hidden] */
    float *d_x;          /* += [n_rows, hidden] */
    float *d_weight;     /* += [hidden] */
    float *d_bias;       /* += [hidden] */
    size_t n_rows, hidden;
};

/* out = x weight^T + bias */
struct mb_linear_forward {
    const float *x;      /* [n_rows, n_in] */
    const float *weight; /* [n_out, n_in] */
    const float *bias;   /* [n_out], or NULL */
    float *out;          /* [n_rows, n_out] */
    size_t n_rows, n_in, n_out;
};

struct mb_linear_backward {
    const float *x;      /* [n_rows, n_in] */
    const float *weight; /* [n_out, n_in] */
    const float *d_out;  /* [n_rows, n_out] */
    float *d_x;          /* = [n_rows, n_in] */
    float *d_weight;     /* += [n_out, n_in] */
    float *d_bias;       /* += [n_out], or NULL */
    size_t n_rows, n_in, n_out;
};

enum mb_gelu_form { MB_GELU_TANH = 0, MB_GELU_ERF = 1 };

/* forward: out = gelu(x); backward: out = d_out * gelu'(x), out may be d_out. */
struct mb_gelu {
    const float *x;     /* [n] */
    const float *d_out; /* [n], backward only */
    float *out;         /* [n] */
    size_t n;
    enum mb_gelu_form form;
};

/* out = residual + dropout(x). Without residual it is dropout alone, which is also its own
 * backward: applied to the gradient with the same mb_dropout. out may be x or residual. */
struct mb_dropout_add {
    const float *x;        /* [n] */
    const float *residual; /* [n], or NULL */
    float *out;            /* [n] */
    size_t n;
    struct mb_dropout dropout;
};

/* Causal self-attention, softmax(q k^T / sqrt(head_dim)) v, dropout after the softmax. A row of qkv
 * holds, per query group, the queries of its heads, then one key, then one value (Megatron's
 * linear_qkv). dropout.first_element counts score elements [sample, head, seq, seq]. */
struct mb_attention_shape {
    size_t n_samples, seq, n_heads, n_groups, head_dim; /* n_groups divides n_heads */
};

struct mb_attention_forward {
    struct mb_attention_shape shape;
    const float *qkv; /* [n_samples * seq, (n_heads + 2 * n_groups) * head_dim] */
    float *out;       /* [n_samples * seq, n_heads * head_dim] */
    float *log_sum;   /* [n_samples, n_heads, seq]: log of the softmax's denominator */
    float *scratch;   /* attention_scratch() floats */
    struct mb_dropout dropout;
};

struct mb_attention_backward {
    struct mb_attention_shape shape;
    const float *qkv, *out, *log_sum; /* of the forward call */
    const float *d_out;               /* shaped as out */
    float *d_qkv;                     /* = shaped as qkv */
    float *scratch;                   /* attention_scratch() floats */
    struct mb_dropout dropout;        /* that of the forward call */
};

/* The output layer and its loss in one: logits = x weight^T, cross entropy over all vocab rows
 * (rows that only pad the vocabulary are logits as well). The logits [n_tokens, vocab] never exist
 * as a whole. loss_sum gains the sum over tokens of mask * loss. With d_x the gradient of
 * grad_scale * that sum is computed too. */
struct mb_cross_entropy {
    const float *x;       /* [n_tokens, hidden] */
    const float *weight;  /* [vocab, hidden] */
    const int32_t *label; /* [n_tokens], each in [0, vocab) */
    const float *mask;    /* [n_tokens] */
    double *loss_sum;     /* += [1] */
    float *d_x;           /* = [n_tokens, hidden], or NULL: loss only */
    float *d_weight;      /* += [vocab, hidden], NULL with d_x */
    float *scratch;       /* cross_entropy_scratch() floats */
    size_t n_tokens, hidden, vocab;
    float grad_scale;
};

/* AdamW with decoupled weight decay and bias correction over segments of flat buffers:
 *   g = grad_scale * grad;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
 *   w -= lr * (m / (1 - b1^step) / (sqrt(v / (1 - b2^step)) + eps) + decay * w) */
struct mb_segment {
    size_t begin, end; /* elements of weight and grad; state element = element - state_begin */
    int decay;         /* 1: weight_decay applies */
};

struct mb_adamw {
    float *weight;               /* whole parameter buffer */
    const float *grad;           /* whole gradient buffer */
    float *exp_avg, *exp_avg_sq; /* the shard's state, its first element is state_begin */
    size_t state_begin;
    const struct mb_segment *segments; /* host, [n_segments] */
    size_t n_segments;
    int64_t step; /* from 1 */
    double lr, beta1, beta2, eps, weight_decay;
    float grad_scale; /* clipping coefficient */
};

struct mb_backend {
    uint32_t abi;     /* MB_BACKEND_ABI of the build; always the first field */
    const char *name; /* "cpu", "cuda" */

    /* --- life and memory. These fail at once, through err. --- */
    int (*open)(int device_index, struct mb_context **out, struct mb_err *err);
    void (*close)(
        struct mb_context *ctx); /* NULL is legal; frees what alloc gave and still lives */
    /* One line for the log: device, matrix library, threads. Valid until close. */
    const char *(*describe)(struct mb_context *ctx);
    int (*alloc)(struct mb_context *ctx, size_t size_bytes, void **out, struct mb_err *err);
    void (*free)(struct mb_context *ctx, void *p); /* NULL is legal */
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
    void (*linear_forward)(struct mb_context *, struct mb_stream *,
                           const struct mb_linear_forward *);
    void (*linear_backward)(struct mb_context *, struct mb_stream *,
                            const struct mb_linear_backward *);
    void (*gelu_forward)(struct mb_context *, struct mb_stream *, const struct mb_gelu *);
    void (*gelu_backward)(struct mb_context *, struct mb_stream *, const struct mb_gelu *);
    void (*dropout_add)(struct mb_context *, struct mb_stream *, const struct mb_dropout_add *);
    void (*attention_forward)(struct mb_context *, struct mb_stream *,
                              const struct mb_attention_forward *);
    void (*attention_backward)(struct mb_context *, struct mb_stream *,
                               const struct mb_attention_backward *);
    void (*cross_entropy)(struct mb_context *, struct mb_stream *, const struct mb_cross_entropy *);
    void (*adamw)(struct mb_context *, struct mb_stream *, const struct mb_adamw *);
    /* sum += the squares of x[0..n), accumulated in double */
    void (*squared_norm)(struct mb_context *, struct mb_stream *, const float *x, size_t n,
                         double *sum);
    /* x *= a */
    void (*scale)(struct mb_context *, struct mb_stream *, float *x, size_t n, float a);
    /* y += a x */
    void (*axpy)(struct mb_context *, struct mb_stream *, float *y, const float *x, size_t n,
                 float a);
};

/* The one symbol that a backend exports. */
const struct mb_backend *mb_backend_table(void);

#endif
