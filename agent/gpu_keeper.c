/*
 *  1. create: devices that nobody has are asked about, and those without a baseline wait; while the
 *     driver has not answered the agent's own first question, all of them wait;
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
    struct mb_gpu_sample used;
};

struct asked {
    struct mb_errand *errand; /* NULL: none is under way */
    uint64_t since_ms;
    int is_told; /* that its memory is not said */
};

struct mb_gpu_keeper {
    struct mb_ledger *ledger;
    const struct mb_gpus *gpus;
    struct mb_nvml *nvml; /* NULL: the driver has not answered yet */
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

static char *name_of(const struct mb_gpu_keeper *k, size_t device, char name[MB_GPU_WORD_MAX])
{
    if (device < k->gpus->chosen.n)
        snprintf(name, MB_GPU_WORD_MAX, "%s", k->gpus->chosen.at[device].word);
    else
        snprintf(name, MB_GPU_WORD_MAX, "%zu", device);
    return name;
}

static const char *const baseline_keys[] = {
    [MB_GPU_BY_MEMORY] = "baseline_bytes", [MB_GPU_BY_PROCESSES] = "baseline_processes"};

static void keep(const struct mb_gpu_keeper *k)
{
    json_t *list = json_array();
    char *text, name[MB_GPU_WORD_MAX];
    int is_whole = 1;
    struct mb_err err = {.text = "no memory"};

    for (size_t i = 0; i < k->n; i++) {
        const struct mb_gpu_watch *w = &k->watches[i];
        json_t *item = json_pack("{s:b, s:b, s:s}", "has_baseline", w->has_baseline, "unconfirmed",
                                 w->is_watched && !w->is_new, "word", name_of(k, i, name));

        if (w->has_baseline)
            json_object_set_new(item, baseline_keys[w->baseline.measure],
                                json_integer((json_int_t)w->baseline.value));
        if (i == 0)
            json_object_set_new(item, "model", json_string(k->gpus->model));
        is_whole &= json_array_append_new(list, item) == 0;
    }
    text = is_whole ? json_dumps(list, JSON_INDENT(1)) : NULL;
    if (text == NULL || mb_fs_replace(k->path, text, strlen(text), 0644, &err) != MB_OK)
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

static void load_baseline(struct mb_gpu_watch *w, const json_t *item)
{
    for (int m = MB_GPU_BY_MEMORY; m <= MB_GPU_BY_PROCESSES; m++) {
        const json_t *value = json_object_get(item, baseline_keys[m]);

        if (!json_is_true(json_object_get(item, "has_baseline")) || !json_is_integer(value) ||
            json_integer_value(value) < 0)
            continue;
        w->baseline =
            (struct mb_gpu_sample){(enum mb_gpu_measure)m, (uint64_t)json_integer_value(value)};
        w->has_baseline = 1;
    }
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
        int unconfirmed = 0;

        if (i >= k->n || json_unpack(item, "{s:b}", "unconfirmed", &unconfirmed) != 0)
            break;
        load_baseline(&k->watches[i], item);
        if (unconfirmed)
            mb_ledger_set_gpu(k->ledger, i, MB_LEDGER_GPU_CHECKED);
    }
    json_decref(list);
    return MB_OK;
}

void mb_gpu_keeper_former(const char *node_dir, struct mb_gpus *out)
{
    char *path = mb_path_join(node_dir, "gpus.json");
    json_t *list = NULL, *item;
    struct mb_err err;
    size_t i;

    *out = (struct mb_gpus){0};
    if (path != NULL && read_list(path, &list, &err) != MB_OK)
        list = NULL;
    json_array_foreach(list, i, item)
    {
        const char *word = json_string_value(json_object_get(item, "word"));

        if (word == NULL) { /* of a version that did not keep them */
            *out = (struct mb_gpus){0};
            break;
        }
        out->vendor = MB_GPU_NVIDIA;
        out->count++;
        if (i < MB_GPUS_MAX)
            snprintf(out->chosen.at[out->chosen.n++].word, MB_GPU_WORD_MAX, "%s", word);
        if (i == 0 && json_is_string(json_object_get(item, "model")))
            snprintf(out->model, sizeof(out->model), "%s",
                     json_string_value(json_object_get(item, "model")));
    }
    json_decref(list);
    mb_free(path);
}

/* ---- looking ---- */

static void ask(void *load)
{
    struct question *q = load;

    q->has_answer = mb_nvml_in_use(q->nvml, q->device, &q->used) == MB_OK;
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

/* Once for each device: what is done where memory is not said. */
static void tell_measure(struct mb_gpu_keeper *k, size_t device, enum mb_gpu_measure measure)
{
    char name[MB_GPU_WORD_MAX];

    if (measure == MB_GPU_BY_MEMORY || k->asked[device].is_told)
        return;
    k->asked[device].is_told = 1;
    name_of(k, device, name);
    if (device >= mb_nvml_count(k->nvml))
        mb_warn("gpus",
                "GPU %s: the driver has no such device (--num-gpus); it is taken for free as soon "
                "as its job's processes have ended",
                name);
    else if (measure == MB_GPU_BY_PROCESSES)
        mb_warn("gpus",
                "GPU %s: the driver does not say its memory in use; it is taken for free when no "
                "more processes are on it than before its job",
                name);
    else
        mb_warn("gpus",
                "GPU %s: the driver says neither its memory in use nor its processes; it is taken "
                "for free as soon as its job's processes have ended",
                name);
}

/* The verdict on a device, of which before is how things were: 1 if somebody should hear of it. */
static int settle(struct mb_gpu_keeper *k, size_t device, enum mb_gpu_verdict v,
                  const struct mb_gpu_watch *before)
{
    static const enum mb_gpu_state states[] = {[MB_GPU_FREE] = MB_LEDGER_GPU_FREE,
                                               [MB_GPU_WAIT] = MB_LEDGER_GPU_CHECKED,
                                               [MB_GPU_QUARANTINE] = MB_LEDGER_GPU_QUARANTINED};
    const struct mb_gpu_watch *w = &k->watches[device];
    char name[MB_GPU_WORD_MAX];
    int has_other_reason =
        w->is_quarantined != before->is_quarantined || w->is_silent != before->is_silent;

    if (v == MB_GPU_QUARANTINE && has_other_reason)
        mb_error("gpus", "quarantine: %s", w->reason);
    if (v == MB_GPU_FREE && has_other_reason)
        mb_info("gpus", "GPU %s is free again, its quarantine ends", name_of(k, device, name));
    return mb_ledger_set_gpu(k->ledger, device, states[v]) || has_other_reason;
}

/* q NULL: the driver could not be asked. */
static int take(struct mb_gpu_keeper *k, size_t device, const struct question *q)
{
    const struct mb_gpu_sample *used = q != NULL && q->has_answer ? &q->used : NULL;
    struct mb_gpu_watch *w = &k->watches[device], before = *w;
    char name[MB_GPU_WORD_MAX];

    if (used != NULL)
        tell_measure(k, device, used->measure);
    if (!is_in_doubt(k, device)) /* asked at the start; a job may have it, so it can only be less */
        return used != NULL && w->has_baseline && mb_gpu_watch_idle(w, used);
    if (q != NULL && k->asked[device].since_ms < w->since_ms)
        return 0; /* it may be of the time before: it is asked again */
    return settle(k, device, mb_gpu_watch_sample(w, name_of(k, device, name), used, mb_mono_ms()),
                  &before);
}

/* It was asked and has not returned. */
static int wait_on(struct mb_gpu_keeper *k, size_t device)
{
    struct mb_gpu_watch *w = &k->watches[device], before = *w;
    char name[MB_GPU_WORD_MAX];

    if (mb_ledger_gpu_state(k->ledger, device) == MB_LEDGER_GPU_TAKEN)
        return 0; /* its turn comes when it is given back */
    return settle(
        k, device,
        mb_gpu_watch_silence(w, name_of(k, device, name), k->asked[device].since_ms, mb_mono_ms()),
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
        int in_doubt = is_in_doubt(k, i);

        if (in_doubt)
            mb_gpu_watch_begin(&k->watches[i], mb_mono_ms());
        if (k->asked[i].errand != NULL || (in_doubt && k->nvml == NULL))
            changed |= wait_on(k, i);
        else if (in_doubt && !begin_to_ask(k, i))
            changed |= take(k, i, NULL);
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

/* NULL: no memory. */
static struct mb_gpu_keeper *new_keeper(const struct mb_gpu_keeper_opts *opts)
{
    struct mb_gpu_keeper *k = mb_calloc(1, sizeof(*k));

    if (k == NULL)
        return NULL;
    k->ledger = opts->ledger;
    k->gpus = opts->gpus;
    k->on_changed = opts->on_changed;
    k->arg = opts->arg;
    k->n = mb_ledger_gpus(opts->ledger);
    k->path = mb_path_join(opts->node_dir, "gpus.json");
    k->watches = mb_calloc(k->n, sizeof(*k->watches));
    k->asked = mb_calloc(k->n, sizeof(*k->asked));
    if (k->path != NULL && k->watches != NULL && k->asked != NULL)
        return k;
    destroy(k);
    return NULL;
}

/* Before anything was asked: a device that nobody has is offered only if it has a baseline, and the
 * driver answers. */
static void begin_watch(struct mb_gpu_keeper *k, size_t device, uint64_t asked_ms)
{
    struct mb_gpu_watch *w = &k->watches[device];

    k->asked[device].since_ms = asked_ms;
    if (mb_ledger_gpu_state(k->ledger, device) != MB_LEDGER_GPU_FREE ||
        (w->has_baseline && k->nvml != NULL))
        return;
    if (w->has_baseline)
        mb_gpu_watch_begin(w, mb_mono_ms());
    else
        mb_gpu_watch_first(w, mb_mono_ms());
    mb_ledger_set_gpu(k->ledger, device, MB_LEDGER_GPU_CHECKED);
}

int mb_gpu_keeper_create(uv_loop_t *loop, const struct mb_gpu_keeper_opts *opts,
                         struct mb_gpu_keeper **out, struct mb_err *err)
{
    struct mb_gpu_keeper *k = new_keeper(opts);
    int rc;

    *out = NULL;
    if (k == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory to look at the GPUs");
    rc = load(k, err);
    if (rc != MB_OK) {
        destroy(k);
        return rc;
    }
    mb_ledger_check_gpus(k->ledger);
    uv_timer_init(loop, &k->timer);
    k->timer.data = k;
    if (opts->nvml != NULL)
        k->nvml = mb_nvml_share(opts->nvml);
    for (size_t i = 0; i < k->n; i++) {
        int is_free = mb_ledger_gpu_state(k->ledger, i) == MB_LEDGER_GPU_FREE;

        begin_watch(k, i, opts->asked_ms);
        if (is_free && k->nvml != NULL)
            begin_to_ask(k, i);
    }
    keep(k);
    mb_gpu_keeper_look(k);
    start_ticking(k);
    *out = k;
    return MB_OK;
}

void mb_gpu_keeper_begin(struct mb_gpu_keeper *k, struct mb_nvml *nvml)
{
    k->nvml = mb_nvml_share(nvml);
    keep(k);
    start_ticking(k);
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
