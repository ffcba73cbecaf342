/* What shards.c and the readers of optimizers share. Nobody else includes this. */
#ifndef MOBULA_WORKER_CHECKPOINT_MEGATRON_SHARDS_PRIVATE_H
#define MOBULA_WORKER_CHECKPOINT_MEGATRON_SHARDS_PRIVATE_H

#include "worker/checkpoint/megatron/dist.h"
#include "worker/checkpoint/megatron/shards.h"
#include "worker/checkpoint/megatron/torch_file.h"

struct mb_shards_file {
    char *path;
    struct mb_torch_file *torch;
    uint8_t *is_taken; /* of its tensors */
};

struct mb_shards {
    char *dir;
    struct mb_dist *dist; /* of torch_dist; then there is one file, common.pt, and no part */
    int has_stages;       /* names have two numbers */
    uint64_t max_rank, max_stage;
    json_t *args;
    char *args_text;
    struct mb_megatron_layout layout;
    uint64_t *first_layer;                /* [chunk * pp + stage], and the total at the end */
    struct mb_shards_file *files;         /* [stage * tp + rank] */
    struct mb_st_tensor *tensors;         /* as they are told outside */
    const struct mb_torch_tensor **parts; /* [tensor * tp + rank] */
    size_t *stage_of;                     /* of a tensor */
    uint64_t bytes;
    uint8_t *piece; /* PIECE_BYTES */
    /* Of the optimizer, when it was taken: of torch the tensors, [(state * n + tensor) * tp +
     * rank]. */
    const struct mb_torch_tensor **states;
    struct mb_shards_optimizer optimizer;
    int has_taken_optimizer;
    int64_t group_steps, param_steps; /* as groups and as parameters say them; -1: they do not */
};

/* A tensor of a file by its name, which is marked as taken; NULL: there is none. */
const struct mb_torch_tensor *mb_shards_look_up(const struct mb_shards_file *f, const char *name);
int mb_shards_no_memory(const struct mb_shards *s, struct mb_err *err);
/* A rank's part of tensor i of the optimizer's. */
static inline const struct mb_torch_tensor **
mb_shards_state_of(const struct mb_shards *s, enum mb_shards_state which, size_t i, uint64_t rank)
{
    return &s->states[((size_t)which * s->layout.n + i) * s->layout.tp + rank];
}

/* What torch's files have, into s->states and s->optimizer. */
int mb_shards_take_states(struct mb_shards *s, struct mb_err *err);
/* Everybody who says how many steps were made, in *have, says the same. name is for the text. */
int mb_shards_take_step(const struct mb_shards_file *f, const char *name, int64_t step,
                        int64_t *have, struct mb_err *err);
/* What the settings of a file say, into s->optimizer: of the first file all, of others what must be
 * the same. *adam: the dictionary that has the list param_groups; prefix: what names of its tensors
 * begin with. */
int mb_shards_take_settings(struct mb_shards *s, const struct mb_shards_file *f,
                            const json_t **adam, const char **prefix, struct mb_err *err);

#endif
