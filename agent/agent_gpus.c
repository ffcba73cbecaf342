/*
 * A node's GPUs: counting them at the start, and telling of those that are in doubt.
 *
 *  1. The driver answers: the start goes on with what it says; a failure is the start's, unless
 *     --num-gpus says how many there are.
 *  2. It hangs, and nobody knows how many GPUs there are: the start fails after GPUS_WAIT_MS.
 *  3. It hangs, and that is known, from the node's life before or by --num-gpus: the start goes on
 *     after KNOWN_GPUS_WAIT_MS, since jobs of before may run yet; nobody gets those GPUs before the
 *     driver answers (gpu_keeper.c). An answer that does not fit what the node began with ends the
 *     agent, to start anew.
 */
#include "agent/agent_run.h"

#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"

enum {
    QUARANTINE_TIMEOUT_MS = 30000,
    /* Eight GPUs without the driver's persistence daemon take some seconds; `mobula start` waits
     * for 30 s altogether. */
    GPUS_WAIT_MS = 20000,
    KNOWN_GPUS_WAIT_MS = 2000
};

/* ---- those in doubt ---- */

static void on_quarantine_told(void *arg, const struct mb_err *err, int64_t count)
{
    (void)arg;
    (void)count;
    if (err->code != MB_OK && err->code != MB_ECANCELED)
        mb_warn("gpus", "the head does not know of the quarantine: %s", err->text);
}

/* Totals and what is available go to the head as of every change; the reasons by its KV. */
static void on_gpus_changed(void *arg)
{
    struct agent *a = arg;
    struct mb_gcs *gcs;
    json_t *list;
    char *text, key[80];
    struct mb_err err = {.text = "not connected"};

    if (a->node == NULL) /* a start that fails: there is nobody to tell */
        return;
    gcs = mb_node_gcs(a->node);
    list = mb_gpu_keeper_json(a->gpu_keeper);
    text = json_dumps(list, JSON_COMPACT);
    snprintf(key, sizeof(key), "gpu-quarantine:%.56s", mb_node_id_hex(a->node));
    mb_node_changed(a->node);
    if (gcs == NULL || text == NULL ||
        mb_gcs_kv_put(gcs, "mobula", key, text, strlen(text), 1, QUARANTINE_TIMEOUT_MS,
                      on_quarantine_told, a, NULL, &err) < 0)
        mb_warn("gpus", "the head does not know of the quarantine: %s", err.text);
    mb_free(text);
    json_decref(list);
}

/* ---- at the start ---- */

unsigned mb_agent_gpus_to_offer(const struct agent *a, const struct mb_gpus *found)
{
    return a->opts->num_gpus >= 0 ? (unsigned)a->opts->num_gpus : found->count;
}

static int check_list(const struct agent *a, const struct mb_gpus *found, struct mb_err *err)
{
    unsigned n = mb_agent_gpus_to_offer(a, found);

    if (found->list == NULL || n <= found->count)
        return MB_OK;
    return mb_err_set(err, MB_EINVAL, "--num-gpus %u: %s leaves %u (\"%.200s\")", n,
                      found->list_name, found->count, found->list);
}

int mb_agent_watch_gpus(struct agent *a, const struct mb_gpu_found *found, struct mb_err *err)
{
    struct mb_gpu_keeper_opts opts = {.ledger = a->ledger,
                                      .gpus = &a->gpus,
                                      .node_dir = a->opts->node_dir,
                                      .nvml = found != NULL ? found->nvml : NULL,
                                      .asked_ms = a->gpus_asked_ms,
                                      .on_changed = on_gpus_changed,
                                      .arg = a};
    int rc = MB_OK;

    if (a->gpus.vendor == MB_GPU_NVIDIA && mb_ledger_gpus(a->ledger) > 0)
        rc = mb_gpu_keeper_create(&a->loop, &opts, &a->gpu_keeper, err);
    if (rc == MB_OK)
        rc = mb_gpu_figures_create(&a->loop, &a->figures, err);
    if (rc == MB_OK && found != NULL)
        mb_gpu_figures_begin(a->figures, found->nvml, &found->amd);
    return rc;
}

/* What the node began with, before the driver had said anything, is true. */
static int fits(const struct agent *a, const struct mb_gpus *found)
{
    unsigned n = a->gpus.chosen.n < found->chosen.n ? a->gpus.chosen.n : found->chosen.n;
    struct mb_err err;

    for (unsigned i = 0; i < n; i++)
        if (strcmp(a->gpus.chosen.at[i].word, found->chosen.at[i].word) != 0)
            return 0;
    return (found->vendor == MB_GPU_NVIDIA || a->opts->num_gpus == 0) &&
           check_list(a, found, &err) == MB_OK &&
           mb_agent_gpus_to_offer(a, found) == mb_agent_gpus_to_offer(a, &a->gpus);
}

static void on_late_answer(struct agent *a, const struct mb_err *failure,
                           const struct mb_gpu_found *found)
{
    struct mb_err err = *failure;

    if (failure->code == MB_OK && fits(a, &found->gpus)) {
        mb_info("gpus", "the driver has answered after %llu ms",
                (unsigned long long)(mb_mono_ms() - a->gpus_asked_ms));
        a->gpus = found->gpus;
        mb_gpu_figures_begin(a->figures, found->nvml, &found->amd);
        if (a->gpu_keeper != NULL)
            mb_gpu_keeper_begin(a->gpu_keeper, found->nvml);
        return;
    }
    if (failure->code == MB_OK)
        mb_err_set(&err, MB_ESTATE, "it has other GPUs than this node was started with");
    mb_err_wrap(&err, "the GPU driver has answered late");
    /* As at the start, where --num-gpus counts; and nobody gets one of a node that ends. */
    if (a->opts->num_gpus == 0 || (err.code == MB_EIO && a->opts->num_gpus > 0) ||
        a->stage >= ENDING_GANGS)
        mb_warn("gpus", "%s", err.text);
    else
        mb_agent_on_failed(a, &err);
}

static void on_gpus(void *arg, const struct mb_err *failure, const struct mb_gpu_found *found)
{
    struct agent *a = arg;
    struct mb_err err = *failure;

    if (a->has_begun) {
        on_late_answer(a, failure, found);
        return;
    }
    if (err.code == MB_EIO && a->opts->num_gpus >= 0) {
        mb_warn("gpus", "%s; --num-gpus %lld counts, and nobody can look at what is in use of them",
                err.text, (long long)a->opts->num_gpus);
        err.code = MB_OK;
    } else if (err.code != MB_OK) {
        mb_err_wrap(&err, "counting the GPUs (--num-gpus N overrides)");
    }
    if (err.code == MB_OK) {
        a->gpus = found->gpus;
        check_list(a, &found->gpus, &err);
    }
    if (err.code != MB_OK)
        mb_agent_on_failed(a, &err);
    else
        mb_agent_begin(a, found);
}

static void on_gpus_silent(void *arg)
{
    struct agent *a = arg;
    unsigned long long s = (mb_mono_ms() - a->gpus_asked_ms) / 1000;
    struct mb_gpu_lists lists = mb_gpu_lists_read();
    struct mb_err err;
    unsigned n;

    mb_gpu_keeper_former(a->opts->node_dir, &a->gpus);
    n = mb_agent_gpus_to_offer(a, &a->gpus);
    if ((a->opts->num_gpus < 0 && n == 0) || (n > a->gpus.count && lists.cuda != NULL)) {
        mb_err_set(&err, MB_ETIMEOUT,
                   "counting the GPUs: the GPU driver has not answered for %llu s; is it "
                   "healthy? (--num-gpus 0 starts the node without its GPUs)",
                   s);
        mb_agent_on_failed(a, &err);
        return;
    }
    if (n > 0)
        mb_error("gpus",
                 "the GPU driver has not answered for %llu s: nobody gets one of the %u "
                 "GPUs of this node before it does",
                 s, n);
    else
        mb_warn("gpus", "the GPU driver has not answered for %llu s; --num-gpus 0 needs none", s);
    a->gpus.vendor = MB_GPU_NVIDIA; /* most likely; fits() finds out */
    mb_agent_begin(a, NULL);
}

int mb_agent_count_gpus(struct agent *a, struct mb_err *err)
{
    static const struct mb_gpu_driver_ops ops = {on_gpus, on_gpus_silent};
    struct mb_gpus former;

    mb_gpu_keeper_former(a->opts->node_dir, &former);
    a->gpus_asked_ms = mb_mono_ms();
    return mb_gpu_driver_ask(
        &a->loop, former.count > 0 || a->opts->num_gpus == 0 ? KNOWN_GPUS_WAIT_MS : GPUS_WAIT_MS,
        &ops, a, &a->gpu_driver, err);
}
