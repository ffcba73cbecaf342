/* The model's inside, shared by its source files: gpt_config.c gpt_params.c gpt_draw.c gpt_plan.c
 * gpt_parts.c gpt_linear.c gpt_fp8.c gpt_attention.c gpt_ring.c gpt_group.c gpt_forward.c
 * gpt_backward.c gpt_graph.c gpt.c. */
#ifndef MOBULA_WORKER_MODEL_GPT_INTERNAL_H
#define MOBULA_WORKER_MODEL_GPT_INTERNAL_H

#include "worker/model/gpt.h"

/* A linear layer or a norm: places in the flat buffers. */
struct mb_gpt_pair {
    size_t weight, bias;
};

#define MB_GPT_NONE SIZE_MAX /* the offset of what the model does not have */

struct mb_gpt_norm_at {
    struct mb_gpt_pair at;
    size_t index; /* 2 layer, 2 layer + 1, the final norm last */
};

/* The linear layers of a layer. */
enum mb_gpt_linear { MB_GPT_QKV, MB_GPT_PROJ, MB_GPT_FC1, MB_GPT_FC2, MB_GPT_LINEARS };

/* What one pass needs beside the model; step NULL: no dropout. */
struct mb_gpt_pass {
    struct mb_gpt *m;
    const struct mb_gpt_step *step;
};

struct mb_gpt_layer {
    size_t begin, end; /* flat range of the layer's parameters */
    struct mb_gpt_norm_at norm1, norm2;
    struct mb_gpt_pair qkv, proj, fc1, fc2;

    /* Kept from forward for backward. */
    const void *in;       /* [rows, hidden], the out of the layer before; borrowed */
    void *norm1_out;      /* [tokens, hidden] */
    float *mean1, *rstd1; /* [rows]; no mean with RMSNorm */
    void *qkv_out;        /* [tokens, (heads + 2 groups) * head_dim] */
    float *log_sum;       /* [samples, heads, seq] */
    void *attention_out;  /* [tokens, heads * head_dim] */
    void *middle;         /* [rows, hidden], after the first residual */
    void *norm2_out;      /* [tokens, hidden] */
    float *mean2, *rstd2; /* [rows] */
    void *fc1_out;        /* [tokens, ffn_hidden], with swiglu twice as wide */
    void *activation;     /* [tokens, ffn_hidden] */
    void *out;            /* [rows, hidden], after the second residual */
    /* With fp8 the linear layers' input is kept in this form alone, by column [n_in, tokens], and
     * norm1_out, norm2_out and activation are one memory for all layers. */
    uint8_t *fp8_x[MB_GPT_LINEARS];
    struct mb_fp8_scale *fp8_x_scales; /* [MB_GPT_LINEARS] */
};                                     /* heads, groups and ffn_hidden: this rank's */

/* What a micro batch between its forward and its backward pass keeps. */
struct mb_gpt_slot {
    struct mb_gpt_layer *layers; /* this rank's; their parameters are the same in every slot, and
                                    what a chunk's keep is the first chunk's memory */
    int32_t *tokens;             /* [tokens], of the first stage */
    void *embedded;              /* [rows, hidden], what the first layer gets */
};

enum mb_gpt_captured {
    MB_GPT_FORWARD,
    MB_GPT_EVALUATION,
    MB_GPT_BACKWARD,
    MB_GPT_ZERO_GRADS,
    MB_GPT_WEIGHTS_CHANGED
};

/* Operations of one kind (gpt_graph.c). */
struct mb_gpt_graph {
    enum mb_gpt_captured what;
    struct mb_gpt_place at;
    int sets_grads;
    struct mb_graph *graph; /* NULL: they have run once, as they are */
};

struct mb_gpt {
    struct mb_device *dev;
    struct mb_gpt_config c;
    struct mb_gpt_config part;      /* the same with the sizes that this rank has */
    size_t n_parts, own_part;       /* ranks of the tensor group, and which of them this is */
    size_t n_contexts, own_context; /* the same of the context group */
    size_t micro_batch, n_tokens;   /* samples and own rows of a micro batch; part.seq a sample */
    size_t n_rows;                  /* of the residual stream: all but with sequence_parallel */
    size_t n_strips;                /* the tokens are worked on in so many, one after the other */
    uint64_t summed[MB_GPT_STRIPS_MAX], gathered[MB_GPT_STRIPS_MAX]; /* the group's marks */
    size_t n_chunks, chunk_layers; /* part.n_layers is their product */
    int is_first, is_last;         /* of the pipeline's stages; both: there is one */
    size_t n_slots;

    struct mb_param *params;
    size_t n_params, n_elements, n_parameters;
    size_t word_embedding, position_embedding, output_weight; /* flat offsets; of another stage:
                                                                 MB_GPT_NONE */
    struct mb_gpt_norm_at final_norm;
    size_t layers_end;         /* flat offset behind the last layer */
    struct mb_gpt_slot *slots; /* [n_slots]; their layers lie behind each other from the first's */
    struct mb_gpt_layer *layers; /* of the slot that is worked on, as tokens and embedded are */
    size_t chunk;                /* that is worked on */

    void *arena; /* one block of device memory; everything below lies in it */
    size_t arena_bytes;
    struct mb_gpt_plan_part plan[MB_GPT_PLAN_MAX];
    size_t n_plan;
    struct mb_master weights; /* in bf16 in halves */
    uint16_t *rounded;        /* in fp16, the weights for products [n_elements]; else NULL */
    float *grads;
    struct {                           /* with fp8 */
        struct mb_fp8_matrix *weights; /* host [part.n_layers][MB_GPT_LINEARS] */
        uint8_t *rows;                 /* of the operand that a product takes next */
        uint8_t *columns;              /* of a gradient */
        struct mb_fp8_scale *weight_scales, *d_scales; /* as weights; of the gradients of outputs */
    } fp8;
    float *cosine, *sine; /* [part.seq, rotary channels / 2], with MB_GPT_ROPE */
    float *norm_weights;  /* with norm_1p or halves [2 layers + 1, hidden]: what norms multiply
                             with; else NULL, it is the weights */
    float *norm_biases;   /* with halves, of LayerNorm, as norm_weights; else NULL */
    float *ones;          /* with norm_1p [hidden] */
    int32_t *tokens, *labels;
    float *mask;
    double *loss_sum;
    float *loss_parts;              /* [parts, 2, tokens], with several */
    void *embedded;                 /* [rows, hidden] */
    void *final_out;                /* [tokens, hidden] */
    float *final_mean, *final_rstd; /* [rows] */
    void *d_residuals[2];           /* [rows, hidden]; the second with several chunks */
    void *d_residual;               /* the one that is worked on */
    void *d_a;                      /* [tokens, hidden] */
    void *d_b;                      /* as attention_out */
    void *d_qkv, *d_fc1;            /* as qkv_out, fc1_out */
    void *d_activation;             /* as activation; d_fc1 itself but for swiglu */
    float *attention_scratch, *head_scratch;
    /* With several contexts: what has come round the ring, and what goes on while it is used. */
    void *ring_kv[2];    /* [tokens, 2 groups * head_dim] */
    float *ring_d_kv[3]; /* the same, and one's own share of it */

    /* In the chunks before this one gradients of products are what they were in the step before;
     * the next backward sets them. */
    size_t n_old_chunks;
    float *host_ones;       /* [samples * seq], the mask of a batch without one */
    int32_t *all_positions; /* host, [n_slots, tokens]: of the first stage with batch_positions;
                               else NULL */
    int32_t *positions;     /* of the slot that is worked on, or NULL */
    double mask_sum;        /* since the last take_loss */

    unsigned kinds_run; /* of passes: bits 1 << KIND */
    int tunes;          /* the pass that is enqueued is the first of its kind */

    int captures;         /* graphs are asked for and possible */
    struct mb_pass *pass; /* with graphs: of the pass that is enqueued next; device */
    struct mb_gpt_graph *graphs;
    size_t n_graphs, graphs_max;
    struct mb_err graph_failure; /* code 0: none; passes run as they are from there on */
};

/* Widths, in channels: of qkv, of the attention's output, of fc1's output. */
size_t mb_gpt_qkv_width(const struct mb_gpt_config *c);
size_t mb_gpt_attention_width(const struct mb_gpt_config *c);
size_t mb_gpt_fc1_width(const struct mb_gpt_config *c);

/* gpt_attention.c: of this rank's heads. */
struct mb_attention_shape mb_gpt_attention_shape(const struct mb_gpt *m);
/* From qkv_out to attention_out and log_sum; and from d_b to d_qkv. */
void mb_gpt_attention_forward(const struct mb_gpt_pass *p, const struct mb_gpt_layer *y,
                              uint32_t site);
void mb_gpt_attention_backward(const struct mb_gpt_pass *p, const struct mb_gpt_layer *y,
                               uint32_t site);
/* Of elements that every sample has so many of. */
struct mb_dropout mb_gpt_dropout_at(const struct mb_gpt_pass *p, float probability, uint32_t site,
                                    size_t elements_per_sample);

/* gpt_ring.c: the same with the keys and values of all ranks of a context group. */
void mb_gpt_ring_forward(const struct mb_gpt_pass *p, const struct mb_gpt_layer *y, uint32_t site);
/* As soon as qkv is there and attention's gradient comes next of what uses the ring. */
void mb_gpt_ring_backward_begin(const struct mb_gpt *m, const struct mb_gpt_layer *y);
void mb_gpt_ring_backward(const struct mb_gpt_pass *p, const struct mb_gpt_layer *y, uint32_t site);
/* Own rows from `row` on that follow each other in the micro batch's samples, too. */
struct mb_gpt_run {
    size_t n;        /* so many */
    size_t in_batch; /* row of the whole micro batch: sample * seq + position */
    size_t position; /* in its sample */
};
struct mb_gpt_run mb_gpt_run_at(const struct mb_gpt *m, size_t row);
/* Of those the ones whose positions, as the table of learned ones has them, follow each other. */
struct mb_gpt_run mb_gpt_embedded_run_at(const struct mb_gpt *m, size_t row);

static inline int mb_gpt_is_last_chunk(const struct mb_gpt *m)
{
    return m->is_last && m->chunk + 1 == m->n_chunks;
}

/* The selected chunk's layers, of this rank's, are from the one to before the other. */
static inline size_t mb_gpt_chunk_begin(const struct mb_gpt *m)
{
    return m->chunk * m->chunk_layers;
}
static inline size_t mb_gpt_chunk_end(const struct mb_gpt *m)
{
    return (m->chunk + 1) * m->chunk_layers;
}

/* The chunk that is worked on, among the whole model's. */
static inline int mb_gpt_is_first_chunk(const struct mb_gpt *m)
{
    return m->is_first && m->chunk == 0;
}

/* A strip of the tokens, and this rank's rows of it. */
struct mb_gpt_strip {
    size_t first, n; /* among all tokens */
    size_t own;      /* where this rank's rows begin among all tokens */
    size_t stream;   /* and in what has the rows of the residual stream only */
    size_t n_stream; /* so many they are */
};

/* Dropouts of a layer; site 0 is that of the embedding. */
enum {
    MB_GPT_SITE_ATTENTION = 1,
    MB_GPT_SITE_PROJ = 2,
    MB_GPT_SITE_MLP = 3,
    MB_GPT_SITES_PER_LAYER = 3
};

/* gpt_forward.c. */
uint32_t mb_gpt_site(const struct mb_gpt *m, size_t layer, uint32_t site);
/* Of a strip's rows of the residual stream; x, residual and out begin with them. */
void mb_gpt_dropout_add(const struct mb_gpt_pass *p, const void *x, const void *residual, void *out,
                        uint32_t site, struct mb_gpt_strip strip);
/* Of the chunk. */
const struct mb_gpt_layer *mb_gpt_top_layer(const struct mb_gpt *m);
/* All of layer l, whose input is there. */
void mb_gpt_layer_forward_again(const struct mb_gpt_pass *p, size_t l);
/* Up to the final norm; d_a serves as scratch for the branches' outputs. */
void mb_gpt_pass_forward(const struct mb_gpt_pass *p);
/* Output and loss; d_a becomes this rank's share of the gradient of final_out if d is set. */
void mb_gpt_output_and_loss(struct mb_gpt *m, int d, double grad_scale);
/* gpt_backward.c. */
void mb_gpt_pass_backward(const struct mb_gpt_pass *p);

/* gpt_group.c: what the ranks of a tensor group do together; nothing where there is one. */
/* Sets what says which part of the model is here: from part to n_slots, but for micro_batch. */
void mb_gpt_group_init(struct mb_gpt *m);
/* Which of the whole model's layers this rank's layer l is. */
size_t mb_gpt_layer_number(const struct mb_gpt *m, size_t l);
struct mb_gpt_strip mb_gpt_strip_at(const struct mb_gpt *m, size_t s);
/* Of x [tokens or rows, hidden]. */
void *mb_gpt_row(const struct mb_gpt *m, const void *x, size_t row);
/* Strip s of x [tokens, hidden] is a share of a sum: from end on it is the sum, of the own rows at
 * least. What is enqueued between runs meanwhile. */
void mb_gpt_sum_begin(struct mb_gpt *m, void *x, size_t s);
void mb_gpt_sum_end(struct mb_gpt *m, size_t s);
/* Of strip s of x [tokens, hidden] every rank has the own rows, and from end on the others. */
void mb_gpt_gather_begin(struct mb_gpt *m, void *x, size_t s);
void mb_gpt_gather_end(struct mb_gpt *m, size_t s);
void mb_gpt_gather_end_all(struct mb_gpt *m);
/* Statistics of the loss: every rank's in loss_parts. */
void mb_gpt_gather_loss_parts(struct mb_gpt *m);
/* The gradient of a norm's weights was made of the own rows only. */
void mb_gpt_sum_norm_gradient(struct mb_gpt *m, struct mb_gpt_norm_at norm);
/* Behind what was just begun of a group: in the first pass of a kind the host waits for it.
 * Products that come the first time are timed, and would be beside it. */
void mb_gpt_wait_tuning(const struct mb_gpt *m, struct mb_comm *group);
/* Before the host waits for the device alone: a rank that is gone is noticed. */
int mb_gpt_group_wait(struct mb_gpt *m, struct mb_err *err);

/* gpt.c: what mb_gpt_create() refuses before it takes anything. */
int mb_gpt_check(const struct mb_device *dev, const struct mb_gpt_config *c, size_t micro_batch,
                 struct mb_err *err);

/* gpt_graph.c: what is captured once and run again. */
int mb_gpt_graphs_create(struct mb_gpt *m, struct mb_err *err);
void mb_gpt_graphs_free(struct mb_gpt *m);
/* Before a pass; nothing without graphs. */
void mb_gpt_graph_pass(struct mb_gpt *m, const struct mb_gpt_step *step);
typedef void mb_gpt_enqueue_fn(const struct mb_gpt_pass *p);
/* enqueue(p), or what that captured before. */
void mb_gpt_graph_run(const struct mb_gpt_pass *p, enum mb_gpt_captured what,
                      struct mb_gpt_place at, mb_gpt_enqueue_fn *enqueue);

/* gpt_config.c: the sizes of the groups, 1 without one. */
size_t mb_gpt_tensor_parts(const struct mb_gpt_config *c);
size_t mb_gpt_context_parts(const struct mb_gpt_config *c);
/* Zeros replaced by what they stand for. */
void mb_gpt_config_complete(struct mb_gpt_config *c);

/* gpt_parts.c: norms and rotary positions, which have several forms. */
int mb_gpt_parts_check(const struct mb_device *dev, const struct mb_gpt_config *c,
                       struct mb_err *err);
int mb_gpt_parts_fill(struct mb_gpt *m, struct mb_err *err); /* tables; enqueues */
void mb_gpt_parts_weights_changed(struct mb_gpt *m);
/* Strip s of x [rows, hidden] to out [tokens, hidden], which begins to be gathered. amax: of out,
 * or NULL; RMSNorm only. */
void mb_gpt_norm_forward(struct mb_gpt *m, struct mb_gpt_norm_at at, const void *x, void *out,
                         float *mean, float *rstd, float *amax, size_t s);
/* d_share [tokens, hidden] is this rank's share of the gradient, whose sums have begun; it is
 * overwritten with them. Adds to d_residual. d_residual_sum gains the sum of its rows, or is NULL;
 * LayerNorm only. amax: of d_residual, or NULL; RMSNorm only. */
void mb_gpt_norm_backward(struct mb_gpt *m, struct mb_gpt_norm_at at, const void *x,
                          const float *mean, const float *rstd, void *d_share,
                          float *d_residual_sum, float *amax);
/* Does nothing unless positions are rotary. */
void mb_gpt_rotate(struct mb_gpt *m, void *qkv, int inverse);

/* gpt_linear.c: the linear layers of a layer. */
/* What a linear layer's ranks form together around its gradients. */
enum mb_gpt_together {
    MB_GPT_NOTHING, /* or it is done */
    MB_GPT_GATHERS, /* d_out, which is being gathered */
    MB_GPT_SUMS     /* d_x is a share, whose sum begins */
};

/* Where a product finds its weights. */
const void *mb_gpt_weight_at(const struct mb_gpt *m, size_t offset);
/* Gradients of products are set, not added to. */
int mb_gpt_has_old_grads(const struct mb_gpt *m);
/* From row on, of rows of n elements. NULL stays NULL. */
void *mb_gpt_rows_from(const struct mb_gpt *m, const void *x, size_t row, size_t n);
/* Of all tokens. */
struct mb_linear_forward mb_gpt_linear_of(const struct mb_gpt *m, struct mb_gpt_pair at,
                                          const void *x, size_t n_in, void *out, size_t n_out);
/* Of a strip of the rows that a has. */
void mb_gpt_linear_forward(struct mb_gpt *m, const struct mb_gpt_layer *y, enum mb_gpt_linear which,
                           struct mb_linear_forward a, struct mb_gpt_strip strip);
/* With gelu_x, x was gelu(gelu_x). A bias of MB_GPT_NONE has no gradient, or has it already. */
void mb_gpt_linear_backward(struct mb_gpt *m, const struct mb_gpt_layer *y,
                            enum mb_gpt_linear which, struct mb_gpt_pair at, const void *x,
                            const void *gelu_x, size_t n_in, const void *d_out, size_t n_out,
                            void *d_x, enum mb_gpt_together what);

/* gpt_fp8.c: the layers' linear layers with operands in fp8. */
int mb_gpt_fp8_create(struct mb_gpt *m, struct mb_err *err); /* nothing without fp8 */
void mb_gpt_fp8_weights_changed(struct mb_gpt *m);
/* Elements of the largest operand of a product. */
size_t mb_gpt_fp8_largest(const struct mb_gpt *m);
void mb_gpt_fp8_sizes(const struct mb_gpt *m, enum mb_gpt_linear which, size_t *n_in,
                      size_t *n_out);
/* Before a pass over the layer, before one over all gradients. */
void mb_gpt_fp8_forward_begins(struct mb_gpt *m, const struct mb_gpt_layer *y);
void mb_gpt_fp8_backward_begins(struct mb_gpt *m);
/* Where what writes the layer's input, or the gradient of its output, forms the largest magnitude;
 * NULL: nowhere. */
float *mb_gpt_fp8_x_amax(const struct mb_gpt *m, const struct mb_gpt_layer *y,
                         enum mb_gpt_linear which);
float *mb_gpt_fp8_d_amax(const struct mb_gpt *m, const struct mb_gpt_layer *y,
                         enum mb_gpt_linear which);
/* As the operations that take these structs. */
void mb_gpt_fp8_forward(struct mb_gpt *m, const struct mb_gpt_layer *y, enum mb_gpt_linear which,
                        const struct mb_linear_forward *a);
void mb_gpt_fp8_backward(struct mb_gpt *m, const struct mb_gpt_layer *y, enum mb_gpt_linear which,
                         const struct mb_linear_backward *a);

/* gpt_params.c: the table and the offsets. */
int mb_gpt_params_create(struct mb_gpt *m, struct mb_err *err);
void mb_gpt_params_free(struct mb_gpt *m);
/* gpt_draw.c: the initial weights, enqueued on the stream. */
int mb_gpt_params_draw(struct mb_gpt *m, struct mb_err *err);

/* gpt.c: what mb_gpt_create() refuses before it takes anything. */
int mb_gpt_check(const struct mb_device *dev, const struct mb_gpt_config *c, size_t micro_batch,
                 struct mb_err *err);

/* gpt_plan.c: the arena and all pointers into it. */
int mb_gpt_plan_create(struct mb_gpt *m, struct mb_err *err);

#endif
