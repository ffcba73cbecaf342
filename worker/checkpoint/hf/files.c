/*
 *  1. open_dir: the index, if there is one, names the files; else it is model.safetensors. All are
 *     opened, and their headers checked, at once.
 *  2. check: shapes of all that is wanted, then names of all that is there.
 *  3. rows: bytes are read into one buffer and widened.
 * Failures: an index that is no JSON or names a file outside the directory, a file that is missing
 * or damaged, a tensor that is missing, twice there, unknown, or of another shape or kind of
 * numbers: the text names the file and the tensor.
 */
#include "worker/checkpoint/hf/files.h"

#include <inttypes.h>
#include <jansson.h>
#include <string.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/fs.h"
#include "base/str.h"

#define INDEX_FILE  "model.safetensors.index.json"
#define SINGLE_FILE "model.safetensors"

enum { INDEX_MAX = 64 << 20, FILES_MAX = 1024, PIECE_BYTES = 1 << 20 };

struct mb_hf_source {
    char *name; /* of the directory or file, for texts */
    struct mb_st_reader **readers;
    char **paths;
    size_t n;
    void *piece; /* PIECE_BYTES */
    float *turned;
    const struct mb_hf_tensor *turned_tensor; /* what turned holds; NULL: nothing */
};

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "out of memory reading a model");
}

/* ---- the index ---- */

static int take_file(const char *name, const char *file, char **files, size_t *n,
                     struct mb_err *err)
{
    if (file == NULL || file[0] == '.' || strchr(file, '/') != NULL ||
        !mb_ends_with(file, ".safetensors")) {
        return mb_err_set(err, MB_ECORRUPT,
                          "%s: \"weight_map\" names \"%s\": expected a file of this directory that "
                          "ends in .safetensors",
                          name, file != NULL ? file : "");
    }
    for (size_t i = 0; i < *n; i++) {
        if (strcmp(files[i], file) == 0) {
            return 0;
        }
    }
    if (*n == FILES_MAX) {
        return mb_err_set(err, MB_ECORRUPT, "%s: more than %d files", name, (int)FILES_MAX);
    }
    files[*n] = mb_strdup(file);
    return files[(*n)++] != NULL ? 0 : no_memory(err);
}

void mb_hf_index_close(char **files, size_t n)
{
    for (size_t i = 0; files != NULL && i < n; i++) {
        mb_free(files[i]);
    }
    mb_free(files);
}

int mb_hf_index_parse(const char *name, const void *text, size_t n, char ***out, size_t *n_out,
                      struct mb_err *err)
{
    json_error_t je;
    const char *key;
    json_t *value, *root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &je);
    json_t *map = json_object_get(root, "weight_map");
    char **files = mb_calloc(FILES_MAX, sizeof *files);
    size_t n_files = 0;
    int rc = files != NULL ? 0 : no_memory(err);
    if (rc == 0 && (!json_is_object(map) || json_object_size(map) == 0)) {
        rc = root == NULL
                 ? mb_err_set(err, MB_ECORRUPT, "%s:%d: not valid JSON: %s", name, je.line, je.text)
                 : mb_err_set(err, MB_ECORRUPT, "%s: field \"weight_map\" is missing or empty",
                              name);
    }
    json_object_foreach(map, key, value)
    {
        if (rc == 0) {
            rc = take_file(name, json_string_value(value), files, &n_files, err);
        }
    }
    json_decref(root);
    if (rc != 0) {
        mb_hf_index_close(files, n_files);
        return rc;
    }
    *out = files;
    *n_out = n_files;
    return 0;
}

/* ---- opening ---- */

static int open_all(const char *name, char **paths, size_t n, struct mb_hf_source **out,
                    struct mb_err *err)
{
    struct mb_hf_source *s = mb_calloc(1, sizeof *s);
    if (s == NULL) {
        return no_memory(err);
    }
    s->name = mb_strdup(name);
    s->readers = mb_calloc(n, sizeof *s->readers);
    s->paths = mb_calloc(n, sizeof *s->paths);
    s->piece = mb_alloc(PIECE_BYTES);
    int rc = s->name != NULL && s->readers != NULL && s->paths != NULL && s->piece != NULL
                 ? 0
                 : no_memory(err);
    for (size_t i = 0; i < n && rc == 0; i++) {
        rc = mb_st_open(paths[i], &s->readers[i], err);
        s->paths[i] = rc == 0 ? mb_strdup(paths[i]) : NULL;
        s->n += rc == 0;
        if (rc == 0 && s->paths[i] == NULL) {
            rc = no_memory(err);
        }
    }
    if (rc != 0) {
        mb_hf_source_close(s);
        return rc;
    }
    *out = s;
    return 0;
}

int mb_hf_source_open_file(const char *path, struct mb_hf_source **out, struct mb_err *err)
{
    char *paths[] = {(char *)(uintptr_t)path};
    return open_all(path, paths, 1, out, err);
}

static int open_indexed(const char *dir, const char *index, struct mb_hf_source **out,
                        struct mb_err *err)
{
    struct mb_buf text = {0};
    char **files = NULL;
    size_t n = 0;
    int rc = mb_fs_read(index, INDEX_MAX, &text, err);
    if (rc == 0) {
        rc = mb_hf_index_parse(index, text.data, text.len, &files, &n, err);
    }
    for (size_t i = 0; i < n && rc == 0; i++) {
        char *path = mb_path_join(dir, files[i]);
        mb_free(files[i]);
        files[i] = path;
        rc = path != NULL ? 0 : no_memory(err);
    }
    if (rc == 0) {
        rc = open_all(dir, files, n, out, err);
    }
    mb_hf_index_close(files, n);
    mb_buf_close(&text);
    return rc;
}

int mb_hf_source_open_dir(const char *dir, struct mb_hf_source **out, struct mb_err *err)
{
    char *index = mb_path_join(dir, INDEX_FILE), *single = mb_path_join(dir, SINGLE_FILE);
    int rc = index != NULL && single != NULL ? 0 : no_memory(err);
    if (rc == 0 && mb_fs_exists(index)) {
        rc = open_indexed(dir, index, out, err);
    } else if (rc == 0 && mb_fs_exists(single)) {
        rc = open_all(dir, &single, 1, out, err);
    } else if (rc == 0) {
        rc = mb_err_set(err, MB_ENOENT,
                        "%s: neither " INDEX_FILE " nor " SINGLE_FILE " is there (other formats of "
                        "weights are not read)",
                        dir);
    }
    mb_free(index);
    mb_free(single);
    return rc;
}

void mb_hf_source_close(struct mb_hf_source *s)
{
    if (s == NULL) {
        return;
    }
    for (size_t i = 0; i < s->n; i++) {
        mb_st_close(s->readers[i]);
        mb_free(s->paths[i]);
    }
    mb_free(s->readers);
    mb_free(s->paths);
    mb_free(s->piece);
    mb_free(s->turned);
    mb_free(s->name);
    mb_free(s);
}

size_t mb_hf_source_n_files(const struct mb_hf_source *s)
{
    return s->n;
}

size_t mb_hf_source_n_tensors(const struct mb_hf_source *s)
{
    size_t n = 0;
    for (size_t f = 0; f < s->n; f++) {
        n += mb_st_n_tensors(s->readers[f]);
    }
    return n;
}

uint64_t mb_hf_source_bytes(const struct mb_hf_source *s)
{
    uint64_t n = 0;
    for (size_t f = 0; f < s->n; f++) {
        for (size_t i = 0; i < mb_st_n_tensors(s->readers[f]); i++) {
            const struct mb_st_tensor *t = mb_st_tensor(s->readers[f], i);
            n += t->end - t->begin;
        }
    }
    return n;
}

/* ---- looking ---- */

/* What older files leave out: GPT2Model's own tensors stand there without it. */
static const char PREFIX[] = "transformer.";

static const struct mb_st_tensor *find(const struct mb_hf_source *s, const char *name, size_t *file)
{
    const char *shorter = mb_starts_with(name, PREFIX) ? name + sizeof PREFIX - 1 : NULL;
    for (size_t f = 0; f < s->n; f++) {
        const struct mb_st_tensor *t = mb_st_find(s->readers[f], name);
        t = t == NULL && shorter != NULL ? mb_st_find(s->readers[f], shorter) : t;
        if (t != NULL) {
            *file = f;
            return t;
        }
    }
    return NULL;
}

static int check_one(const struct mb_hf_source *s, const struct mb_hf_tensor *want,
                     struct mb_err *err)
{
    size_t f = 0;
    const struct mb_st_tensor *t = find(s, want->name, &f);
    const int n_dims = want->columns > 0 ? 2 : 1;
    uint64_t shape[2] = {want->turned ? want->columns : want->rows,
                         want->turned ? want->rows : want->columns};
    if (t == NULL) {
        return mb_err_set(err, MB_ECORRUPT, "%s: tensor %s is missing", s->name, want->name);
    }
    if (t->n_dims != n_dims || t->shape[0] != shape[0] ||
        (n_dims == 2 && t->shape[1] != shape[1])) {
        return mb_err_set(err, MB_ECORRUPT,
                          "%s: tensor %s: %d dimensions [%" PRIu64 ", %" PRIu64
                          "], the configuration needs %d [%" PRIu64 ", %" PRIu64 "]",
                          s->paths[f], want->name, t->n_dims, t->n_dims > 0 ? t->shape[0] : 0,
                          t->n_dims > 1 ? t->shape[1] : 0, n_dims, shape[0], shape[1]);
    }
    if (t->dtype != MB_ST_F32 && t->dtype != MB_ST_F16 && t->dtype != MB_ST_BF16) {
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "%s: tensor %s: its numbers are neither F32 nor F16 nor BF16",
                          s->paths[f], want->name);
    }
    return 0;
}

static int is_wanted(const struct mb_hf_tensor *list, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++) {
        const char *shorter =
            mb_starts_with(list[i].name, PREFIX) ? list[i].name + sizeof PREFIX - 1 : "";
        if (strcmp(list[i].name, name) == 0 || strcmp(shorter, name) == 0) {
            return 1;
        }
    }
    return 0;
}

int mb_hf_source_check(const struct mb_hf_source *s, const struct mb_hf_tensor *list, size_t n,
                       int (*is_known)(const char *name), struct mb_err *err)
{
    size_t n_there = 0, n_other = 0;
    for (size_t i = 0; i < n; i++) {
        int rc = check_one(s, &list[i], err);
        if (rc != 0) {
            return rc;
        }
    }
    for (size_t f = 0; f < s->n; f++) {
        n_there += mb_st_n_tensors(s->readers[f]);
        for (size_t i = 0; i < mb_st_n_tensors(s->readers[f]); i++) {
            n_other += is_known(mb_st_tensor(s->readers[f], i)->name) != 0;
        }
    }
    if (n_there == n + n_other) {
        return 0; /* so there is each once and nothing else */
    }
    for (size_t f = 0; f < s->n; f++) {
        for (size_t i = 0; i < mb_st_n_tensors(s->readers[f]); i++) {
            const char *name = mb_st_tensor(s->readers[f], i)->name;
            if (!is_known(name) && !is_wanted(list, n, name)) {
                return mb_err_set(err, MB_EUNSUPPORTED,
                                  "%s: tensor %s is none of this model: it would be lost",
                                  s->paths[f], name);
            }
        }
    }
    return mb_err_set(err, MB_ECORRUPT, "%s: a tensor is there more than once", s->name);
}

/* ---- reading ---- */

/* Elements [from, from + n) as they lie in the file. */
static int read_elements(struct mb_hf_source *s, const char *name, uint64_t from, uint64_t n,
                         float *out, struct mb_err *err)
{
    size_t f = 0;
    const struct mb_st_tensor *t = find(s, name, &f);
    const size_t size = mb_st_dtype_size(t->dtype), most = PIECE_BYTES / size;
    while (n > 0) {
        size_t k = n < most ? (size_t)n : most;
        int rc = mb_st_read(s->readers[f], t, from * size, s->piece, k * size, err);
        if (rc != 0) {
            return rc;
        }
        mb_st_widen(s->piece, t->dtype, k, out);
        from += k;
        out += k;
        n -= k;
    }
    return 0;
}

static int read_turned(struct mb_hf_source *s, const struct mb_hf_tensor *t, struct mb_err *err)
{
    const uint64_t n = t->rows * t->columns;
    float *lies = mb_calloc(n, sizeof *lies);
    mb_free(s->turned);
    s->turned_tensor = NULL;
    s->turned = mb_calloc(n, sizeof *s->turned);
    int rc = lies != NULL && s->turned != NULL ? 0 : no_memory(err);
    if (rc == 0) {
        rc = read_elements(s, t->name, 0, n, lies, err);
    }
    for (uint64_t r = 0; r < t->rows && rc == 0; r++) {
        for (uint64_t c = 0; c < t->columns; c++) {
            s->turned[r * t->columns + c] = lies[c * t->rows + r];
        }
    }
    s->turned_tensor = rc == 0 ? t : NULL;
    mb_free(lies);
    return rc;
}

int mb_hf_source_rows(struct mb_hf_source *s, const struct mb_hf_tensor *t, uint64_t row,
                      uint64_t n, float *out, struct mb_err *err)
{
    const uint64_t columns = t->columns > 0 ? t->columns : 1;
    if (!t->turned) {
        return read_elements(s, t->name, row * columns, n * columns, out, err);
    }
    int rc = s->turned_tensor == t ? 0 : read_turned(s, t, err);
    if (rc == 0) {
        memcpy(out, s->turned + row * columns, n * columns * sizeof *out);
    }
    return rc;
}

int mb_hf_source_verify(struct mb_hf_source *s, size_t *n_without, struct mb_err *err)
{
    int rc = 0;
    *n_without = 0;
    for (size_t i = 0; i < s->n && rc == 0; i++) {
        *n_without += !mb_st_has_sums(s->readers[i]);
        rc = mb_st_verify(s->readers[i], err);
    }
    return rc;
}
