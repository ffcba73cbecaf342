/*
 * Adam with decoupled weight decay (Megatron's FusedAdam, adam_w_mode), or SGD with momentum and
 * weight decay in the gradient (torch.optim.SGD, as Megatron makes it), over a flat range [begin,
 * end) of a model's buffers: the whole model, or one rank's shard. States are fp32 device memory of
 * end - begin elements: two of Adam, one of SGD. For one layout the result is bitwise
 * deterministic. Threads: that of the device.
 *
 * A step of a gang: norm2 = all-reduce(mb_optimizer_squared_norm()) when gradients are sharded,
 * coefficient = mb_optimizer_clip(), mb_optimizer_step(). A step with a non-finite norm must be
 * skipped by the caller; a skipped step does not advance the step count.
 */
#ifndef MOBULA_WORKER_MODEL_OPTIMIZER_H
#define MOBULA_WORKER_MODEL_OPTIMIZER_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"
#include "worker/kernels/backend.h"
#include "worker/kernels/master.h"
#include "worker/model/param.h"

enum mb_optimizer_rule { MB_OPTIMIZER_ADAM, MB_OPTIMIZER_SGD };

struct mb_optimizer_config {
    enum mb_optimizer_rule rule;
    double beta1;        /* 0.9, [0, 1) */
    double beta2;        /* 0.999, [0, 1) */
    double eps;          /* 1e-8, > 0 */
    double sgd_momentum; /* 0.9, >= 0 */
    int decoupled;       /* 1: embedding and output layer have a learning rate of their own */
};

void mb_optimizer_config_init(struct mb_optimizer_config *c);

struct mb_optimizer;

/* dev, grads and what weights points to are borrowed and must outlive the optimizer; params is
 * copied. States start at 0. */
int mb_optimizer_create(struct mb_device *dev, const struct mb_optimizer_config *c,
                        const struct mb_param *params, size_t n_params,
                        const struct mb_master *weights, const float *grads, size_t begin,
                        size_t end, struct mb_optimizer **out, struct mb_err *err);
void mb_optimizer_destroy(struct mb_optimizer *o);

/* Sum of squared gradients of [begin, end); waits for the device. */
int mb_optimizer_squared_norm(struct mb_optimizer *o, double *sum, struct mb_err *err);

/* Clipping coefficient: clip / (norm + 1e-6) if below 1, else 1; clip 0 is off (spec 2.6). Pure. */
double mb_optimizer_clip(double norm, double clip);

/* The same with a learning rate for embedding and output layer, where the configuration says so. */
void mb_optimizer_step_decoupled(struct mb_optimizer *o, double lr, double decoupled_lr,
                                 double weight_decay, double grad_coefficient);

/* Enqueue one update with gradients * grad_coefficient; advances the step count. */
void mb_optimizer_step(struct mb_optimizer *o, double lr, double weight_decay,
                       double grad_coefficient);

/* For checkpoints: device memory of end - begin elements each, and the number of steps taken. Of
 * SGD the first is the momentum, the second NULL. */
float *mb_optimizer_exp_avg(struct mb_optimizer *o);
float *mb_optimizer_exp_avg_sq(struct mb_optimizer *o);
int64_t mb_optimizer_steps(const struct mb_optimizer *o);
void mb_optimizer_set_steps(struct mb_optimizer *o, int64_t steps);

#endif
