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

/* Where a rank's part of one of the optimizer's tensors is: from an element on in one piece, or as
 * part says. */
struct mb_shards_place {
    struct mb_torch_file *torch; /* borrowed; NULL: of torch_dist's chunks */
    const struct mb_torch_tensor *in_torch;
    const struct mb_dist_tensor *in_dist; /* NULL: part */
    uint64_t from;
    struct mb_dist_part part;
};

/* One of a rank's parameters. */
struct mb_shards_param {
    const struct mb_torch_tensor *t; /* of torch */
    size_t tensor;                   /* of the layout, or MB_SHARDS_COPY */
    uint64_t chunk, n;               /* of the model; elements */
    enum mb_st_dtype dtype;
};

#define MB_SHARDS_COPY SIZE_MAX /* of tied embeddings, which the first stage has */

struct mb_shards {
    char *dir;
    struct mb_dist *dist; /* of torch_dist; then there is one file, common.pt, and no part */
    int has_stages;       /* names have two numbers */
    uint64_t max_rank, max_stage;
    json_t *args;
    char *args_text;
    struct mb_megatron_layout layout;
    struct {
        uint64_t tp, pp, n_chunks;
    } run;                                /* as layout has them, of torch_dist too */
    uint64_t *first_layer;                /* [chunk * pp + stage], and the total at the end */
    struct mb_shards_file *files;         /* [stage * tp + rank] */
    struct mb_st_tensor *tensors;         /* as they are told outside */
    const struct mb_torch_tensor **parts; /* [tensor * tp + rank] */
    size_t *stage_of;                     /* of a tensor */
    uint64_t bytes;
    uint8_t *piece; /* PIECE_BYTES */
    /* Of the optimizer, when it was taken: [(state * n + tensor) * states_tp + rank]. */
    struct mb_shards_place *states;
    uint64_t states_tp;             /* 1: they are whole */
    uint8_t *compared;              /* [n]: 1 + dtype of weights whose masters lay in buffers; 0 */
    struct mb_shards_file *buffers; /* [stage * run.tp + rank], of the distributed optimizer; some
                                       may be closed */
    struct mb_shards_optimizer optimizer;
    int has_taken_optimizer;
    int64_t group_steps, param_steps; /* as groups and as parameters say them; -1: they do not */
};

/* ---- the optimizer ---- */

/* A tensor of a file by its name, which is marked as taken; NULL: there is none. */
const struct mb_torch_tensor *mb_shards_look_up(const struct mb_shards_file *f, const char *name);
int mb_shards_no_memory(const struct mb_shards *s, struct mb_err *err);
void mb_shards_close_file(struct mb_shards_file *f);
/* A rank's part of tensor i of the optimizer's. */
static inline struct mb_shards_place *
mb_shards_state_of(const struct mb_shards *s, enum mb_shards_state which, size_t i, uint64_t rank)
{
    return &s->states[((size_t)which * s->layout.n + i) * s->states_tp + rank];
}

/* Room for the states of so many ranks; files of buffers that are open are closed. */
int mb_shards_make_states(struct mb_shards *s, uint64_t tp, struct mb_err *err);
void mb_shards_close_buffers(struct mb_shards *s);
/* What torch's files have, or torch_dist's, into s->states and s->optimizer. */
int mb_shards_take_torch_states(struct mb_shards *s, struct mb_err *err);
int mb_shards_take_dist_states(struct mb_shards *s, struct mb_err *err);

/* No tensor whose name begins with prefix was left. MB_EUNSUPPORTED names it. */
int mb_shards_check_all_taken(const struct mb_shards_file *f, const char *prefix,
                              struct mb_err *err);
/* Where a rank's parameters, in the order of its modules, are in its distributed optimizer's
 * buffers: whole ones of f, where names begin with prefix, or, f NULL, torch_dist's buckets. */
int mb_shards_take_buffers(struct mb_shards *s, const struct mb_shards_file *f, const char *prefix,
                           uint64_t stage, uint64_t rank, const struct mb_shards_param *params,
                           size_t n, struct mb_err *err);
/* Whether what was found in buffers for tensor i, whose weights are of dtype, is that tensor's, by
 * the first elements of each rank's part. */
int mb_shards_compare_masters(struct mb_shards *s, size_t i, enum mb_st_dtype dtype,
                              struct mb_err *err);
/* The same of every element of all tensors that this was asked of, which reads them. */
int mb_shards_compare_all_masters(struct mb_shards *s, const struct mb_torch_watch *watch,
                                  struct mb_err *err);

/* ---- arguments ---- */

/* Those of a file, to be released by the caller. */
int mb_shards_take_args(const struct mb_shards *s, const struct mb_shards_file *f, json_t **out,
                        struct mb_err *err);
/* Of torch_dist: the only file that s has, its arguments and, of the run that saved it, sizes. */
int mb_shards_open_common(struct mb_shards *s, struct mb_err *err);

/* ---- its settings: f is for texts ---- */

/* Everybody who says how many steps were made, in *have, says the same. name is for the text. */
int mb_shards_take_step(const struct mb_shards_file *f, const char *name, int64_t step,
                        int64_t *have, struct mb_err *err);
/* The same of a tensor of f that is one number. */
int mb_shards_take_step_of(const struct mb_shards_file *f, const struct mb_torch_tensor *t,
                           int64_t *have, struct mb_err *err);
/* The list param_groups of adam says one number of steps. */
int mb_shards_take_groups(struct mb_shards *s, const struct mb_shards_file *f, const json_t *adam,
                          struct mb_err *err);
/* Group g of it is one of ours: 1 in *no_decay: of what has one dimension, 1 in *decoupled: of
 * embeddings and output with --decoupled-lr. MB_EUNSUPPORTED. */
int mb_shards_check_group(const struct mb_shards_file *f, const json_t *groups, size_t g,
                          int *no_decay, int *decoupled, struct mb_err *err);
/* A dynamic loss scale, or none (o NULL or empty); scale: its tensor of f. */
int mb_shards_take_scaler(struct mb_shards *s, const struct mb_shards_file *f, const json_t *o,
                          const struct mb_torch_tensor *scale, struct mb_err *err);
/* What the settings of a file say, into s->optimizer: of the first file all, of others what must be
 * the same. *adam: the dictionary that has the list param_groups; prefix: what names of its tensors
 * begin with. */
int mb_shards_take_settings(struct mb_shards *s, const struct mb_shards_file *f,
                            const json_t **adam, const char **prefix, struct mb_err *err);

#endif
