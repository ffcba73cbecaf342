/*
 * Megatron-LM numbers a rank's parameters, not names them. Of each file of torch:
 *
 *  1. Its parameters are the model's tensors in the order of the file: a state_dict and
 *     named_parameters() visit modules alike, and chunks of a stage follow each other.
 *  2. param_groups says which numbers a group has. Which group it is says wd_mult (0: biases and
 *     whatever has one dimension; 1: all others) and, with --decoupled-lr, whether it is that of
 *     embeddings and output. The k-th number of a group is its k-th parameter. Releases put groups
 *     in different orders, so that their place says nothing.
 *  3. state.NUMBER.exp_avg and exp_avg_sq have the parameter's shape. Of a parameter in halves the
 *     group's list fp32_from_fp16_params has the fp32 weights, in the same order; one in fp32 is
 *     its own. Which of them are in halves may differ from rank to rank.
 *  4. What is there besides would be lost, and is refused.
 * Failures: named by file, and group, parameter or tensor.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"
#include "worker/checkpoint/megatron/shards_private.h"

enum { CLASSES = 4, NO_DECAY = 1, DECOUPLED = 2, NAME_MAX_BYTES = 96 };

static const size_t COPY = SIZE_MAX; /* of tied embeddings, which the first stage has */

struct param {
    const struct mb_torch_tensor *t;
    size_t tensor; /* of the layout, or COPY */
    int class;
};

struct taking {
    struct mb_shards *s;
    const struct mb_shards_file *f;
    uint64_t stage, rank;
    struct param *params;
    size_t n_params;
    const json_t *groups, *states;
    const char *prefix; /* "optimizer." or "optimizer.optimizer." */
};

/* ---- parameters ---- */

static int by_place(const void *x, const void *y)
{
    const struct param *a = x, *b = y;
    return a->t->place < b->t->place ? -1 : a->t->place > b->t->place;
}

static int is_token_table(const char *name)
{
    return mb_ends_with(name, "embedding.word_embeddings.weight") ||
           mb_ends_with(name, "output_layer.weight");
}

static void add_param(struct taking *k, const struct mb_torch_tensor *t, size_t tensor)
{
    k->params[k->n_params++] = (struct param){
        t, tensor, (t->n_dims == 1 ? NO_DECAY : 0) | (is_token_table(t->name) ? DECOUPLED : 0)};
}

static int list_params(struct taking *k, struct mb_err *err)
{
    const struct mb_shards *s = k->s;
    k->params = mb_calloc(s->layout.n + 1, sizeof *k->params);
    if (k->params == NULL) {
        return mb_shards_no_memory(s, err);
    }
    for (size_t i = 0; i < s->layout.n; i++) {
        if (s->stage_of[i] == k->stage) {
            add_param(k, s->parts[i * s->layout.tp + k->rank], i);
        }
    }
    for (size_t i = 0; i < mb_torch_n_tensors(k->f->torch) && !s->layout.untied; i++) {
        const struct mb_torch_tensor *t = mb_torch_tensor(k->f->torch, i);
        if (mb_starts_with(t->name, "model") && mb_ends_with(t->name, ".output_layer.weight")) {
            add_param(k, t, COPY);
            break; /* the last chunk has it, and no other */
        }
    }
    qsort(k->params, k->n_params, sizeof *k->params, by_place);
    return 0;
}

/* ---- groups ---- */

static int bad_group(const struct taking *k, size_t g, const char *what, struct mb_err *err)
{
    return mb_err_set(err, MB_EUNSUPPORTED, "%s: param_groups %zu: %s", k->f->path, g, what);
}

/* Where nothing is said, def. */
static double number_of(const json_t *group, const char *name, double def)
{
    const json_t *j = json_object_get(group, name);
    return json_is_number(j) ? json_number_value(j) : def;
}

static int is_true(const json_t *group, const char *name, int def)
{
    const json_t *j = json_object_get(group, name);
    return json_is_boolean(j) ? json_is_true(j) : def;
}

static int class_of(const struct taking *k, size_t g, int *out, struct mb_err *err)
{
    const json_t *group = json_array_get(k->groups, g);
    const double wd_mult = number_of(group, "wd_mult", -1);
    if (!json_is_array(json_object_get(group, "params"))) {
        return bad_group(k, g, "does not say which parameters are its", err);
    }
    if (wd_mult != 0 && wd_mult != 1) {
        return bad_group(k, g, "its wd_mult is neither 0 nor 1: no group of ours", err);
    }
    if (number_of(group, "lr_mult", 1) != 1) {
        return bad_group(k, g, "its lr_mult is not 1: no group of ours", err);
    }
    if (is_true(group, "is_expert_parallel", 0)) {
        return bad_group(k, g, "it is of experts: expert parallelism is not provided", err);
    }
    if (is_true(group, "amsgrad", 0)) {
        return bad_group(k, g, "amsgrad is not provided", err);
    }
    *out = (wd_mult == 0 ? NO_DECAY : 0) |
           (is_true(group, "is_decoupled_lr", 0) || !is_true(group, "default_config", 1) ? DECOUPLED
                                                                                         : 0);
    return 0;
}

/* ---- one parameter ---- */

static int take_state(const struct taking *k, enum mb_shards_state which, const struct param *p,
                      const char *name, struct mb_err *err)
{
    const struct mb_torch_tensor *t = mb_shards_look_up(k->f, name);
    if (t == NULL) {
        return mb_err_set(err, MB_ECORRUPT, "%s: tensor %s is missing: it is that of %s",
                          k->f->path, name, p->t->name);
    }
    if (t->n_dims != p->t->n_dims || t->shape[0] != p->t->shape[0] ||
        (t->n_dims > 1 && t->shape[1] != p->t->shape[1])) {
        return mb_err_set(err, MB_ECORRUPT,
                          "%s: tensor %s: %d dimensions [%" PRIu64 ", %" PRIu64
                          "]; it is that of %s with %d [%" PRIu64 ", %" PRIu64 "]",
                          k->f->path, name, t->n_dims, t->n_dims > 0 ? t->shape[0] : 0,
                          t->n_dims > 1 ? t->shape[1] : 0, p->t->name, p->t->n_dims, p->t->shape[0],
                          p->t->n_dims > 1 ? p->t->shape[1] : 0);
    }
    if (t->dtype != MB_ST_F32 &&
        (which == MB_SHARDS_MASTER || (t->dtype != MB_ST_F16 && t->dtype != MB_ST_BF16))) {
        return mb_err_set(err, MB_EUNSUPPORTED, "%s: tensor %s: its numbers are not %s", k->f->path,
                          name, which == MB_SHARDS_MASTER ? "F32" : "F32, F16 or BF16");
    }
    if (p->tensor != COPY) {
        *mb_shards_state_of(k->s, which, p->tensor, k->rank) = t;
    }
    return 0;
}

/* A step of this parameter by itself: a tensor of torch's own Adam, or a number. */
static int take_step(const struct taking *k, const char *number, const char *name,
                     struct mb_err *err)
{
    const struct mb_torch_tensor *t = mb_shards_look_up(k->f, name);
    const json_t *j = json_object_get(json_object_get(k->states, number), "step");
    float step;
    if (t == NULL) {
        return json_is_integer(j) && json_integer_value(j) >= 0
                   ? mb_shards_take_step(k->f, name, json_integer_value(j), &k->s->param_steps, err)
                   : 0;
    }
    if (t->n != 1 || t->dtype != MB_ST_F32) {
        return mb_err_set(err, MB_EUNSUPPORTED, "%s: tensor %s is no number", k->f->path, name);
    }
    int rc = mb_torch_read(k->f->torch, t, 0, 1, &step, err);
    if (rc != 0) {
        return rc;
    }
    if (!(step >= 0 && step < (float)INT32_MAX)) {
        return mb_err_set(err, MB_ECORRUPT, "%s: tensor %s is no number of steps", k->f->path,
                          name);
    }
    return mb_shards_take_step(k->f, name, (int64_t)step, &k->s->param_steps, err);
}

static int take_param(const struct taking *k, const json_t *number, const struct param *p,
                      struct mb_err *err)
{
    static const char *const NAMES[] = {"exp_avg", "exp_avg_sq", "step"};
    char key[24], name[NAME_MAX_BYTES];
    int rc = 0;
    if (!json_is_integer(number) || json_integer_value(number) < 0) {
        return mb_err_set(err, MB_ECORRUPT, "%s: the number of parameter %s is none", k->f->path,
                          p->t->name);
    }
    snprintf(key, sizeof key, "%lld", (long long)json_integer_value(number));
    for (int i = 0; i < 3 && rc == 0; i++) {
        snprintf(name, sizeof name, "%sstate.%s.%s", k->prefix, key, NAMES[i]);
        rc = i < 2 ? take_state(k, (enum mb_shards_state)i, p, name, err)
                   : take_step(k, key, name, err);
    }
    return rc;
}

/* The n-th of a group's parameters in halves. */
static int take_master(const struct taking *k, size_t g, size_t n, const struct param *p,
                       struct mb_err *err)
{
    char name[NAME_MAX_BYTES];
    snprintf(name, sizeof name, "optimizer.fp32_from_fp16_params.%zu.%zu", g, n);
    return take_state(k, MB_SHARDS_MASTER, p, name, err);
}

static int take_group(const struct taking *k, size_t g, int class, int mask, struct mb_err *err)
{
    const json_t *numbers = json_object_get(json_array_get(k->groups, g), "params");
    size_t n = 0, n_halves = 0;
    int rc = 0;
    for (size_t i = 0; i < k->n_params && rc == 0; i++) {
        const struct param *p = &k->params[i];
        if ((p->class & mask) != class) {
            continue;
        }
        if (n >= json_array_size(numbers)) {
            n++;
            continue;
        }
        rc = take_param(k, json_array_get(numbers, n++), p, err);
        if (rc == 0 && p->t->dtype != MB_ST_F32) {
            rc = take_master(k, g, n_halves++, p, err);
        } else if (rc == 0 && p->tensor != COPY) {
            *mb_shards_state_of(k->s, MB_SHARDS_MASTER, p->tensor, k->rank) = p->t;
        }
    }
    if (rc == 0 && n != json_array_size(numbers)) {
        rc = mb_err_set(err, MB_ECORRUPT,
                        "%s: param_groups %zu has %zu parameters, by the model's %s they are %zu",
                        k->f->path, g, json_array_size(numbers),
                        class & NO_DECAY ? "biases and norms" : "matrices", n);
    }
    return rc;
}

static int take_groups(const struct taking *k, struct mb_err *err)
{
    int classes[CLASSES] = {0}, mask = NO_DECAY, rc = 0, class = 0;
    const size_t n = json_array_size(k->groups);
    for (size_t g = 0; g < n && rc == 0; g++) {
        rc = class_of(k, g, &class, err);
        if (rc == 0 && classes[class]++ > 0) {
            rc = bad_group(k, g, "another one has the same wd_mult: no group of ours", err);
        }
        mask |= class & DECOUPLED;
    }
    for (size_t g = 0; g < n && rc == 0; g++) {
        rc = class_of(k, g, &class, err);
        if (rc == 0) {
            rc = take_group(k, g, class, mask, err);
        }
    }
    for (size_t i = 0; i < k->n_params && rc == 0; i++) {
        const struct param *p = &k->params[i];
        if (classes[p->class & mask] == 0) {
            rc = mb_err_set(err, MB_ECORRUPT, "%s: no param_groups has parameter %s", k->f->path,
                            p->t->name);
        }
    }
    return rc;
}

/* ---- files ---- */

static int check_rest(const struct taking *k, struct mb_err *err)
{
    for (size_t i = 0; i < mb_torch_n_tensors(k->f->torch); i++) {
        const char *name = mb_torch_tensor(k->f->torch, i)->name;
        if (mb_starts_with(name, "optimizer.") && !k->f->is_taken[i]) {
            return mb_err_set(
                err, MB_EUNSUPPORTED,
                "%s: tensor %s is none that is read of an optimizer: it would be lost", k->f->path,
                name);
        }
    }
    return 0;
}

/* The distributed optimizer has its numbers in a file of its own. */
static int check_form(const struct mb_shards_file *f, struct mb_err *err)
{
    static const char NAME[] = "distrib_optim.pt";
    const char *slash = strrchr(f->path, '/');
    char *path = slash != NULL ? mb_asprintf("%.*s/%s", (int)(slash - f->path), f->path, NAME)
                               : mb_strdup(NAME);
    int rc = 0;
    if (path == NULL) {
        rc = mb_err_set(err, MB_ENOMEM, "%s: out of memory", f->path);
    } else if (mb_fs_exists(path)) {
        rc = mb_err_set(err, MB_EUNSUPPORTED,
                        "%s: the distributed optimizer's file is not read by this version", path);
    }
    mb_free(path);
    return rc;
}

static int take_file(struct taking *k, struct mb_err *err)
{
    const json_t *adam = NULL;
    int rc = check_form(k->f, err);
    if (rc == 0) {
        rc = mb_shards_take_settings(k->s, k->f, &adam, &k->prefix, err);
    }
    if (rc == 0) {
        k->groups = json_object_get(adam, "param_groups");
        k->states = json_object_get(adam, "state");
        rc = list_params(k, err);
    }
    if (rc == 0) {
        rc = take_groups(k, err);
    }
    if (rc == 0) {
        rc = check_rest(k, err);
    }
    mb_free(k->params);
    return rc;
}

int mb_shards_take_states(struct mb_shards *s, struct mb_err *err)
{
    int rc = 0;
    for (uint64_t i = 0; i < s->layout.tp * s->layout.pp && rc == 0; i++) {
        struct taking k = {
            .s = s, .f = &s->files[i], .stage = i / s->layout.tp, .rank = i % s->layout.tp};
        rc = take_file(&k, err);
    }
    return rc;
}
