/*
 * The arguments of --fp16's loss scale, as Megatron-LM takes them: --loss-scale is a constant one,
 * else the other four say how a dynamic one goes. Without --fp16 they are noted.
 */
#include "worker/args_table.h"

#include <math.h>
#include <string.h>

struct mb_loss_scale_config mb_args_loss_scale(const struct mb_args *a)
{
    if (!a->fp16) {
        return (struct mb_loss_scale_config){.initial = 1};
    }
    if (!isnan(a->loss_scale) && a->loss_scale != 0) { /* as in Megatron, 0 is as good as None */
        return (struct mb_loss_scale_config){.initial = a->loss_scale};
    }
    const double window = fmax(fmin(a->loss_scale_window, 0x1p62), -1e9); /* fits the integer */
    return (struct mb_loss_scale_config){.is_dynamic = 1,
                                         .initial = a->initial_loss_scale,
                                         .min = a->min_loss_scale,
                                         .window = (int64_t)window,
                                         .hysteresis = a->hysteresis};
}

static int note_loss_scale(struct mb_args *a, struct mb_err *err)
{
    static const char *const NAMES[] = {"loss-scale", "initial-loss-scale", "min-loss-scale",
                                        "loss-scale-window", "hysteresis"};
    for (size_t i = 0; i < MB_ARG_N_ROWS; i++) {
        for (size_t k = 0; k < sizeof NAMES / sizeof NAMES[0]; k++) {
            if (strcmp(MB_ARG_ROWS[i].name, NAMES[k]) == 0 &&
                !mb_arg_is_default(&MB_ARG_ROWS[i], &a->raw[i]) &&
                mb_buf_printf(&a->notes,
                              "note: --%s has no effect: fp32 and bf16 need no loss scale\n",
                              NAMES[k]) != 0) {
                return mb_err_set(err, MB_ENOMEM, "out of memory for notes");
            }
        }
    }
    return 0;
}

static int was_given(const struct mb_args *a, const char *name)
{
    size_t i = 0;
    while (i < MB_ARG_N_ROWS && strcmp(MB_ARG_ROWS[i].name, name) != 0) {
        i++;
    }
    return i < MB_ARG_N_ROWS && a->raw[i].given;
}

int mb_args_check_loss_scale(struct mb_args *a, struct mb_err *err)
{
    const struct mb_loss_scale_config c = mb_args_loss_scale(a);
    if (was_given(a, "fp16-lm-cross-entropy") && !a->fp16) {
        return mb_err_set(err, MB_EINVAL, "%s",
                          "lm cross entropy in fp16 only support in fp16 mode.");
    }
    if (!a->fp16) {
        return note_loss_scale(a, err);
    }
    if (c.is_dynamic && a->loss_scale_window != floor(a->loss_scale_window)) {
        return mb_err_set(err, MB_EINVAL, "loss-scale-window is %g: it must be a whole number",
                          a->loss_scale_window);
    }
    int rc = mb_loss_scale_check(&c, err);
    if (rc == 0 && c.is_dynamic) { /* what is not finite is how the factor is found */
        a->check_for_nan_in_loss_and_grad = 0;
        if (mb_buf_puts(&a->notes, "WARNING: Setting args.check_for_nan_in_loss_and_grad to False "
                                   "since dynamic loss scaling is being used\n") != 0) {
            return mb_err_set(err, MB_ENOMEM, "out of memory for notes");
        }
    }
    return rc;
}
