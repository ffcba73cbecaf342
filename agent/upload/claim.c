/*
 *  1. Get what stands at the manifest's key and decide.
 *  2. The fence, after it: somebody newer counts: over. Whoever had claimed by 1 was in the list by
 *     then, so a claim is never taken from somebody newer.
 *  3. A claim to be written is put under the condition that what was seen in 1 still stands there;
 *     if not, 1 again, TRIES_MAX times.
 *  4. A server without conditional writes: the claim is put plainly, and its writer is the only one
 *     by the fence alone. One that refuses this too takes no writes at all, which is an error.
 */
#include "agent/upload/claim.h"

#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/log.h"

enum { TIMEOUT_MS = 60000, TRIES_MAX = 10 };

/* ---- the decision ---- */

static const char *text_of(const char *s)
{
    return s != NULL ? s : "";
}

static int is_at(const char *place, const char *wanted)
{
    return place == NULL || strcmp(place, wanted) == 0;
}

enum mb_claim_act mb_claim_decide(const struct mb_manifest *found,
                                  const struct mb_manifest_writer *writer, const char *place,
                                  char out[MB_CLAIM_PLACE_MAX])
{
    out[0] = '\0';
    if (found == NULL || (found->is_claim && !mb_manifest_is_of(found, writer))) {
        /* What was sent already was sent under a claim that is not there any more. */
        return place == NULL && (found == NULL || !mb_manifest_is_newer(found, writer))
                   ? MB_CLAIM_PUT
                   : MB_CLAIM_OVER;
    }
    if (mb_manifest_is_of(found, writer)) {
        snprintf(out, MB_CLAIM_PLACE_MAX, "%s", text_of(found->data));
        return is_at(place, out) ? MB_CLAIM_HELD : MB_CLAIM_OVER;
    }
    snprintf(out, MB_CLAIM_PLACE_MAX, ".mobula/data-%.32s-%u", writer->placement_group,
             writer->attempt);
    return is_at(place, out) ? MB_CLAIM_BESIDE : MB_CLAIM_OVER;
}

/* ---- the shell ---- */

struct taking {
    struct mb_store *store;
    struct mb_claim_opts opts;
    char key[MB_CHECKPOINT_KEY_MAX];
    char *text; /* of our claim */
    unsigned tries;
    int is_plain; /* the claim was put without a condition */
    int was_there;
    int is_fenced;
    /* What was found and decided: */
    enum mb_claim_act act;
    const char *over; /* static */
    char place[MB_CLAIM_PLACE_MAX];
    int is_there; /* something stands there ... */
    char etag[200];
    char begun_by[160];
    mb_claim_cb cb;
    void *arg;
};

static void finish(struct taking *t, const struct mb_err *err, const char *over, const char *place)
{
    struct mb_claim_answer answer = {.err = *err,
                                     .over = over,
                                     .is_fenced = t->is_fenced,
                                     .place = place,
                                     .was_there = t->was_there};

    t->cb(t->arg, &answer);
    mb_free(t->text);
    mb_free(t);
}

static int get(struct taking *t, struct mb_err *err);

static void on_put(void *arg, const struct mb_store_result *r)
{
    struct taking *t = arg;
    struct mb_err err = {0};

    if (r->error == MB_EEXIST && ++t->tries < TRIES_MAX && get(t, &err) == MB_OK)
        return;
    if (r->error == MB_EUNSUPPORTED && !t->is_plain && (t->is_plain = 1) &&
        mb_store_put(t->store, t->key, t->text, strlen(t->text), MB_STORE_ALWAYS, NULL, TIMEOUT_MS,
                     on_put, t, &err) == MB_OK)
        return;
    if (err.code == MB_OK && r->error != MB_OK)
        mb_err_set(&err, r->error, "claiming iteration %lld: %s", (long long)t->opts.iteration,
                   r->text);
    finish(t, &err, NULL, "");
}

static int encode(struct taking *t, struct mb_err *err)
{
    struct mb_manifest m = {.iteration = t->opts.iteration,
                            .node_rank = -1,
                            .num_nodes = t->opts.num_nodes,
                            .is_claim = 1};
    int rc = mb_manifest_set_writer(&m, &t->opts.writer.id, err);

    if (rc == MB_OK)
        rc = mb_manifest_encode(&m, &t->text, err);
    mb_manifest_close(&m);
    return rc;
}

static void put(struct taking *t)
{
    struct mb_err err = {0};

    t->was_there |= t->is_there;
    if (t->begun_by[0] != '\0')
        mb_info("upload", "iteration=%lld was begun by %s, and not finished: taking it over",
                (long long)t->opts.iteration, t->begun_by);
    if (t->text == NULL)
        encode(t, &err);
    if (err.code == MB_OK)
        mb_store_put(t->store, t->key, t->text, strlen(t->text),
                     t->is_there ? MB_STORE_IF_MATCH : MB_STORE_IF_ABSENT, t->etag, TIMEOUT_MS,
                     on_put, t, &err);
    if (err.code != MB_OK)
        finish(t, &err, NULL, "");
}

static void on_fence(void *arg, const struct mb_err *err, const char *over)
{
    struct taking *t = arg;

    t->is_fenced = err->code == MB_OK && over != NULL;
    if (err->code == MB_OK && over == NULL && t->act == MB_CLAIM_PUT)
        put(t);
    else
        finish(t, err, over != NULL ? over : t->over, t->place);
}

/* What stands there is known and decided about. */
static void look_at_fence(struct taking *t)
{
    struct mb_err ok = {0}, err;

    if (t->opts.is_unfenced)
        on_fence(t, &ok, NULL);
    else if (mb_fence_look(t->store, &t->opts.writer, on_fence, t, &err) != MB_OK)
        finish(t, &err, NULL, "");
}

static void decide(struct taking *t, const struct mb_manifest *found)
{
    t->over = NULL;
    t->begun_by[0] = '\0';
    t->act = mb_claim_decide(found, &t->opts.writer.id, t->opts.place, t->place);
    switch (t->act) {
    case MB_CLAIM_PUT:
        if (found != NULL)
            snprintf(t->begun_by, sizeof(t->begun_by), "job %s, attempt %u", found->job_id,
                     found->attempt);
        break;
    case MB_CLAIM_BESIDE:
        if (t->opts.place == NULL)
            mb_info("upload", "iteration=%lld of job %s, attempt %u, is whole: ours goes beside it",
                    (long long)t->opts.iteration, found->job_id, found->attempt);
        break;
    case MB_CLAIM_HELD:
        t->was_there |= t->tries == 0;
        break;
    default:
        t->over =
            found != NULL ? "another writer has taken over" : "its claim is gone from the store";
        break;
    }
}

static void on_get(void *arg, const struct mb_store_result *r)
{
    struct taking *t = arg;
    struct mb_manifest m = {0};
    struct mb_err err = {0};
    const struct mb_manifest *found = NULL;

    if (r->error != MB_OK && r->error != MB_ENOENT) {
        mb_err_set(&err, r->error, "looking for a claim: %s", r->text);
        finish(t, &err, NULL, "");
        return;
    }
    t->is_there = r->error == MB_OK;
    snprintf(t->etag, sizeof(t->etag), "%s", r->etag);
    if (r->error == MB_OK &&
        mb_manifest_decode_any(r->data, r->data_len, "manifest", &m, &err) == MB_OK &&
        m.iteration == t->opts.iteration)
        found = &m;
    if (err.code == MB_ENOMEM) {
        finish(t, &err, NULL, "");
        return;
    }
    if (found == NULL && r->error == MB_OK &&
        mb_manifest_is_of_newer_version(r->data, r->data_len)) {
        t->act = MB_CLAIM_OVER;
        t->over = "a newer mobula has written it: use that";
    } else {
        decide(t, found);
    }
    mb_manifest_close(&m);
    look_at_fence(t);
}

static int get(struct taking *t, struct mb_err *err)
{
    return mb_store_get(t->store, t->key, MB_MANIFEST_MAX_BYTES, TIMEOUT_MS, on_get, t, err);
}

int mb_claim_take(struct mb_store *store, const struct mb_claim_opts *opts, mb_claim_cb cb,
                  void *arg, struct mb_err *err)
{
    struct taking *t = mb_calloc(1, sizeof(*t));
    int rc;

    if (t == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory to claim an iteration");
    *t = (struct taking){.store = store, .opts = *opts, .cb = cb, .arg = arg};
    mb_manifest_key(opts->iteration, t->key);
    rc = get(t, err);
    if (rc != MB_OK)
        mb_free(t);
    return rc;
}
