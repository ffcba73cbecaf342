/*
 *  1. create: NVML, then one look at every device that nobody has: the baselines;
 *  2. look: if a device is CHECKED or QUARANTINED in the ledger, the timer runs;
 *  3. each tick asks for all of those at once on a pool thread; 4. back on the loop each sample
 *     gets its verdict, the ledger hears of it, the file is written when anything changed;
 *  5. nothing is unconfirmed any more: the timer stops.
 *  A device that the driver has no answer for is in quarantine after the same 30 s.
 */
#include "agent/gpu_keeper.h"

#include <stdio.h>
#include <string.h>
#include "agent/gpu_watch.h"
#include "agent/nvml.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"

enum { LOOK_MS = 500, FILE_MAX_BYTES = 1 << 20 };

struct sample {
    unsigned device;
    int has_answer;
    uint64_t used_bytes;
};

struct mb_gpu_keeper {
    struct mb_ledger *ledger;
    struct mb_nvml *nvml;
    char *path;
    void (*on_changed)(void *arg);
    void *arg;
    size_t n;
    struct mb_gpu_watch *watches; /* [n] by device */
    struct sample *samples;       /* [n] of the look under way */
    size_t n_samples;
    uv_timer_t timer;
    uv_work_t work;
    int is_asking, is_ticking;
    void (*on_closed)(void *arg);
    void *on_closed_arg;
    int is_closing;
};

/* ---- the file ---- */

static void keep(const struct mb_gpu_keeper *k)
{
    json_t *list = json_array();
    char *text;
    struct mb_err err = {.text = "no memory"};

    for (size_t i = 0; i < k->n; i++)
        json_array_append_new(list, json_pack("{s:b, s:I, s:b}", "has_baseline",
                                              k->watches[i].has_baseline, "baseline_bytes",
                                              (json_int_t)k->watches[i].baseline_bytes,
                                              "unconfirmed", k->watches[i].is_watched));
    text = json_dumps(list, JSON_INDENT(1));
    if (text == NULL || mb_fs_write_atomic(k->path, text, strlen(text), 0644, &err) != MB_OK)
        mb_warn("gpus", "a restarted agent would not know which are in doubt: %s", err.text);
    mb_free(text);
    json_decref(list);
}

/* NULL: there is none, or one that is not as it should be, which is as good as none: baselines are
 * taken anew. One that cannot be read is an error: what it has in doubt would be given away. */
static int read_list(const char *path, json_t **out, struct mb_err *err)
{
    struct mb_buf text = {0};
    struct mb_err failure = {0};
    json_error_t why;
    int rc = mb_fs_read(path, FILE_MAX_BYTES, &text, &failure);

    *out = rc == MB_OK ? json_loads(mb_buf_str(&text), 0, &why) : NULL;
    if (rc == MB_OK && *out == NULL && json_error_code(&why) == json_error_out_of_memory)
        rc = mb_err_set(&failure, MB_ENOMEM, "%s: out of memory", path);
    mb_buf_close(&text);
    if (rc == MB_OK || rc == MB_ENOENT)
        return MB_OK;
    *err = failure;
    return rc;
}

static int load(struct mb_gpu_keeper *k, struct mb_err *err)
{
    json_t *list, *item;
    size_t i;
    int rc = read_list(k->path, &list, err);

    if (rc != MB_OK)
        return mb_err_wrap(err, "which GPUs are in doubt is not known");
    json_array_foreach(list, i, item)
    {
        json_int_t baseline = 0;
        int has_baseline = 0, unconfirmed = 0;

        if (i >= k->n || json_unpack(item, "{s:b, s:I, s:b}", "has_baseline", &has_baseline,
                                     "baseline_bytes", &baseline, "unconfirmed", &unconfirmed) != 0)
            break;
        k->watches[i].has_baseline = has_baseline && baseline >= 0;
        k->watches[i].baseline_bytes = baseline >= 0 ? (uint64_t)baseline : 0;
        if (unconfirmed)
            mb_ledger_set_gpu(k->ledger, i, MB_LEDGER_GPU_CHECKED);
    }
    json_decref(list);
    return MB_OK;
}

/* ---- looking ---- */

static void ask(uv_work_t *work)
{
    struct mb_gpu_keeper *k = work->data;

    for (size_t i = 0; i < k->n_samples; i++)
        k->samples[i].has_answer =
            mb_nvml_used_bytes(k->nvml, k->samples[i].device, &k->samples[i].used_bytes) == MB_OK;
}

static int is_in_doubt(const struct mb_gpu_keeper *k, size_t device)
{
    enum mb_gpu_state s = mb_ledger_gpu_state(k->ledger, device);

    return s == MB_LEDGER_GPU_CHECKED || s == MB_LEDGER_GPU_QUARANTINED;
}

static int take(struct mb_gpu_keeper *k, const struct sample *s)
{
    static const enum mb_gpu_state states[] = {[MB_GPU_FREE] = MB_LEDGER_GPU_FREE,
                                               [MB_GPU_WAIT] = MB_LEDGER_GPU_CHECKED,
                                               [MB_GPU_QUARANTINE] = MB_LEDGER_GPU_QUARANTINED};
    struct mb_gpu_watch *w = &k->watches[s->device];
    int was_quarantined = w->is_quarantined;
    const char *name = mb_nvml_word(k->nvml, s->device);
    enum mb_gpu_verdict v;

    v = mb_gpu_watch_sample(w, name, s->has_answer ? &s->used_bytes : NULL, mb_mono_ms());
    if (v == MB_GPU_QUARANTINE && !was_quarantined)
        mb_error("gpus", "quarantine: %s", w->reason);
    if (v == MB_GPU_FREE && was_quarantined)
        mb_info("gpus", "GPU %s is free again, its quarantine ends", name);
    return mb_ledger_set_gpu(k->ledger, s->device, states[v]);
}

static void tick(uv_timer_t *timer);
static void finish_close(struct mb_gpu_keeper *k);

static void answered(uv_work_t *work, int status)
{
    struct mb_gpu_keeper *k = work->data;
    int changed = 0, in_doubt = 0;

    (void)status;
    k->is_asking = 0;
    if (k->is_closing) {
        finish_close(k);
        return;
    }
    for (size_t i = 0; i < k->n_samples; i++)
        if (is_in_doubt(k, k->samples[i].device))
            changed |= take(k, &k->samples[i]);
    for (size_t i = 0; i < k->n; i++)
        in_doubt |= is_in_doubt(k, i);
    if (!in_doubt) {
        uv_timer_stop(&k->timer);
        k->is_ticking = 0;
    }
    if (changed) {
        keep(k);
        k->on_changed(k->arg);
    }
}

static void tick(uv_timer_t *timer)
{
    struct mb_gpu_keeper *k = timer->data;

    if (k->is_asking)
        return; /* a driver that hangs is asked once */
    k->n_samples = 0;
    for (size_t i = 0; i < k->n; i++) {
        if (!is_in_doubt(k, i))
            continue;
        mb_gpu_watch_begin(&k->watches[i], mb_mono_ms());
        k->samples[k->n_samples++] = (struct sample){.device = (unsigned)i};
    }
    k->is_asking = uv_queue_work(timer->loop, &k->work, ask, answered) == 0;
}

void mb_gpu_keeper_look(struct mb_gpu_keeper *k)
{
    int begun = 0;

    if (k == NULL || k->is_closing)
        return;
    for (size_t i = 0; i < k->n; i++) {
        if (!is_in_doubt(k, i) || k->watches[i].is_watched)
            continue;
        mb_gpu_watch_begin(&k->watches[i], mb_mono_ms());
        begun = 1;
    }
    if (!begun)
        return;
    keep(k);
    if (!k->is_ticking)
        uv_timer_start(&k->timer, tick, 0, LOOK_MS);
    k->is_ticking = 1;
}

json_t *mb_gpu_keeper_json(const struct mb_gpu_keeper *k)
{
    json_t *list = json_array();

    for (size_t i = 0; k != NULL && i < k->n; i++)
        if (k->watches[i].is_quarantined)
            json_array_append_new(
                list, json_pack("{s:i, s:s}", "gpu", (int)i, "reason", k->watches[i].reason));
    return list;
}

/* ---- life ---- */

static void destroy(struct mb_gpu_keeper *k)
{
    mb_nvml_close(k->nvml);
    mb_free(k->path);
    mb_free(k->watches);
    mb_free(k->samples);
    mb_free(k);
}

/* Takes nvml. NULL: no memory. */
static struct mb_gpu_keeper *new_keeper(struct mb_nvml *nvml, size_t n, const char *node_dir)
{
    struct mb_gpu_keeper *k = mb_calloc(1, sizeof(*k));

    if (k == NULL) {
        mb_nvml_close(nvml);
        return NULL;
    }
    k->nvml = nvml;
    k->n = n;
    k->path = mb_path_join(node_dir, "gpus.json");
    k->watches = mb_calloc(n, sizeof(*k->watches));
    k->samples = mb_calloc(n, sizeof(*k->samples));
    if (k->path != NULL && k->watches != NULL && k->samples != NULL)
        return k;
    destroy(k);
    return NULL;
}

int mb_gpu_keeper_create(uv_loop_t *loop, struct mb_ledger *ledger, const char *node_dir,
                         void (*on_changed)(void *arg), void *arg, struct mb_gpu_keeper **out,
                         struct mb_err *err)
{
    size_t n = mb_ledger_gpus(ledger);
    struct mb_nvml *nvml = NULL;
    struct mb_gpu_keeper *k;
    int rc = n > 0 ? mb_nvml_open(&nvml, err) : MB_OK;

    *out = NULL;
    if (rc != MB_OK)
        return mb_err_wrap(err, "GPUs cannot be looked at");
    if (nvml == NULL)
        return MB_OK;
    k = new_keeper(nvml, n, node_dir);
    if (k == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory to look at the GPUs");
    k->ledger = ledger;
    k->on_changed = on_changed;
    k->arg = arg;
    rc = load(k, err);
    if (rc != MB_OK) {
        destroy(k);
        return rc;
    }
    for (size_t i = 0; i < n; i++) { /* at start-up, before anything waits for the loop */
        uint64_t used;

        if (mb_ledger_gpu_state(ledger, i) == MB_LEDGER_GPU_FREE &&
            mb_nvml_used_bytes(nvml, (unsigned)i, &used) == MB_OK)
            mb_gpu_watch_idle(&k->watches[i], used);
    }
    mb_ledger_check_gpus(ledger);
    uv_timer_init(loop, &k->timer);
    k->timer.data = k->work.data = k;
    keep(k);
    mb_gpu_keeper_look(k);
    *out = k;
    return MB_OK;
}

static void on_timer_closed(uv_handle_t *handle)
{
    struct mb_gpu_keeper *k = handle->data;
    void (*cb)(void *arg) = k->on_closed;
    void *arg = k->on_closed_arg;

    destroy(k);
    if (cb != NULL)
        cb(arg);
}

static void finish_close(struct mb_gpu_keeper *k)
{
    if (!k->is_asking)
        uv_close((uv_handle_t *)&k->timer, on_timer_closed);
}

void mb_gpu_keeper_close(struct mb_gpu_keeper *k, void (*cb)(void *arg), void *arg)
{
    if (k == NULL) {
        if (cb != NULL)
            cb(arg);
        return;
    }
    k->is_closing = 1;
    k->on_closed = cb;
    k->on_closed_arg = arg;
    finish_close(k);
}
