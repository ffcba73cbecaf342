/*
 * The factor is a number of fp32, as Megatron-LM keeps it: halving and doubling are exact. Beyond
 * the largest one Megatron-LM's becomes infinite and stays so, and no step is taken again; here it
 * ends at the largest power of two.
 */
#include "worker/model/loss_scale.h"

#include <float.h>
#include <math.h>

static const double LARGEST = 0x1p127;

int mb_loss_scale_check(const struct mb_loss_scale_config *c, struct mb_err *err)
{
    if (!(c->initial > 0 && c->initial <= (double)FLT_MAX))
        return mb_err_set(err, MB_EINVAL, "%s is %g: it must be positive and finite in fp32",
                          c->is_dynamic ? "initial-loss-scale" : "loss-scale", c->initial);
    if (!c->is_dynamic)
        return 0;
    if (!(c->min > 0 && c->min <= c->initial))
        return mb_err_set(err, MB_EINVAL,
                          "min-loss-scale is %g: it must be positive and at most "
                          "initial-loss-scale, which is %g",
                          c->min, c->initial);
    if (c->window <= 0)
        return mb_err_set(err, MB_EINVAL, "loss-scale-window is %lld: it must be positive",
                          (long long)c->window);
    if (c->hysteresis <= 0)
        return mb_err_set(err, MB_EINVAL, "hysteresis is %lld: it must be positive",
                          (long long)c->hysteresis);
    return 0;
}

void mb_loss_scale_start(struct mb_loss_scale *s, const struct mb_loss_scale_config *c)
{
    *s = (struct mb_loss_scale){.scale = (double)(float)c->initial, .patience = c->hysteresis};
}

void mb_loss_scale_update(struct mb_loss_scale *s, const struct mb_loss_scale_config *c,
                          int has_overflowed)
{
    if (!c->is_dynamic)
        return;
    if (has_overflowed) {
        s->n_good = 0;
        s->patience--;
        if (s->patience <= 0)
            s->scale = fmax(s->scale / 2, (double)(float)c->min);
        return;
    }
    s->n_good++;
    if (s->n_good == c->window) {
        s->n_good = 0;
        s->patience = c->hysteresis;
        s->scale = fmin(s->scale * 2, LARGEST);
    }
}
