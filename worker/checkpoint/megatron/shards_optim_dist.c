/*
 * Of torch_dist, whose optimizers name what they save:
 *
 *  1. common.pt has the settings, as a file of torch has them, but for which parameters are in
 *     which group: names say that.
 *  2. optimizer.state.exp_avg.NAME, exp_avg_sq.NAME and fp32_param.NAME (of the distributed
 *     optimizer's fully_reshardable form param.NAME) are whole tensors, as NAME of the model is, or
 *     in its form fully_sharded_model_space cut as ranks had it. A weight in fp32 may have none of
 *     the last: it is its own.
 *  3. The distributed optimizer's other forms are buffers (shards_buckets.c) and objects, one of
 *     each rank that had a part of the model: its settings, its loss scale, and of
 *     dp_zero_gather_scatter its buffers. Which layers a stage had is not said: they are split
 *     evenly, or it is refused.
 *  4. What is there besides would be lost, and is refused.
 * Failures: a form that is not read, a tensor that is missing or of another shape: named.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"
#include "worker/checkpoint/megatron/shards_private.h"

#define STATE "optimizer.state."
#define GROUP "optimizer.distributed.dp_group_idx_%" PRIu64 "."

enum { NAME_BYTES = 96 };

/* What else --no-load-optim leaves out: how to save it so that it is read. */
static const char ADVICE[] =
    "Megatron-LM saves one that is read with --dist-ckpt-optim-fully-reshardable";

static int refuse(const struct mb_shards *s, const char *what, struct mb_err *err)
{
    return mb_err_set(err, MB_EUNSUPPORTED, "%s: the optimizer's form %s is not read; %s",
                      s->files[0].path, what, ADVICE);
}

static int take_state(struct mb_shards *s, enum mb_shards_state which, size_t i, const char *prefix,
                      struct mb_err *err)
{
    struct mb_dist_part *p = &mb_shards_state_of(s, which, i, 0)->part;
    int rc = mb_dist_find_state(s->dist, prefix, &s->layout, i, p, err);
    if (rc == 0 && p->t != NULL) {
        rc = mb_dist_use(s->dist, p->t, err);
    }
    if (rc == 0 && p->t != NULL && which == MB_SHARDS_MASTER && p->t->dtype != MB_ST_F32) {
        rc = mb_err_set(err, MB_EUNSUPPORTED, "%s: tensor %s: its numbers are not F32", s->dir,
                        p->t->name);
    }
    return rc;
}

static int missing(const struct mb_shards *s, size_t i, const char *prefix, struct mb_err *err)
{
    return mb_err_set(err, MB_ECORRUPT, "%s: tensor %s%s is missing", s->dir, prefix,
                      s->layout.tensors[i].name);
}

static int take_tensor(struct mb_shards *s, size_t i, struct mb_err *err)
{
    static const char *const MOMENTS[] = {STATE "exp_avg.", STATE "exp_avg_sq."};
    static const char *const MASTERS[] = {STATE "fp32_param.", STATE "param."};
    const struct mb_shards_place *master = mb_shards_state_of(s, MB_SHARDS_MASTER, i, 0);
    int rc = 0;
    for (int m = 0; m < 2 && rc == 0; m++) {
        rc = take_state(s, (enum mb_shards_state)m, i, MOMENTS[m], err);
        if (rc == 0 && mb_shards_state_of(s, (enum mb_shards_state)m, i, 0)->part.t == NULL) {
            rc = missing(s, i, MOMENTS[m], err);
        }
    }
    for (int m = 0; m < 2 && rc == 0 && master->part.t == NULL; m++) {
        rc = take_state(s, MB_SHARDS_MASTER, i, MASTERS[m], err);
    }
    if (rc == 0 && master->part.t == NULL && mb_dist_dtype(s->dist, i) != MB_ST_F32) {
        rc = missing(s, i, MASTERS[0], err);
    }
    if (rc == 0 && master->part.t == NULL) {
        rc = take_state(s, MB_SHARDS_MASTER, i, "", err);
    }
    return rc;
}

static int take_settings(struct mb_shards *s, const struct mb_shards_file *f, struct mb_err *err)
{
    const json_t *adam = NULL;
    const char *prefix = NULL;
    char name[64];
    int no_decay, decoupled;
    int rc = mb_shards_take_settings(s, f, &adam, &prefix, err);
    const json_t *groups = json_object_get(adam, "param_groups");
    for (size_t g = 0; g < json_array_size(groups) && rc == 0; g++) {
        rc = mb_shards_check_group(f, groups, g, &no_decay, &decoupled, err);
    }
    if (rc == 0) { /* of torch's own Adam, whose groups do not count */
        snprintf(name, sizeof name, "%sstate.common_step", prefix);
        const struct mb_torch_tensor *step = mb_shards_look_up(f, name);
        rc = step != NULL ? mb_shards_take_step_of(f, step, &s->param_steps, err) : 0;
    }
    return rc;
}

static int take_whole(struct mb_shards *s, int is_distributed, struct mb_err *err)
{
    int rc = take_settings(s, &s->files[0], err);
    if (rc == 0) {
        rc = mb_shards_make_states(s, 1, err);
    }
    for (size_t i = 0; i < s->layout.n && rc == 0; i++) {
        rc = take_tensor(s, i, err);
    }
    /* Megatron-LM's cut these out of its buffers, not always in the right place. */
    for (size_t i = 0; i < s->layout.n && rc == 0 && is_distributed; i++) {
        rc = mb_shards_compare_masters(s, i, mb_dist_dtype(s->dist, i), err);
    }
    return rc;
}

/* ---- ranks' objects ---- */

static const struct mb_dist_tensor *find_object(const struct mb_shards *s, uint64_t group,
                                                const char *what)
{
    char name[NAME_BYTES];
    snprintf(name, sizeof name, GROUP "%s/shard_0_1", group, what);
    return mb_dist_find(s->dist, name);
}

/* out: to be closed in any case. It is compared with its checksums by whoever reads it. */
static int open_object(struct mb_shards *s, const struct mb_dist_tensor *t,
                       struct mb_shards_file *out, struct mb_err *err)
{
    int rc = mb_dist_open_object(s->dist, t, &out->torch, err);
    if (rc == 0) {
        out->path = mb_asprintf("%s: %s", s->dir, t->name);
        out->is_taken = mb_calloc(mb_torch_n_tensors(out->torch) + 1, 1);
        rc = out->path != NULL && out->is_taken != NULL ? mb_torch_rest(out->torch, err)
                                                        : mb_shards_no_memory(s, err);
    }
    return rc;
}

/* An object that is there, as what takes it makes of it. */
static int with_object(struct mb_shards *s, uint64_t group, const char *what,
                       int (*take)(struct mb_shards *s, const struct mb_shards_file *f,
                                   const json_t *o, struct mb_err *err),
                       struct mb_err *err)
{
    const struct mb_dist_tensor *t = find_object(s, group, what);
    struct mb_shards_file f = {0};
    int rc = t != NULL ? open_object(s, t, &f, err) : 0;
    if (t != NULL && rc == 0) {
        rc = mb_torch_verify(f.torch, NULL, NULL, err);
    }
    if (t != NULL && rc == 0) {
        rc = take(s, &f, json_array_get(json_object_get(mb_torch_settings(f.torch), "list"), 0),
                  err);
    }
    mb_shards_close_file(&f);
    return rc;
}

static int take_groups(struct mb_shards *s, const struct mb_shards_file *f, const json_t *adam,
                       struct mb_err *err)
{
    const json_t *groups = json_object_get(adam, "param_groups");
    int no_decay, decoupled, rc = mb_shards_take_groups(s, f, adam, err);
    for (size_t g = 0; g < json_array_size(groups) && rc == 0; g++) {
        rc = mb_shards_check_group(f, groups, g, &no_decay, &decoupled, err);
    }
    return rc;
}

/* All have one: the last counts. */
static int take_scaler(struct mb_shards *s, const struct mb_shards_file *f, const json_t *o,
                       struct mb_err *err)
{
    return mb_shards_take_scaler(s, f, o, mb_shards_look_up(f, "0.scale"), err);
}

/* How many elements buckets have, which say it themselves. */
static int pass_over(struct mb_shards *s, const struct mb_shards_file *f, const json_t *o,
                     struct mb_err *err)
{
    (void)s, (void)f, (void)o, (void)err;
    return 0;
}

static int take_objects(struct mb_shards *s, uint64_t group, struct mb_err *err)
{
    if (find_object(s, group, "optimizer") == NULL) {
        return mb_err_set(err, MB_ECORRUPT,
                          "%s: there is no optimizer.distributed.dp_group_idx_%" PRIu64
                          ": by the arguments %" PRIu64 " ranks had a part of the model",
                          s->dir, group, s->run.tp * s->run.pp);
    }
    int rc = with_object(s, group, "optimizer", take_groups, err);
    rc = rc == 0 ? with_object(s, group, "grad_scaler", take_scaler, err) : rc;
    rc = rc == 0 ? with_object(s, group, "per_bucket_numel", pass_over, err) : rc;
    return rc == 0 ? with_object(s, group, "per_bucket_numel_unpadded", pass_over, err) : rc;
}

/* ---- ranks' parameters ---- */

static int check_even(const struct mb_shards *s, struct mb_err *err)
{
    static const char *const UNEVEN[] = {
        "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
        "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
        "pipeline_model_parallel_layout"};
    for (size_t i = 0; i < sizeof UNEVEN / sizeof UNEVEN[0] && s->run.pp > 1; i++) {
        const json_t *j = json_object_get(s->args, UNEVEN[i]);
        if (j != NULL && !json_is_null(j) && !json_is_false(j)) {
            return mb_err_set(err, MB_EUNSUPPORTED,
                              "%s: stages of unlike many layers (%s) and an optimizer in buffers "
                              "are not read together; %s",
                              s->files[0].path, UNEVEN[i], ADVICE);
        }
    }
    if (s->layout.n_layers % (s->run.pp * s->run.n_chunks) != 0) {
        return mb_err_set(err, MB_ECORRUPT,
                          "%s: %" PRIu64 " layers are no multiple of %" PRIu64 " stages of %" PRIu64
                          " chunks",
                          s->files[0].path, s->layout.n_layers, s->run.pp, s->run.n_chunks);
    }
    struct mb_megatron_layout run = s->layout;
    run.tp = s->run.tp;
    return mb_megatron_check_split(s->files[0].path, &run, err);
}

/* Which of a stage's chunks has a tensor; -1: none. */
static int64_t chunk_of(const struct mb_shards *s, const struct mb_megatron_tensor *t,
                        uint64_t stage)
{
    const uint64_t n = s->run.pp * s->run.n_chunks;
    const uint64_t at = t->place == MB_MEGATRON_FIRST  ? 0
                        : t->place == MB_MEGATRON_LAST ? n - 1
                                                       : t->layer / (s->layout.n_layers / n);
    return at % s->run.pp == stage ? (int64_t)(at / s->run.pp) : -1;
}

struct listed {
    struct mb_shards_param p;
    uint64_t layer; /* one more than the number; 0: before all, UINT64_MAX: behind them */
    int pass;       /* in it */
};

static int by_module(const void *x, const void *y)
{
    const struct listed *a = x, *b = y;
    return a->p.chunk != b->p.chunk     ? (a->p.chunk < b->p.chunk ? -1 : 1)
           : a->layer != b->layer       ? (a->layer < b->layer ? -1 : 1)
           : a->pass != b->pass         ? a->pass - b->pass
           : a->p.tensor != b->p.tensor ? (a->p.tensor < b->p.tensor ? -1 : 1)
                                        : 0;
}

/* A rank's parameters in the order of its modules; list: [layout.n + 1]. All ranks of a stage have
 * the same ones. */
static size_t list_params(const struct mb_shards *s, uint64_t stage, struct listed *list,
                          struct mb_shards_param *out)
{
    const char *impl = json_string_value(json_object_get(s->args, "transformer_impl"));
    const int is_local = impl != NULL && strcmp(impl, "local") == 0;
    size_t n = 0;
    for (size_t i = 0; i < s->layout.n; i++) {
        const struct mb_megatron_tensor *t = &s->layout.tensors[i];
        const int64_t chunk = chunk_of(s, t, stage);
        if (chunk >= 0) {
            list[n++] = (struct listed){.p = {.tensor = i,
                                              .chunk = (uint64_t)chunk,
                                              .n = mb_megatron_part(t, s->run.tp).n,
                                              .dtype = mb_dist_dtype(s->dist, i)},
                                        .layer = t->place == MB_MEGATRON_LAYER  ? t->layer + 1
                                                 : t->place == MB_MEGATRON_LAST ? UINT64_MAX
                                                                                : 0,
                                        .pass = t->place == MB_MEGATRON_LAYER
                                                    ? mb_megatron_pass(t->in_layer, is_local)
                                                    : 0};
        }
    }
    if (!s->layout.untied && s->run.pp > 1 && stage == s->run.pp - 1) {
        list[n++] = (struct listed){.p = {.tensor = MB_SHARDS_COPY,
                                          .chunk = s->run.n_chunks - 1,
                                          .n = mb_megatron_part(&s->layout.tensors[0], s->run.tp).n,
                                          .dtype = mb_dist_dtype(s->dist, 0)},
                                    .layer = UINT64_MAX};
    }
    qsort(list, n, sizeof *list, by_module);
    for (size_t i = 0; i < n; i++) {
        out[i] = list[i].p;
    }
    return n;
}

/* ---- ranks' buffers ---- */

static int take_rank(struct mb_shards *s, uint64_t stage, uint64_t rank,
                     const struct mb_shards_param *params, size_t n, struct mb_err *err)
{
    const uint64_t group = stage * s->run.tp + rank;
    const struct mb_dist_tensor *whole = find_object(s, group, "param_state");
    struct mb_shards_file *f = &s->buffers[group];
    if (whole == NULL) {
        return mb_shards_take_buffers(s, NULL, NULL, stage, rank, params, n, err);
    }
    int rc = open_object(s, whole, f, err);
    if (rc == 0) {
        rc = mb_shards_take_buffers(s, f, "0.", stage, rank, params, n, err);
    }
    return rc == 0 ? mb_shards_check_all_taken(f, "", err) : rc;
}

static int take_ranks(struct mb_shards *s, struct mb_err *err)
{
    struct listed *list = mb_calloc(s->layout.n + 1, sizeof *list);
    struct mb_shards_param *params = mb_calloc(s->layout.n + 1, sizeof *params);
    int rc = list != NULL && params != NULL ? 0 : mb_shards_no_memory(s, err);
    for (uint64_t stage = 0; stage < s->run.pp && rc == 0; stage++) {
        const size_t n = list_params(s, stage, list, params);
        for (uint64_t rank = 0; rank < s->run.tp && rc == 0; rank++) {
            rc = take_rank(s, stage, rank, params, n, err);
        }
    }
    for (size_t i = 0; i < s->layout.n && rc == 0; i++) {
        rc = mb_shards_compare_masters(s, i, mb_dist_dtype(s->dist, i), err);
    }
    mb_free(list);
    mb_free(params);
    return rc;
}

static int take_buffers(struct mb_shards *s, struct mb_err *err)
{
    int rc = check_even(s, err);
    for (uint64_t group = 0; group < s->run.tp * s->run.pp && rc == 0; group++) {
        rc = take_objects(s, group, err); /* before memory is asked for by the ranks' number */
    }
    if (rc == 0) {
        rc = mb_shards_make_states(s, s->run.tp, err);
    }
    return rc == 0 ? take_ranks(s, err) : rc;
}

int mb_shards_take_dist_states(struct mb_shards *s, struct mb_err *err)
{
    const json_t *o = json_object_get(mb_torch_settings(s->files[0].torch), "optimizer");
    const char *type = json_string_value(json_object_get(o, "param_state_sharding_type"));
    const int is_whole = type == NULL || strcmp(type, "fully_reshardable") == 0 ||
                         strcmp(type, "fully_sharded_model_space") == 0;
    int rc = 0;
    if (!is_whole && strcmp(type, "dp_reshardable") != 0 &&
        strcmp(type, "dp_zero_gather_scatter") != 0) {
        rc = refuse(s, type, err);
    } else {
        rc = is_whole ? take_whole(s, type != NULL, err) : take_buffers(s, err);
    }
    const struct mb_dist_tensor *unused = rc == 0 ? mb_dist_unused(s->dist) : NULL;
    return unused == NULL ? rc
                          : mb_err_set(err, MB_EUNSUPPORTED,
                                       "%s: tensor %s is none that is read of an optimizer: it "
                                       "would be lost",
                                       s->dir, unused->name);
}
