/*
 *  1. metadata.json says that it is torch_dist; .metadata which chunk is where (dist_meta.h).
 *  2. take: tensors are found by Megatron-LM's names, as the parts of one of all layers or by
 *     themselves. Every chunk's zip is opened and closed again: it holds one tensor of the shape
 *     that was said, in order, and where its numbers begin is kept.
 *  3. Reading: stretch by stretch from the files, of which a few are open at a time.
 *  4. The optimizer's are found by whoever knows its names, and used like those of the model; an
 *     object is a file of torch.save of its own.
 * Failures: another backend, a file that is missing or too short, a chunk that is no tensor or
 * another one, a tensor that is missing, of another shape or would be lost.
 */
#include "worker/checkpoint/megatron/dist.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"
#include "worker/checkpoint/megatron/dist_meta.h"
#include "worker/checkpoint/megatron/pickle.h"
#include "worker/checkpoint/megatron/torch_file.h"

#define CONFIG "metadata.json"
#define LAYERS "decoder.layers."

enum { CONFIG_MAX = 1 << 20, OPEN_MAX_FILES = 16, PIECE_BYTES = 1 << 18 };

static const char EMBEDDING[] = "embedding.word_embeddings.weight";

/* Numbers of a chunk: bytes [at, at + n) of its file. */
struct place {
    uint64_t at, n;
    uint32_t crc32; /* of the whole storage; 0: it is a part of one, or not known */
};

struct open_file {
    size_t file;
    int fd; /* -1: none */
};

struct mb_dist {
    char *dir;
    struct mb_dist_meta meta;
    struct place **places;        /* [meta.n_tensors], of chunks; NULL: not taken */
    struct mb_dist_part *sources; /* of the layout's tensors; several may be in one */
    struct open_file open[OPEN_MAX_FILES];
    size_t next_open;
    uint8_t *piece; /* PIECE_BYTES */
};

static int no_memory(const struct mb_dist *d, struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "%s: out of memory", d->dir);
}

int mb_dist_is_in(const char *dir)
{
    char *path = mb_path_join(dir, CONFIG);
    const int is = path != NULL && mb_fs_exists(path);
    mb_free(path);
    return is;
}

/* ---- what it is ---- */

static int check_config(const struct mb_dist *d, struct mb_err *err)
{
    char *path = mb_path_join(d->dir, CONFIG);
    struct mb_buf text = {0};
    json_error_t je;
    int rc = path != NULL ? mb_fs_read(path, CONFIG_MAX, &text, err) : no_memory(d, err);
    json_t *o = rc == 0 ? json_loadb((const char *)text.data, text.len, 0, &je) : NULL;
    const char *backend = json_string_value(json_object_get(o, "sharded_backend"));
    if (rc == 0 && backend == NULL) {
        rc = mb_err_set(err, MB_ECORRUPT, "%s: it does not say sharded_backend", path);
    }
    if (rc == 0 && strcmp(backend, "torch_dist") != 0) {
        rc = mb_err_set(err, MB_EUNSUPPORTED, "%s: its sharded_backend is not torch_dist", path);
    }
    json_decref(o);
    mb_buf_close(&text);
    mb_free(path);
    return rc;
}

static int read_meta(struct mb_dist *d, struct mb_err *err)
{
    char *path = mb_path_join(d->dir, ".metadata");
    struct mb_buf bytes = {0};
    int rc = path != NULL ? mb_fs_read(path, MB_PICKLE_MAX, &bytes, err) : no_memory(d, err);
    if (rc == MB_ENOENT) {
        rc = mb_err_set(err, MB_ECORRUPT, "%s is missing: the checkpoint is not whole", path);
    }
    if (rc == 0) {
        rc = mb_dist_meta_parse(path, bytes.data, bytes.len, &d->meta, err);
    }
    mb_buf_close(&bytes);
    mb_free(path);
    return rc;
}

int mb_dist_open(const char *dir, struct mb_dist **out, struct mb_err *err)
{
    struct mb_dist *d = mb_calloc(1, sizeof *d);
    if (d == NULL) {
        return mb_err_set(err, MB_ENOMEM, "%s: out of memory", dir);
    }
    for (size_t i = 0; i < OPEN_MAX_FILES; i++) {
        d->open[i].fd = -1;
    }
    d->dir = mb_strdup(dir);
    d->piece = mb_alloc(PIECE_BYTES);
    int rc = d->dir != NULL && d->piece != NULL
                 ? check_config(d, err)
                 : mb_err_set(err, MB_ENOMEM, "%s: out of memory", dir);
    if (rc == 0) {
        rc = read_meta(d, err);
    }
    if (rc == 0) {
        d->places = mb_calloc(d->meta.n_tensors + 1, sizeof(struct place *));
        rc = d->places != NULL ? 0 : no_memory(d, err);
    }
    if (rc != 0) {
        mb_dist_close(d);
        return rc;
    }
    *out = d;
    return 0;
}

void mb_dist_close(struct mb_dist *d)
{
    if (d == NULL) {
        return;
    }
    for (size_t i = 0; i < OPEN_MAX_FILES; i++) {
        if (d->open[i].fd >= 0) {
            close(d->open[i].fd);
        }
    }
    for (size_t i = 0; d->places != NULL && i < d->meta.n_tensors; i++) {
        mb_free(d->places[i]);
    }
    mb_dist_meta_close(&d->meta);
    mb_free(d->places);
    mb_free(d->sources);
    mb_free(d->piece);
    mb_free(d->dir);
    mb_free(d);
}

int mb_dist_has_optimizer(const struct mb_dist *d)
{
    return d->meta.has_optimizer;
}

size_t mb_dist_n_files(const struct mb_dist *d)
{
    return d->meta.n_files;
}

uint64_t mb_dist_vocab(const struct mb_dist *d)
{
    const struct mb_dist_tensor *t = mb_dist_meta_find(&d->meta, EMBEDDING);
    return t != NULL && t->n_dims == 2 && t->shape[0] <= 1u << 30 ? t->shape[0] : 0;
}

/* ---- files ---- */

/* One that is kept open, until others are needed. */
static int file_of(struct mb_dist *d, size_t file, int *fd, struct mb_err *err)
{
    for (size_t i = 0; i < OPEN_MAX_FILES; i++) {
        if (d->open[i].fd >= 0 && d->open[i].file == file) {
            *fd = d->open[i].fd;
            return 0;
        }
    }
    char *path = mb_path_join(d->dir, d->meta.files[file]);
    if (path == NULL) {
        return no_memory(d, err);
    }
    int rc = 0;
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe does not hold it up */
    if (*fd < 0) {
        rc = errno == ENOENT
                 ? mb_err_set(err, MB_ECORRUPT, "%s is missing: the checkpoint is not whole", path)
                 : mb_err_sys(err, errno, "%s", path);
    } else {
        struct open_file *o = &d->open[d->next_open];
        d->next_open = (d->next_open + 1) % OPEN_MAX_FILES;
        if (o->fd >= 0) {
            close(o->fd);
        }
        *o = (struct open_file){file, *fd};
    }
    mb_free(path);
    return rc;
}

static int read_at(struct mb_dist *d, size_t file, uint64_t at, void *out, size_t n,
                   struct mb_err *err)
{
    uint8_t *p = out;
    int fd;
    int rc = file_of(d, file, &fd, err);
    while (n > 0 && rc == 0) {
        const ssize_t k = pread(fd, p, n, (off_t)at);
        if (k < 0 && errno == EINTR) {
            continue;
        }
        if (k <= 0) {
            return k < 0 ? mb_err_sys(err, errno, "%s/%s", d->dir, d->meta.files[file])
                         : mb_err_set(err, MB_ECORRUPT, "%s/%s: it has become shorter", d->dir,
                                      d->meta.files[file]);
        }
        p += k;
        at += (uint64_t)k;
        n -= (size_t)k;
    }
    return rc;
}

/* ---- chunks ---- */

/* What a chunk's zip has against what was said of it. */
static int check_chunk(const char *name, const struct mb_dist_tensor *t,
                       const struct mb_dist_chunk *c, const struct mb_torch_file *f,
                       struct mb_err *err)
{
    const struct mb_torch_tensor *have = mb_torch_n_tensors(f) == 1 ? mb_torch_tensor(f, 0) : NULL;
    int fits = have != NULL && have->n == c->n && have->n_dims == t->n_dims;
    for (int i = 0; fits && i < t->n_dims; i++) {
        fits = have->shape[i] == c->size[i];
    }
    if (!fits || have->dtype != t->dtype) {
        return mb_err_set(err, MB_ECORRUPT,
                          "%s: at byte %" PRIu64 ": no tensor as .metadata says of %s", name, c->at,
                          t->name);
    }
    return have->run == have->n
               ? 0
               : mb_err_set(err, MB_EUNSUPPORTED,
                            "%s: tensor %s: the numbers of a chunk do not follow each other", name,
                            t->name);
}

/* The file of torch.save that a chunk or an object is; name: for texts. */
static int open_part(struct mb_dist *d, const struct mb_dist_chunk *c, const char *name,
                     struct mb_torch_file **out, struct mb_err *err)
{
    int fd, rc = file_of(d, c->file, &fd, err);
    int copy = rc == 0 ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
    if (rc == 0 && copy < 0) {
        rc = mb_err_sys(err, errno, "%s", name);
    }
    return rc == 0 ? mb_torch_open_part(name, copy, c->at, c->n_bytes, out, err) : rc;
}

static int open_chunk(struct mb_dist *d, const struct mb_dist_tensor *t,
                      const struct mb_dist_chunk *c, struct place *out, struct mb_err *err)
{
    struct mb_torch_file *f = NULL;
    char *name = mb_path_join(d->dir, d->meta.files[c->file]);
    int rc = name != NULL ? open_part(d, c, name, &f, err) : no_memory(d, err);
    if (rc == 0) {
        rc = check_chunk(name, t, c, f, err);
    }
    if (rc == 0) {
        const struct mb_torch_tensor *have = mb_torch_tensor(f, 0);
        const size_t size = mb_st_dtype_size(t->dtype);
        uint64_t n;
        mb_torch_place(f, have, &out->at, &n, &out->crc32);
        out->at += c->at + have->from * size;
        out->n = have->n * size;
        out->crc32 = n == out->n ? out->crc32 : 0;
    }
    mb_torch_close(f);
    mb_free(name);
    return rc;
}

static int check_readable(const struct mb_dist *d, const struct mb_dist_tensor *t, int is_object,
                          struct mb_err *err)
{
    if (t->is_wrong != NULL || t->is_object != is_object) {
        return mb_err_set(err, MB_ECORRUPT, "%s/.metadata: tensor %s: %s", d->dir, t->name,
                          t->is_wrong != NULL ? t->is_wrong
                          : is_object         ? "it is one, and has to be an object"
                                              : "it is none");
    }
    return 0;
}

int mb_dist_use(struct mb_dist *d, const struct mb_dist_tensor *t, struct mb_err *err)
{
    const size_t i = (size_t)(t - d->meta.tensors);
    int rc = check_readable(d, t, 0, err);
    if (rc != 0 || d->places[i] != NULL) {
        return rc;
    }
    if (!t->is_read) {
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "%s: tensor %s: its numbers are neither F32 nor F16 nor BF16", d->dir,
                          t->name);
    }
    d->places[i] = mb_calloc(t->n_chunks, sizeof *d->places[i]);
    rc = d->places[i] != NULL ? 0 : no_memory(d, err);
    for (size_t k = 0; k < t->n_chunks && rc == 0; k++) {
        rc = open_chunk(d, t, &t->chunks[k], &d->places[i][k], err);
    }
    if (rc != 0) {
        mb_free(d->places[i]);
        d->places[i] = NULL;
    }
    return rc;
}

int mb_dist_open_object(struct mb_dist *d, const struct mb_dist_tensor *t,
                        struct mb_torch_file **out, struct mb_err *err)
{
    const size_t i = (size_t)(t - d->meta.tensors);
    int rc = check_readable(d, t, 1, err);
    char *name = rc == 0 ? mb_path_join(d->dir, d->meta.files[t->chunks->file]) : NULL;
    if (rc == 0 && d->places[i] == NULL) {
        d->places[i] = mb_calloc(1, sizeof *d->places[i]); /* of no bytes */
    }
    if (rc == 0) {
        rc = name != NULL && d->places[i] != NULL ? open_part(d, t->chunks, name, out, err)
                                                  : no_memory(d, err);
    }
    mb_free(name);
    return rc;
}

/* ---- tensors ---- */

const struct mb_dist_tensor *mb_dist_common(const struct mb_dist *d)
{
    const struct mb_dist_tensor *t = mb_dist_meta_find(&d->meta, MB_DIST_COMMON);
    return t != NULL && t->is_object ? t : NULL;
}

const struct mb_dist_tensor *mb_dist_find(const struct mb_dist *d, const char *name)
{
    const struct mb_dist_tensor *t = mb_dist_meta_find(&d->meta, name);
    return t != NULL && t->is_of_optimizer ? t : NULL;
}

const struct mb_dist_tensor *mb_dist_unused(const struct mb_dist *d)
{
    for (size_t i = 0; i < d->meta.n_tensors; i++) {
        if (d->meta.tensors[i].is_of_optimizer && d->places[i] == NULL) {
            return &d->meta.tensors[i];
        }
    }
    return NULL;
}

int mb_dist_check_layers(const struct mb_dist *d, uint64_t n_layers, struct mb_err *err)
{
    static const char OF_EACH[] = "mlp.linear_fc2.weight"; /* whatever the model */
    char name[MB_MEGATRON_NAME_MAX];
    const struct mb_dist_tensor *all = NULL;
    snprintf(name, sizeof name, LAYERS "%s", OF_EACH);
    all = mb_dist_meta_find(&d->meta, name);
    if (all != NULL && all->shape[0] != n_layers) {
        return mb_err_set(err, MB_ECORRUPT,
                          "%s: tensor %s is of %" PRIu64 " layers, the arguments say %" PRIu64,
                          d->dir, name, all->shape[0], n_layers);
    }
    snprintf(name, sizeof name, LAYERS "%" PRIu64 ".%s", n_layers - 1, OF_EACH);
    return all != NULL || mb_dist_meta_find(&d->meta, name) != NULL
               ? 0
               : mb_err_set(err, MB_ECORRUPT,
                            "%s: tensor %s is missing: the arguments say %" PRIu64 " layers",
                            d->dir, name, n_layers);
}

/* By either name of a norm: of all layers, or of one. */
static const struct mb_dist_tensor *look_up(const struct mb_dist *d, const char *prefix,
                                            const struct mb_megatron_tensor *w, int of_all)
{
    char local[MB_MEGATRON_NAME_MAX], name[3 * MB_MEGATRON_NAME_MAX];
    const char *in_layer[2] = {w->in_layer, local};
    const struct mb_dist_tensor *t = NULL;
    if (w->place != MB_MEGATRON_LAYER) {
        snprintf(name, sizeof name, "%s%s", prefix, w->name);
        return of_all ? NULL : mb_dist_meta_find(&d->meta, name);
    }
    mb_megatron_local_name(w->in_layer, local);
    for (int i = 0; i < 2 && t == NULL && in_layer[i][0] != '\0'; i++) {
        if (of_all) {
            snprintf(name, sizeof name, "%s" LAYERS "%s", prefix, in_layer[i]);
        } else {
            snprintf(name, sizeof name, "%s" LAYERS "%" PRIu64 ".%s", prefix, w->layer,
                     in_layer[i]);
        }
        t = mb_dist_meta_find(&d->meta, name);
    }
    return t;
}

/* 1: it is the wanted one, whole or cut, of all layers or of one. */
static int take_cut(const struct mb_dist_tensor *t, const uint64_t *shape, int n_dims, int of_all,
                    struct mb_dist_part *out)
{
    const uint64_t *cuts = t->shape + of_all;
    const int n_cuts = n_dims - of_all;
    const uint64_t rows = shape[of_all], columns = n_cuts > 1 ? shape[of_all + 1] : 1;
    *out = (struct mb_dist_part){
        .t = t, .n_rows = 1, .n_columns = 1, .rows = rows, .columns = columns};
    if (t->n_dims == n_dims) {
        return memcmp(t->shape, shape, (size_t)n_dims * sizeof *shape) == 0;
    }
    if (!t->is_of_optimizer || t->n_dims != n_dims + 1 || (of_all && t->shape[0] != shape[0])) {
        return 0;
    }
    out->n_rows = cuts[0];
    out->n_columns = n_cuts > 1 ? cuts[1] : 1;
    out->rows = rows / out->n_rows;
    out->columns = columns / out->n_columns;
    return rows % out->n_rows == 0 && columns % out->n_columns == 0 &&
           cuts[n_cuts] == out->rows * out->columns;
}

int mb_dist_find_state(const struct mb_dist *d, const char *prefix,
                       const struct mb_megatron_layout *l, size_t i, struct mb_dist_part *out,
                       struct mb_err *err)
{
    const struct mb_megatron_tensor *w = &l->tensors[i];
    const uint64_t n = w->rows * (w->columns > 0 ? w->columns : 1);
    const struct mb_dist_tensor *t = look_up(d, prefix, w, 1);
    const int of_all = t != NULL;
    t = of_all ? t : look_up(d, prefix, w, 0);
    *out = (struct mb_dist_part){.t = t};
    if (t == NULL || t->is_wrong != NULL) {
        return 0; /* who uses it says what */
    }
    uint64_t want[MB_DIST_DIMS_MAX] = {l->n_layers, w->rows, w->columns};
    const uint64_t *shape = of_all ? want : want + 1;
    const int n_dims = of_all + (w->columns > 0 ? 2 : 1);
    if (!take_cut(t, shape, n_dims, of_all, out)) {
        return mb_err_set(err, MB_ECORRUPT,
                          "%s: tensor %s: %d dimensions [%" PRIu64 ", %" PRIu64 ", %" PRIu64
                          "], the arguments need %d [%" PRIu64 ", %" PRIu64 ", %" PRIu64 "]",
                          d->dir, t->name, t->n_dims, t->shape[0], t->shape[1], t->shape[2], n_dims,
                          shape[0], n_dims > 1 ? shape[1] : 0, n_dims > 2 ? shape[2] : 0);
    }
    out->from = of_all ? w->layer * n : 0;
    return 0;
}

static int find_source(struct mb_dist *d, const struct mb_megatron_layout *l, size_t i,
                       struct mb_err *err)
{
    struct mb_dist_part *s = &d->sources[i];
    int rc = mb_dist_find_state(d, "", l, i, s, err);
    if (rc == 0 && s->t == NULL) {
        rc = mb_err_set(err, MB_ECORRUPT, "%s: tensor %s is missing", d->dir, l->tensors[i].name);
    }
    return rc == 0 ? mb_dist_use(d, s->t, err) : rc;
}

int mb_dist_take(struct mb_dist *d, const struct mb_megatron_layout *l, uint64_t *bytes,
                 struct mb_err *err)
{
    int rc = 0;
    *bytes = 0;
    d->sources = mb_calloc(l->n, sizeof *d->sources);
    if (d->sources == NULL) {
        return no_memory(d, err);
    }
    for (size_t i = 0; i < l->n && rc == 0; i++) {
        rc = find_source(d, l, i, err);
    }
    for (size_t i = 0; i < d->meta.n_tensors && rc == 0; i++) {
        const struct mb_dist_tensor *t = &d->meta.tensors[i];
        if (d->places[i] == NULL && !t->is_of_optimizer && !t->is_object &&
            !mb_ends_with(t->name, "_extra_state")) {
            rc = mb_err_set(err, MB_EUNSUPPORTED,
                            "%s: tensor %s is none of this model: it would be lost", d->dir,
                            t->name);
        }
        *bytes += d->places[i] != NULL ? t->n * mb_st_dtype_size(t->dtype) : 0;
    }
    return rc;
}

/* ---- reading ---- */

int mb_dist_read_tensor(struct mb_dist *d, const struct mb_dist_tensor *t, uint64_t from, size_t n,
                        float *out, struct mb_err *err)
{
    const struct place *places = d->places[t - d->meta.tensors];
    const size_t size = mb_st_dtype_size(t->dtype);
    int rc = 0;
    while (n > 0 && rc == 0) {
        size_t chunk;
        uint64_t at, run = mb_dist_place(t, from, &chunk, &at);
        size_t k = PIECE_BYTES / size < n ? PIECE_BYTES / size : n;
        k = run < k ? (size_t)run : k;
        rc = read_at(d, t->chunks[chunk].file, places[chunk].at + at * size, d->piece, k * size,
                     err);
        if (rc == 0) {
            mb_st_widen(d->piece, t->dtype, k, out);
        }
        from += k;
        out += k;
        n -= k;
    }
    return rc;
}

int mb_dist_read_part(struct mb_dist *d, const struct mb_dist_part *p, uint64_t from, size_t n,
                      float *out, struct mb_err *err)
{
    const uint64_t n_part = p->rows * p->columns, width = p->columns * p->n_columns;
    int rc = 0;
    while (n > 0 && rc == 0) {
        const uint64_t row = from / width, column = from % width;
        const uint64_t part = row / p->rows * p->n_columns + column / p->columns;
        const uint64_t at = row % p->rows * p->columns + column % p->columns;
        /* One that has all columns has its rows, too, one behind another. */
        const uint64_t run = p->n_columns > 1 ? p->columns - column % p->columns : n_part - at;
        const size_t k = run < n ? (size_t)run : n;
        rc = mb_dist_read_tensor(d, p->t, p->from + part * n_part + at, k, out, err);
        from += k;
        out += k;
        n -= k;
    }
    return rc;
}

int mb_dist_read(struct mb_dist *d, size_t i, uint64_t from, size_t n, float *out,
                 struct mb_err *err)
{
    return mb_dist_read_part(d, &d->sources[i], from, n, out, err);
}

enum mb_st_dtype mb_dist_dtype(const struct mb_dist *d, size_t i)
{
    return d->sources[i].t->dtype;
}

static int verify_chunk(struct mb_dist *d, const struct mb_dist_tensor *t, size_t file,
                        const struct place *p, struct mb_err *err)
{
    uLong crc = crc32(0, NULL, 0);
    int rc = 0;
    for (uint64_t at = 0; at < p->n && rc == 0 && p->crc32 != 0;) {
        const size_t k = p->n - at < PIECE_BYTES ? (size_t)(p->n - at) : PIECE_BYTES;
        rc = read_at(d, file, p->at + at, d->piece, k, err);
        crc = rc == 0 ? crc32(crc, d->piece, (uInt)k) : crc;
        at += k;
    }
    if (rc == 0 && p->crc32 != 0 && crc != p->crc32) {
        rc = mb_err_set(err, MB_ECORRUPT, "%s/%s: tensor %s: a checksum is not that of its bytes",
                        d->dir, d->meta.files[file], t->name);
    }
    return rc;
}

int mb_dist_verify(struct mb_dist *d, const struct mb_torch_watch *watch, struct mb_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < d->meta.n_tensors; i++) {
        const struct mb_dist_tensor *t = &d->meta.tensors[i];
        for (size_t k = 0; d->places[i] != NULL && k < t->n_chunks && rc == 0; k++) {
            rc = verify_chunk(d, t, t->chunks[k].file, &d->places[i][k], err);
            rc = rc == 0 && watch != NULL ? watch->cb(watch->arg, err) : rc;
        }
    }
    return rc;
}
