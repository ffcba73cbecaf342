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

struct taking {
    struct mb_shards *s;
    const struct mb_shards_file *f;
    uint64_t stage, rank;
    struct mb_shards_param *params;
    size_t n_params;
    const json_t *groups, *states;
    const char *prefix; /* "optimizer." or "optimizer.optimizer." */
};

/* ---- parameters ---- */

static int by_place(const void *x, const void *y)
{
    const struct mb_shards_param *a = x, *b = y;
    return a->t->place < b->t->place ? -1 : a->t->place > b->t->place;
}

static int is_token_table(const char *name)
{
    return mb_ends_with(name, "embedding.word_embeddings.weight") ||
           mb_ends_with(name, "output_layer.weight");
}

static int class_of_param(const struct mb_shards_param *p)
{
    return (p->t->n_dims == 1 ? NO_DECAY : 0) | (is_token_table(p->t->name) ? DECOUPLED : 0);
}

/* Of several chunks a name says the number: "model1.decoder". */
static void add_param(struct taking *k, const struct mb_torch_tensor *t, size_t tensor)
{
    k->params[k->n_params++] =
        (struct mb_shards_param){.t = t,
                                 .tensor = tensor,
                                 .chunk = strtoull(t->name + strlen("model"), NULL, 10),
                                 .n = t->n,
                                 .dtype = t->dtype};
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
            add_param(k, t, MB_SHARDS_COPY);
            break; /* the last chunk has it, and no other */
        }
    }
    qsort(k->params, k->n_params, sizeof *k->params, by_place);
    return 0;
}

/* ---- groups ---- */

static int class_of(const struct taking *k, size_t g, int *out, struct mb_err *err)
{
    const json_t *group = json_array_get(k->groups, g);
    int no_decay = 0, decoupled = 0;
    if (!json_is_array(json_object_get(group, "params"))) {
        return mb_err_set(err, MB_ENOENT,
                          "%s: param_groups %zu: does not say which parameters are its, and there "
                          "is no distrib_optim.pt beside it",
                          k->f->path, g);
    }
    int rc = mb_shards_check_group(k->f, k->groups, g, &no_decay, &decoupled, err);
    *out = (no_decay ? NO_DECAY : 0) | (decoupled ? DECOUPLED : 0);
    return rc;
}

/* ---- one parameter ---- */

static int take_state(const struct taking *k, enum mb_shards_state which,
                      const struct mb_shards_param *p, const char *name, struct mb_err *err)
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
    if (p->tensor != MB_SHARDS_COPY) {
        *mb_shards_state_of(k->s, which, p->tensor, k->rank) =
            (struct mb_shards_place){.torch = k->f->torch, .in_torch = t};
    }
    return 0;
}

/* A step of this parameter by itself: a tensor of torch's own Adam, or a number. */
static int take_step(const struct taking *k, const char *number, const char *name,
                     struct mb_err *err)
{
    const struct mb_torch_tensor *t = mb_shards_look_up(k->f, name);
    const json_t *j = json_object_get(json_object_get(k->states, number), "step");
    if (t != NULL) {
        return mb_shards_take_step_of(k->f, t, &k->s->param_steps, err);
    }
    return json_is_integer(j) && json_integer_value(j) >= 0
               ? mb_shards_take_step(k->f, name, json_integer_value(j), &k->s->param_steps, err)
               : 0;
}

static int take_param(const struct taking *k, const json_t *number, const struct mb_shards_param *p,
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
static int take_master(const struct taking *k, size_t g, size_t n, const struct mb_shards_param *p,
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
        const struct mb_shards_param *p = &k->params[i];
        if ((class_of_param(p) & mask) != class) {
            continue;
        }
        if (n >= json_array_size(numbers)) {
            n++;
            continue;
        }
        rc = take_param(k, json_array_get(numbers, n++), p, err);
        if (rc == 0 && p->t->dtype != MB_ST_F32) {
            rc = take_master(k, g, n_halves++, p, err);
        } else if (rc == 0 && p->tensor != MB_SHARDS_COPY) {
            *mb_shards_state_of(k->s, MB_SHARDS_MASTER, p->tensor, k->rank) =
                (struct mb_shards_place){.torch = k->f->torch, .in_torch = p->t};
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
            rc = mb_err_set(err, MB_EUNSUPPORTED,
                            "%s: param_groups %zu: another one has the same wd_mult: no group of "
                            "ours",
                            k->f->path, g);
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
        const struct mb_shards_param *p = &k->params[i];
        if (classes[class_of_param(p) & mask] == 0) {
            rc = mb_err_set(err, MB_ECORRUPT, "%s: no param_groups has parameter %s", k->f->path,
                            p->t->name);
        }
    }
    return rc;
}

/* ---- files ---- */

int mb_shards_check_all_taken(const struct mb_shards_file *f, const char *prefix,
                              struct mb_err *err)
{
    for (size_t i = 0; i < mb_torch_n_tensors(f->torch); i++) {
        const char *name = mb_torch_tensor(f->torch, i)->name;
        if (mb_starts_with(name, prefix) && !f->is_taken[i]) {
            return mb_err_set(
                err, MB_EUNSUPPORTED,
                "%s: tensor %s is none that is read of an optimizer: it would be lost", f->path,
                name);
        }
    }
    return 0;
}

/* The distributed optimizer has its numbers in a file of its own, which is opened. */
static int open_buffers(const struct taking *k, struct mb_shards_file *out, struct mb_err *err)
{
    static const char NAME[] = "distrib_optim.pt";
    const char *slash = strrchr(k->f->path, '/');
    out->path = slash != NULL ? mb_asprintf("%.*s/%s", (int)(slash - k->f->path), k->f->path, NAME)
                              : mb_strdup(NAME);
    if (out->path == NULL) {
        return mb_shards_no_memory(k->s, err);
    }
    struct mb_err why = {0};
    int rc = mb_torch_open(out->path, &out->torch, &why);
    if (rc == MB_ENOENT) {
        return 0;
    }
    if (rc != 0) {
        *err = why;
        return rc;
    }
    out->is_taken = mb_calloc(mb_torch_n_tensors(out->torch) + 1, 1);
    return out->is_taken != NULL ? mb_torch_rest(out->torch, err) : mb_shards_no_memory(k->s, err);
}

/* They do not say whose they are where buffers have it all. */
static int check_groups(const struct taking *k, struct mb_err *err)
{
    int no_decay, decoupled, rc = 0;
    for (size_t g = 0; g < json_array_size(k->groups) && rc == 0; g++) {
        if (json_object_get(json_array_get(k->groups, g), "params") != NULL) {
            return mb_err_set(
                err, MB_ECORRUPT,
                "%s: param_groups %zu: says which parameters are its, which it does "
                "not where distrib_optim.pt beside it has their numbers: of two saves",
                k->f->path, g);
        }
        rc = mb_shards_check_group(k->f, k->groups, g, &no_decay, &decoupled, err);
    }
    return rc;
}

static int take_buffers(const struct taking *k, struct mb_err *err)
{
    const struct mb_shards_file *f = &k->s->buffers[k->stage * k->s->run.tp + k->rank];
    int rc = check_groups(k, err);
    if (rc == 0) {
        rc = mb_shards_take_buffers(k->s, f, "", k->stage, k->rank, k->params, k->n_params, err);
    }
    return rc == 0 ? mb_shards_check_all_taken(f, "", err) : rc;
}

static int take_file(struct taking *k, struct mb_err *err)
{
    struct mb_shards_file *buffers = &k->s->buffers[k->stage * k->s->run.tp + k->rank];
    const json_t *adam = NULL;
    int rc = open_buffers(k, buffers, err);
    if (rc == 0) {
        rc = mb_shards_take_settings(k->s, k->f, &adam, &k->prefix, err);
    }
    if (rc == 0) {
        k->groups = json_object_get(adam, "param_groups");
        k->states = json_object_get(adam, "state");
        rc = list_params(k, err);
    }
    if (rc == 0) {
        rc = buffers->torch != NULL ? take_buffers(k, err) : take_groups(k, err);
    }
    if (rc == 0) {
        rc = mb_shards_check_all_taken(k->f, "optimizer.", err);
    }
    mb_free(k->params);
    return rc;
}

static int is_in_buffers(const struct mb_shards *s, uint64_t stage)
{
    int is = 0;
    for (uint64_t rank = 0; rank < s->run.tp; rank++) {
        is |= s->buffers[stage * s->run.tp + rank].torch != NULL;
    }
    return is;
}

int mb_shards_take_torch_states(struct mb_shards *s, struct mb_err *err)
{
    int rc = mb_shards_make_states(s, s->layout.tp, err);
    for (uint64_t i = 0; i < s->layout.tp * s->layout.pp && rc == 0; i++) {
        struct taking k = {
            .s = s, .f = &s->files[i], .stage = i / s->layout.tp, .rank = i % s->layout.tp};
        rc = take_file(&k, err);
    }
    for (size_t i = 0; i < s->layout.n && rc == 0; i++) {
        rc = is_in_buffers(s, s->stage_of[i])
                 ? mb_shards_compare_masters(s, i, s->parts[i * s->layout.tp]->dtype, err)
                 : 0;
    }
    return rc;
}
