/*
 *  1. open: the directory's files are listed, each says which range it has; in order of these they
 *     leave no gap.
 *  2. read: an element's place in the flat buffer, as the model lays tensors out, is in one of
 * them; the file that was read last stays open.
 *  3. write: tensor after tensor, a piece at a time, zeros between them.
 * Failures: a file that is damaged or of another model, a range that no file has: named.
 */
#include "worker/checkpoint/moments.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"

enum { PARAM_ALIGN = 16 /* of the model's flat buffers, in floats */, PIECE_FLOATS = 1 << 18 };

static const char *const NAMES[] = {"exp_avg", "exp_avg_sq"};
static const char NAME_OF_SGD[] = "momentum_buffer";

struct range {
    char *path;
    size_t begin, end;
};

struct mb_moments {
    char *dir;
    const struct mb_st_reader *model;
    uint64_t *offsets; /* of the model's tensors, whatever order they are told in, and the total */
    struct range *ranges;
    size_t n_ranges;
    int n_moments; /* of each file; 0: what the first one has */
    size_t at;     /* the one that is open */
    struct mb_st_reader *open;
};

static int no_memory(const char *dir, struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "%s: out of memory for the optimizer's files", dir);
}

static uint64_t elements(const struct mb_st_tensor *t)
{
    return t->shape[0] * (t->n_dims > 1 ? t->shape[1] : 1);
}

static uint64_t aligned(uint64_t n)
{
    return (n + PARAM_ALIGN - 1) / PARAM_ALIGN * PARAM_ALIGN;
}

uint64_t mb_moments_offset(const struct mb_st_tensor *tensors, size_t i)
{
    uint64_t at = 0;
    for (size_t k = 0; k < i; k++) {
        at += aligned(elements(&tensors[k]));
    }
    return at;
}

/* ---- files ---- */

int mb_moments_is_file(const char *name, int64_t world_size)
{
    char ending[48];
    snprintf(ending, sizeof ending, "_of_%03" PRId64 ".safetensors", world_size);
    return mb_starts_with(name, "optim_dp_") &&
           mb_ends_with(name, world_size > 0 ? ending : ".safetensors");
}

int mb_moments_missing(const char *dir, uint64_t flat_elements, int64_t world_size, uint64_t at,
                       struct mb_err *err)
{
    enum { RANKS_MAX = 1 << 20 }; /* more is no number of ranks, and products stay in 64 bits */
    const uint64_t n = (uint64_t)world_size;
    if (world_size > 0 && world_size <= RANKS_MAX && flat_elements < UINT64_MAX / RANKS_MAX) {
        uint64_t rank = at * n / flat_elements;
        while (rank + 1 < n && flat_elements * (rank + 1) / n <= at) {
            rank++;
        }
        char wanted[48];
        mb_checkpoint_optim_name((uint32_t)rank, (uint32_t)n, wanted);
        char *path = mb_path_join(dir, wanted);
        if (path != NULL && access(path, F_OK) != 0 && errno == ENOENT) {
            mb_free(path);
            return mb_err_set(err, MB_ENOENT,
                              "%s: %s is not there, which holds the optimizer state from element "
                              "%" PRIu64 " of %" PRIu64,
                              dir, wanted, at, flat_elements);
        }
        mb_free(path);
    }
    return mb_err_set(err, MB_ENOENT,
                      "%s: no file optim_dp_*.safetensors holds the optimizer state from element "
                      "%" PRIu64 " of %" PRIu64,
                      dir, at, flat_elements);
}

const char *mb_moments_name(int n_moments, int which)
{
    return n_moments == MB_MOMENTS_SGD ? NAME_OF_SGD : NAMES[which];
}

static const char *rule(int is_sgd)
{
    return is_sgd ? "SGD" : "Adam";
}

int mb_moments_range(const char *path, const struct mb_st_reader *r, uint64_t flat_elements,
                     int n_moments, size_t *begin, size_t *end, struct mb_err *err)
{
    static const char *const KEYS[] = {"begin", "end", "flat_elements"};
    int64_t v[3];
    for (int i = 0; i < 3; i++) {
        const char *text = mb_st_metadata(r, KEYS[i]);
        if (text == NULL || mb_parse_i64(text, 0, INT64_MAX, KEYS[i], &v[i], NULL) != 0) {
            return mb_err_set(err, MB_ECORRUPT, "%s: metadata \"%s\" is missing or no number", path,
                              KEYS[i]);
        }
    }
    if ((uint64_t)v[2] != flat_elements || v[0] > v[1] || v[1] > v[2]) {
        return mb_err_set(err, MB_EINVAL,
                          "%s: holds [%" PRId64 ", %" PRId64 ") of %" PRId64
                          " elements, the model has %" PRIu64,
                          path, v[0], v[1], v[2], flat_elements);
    }
    *begin = (size_t)v[0];
    *end = (size_t)v[1];
    const int is_sgd = mb_st_find(r, NAME_OF_SGD) != NULL;
    if (is_sgd != (n_moments == MB_MOMENTS_SGD)) {
        return mb_err_set(
            err, MB_EUNSUPPORTED,
            "%s: the optimizer is %s, here only %s's is taken; --no-load-optim leaves "
            "it out",
            path, rule(is_sgd), rule(!is_sgd));
    }
    for (int i = 0; i < n_moments; i++) {
        const char *name = mb_moments_name(n_moments, i);
        const struct mb_st_tensor *t = mb_st_find(r, name);
        if (t == NULL || t->dtype != MB_ST_F32 || t->n_dims != 1 || t->shape[0] != *end - *begin) {
            return mb_err_set(err, MB_ECORRUPT, "%s: tensor %s does not fit its range", path, name);
        }
    }
    return 0;
}

static int add_file(struct mb_moments *m, const char *name, struct mb_err *err)
{
    struct range *r = &m->ranges[m->n_ranges];
    struct mb_st_reader *file = NULL;
    r->path = mb_path_join(m->dir, name);
    if (r->path == NULL) {
        return no_memory(m->dir, err);
    }
    m->n_ranges++;
    int rc = mb_st_open(r->path, &file, err);
    if (rc == 0 && m->n_moments == 0) {
        m->n_moments = mb_st_find(file, NAME_OF_SGD) != NULL ? MB_MOMENTS_SGD : MB_MOMENTS_ADAM;
    }
    if (rc == 0) {
        rc = mb_moments_range(r->path, file, m->offsets[mb_st_n_tensors(m->model)], m->n_moments,
                              &r->begin, &r->end, err);
    }
    mb_st_close(file);
    return rc;
}

static int by_begin(const void *x, const void *y)
{
    const struct range *a = x, *b = y;
    return a->begin < b->begin ? -1 : a->begin > b->begin;
}

static int check_covered(const struct mb_moments *m, int64_t world_size, struct mb_err *err)
{
    const size_t total = (size_t)m->offsets[mb_st_n_tensors(m->model)];
    size_t at = 0;
    for (size_t i = 0; i < m->n_ranges && m->ranges[i].begin <= at; i++) {
        at = m->ranges[i].end > at ? m->ranges[i].end : at;
    }
    return at == total ? 0 : mb_moments_missing(m->dir, total, world_size, at, err);
}

/* The file of weights has them in the order of the flat buffer. */
static void lay_out(struct mb_moments *m)
{
    const size_t n = mb_st_n_tensors(m->model);
    for (size_t i = 0; i < n; i++) {
        const struct mb_st_tensor *t = mb_st_tensor(m->model, i);
        for (size_t k = 0; k < n; k++) {
            const struct mb_st_tensor *other = mb_st_tensor(m->model, k);
            m->offsets[i] += other->begin < t->begin ? aligned(elements(other)) : 0;
        }
        m->offsets[n] += aligned(elements(t));
    }
}

static int list_files(struct mb_moments *m, int64_t world_size, struct mb_err *err)
{
    size_t cap = 0;
    int rc = 0;
    DIR *d = opendir(m->dir);
    if (d == NULL) {
        return mb_err_sys(err, errno, "%s", m->dir);
    }
    for (struct dirent *e; rc == 0 && (e = readdir(d)) != NULL;) {
        if (!mb_moments_is_file(e->d_name, world_size)) {
            continue;
        }
        if (m->n_ranges == cap) {
            cap = cap > 0 ? 2 * cap : 16;
            struct range *more = mb_reallocarray(m->ranges, cap, sizeof *more);
            if (more == NULL) {
                rc = no_memory(m->dir, err);
                break;
            }
            m->ranges = more;
        }
        rc = add_file(m, e->d_name, err);
    }
    closedir(d);
    if (rc == 0 && m->n_ranges > 0) {
        qsort(m->ranges, m->n_ranges, sizeof *m->ranges, by_begin);
    }
    return rc == 0 ? check_covered(m, world_size, err) : rc;
}

static int open_files(const char *iter_dir, const struct mb_st_reader *model,
                      const struct mb_checkpoint_state *s, int n_moments, struct mb_moments **out,
                      struct mb_err *err)
{
    const size_t n = mb_st_n_tensors(model);
    struct mb_moments *m = mb_calloc(1, sizeof *m);
    if (m == NULL) {
        return no_memory(iter_dir, err);
    }
    m->model = model;
    m->n_moments = n_moments;
    m->dir = mb_strdup(iter_dir);
    m->offsets = mb_calloc(n + 1, sizeof *m->offsets);
    int rc = m->dir != NULL && m->offsets != NULL ? 0 : no_memory(iter_dir, err);
    if (rc == 0) {
        lay_out(m);
        rc = list_files(m, s->data_parallel_size, err);
    }
    if (rc != 0) {
        mb_moments_close(m);
        return rc;
    }
    *out = m;
    return 0;
}

int mb_moments_open(const char *iter_dir, const struct mb_st_reader *model,
                    const struct mb_checkpoint_state *s, struct mb_moments **out,
                    struct mb_err *err)
{
    return open_files(iter_dir, model, s, MB_MOMENTS_ADAM, out, err);
}

int mb_moments_check(const char *iter_dir, const struct mb_st_reader *model,
                     const struct mb_checkpoint_state *s, struct mb_err *err)
{
    struct mb_moments *m = NULL;
    int rc = open_files(iter_dir, model, s, 0, &m, err);
    mb_moments_close(m);
    return rc;
}

void mb_moments_close(struct mb_moments *m)
{
    if (m == NULL) {
        return;
    }
    for (size_t i = 0; i < m->n_ranges; i++) {
        mb_free(m->ranges[i].path);
    }
    mb_st_close(m->open);
    mb_free(m->ranges);
    mb_free(m->offsets);
    mb_free(m->dir);
    mb_free(m);
}

/* ---- reading ---- */

/* Opens the file of an element of the flat buffer, and says from where and to where it has it. */
static int turn_to(struct mb_moments *m, uint64_t at, struct mb_err *err)
{
    const struct range *now = &m->ranges[m->at];
    if (m->open != NULL && at >= now->begin && at < now->end) {
        return 0;
    }
    size_t i = 0;
    while (at < m->ranges[i].begin || at >= m->ranges[i].end) { /* one of them has it */
        i++;
    }
    mb_st_close(m->open);
    m->open = NULL;
    m->at = i;
    return mb_st_open(m->ranges[i].path, &m->open, err);
}

int mb_moments_read(struct mb_moments *m, int which, const struct mb_st_tensor *t, uint64_t from,
                    size_t n, float *out, struct mb_err *err)
{
    uint64_t at = m->offsets[t - mb_st_tensor(m->model, 0)] + from;
    int rc = 0;
    while (n > 0 && rc == 0) {
        rc = turn_to(m, at, err);
        const struct range *r = &m->ranges[m->at];
        const struct mb_st_tensor *have = rc == 0 ? mb_st_find(m->open, NAMES[which]) : NULL;
        if (rc == 0 && (have == NULL || have->n_dims != 1 || have->shape[0] != r->end - r->begin)) {
            rc = mb_err_set(err, MB_ECORRUPT, "%s: it is another than a moment ago", r->path);
        }
        const size_t k = rc == 0 && r->end - at < n ? (size_t)(r->end - at) : n;
        if (rc == 0) {
            rc =
                mb_st_read(m->open, have, (at - r->begin) * sizeof *out, out, k * sizeof *out, err);
        }
        at += k;
        out += k;
        n -= k;
    }
    return rc;
}

/* ---- writing ---- */

static int copy(struct mb_st_writer *w, const struct mb_st_tensor *tensors, size_t n_tensors,
                int which,
                int (*read)(void *arg, int which, size_t tensor, uint64_t from, size_t n,
                            float *out, struct mb_err *err),
                void *arg, float *piece, struct mb_err *err)
{
    static const float gap[PARAM_ALIGN];
    int rc = 0;
    for (size_t i = 0; i < n_tensors && rc == 0; i++) {
        const uint64_t n = elements(&tensors[i]);
        for (uint64_t at = 0; at < n && rc == 0;) {
            const size_t k = n - at < PIECE_FLOATS ? (size_t)(n - at) : PIECE_FLOATS;
            rc = read(arg, which, i, at, k, piece, err);
            rc = rc == 0 ? mb_st_write(w, piece, k * sizeof *piece, err) : rc;
            at += k;
        }
        if (rc == 0 && aligned(n) > n) {
            rc = mb_st_write(w, gap, (aligned(n) - n) * sizeof *gap, err);
        }
    }
    return rc;
}

int mb_moments_write(const char *dir, const struct mb_st_tensor *tensors, size_t n_tensors,
                     int (*read)(void *arg, int which, size_t tensor, uint64_t from, size_t n,
                                 float *out, struct mb_err *err),
                     void *arg, struct mb_err *err)
{
    const uint64_t total = mb_moments_offset(tensors, n_tensors);
    char name[48], text[24];
    snprintf(text, sizeof text, "%" PRIu64, total);
    const struct mb_st_meta meta[] = {{"begin", "0"}, {"end", text}, {"flat_elements", text}};
    struct mb_st_tensor both[2] = {
        {.name = NAMES[0], .dtype = MB_ST_F32, .n_dims = 1, .shape = {total}},
        {.name = NAMES[1], .dtype = MB_ST_F32, .n_dims = 1, .shape = {total}}};
    mb_checkpoint_optim_name(0, 1, name);
    char *path = mb_path_join(dir, name);
    float *piece = mb_alloc(PIECE_FLOATS * sizeof *piece);
    struct mb_st_writer *w = NULL;
    uint64_t size, crc;
    int rc = path != NULL && piece != NULL ? mb_st_create(path, both, 2, meta, 3, &w, err)
                                           : no_memory(dir, err);
    for (int which = 0; which < 2 && rc == 0; which++) {
        rc = copy(w, tensors, n_tensors, which, read, arg, piece, err);
    }
    if (rc == 0) {
        rc = mb_st_finish(w, &size, &crc, err);
    } else if (w != NULL) {
        mb_st_abandon(w);
    }
    mb_free(piece);
    mb_free(path);
    return rc;
}
