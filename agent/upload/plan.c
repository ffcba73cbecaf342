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
#define SMALL_BYTES  ((uint64_t)1 << 20)
#define SINGLE_BYTES ((uint64_t)64 << 20)

struct mb_plan {
    uint32_t *ranks;
    size_t n_ranks;
    struct mb_plan_iteration **list; /* ascending */
    size_t n;
    size_t cap;
    int64_t first; /* whose files go before all others; -1: none */
    struct mb_plan_gang gang;
    struct { /* the beginning of a report */
        int64_t iteration;
        uint32_t rank;
        struct mb_upload_file *files; /* with paths of its own */
        size_t n;
    } more;
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
    p->first = -1;
    *out = p;
    return MB_OK;
}

static void free_files(struct mb_plan_file *files, size_t n)
{
    for (size_t i = 0; files != NULL && i < n; i++) {
        mb_free(files[i].path);
        mb_free(files[i].upload_id);
        mb_free(files[i].etag);
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
    mb_free(it->place);
    mb_free(it->part_etag);
    mb_free(it->error);
    mb_free(it);
}

void mb_plan_shed(struct mb_plan_iteration *it)
{
    if (it->state != MB_PLAN_COMMITTED)
        return;
    free_files(it->files, it->n_files);
    it->files = NULL;
    it->n_files = it->n_done = it->n_begun = 0;
}

static void forget_more(struct mb_plan *p)
{
    for (size_t i = 0; i < p->more.n; i++)
        mb_free((char *)(uintptr_t)p->more.files[i].path);
    mb_free(p->more.files);
    p->more.files = NULL;
    p->more.n = 0;
}

void mb_plan_destroy(struct mb_plan *p)
{
    if (p == NULL)
        return;
    forget_more(p);
    for (size_t i = 0; i < p->n; i++)
        free_iteration(p->list[i]);
    mb_free(p->list);
    mb_free(p->ranks);
    mb_free(p);
}

/* ---- look-ups ---- */

struct mb_plan_gang *mb_plan_gang(struct mb_plan *p)
{
    return &p->gang;
}

const uint32_t *mb_plan_ranks(const struct mb_plan *p, size_t *n)
{
    *n = p->n_ranks;
    return p->ranks;
}

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

/* As the store cuts them: base/s3/s3_upload.c. */
static void count_parts(const struct mb_plan_file *f, uint64_t part, struct mb_upload_status *out)
{
    uint64_t n = 1, done;

    if (f->size_bytes / 9000 >= part)
        part = f->size_bytes / 9000 + 1;
    if (f->size_bytes >= SINGLE_BYTES)
        n = (f->size_bytes + part - 1) / part;
    done = f->state == MB_PLAN_FILE_DONE ? n : f->sent_bytes / part;
    out->parts_total += n;
    out->parts_done += done < n || f->state == MB_PLAN_FILE_DONE ? done : n - 1;
}

void mb_plan_status(const struct mb_plan_iteration *it, uint64_t part_bytes,
                    struct mb_upload_status *out)
{
    *out = (struct mb_upload_status){.iteration = it->iteration,
                                     .shards_durable = it->state == MB_PLAN_PART ||
                                                       it->state == MB_PLAN_COMMITTED,
                                     .committed = it->state == MB_PLAN_COMMITTED,
                                     .is_left = it->is_left,
                                     .never = it->never,
                                     .error = it->error != NULL ? it->error : ""};
    out->eta_ms = UINT64_MAX;
    for (size_t i = 0; i < it->n_files; i++) {
        count_parts(&it->files[i], part_bytes, out);
        out->total_bytes += it->files[i].size_bytes;
        out->done_bytes += it->files[i].state == MB_PLAN_FILE_DONE ? it->files[i].size_bytes
                                                                   : it->files[i].sent_bytes;
    }
}

/* ---- a rank saved ---- */

/* The files that an iteration has, by path. */
struct known {
    const struct mb_plan_file **files;
    size_t n;
};

static int compare_paths(const void *a, const void *b)
{
    return strcmp((*(const struct mb_plan_file *const *)a)->path,
                  (*(const struct mb_plan_file *const *)b)->path);
}

static int know(const struct mb_plan_iteration *it, struct known *out)
{
    *out = (struct known){0};
    if (it == NULL || it->n_files == 0)
        return MB_OK;
    out->files = mb_calloc(it->n_files, sizeof(*out->files));
    if (out->files == NULL)
        return MB_ENOMEM;
    out->n = it->n_files;
    for (size_t i = 0; i < out->n; i++)
        out->files[i] = &it->files[i];
    qsort(out->files, out->n, sizeof(*out->files), compare_paths);
    return MB_OK;
}

static const struct mb_plan_file *file_of(const struct known *known, const char *path)
{
    const struct mb_plan_file wanted = {.path = (char *)(uintptr_t)path};
    const struct mb_plan_file *key = &wanted, **found = NULL;

    if (known->n > 0)
        found = bsearch(&key, known->files, known->n, sizeof(*known->files), compare_paths);
    return found != NULL ? *found : NULL;
}

static int check_files(const struct known *all_known, const struct mb_upload_file *files, size_t n,
                       struct mb_err *err)
{
    for (size_t i = 0; i < n; i++) {
        const struct mb_plan_file *known = file_of(all_known, files[i].path);

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
static struct mb_plan_file *join_files(struct mb_plan_iteration *it, const struct known *known,
                                       const struct mb_upload_file *files, size_t n, size_t *n_out)
{
    size_t have = it->n_files;
    struct mb_plan_file *all = mb_calloc(have + n, sizeof(*all));

    if (all == NULL)
        return NULL;
    for (size_t i = 0; i < n; i++) {
        if (file_of(known, files[i].path) != NULL)
            continue;
        all[have] = (struct mb_plan_file){.owner = it,
                                          .path = mb_strdup(files[i].path),
                                          .size_bytes = files[i].size_bytes,
                                          .crc64nvme = files[i].crc64nvme,
                                          .has_crc = files[i].has_crc,
                                          .mtime_ns = files[i].mtime_ns};
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

int mb_plan_is_full(const struct mb_plan *p)
{
    return count_pending(p) >= PENDING_MAX;
}

int mb_plan_saved(struct mb_plan *p, int64_t iteration, uint32_t rank, const char *dir,
                  const struct mb_upload_file *files, size_t n, struct mb_err *err)
{
    struct mb_plan_iteration *it = mb_plan_find(p, iteration);
    struct mb_plan_iteration *fresh = NULL;
    struct mb_plan_file *all;
    struct known known;
    size_t at = rank_index(p, rank), n_all = 0;
    int rc;

    if (at == p->n_ranks)
        return mb_err_set(err, MB_EINVAL, "rank %u does not live on this node", rank);
    if (it != NULL && (it->reported[at] || it->state != MB_PLAN_COLLECTING))
        return mb_err_set(err, MB_EEXIST, "rank %u reported iteration %lld already", rank,
                          (long long)iteration);
    if (it == NULL && mb_plan_is_full(p))
        return mb_err_set(err, MB_EFULL, "%d iterations wait for their upload", PENDING_MAX);
    if (know(it, &known) != MB_OK)
        return mb_err_set(err, MB_ENOMEM, "no memory to plan an upload of %zu files", n);
    rc = check_files(&known, files, n, err);
    if (rc == MB_OK && it == NULL)
        it = fresh = new_iteration(p, iteration, dir);
    all = rc == MB_OK && it != NULL ? join_files(it, &known, files, n, &n_all) : NULL;
    mb_free(known.files);
    if (rc != MB_OK)
        return rc;
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

int mb_plan_more(struct mb_plan *p, int64_t iteration, uint32_t rank, size_t at,
                 const struct mb_upload_file *files, size_t n, struct mb_err *err)
{
    struct mb_upload_file *grown;

    if (at == 0)
        forget_more(p);
    if (at != p->more.n || (at > 0 && (p->more.iteration != iteration || p->more.rank != rank)))
        return mb_err_set(err, MB_ECORRUPT, "a piece of a report is missing");
    grown = mb_reallocarray(p->more.files, at + n + 1, sizeof(*grown));
    if (grown == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory to plan an upload of %zu files", n);
    p->more.files = grown;
    p->more.iteration = iteration;
    p->more.rank = rank;
    for (size_t i = 0; i < n; i++) {
        grown[p->more.n] = files[i];
        grown[p->more.n].path = mb_strdup(files[i].path);
        if (grown[p->more.n].path == NULL)
            return mb_err_set(err, MB_ENOMEM, "no memory to plan an upload of %zu files", n);
        p->more.n++;
    }
    return MB_OK;
}

int mb_plan_saved_after(struct mb_plan *p, int64_t iteration, uint32_t rank, size_t n_before,
                        const char *dir, const struct mb_upload_file *files, size_t n,
                        struct mb_err *err)
{
    int rc = MB_OK;

    if (n_before == 0)
        return mb_plan_saved(p, iteration, rank, dir, files, n, err);
    rc = mb_plan_more(p, iteration, rank, n_before, files, n, err);
    if (rc == MB_OK)
        rc = mb_plan_saved(p, iteration, rank, dir, p->more.files, p->more.n, err);
    forget_more(p);
    return rc;
}

struct mb_plan_iteration *mb_plan_recall(struct mb_plan *p, int64_t iteration)
{
    struct mb_plan_iteration *it = mb_plan_note(p, iteration);

    if (it != NULL)
        it->state = MB_PLAN_COMMITTED;
    return it;
}

int mb_plan_place(struct mb_plan_iteration *it, const char *place, struct mb_err *err)
{
    if (it->place != NULL)
        return strcmp(it->place, place) == 0
                   ? MB_OK
                   : mb_err_set(err, MB_ESTATE, "iteration %lld has files at two places",
                                (long long)it->iteration);
    it->place = mb_strdup(place);
    return it->place != NULL ? MB_OK : mb_err_set(err, MB_ENOMEM, "no memory for a place");
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

static uint64_t bytes_left(const struct mb_plan_iteration *it)
{
    uint64_t left = 0;

    for (size_t i = 0; i < it->n_files; i++)
        if (it->files[i].state != MB_PLAN_FILE_DONE)
            left += it->files[i].size_bytes - it->files[i].sent_bytes;
    return left;
}

static uint64_t time_of(uint64_t bytes, uint64_t rate_bytes_per_s)
{
    if (rate_bytes_per_s == 0)
        return bytes == 0 ? 0 : UINT64_MAX;
    return bytes / rate_bytes_per_s * 1000 + bytes % rate_bytes_per_s * 1000 / rate_bytes_per_s;
}

int mb_plan_has_time(const struct mb_plan_iteration *it, uint64_t left_ms,
                     uint64_t rate_bytes_per_s)
{
    return rate_bytes_per_s > 0 && time_of(bytes_left(it), rate_bytes_per_s) <= left_ms;
}

int64_t mb_plan_choose(const struct mb_plan *p, uint64_t left_ms, uint64_t rate_bytes_per_s)
{
    for (size_t i = p->n; i-- > 0;)
        if (p->list[i]->state == MB_PLAN_UPLOADING && !p->list[i]->is_left_by_other &&
            mb_plan_has_time(p->list[i], left_ms, rate_bytes_per_s))
            return p->list[i]->iteration;
    return -1;
}

void mb_plan_prefer(struct mb_plan *p, int64_t iteration)
{
    p->first = iteration;
}

int mb_plan_is_preferred(const struct mb_plan *p, const struct mb_plan_iteration *it)
{
    return p->first >= 0 && it->iteration == p->first;
}

uint64_t mb_plan_eta_ms(const struct mb_plan *p, const struct mb_plan_iteration *it,
                        uint64_t rate_bytes_per_s)
{
    uint64_t bytes = 0;

    for (size_t i = 0; i < p->n; i++) {
        const struct mb_plan_iteration *other = p->list[i];
        int goes_before = other->iteration == p->first ||
                          (it->iteration != p->first && other->iteration < it->iteration);

        if (other->state == MB_PLAN_UPLOADING && (other == it || goes_before))
            bytes += bytes_left(other);
    }
    return time_of(bytes, rate_bytes_per_s);
}

/* n_begun only moves back where a file does, so all calls together look at each file once. */
static struct mb_plan_file *waiting_file(struct mb_plan_iteration *it)
{
    if (it->state != MB_PLAN_UPLOADING)
        return NULL;
    while (it->n_begun < it->n_files && it->files[it->n_begun].state != MB_PLAN_FILE_WAITING)
        it->n_begun++;
    return it->n_begun < it->n_files ? &it->files[it->n_begun] : NULL;
}

int mb_plan_next(struct mb_plan *p, struct mb_plan_iteration **it, struct mb_plan_file **file)
{
    struct mb_plan_iteration *first = p->first >= 0 ? mb_plan_find(p, p->first) : NULL;

    *it = first;
    *file = first != NULL ? waiting_file(first) : NULL;
    for (size_t i = 0; i < p->n && *file == NULL; i++) {
        *it = p->list[i];
        *file = waiting_file(*it);
    }
    if (*file == NULL)
        return 0;
    (*file)->state = MB_PLAN_FILE_SENDING;
    return 1;
}

void mb_plan_file_done(struct mb_plan_file *f, uint64_t crc64nvme)
{
    f->owner->n_done += f->state != MB_PLAN_FILE_DONE;
    f->state = MB_PLAN_FILE_DONE;
    f->crc64nvme = crc64nvme;
    f->has_crc = 1;
    mb_free(f->upload_id);
    f->upload_id = NULL;
}

void mb_plan_file_back(struct mb_plan_file *f)
{
    size_t at = (size_t)(f - f->owner->files);

    f->owner->n_done -= f->state == MB_PLAN_FILE_DONE;
    f->state = MB_PLAN_FILE_WAITING;
    if (at < f->owner->n_begun)
        f->owner->n_begun = at;
}

void mb_plan_file_again(struct mb_plan_file *f)
{
    mb_plan_file_back(f);
    f->sent_bytes = 0;
    f->failures++;
}

unsigned mb_plan_count_failure(unsigned failures, int code)
{
    int is_away = code == MB_EUNAVAIL || code == MB_ETIMEOUT;

    return failures + (!is_away || failures + 1 < MB_PLAN_TRIES_MAX);
}

int mb_plan_file_is_open(const struct mb_plan_file *f)
{
    return f->state == MB_PLAN_FILE_SENDING ||
           (f->state == MB_PLAN_FILE_WAITING && (f->upload_id != NULL || f->may_have_uploads));
}

int mb_plan_files_done(const struct mb_plan_iteration *it)
{
    return it->state == MB_PLAN_UPLOADING && it->n_done == it->n_files;
}

int mb_plan_event(struct mb_plan_iteration *it, enum mb_plan_event event, const char *error,
                  struct mb_err *err)
{
    int next = next_state[it->state][event];

    if (next == NO || (event == MB_PLAN_EV_PART_SENT && it->state == MB_PLAN_UPLOADING &&
                       !mb_plan_files_done(it)))
        return mb_err_set(err, MB_ESTATE, "iteration %lld: %s is not possible while it is %s",
                          (long long)it->iteration, event_names[event], state_names[it->state]);
    it->never |= next == MB_PLAN_DROPPED && it->state < MB_PLAN_PART;
    it->state = (enum mb_plan_state)next;
    it->gives_up = next == MB_PLAN_DROPPED;
    if (event == MB_PLAN_EV_DROPPED && error != NULL && it->error == NULL &&
        next == MB_PLAN_DROPPED)
        it->error = mb_strdup(error); /* without memory the state alone says it */
    return MB_OK;
}
