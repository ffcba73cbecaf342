/*
 * The label selector of a submission. Drivers run on the head's node, so its labels have to match.
 * JobInfo has no field for the selector, and Ray's readers take no other; it has a key of its own.
 *
 *  1. store: beside the job's record, before it; load: with it; forget: with it.
 *  2. check: every label of the selector against the node's. The first that does not match is
 * named.
 */
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/job_needs.h"
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

static const char *label_of(const struct head_node *n, const char *name)
{
    for (size_t i = 0; n && i < n->info->n_labels; i++)
        if (strcmp(n->info->labels[i]->key, name) == 0)
            return n->info->labels[i]->value;
    return NULL;
}

int head_job_labels_check(struct mb_head *h, const struct head_job *job, struct mb_err *err)
{
    uint8_t id[MB_NODE_ID_BYTES];
    const char *hex = h->runner->node_id_hex(h->runner->self), *name;
    struct head_node *n = strlen(hex) == 2 * sizeof id && mb_unhex(hex, id, sizeof id) == 0
                              ? head_node_find_id(h, id)
                              : NULL;
    json_t *wanted;

    json_object_foreach(job->selector, name, wanted)
    {
        const char *has = label_of(n, name);

        if (!mb_job_label_matches(json_string_value(wanted), has))
            return mb_err_set(err, MB_EINVAL,
                              "the driver would run on the head's node, which does not match the "
                              "label selector %.100s=%.200s: it has %s%.100s",
                              name, json_string_value(wanted), has ? "" : "no such label",
                              has ? has : "");
    }
    return 0;
}
