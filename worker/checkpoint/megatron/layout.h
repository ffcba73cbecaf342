/*
 * Which tensors a model of Megatron-LM's arguments has, and how ranks that share it split them: by
 * rows where outputs are split (the vocabulary, qkv, fc1; with SwiGLU gates and values each), by
 * columns where inputs are (proj, fc2), else not at all. Names and order are those of checkpoints
 * of ours, and of model/gpt_params.c. Pure.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_MEGATRON_LAYOUT_H
#define MOBULA_WORKER_CHECKPOINT_MEGATRON_LAYOUT_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum { MB_MEGATRON_NAME_MAX = 96, MB_MEGATRON_LAYERS_MAX = 1 << 16, MB_MEGATRON_RANKS_MAX = 1024 };

enum mb_megatron_place { MB_MEGATRON_FIRST, MB_MEGATRON_LAYER, MB_MEGATRON_LAST };
enum mb_megatron_split { MB_MEGATRON_WHOLE, MB_MEGATRON_BY_ROWS, MB_MEGATRON_BY_COLUMNS };

struct mb_megatron_tensor {
    char name[MB_MEGATRON_NAME_MAX]; /* "decoder.layers.3.mlp.linear_fc1.weight" */
    const char *in_layer;            /* "mlp.linear_fc1.weight", into name; else name itself */
    uint64_t rows, columns;          /* of the whole; columns 0: a list */
    enum mb_megatron_place place;    /* the first stage's, its layer's, or the last one's */
    uint64_t layer;                  /* of a layer's */
    enum mb_megatron_split split;
    uint64_t n_blocks; /* by rows: each of so many is split by itself */
};

struct mb_megatron_layout {
    uint64_t tp, pp,
        n_chunks; /* ranks of a tensor group, stages, chunks of the model a stage has */
    uint64_t n_layers, hidden, ffn, n_heads, n_groups, head_dim, padded_vocab, max_positions;
    int untied;
    struct mb_megatron_tensor *tensors;
    size_t n;
};

/*
 * Arguments as a Namespace of Megatron-LM has them into ours: what it leaves to defaults is said
 * (kv_channels, ffn_hidden_size, num_query_groups without groups), and whole numbers are integers.
 * What ours has not (experts, interleaved rotary positions, ...) is MB_EUNSUPPORTED, by its name.
 */
int mb_megatron_args(const char *name, json_t *args, struct mb_err *err);
/* Of such arguments, or of state.json's; sizes only, no tensors yet. padded_vocab 0: not said. */
int mb_megatron_sizes(const char *name, const json_t *args, struct mb_megatron_layout *out,
                      struct mb_err *err);
/* The tensors. MB_EINVAL if they cannot be split over l->tp ranks. */
int mb_megatron_layout_create(const char *name, const json_t *args, struct mb_megatron_layout *l,
                              struct mb_err *err);
void mb_megatron_layout_close(struct mb_megatron_layout *l);
/* The last of this, of another l->tp. */
int mb_megatron_check_split(const char *name, const struct mb_megatron_layout *l,
                            struct mb_err *err);

/* in_layer's name with --transformer-impl local, which has its norms apart from what follows them;
 * "": the same. */
void mb_megatron_local_name(const char *in_layer, char out[MB_MEGATRON_NAME_MAX]);

/* The order of a layer's modules, which Megatron-LM's optimizers number parameters by: proj comes
 * before qkv; norms before both, or with Transformer Engine within what follows them. Tensors of
 * one pass are in the order of the layout. */
enum { MB_MEGATRON_PASSES = 4 };
int mb_megatron_pass(const char *in_layer, int is_local);

/* Rank t's part of a tensor: element e of it is element t * run + e / run * stride + e % run of the
 * whole. n: its elements. Whole ones: the same for any t, run == stride == n. */
struct mb_megatron_part {
    uint64_t n, run, stride, shape[2];
};

struct mb_megatron_part mb_megatron_part(const struct mb_megatron_tensor *t, uint64_t tp);

#endif
