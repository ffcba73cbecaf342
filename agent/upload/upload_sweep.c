/*
 * Unfinished uploads of a file's key whose ids nobody noted are aborted, but never those of
 * somebody else: a newer writer that has taken the claim over writes the same keys.
 *
 *  1. The ids are listed, and the claim is looked at after that. Whoever takes the claim over
 * begins nothing before it stands there (claim.h), and claims never come back. So if it is still
 * ours, or nobody's, then all that was listed was begun by us, or by somebody who is over; and what
 * is begun from now on is not in the list. The clocks of nobody count.
 *  2. Files that lie beside a manifest have a place that is ours alone: no look.
 *  3. The claim is somebody else's: nothing is aborted. The new owner looks for what is there of
 * its keys before it sends (upload_prepare.c).
 *  4. A store that cannot list them is asked to take away what it knows nobody has any more.
 */
#include <string.h>
#include "agent/upload/upload_internal.h"
#include "base/alloc.h"

enum { TIMEOUT_MS = 10000 };

struct sweep {
    struct mb_upload *u;
    char *key;
    int64_t iteration;
    int is_beside;
    char **ids;
    size_t n_ids, next;
    upload_sweep_cb cb;
    void *arg;
};

static void free_sweep(struct sweep *s)
{
    for (size_t i = 0; i < s->n_ids; i++)
        mb_free(s->ids[i]);
    mb_free(s->ids);
    mb_free(s->key);
    mb_free(s);
}

static void finish(struct sweep *s, int code, const char *text)
{
    s->cb(s->arg, code, text);
    free_sweep(s);
}

static void abort_next(struct sweep *s);

static void on_aborted(void *arg, const struct mb_store_result *r)
{
    struct sweep *s = arg;

    if (r->error != MB_OK)
        finish(s, r->error, r->text);
    else
        abort_next(s);
}

static void abort_next(struct sweep *s)
{
    struct mb_err err = {0};

    if (s->next == s->n_ids)
        finish(s, MB_OK, "");
    else if (mb_store_abort_uploads(s->u->store, s->key, s->ids[s->next++], TIMEOUT_MS, on_aborted,
                                    s, &err) != MB_OK)
        finish(s, err.code, err.text);
}

/* What stands at the manifest's key. */
static void on_claim(void *arg, const struct mb_store_result *r)
{
    struct sweep *s = arg;
    struct mb_manifest_writer writer = upload_writer(s->u);
    struct mb_manifest m = {0};
    struct mb_err err = {0};
    int ours = r->error == MB_OK &&
               mb_manifest_decode_any(r->data, r->data_len, "manifest", &m, &err) == MB_OK &&
               mb_manifest_is_of(&m, &writer);

    mb_manifest_close(&m);
    if (ours || r->error == MB_ENOENT)
        abort_next(s);
    else if (r->error != MB_OK && r->error != MB_EFULL)
        finish(s, r->error, r->text);
    else if (err.code == MB_ENOMEM)
        finish(s, err.code, err.text);
    else
        finish(s, MB_EEXIST, "another writer has taken over");
}

static int take_ids(struct sweep *s, const struct mb_store_result *r)
{
    s->ids = mb_calloc(r->n_entries, sizeof(*s->ids));
    while (s->ids != NULL && s->n_ids < r->n_entries) {
        s->ids[s->n_ids] = mb_strdup(r->entries[s->n_ids].key);
        if (s->ids[s->n_ids] == NULL)
            return MB_ENOMEM;
        s->n_ids++;
    }
    return s->ids != NULL ? MB_OK : MB_ENOMEM;
}

static void on_ids(void *arg, const struct mb_store_result *r)
{
    struct sweep *s = arg;
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err = {0};

    if (r->error == MB_EUNSUPPORTED) {
        if (mb_store_abort_uploads(s->u->store, s->key, NULL, TIMEOUT_MS, on_aborted, s, &err) !=
            MB_OK)
            finish(s, err.code, err.text);
    } else if (r->error != MB_OK || r->n_entries == 0) {
        finish(s, r->error, r->text);
    } else if (take_ids(s, r) != MB_OK) {
        finish(s, MB_ENOMEM, "no memory to list unfinished uploads");
    } else if (s->is_beside) {
        abort_next(s);
    } else if (mb_store_get(s->u->store, mb_manifest_key(s->iteration, key), MB_MANIFEST_MAX_BYTES,
                            TIMEOUT_MS, on_claim, s, &err) != MB_OK) {
        finish(s, err.code, err.text);
    }
}

int upload_sweep(struct mb_upload *u, const struct mb_plan_iteration *it, const char *key,
                 upload_sweep_cb cb, void *arg, struct mb_err *err)
{
    struct sweep *s = mb_calloc(1, sizeof(*s));
    int rc;

    if (s != NULL)
        s->key = mb_strdup(key);
    if (s == NULL || s->key == NULL) {
        mb_free(s);
        return mb_err_set(err, MB_ENOMEM, "no memory to look for unfinished uploads");
    }
    s->u = u;
    s->iteration = it->iteration;
    s->is_beside = it->place != NULL && it->place[0] != '\0';
    s->cb = cb;
    s->arg = arg;
    rc = mb_store_list_uploads(u->store, key, TIMEOUT_MS, on_ids, s, err);
    if (rc != MB_OK)
        free_sweep(s);
    return rc;
}
