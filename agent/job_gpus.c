/*
 *  1. claim: prepare, commit and hold one bundle of mobula_gpu.
 *  2. The head may void bundles that it does not know; one that is held then stays counted as
 *     RELEASING until release.
 *  3. release: unhold, then remove what is still a bundle.
 */
#include "agent/job_gpus.h"

#include <stdio.h>
#include <string.h>
#include "agent/resources.h"
#include "base/alloc.h"
#include "base/buf.h"
#include "base/checksum.h"
#include "base/log.h"

/* Placement group ids end with a job id, and job ids count from 1: these are nobody's. */
static struct mb_pg_id pg_of(const char *submission_id)
{
    struct mb_pg_id pg = {{'d', 'r', 'i', 'v', 'e', 'r'}};
    uint64_t sum = mb_crc64nvme(0, submission_id, strlen(submission_id));

    memcpy(pg.bytes + 6, &sum, sizeof sum);
    return pg;
}

int mb_job_gpus_claim(const struct mb_job_gpus *g, const char *submission_id, uint32_t n,
                      char **visible, struct mb_err *err)
{
    struct mb_ledger *l = g->ledger;
    struct mb_bundle_spec spec = {.pg = pg_of(submission_id), .n_want = 1};
    struct mb_buf text = {0};
    const struct mb_bundle *b;
    uint32_t total, n_free;
    int rc;

    mb_job_gpus_count(l, &total, &n_free);
    if (n > n_free)
        return mb_err_set(err, MB_EFULL, "%u GPUs wanted, %u of %u free", n, n_free, total);
    snprintf(spec.want[0].name, sizeof spec.want[0].name, MB_RESOURCE_GPU);
    spec.want[0].units = n;
    rc = mb_ledger_prepare(l, &spec, 1, err);
    if (rc == 0)
        rc = mb_ledger_commit(l, &spec, 1, err);
    if (rc != 0) {
        mb_ledger_remove(l, &spec.pg, 0);
        return rc;
    }
    mb_ledger_hold(l, &spec.pg);
    b = mb_ledger_find(l, &spec.pg, 0);
    for (size_t i = 0; i < b->n_gpus && rc == 0; i++) {
        rc = i > 0 ? mb_buf_puts(&text, ",") : 0;
        if (rc == 0)
            rc = mb_gpus_put(g->gpus, b->gpus[i], &text);
    }
    *visible = rc == 0 ? mb_buf_take(&text) : NULL;
    mb_buf_close(&text);
    if (*visible)
        return 0;
    mb_job_gpus_release(l, submission_id);
    return mb_err_set(err, MB_ENOMEM, "out of memory");
}

static void changed(const struct mb_job_gpus *g)
{
    if (g->on_changed != NULL)
        g->on_changed(g->arg);
}

int mb_job_gpus_take(const struct mb_job_gpus *g, const char *submission_id, uint32_t n,
                     struct mb_job_env *env, struct mb_err *err)
{
    char *visible;
    int rc;

    if (n == 0)
        return 0;
    rc = mb_job_gpus_claim(g, submission_id, n, &visible, err);
    if (rc != 0)
        return rc;
    mb_info("jobs", "job=%s holds GPUs %s", submission_id, visible);
    rc = mb_job_env_set(env, g->visible_env, visible);
    mb_free(visible);
    if (rc == 0 && g->order_env != NULL)
        rc = mb_job_env_set(env, g->order_env, MB_GPU_ORDER);
    if (rc == 0)
        changed(g);
    else
        mb_job_gpus_release(g->ledger, submission_id);
    return rc == 0 ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");
}

void mb_job_gpus_give_back(const struct mb_job_gpus *g, const char *submission_id)
{
    if (mb_job_gpus_release(g->ledger, submission_id))
        changed(g);
}

int mb_job_gpus_adopt(struct mb_ledger *l, const char *submission_id)
{
    struct mb_pg_id pg = pg_of(submission_id);

    if (!l || !mb_ledger_find(l, &pg, 0))
        return 0;
    mb_ledger_hold(l, &pg);
    return 1;
}

int mb_job_gpus_release(struct mb_ledger *l, const char *submission_id)
{
    struct mb_pg_id pg = pg_of(submission_id);

    if (!l || !mb_ledger_find(l, &pg, 0))
        return 0;
    mb_ledger_unhold(l, &pg);
    mb_ledger_remove(l, &pg, 0);
    return 1;
}

void mb_job_gpus_count(const struct mb_ledger *l, uint32_t *total, uint32_t *n_free)
{
    *total = *n_free = 0;
    for (size_t k = 0; l && k < mb_ledger_kinds(l); k++) {
        if (strcmp(mb_ledger_total(l, k)->name, MB_RESOURCE_GPU) != 0)
            continue;
        *total = mb_ledger_total(l, k)->units;
        *n_free = mb_ledger_available(l, k);
    }
}
