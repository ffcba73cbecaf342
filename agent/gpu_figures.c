/*
 *  1. begin: the driver has answered (of AMD's files the paths are known); a timer has a thread
 * read into a list of its own.
 *  2. Back on the loop the lists change places: nobody sees a half one.
 *  3. A driver that hangs is asked once; its last figures stay.
 *  4. close: a thread that reads is left behind with its list.
 */
#include "agent/gpu_figures.h"

#include <stdio.h>
#include <string.h>
#include "agent/metrics.h"
#include "base/alloc.h"
#include "base/errand.h"

enum { EVERY_MS = 5000 };

/* The thread's until it has returned. */
struct reading {
    struct mb_nvml *nvml; /* one holder more; NULL: they are AMD's */
    struct mb_amd amd;
    unsigned n;
    struct mb_gpu_usage *usage; /* [n] */
};

struct mb_gpu_figures {
    struct mb_nvml *nvml; /* NULL: they are AMD's */
    struct mb_amd amd;
    unsigned n, n_known;
    struct mb_gpu_usage *known; /* [n_known] */
    uv_timer_t timer;
    struct mb_errand *errand; /* NULL: nobody reads */
    void (*on_closed)(void *arg);
    void *on_closed_arg;
};

/* ---- texts ---- */

static const struct {
    uint64_t bit;
    const char *name;
} reasons[] = {
    {MB_GPU_THROTTLE_POWER_CAP, "power cap"},
    {MB_GPU_THROTTLE_HW, "hardware slowdown"},
    {MB_GPU_THROTTLE_THERMAL, "temperature"},
    {MB_GPU_THROTTLE_HW_THERMAL, "temperature (hardware)"},
    {MB_GPU_THROTTLE_POWER_BRAKE, "power brake"},
};

enum { N_REASONS = sizeof(reasons) / sizeof(reasons[0]) };

static json_t *throttle_json(uint64_t throttle)
{
    json_t *list = json_array();

    for (size_t i = 0; i < N_REASONS; i++)
        if (throttle & reasons[i].bit)
            json_array_append_new(list, json_string(reasons[i].name));
    return list;
}

static json_t *count_json(const struct mb_gpu_usage *g, uint64_t count)
{
    return g->has_ecc ? json_integer((json_int_t)count) : json_null();
}

json_t *mb_gpu_usage_json(const struct mb_gpu_usage *gpus, unsigned n)
{
    json_t *list = json_array();

    for (unsigned i = 0; i < n; i++) {
        const struct mb_gpu_usage *g = &gpus[i];

        json_array_append_new(
            list,
            json_pack("{s:i, s:s, s:s, s:s, s:i, s:I, s:I, s:f, s:f, s:i, s:i, s:o, s:o, s:o}",
                      "gpu", (int)i, "device", g->word, "name", g->name, "uuid", g->uuid,
                      "utilization_percent", (int)g->percent, "memory_used_bytes",
                      (json_int_t)g->used_bytes, "memory_total_bytes", (json_int_t)g->total_bytes,
                      "power_watts", (double)g->power_mw / 1000, "power_limit_watts",
                      (double)g->power_limit_mw / 1000, "temperature_celsius",
                      (int)g->temperature_c, "sm_clock_mhz", (int)g->sm_clock_mhz, "ecc_corrected",
                      count_json(g, g->ecc_corrected), "ecc_uncorrected",
                      count_json(g, g->ecc_uncorrected), "throttle", throttle_json(g->throttle)));
    }
    return list;
}

static double utilization_of(const struct mb_gpu_usage *g)
{
    return (double)g->percent / 100;
}

static double used_of(const struct mb_gpu_usage *g)
{
    return (double)g->used_bytes;
}

static double total_of(const struct mb_gpu_usage *g)
{
    return (double)g->total_bytes;
}

static double power_of(const struct mb_gpu_usage *g)
{
    return (double)g->power_mw / 1000;
}

static double power_limit_of(const struct mb_gpu_usage *g)
{
    return (double)g->power_limit_mw / 1000;
}

static double temperature_of(const struct mb_gpu_usage *g)
{
    return g->temperature_c;
}

static double clock_of(const struct mb_gpu_usage *g)
{
    return (double)g->sm_clock_mhz * 1e6;
}

static const struct {
    const char *name, *help;
    double (*value)(const struct mb_gpu_usage *g);
} gauges[] = {
    {"mobula_gpu_utilization_ratio", "Share of time in which a kernel ran.", utilization_of},
    {"mobula_gpu_memory_used_bytes", "Memory in use.", used_of},
    {"mobula_gpu_memory_total_bytes", "Memory of the GPU.", total_of},
    {"mobula_gpu_power_watts", "Power it draws.", power_of},
    {"mobula_gpu_power_limit_watts", "Power it may draw.", power_limit_of},
    {"mobula_gpu_temperature_celsius", "Temperature of its core.", temperature_of},
    {"mobula_gpu_sm_clock_hertz", "Clock of its multiprocessors.", clock_of},
};

/* The labels of a GPU, and one more pair. */
struct labels {
    char number[16];
    const char *pair[9];
};

static const char *const *labels_of(struct labels *l, const struct mb_gpu_usage *g, unsigned i,
                                    const char *key, const char *value)
{
    snprintf(l->number, sizeof(l->number), "%u", i);
    memcpy(l->pair,
           (const char *const[]){"gpu", l->number, "device", g->word, "uuid", g->uuid, key, value,
                                 NULL},
           sizeof(l->pair));
    return l->pair;
}

static int put_ecc(const struct mb_gpu_usage *gpus, unsigned n, struct mb_buf *out)
{
    static const char name[] = "mobula_gpu_ecc_errors_total";
    struct labels l;
    int rc = mb_metric_family(out, name, MB_METRIC_COUNTER,
                              "Errors of memory since the driver was loaded.");

    for (unsigned i = 0; i < n && rc == MB_OK; i++) {
        if (!gpus[i].has_ecc)
            continue;
        rc = mb_metric_sample(out, name, labels_of(&l, &gpus[i], i, "kind", "corrected"),
                              (double)gpus[i].ecc_corrected);
        if (rc == MB_OK)
            rc = mb_metric_sample(out, name, labels_of(&l, &gpus[i], i, "kind", "uncorrected"),
                                  (double)gpus[i].ecc_uncorrected);
    }
    return rc;
}

static int put_throttle(const struct mb_gpu_usage *gpus, unsigned n, struct mb_buf *out)
{
    static const char name[] = "mobula_gpu_throttled";
    struct labels l;
    int rc = mb_metric_family(out, name, MB_METRIC_GAUGE,
                              "1 while clocks are lower than they could be, by reason.");

    for (unsigned i = 0; i < n; i++)
        for (size_t k = 0; k < N_REASONS && rc == MB_OK; k++)
            rc = mb_metric_sample(out, name, labels_of(&l, &gpus[i], i, "reason", reasons[k].name),
                                  (gpus[i].throttle & reasons[k].bit) != 0);
    return rc;
}

int mb_gpu_usage_metrics(const struct mb_gpu_usage *gpus, unsigned n, struct mb_buf *out)
{
    struct labels l;
    int rc = MB_OK;

    if (n == 0)
        return MB_OK;
    for (size_t k = 0; k < sizeof(gauges) / sizeof(gauges[0]) && rc == MB_OK; k++) {
        rc = mb_metric_family(out, gauges[k].name, MB_METRIC_GAUGE, gauges[k].help);
        for (unsigned i = 0; i < n && rc == MB_OK; i++)
            rc = mb_metric_sample(out, gauges[k].name, labels_of(&l, &gpus[i], i, NULL, NULL),
                                  gauges[k].value(&gpus[i]));
    }
    if (rc == MB_OK)
        rc = put_ecc(gpus, n, out);
    return rc == MB_OK ? put_throttle(gpus, n, out) : rc;
}

/* ---- looking ---- */

unsigned mb_gpu_figures_latest(const struct mb_gpu_figures *f, const struct mb_gpu_usage **out)
{
    *out = f != NULL ? f->known : NULL;
    return f != NULL ? f->n_known : 0;
}

static void destroy(struct mb_gpu_figures *f)
{
    mb_nvml_close(f->nvml);
    mb_free(f->known);
    mb_free(f);
}

static void on_timer_closed(uv_handle_t *handle)
{
    struct mb_gpu_figures *f = handle->data;
    void (*cb)(void *arg) = f->on_closed;
    void *arg = f->on_closed_arg;

    destroy(f);
    cb(arg);
}

static void read_all(void *load)
{
    struct reading *r = load;

    for (unsigned i = 0; i < r->n; i++)
        if (r->nvml != NULL)
            mb_nvml_usage(r->nvml, i, &r->usage[i]);
        else
            mb_amd_usage(&r->amd, i, &r->usage[i]);
}

static void after_read(void *owner, void *load)
{
    struct mb_gpu_figures *f = owner;
    struct reading *r = load;
    struct mb_gpu_usage *former = f->known;

    f->errand = NULL;
    f->known = r->usage;
    r->usage = former;
    f->n_known = r->n;
}

static void drop_reading(void *load)
{
    struct reading *r = load;

    mb_nvml_close(r->nvml);
    mb_free(r->usage);
    mb_free(r);
}

static void on_timer(uv_timer_t *t)
{
    static const struct mb_errand_plan plan = {read_all, after_read, drop_reading};
    struct mb_gpu_figures *f = t->data;
    struct reading *r = f->errand == NULL ? mb_calloc(1, sizeof(*r)) : NULL;

    if (r == NULL)
        return;
    r->nvml = f->nvml != NULL ? mb_nvml_share(f->nvml) : NULL;
    r->amd = f->amd;
    r->usage = mb_calloc(f->n, sizeof(*r->usage));
    r->n = f->n;
    if (r->usage != NULL)
        f->errand = mb_errand_start(t->loop, &plan, f, r);
    else
        drop_reading(r);
}

int mb_gpu_figures_create(uv_loop_t *loop, struct mb_gpu_figures **out, struct mb_err *err)
{
    struct mb_gpu_figures *f = mb_calloc(1, sizeof(*f));

    *out = f;
    if (f == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory for the GPUs' figures");
    uv_timer_init(loop, &f->timer);
    f->timer.data = f;
    return MB_OK;
}

void mb_gpu_figures_begin(struct mb_gpu_figures *f, struct mb_nvml *nvml, const struct mb_amd *amd)
{
    f->nvml = nvml != NULL ? mb_nvml_share(nvml) : NULL;
    f->amd = *amd;
    f->n = nvml != NULL ? mb_nvml_count(nvml) : amd->n;
    if (f->n > 0)
        uv_timer_start(&f->timer, on_timer, 0, EVERY_MS);
}

void mb_gpu_figures_close(struct mb_gpu_figures *f, void (*cb)(void *arg), void *arg)
{
    if (f == NULL) {
        cb(arg);
        return;
    }
    f->on_closed = cb;
    f->on_closed_arg = arg;
    mb_errand_leave(f->errand);
    uv_close((uv_handle_t *)&f->timer, on_timer_closed);
}
