/*
 * The plan of uploads.
 *
 * Happy path: saved (once per local rank) -> the last report seals the iteration and sorts its
 * files
 * -> next hands them out -> all done -> part -> committed.
 *
 *  1. A path that a manifest would not take ("..", a leading slash, an empty segment) is refused.
 *  2. Ranks that share a file (the same path twice) send it once; different sizes are an error.
 *  3. Memory runs out: the report is refused as a whole, nothing of it is kept.
 *  4. An event the table does not know in this state is refused with a text.
 */
#include "agent/upload/plan.h"

#include <stdlib.h>
#include <string.h>
#include "agent/upload/manifest.h"
#include "base/alloc.h"

enum { PENDING_MAX = 256, NO = -1 };

/* Files up to this size go first. */
#define SMALL_BYTES ((uint64_t)1 << 20)

struct mb_plan {
    uint32_t *ranks;
    size_t n_ranks;
    struct mb_plan_iteration **list; /* ascending */
    size_t n;
    size_t cap;
};

static const char *const state_names[MB_PLAN_N_STATES] = {"COLLECTING", "UPLOADING", "PART",
                                                          "COMMITTED", "DROPPED"};
static const char *const event_names[MB_PLAN_N_EVENTS] = {"sealed", "part sent", "committed",
                                                          "dropped"};

static const signed char next_state[MB_PLAN_N_STATES][MB_PLAN_N_EVENTS] = {
    [MB_PLAN_COLLECTING] = {MB_PLAN_UPLOADING, NO, NO, MB_PLAN_DROPPED},
    [MB_PLAN_UPLOADING] = {NO, MB_PLAN_PART, NO, MB_PLAN_DROPPED},
    [MB_PLAN_PART] = {NO, MB_PLAN_PART, MB_PLAN_COMMITTED, MB_PLAN_DROPPED},
    [MB_PLAN_COMMITTED] = {NO, NO, MB_PLAN_COMMITTED, MB_PLAN_COMMITTED},
    [MB_PLAN_DROPPED] = {NO, NO, NO, MB_PLAN_DROPPED},
};

const char *mb_plan_state_name(enum mb_plan_state s)
{
    return (unsigned)s < MB_PLAN_N_STATES ? state_names[s] : "?";
}

/* ---- life ---- */

int mb_plan_create(const uint32_t *ranks, size_t n_ranks, struct mb_plan **out, struct mb_err *err)
{
    struct mb_plan *p = mb_calloc(1, sizeof(*p));

    if (p != NULL)
        p->ranks = mb_calloc(n_ranks, sizeof(*ranks));
    if (p == NULL || p->ranks == NULL) {
        mb_free(p);
        return mb_err_set(err, MB_ENOMEM, "no memory for the plan of uploads");
    }
    memcpy(p->ranks, ranks, n_ranks * sizeof(*ranks));
    p->n_ranks = n_ranks;
    *out = p;
    return MB_OK;
}

static void free_files(struct mb_plan_file *files, size_t n)
{
    for (size_t i = 0; files != NULL && i < n; i++) {
        mb_free(files[i].path);
        mb_free(files[i].upload_id);
    }
    mb_free(files);
}

static void free_iteration(struct mb_plan_iteration *it)
{
    if (it == NULL)
        return;
    free_files(it->files, it->n_files);
    mb_free(it->dir);
    mb_free(it->reported);
    mb_free(it->error);
    mb_free(it);
}

void mb_plan_shed(struct mb_plan_iteration *it)
{
    if (it->state != MB_PLAN_COMMITTED)
        return;
    free_files(it->files, it->n_files);
    it->files = NULL;
    it->n_files = 0;
}

void mb_plan_destroy(struct mb_plan *p)
{
    if (p == NULL)
        return;
    for (size_t i = 0; i < p->n; i++)
        free_iteration(p->list[i]);
    mb_free(p->list);
    mb_free(p->ranks);
    mb_free(p);
}

/* ---- look-ups ---- */

size_t mb_plan_count(const struct mb_plan *p)
{
    return p->n;
}

struct mb_plan_iteration *mb_plan_at(struct mb_plan *p, size_t i)
{
    return i < p->n ? p->list[i] : NULL;
}

struct mb_plan_iteration *mb_plan_find(struct mb_plan *p, int64_t iteration)
{
    for (size_t i = 0; i < p->n; i++)
        if (p->list[i]->iteration == iteration)
            return p->list[i];
    return NULL;
}

static int is_pending(const struct mb_plan_iteration *it)
{
    return it->state < MB_PLAN_COMMITTED;
}

int mb_plan_is_busy(const struct mb_plan *p)
{
    for (size_t i = 0; i < p->n; i++)
        if (is_pending(p->list[i]))
            return 1;
    return 0;
}

void mb_plan_status(const struct mb_plan_iteration *it, struct mb_upload_status *out)
{
    *out = (struct mb_upload_status){.iteration = it->iteration,
                                     .shards_durable = it->state == MB_PLAN_PART ||
                                                       it->state == MB_PLAN_COMMITTED,
                                     .committed = it->state == MB_PLAN_COMMITTED,
                                     .error = it->error != NULL ? it->error : ""};
    for (size_t i = 0; i < it->n_files; i++) {
        out->total_bytes += it->files[i].size_bytes;
        out->done_bytes += it->files[i].state == MB_PLAN_FILE_DONE ? it->files[i].size_bytes
                                                                   : it->files[i].sent_bytes;
    }
}

/* ---- a rank saved ---- */

static const struct mb_plan_file *file_of(const struct mb_plan_iteration *it, const char *path)
{
    for (size_t i = 0; it != NULL && i < it->n_files; i++)
        if (strcmp(it->files[i].path, path) == 0)
            return &it->files[i];
    return NULL;
}

static int check_files(const struct mb_plan_iteration *it, const struct mb_upload_file *files,
                       size_t n, struct mb_err *err)
{
    for (size_t i = 0; i < n; i++) {
        const struct mb_plan_file *known = file_of(it, files[i].path);

        if (!mb_manifest_path_is_safe(files[i].path))
            return mb_err_set(err, MB_EINVAL, "the path %s leaves the checkpoint's directory",
                              files[i].path);
        if (known != NULL &&
            (known->size_bytes != files[i].size_bytes ||
             (known->has_crc && files[i].has_crc && known->crc64nvme != files[i].crc64nvme)))
            return mb_err_set(err, MB_EINVAL, "two ranks report %s with different contents",
                              files[i].path);
    }
    return MB_OK;
}

/* What it has plus the new files, in new memory. */
static struct mb_plan_file *join_files(const struct mb_plan_iteration *it,
                                       const struct mb_upload_file *files, size_t n, size_t *n_out)
{
    size_t have = it->n_files;
    struct mb_plan_file *all = mb_calloc(have + n, sizeof(*all));

    if (all == NULL)
        return NULL;
    for (size_t i = 0; i < n; i++) {
        if (file_of(it, files[i].path) != NULL)
            continue;
        all[have] = (struct mb_plan_file){.path = mb_strdup(files[i].path),
                                          .size_bytes = files[i].size_bytes,
                                          .crc64nvme = files[i].crc64nvme,
                                          .has_crc = files[i].has_crc};
        if (all[have].path == NULL) {
            for (size_t k = it->n_files; k < have; k++)
                mb_free(all[k].path);
            mb_free(all);
            return NULL;
        }
        have++;
    }
    if (it->n_files > 0)
        memcpy(all, it->files, it->n_files * sizeof(*all));
    *n_out = have;
    return all;
}

static int compare_files(const void *a, const void *b)
{
    const struct mb_plan_file *x = a, *y = b;
    int x_small = x->size_bytes <= SMALL_BYTES, y_small = y->size_bytes <= SMALL_BYTES;

    if (x_small != y_small)
        return x_small ? -1 : 1;
    if (x->size_bytes != y->size_bytes)
        return (x->size_bytes < y->size_bytes) == x_small ? -1 : 1;
    return strcmp(x->path, y->path);
}

static struct mb_plan_iteration *new_iteration(const struct mb_plan *p, int64_t iteration,
                                               const char *dir)
{
    struct mb_plan_iteration *it = mb_calloc(1, sizeof(*it));

    if (it == NULL)
        return NULL;
    it->iteration = iteration;
    it->dir = mb_strdup(dir);
    it->reported = mb_calloc(p->n_ranks, 1);
    if (it->dir == NULL || it->reported == NULL) {
        free_iteration(it);
        return NULL;
    }
    return it;
}

static int insert(struct mb_plan *p, struct mb_plan_iteration *it)
{
    size_t at = p->n;

    if (p->n == p->cap) {
        size_t cap = p->cap + 16;
        struct mb_plan_iteration **grown = mb_reallocarray(p->list, cap, sizeof(*grown));

        if (grown == NULL)
            return MB_ENOMEM;
        p->list = grown;
        p->cap = cap;
    }
    while (at > 0 && p->list[at - 1]->iteration > it->iteration) {
        p->list[at] = p->list[at - 1];
        at--;
    }
    p->list[at] = it;
    p->n++;
    return MB_OK;
}

static size_t rank_index(const struct mb_plan *p, uint32_t rank)
{
    size_t i = 0;

    while (i < p->n_ranks && p->ranks[i] != rank)
        i++;
    return i;
}

static int all_reported(const struct mb_plan *p, const struct mb_plan_iteration *it)
{
    for (size_t i = 0; i < p->n_ranks; i++)
        if (!it->reported[i])
            return 0;
    return 1;
}

static size_t count_pending(const struct mb_plan *p)
{
    size_t n = 0;

    for (size_t i = 0; i < p->n; i++)
        n += (size_t)is_pending(p->list[i]);
    return n;
}

int mb_plan_saved(struct mb_plan *p, int64_t iteration, uint32_t rank, const char *dir,
                  const struct mb_upload_file *files, size_t n, struct mb_err *err)
{
    struct mb_plan_iteration *it = mb_plan_find(p, iteration);
    struct mb_plan_iteration *fresh = NULL;
    struct mb_plan_file *all;
    size_t at = rank_index(p, rank), n_all = 0;
    int rc;

    if (at == p->n_ranks)
        return mb_err_set(err, MB_EINVAL, "rank %u does not live on this node", rank);
    if (it != NULL && (it->reported[at] || it->state != MB_PLAN_COLLECTING))
        return mb_err_set(err, MB_EEXIST, "rank %u reported iteration %lld already", rank,
                          (long long)iteration);
    if (it == NULL && count_pending(p) >= PENDING_MAX)
        return mb_err_set(err, MB_EFULL, "%d iterations wait for their upload", PENDING_MAX);
    rc = check_files(it, files, n, err);
    if (rc != MB_OK)
        return rc;
    if (it == NULL)
        it = fresh = new_iteration(p, iteration, dir);
    all = it != NULL ? join_files(it, files, n, &n_all) : NULL;
    if (all == NULL || (fresh != NULL && insert(p, fresh) != MB_OK)) {
        for (size_t i = it != NULL ? it->n_files : 0; all != NULL && i < n_all; i++)
            mb_free(all[i].path);
        mb_free(all);
        free_iteration(fresh);
        return mb_err_set(err, MB_ENOMEM, "no memory to plan an upload of %zu files", n);
    }
    mb_free(it->files);
    it->files = all;
    it->n_files = n_all;
    it->reported[at] = 1;
    if (!all_reported(p, it))
        return MB_OK;
    qsort(it->files, it->n_files, sizeof(*it->files), compare_files);
    return mb_plan_event(it, MB_PLAN_EV_SEALED, NULL, err);
}

struct mb_plan_iteration *mb_plan_note(struct mb_plan *p, int64_t iteration)
{
    struct mb_plan_iteration *it = mb_plan_find(p, iteration);

    if (it != NULL)
        return it;
    it = new_iteration(p, iteration, "");
    if (it != NULL && insert(p, it) != MB_OK) {
        free_iteration(it);
        it = NULL;
    }
    return it;
}

/* ---- sending ---- */

int mb_plan_next(struct mb_plan *p, struct mb_plan_iteration **it, struct mb_plan_file **file)
{
    for (size_t i = 0; i < p->n; i++) {
        if (p->list[i]->state != MB_PLAN_UPLOADING)
            continue;
        for (size_t k = 0; k < p->list[i]->n_files; k++)
            if (p->list[i]->files[k].state == MB_PLAN_FILE_WAITING) {
                *it = p->list[i];
                *file = &p->list[i]->files[k];
                (*file)->state = MB_PLAN_FILE_SENDING;
                return 1;
            }
    }
    return 0;
}

void mb_plan_file_done(struct mb_plan_file *f, uint64_t crc64nvme)
{
    f->state = MB_PLAN_FILE_DONE;
    f->crc64nvme = crc64nvme;
    f->has_crc = 1;
    mb_free(f->upload_id);
    f->upload_id = NULL;
}

void mb_plan_file_again(struct mb_plan_file *f)
{
    f->state = MB_PLAN_FILE_WAITING;
    f->sent_bytes = 0;
    f->failures++;
}

int mb_plan_files_done(const struct mb_plan_iteration *it)
{
    for (size_t i = 0; i < it->n_files; i++)
        if (it->files[i].state != MB_PLAN_FILE_DONE)
            return 0;
    return it->state == MB_PLAN_UPLOADING;
}

int mb_plan_event(struct mb_plan_iteration *it, enum mb_plan_event event, const char *error,
                  struct mb_err *err)
{
    int next = next_state[it->state][event];

    if (next == NO || (event == MB_PLAN_EV_PART_SENT && it->state == MB_PLAN_UPLOADING &&
                       !mb_plan_files_done(it)))
        return mb_err_set(err, MB_ESTATE, "iteration %lld: %s is not possible while it is %s",
                          (long long)it->iteration, event_names[event], state_names[it->state]);
    it->state = (enum mb_plan_state)next;
    if (event == MB_PLAN_EV_DROPPED && error != NULL && it->error == NULL &&
        next == MB_PLAN_DROPPED)
        it->error = mb_strdup(error); /* without memory the state alone says it */
    return MB_OK;
}
