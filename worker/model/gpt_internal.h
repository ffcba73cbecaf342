/* The model's inside, shared by its source files: gpt_config.c gpt_params.c gpt_plan.c gpt.c. */
#ifndef MOBULA_WORKER_MODEL_GPT_INTERNAL_H
#define MOBULA_WORKER_MODEL_GPT_INTERNAL_H

#include "worker/model/gpt.h"

/* A linear layer or a norm: places in the flat buffers. */
struct mb_gpt_pair {
    size_t weight, bias;
};

struct mb_gpt_layer {
    size_t begin, end; /* flat range of the layer's parameters */
    struct mb_gpt_pair norm1, qkv, proj, norm2, fc1, fc2;

    /* Kept from forward for backward. */
    const float *in;           /* [tokens, hidden], the out of the layer before; borrowed */
    float *norm1_out;          /* [tokens, hidden] */
    float *mean1, *rstd1;      /* [tokens] */
    float *qkv_out;            /* [tokens, (heads + 2 groups) * head_dim] */
    float *log_sum;            /* [samples, heads, seq] */
    float *attention_out;      /* [tokens, hidden] */
    float *middle;             /* [tokens, hidden], after the first residual */
    float *norm2_out;          /* [tokens, hidden] */
    float *mean2, *rstd2;      /* [tokens] */
    float *fc1_out, *gelu_out; /* [tokens, ffn_hidden] */
    float *out;                /* [tokens, hidden], after the second residual */
};

enum { MB_GPT_PLAN_MAX = 32 };

struct mb_gpt_plan_part {
    const char *name;
    size_t size_bytes;
};

struct mb_gpt {
    struct mb_device *dev;
    struct mb_gpt_config c;
    size_t micro_batch, n_tokens; /* samples and rows of a micro batch */

    struct mb_param *params;
    size_t n_params, n_elements, n_parameters;
    size_t word_embedding, position_embedding, output_weight; /* flat offsets */
    struct mb_gpt_pair final_norm;
    size_t layers_end; /* flat offset behind the last layer */
    struct mb_gpt_layer *layers;

    void *arena; /* one block of device memory; everything below lies in it */
    size_t arena_bytes;
    struct mb_gpt_plan_part plan[MB_GPT_PLAN_MAX];
    size_t n_plan;
    float *weights, *grads;
    int32_t *tokens, *labels;
    float *mask;
    double *loss_sum;
    float *embedded;                /* [tokens, hidden] */
    float *final_out;               /* [tokens, hidden] */
    float *final_mean, *final_rstd; /* [tokens] */
    float *d_residual, *d_a, *d_b;  /* [tokens, hidden] */
    float *d_qkv, *d_ffn;           /* as qkv_out, fc1_out */
    float *attention_scratch, *head_scratch;

    float *host_ones; /* [tokens], the mask of a batch without one */
    double mask_sum;  /* since the last take_loss */
};

struct mb_attention_shape mb_gpt_attention_shape(const struct mb_gpt *m);

/* gpt_params.c: the table and the offsets; the initial weights, enqueued on the stream. */
int mb_gpt_params_create(struct mb_gpt *m, struct mb_err *err);
int mb_gpt_params_draw(struct mb_gpt *m, struct mb_err *err);

/* gpt_plan.c: the arena and all pointers into it. */
int mb_gpt_plan_create(struct mb_gpt *m, struct mb_err *err);

#endif
