/*
 * The arguments of numbers' formats, as Megatron-LM takes them, and what the device makes of them.
 *
 *  1. --fp16 and --bf16 exclude each other; the CPU computes in fp32 where bf16 is asked for. FP8
 *     goes beside bf16, on GPUs; what the GPU itself lacks is the model's to say.
 *  2. Gradients of --bf16 are summed in fp32, which is said, or with --grad-reduce-in-bf16 in bf16.
 *  3. --loss-scale is a constant one, else the other four say how a dynamic one goes. Without
 *     --fp16 they are noted.
 */
#include "worker/args_table.h"

#include <math.h>
#include <string.h>
#include "base/str.h"

enum { FP8_MARGIN_MAX = 64 }; /* powers of two: more than either format spans */

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

static int check_loss_scale(struct mb_args *a, struct mb_err *err)
{
    const struct mb_loss_scale_config c = mb_args_loss_scale(a);
    if (mb_arg_raw(a, "fp16-lm-cross-entropy")->given && !a->fp16) {
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

static int say(struct mb_args *a, const char *line, struct mb_err *err)
{
    return mb_buf_puts(&a->notes, line) == 0
               ? 0
               : mb_err_set(err, MB_ENOMEM, "out of memory for notes");
}

static int check_fp8(const struct mb_args *a, int on_gpu, struct mb_err *err)
{
    if (a->fp8 == NULL) {
        return 0;
    }
    if (!on_gpu) {
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "--fp8-format %s: FP8 needs a GPU of compute capability 8.9 or higher; "
                          "--distributed-backend gloo computes on the CPU",
                          a->fp8);
    }
    if (!a->bf16) {
        return mb_err_set(err, MB_EINVAL,
                          "--fp8-format %s needs --bf16, for all that is not in FP8", a->fp8);
    }
    if (a->fp8_margin < -FP8_MARGIN_MAX || a->fp8_margin > FP8_MARGIN_MAX) {
        return mb_err_set(err, MB_EINVAL, "fp8-margin is %lld: it must be from %d to %d",
                          (long long)a->fp8_margin, -FP8_MARGIN_MAX, FP8_MARGIN_MAX);
    }
    return 0;
}

int mb_args_wants_graphs(const struct mb_args *a)
{
    return strcmp(a->distributed_backend, "nccl") == 0 && !a->profile &&
           strcmp(a->cuda_graph_impl, "local") == 0;
}

static int check_graphs(struct mb_args *a, int on_gpu, struct mb_err *err)
{
    const char *impl = a->cuda_graph_impl;
    const int given = mb_arg_raw(a, "cuda-graph-impl")->given;
    if (a->enable_cuda_graph && given) {
        return mb_err_set(err, MB_EINVAL,
                          "Do not use --enable-cuda-graph with --cuda-graph-impl, whose older name "
                          "it is");
    }
    if (strcmp(impl, "none") != 0 && strcmp(impl, "local") != 0) {
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "--cuda-graph-impl %s is not provided: local captures whole passes",
                          impl);
    }
    const int wanted = a->enable_cuda_graph || (given && strcmp(impl, "local") == 0);
    if (wanted && !on_gpu) {
        return say(a, "note: CUDA graphs are for GPUs; on the CPU they have no effect\n", err);
    }
    if (wanted && a->profile) {
        return say(a, "note: with --profile there are no CUDA graphs, so that ranges name layers\n",
                   err);
    }
    return 0;
}

static int check_profile(struct mb_args *a, int on_gpu, struct mb_err *err)
{
    int64_t rank;
    for (size_t i = 0; i < a->profile_ranks.n; i++) {
        int rc =
            mb_parse_i64(a->profile_ranks.items[i], 0, INT64_MAX, "--profile-ranks", &rank, err);
        if (rc != 0) {
            return rc;
        }
    }
    if (!a->profile || on_gpu) {
        return 0;
    }
    a->profile = 0;
    return say(a, "note: --profile is for GPUs; perf record shows a CPU's functions\n", err);
}

int mb_args_computes_in_bf16(const struct mb_args *a)
{
    return a->bf16 && strcmp(a->distributed_backend, "nccl") == 0;
}

/* What the device cannot do. */
static int check_device(struct mb_args *a, struct mb_err *err)
{
    const int on_gpu = strcmp(a->distributed_backend, "nccl") == 0;
    int rc = 0;
    if (a->fp16 && a->bf16) {
        return mb_err_set(err, MB_EINVAL, "fp16 and bf16 exclude each other");
    }
    rc = check_fp8(a, on_gpu, err);
    if (rc == 0 && !on_gpu && a->bf16) { /* more digits than were asked for, and twice the memory */
        rc = say(a, "note: --bf16: the CPU computes in fp32\n", err);
    }
    if (rc == 0) {
        rc = check_graphs(a, on_gpu, err);
    }
    return rc == 0 ? check_profile(a, on_gpu, err) : rc;
}

static int check_gradients(struct mb_args *a, struct mb_err *err)
{
    if (!a->bf16) {
        const int given = a->grad_reduce_in_bf16 != 0;
        a->grad_reduce_in_bf16 = 0; /* gradients are summed in the format of the parameters there */
        return given ? say(a, "note: --grad-reduce-in-bf16 has no effect without --bf16\n", err)
                     : 0;
    }
    if (a->accumulate_allreduce_grads_in_fp32 && a->grad_reduce_in_bf16) {
        return mb_err_set(err, MB_EINVAL,
                          "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 exclude "
                          "each other");
    }
    if (a->accumulate_allreduce_grads_in_fp32 || a->grad_reduce_in_bf16) {
        return 0;
    }
    a->accumulate_allreduce_grads_in_fp32 = 1;
    return say(a, "accumulate and all-reduce gradients in fp32 for bfloat16 data type.\n", err);
}

int mb_args_check_precision(struct mb_args *a, struct mb_err *err)
{
    int rc = check_device(a, err);
    if (rc == 0) {
        rc = check_gradients(a, err);
    }
    return rc == 0 ? check_loss_scale(a, err) : rc;
}
