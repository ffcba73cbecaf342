/*
 * Iterations of foreign trainers, which report nothing: sealed by the tracker file of the first
 * node, whose files are told by fingerprints, and taken on every node by a walk over the directory.
 */
#include <stdio.h>
#include <sys/stat.h>
#include "agent/upload/upload_internal.h"
#include "agent/upload/walk.h"
#include "base/alloc.h"
#include "base/fs.h"
#include "base/log.h"

static const char not_uploaded[] = "it was saved and not uploaded";

/* For a driver that may not have heard of it, and has to pass it on. */
static void repeat_seal(struct mb_upload *u, const struct mb_plan_iteration *it)
{
    struct mb_walk w;

    if (it->state >= MB_PLAN_COMMITTED || mb_walk_dir(it->dir, &w) != MB_OK)
        return;
    mb_walk_sort_prints(&w);
    u->ops->on_sealed(u->arg, it->iteration, w.prints, w.n);
    mb_walk_close(&w);
}

void upload_repeat_seals(struct mb_upload *u)
{
    int is_first = u->opts.watch_tracker && u->opts.node_rank == 0;

    for (size_t i = 0; is_first && i < mb_plan_count(u->plan); i++)
        repeat_seal(u, mb_plan_at(u->plan, i));
}

/* All files of the walk are this node's, told as those of its first rank. state: of the directory
 * before any was left to another node. */
static int take_walk(struct mb_upload *u, int64_t iteration, const char *dir,
                     const struct mb_walk *w, uint64_t state, struct mb_err *err)
{
    int is_new = mb_plan_find(u->plan, iteration) == NULL, rc = MB_OK;
    struct mb_plan_iteration *it;

    for (size_t i = 0; i < u->opts.n_ranks && rc == MB_OK; i++)
        rc = mb_upload_saved(u, iteration, u->ranks[i], dir, w->files, i == 0 ? w->n : 0, err);
    it = mb_plan_find(u->plan, iteration);
    if (is_new && it != NULL)
        it->dir_state = state;
    return rc;
}

/* It was taken before, and its files are others now: the store has the former ones, or a mixture on
 * its way there. 0: it is as it was, or nobody knows how it was (an agent that was started again).
 */
static int is_other(const struct mb_plan_iteration *it, const struct mb_walk *w)
{
    return it->dir_state != 0 && it->dir_state != mb_walk_state(w);
}

/* Durable as it was before: said once, and repeated to a driver that comes back. */
static void refuse_again(struct mb_upload *u, struct mb_plan_iteration *it)
{
    struct mb_upload_status status;
    char text[200];

    if (it->state == MB_PLAN_DROPPED || it->error != NULL)
        return;
    if (it->state < MB_PLAN_COMMITTED) {
        upload_refuse(u, it->iteration, not_uploaded, "it was saved again before it was durable");
        return;
    }
    snprintf(text, sizeof(text),
             "iteration %lld is not durable: %s: it was saved again, and the store keeps what it "
             "had of it",
             (long long)it->iteration, not_uploaded);
    mb_error("upload", "job=%s: %s", u->job_id, text);
    it->error = mb_strdup(text); /* without memory it is said this once */
    mb_plan_status(it, mb_store_part_bytes(u->store), &status);
    status.error = text;
    u->ops->on_status(u->arg, &status);
}

static void on_sealed(void *arg, int64_t iteration, const char *dir, struct mb_walk *w)
{
    struct mb_upload *u = arg;
    struct mb_plan_iteration *it = mb_plan_find(u->plan, iteration);
    struct mb_err err = {0};

    if (it != NULL && is_other(it, w)) {
        refuse_again(u, it);
        return;
    }
    if (it != NULL && it->state >= MB_PLAN_COMMITTED) /* nobody has to hear of it once more */
        return;
    if (take_walk(u, iteration, dir, w, mb_walk_state(w), &err) != MB_OK) /* given up, and told */
        return;
    mb_info("upload", "job=%s: the tracker names iteration=%lld files=%zu", u->job_id,
            (long long)iteration, w->n);
    mb_walk_sort_prints(w);
    u->ops->on_sealed(u->arg, iteration, w->prints, w->n);
}

static void on_lost(void *arg, int64_t iteration, const char *why)
{
    struct mb_upload *u = arg;

    if (mb_plan_find(u->plan, iteration) == NULL) /* else it was taken before */
        upload_refuse(u, iteration, not_uploaded, why);
}

const struct mb_tracker_ops upload_tracker_ops = {on_sealed, on_lost};

/* This node saves, too: something newer was written since the launch. A shared directory's nodes
 * cannot be told from others here; the first node may have sent all of what is gone. */
static int has_newer(const struct mb_upload *u, int64_t iteration)
{
    int64_t launched_ms = mb_plan_gang(u->plan)->launched_unix_ms, *list;
    struct mb_err err;
    int found = 0;
    size_t n;

    if (mb_walk_iterations(u->local_dir, iteration + 1, INT64_MAX, &list, &n, &err) != MB_OK) {
        mb_warn("upload", "%s", err.text);
        return 1; /* not known: an empty part would be called a whole checkpoint */
    }
    for (size_t i = 0; i < n && !found; i++) {
        char name[MB_CHECKPOINT_KEY_MAX];
        char *dir = mb_path_join(u->local_dir, mb_iteration_dir(list[i], name));
        struct stat st;

        found = dir != NULL && stat(dir, &st) == 0 &&
                (int64_t)st.st_ctim.tv_sec * 1000 + st.st_ctim.tv_nsec / 1000000 >= launched_ms;
        mb_free(dir);
    }
    mb_free(list);
    return found;
}

int mb_upload_seal(struct mb_upload *u, int64_t iteration, const uint64_t *prints, size_t n,
                   struct mb_err *err)
{
    const struct mb_plan_iteration *it = mb_plan_find(u->plan, iteration);
    char name[MB_CHECKPOINT_KEY_MAX], *dir;
    struct mb_walk w = {0};
    int rc;

    if (it != NULL && it->state != MB_PLAN_COLLECTING) /* taken, or given up, before */
        return MB_OK;
    dir = mb_path_join(u->local_dir, mb_iteration_dir(iteration, name));
    rc = dir != NULL ? mb_walk_dir_again(dir, &w) : MB_ENOMEM;
    if (rc == MB_ENOENT && !has_newer(u, iteration)) /* nothing is here: an empty part says so */
        rc = MB_OK;
    if (rc != MB_OK) {
        mb_err_set(err, rc,
                   rc == MB_ENOENT ? "%s was removed before this node had taken it"
                                   : "%s cannot be read",
                   dir != NULL ? dir : name);
        upload_refuse(u, iteration, "what the tracker file names was not taken", err->text);
    } else {
        uint64_t state = mb_walk_state(&w);

        mb_walk_drop_known(&w, prints, n);
        rc = take_walk(u, iteration, dir, &w, state, err);
    }
    mb_walk_close(&w);
    mb_free(dir);
    return rc;
}

void mb_upload_look(struct mb_upload *u)
{
    mb_tracker_look(u->tracker, 0);
}

void mb_upload_last_look(struct mb_upload *u)
{
    mb_tracker_look(u->tracker, 1);
}
