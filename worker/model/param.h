/*
 * The table of a model's parameters. All parameters lie in one flat fp32 buffer, all gradients in
 * another of the same layout, so that all-reduce, optimizer shards and checkpoints are work on flat
 * ranges. Offsets are multiples of MB_PARAM_ALIGN elements; the gaps hold zeros in both buffers,
 * always.
 *
 * With tensor parallelism a rank has a part of most parameters: rows, columns, or rows of each of
 * several blocks. Whatever it is, element e of the part is element
 *   start + e / run * stride + e % run
 * of the whole. A parameter that is not split is on every rank.
 *
 * With pipeline parallelism a rank has the parameters of its stage, and the last stage, where
 * output and embedding are tied, the embedding's weights as well.
 */
#ifndef MOBULA_WORKER_MODEL_PARAM_H
#define MOBULA_WORKER_MODEL_PARAM_H

#include <stddef.h>

enum { MB_PARAM_ALIGN = 16, MB_PARAM_NAME_MAX = 80 };

struct mb_param {
    char name[MB_PARAM_NAME_MAX]; /* Megatron's, Transformer Engine style:
                                     decoder.layers.0.mlp.linear_fc1.weight */
    size_t shape[2];              /* row-major; 1-D parameters have n_dims 1 and shape[1] 1 */
    int n_dims;
    size_t offset;              /* elements from the start of the flat buffer */
    size_t n;                   /* elements */
    size_t n_whole;             /* of the whole parameter; n: it is not split */
    size_t start, run, stride;  /* where the part lies in it */
    int is_embedding_or_output; /* of tokens: --decoupled-lr is theirs */
    int is_copy;                /* of what the first stage has: there it is counted and saved */
    int no_weight_decay;        /* 1 for biases and all 1-D parameters */
};

#endif
