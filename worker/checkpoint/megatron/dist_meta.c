/*
 *  1. state_dict_metadata: each tensor's name, numbers, shape and chunks. Chunks are sorted.
 *  2. storage_data: for each chunk of a tensor that is kept, file and bytes.
 *  3. Every chunk has a file. Chunks lie inside, do not overlap, and have as many elements as the
 *     tensor: so each element is in one of them.
 *  4. What is wrong with a tensor of the optimizer is kept with it, and the others are read on.
 * Failures: something that torch.distributed.checkpoint does not write, a name that leaves the
 * directory, chunks that are missing, twice or do not fit.
 */
#include "worker/checkpoint/megatron/dist_meta.h"

#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"
#include "worker/checkpoint/megatron/pickle.h"

#define METADATA "torch.distributed.checkpoint.metadata\n"

enum { NAME_BYTES_MAX = 512, FILE_BYTES_MAX = 255, FILES_MAX = 1 << 16, FIELDS_MAX = 64 };

static int no_memory(const char *name, struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "%s: out of memory", name);
}

static int corrupt(const char *name, const char *what, struct mb_err *err)
{
    return mb_err_set(err, MB_ECORRUPT, "%s: no metadata of torch.distributed.checkpoint: %s", name,
                      what);
}

static int bad_tensor(const char *name, struct mb_dist_tensor *t, const char *what,
                      struct mb_err *err)
{
    if (t->is_of_optimizer) {
        t->is_wrong = t->is_wrong != NULL ? t->is_wrong : what;
        return 0;
    }
    return mb_err_set(err, MB_ECORRUPT, "%s: tensor %s: %s", name, t->name, what);
}

/* ---- values ---- */

static int is_a(const struct mb_pickle_value *v, const char *class)
{
    return v != NULL && v->kind == MB_PICKLE_OBJECT &&
           mb_pickle_is(v->callable, MB_PICKLE_GLOBAL, class);
}

/* Of an object with the few fields that the classes have: a pickle may show one object many times,
 * and looking through thousands of fields each time would take for ever. */
static const struct mb_pickle_value *field(const struct mb_pickle_value *object, const char *name)
{
    return object->state != NULL && object->state->kind == MB_PICKLE_DICT &&
                   object->state->n_items <= 2 * FIELDS_MAX
               ? mb_pickle_get(object->state, name)
               : NULL;
}

/* torch.Size((1, 2)), and nothing beyond the bound of dimensions. */
static int take_sizes(const struct mb_pickle_value *v, uint64_t out[MB_DIST_DIMS_MAX], int *n)
{
    const struct mb_pickle_value *list =
        is_a(v, "torch\nSize") && v->args->n_items == 1 ? v->args->items[0] : NULL;
    if (list == NULL || (list->kind != MB_PICKLE_TUPLE && list->kind != MB_PICKLE_LIST) ||
        list->n_items > MB_DIST_DIMS_MAX) {
        return -1;
    }
    for (size_t i = 0; i < list->n_items; i++) {
        if (list->items[i]->kind != MB_PICKLE_INT || list->items[i]->number < 0) {
            return -1;
        }
        out[i] = (uint64_t)list->items[i]->number;
    }
    *n = (int)list->n_items;
    return 0;
}

/* A copy of text of 1 to max bytes. NULL: out of memory, or unless *is_text none. */
static char *take_text(const struct mb_pickle_value *v, size_t max, int *is_text)
{
    *is_text = v != NULL && v->kind == MB_PICKLE_TEXT && v->n_text > 0 && v->n_text <= max &&
               memchr(v->text, 0, v->n_text) == NULL && mb_utf8_valid(v->text, v->n_text);
    char *copy = *is_text ? mb_alloc(v->n_text + 1) : NULL;
    if (copy != NULL) {
        memcpy(copy, v->text, v->n_text);
        copy[v->n_text] = '\0';
    }
    return copy;
}

static int take_count(const struct mb_pickle_value *v, uint64_t *out)
{
    if (v == NULL || v->kind != MB_PICKLE_INT || v->number < 0) {
        return -1;
    }
    *out = (uint64_t)v->number;
    return 0;
}

/* ---- tensors ---- */

static int by_offset(const void *x, const void *y)
{
    const struct mb_dist_chunk *a = x, *b = y;
    for (int i = 0; i < MB_DIST_DIMS_MAX; i++) {
        if (a->offset[i] != b->offset[i]) {
            return a->offset[i] < b->offset[i] ? -1 : 1;
        }
    }
    return 0;
}

static int take_chunk(const struct mb_pickle_value *v, const struct mb_dist_tensor *t,
                      struct mb_dist_chunk *c)
{
    int n_offsets, n_sizes;
    if (!is_a(v, METADATA "ChunkStorageMetadata") ||
        take_sizes(field(v, "offsets"), c->offset, &n_offsets) != 0 ||
        take_sizes(field(v, "sizes"), c->size, &n_sizes) != 0 || n_offsets != t->n_dims ||
        n_sizes != t->n_dims) {
        return -1;
    }
    c->n = 1;
    for (int i = 0; i < t->n_dims; i++) {
        if (c->size[i] == 0 || c->offset[i] > t->shape[i] ||
            c->size[i] > t->shape[i] - c->offset[i]) {
            return -1;
        }
        c->n *= c->size[i]; /* not more than the tensor's */
    }
    return 0;
}

static void take_dtype(const struct mb_pickle_value *properties, struct mb_dist_tensor *t)
{
    static const struct {
        const char *name;
        enum mb_st_dtype dtype;
    } kinds[] = {{"torch\nfloat32", MB_ST_F32},
                 {"torch\nfloat16", MB_ST_F16},
                 {"torch\nbfloat16", MB_ST_BF16}};
    const struct mb_pickle_value *state = properties->state;
    if (state == NULL || state->kind != MB_PICKLE_TUPLE || state->n_items == 0) {
        return;
    }
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        if (mb_pickle_is(state->items[0], MB_PICKLE_GLOBAL, kinds[i].name)) {
            t->dtype = kinds[i].dtype;
            t->is_read = 1;
        }
    }
}

static int take_shape(const struct mb_pickle_value *v, struct mb_dist_tensor *t)
{
    if (take_sizes(field(v, "size"), t->shape, &t->n_dims) != 0 || t->n_dims == 0) {
        return -1;
    }
    t->n = 1;
    for (int i = 0; i < t->n_dims; i++) {
        if (t->shape[i] == 0 || __builtin_mul_overflow(t->n, t->shape[i], &t->n)) {
            return -1;
        }
    }
    return t->n <= (uint64_t)INT64_MAX / sizeof(double) ? 0 : -1;
}

/* n_all: the chunks of all tensors so far; one list of a small file may be those of many. */
static int take_tensor(const char *name, const struct mb_pickle_value *v, struct mb_dist_tensor *t,
                       size_t *n_all, struct mb_err *err)
{
    const struct mb_pickle_value *properties = field(v, "properties"), *list = field(v, "chunks");
    if (take_shape(v, t) != 0 || !is_a(properties, METADATA "TensorProperties")) {
        return bad_tensor(name, t, "its shape is none of 1 to 4 dimensions", err);
    }
    take_dtype(properties, t);
    if (list == NULL || list->kind != MB_PICKLE_LIST || list->n_items == 0 ||
        list->n_items > MB_DIST_CHUNKS_MAX) {
        return bad_tensor(name, t, "it has no list of chunks", err);
    }
    *n_all += list->n_items;
    if (*n_all > MB_DIST_ALL_CHUNKS_MAX) {
        return corrupt(name, "its tensors have too many chunks", err);
    }
    t->chunks = mb_calloc(list->n_items, sizeof *t->chunks);
    if (t->chunks == NULL) {
        return no_memory(name, err);
    }
    for (; t->n_chunks < list->n_items; t->n_chunks++) {
        struct mb_dist_chunk *c = &t->chunks[t->n_chunks];
        if (take_chunk(list->items[t->n_chunks], t, c) != 0) {
            return bad_tensor(name, t, "a chunk does not lie in it", err);
        }
        t->most_rows = c->size[0] > t->most_rows ? c->size[0] : t->most_rows;
    }
    qsort(t->chunks, t->n_chunks, sizeof *t->chunks, by_offset);
    return 0;
}

static int by_name(const void *x, const void *y)
{
    return strcmp(((const struct mb_dist_tensor *)x)->name,
                  ((const struct mb_dist_tensor *)y)->name);
}

static int take_object(const char *name, struct mb_dist_tensor *t, size_t *n_all,
                       struct mb_err *err)
{
    *n_all += 1;
    if (*n_all > MB_DIST_ALL_CHUNKS_MAX) {
        return corrupt(name, "its tensors have too many chunks", err);
    }
    t->is_object = 1;
    t->chunks = mb_calloc(1, sizeof *t->chunks);
    t->n_chunks = t->chunks != NULL;
    return t->chunks != NULL ? 0 : no_memory(name, err);
}

/* One of several optimizers has its number before. */
static int is_of_optimizer(const char *name)
{
    return mb_starts_with(name, "optimizer.") ||
           (mb_starts_with(name, "chained_") && strstr(name, ".optimizer.") != NULL);
}

static int take_item(const char *name, struct mb_dist_meta *m, const struct mb_pickle_value *key,
                     const struct mb_pickle_value *v, size_t *n_all, struct mb_err *err)
{
    const int is_object = is_a(v, METADATA "BytesStorageMetadata");
    struct mb_dist_tensor *t = &m->tensors[m->n_tensors];
    int is_text;
    *t = (struct mb_dist_tensor){.name = take_text(key, NAME_BYTES_MAX, &is_text)};
    if (t->name == NULL) {
        return is_text ? no_memory(name, err) : corrupt(name, "a tensor has no name", err);
    }
    t->is_of_optimizer = is_of_optimizer(t->name);
    const int is_common = strcmp(t->name, MB_DIST_COMMON) == 0;
    if (is_object && !t->is_of_optimizer && !is_common) { /* generators, scales of fp8 */
        mb_free(t->name);
        return 0;
    }
    m->has_optimizer |= t->is_of_optimizer;
    m->n_tensors++;
    return is_object                                   ? take_object(name, t, n_all, err)
           : is_a(v, METADATA "TensorStorageMetadata") ? take_tensor(name, v, t, n_all, err)
                                                       : bad_tensor(name, t, "it is none", err);
}

static int take_tensors(const char *name, const struct mb_pickle_value *dict,
                        struct mb_dist_meta *m, struct mb_err *err)
{
    if (dict == NULL || dict->kind != MB_PICKLE_DICT) {
        return corrupt(name, "there is no state_dict_metadata", err);
    }
    if (dict->n_items / 2 > MB_DIST_TENSORS_MAX) {
        return corrupt(name, "it has too many tensors", err);
    }
    size_t n_all = 0;
    m->tensors = mb_calloc(dict->n_items / 2 + 1, sizeof *m->tensors);
    int rc = m->tensors != NULL ? 0 : no_memory(name, err);
    for (size_t i = 0; i + 1 < dict->n_items && rc == 0; i += 2) {
        rc = take_item(name, m, dict->items[i], dict->items[i + 1], &n_all, err);
    }
    if (rc == 0) {
        qsort(m->tensors, m->n_tensors, sizeof *m->tensors, by_name);
    }
    for (size_t i = 1; i < m->n_tensors && rc == 0; i++) {
        if (strcmp(m->tensors[i - 1].name, m->tensors[i].name) == 0) {
            rc = bad_tensor(name, &m->tensors[i], "it is there twice", err);
        }
    }
    return rc;
}

struct mb_dist_tensor *mb_dist_meta_find(const struct mb_dist_meta *m, const char *name)
{
    const struct mb_dist_tensor wanted = {.name = (char *)(uintptr_t)name};
    return m->n_tensors > 0
               ? bsearch(&wanted, m->tensors, m->n_tensors, sizeof *m->tensors, by_name)
               : NULL;
}

/* ---- where chunks are ---- */

/* Which file a chunk is in, as the pickle says it. */
struct told_file {
    const struct mb_pickle_value *name;
    struct mb_dist_chunk *chunk;
};

static int by_file(const void *x, const void *y)
{
    const struct mb_pickle_value *a = ((const struct told_file *)x)->name;
    const struct mb_pickle_value *b = ((const struct told_file *)y)->name;
    const size_t n = a->n_text < b->n_text ? a->n_text : b->n_text;
    const int order = a == b ? 0 : memcmp(a->text, b->text, n);
    return order != 0 ? order : (a->n_text > b->n_text) - (a->n_text < b->n_text);
}

static int add_file(const char *name, struct mb_dist_meta *m, const struct mb_pickle_value *v,
                    struct mb_err *err)
{
    int is_text;
    if (m->n_files == FILES_MAX) {
        return corrupt(name, "it has too many files", err);
    }
    char *file = take_text(v, FILE_BYTES_MAX, &is_text);
    if (file == NULL) {
        return is_text ? no_memory(name, err) : corrupt(name, "a chunk has no file", err);
    }
    m->files[m->n_files++] = file;
    return strchr(file, '/') != NULL || strcmp(file, ".") == 0 || strcmp(file, "..") == 0
               ? corrupt(name, "a chunk's file lies outside of the directory", err)
               : 0;
}

/* The list of them, each once, by name. */
static int list_files(const char *name, struct mb_dist_meta *m, struct told_file *told, size_t n,
                      struct mb_err *err)
{
    size_t n_files = 0;
    int rc = 0;
    qsort(told, n, sizeof *told, by_file);
    for (size_t i = 0; i < n; i++) {
        n_files += i == 0 || by_file(&told[i - 1], &told[i]) != 0;
    }
    n_files = n_files < FILES_MAX ? n_files : FILES_MAX;
    m->files = mb_calloc(n_files + 1, sizeof *m->files);
    if (m->files == NULL) {
        return no_memory(name, err);
    }
    for (size_t i = 0; i < n && rc == 0; i++) {
        rc = i == 0 || by_file(&told[i - 1], &told[i]) != 0 ? add_file(name, m, told[i].name, err)
                                                            : 0;
        told[i].chunk->file = m->n_files - 1;
    }
    return rc;
}

/* The chunk that begins there; of an object its only one. */
static struct mb_dist_chunk *chunk_at(const struct mb_dist_tensor *t,
                                      const struct mb_pickle_value *offset)
{
    struct mb_dist_chunk wanted = {0};
    int n_dims;
    if (t->is_object) {
        return t->chunks;
    }
    return take_sizes(offset, wanted.offset, &n_dims) == 0 && n_dims == t->n_dims
               ? bsearch(&wanted, t->chunks, t->n_chunks, sizeof *t->chunks, by_offset)
               : NULL;
}

/* *told: where it is, if it is one that is read. */
static int take_place(const char *name, struct mb_dist_meta *m, const struct mb_pickle_value *index,
                      const struct mb_pickle_value *info, struct told_file *told,
                      struct mb_err *err)
{
    if (!is_a(index, METADATA "MetadataIndex") ||
        !is_a(info, "torch.distributed.checkpoint.filesystem\n_StorageInfo")) {
        return corrupt(name, "storage_data has something else", err);
    }
    int is_text;
    char *fqn = take_text(field(index, "fqn"), NAME_BYTES_MAX, &is_text);
    if (fqn == NULL) {
        return is_text ? no_memory(name, err) : corrupt(name, "a chunk has no name", err);
    }
    struct mb_dist_tensor *t = mb_dist_meta_find(m, fqn);
    mb_free(fqn);
    if (t == NULL || t->is_wrong != NULL) {
        return 0; /* none of numbers, or one that is not read */
    }
    const struct mb_pickle_value *transforms = field(info, "transform_descriptors");
    struct mb_dist_chunk *c = chunk_at(t, field(index, "offset"));
    if (c == NULL || c->is_there) {
        return bad_tensor(name, t, c == NULL ? "bytes of a chunk that it has not" : "a chunk twice",
                          err);
    }
    if (transforms != NULL && transforms->kind != MB_PICKLE_NONE &&
        !(transforms->kind == MB_PICKLE_LIST && transforms->n_items == 0)) {
        static const char WHAT[] = "its bytes are transformed";
        return t->is_of_optimizer
                   ? bad_tensor(name, t, WHAT, err)
                   : mb_err_set(err, MB_EUNSUPPORTED, "%s: tensor %s: %s", name, t->name, WHAT);
    }
    if (take_count(field(info, "offset"), &c->at) != 0 ||
        take_count(field(info, "length"), &c->n_bytes) != 0) {
        return bad_tensor(name, t, "a chunk has no place in its file", err);
    }
    const struct mb_pickle_value *file = field(info, "relative_path");
    if (file == NULL || file->kind != MB_PICKLE_TEXT) {
        return corrupt(name, "a chunk has no file", err);
    }
    c->is_there = 1;
    *told = (struct told_file){file, c};
    return 0;
}

static int take_places(const char *name, const struct mb_pickle_value *dict, struct mb_dist_meta *m,
                       struct mb_err *err)
{
    int rc = dict != NULL && dict->kind == MB_PICKLE_DICT
                 ? 0
                 : corrupt(name, "there is no storage_data", err);
    struct told_file *told = rc == 0 ? mb_calloc(dict->n_items / 2 + 1, sizeof *told) : NULL;
    size_t n = 0;
    if (rc == 0 && told == NULL) {
        rc = no_memory(name, err);
    }
    for (size_t i = 0; rc == 0 && i + 1 < dict->n_items; i += 2) {
        rc = take_place(name, m, dict->items[i], dict->items[i + 1], &told[n], err);
        n += told[n].chunk != NULL;
    }
    if (rc == 0) {
        rc = list_files(name, m, told, n, err);
    }
    mb_free(told);
    return rc;
}

/* ---- whether it is whole ---- */

static int overlap(const struct mb_dist_chunk *a, const struct mb_dist_chunk *b, int n_dims)
{
    for (int i = 0; i < n_dims; i++) {
        if (a->offset[i] + a->size[i] <= b->offset[i] ||
            b->offset[i] + b->size[i] <= a->offset[i]) {
            return 0;
        }
    }
    return 1;
}

static int check_tensor(const char *name, struct mb_dist_tensor *t, struct mb_err *err)
{
    uint64_t n = 0;
    for (size_t i = 0; i < t->n_chunks && t->is_wrong == NULL; i++) {
        const struct mb_dist_chunk *c = &t->chunks[i];
        if (!c->is_there) {
            return bad_tensor(name, t, "no file has one of its chunks", err);
        }
        for (size_t k = i + 1;
             k < t->n_chunks && t->chunks[k].offset[0] < c->offset[0] + c->size[0]; k++) {
            if (overlap(c, &t->chunks[k], t->n_dims)) {
                return bad_tensor(name, t, "two of its chunks overlap", err);
            }
        }
        n += c->n; /* disjoint until here */
    }
    return n == t->n || t->is_object ? 0 : bad_tensor(name, t, "its chunks are not all of it", err);
}

int mb_dist_meta_parse(const char *name, const void *bytes, size_t n, struct mb_dist_meta *out,
                       struct mb_err *err)
{
    struct mb_pickle *pickle = NULL;
    struct mb_dist_meta m = {0};
    int rc = mb_pickle_parse(name, bytes, n, MB_PICKLE_OF_METADATA, &pickle, err);
    const struct mb_pickle_value *root = rc == 0 ? mb_pickle_root(pickle) : NULL;
    /* Megatron-LM's own has what the other has, and more. */
    if (rc == 0 && !is_a(root, METADATA "Metadata") &&
        !is_a(root, "megatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata")) {
        rc = corrupt(name, "it has something else", err);
    }
    if (rc == 0) {
        rc = take_tensors(name, field(root, "state_dict_metadata"), &m, err);
    }
    if (rc == 0) {
        rc = take_places(name, field(root, "storage_data"), &m, err);
    }
    for (size_t i = 0; i < m.n_tensors && rc == 0; i++) {
        rc = check_tensor(name, &m.tensors[i], err);
    }
    mb_pickle_close(pickle);
    if (rc != 0) {
        mb_dist_meta_close(&m);
        return rc;
    }
    *out = m;
    return 0;
}

void mb_dist_meta_close(struct mb_dist_meta *m)
{
    for (size_t i = 0; i < m->n_tensors; i++) {
        mb_free(m->tensors[i].name);
        mb_free(m->tensors[i].chunks);
    }
    for (size_t i = 0; i < m->n_files; i++) {
        mb_free(m->files[i]);
    }
    mb_free(m->tensors);
    mb_free(m->files);
    *m = (struct mb_dist_meta){0};
}

/* ---- places ---- */

static int is_in(const struct mb_dist_chunk *c, const uint64_t *x, int n_dims)
{
    for (int i = 0; i < n_dims; i++) {
        if (x[i] < c->offset[i] || x[i] - c->offset[i] >= c->size[i]) {
            return 0;
        }
    }
    return 1;
}

/* The one that has it: none that begins most_rows or more before, nor one that begins later. */
static size_t chunk_of(const struct mb_dist_tensor *t, const uint64_t *x)
{
    const uint64_t from = x[0] >= t->most_rows ? x[0] - t->most_rows + 1 : 0;
    size_t low = 0, high = t->n_chunks;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (t->chunks[middle].offset[0] < from) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    while (!is_in(&t->chunks[low], x, t->n_dims)) {
        low++;
    }
    return low;
}

uint64_t mb_dist_place(const struct mb_dist_tensor *t, uint64_t i, size_t *chunk, uint64_t *at)
{
    uint64_t x[MB_DIST_DIMS_MAX], rest = i;
    for (int d = t->n_dims; d-- > 0;) {
        x[d] = rest % t->shape[d];
        rest /= t->shape[d];
    }
    *chunk = chunk_of(t, x);
    const struct mb_dist_chunk *c = &t->chunks[*chunk];
    *at = 0;
    for (int d = 0; d < t->n_dims; d++) {
        *at = *at * c->size[d] + (x[d] - c->offset[d]);
    }
    /* Dimensions that it has whole are one with that before them. */
    int d = t->n_dims - 1;
    uint64_t block = 1;
    for (; d > 0 && c->size[d] == t->shape[d]; d--) {
        block *= t->shape[d];
    }
    return (c->offset[d] + c->size[d] - x[d]) * block - i % block;
}
