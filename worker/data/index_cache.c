/*
 * The index cache (index_cache.h).
 *
 *  1. The description of the data set gives the names of its files.
 *  2. Load: without a description there is nothing; with it, arrays of the sizes that the plan says
 *     are read (npy.h), then checked against each other and the data.
 *     A data set that is not there keeps its name and description.
 *  3. Store: directory, arrays, description; the first failure is a note and ends it.
 * Failures of memory free what was read; the caller builds or gives up.
 */
#include "worker/data/index_cache.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "worker/data/cache_files.h"
#include "worker/data/dataset_private.h"
#include "worker/data/npy.h"

enum { DIR_MODE = 0777, N_MAX = 3, BITS = 8 };

static const char BUILT[] = "the indices are built";

/* One array of a set. */
struct part {
    const char *what; /* "document_index.npy" */
    struct mb_npy_shape shape;
    void *elements;
};

/* The files of one data set. */
struct set {
    const struct mb_index_cache *cache;
    struct mb_buf description;
    char base[MB_CACHE_BASE_MAX];
    struct part parts[N_MAX];
    size_t n_parts;
};

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "--data-cache-path: out of memory");
}

/* What went wrong ends in a note, but for a lack of memory. */
static int warn(const struct mb_index_cache *c, const char *then, const struct mb_err *problem,
                struct mb_err *err)
{
    if (problem->code == MB_ENOMEM) {
        return no_memory(err);
    }
    return mb_buf_printf(c->notes, "WARNING: --data-cache-path: %s; %s\n", problem->text, then) == 0
               ? 0
               : no_memory(err);
}

static char *path_of(const struct set *s, const char *what)
{
    char *name = mb_asprintf("%s-%s", s->base, what);
    char *path = name != NULL ? mb_path_join(s->cache->dir, name) : NULL;
    mb_free(name);
    return path;
}

static void begins(const struct set *s, const char *verb, const char *path)
{
    const struct mb_data_watch *w = s->cache->watch;
    if (w != NULL) {
        w->begins(w->arg, verb, path);
    }
}

/* ---- files ---- */

static int read_part(const struct set *s, const struct part *p, struct mb_err *problem)
{
    char *path = path_of(s, p->what);
    if (path == NULL) {
        return no_memory(problem);
    }
    begins(s, "reading", path);
    int rc = mb_npy_read(path, &p->shape, p->elements, problem);
    mb_free(path);
    return rc;
}

static int read_description(const struct set *s, struct mb_err *problem)
{
    struct mb_buf text = {0};
    char *path = path_of(s, "description.txt");
    int rc =
        path != NULL ? mb_fs_read(path, s->description.len, &text, problem) : no_memory(problem);
    if (rc == MB_EFULL || (rc == 0 && (text.len != s->description.len ||
                                       memcmp(text.data, s->description.data, text.len) != 0))) {
        rc = mb_err_set(problem, MB_ECORRUPT, "%s describes another data set", path);
    }
    mb_buf_close(&text);
    mb_free(path);
    return rc;
}

/* *is_read 0: there is no such set, or one that is not right, which is noted. */
static int read_set(const struct set *s, int *is_read, struct mb_err *err)
{
    struct mb_err problem = {0};
    int rc = read_description(s, &problem);
    *is_read = 0;
    if (rc == MB_ENOENT) {
        return 0;
    }
    for (size_t i = 0; i < s->n_parts && rc == 0; i++) {
        rc = read_part(s, &s->parts[i], &problem);
    }
    *is_read = rc == 0;
    return rc == 0 ? 0 : warn(s->cache, BUILT, &problem, err);
}

static int refuse_set(const struct set *s, const char *what, struct mb_err *err)
{
    struct mb_err problem = {.code = MB_ECORRUPT};
    mb_err_set(&problem, MB_ECORRUPT, "%s/%s-*.npy: %s", s->cache->dir, s->base, what);
    return warn(s->cache, BUILT, &problem, err);
}

static int say(const struct set *s, const char *verb, struct mb_err *err)
{
    int rc = mb_buf_printf(s->cache->notes, "> %s indices %s/%s\n", verb, s->cache->dir, s->base);
    return rc == 0 ? 0 : no_memory(err);
}

static int write_part(const struct set *s, const struct part *p, struct mb_err *problem)
{
    char *path = path_of(s, p->what);
    if (path == NULL) {
        return no_memory(problem);
    }
    begins(s, "writing", path);
    int rc = mb_npy_write(path, &p->shape, p->elements, problem);
    mb_free(path);
    return rc;
}

static int write_description(const struct set *s, struct mb_err *problem)
{
    char *path = path_of(s, "description.txt");
    int rc = path != NULL ? mb_cache_file_write(path, NULL, 0, s->description.data,
                                                s->description.len, problem)
                          : no_memory(problem);
    mb_free(path);
    return rc;
}

static int write_files(const struct set *s, struct mb_err *problem)
{
    int rc = 0;
    for (size_t i = 0; i < s->n_parts && rc == 0; i++) {
        rc = write_part(s, &s->parts[i], problem);
    }
    if (rc == 0) {
        rc = mb_fs_sync_dir(s->cache->dir, problem);
    }
    if (rc == 0) {
        rc = write_description(s, problem);
    }
    return rc == 0 ? mb_fs_sync_dir(s->cache->dir, problem) : rc;
}

/* The directory is there afterwards, without what killed writers left in it. */
static int sweep(const struct mb_index_cache *c, int *is_swept, struct mb_err *problem)
{
    size_t n = 0;
    uint64_t n_bytes = 0;
    if (*is_swept) {
        return 0;
    }
    int rc = mb_fs_mkdir_p(c->dir, DIR_MODE, problem);
    if (rc == 0) {
        rc = mb_cache_files_sweep(c->dir, &n, &n_bytes, problem);
    }
    if (rc == 0 && n > 0 &&
        mb_buf_printf(c->notes,
                      "> removed %zu unfinished files (%" PRIu64 " bytes) of killed runs from %s\n",
                      n, n_bytes, c->dir) != 0) {
        rc = no_memory(problem);
    }
    *is_swept = rc == 0;
    return rc;
}

static int write_set(const struct set *s, int *is_swept, struct mb_err *err)
{
    struct mb_err problem = {0};
    int rc = sweep(s->cache, is_swept, &problem);
    if (rc == 0) {
        rc = write_files(s, &problem);
    }
    return rc == 0 ? say(s, "saved", err)
                   : warn(s->cache, "training goes on without it", &problem, err);
}

/* ---- one data set ---- */

struct mb_cache_key mb_index_cache_key(const struct mb_dataset_options *o, struct mb_index *index)
{
    return (struct mb_cache_key){.prefix = index != NULL ? mb_index_prefix(index) : NULL,
                                 .n_samples = o->n_samples,
                                 .split = o->split,
                                 .seed = o->seed,
                                 .seq_length = o->seq_length,
                                 .split_text = o->split_text,
                                 .matrix = o->matrix,
                                 .tokenizer = o->cache->tokenizer};
}

/* Of one prefix, or of a blend. */
static void list_parts(const struct mb_dataset *d, const struct mb_index_cache *cache,
                       uint64_t n_documents, uint64_t n_samples, struct set *s)
{
    if (d->n_children > 0) {
        *s = (struct set){
            .cache = cache,
            .parts = {{"dataset_index.npy", {MB_NPY_I16, 1, {n_samples, 1}}, d->blend_dataset},
                      {"dataset_sample_index.npy",
                       {MB_NPY_I64, 1, {n_samples, 1}},
                       d->blend_sample}},
            .n_parts = 2};
        return;
    }
    *s = (struct set){
        .cache = cache,
        .parts = {{"document_index.npy", {MB_NPY_I32, 1, {n_documents, 1}}, d->document_index},
                  {"sample_index.npy", {MB_NPY_I32, 2, {n_samples + 1, 2}}, d->sample_index},
                  {"shuffle_index.npy", {MB_NPY_U32, 1, {n_samples, 1}}, d->shuffle_index}},
        .n_parts = 3};
}

/* MB_EUNSUPPORTED: there are no such files of it. */
static int open_set(const struct mb_dataset *d, uint64_t n_documents, uint64_t n_samples,
                    struct set *s, struct mb_err *err)
{
    const struct mb_cache_key key = mb_index_cache_key(&d->o, d->index);
    list_parts(d, d->o.cache, n_documents, n_samples, s);
    if (n_documents > INT32_MAX) {
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "%llu documents of all epochs are more than an index that is kept has",
                          (unsigned long long)n_documents);
    }
    if (mb_cache_describe(&key, &s->description) != 0) {
        return no_memory(err);
    }
    return mb_cache_base(&s->description, mb_cache_class(&key), key.split, s->base, err);
}

static void close_set(struct set *s)
{
    mb_buf_close(&s->description);
}

/* So that it can be written later. */
static int keep_name(struct mb_dataset *d, const struct set *s, struct mb_err *err)
{
    d->cache_base = mb_strdup(s->base);
    d->cache_description = mb_strndup(mb_buf_str(&s->description), s->description.len);
    return d->cache_base != NULL && d->cache_description != NULL ? 0 : no_memory(err);
}

/* Each sequence of the split once an epoch. */
static int documents_hold(const struct mb_dataset *d, const struct mb_dataset_plan *p,
                          uint32_t *given)
{
    const uint64_t n_before = p->n_together / p->n_sequences; /* epochs shuffled together */
    for (uint64_t i = 0; i < p->n_documents; i++) {
        const int64_t at = (int64_t)d->document_index[i] - (int64_t)d->o.begin;
        if (at < 0 || (uint64_t)at >= p->n_sequences) {
            return 0;
        }
        given[at]++;
        if (given[at] > (i < p->n_together ? n_before : p->n_epochs)) {
            return 0;
        }
    }
    return 1;
}

/* Each sample begins where the one before it ends. */
static int samples_hold(const struct mb_dataset *d, const struct mb_dataset_plan *p)
{
    struct mb_sample_start at = {0, 0};
    for (uint64_t i = 0; i <= p->n_samples; i++) {
        const struct mb_sample_start *said = &d->sample_index[i];
        if (said->position != at.position || said->offset != at.offset) {
            return 0;
        }
        if (i < p->n_samples) {
            mb_dataset_next_start(d, &at);
        }
    }
    return 1;
}

/* Each sample once, those of a separate final epoch last. */
static int shuffle_holds(const struct mb_dataset *d, const struct mb_dataset_plan *p, uint8_t *seen)
{
    for (uint64_t i = 0; i < p->n_samples; i++) {
        const uint32_t v = d->shuffle_index[i];
        if (v >= p->n_samples || (v < p->n_first) != (i < p->n_first) ||
            (seen[v / BITS] >> v % BITS & 1)) {
            return 0;
        }
        seen[v / BITS] |= (uint8_t)(1U << v % BITS);
    }
    return 1;
}

static int check(const struct set *s, const struct mb_dataset *d, const struct mb_dataset_plan *p,
                 int *is_right, struct mb_err *err)
{
    uint32_t *given = mb_calloc((size_t)p->n_sequences, sizeof *given);
    uint8_t *seen = mb_calloc((size_t)(p->n_samples / BITS + 1), 1);
    int rc = given != NULL && seen != NULL ? 0 : no_memory(err);
    const char *wrong = NULL;
    if (rc == 0) {
        wrong = !documents_hold(d, p, given) ? "document_index is no order of the split's sequences"
                : !samples_hold(d, p)        ? "sample_index does not fit the documents"
                : !shuffle_holds(d, p, seen) ? "shuffle_index is no order of the samples"
                                             : NULL;
        *is_right = wrong == NULL;
    }
    mb_free(given);
    mb_free(seen);
    return wrong != NULL ? refuse_set(s, wrong, err) : rc;
}

static void drop(struct mb_dataset *d)
{
    mb_free(d->document_index);
    mb_free(d->sample_index);
    mb_free(d->shuffle_index);
    d->document_index = NULL;
    d->sample_index = NULL;
    d->shuffle_index = NULL;
}

static int make_room(struct mb_dataset *d, const struct mb_dataset_plan *p, struct mb_err *err)
{
    d->document_index = mb_reallocarray(NULL, (size_t)p->n_documents, sizeof *d->document_index);
    d->sample_index = mb_reallocarray(NULL, (size_t)p->n_samples + 1, sizeof *d->sample_index);
    d->shuffle_index = mb_reallocarray(NULL, (size_t)p->n_samples, sizeof *d->shuffle_index);
    return d->document_index != NULL && d->sample_index != NULL &&
                   (d->shuffle_index != NULL || p->n_samples == 0)
               ? 0
               : no_memory(err);
}

int mb_index_cache_load(struct mb_dataset *d, const struct mb_dataset_plan *plan, int *is_loaded,
                        struct mb_err *err)
{
    struct mb_err problem = {0};
    struct set s = {0};
    *is_loaded = 0;
    if (d->o.cache->reads_nothing) {
        return 0;
    }
    int rc = make_room(d, plan, err);
    const int opened = rc == 0 ? open_set(d, plan->n_documents, plan->n_samples, &s, &problem) : rc;
    if (rc == 0) {
        rc = opened == 0 ? read_set(&s, is_loaded, err) : warn(d->o.cache, BUILT, &problem, err);
    }
    if (rc == 0 && *is_loaded) {
        rc = check(&s, d, plan, is_loaded, err);
    }
    if (rc == 0 && *is_loaded) {
        d->n_documents = plan->n_documents;
        d->n_samples = plan->n_samples;
        rc = say(&s, "loaded", err);
    } else {
        drop(d);
        rc = rc == 0 && opened == 0 ? keep_name(d, &s, err) : rc;
    }
    close_set(&s);
    return rc;
}

/* ---- a blend ---- */

static int open_blend(const struct mb_dataset *d, const struct mb_index_cache *cache,
                      const struct mb_cache_key *keys, const double *weights, struct set *s,
                      struct mb_err *err)
{
    list_parts(d, cache, 0, d->n_samples, s);
    if (mb_cache_describe_blend(keys, weights, d->n_children, d->n_samples, &s->description) != 0) {
        return no_memory(err);
    }
    return mb_cache_base(&s->description, "BlendedDataset", keys[0].split, s->base, err);
}

/* Each data set gives its samples in order, as many as it has at most. */
static int blend_holds(const struct mb_dataset *d, int64_t *given)
{
    for (uint64_t i = 0; i < d->n_samples; i++) {
        const int16_t k = d->blend_dataset[i];
        if (k < 0 || (size_t)k >= d->n_children || d->blend_sample[i] != given[k] ||
            (uint64_t)given[k] >= d->children[k]->n_samples) {
            return 0;
        }
        given[k]++;
    }
    return 1;
}

int mb_index_cache_load_blend(struct mb_dataset *d, const struct mb_index_cache *cache,
                              const struct mb_cache_key *keys, const double *weights,
                              int *is_loaded, struct mb_err *err)
{
    struct mb_err problem = {0};
    struct set s = {0};
    int64_t *given = NULL;
    *is_loaded = 0;
    if (cache->reads_nothing) {
        return 0;
    }
    const int opened = open_blend(d, cache, keys, weights, &s, &problem);
    int rc = opened == 0 ? read_set(&s, is_loaded, err) : warn(cache, BUILT, &problem, err);
    if (rc == 0 && *is_loaded) {
        given = mb_calloc(d->n_children, sizeof *given);
        rc = given != NULL ? 0 : no_memory(err);
    }
    if (rc == 0 && *is_loaded) {
        *is_loaded = blend_holds(d, given);
        rc = *is_loaded ? say(&s, "loaded", err)
                        : refuse_set(&s, "they are no order of the data sets' samples", err);
    }
    if (rc == 0 && !*is_loaded && opened == 0) {
        rc = keep_name(d, &s, err);
    }
    mb_free(given);
    close_set(&s);
    return rc;
}

/* ---- store ---- */

int mb_index_cache_store(const struct mb_dataset *d, const struct mb_index_cache *cache,
                         int *is_swept, struct mb_err *err)
{
    struct set s;
    int rc = 0;
    for (size_t i = 0; i < d->n_children && rc == 0; i++) {
        rc = mb_index_cache_store(d->children[i], cache, is_swept, err);
    }
    if (rc != 0 || d->cache_base == NULL) {
        return rc;
    }
    list_parts(d, cache, d->n_documents, d->n_samples, &s);
    snprintf(s.base, sizeof s.base, "%s", d->cache_base);
    rc = mb_buf_add(&s.description, d->cache_description, strlen(d->cache_description)) == 0
             ? write_set(&s, is_swept, err)
             : no_memory(err);
    close_set(&s);
    return rc;
}
