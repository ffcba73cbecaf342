/*
 *  1. take: an optimizer is one, not several; param_groups lie in it, or with fp32 copies of halves
 *     one level deeper. Steps of all parameters are one number, and so are those of groups; where
 *     both are there, those of parameters count: torch's Adam keeps a group's as it was loaded.
 *  2. The scheduler's numbers are the first file's, taken when all else was. What it says of rates
 *     and styles takes the place of the arguments' words, which may have been overridden by it.
 *  3. The loss scale, where there is a dynamic one.
 * Failures: a form that is not read, a setting that is missing or no such number: named.
 */
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"
#include "worker/checkpoint/megatron/shards_private.h"

static const double SAMPLES_MAX = 1e15;

static int bad(const struct mb_shards_file *f, enum mb_code code, const char *what,
               struct mb_err *err)
{
    return mb_err_set(err, code, "%s: %s", f->path, what);
}

int mb_shards_take_step(const struct mb_shards_file *f, const char *name, int64_t step,
                        int64_t *have, struct mb_err *err)
{
    if (*have >= 0 && *have != step) {
        return mb_err_set(err, MB_ECORRUPT,
                          "%s: %s says %" PRId64 " steps of the optimizer, others say %" PRId64,
                          f->path, name, step, *have);
    }
    *have = step;
    return 0;
}

int mb_shards_take_step_of(const struct mb_shards_file *f, const struct mb_torch_tensor *t,
                           int64_t *have, struct mb_err *err)
{
    float step;
    if (t->n != 1 || t->dtype != MB_ST_F32) {
        return mb_err_set(err, MB_EUNSUPPORTED, "%s: tensor %s is no number", f->path, t->name);
    }
    int rc = mb_torch_read(f->torch, t, 0, 1, &step, err);
    if (rc != 0) {
        return rc;
    }
    if (!(step >= 0 && step < (float)INT32_MAX)) {
        return mb_err_set(err, MB_ECORRUPT, "%s: tensor %s is no number of steps", f->path,
                          t->name);
    }
    return mb_shards_take_step(f, t->name, (int64_t)step, have, err);
}

/* ---- the scheduler ---- */

/* One of several names that releases gave it. */
static const json_t *either(const json_t *o, const char *const names[3])
{
    const json_t *j = NULL;
    for (int i = 0; i < 3 && names[i] != NULL && j == NULL; i++) {
        j = json_object_get(o, names[i]);
    }
    return j;
}

static int take_samples(const struct mb_shards_file *f, const json_t *o, const char *const names[3],
                        int64_t *out, struct mb_err *err)
{
    const json_t *j = either(o, names);
    const double v = json_number_value(j);
    if (!json_is_number(j) || !(v >= 0 && v <= SAMPLES_MAX)) {
        return mb_err_set(err, MB_ECORRUPT, "%s: opt_param_scheduler: %s is no number of samples",
                          f->path, names[0]);
    }
    *out = (int64_t)v; /* of a fraction, as it is made from the argument */
    return 0;
}

/* An argument is what the scheduler had, not what the run was told. */
static int take_argument(struct mb_shards *s, const char *argument, const json_t *value)
{
    return json_is_number(value) || json_is_string(value)
               ? json_object_set(s->args, argument, (json_t *)(uintptr_t)value)
               : 0;
}

static int take_scheduler(struct mb_shards *s, const struct mb_shards_file *f, const json_t *o,
                          struct mb_err *err)
{
    static const struct {
        const char *argument, *names[3];
    } words[] = {
        {"lr", {"max_lr", "start_lr"}},
        {"min_lr", {"min_lr"}},
        {"lr_decay_style", {"lr_decay_style", "decay_style"}},
        {"start_weight_decay", {"start_wd"}},
        {"end_weight_decay", {"end_wd"}},
        {"weight_decay_incr_style", {"wd_incr_style"}},
    };
    const struct {
        const char *names[3];
        int64_t *out;
    } samples[] = {
        {{"num_steps", "num_iters"}, &s->optimizer.schedule_samples},
        {{"lr_warmup_steps", "warmup_steps", "warmup_iter"}, &s->optimizer.warmup_samples},
        {{"lr_decay_steps", "decay_steps", "end_iter"}, &s->optimizer.decay_samples},
    };
    int rc = json_is_object(o)
                 ? 0
                 : bad(f, MB_ECORRUPT, "it has an optimizer, but no opt_param_scheduler", err);
    for (size_t i = 0; i < sizeof samples / sizeof samples[0] && rc == 0; i++) {
        rc = take_samples(f, o, samples[i].names, samples[i].out, err);
    }
    for (size_t i = 0; i < sizeof words / sizeof words[0] && rc == 0; i++) {
        rc = take_argument(s, words[i].argument, either(o, words[i].names)) == 0
                 ? 0
                 : mb_shards_no_memory(s, err);
    }
    if (rc != 0) {
        return rc;
    }
    char *text = json_dumps(s->args, JSON_COMPACT);
    if (text == NULL) {
        return mb_shards_no_memory(s, err);
    }
    mb_free(s->args_text);
    s->args_text = text;
    return 0;
}

/* ---- the loss scale ---- */

int mb_shards_take_scaler(struct mb_shards *s, const struct mb_shards_file *f, const json_t *o,
                          const struct mb_torch_tensor *scale, struct mb_err *err)
{
    const json_t *growth = json_object_get(o, "growth_tracker");
    const json_t *hysteresis = json_object_get(o, "hysteresis_tracker");
    float value = 0;
    if (o == NULL || json_object_size(o) == 0) { /* a constant one is empty */
        return 0;
    }
    int rc = scale != NULL && scale->n == 1 && scale->dtype == MB_ST_F32
                 ? mb_torch_read(f->torch, scale, 0, 1, &value, err)
                 : bad(f, MB_ECORRUPT, "grad_scaler has no scale", err);
    if (rc == 0 && (!(value > 0 && value <= FLT_MAX) || !json_is_integer(growth) ||
                    json_integer_value(growth) < 0 || !json_is_integer(hysteresis))) {
        rc = bad(f, MB_ECORRUPT,
                 "grad_scaler: expected a positive scale and the numbers growth_tracker and "
                 "hysteresis_tracker",
                 err);
    }
    if (rc == 0) {
        s->optimizer.has_grad_scaler = 1;
        s->optimizer.loss_scale = (double)value;
        s->optimizer.growth_tracker = json_integer_value(growth);
        s->optimizer.hysteresis_tracker = json_integer_value(hysteresis);
    }
    return rc;
}

/* ---- groups ---- */

static int bad_group(const struct mb_shards_file *f, size_t g, const char *what, struct mb_err *err)
{
    return mb_err_set(err, MB_EUNSUPPORTED, "%s: param_groups %zu: %s", f->path, g, what);
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

int mb_shards_check_group(const struct mb_shards_file *f, const json_t *groups, size_t g,
                          int *no_decay, int *decoupled, struct mb_err *err)
{
    const json_t *group = json_array_get(groups, g);
    const double wd_mult = number_of(group, "wd_mult", -1);
    if (wd_mult != 0 && wd_mult != 1) {
        return bad_group(f, g, "its wd_mult is neither 0 nor 1: no group of ours", err);
    }
    if (number_of(group, "lr_mult", 1) != 1) {
        return bad_group(f, g, "its lr_mult is not 1: no group of ours", err);
    }
    if (is_true(group, "is_expert_parallel", 0)) {
        return bad_group(f, g, "it is of experts: expert parallelism is not provided", err);
    }
    if (is_true(group, "amsgrad", 0)) {
        return bad_group(f, g, "amsgrad is not provided", err);
    }
    *no_decay = wd_mult == 0;
    *decoupled = is_true(group, "is_decoupled_lr", 0) || !is_true(group, "default_config", 1);
    return 0;
}

int mb_shards_take_groups(struct mb_shards *s, const struct mb_shards_file *f, const json_t *adam,
                          struct mb_err *err)
{
    const json_t *groups = json_object_get(adam, "param_groups");
    int rc = json_is_array(groups) && json_array_size(groups) > 0
                 ? 0
                 : bad(f, MB_ECORRUPT, "its optimizer has no param_groups", err);
    for (size_t i = 0; i < json_array_size(groups) && rc == 0; i++) {
        const double step = number_of(json_array_get(groups, i), "step", -1);
        if (step >= 0 && step < INT32_MAX && step == floor(step)) { /* 3.0 of torch's own Adam */
            rc = mb_shards_take_step(f, "param_groups", (int64_t)step, &s->group_steps, err);
        }
    }
    return rc;
}

/* ---- all of it ---- */

/* The dictionary that has param_groups, and how names of its tensors begin. */
static const json_t *find_adam(const json_t *o, const char **prefix)
{
    static const struct {
        const char *key, *prefix;
    } deeper[] = {{"optimizer", "optimizer.optimizer."},
                  {"optimizer_state_dict", "optimizer.optimizer_state_dict."}};
    *prefix = "optimizer.";
    for (size_t i = 0; i < sizeof deeper / sizeof deeper[0]; i++) {
        const json_t *j = json_object_get(o, deeper[i].key);
        if (json_is_object(j)) {
            *prefix = deeper[i].prefix;
            return j;
        }
    }
    return o;
}

int mb_shards_take_settings(struct mb_shards *s, const struct mb_shards_file *f,
                            const json_t **adam, const char **prefix, struct mb_err *err)
{
    const json_t *o = json_object_get(mb_torch_settings(f->torch), "optimizer");
    if (o == NULL) {
        return bad(f, MB_ECORRUPT, "it has no optimizer, or one of too many settings", err);
    }
    if (json_is_array(o) || json_object_get(o, "0") != NULL) {
        return bad(f, MB_EUNSUPPORTED, "its optimizer is a chain of several, which is not provided",
                   err);
    }
    *adam = find_adam(o, prefix);
    int rc = mb_shards_take_groups(s, f, *adam, err);
    return rc == 0 ? mb_shards_take_scaler(s, f, json_object_get(o, "grad_scaler"),
                                           mb_shards_look_up(f, "optimizer.grad_scaler.scale"), err)
                   : rc;
}

void mb_shards_close_buffers(struct mb_shards *s)
{
    for (uint64_t i = 0; s->buffers != NULL && i < s->run.tp * s->run.pp; i++) {
        mb_shards_close_file(&s->buffers[i]);
    }
    mb_free(s->buffers);
    s->buffers = NULL;
}

int mb_shards_make_states(struct mb_shards *s, uint64_t tp, struct mb_err *err)
{
    mb_shards_close_buffers(s);
    mb_free(s->states);
    s->states_tp = tp;
    s->states = mb_calloc(s->layout.n * tp * MB_SHARDS_STATES, sizeof *s->states);
    s->buffers = mb_calloc(s->run.tp * s->run.pp, sizeof *s->buffers);
    return s->states != NULL && s->buffers != NULL ? 0 : mb_shards_no_memory(s, err);
}

int mb_shards_take_optimizer(struct mb_shards *s, struct mb_err *err)
{
    s->optimizer = (struct mb_shards_optimizer){0};
    s->group_steps = s->param_steps = -1;
    int rc =
        s->dist != NULL ? mb_shards_take_dist_states(s, err) : mb_shards_take_torch_states(s, err);
    s->optimizer.steps = s->param_steps >= 0 ? s->param_steps : s->group_steps;
    if (rc == 0 && s->optimizer.steps < 0) {
        rc = bad(&s->files[0], MB_ECORRUPT, "its optimizer does not say how many steps it made",
                 err);
    }
    if (rc == 0) { /* last: of an optimizer that is refused the arguments stay, too */
        rc = take_scheduler(
            s, &s->files[0],
            json_object_get(mb_torch_settings(s->files[0].torch), "opt_param_scheduler"), err);
    }
    s->has_taken_optimizer = rc == 0;
    return rc;
}

const struct mb_shards_optimizer *mb_shards_optimizer(const struct mb_shards *s)
{
    return s->has_taken_optimizer ? &s->optimizer : NULL;
}
