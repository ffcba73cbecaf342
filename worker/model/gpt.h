/*
 * The GPT model as Megatron trains it, in GPT-2's style and in Llama's and what lies between:
 * blocks with a norm before each branch (LayerNorm or RMSNorm), causal attention with query groups,
 * learned or rotary positions or none, an MLP with GELU or SwiGLU, biases or none, tied or untied
 * output, cross entropy over the padded vocabulary.
 *
 * All memory is planned and taken in mb_gpt_create(); a step allocates nothing. A micro batch has
 * always micro_batch samples of seq tokens, row = sample * seq + position. Calls enqueue on the
 * device's stream and return; failures and results surface in mb_gpt_take_loss() or the backend's
 * synchronize(). Host arrays given to a call are read before it returns. Threads: one at a time.
 *
 * With a tensor group the ranks of it share one model: each has some of the heads, of the MLP's
 * channels and of the vocabulary's rows, and computes with them on the same batches; sums over
 * ranks join them. All of them make the same calls. Norms, learned positions and the biases of what
 * is summed are on every rank, the same bits.
 *
 * With a context group the ranks of it share the samples: each has two stretches of every sample,
 * as Megatron-LM spreads them, so that all have the same part of causal attention to compute, in
 * which keys and values go round the ring of ranks. Rows are then the rank's own.
 *
 * Of a pipeline's stages each has a share of the layers, the first the embedding, the last the
 * final norm, the output and the loss. What goes from stage to stage is the caller's to move, and
 * which pass of which micro batch comes next (worker/parallel/pipeline.h); mb_gpt_ports() says
 * where it lies. A stage may have several stretches of layers, chunks, which take turns with the
 * other stages': then what is said of the first and the last stage is so of their first and last
 * chunk. Where output and embedding are tied the last stage has weights and a gradient of
 * its own, which the caller sums with the first stage's.
 *
 * Initial weights are a pure function of (seed, parameter name, element), dropout one of (seed,
 * iteration, place, global element): a seed means one model, whatever the number of ranks.
 */
#ifndef MOBULA_WORKER_MODEL_GPT_H
#define MOBULA_WORKER_MODEL_GPT_H

#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/err.h"
#include "worker/kernels/backend.h"
#include "worker/kernels/master.h"
#include "worker/model/param.h"
#include "worker/model/rope.h"
#include "worker/parallel/comm.h"

enum mb_gpt_norm { MB_GPT_LAYERNORM, MB_GPT_RMSNORM };
enum { MB_GPT_STRIPS_MAX = 16 };
/* e4m3 forward; gradients in e5m2 with hybrid, else in e4m3, too */
enum mb_gpt_fp8 { MB_GPT_NO_FP8, MB_GPT_FP8_HYBRID, MB_GPT_FP8_E4M3 };
enum mb_gpt_positions { MB_GPT_LEARNED, MB_GPT_ROPE, MB_GPT_NO_POSITIONS };

struct mb_gpt_config {
    size_t n_layers;
    size_t hidden;
    size_t ffn_hidden; /* 0: 4 * hidden, with swiglu 2/3 of that in steps of 64 */
    size_t n_heads;
    size_t head_dim;      /* 0: hidden / n_heads, which must divide */
    size_t n_groups;      /* query groups, divides n_heads; 0: n_heads */
    size_t seq;           /* tokens of a sample */
    size_t max_positions; /* >= seq; rows of the table of learned positions */
    size_t vocab;         /* true size: tokens and labels lie below it */
    size_t
        padded_vocab; /* rows of the embedding and of the output, >= vocab (mb_gpt_padded_vocab) */
    int untie_output; /* 1: output_layer.weight of its own */
    enum mb_gpt_norm norm;
    int norm_1p; /* a norm's weight is kept as its difference from 1 */
    enum mb_gpt_positions positions;
    int batch_positions;        /* 1: batches say their positions, with MB_GPT_LEARNED */
    struct mb_rope_config rope; /* with MB_GPT_ROPE */
    int swiglu;                 /* linear_fc1 gives ffn_hidden gates, then ffn_hidden values */
    int linear_bias;            /* of all linear layers but the output */
    int qkv_bias;               /* that of qkv, whatever linear_bias says */
    enum mb_gelu_form gelu;
    float norm_eps; /* 1e-5 */
    float init_std; /* 0.02; residual projections get init_std / sqrt(2 n_layers) */
    /* The first so many layers, of each chunk, keep nothing but their input and compute forward
     * once more in the backward pass: less memory, the same bits. */
    size_t recompute_layers;
    float hidden_dropout;    /* [0, 1) */
    float attention_dropout; /* [0, 1) */
    uint64_t seed;
    enum mb_dtype dtype; /* of activations and of the weights in matrix products */
    /* Of bf16: the products of the layers take their operands in fp8. Each matrix has a scale of
     * its own, from its largest number as it is (op.h); the output layer stays in bf16. */
    enum mb_gpt_fp8 fp8;
    int fp8_margin; /* scales are so many powers of two smaller */
    /* Ranks that share the model; NULL: this one has all of it. Borrowed; carries what is on the
     * model's device. Sizes above are those of the whole model. */
    struct mb_comm *tensor_group;
    /* Ranks that share every sample, two stretches of it each; NULL: whole samples are here.
     * Borrowed, and as above. All of them have the same part of the model, and the sums of their
     * gradients and losses, which are of their own rows, are the caller's to form. */
    struct mb_comm *context_group;
    /* In place of the groups where only sizes are asked for (mb_gpt_measure); 0: one rank. */
    size_t n_tensor_parts, n_context_parts;
    /* Between the layers' products each of them has some rows of the residual stream instead of
     * all: less memory, the same sums. */
    int sequence_parallel;
    /* The layers work on a micro batch in so many strips of rows, so that one strip's sum over the
     * tensor group runs beside the next one's products. 1: whole; 0: as many as are good for the
     * device and the size. Fewer where rows do not come out even; 1 with fp8. */
    size_t n_strips;
    /* Stages of a pipeline, and which this one is; 0: all layers are here. Chunk k of stage s has
     * the stretch k * n_stages + s of as many as there are chunks in all; 0: a stage has one. The
     * last stage's last chunk takes the backward pass of a micro batch right behind its forward
     * pass; elsewhere so many micro batches may be between theirs, over all chunks. 0: one. */
    size_t n_stages, own_stage, n_chunks, n_in_flight;
    /* Passes are captured when they come the second time, and run again as CUDA graphs: the same
     * bits, less work for the host. Not where mb_gpt_graphs_refused() says why, not the pass that
     * says which gradients are final, and none after a failure (mb_gpt_graphs_failure). */
    int graphs;
};

/* Megatron's defaults for everything but the sizes, which stay zero: GPT-2's style. */
void mb_gpt_config_init(struct mb_gpt_config *c);

/* The smallest multiple of divisible_by * tensor_parallel that is >= vocab. */
size_t mb_gpt_padded_vocab(size_t vocab, size_t divisible_by, size_t tensor_parallel);

/* MB_EINVAL with a text such as "number of attention heads (5) must divide hidden size (128)". */
int mb_gpt_config_check(const struct mb_gpt_config *c, struct mb_err *err);

/* The number of parameters that a model of this shape has on this rank, padded vocabulary included;
 * it needs no device and no memory for them. */
int mb_gpt_count_parameters(const struct mb_gpt_config *c, size_t *out, struct mb_err *err);

/* Floating point operations of one sample's forward and backward as Megatron's --log-throughput
 * counts. */
double mb_gpt_flops_per_sample(const struct mb_gpt_config *c);

/* As what activations of a dtype travel between ranks. */
static inline enum mb_comm_type mb_gpt_comm_type(enum mb_dtype dtype)
{
    return dtype == MB_DTYPE_F16    ? MB_COMM_F16
           : dtype == MB_DTYPE_BF16 ? MB_COMM_BF16
                                    : MB_COMM_F32;
}

/* Why the device cannot capture this model's passes; NULL: it can. */
const char *mb_gpt_graphs_refused(const struct mb_device *dev, const struct mb_gpt_config *c);

/* One line of the plan of device memory. */
struct mb_gpt_plan_part {
    const char *name;
    size_t size_bytes;
};

enum { MB_GPT_PLAN_MAX = 32 };

/* What a model of this shape takes on this rank. */
struct mb_gpt_sizes {
    struct mb_gpt_plan_part parts[MB_GPT_PLAN_MAX]; /* weights, gradients, activations, scratch */
    size_t n_parts;
    double total_bytes; /* of device memory, as mb_gpt_create() takes it in one piece */
    size_t n_elements;  /* of the flat buffers, as mb_gpt_n_elements() */
    size_t widened;     /* floats of an operation's operands at most, if they are widened to fp32 */
    size_t batch_floats; /* of host memory */
};

/* The plan that mb_gpt_create() would follow, of the same code; takes no memory of the device, of
 * which only the backend's sizes are asked. MB_EINVAL as of mb_gpt_create(). */
int mb_gpt_measure(struct mb_device *dev, const struct mb_gpt_config *c, size_t micro_batch,
                   struct mb_gpt_sizes *out, struct mb_err *err);

struct mb_gpt;

/* dev is borrowed and must outlive the model. Parameters hold their initial weights, gradients
 * zeros. Errors: MB_EINVAL (config, micro_batch 0), MB_EUNSUPPORTED (a dtype or an operation that
 * the backend has not, by name), MB_ENOMEM naming the size that the plan needs. */
int mb_gpt_create(struct mb_device *dev, const struct mb_gpt_config *c, size_t micro_batch,
                  struct mb_gpt **out, struct mb_err *err);
void mb_gpt_destroy(struct mb_gpt *m);

const struct mb_gpt_config *mb_gpt_config(const struct mb_gpt *m); /* with the defaults filled in */

/* Why passes that were to be captured run as they are; NULL: nothing failed. Borrowed. */
const char *mb_gpt_graphs_failure(const struct mb_gpt *m);

/* The table of this rank's parameters, in the order of the flat buffers; borrowed. */
const struct mb_param *mb_gpt_params(const struct mb_gpt *m, size_t *n_params);
/* Length of the flat buffers in elements, gaps included, and the buffers (device memory, borrowed).
 */
size_t mb_gpt_n_elements(const struct mb_gpt *m);
float *mb_gpt_weights(struct mb_gpt *m); /* in fp32; NULL: they are in halves */
const struct mb_master *mb_gpt_master(const struct mb_gpt *m); /* the weights in either case */
float *mb_gpt_grads(struct mb_gpt *m);
/* To be called after the weights were written from outside: the model computes with what it makes
 * of some of them. Enqueues. */
void mb_gpt_weights_changed(struct mb_gpt *m);
/* The table that a rank with all of the model would have: the same parameters in the same order. To
 * be freed. n_elements: length of that rank's flat buffers. */
int mb_gpt_whole_params(const struct mb_gpt_config *c, struct mb_param **out, size_t *n_params,
                        size_t *n_elements, struct mb_err *err);
/* True number of parameters of this rank, without the gaps. */
size_t mb_gpt_n_parameters(const struct mb_gpt *m);

/* One micro batch, host memory, [micro_batch, seq] each: whole samples, whoever has which rows. */
struct mb_gpt_batch {
    const int32_t *tokens;  /* in [0, vocab) */
    const int32_t *labels;  /* in [0, vocab) */
    const float *loss_mask; /* 0 or 1, or NULL: all ones */
    /* With batch_positions, which rows of the table of positions they get, [0, seq); else nobody
     * looks: each its place in the sample. */
    const int32_t *positions;
};

/* Called while gradients are being enqueued: no later operation of this backward writes the flat
 * range [begin, end). Ranges are disjoint, come from the end of the buffer to its start and cover
 * all of it. */
typedef void mb_gpt_grads_final_cb(void *arg, size_t begin, size_t end);

struct mb_gpt_step {
    double
        grad_scale; /* factor of the micro batch's SUM of losses: for Megatron's mean over tokens,
                       micro batches and ranks 1 / (mask sum * micro batches * data parallel) */
    int64_t iteration;     /* dropout: the training iteration */
    uint64_t first_sample; /* dropout: index of sample 0 of this micro batch in the global batch */
    int is_last; /* no micro batch of this step follows in the chunk: its gradients become whole */
    mb_gpt_grads_final_cb
        *grads_final; /* or NULL; give it with the last micro batch of a step only */
    void *arg;
};

/* What they were before may yet be there until the next mb_gpt_forward_backward(), which sets what
 * it would else add to zeros. */
void mb_gpt_zero_grads(struct mb_gpt *m);

/* All layers are here. Forward with dropout, then backward; adds to the gradients and to the loss
 * sum. MB_EINVAL for a token or label outside the vocabulary, and then nothing was enqueued. */
int mb_gpt_forward_backward(struct mb_gpt *m, const struct mb_gpt_batch *batch,
                            const struct mb_gpt_step *step, struct mb_err *err);

/* All layers are here. Forward without dropout; adds to the loss sum only. */
int mb_gpt_forward(struct mb_gpt *m, const struct mb_gpt_batch *batch, struct mb_err *err);

/*
 * The same by halves, for a stage of a pipeline. The first stage needs the batch's tokens, the last
 * labels and mask, the others no batch.
 */
struct mb_gpt_place {
    size_t chunk;    /* of the stage's, from 0 on */
    size_t slot;     /* which of the micro batches in flight, whatever their chunk, from 0 on */
    size_t gradient; /* 0; with several chunks 0 or 1 */
};
struct mb_gpt_ports { /* device memory, n elements of the model's dtype each */
    void *in;         /* from the stage before, there before the forward pass; the slot's */
    void *out;      /* to the next stage, valid from the forward to the backward pass; the slot's */
    void *gradient; /* from the next stage, there before the backward pass; afterwards to the
                       stage before. One of this number for all slots. */
    size_t n;
};
struct mb_gpt_ports mb_gpt_ports(const struct mb_gpt *m, struct mb_gpt_place at);
/* With dropout, and the backward pass follows, which the last stage's loss comes with; step NULL:
 * without either. */
int mb_gpt_stage_forward(struct mb_gpt *m, struct mb_gpt_place at, const struct mb_gpt_batch *batch,
                         const struct mb_gpt_step *step, struct mb_err *err);
/* step: that of the forward pass, but for grad_scale and what is of the chunk's last micro batch.
 * Failures are mb_gpt_take_loss()'s. */
void mb_gpt_stage_backward(struct mb_gpt *m, struct mb_gpt_place at,
                           const struct mb_gpt_step *step);

/* From a pass's beginning to its end, as grads_final is called: it is the first of its kind, and
 * its products are timed on the device. Who begins something else there waits for it. */
int mb_gpt_is_tuning(const struct mb_gpt *m);

/* All layers are here. Forward without dropout; logits, device memory [this rank's rows, rows of
 * the vocabulary that this rank has] of the model's dtype, are overwritten. Labels and mask of the
 * batch do not matter. Enqueues. */
int mb_gpt_logits(struct mb_gpt *m, const struct mb_gpt_batch *batch, void *logits,
                  struct mb_err *err);

/* Waits for the device, and the groups; gives sum(mask * loss), the same on all ranks of the tensor
 * group, and sum(mask) since the last call, both of this rank's rows, and starts both anew; both 0
 * where the loss is another stage's. lm loss = sum of the first / sum of the second over micro
 * batches and ranks. */
int mb_gpt_take_loss(struct mb_gpt *m, double *loss_sum, double *n_tokens, struct mb_err *err);

#endif
