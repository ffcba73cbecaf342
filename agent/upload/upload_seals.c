/*
 * Iterations of foreign trainers, which report nothing: sealed by the tracker file of the first
 * node, whose files are told by fingerprints, and taken on every node by a walk over the directory.
 */
#include "agent/upload/upload_internal.h"
#include "agent/upload/walk.h"
#include "base/alloc.h"
#include "base/fs.h"
#include "base/log.h"

enum { LOOKS = 3 };

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

void upload_on_sealed(void *arg, int64_t iteration, const char *dir, struct mb_walk *w)
{
    struct mb_upload *u = arg;
    struct mb_err err = {0};

    if (take_walk(u, iteration, dir, w, mb_walk_state(w), &err) != MB_OK) /* given up, and told */
        return;
    mb_info("upload", "job=%s: the tracker names iteration=%lld files=%zu", u->job_id,
            (long long)iteration, w->n);
    mb_walk_sort_prints(w);
    u->ops->on_sealed(u->arg, iteration, w->prints, w->n);
}

int mb_upload_seal(struct mb_upload *u, int64_t iteration, const uint64_t *prints, size_t n,
                   struct mb_err *err)
{
    char name[MB_CHECKPOINT_KEY_MAX];
    char *dir = mb_path_join(u->local_dir, mb_iteration_dir(iteration, name));
    struct mb_walk w = {0};
    int rc = dir != NULL ? MB_ESTATE : MB_ENOMEM;

    for (int i = 0; i < LOOKS && rc == MB_ESTATE; i++) /* temporary files come and go */
        rc = mb_walk_dir(dir, &w);
    if (rc == MB_ENOENT) /* nothing of it is here: an empty part says so */
        rc = MB_OK;
    if (rc != MB_OK) {
        mb_err_set(err, rc, "%s cannot be read", dir != NULL ? dir : name);
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
    mb_tracker_look(u->tracker);
}
