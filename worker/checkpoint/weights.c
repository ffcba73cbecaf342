/*
 *  1. A directory with state.json is ours, whatever else lies in it; else one with mp_rank_* or
 *     metadata.json is Megatron-LM's; else it is taken for ours, and what is missing there is
 * named.
 *  2. A state of Megatron-LM's files: its iteration is the directory's name's, of "release" none.
 *     An optimizer that is not read is not an error before somebody wants it.
 *  3. write: tensors, state, tracker, each on disk before the next.
 * Failures: what the readers say; files of another iteration than the directory's.
 */
#include "worker/checkpoint/weights.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"
#include "worker/checkpoint/moments.h"

enum { PARAM_ALIGN = 16 }; /* of the model's flat buffers, in floats */

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "checkpoint: out of memory");
}

char *mb_weights_dir(const char *dir, int64_t iteration)
{
    char iter[32];
    mb_checkpoint_iter_name(iteration, iter);
    return mb_path_join(dir, iter);
}

int mb_weights_are_megatrons(const char *iter_dir)
{
    char *state = mb_path_join(iter_dir, MB_CHECKPOINT_STATE_FILE);
    const int are = state != NULL && !mb_fs_exists(state) && mb_shards_are_in(iter_dir);
    mb_free(state);
    return are;
}

int mb_weights_open(const char *iter_dir, struct mb_weights *out, struct mb_err *err)
{
    *out = (struct mb_weights){0};
    if (mb_weights_are_megatrons(iter_dir)) {
        return mb_shards_open(iter_dir, &out->megatron, err);
    }
    char *path = mb_path_join(iter_dir, MB_CHECKPOINT_MODEL_FILE);
    int rc = path != NULL ? mb_st_open(path, &out->ours, err) : no_memory(err);
    mb_free(path);
    return rc;
}

void mb_weights_close(struct mb_weights *w)
{
    mb_st_close(w->ours);
    mb_shards_close(w->megatron);
    mb_moments_close(w->moments);
    *w = (struct mb_weights){0};
}

size_t mb_weights_n(const struct mb_weights *w)
{
    return w->source != NULL     ? w->source->n
           : w->megatron != NULL ? mb_shards_n_tensors(w->megatron)
                                 : mb_st_n_tensors(w->ours);
}

const struct mb_st_tensor *mb_weights_tensor(const struct mb_weights *w, size_t i)
{
    return w->source != NULL     ? &w->source->tensors[i]
           : w->megatron != NULL ? mb_shards_tensor(w->megatron, i)
                                 : mb_st_tensor(w->ours, i);
}

static const struct mb_st_tensor *find_in_source(const struct mb_weights_source *s,
                                                 const char *name)
{
    for (size_t i = 0; i < s->n; i++) {
        if (strcmp(s->tensors[i].name, name) == 0) {
            return &s->tensors[i];
        }
    }
    return NULL;
}

static int read_source(const struct mb_weights_source *s, enum mb_weights_kind what,
                       const struct mb_st_tensor *t, uint64_t from, size_t n, float *out,
                       struct mb_err *err)
{
    return s->read(s->arg, what, (size_t)(t - s->tensors), from, n, out, err);
}

const struct mb_st_tensor *mb_weights_find(const struct mb_weights *w, const char *name)
{
    return w->source != NULL     ? find_in_source(w->source, name)
           : w->megatron != NULL ? mb_shards_find(w->megatron, name)
                                 : mb_st_find(w->ours, name);
}

int mb_weights_take_optimizer(struct mb_weights *w, const char *iter_dir,
                              const struct mb_checkpoint_state *s, struct mb_err *err)
{
    int rc = 0;
    if (!s->has_optimizer) {
        rc = mb_err_set(err, MB_ENOENT, "%s: it has no optimizer", iter_dir);
    } else if (w->megatron == NULL) {
        rc = mb_moments_open(iter_dir, w->ours, s, &w->moments, err);
    } else if (mb_shards_optimizer(w->megatron) == NULL) {
        rc = mb_shards_take_optimizer(w->megatron, err);
    }
    w->has_optimizer = rc == 0;
    return rc;
}

int mb_weights_read_moment(struct mb_weights *w, int which, const struct mb_st_tensor *t,
                           uint64_t from, size_t n, float *out, struct mb_err *err)
{
    if (w->source != NULL) {
        return read_source(w->source, which == 0 ? MB_WEIGHTS_EXP_AVG : MB_WEIGHTS_EXP_AVG_SQ, t,
                           from, n, out, err);
    }
    return w->megatron != NULL
               ? mb_shards_read_state(w->megatron,
                                      which == 0 ? MB_SHARDS_EXP_AVG : MB_SHARDS_EXP_AVG_SQ, t,
                                      from, n, out, err)
               : mb_moments_read(w->moments, which, t, from, n, out, err);
}

int mb_weights_read(struct mb_weights *w, const struct mb_st_tensor *t, uint64_t from, size_t n,
                    float *out, struct mb_err *err)
{
    if (w->source != NULL) {
        return read_source(w->source, MB_WEIGHTS_WEIGHT, t, from, n, out, err);
    }
    if (w->megatron != NULL && w->has_optimizer) {
        return mb_shards_read_state(w->megatron, MB_SHARDS_MASTER, t, from, n, out, err);
    }
    return w->megatron != NULL
               ? mb_shards_read(w->megatron, t, from, n, out, err)
               : mb_st_read(w->ours, t, from * sizeof *out, out, n * sizeof *out, err);
}

/* What a run of ours says of itself beside Megatron-LM's arguments; 0 where there is nothing. */
static int64_t own_counter(const char *args_json, const char *name)
{
    json_error_t je;
    json_t *args = json_loads(args_json, 0, &je);
    const json_int_t n = json_integer_value(json_object_get(args, name));
    json_decref(args);
    return n > 0 ? n : 0;
}

/* Whatever goes wrong is no error here: who does not want the optimizer goes on without. */
static void take_optimizer(struct mb_shards *s, struct mb_checkpoint_state *out)
{
    struct mb_err why = {0};
    if (mb_shards_take_optimizer(s, &why) != 0) {
        out->optimizer_refused = why;
        return;
    }
    const struct mb_shards_optimizer *o = mb_shards_optimizer(s);
    out->has_optimizer = 1;
    out->optimizer_steps = o->steps;
    out->schedule_samples = o->schedule_samples;
    out->warmup_samples = o->warmup_samples;
    out->decay_samples = o->decay_samples;
    out->has_grad_scaler = o->has_grad_scaler;
    out->loss_scale = o->loss_scale;
    out->growth_tracker = o->growth_tracker;
    out->hysteresis_tracker = o->hysteresis_tracker;
}

int mb_weights_state(struct mb_shards *s, const char *iter_dir, int64_t iteration,
                     struct mb_checkpoint_state *out, struct mb_err *err)
{
    *out = (struct mb_checkpoint_state){0};
    if (iteration > 0 && mb_shards_iteration(s) != iteration) {
        return mb_err_set(err, MB_ECORRUPT, "%s: its files say iteration %" PRId64, iter_dir,
                          mb_shards_iteration(s));
    }
    *out = (struct mb_checkpoint_state){.iteration = iteration > 0 ? iteration : 0,
                                        .consumed_train_samples = mb_shards_consumed(s, 0),
                                        .consumed_valid_samples = mb_shards_consumed(s, 1),
                                        .skipped_iterations =
                                            own_counter(mb_shards_args(s), MB_WEIGHTS_SKIPPED),
                                        .is_megatrons = 1};
    if (iteration > 0 && mb_shards_has_optimizer(s)) {
        take_optimizer(s, out);
    }
    out->args_json = mb_strdup(mb_shards_args(s));
    return out->args_json != NULL ? 0 : no_memory(err);
}

/* ---- writing ---- */

/* With the layout of the model's flat buffers, as a save of the trainer writes it. */
static int write_state(const char *path, const struct mb_st_tensor *list, size_t n,
                       const struct mb_checkpoint_state *state, struct mb_err *err)
{
    struct mb_checkpoint_tensor *tensors = mb_calloc(n, sizeof *tensors);
    struct mb_checkpoint_model model = {.tensors = tensors, .n_tensors = n};
    struct mb_buf text = {0};
    int rc = tensors != NULL && state->args_json != NULL ? 0 : no_memory(err);
    for (size_t i = 0; i < n && rc == 0; i++) {
        const struct mb_st_tensor *t = &list[i];
        const size_t rows = (size_t)t->shape[0];
        tensors[i] =
            (struct mb_checkpoint_tensor){.name = t->name,
                                          .offset = model.n_elements,
                                          .n = rows * (t->n_dims > 1 ? (size_t)t->shape[1] : 1)};
        model.n_elements += (tensors[i].n + PARAM_ALIGN - 1) / PARAM_ALIGN * PARAM_ALIGN;
    }
    if (rc == 0) {
        rc = mb_checkpoint_state_encode(&model, state, &text, err);
    }
    if (rc == 0) {
        rc = mb_fs_write_atomic(path, text.data, text.len, 0644, err);
    }
    mb_buf_close(&text);
    mb_free(tensors);
    return rc;
}

int mb_weights_write(const char *dir, struct mb_st_tensor *tensors, size_t n,
                     const struct mb_checkpoint_state *s,
                     int (*write)(void *arg, const char *path, struct mb_st_tensor *tensors,
                                  size_t n, struct mb_err *err),
                     void *arg, struct mb_err *err)
{
    char number[24];
    snprintf(number, sizeof number, "%" PRId64, s->iteration);
    char *iter = mb_weights_dir(dir, s->iteration);
    char *weights = mb_asprintf("%s/" MB_CHECKPOINT_MODEL_FILE, iter);
    char *state = mb_asprintf("%s/" MB_CHECKPOINT_STATE_FILE, iter);
    char *tracker = mb_path_join(dir, MB_CHECKPOINT_TRACKER);
    int rc =
        iter != NULL && weights != NULL && state != NULL && tracker != NULL ? 0 : no_memory(err);
    if (rc == 0) {
        rc = mb_fs_mkdir_p(iter, 0755, err);
    }
    if (rc == 0) {
        rc = write(arg, weights, tensors, n, err);
    }
    if (rc == 0) {
        rc = write_state(state, tensors, n, s, err);
    }
    if (rc == 0) {
        rc = mb_fs_sync_dir(iter, err);
    }
    if (rc == 0) {
        rc = mb_fs_write_atomic(tracker, number, strlen(number), 0644, err);
    }
    mb_free(iter);
    mb_free(weights);
    mb_free(state);
    mb_free(tracker);
    return rc;
}
