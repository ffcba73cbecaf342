/*
 * Where drivers may run: the head's node, and nodes that told what they have for them.
 *
 *  1. A node's report has its totals; they become a node of the queue. Its free GPUs come with its
 *     resource view, which gangs change too.
 *  2. Before each look at the queue: nodes that died, drain or take no drivers leave it.
 *  3. A label selector, or the wish for a node with GPUs, is answered here (mb_job_queue's
 * may_use). Failure paths:
 *  4. A node that has not told yet (the head was restarted): nothing is said never to fit, for as
 *     long as SETTLE_MS.
 */
#include <stddef.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/job_needs.h"
#include "gcs/job_request.h"
#include "gcs/services.h"

enum { SETTLE_MS = 15000 };

static struct head_job *job_of(const struct mb_job_ticket *t)
{
    return (struct head_job *)(void *)((char *)(uintptr_t)t - offsetof(struct head_job, ticket));
}

/* ---- what a job wishes ---- */

int head_job_wants_gpu_node(const struct head_job *job)
{
    return strcmp(head_job_metadata(job, MB_JOB_DRIVER_ON_KEY), "gpu-node") == 0;
}

static int put_selector(const struct head_job *job, struct mb_buf *out)
{
    const char *name, *sep = "";
    json_t *wanted;
    int rc = mb_buf_puts(out, " that matches the label selector ");

    json_object_foreach(job->selector, name, wanted)
    {
        if (rc == 0)
            rc = mb_buf_printf(out, "%s%.100s=%.200s", sep, name, json_string_value(wanted));
        sep = ", ";
    }
    return rc;
}

int head_job_wish(struct head_job *job, int asks_resources, struct mb_job_wish *out)
{
    struct mb_buf text = {0};
    int wants_gpus = head_job_wants_gpu_node(job), rc = 0;

    *out = (struct mb_job_wish){.is_plain = !asks_resources && !wants_gpus && !job->selector,
                                .is_patient = wants_gpus};
    if (!wants_gpus && !job->selector)
        return 0;
    rc = mb_buf_puts(&text, wants_gpus ? "a node with GPUs" : "a node");
    if (rc == 0 && job->selector)
        rc = put_selector(job, &text);
    mb_free(job->wish);
    job->wish = rc == 0 ? mb_buf_take(&text) : NULL;
    mb_buf_close(&text);
    out->what = job->wish;
    return job->wish ? 0 : MB_ENOMEM;
}

static const char *label_of(const struct head_node *n, const char *name)
{
    for (size_t i = 0; n && i < n->info->n_labels; i++)
        if (strcmp(n->info->labels[i]->key, name) == 0)
            return n->info->labels[i]->value;
    return NULL;
}

static double gpus_of(struct mb_head *h, const struct head_node *n, int is_head)
{
    uint32_t n_gpus = 0, n_free;

    if (!is_head)
        return n ? n->driver_gpus : 0;
    if (h->runner->gpus)
        h->runner->gpus(h->runner->self, &n_gpus, &n_free);
    return n_gpus;
}

int head_offers_may_use(void *arg, const struct mb_job_ticket *t, const char *node)
{
    struct mb_head *h = arg;
    const struct head_job *job = job_of(t);
    int is_head = strcmp(node, MB_JOB_HEAD_NODE) == 0;
    const struct head_node *n =
        head_node_find_hex(h, is_head ? h->runner->node_id_hex(h->runner->self) : node);
    const char *name;
    json_t *wanted;

    if (head_job_wants_gpu_node(job) && !(gpus_of(h, n, is_head) > 0))
        return 0;
    if (job->selector && !n) /* the head's own node is about to register */
        return 0;
    json_object_foreach(job->selector, name, wanted)
    {
        if (!mb_job_label_matches(json_string_value(wanted), label_of(n, name)))
            return 0;
    }
    return 1;
}

/* ---- what nodes have ---- */

void head_offers_take(struct mb_head *h, struct head_node *n,
                      const Mobula__V1__ReportDriversRequest *report)
{
    struct mb_job_amount has[MB_JOB_QUEUE_KINDS_MAX];
    char hex[2 * MB_NODE_ID_BYTES + 1];
    struct mb_err err = {0};
    size_t k = 0;
    int is_new = 0, rc;

    snprintf(n->http_address, sizeof n->http_address, "%s", report->http_address);
    n->driver_gpus = 0;
    for (size_t i = 0; i < report->n_totals && k < MB_JOB_QUEUE_KINDS_MAX; i++) {
        const Mobula__V1__DriverAmount *total = report->totals[i];

        if (!(total->amount >= 0) || strlen(total->name) >= sizeof has[k].name)
            continue;
        has[k] = (struct mb_job_amount){.amount = total->amount,
                                        .is_outside = strcmp(total->name, MB_JOB_GPU) == 0};
        snprintf(has[k].name, sizeof has[k].name, "%s", total->name);
        if (has[k].is_outside)
            n->driver_gpus = has[k].amount;
        k++;
    }
    mb_hex(n->id, MB_NODE_ID_BYTES, hex);
    if (report->takes_drivers) {
        rc = mb_job_queue_node(h->queue, hex, has, k, &is_new, &err);
        if (rc != 0 && !n->has_offer)
            mb_warn("jobs", "drivers on node %.8s: %s", hex, err.text);
        n->place = mb_job_queue_find_node(h->queue, hex);
    }
    n->has_offer = 1;
    if (is_new)
        head_admission_needs_anew(h);
}

/* Free GPUs as the node, and gangs on it, last told. */
static double free_gpus(const struct head_node *n)
{
    for (size_t i = 0; n->view && i < n->view->n_resources_available; i++)
        if (strcmp(n->view->resources_available[i]->key, "mobula_gpu") == 0)
            return n->view->resources_available[i]->value;
    return 0;
}

static void leave_queue(struct mb_head *h, struct head_node *n)
{
    char hex[2 * MB_NODE_ID_BYTES + 1];

    mb_job_queue_node_gone(h->queue, mb_hex(n->id, MB_NODE_ID_BYTES, hex));
    n->place = NULL;
    n->has_offer = !head_node_alive(n); /* a drain may be called off: it tells again */
}

static const char *own_id(const struct mb_head *h)
{
    return h->runner->node_id_hex ? h->runner->node_id_hex(h->runner->self) : "";
}

json_t *head_offers_json(struct mb_head *h, const struct head_node *n)
{
    char hex[2 * MB_NODE_ID_BYTES + 1];
    const char *name = mb_hex(n->id, MB_NODE_ID_BYTES, hex);
    json_t *out = json_object();
    struct mb_job_amount total;
    double used;

    if (!head_node_alive(n))
        return out;
    if (strcmp(name, own_id(h)) == 0)
        name = MB_JOB_HEAD_NODE;
    for (size_t k = 0; mb_job_queue_look(h->queue, name, k, &total, &used); k++)
        if (total.amount > 0 || used > 0)
            json_object_set_new(out, total.name,
                                json_pack("{s:f, s:f}", "used", used, "total", total.amount));
    return out;
}

void head_offers_refresh(struct mb_head *h)
{
    const char *self = own_id(h);
    const struct head_node *own = head_node_find_hex(h, self);
    uint64_t now = mb_mono_ms();
    int is_settled = (own && head_node_alive(own)) || now >= h->active_ms + SETTLE_MS;

    for (size_t i = 0; i < h->n_nodes; i++) {
        struct head_node *n = h->nodes[i];

        if (n->place && (!head_node_alive(n) || (n->view && n->view->is_draining)))
            leave_queue(h, n);
        if (n->place && n->driver_gpus > 0)
            mb_job_queue_node_free(h->queue, n->place, MB_JOB_GPU, free_gpus(n));
        if (n != own && head_node_alive(n) && !n->has_offer && now < n->since_ms + SETTLE_MS)
            is_settled = 0;
    }
    mb_job_queue_settled(h->queue, is_settled);
    /* A numbered start names its node (job_start.c). */
    mb_job_queue_close_node(h->queue, MB_JOB_HEAD_NODE, h->redis && *self == '\0');
}
