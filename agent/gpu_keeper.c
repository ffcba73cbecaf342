/*
 *  1. create: NVML; devices that nobody has are asked about, and those without a baseline wait;
 *  2. look: while a device is CHECKED or QUARANTINED in the ledger, or asked about, the timer runs;
 *  3. each tick asks for each device in doubt, on a thread of its own, unless it is being asked;
 *  4. back on the loop the sample gets its verdict, the ledger hears of it, the file is written
 *     when anything changed; 5. nothing is in doubt or asked any more: the timer stops.
 *  A device that the driver has no answer for is in quarantine after the same 30 s, and one for
 *  which it does not even return: others are asked as before, close leaves that thread behind.
 */
#include "agent/gpu_keeper.h"

#include <stdio.h>
#include <string.h>
#include "agent/gpu_watch.h"
#include "agent/nvml.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/errand.h"
#include "base/fs.h"
#include "base/log.h"

enum { LOOK_MS = 500, FILE_MAX_BYTES = 1 << 20 };

/* The thread's until it has returned. */
struct question {
    struct mb_nvml *nvml; /* one holder more */
    unsigned device;
    int has_answer;
    uint64_t used_bytes;
};

struct asked {
    struct mb_errand *errand; /* NULL: none is under way */
    uint64_t since_ms;
};

struct mb_gpu_keeper {
    struct mb_ledger *ledger;
    struct mb_nvml *nvml;
    char *path;
    void (*on_changed)(void *arg);
    void *arg;
    size_t n;
    struct mb_gpu_watch *watches; /* [n] by device */
    struct asked *asked;          /* [n] likewise */
    uv_timer_t timer;
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
        json_array_append_new(
            list, json_pack("{s:b, s:I, s:b}", "has_baseline", k->watches[i].has_baseline,
                            "baseline_bytes", (json_int_t)k->watches[i].baseline_bytes,
                            "unconfirmed", k->watches[i].is_watched && !k->watches[i].is_new));
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

static void ask(void *load)
{
    struct question *q = load;

    q->has_answer = mb_nvml_used_bytes(q->nvml, q->device, &q->used_bytes) == MB_OK;
}

static void drop_question(void *load)
{
    struct question *q = load;

    mb_nvml_close(q->nvml);
    mb_free(q);
}

static int is_in_doubt(const struct mb_gpu_keeper *k, size_t device)
{
    enum mb_gpu_state s = mb_ledger_gpu_state(k->ledger, device);

    return s == MB_LEDGER_GPU_CHECKED || s == MB_LEDGER_GPU_QUARANTINED;
}

/* The verdict on a device, of which before is how things were: 1 if somebody should hear of it. */
static int settle(struct mb_gpu_keeper *k, size_t device, enum mb_gpu_verdict v,
                  const struct mb_gpu_watch *before)
{
    static const enum mb_gpu_state states[] = {[MB_GPU_FREE] = MB_LEDGER_GPU_FREE,
                                               [MB_GPU_WAIT] = MB_LEDGER_GPU_CHECKED,
                                               [MB_GPU_QUARANTINE] = MB_LEDGER_GPU_QUARANTINED};
    const struct mb_gpu_watch *w = &k->watches[device];
    int has_other_reason =
        w->is_quarantined != before->is_quarantined || w->is_silent != before->is_silent;

    if (v == MB_GPU_QUARANTINE && has_other_reason)
        mb_error("gpus", "quarantine: %s", w->reason);
    if (v == MB_GPU_FREE && has_other_reason)
        mb_info("gpus", "GPU %s is free again, its quarantine ends",
                mb_nvml_word(k->nvml, (unsigned)device));
    return mb_ledger_set_gpu(k->ledger, device, states[v]) || has_other_reason;
}

/* q NULL: the driver could not be asked. */
static int take(struct mb_gpu_keeper *k, size_t device, const struct question *q)
{
    const uint64_t *used = q != NULL && q->has_answer ? &q->used_bytes : NULL;
    struct mb_gpu_watch *w = &k->watches[device], before = *w;

    if (!is_in_doubt(k, device)) /* asked at the start; a job may have it, so it can only be less */
        return used != NULL && w->has_baseline && mb_gpu_watch_idle(w, *used);
    if (q != NULL && k->asked[device].since_ms < w->since_ms)
        return 0; /* it may be of the time before: it is asked again */
    return settle(
        k, device,
        mb_gpu_watch_sample(w, mb_nvml_word(k->nvml, (unsigned)device), used, mb_mono_ms()),
        &before);
}

/* It was asked and has not returned. */
static int wait_on(struct mb_gpu_keeper *k, size_t device)
{
    struct mb_gpu_watch *w = &k->watches[device], before = *w;

    if (mb_ledger_gpu_state(k->ledger, device) == MB_LEDGER_GPU_TAKEN)
        return 0; /* its turn comes when it is given back */
    return settle(k, device,
                  mb_gpu_watch_silence(w, mb_nvml_word(k->nvml, (unsigned)device),
                                       k->asked[device].since_ms, mb_mono_ms()),
                  &before);
}

static void tell(struct mb_gpu_keeper *k, int changed)
{
    if (!changed)
        return;
    keep(k);
    k->on_changed(k->arg);
}

static void rest_if_done(struct mb_gpu_keeper *k)
{
    for (size_t i = 0; i < k->n; i++)
        if (k->asked[i].errand != NULL || is_in_doubt(k, i))
            return;
    uv_timer_stop(&k->timer);
}

static void answered(void *owner, void *load)
{
    struct mb_gpu_keeper *k = owner;
    const struct question *q = load;
    int changed;

    k->asked[q->device].errand = NULL;
    changed = take(k, q->device, q);
    rest_if_done(k);
    tell(k, changed);
}

/* 0: that cannot be. */
static int begin_to_ask(struct mb_gpu_keeper *k, size_t device)
{
    static const struct mb_errand_plan plan = {ask, answered, drop_question};
    struct question *q = mb_calloc(1, sizeof(*q));

    if (q == NULL)
        return 0;
    q->nvml = mb_nvml_share(k->nvml);
    q->device = (unsigned)device;
    k->asked[device].since_ms = mb_mono_ms();
    k->asked[device].errand = mb_errand_start(k->timer.loop, &plan, k, q);
    return k->asked[device].errand != NULL;
}

static void tick(uv_timer_t *timer)
{
    struct mb_gpu_keeper *k = timer->data;
    int changed = 0;

    for (size_t i = 0; i < k->n; i++) {
        if (k->asked[i].errand != NULL) {
            changed |= wait_on(k, i);
        } else if (is_in_doubt(k, i)) {
            mb_gpu_watch_begin(&k->watches[i], mb_mono_ms());
            if (!begin_to_ask(k, i))
                changed |= take(k, i, NULL);
        }
    }
    rest_if_done(k);
    tell(k, changed);
}

static void start_ticking(struct mb_gpu_keeper *k)
{
    if (!uv_is_active((uv_handle_t *)&k->timer))
        uv_timer_start(&k->timer, tick, 0, LOOK_MS);
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
    start_ticking(k);
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
    mb_free(k->asked);
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
    k->asked = mb_calloc(n, sizeof(*k->asked));
    if (k->path != NULL && k->watches != NULL && k->asked != NULL)
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
    mb_ledger_check_gpus(ledger);
    uv_timer_init(loop, &k->timer);
    k->timer.data = k;
    for (size_t i = 0; i < n; i++) {
        if (mb_ledger_gpu_state(ledger, i) != MB_LEDGER_GPU_FREE)
            continue;
        if (!k->watches[i].has_baseline) {
            mb_gpu_watch_first(&k->watches[i], mb_mono_ms());
            mb_ledger_set_gpu(ledger, i, MB_LEDGER_GPU_CHECKED);
        }
        begin_to_ask(k, i);
    }
    keep(k);
    mb_gpu_keeper_look(k);
    start_ticking(k);
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
    for (size_t i = 0; i < k->n; i++)
        mb_errand_leave(k->asked[i].errand);
    uv_close((uv_handle_t *)&k->timer, on_timer_closed);
}
