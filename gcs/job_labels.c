/*
 * The label selector of a submission: job_offers.c compares it with the nodes' labels. JobInfo has
 * no field for it, and Ray's readers take no other; it has a key of its own.
 *
 * store: beside the job's record, before it; load: with it; forget: with it.
 */
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/services.h"

static char *key_of(const char *id)
{
    return mb_asprintf("job_labels:%s", id);
}

int head_job_labels_store(struct mb_head *h, struct head_job *job, json_t *selector,
                          struct mb_err *err)
{
    char *key = key_of(job->id), *text = json_dumps(selector, JSON_COMPACT);
    int rc = MB_ENOMEM;

    if (key && text)
        rc = mb_tables_put(h->store, MB_TABLES_KV, mb_blob_str("mobula"), mb_blob_str(key),
                           mb_blob_str(text), NULL, NULL, err);
    else
        mb_err_set(err, rc, "out of memory");
    if (rc == 0)
        job->selector = json_incref(selector);
    mb_free(key);
    free(text); /* jansson's allocation */
    return rc;
}

void head_job_labels_load(struct mb_head *h, struct head_job *job)
{
    char *key = key_of(job->id);
    struct mb_blob text;

    if (key &&
        mb_tables_get(h->store, MB_TABLES_KV, mb_blob_str("mobula"), mb_blob_str(key), &text))
        job->selector = json_loadb(text.p, text.n, 0, NULL);
    mb_free(key);
}

void head_job_labels_forget(struct mb_head *h, const struct head_job *job)
{
    char *key = job->selector ? key_of(job->id) : NULL;
    struct mb_err err = {0};
    int rc = 0;

    if (key)
        rc = mb_tables_del(h->store, MB_TABLES_KV, mb_blob_str("mobula"), mb_blob_str(key), NULL,
                           NULL, &err);
    if (rc != 0)
        mb_warn("jobs", "job=%s its label selector stays in the store: %s", job->id, err.text);
    mb_free(key);
}
