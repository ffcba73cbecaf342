/*
 * Learning rate: warmup first, whatever the style; constant never ends; every other style is min_lr
 * after decay_samples; in between the style's coefficient goes from 1 to 0 between max_lr and
 * min_lr, except inverse-square-root, which has a formula of its own.
 */
#include "worker/model/schedule.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

static const char *const LR_STYLES[] = {"constant", "linear", "cosine", "inverse-square-root",
                                        "WSD"};
static const char *const WSD_STYLES[] = {"linear", "cosine", "exponential", "minus_sqrt"};
static const char *const WD_STYLES[] = {"constant", "linear", "cosine"};

static const double PI = 3.14159265358979323846;

static int check_lr(const struct mb_schedule *s, struct mb_err *err)
{
    if (!(s->min_lr >= 0))
        return mb_err_set(err, MB_EINVAL, "--min-lr is %g and must not be negative", s->min_lr);
    if (!(s->max_lr >= s->min_lr) || !isfinite(s->max_lr))
        return mb_err_set(err, MB_EINVAL, "--lr (%g) must be at least --min-lr (%g)", s->max_lr,
                          s->min_lr);
    if (!(s->init_lr >= 0 && s->init_lr <= s->max_lr))
        return mb_err_set(err, MB_EINVAL, "--lr-warmup-init (%g) must lie in [0, --lr (%g)]",
                          s->init_lr, s->max_lr);
    if (s->decay_samples <= 0)
        return mb_err_set(err, MB_EINVAL,
                          "the learning rate decays over %lld samples: must be positive",
                          (long long)s->decay_samples);
    if (s->warmup_samples < 0 || s->warmup_samples >= s->decay_samples)
        return mb_err_set(
            err, MB_EINVAL,
            "learning rate warmup (%lld samples) must be shorter than its decay (%lld samples)",
            (long long)s->warmup_samples, (long long)s->decay_samples);
    if (s->lr_style == MB_LR_WSD &&
        (s->wsd_decay_samples <= 0 || s->wsd_decay_samples > s->decay_samples))
        return mb_err_set(
            err, MB_EINVAL,
            "--lr-decay-style WSD needs a final decay in [1, %lld] samples, not %lld: "
            "give --lr-wsd-decay-iters or --lr-wsd-decay-samples",
            (long long)s->decay_samples, (long long)s->wsd_decay_samples);
    return 0;
}

int mb_schedule_check(const struct mb_schedule *s, struct mb_err *err)
{
    int rc = check_lr(s, err);
    if (rc != 0)
        return rc;
    if (!(s->start_wd >= 0 && s->end_wd >= s->start_wd) || !isfinite(s->end_wd))
        return mb_err_set(
            err, MB_EINVAL,
            "--end-weight-decay (%g) must be at least --start-weight-decay (%g), both >= 0",
            s->end_wd, s->start_wd);
    if (s->wd_style == MB_WD_CONSTANT && s->start_wd < s->end_wd)
        return mb_err_set(
            err, MB_EINVAL,
            "--weight-decay-incr-style constant needs equal start (%g) and end (%g) values",
            s->start_wd, s->end_wd);
    if (s->wd_style != MB_WD_CONSTANT && s->wd_incr_samples <= 0)
        return mb_err_set(err, MB_EINVAL,
                          "the weight decay grows over %lld samples: must be positive",
                          (long long)s->wd_incr_samples);
    return 0;
}

static double wsd_coefficient(const struct mb_schedule *s, int64_t n)
{
    int64_t start = s->decay_samples - s->wsd_decay_samples;
    if (n <= start)
        return 1;
    double q = (double)(n - start) / (double)s->wsd_decay_samples;
    switch (s->wsd_style) {
    case MB_WSD_LINEAR:
        return 1 - q;
    case MB_WSD_COSINE:
        return 0.5 * (cos(PI * q) + 1);
    case MB_WSD_EXPONENTIAL:
        return 2 * pow(0.5, q) - 1;
    case MB_WSD_MINUS_SQRT:
        break;
    }
    return 1 - sqrt(q);
}

double mb_schedule_lr(const struct mb_schedule *s, int64_t n)
{
    double span = s->max_lr - s->min_lr;
    if (s->warmup_samples > 0 && n <= s->warmup_samples)
        return s->init_lr + (s->max_lr - s->init_lr) * (double)n / (double)s->warmup_samples;
    if (s->lr_style == MB_LR_CONSTANT)
        return s->max_lr;
    if (n > s->decay_samples)
        return s->min_lr;
    if (s->lr_style == MB_LR_INVERSE_SQRT) {
        double warmup = s->warmup_samples > 1 ? (double)s->warmup_samples : 1;
        double lr = s->max_lr * sqrt(warmup) / sqrt(n > 1 ? (double)n : 1);
        return lr > s->min_lr ? lr : s->min_lr;
    }
    if (s->lr_style == MB_LR_WSD)
        return s->min_lr + wsd_coefficient(s, n) * span;
    double r = (double)(n - s->warmup_samples) / (double)(s->decay_samples - s->warmup_samples);
    double coefficient = s->lr_style == MB_LR_LINEAR ? 1 - r : 0.5 * (cos(PI * r) + 1);
    return s->min_lr + coefficient * span;
}

double mb_schedule_weight_decay(const struct mb_schedule *s, int64_t n)
{
    if (s->wd_style == MB_WD_CONSTANT || n > s->wd_incr_samples)
        return s->end_wd;
    double r = (double)n / (double)s->wd_incr_samples;
    double coefficient = s->wd_style == MB_WD_LINEAR ? r : 0.5 * (cos(PI * (1 - r)) + 1);
    return s->start_wd + coefficient * (s->end_wd - s->start_wd);
}

/* Index of s in names, or -1 with a text that lists them. */
static int find_name(const char *s, const char *const *names, int n_names, const char *argument,
                     struct mb_err *err)
{
    char list[128] = "";
    for (int i = 0; i < n_names; i++) {
        if (strcmp(s, names[i]) == 0)
            return i;
        if (i > 0)
            strcat(list, ", "); /* all names together are shorter than the list */
        strcat(list, names[i]);
    }
    mb_err_set(err, MB_EINVAL, "argument %s: invalid choice: '%s' (choose from %s)", argument, s,
               list);
    return -1;
}

#define N_NAMES(a) ((int)(sizeof(a) / sizeof((a)[0])))

int mb_lr_style_parse(const char *s, enum mb_lr_style *out, struct mb_err *err)
{
    int i = find_name(s, LR_STYLES, N_NAMES(LR_STYLES), "--lr-decay-style", err);
    if (i < 0)
        return MB_EINVAL;
    *out = (enum mb_lr_style)i;
    return 0;
}

int mb_wsd_style_parse(const char *s, enum mb_wsd_style *out, struct mb_err *err)
{
    int i = find_name(s, WSD_STYLES, N_NAMES(WSD_STYLES), "--lr-wsd-decay-style", err);
    if (i < 0)
        return MB_EINVAL;
    *out = (enum mb_wsd_style)i;
    return 0;
}

int mb_wd_style_parse(const char *s, enum mb_wd_style *out, struct mb_err *err)
{
    int i = find_name(s, WD_STYLES, N_NAMES(WD_STYLES), "--weight-decay-incr-style", err);
    if (i < 0)
        return MB_EINVAL;
    *out = (enum mb_wd_style)i;
    return 0;
}
