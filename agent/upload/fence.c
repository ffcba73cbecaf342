/*
 *  1. Get: absent counts as 0. A newer one, or ours, or we are the first: the answer.
 *  2. Else put ours, if nobody changed it meanwhile; somebody did: an error, the caller looks
 * again.
 */
#include "agent/upload/fence.h"

#include <inttypes.h>
#include <stdio.h>
#include "agent/upload/manifest.h"
#include "base/alloc.h"

enum { TIMEOUT_MS = 60000, MAX_BYTES = 32 };

struct look {
    struct mb_store *store;
    char key[MB_CHECKPOINT_KEY_MAX];
    uint32_t attempt;
    mb_fence_cb cb;
    void *arg;
};

int64_t mb_fence_newest(int64_t found, uint32_t attempt)
{
    /* The first attempt has nobody to keep out. */
    return found < (int64_t)attempt && attempt > 1 ? (int64_t)attempt : found;
}

static void finish(struct look *l, const struct mb_err *err, int64_t newest)
{
    mb_fence_cb cb = l->cb;
    void *arg = l->arg;

    mb_free(l);
    cb(arg, err, newest);
}

static void on_put(void *arg, const struct mb_store_result *r)
{
    struct look *l = arg;
    struct mb_err err = {0};

    if (r->error != MB_OK)
        mb_err_set(&err, r->error, "noting the attempt in %s: %s", l->key, r->text);
    finish(l, &err, (int64_t)l->attempt);
}

static void on_get(void *arg, const struct mb_store_result *r)
{
    struct look *l = arg;
    struct mb_err err = {0};
    int64_t found = 0, newest;
    char text[32];
    int n;

    if (r->error != MB_OK && r->error != MB_ENOENT)
        mb_err_set(&err, r->error, "looking for a newer attempt in %s: %s", l->key, r->text);
    else if (r->error == MB_OK && mb_latest_parse(r->data, r->data_len, &found, &err) != MB_OK)
        mb_err_wrap(&err, "%s", l->key);
    newest = mb_fence_newest(found, l->attempt);
    if (err.code != MB_OK || newest == found) {
        finish(l, &err, newest > 0 ? newest : (int64_t)l->attempt);
        return;
    }
    n = snprintf(text, sizeof(text), "%" PRId64, newest);
    if (mb_store_put(l->store, l->key, text, (size_t)n,
                     found > 0 ? MB_STORE_IF_MATCH : MB_STORE_IF_ABSENT, r->etag, TIMEOUT_MS,
                     on_put, l, &err) != MB_OK)
        finish(l, &err, 0);
}

int mb_fence_look(struct mb_store *store, const char *gang, uint32_t attempt, mb_fence_cb cb,
                  void *arg, struct mb_err *err)
{
    struct look *l = mb_calloc(1, sizeof(*l));
    int rc;

    if (l == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory to look for a newer attempt");
    *l = (struct look){.store = store, .attempt = attempt, .cb = cb, .arg = arg};
    snprintf(l->key, sizeof(l->key), ".mobula/attempt-%s", gang);
    rc = mb_store_get(store, l->key, MAX_BYTES, TIMEOUT_MS, on_get, l, err);
    if (rc != MB_OK)
        mb_free(l);
    return rc;
}
