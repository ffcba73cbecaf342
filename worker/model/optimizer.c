/*
 * The optimizer: states and segments. The parameter table, cut to [begin, end), becomes a list of
 * segments with and without weight decay; neighbours of the same kind are one segment. Gaps between
 * parameters belong to the segment before them: weights and gradients are zero there and stay so.
 */
#include "worker/model/optimizer.h"

#include "base/alloc.h"

struct mb_optimizer {
    struct mb_device *dev;
    struct mb_optimizer_config c;
    struct mb_master weights;
    const float *grads;
    size_t begin, end;
    struct mb_segment *segments; /* those of the decoupled learning rate behind the others */
    size_t n_segments, n_coupled;
    float *exp_avg, *exp_avg_sq; /* one block of device memory, exp_avg first; SGD has no other */
    double *sum;                 /* [1], device */
    int64_t steps;
};

void mb_optimizer_config_init(struct mb_optimizer_config *c)
{
    *c = (struct mb_optimizer_config){
        .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .sgd_momentum = 0.9};
}

static int check(const struct mb_optimizer_config *c, size_t begin, size_t end, struct mb_err *err)
{
    if (!(c->beta1 >= 0 && c->beta1 < 1))
        return mb_err_set(err, MB_EINVAL, "--adam-beta1 is %g and must lie in [0, 1)", c->beta1);
    if (!(c->beta2 >= 0 && c->beta2 < 1))
        return mb_err_set(err, MB_EINVAL, "--adam-beta2 is %g and must lie in [0, 1)", c->beta2);
    if (!(c->eps > 0))
        return mb_err_set(err, MB_EINVAL, "--adam-eps is %g and must be positive", c->eps);
    if (!(c->sgd_momentum >= 0))
        return mb_err_set(err, MB_EINVAL, "--sgd-momentum is %g and must not be negative",
                          c->sgd_momentum);
    if (begin >= end)
        return mb_err_set(err, MB_EINVAL, "optimizer range [%zu, %zu) is empty", begin, end);
    return 0;
}

static void add_segment(struct mb_optimizer *o, size_t first, size_t begin, size_t end, int decay)
{
    struct mb_segment *last = o->n_segments > first ? &o->segments[o->n_segments - 1] : NULL;
    if (last != NULL && last->decay == decay && last->end == begin)
        last->end = end;
    else
        o->segments[o->n_segments++] =
            (struct mb_segment){.begin = begin, .end = end, .decay = decay};
}

/* Those of one learning rate. */
static void cut_segments(struct mb_optimizer *o, const struct mb_param *params, size_t n_params,
                         int decoupled)
{
    const size_t first = o->n_segments;
    for (size_t i = 0; i < n_params; i++) {
        size_t begin = params[i].offset;
        size_t end = i + 1 < n_params ? params[i + 1].offset : o->end;
        begin = begin < o->begin ? o->begin : begin;
        end = end > o->end ? o->end : end;
        if (begin < end && (o->c.decoupled && params[i].is_embedding_or_output) == decoupled)
            add_segment(o, first, begin, end, !params[i].no_weight_decay);
    }
}

int mb_optimizer_create(struct mb_device *dev, const struct mb_optimizer_config *c,
                        const struct mb_param *params, size_t n_params,
                        const struct mb_master *weights, const float *grads, size_t begin,
                        size_t end, struct mb_optimizer **out, struct mb_err *err)
{
    int rc = check(c, begin, end, err);
    if (rc != 0)
        return rc;
    struct mb_optimizer *o = mb_calloc(1, sizeof(*o));
    if (o == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory creating the optimizer");
    *o = (struct mb_optimizer){
        .dev = dev, .c = *c, .weights = *weights, .grads = grads, .begin = begin, .end = end};
    o->segments = mb_calloc(n_params, sizeof(*o->segments));
    if (o->segments == NULL) {
        rc = mb_err_set(err, MB_ENOMEM, "out of memory creating the optimizer");
        goto out;
    }
    cut_segments(o, params, n_params, 0);
    o->n_coupled = o->n_segments;
    cut_segments(o, params, n_params, 1);
    const int has_second = c->rule == MB_OPTIMIZER_ADAM;
    size_t n = end - begin, state_bytes = (has_second ? 2 : 1) * n * sizeof(float);
    void *states = NULL, *sum = NULL;
    rc = dev->ops->alloc(dev->ctx, state_bytes, &states, err);
    if (rc != 0) {
        mb_err_wrap(err, "the optimizer's states of %zu elements", n);
        goto out;
    }
    o->exp_avg = states;
    o->exp_avg_sq = has_second ? o->exp_avg + n : NULL;
    rc = dev->ops->alloc(dev->ctx, sizeof(*o->sum), &sum, err);
    if (rc != 0)
        goto out;
    o->sum = sum;
    dev->ops->zero(dev->ctx, dev->stream, o->exp_avg, state_bytes);
out:
    if (rc != 0)
        mb_optimizer_destroy(o);
    else
        *out = o;
    return rc;
}

void mb_optimizer_destroy(struct mb_optimizer *o)
{
    if (o == NULL)
        return;
    o->dev->ops->free(o->dev->ctx, o->sum);
    o->dev->ops->free(o->dev->ctx, o->exp_avg);
    mb_free(o->segments);
    mb_free(o);
}

int mb_optimizer_squared_norm(struct mb_optimizer *o, double *sum, struct mb_err *err)
{
    const struct mb_device *dev = o->dev;
    double value = 0;
    dev->ops->zero(dev->ctx, dev->stream, o->sum, sizeof(*o->sum));
    dev->ops->squared_norm(dev->ctx, dev->stream, o->grads + o->begin, o->end - o->begin, o->sum);
    dev->ops->copy_out(dev->ctx, dev->stream, &value, o->sum, sizeof(value));
    int rc = dev->ops->synchronize(dev->ctx, dev->stream, err);
    if (rc != 0)
        return mb_err_wrap(err, "gradient norm");
    *sum = value;
    return 0;
}

double mb_optimizer_clip(double norm, double clip)
{
    if (clip <= 0)
        return 1;
    double coefficient = clip / (norm + 1e-6);
    return coefficient < 1 ? coefficient : 1;
}

static void update_sgd(struct mb_optimizer *o, size_t first, size_t end, double lr,
                       double weight_decay, double grad_coefficient)
{
    struct mb_sgd a = {.weight = o->weights.whole,
                       .upper = o->weights.upper,
                       .lower = o->weights.lower,
                       .grad = o->grads,
                       .momentum_buffer = o->exp_avg,
                       .state_begin = o->begin,
                       .segments = o->segments + first,
                       .n_segments = end - first,
                       .lr = lr,
                       .momentum = o->c.sgd_momentum,
                       .weight_decay = weight_decay,
                       .grad_scale = (float)grad_coefficient};
    o->dev->ops->sgd(o->dev->ctx, o->dev->stream, &a);
}

static void update_adam(struct mb_optimizer *o, size_t first, size_t end, double lr,
                        double weight_decay, double grad_coefficient)
{
    struct mb_adamw a = {.weight = o->weights.whole,
                         .upper = o->weights.upper,
                         .lower = o->weights.lower,
                         .grad = o->grads,
                         .exp_avg = o->exp_avg,
                         .exp_avg_sq = o->exp_avg_sq,
                         .state_begin = o->begin,
                         .segments = o->segments + first,
                         .n_segments = end - first,
                         .step = o->steps,
                         .lr = lr,
                         .beta1 = o->c.beta1,
                         .beta2 = o->c.beta2,
                         .eps = o->c.eps,
                         .weight_decay = weight_decay,
                         .grad_scale = (float)grad_coefficient};
    o->dev->ops->adamw(o->dev->ctx, o->dev->stream, &a);
}

static void update(struct mb_optimizer *o, size_t first, size_t end, double lr, double weight_decay,
                   double grad_coefficient)
{
    if (first == end)
        return;
    if (o->c.rule == MB_OPTIMIZER_SGD)
        update_sgd(o, first, end, lr, weight_decay, grad_coefficient);
    else
        update_adam(o, first, end, lr, weight_decay, grad_coefficient);
}

void mb_optimizer_step_decoupled(struct mb_optimizer *o, double lr, double decoupled_lr,
                                 double weight_decay, double grad_coefficient)
{
    o->steps++;
    update(o, 0, o->n_coupled, lr, weight_decay, grad_coefficient);
    update(o, o->n_coupled, o->n_segments, decoupled_lr, weight_decay, grad_coefficient);
}

void mb_optimizer_step(struct mb_optimizer *o, double lr, double weight_decay,
                       double grad_coefficient)
{
    mb_optimizer_step_decoupled(o, lr, lr, weight_decay, grad_coefficient);
}

float *mb_optimizer_exp_avg(struct mb_optimizer *o)
{
    return o->exp_avg;
}

float *mb_optimizer_exp_avg_sq(struct mb_optimizer *o)
{
    return o->exp_avg_sq;
}

int64_t mb_optimizer_steps(const struct mb_optimizer *o)
{
    return o->steps;
}

void mb_optimizer_set_steps(struct mb_optimizer *o, int64_t steps)
{
    o->steps = steps;
}
