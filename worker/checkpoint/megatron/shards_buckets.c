/*
 * The distributed optimizer's numbers where they lie in its buffers, not under names of the model:
 * distrib_optim.pt of torch, which has each buffer whole, and of torch_dist the forms
 * dp_zero_gather_scatter, where the same file is an object, and dp_reshardable, which has a tensor
 * for each bucket. Of every rank that had a part of the model:
 *
 *  1. Its parameters are listed in the order of its modules, chunk by chunk. A chunk has a buffer
 *     for each kind of numbers, in the order in which these come (param_buffer.h).
 *  2. Where its buckets end say their tensors, or, of a buffer that is whole, the arguments; all
 *     elements are some parameter's, or padded.
 *  3. A place in a buffer says nothing of whose it is. So each parameter's first fp32 weights, at
 *     each rank, are compared with those of the model, which are these rounded.
 * Failures: a split of layers that is not known, a buffer or bucket that is missing or of another
 * size, weights that are others: named.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"
#include "worker/checkpoint/megatron/param_buffer.h"
#include "worker/checkpoint/megatron/shards_private.h"

enum { NAME_BYTES = 192, COMPARED = 64, PIECE = 1 << 16 /* floats */, BOUNDS = 3 };

static const char *const KEYS[MB_SHARDS_STATES] = {[MB_SHARDS_EXP_AVG] = "exp_avg",
                                                   [MB_SHARDS_EXP_AVG_SQ] = "exp_avg_sq",
                                                   [MB_SHARDS_MASTER] = "param"};

/* One rank's, of one chunk and one kind of numbers. */
struct buffer {
    uint64_t stage, rank, chunk;
    size_t number;               /* of the rank's */
    const size_t *which;         /* [n] of the rank's parameters, the last one first */
    struct mb_buffered_param *p; /* [n] */
    uint64_t *sizes;             /* [n] of buckets */
    size_t n, n_sizes;
    enum mb_st_dtype dtype;
};

static int is_shared(const struct mb_shards *s, const struct mb_shards_param *p)
{
    return s->run.pp > 1 && !s->layout.untied && (p->tensor == MB_SHARDS_COPY || p->tensor == 0);
}

static int does_not_fit(const struct mb_shards *s, const struct mb_shards_file *f,
                        const struct buffer *b, uint64_t have, struct mb_err *err)
{
    uint64_t n = 0;
    for (size_t i = 0; i < b->n; i++) {
        n += b->p[i].n;
    }
    return mb_err_set(err, MB_ECORRUPT,
                      "%s: buffer %zu of the optimizer of tensor-parallel rank %" PRIu64
                      ", stage %" PRIu64 " has %" PRIu64 " elements, which are not the %" PRIu64
                      " of its parameters and what is padded between them",
                      f != NULL ? f->path : s->dir, b->number, b->rank, b->stage, have, n);
}

static void set_place(const struct mb_shards *s, const struct buffer *b,
                      const struct mb_shards_param *p, enum mb_shards_state which,
                      struct mb_shards_place place)
{
    if (p->tensor != MB_SHARDS_COPY) {
        *mb_shards_state_of(s, which, p->tensor, b->rank) = place;
    }
}

/* ---- whole buffers, of torch.save ---- */

static int64_t number_of(const struct mb_shards *s, const char *argument, int64_t def)
{
    const json_t *j = json_object_get(s->args, argument);
    return json_is_integer(j) && json_integer_value(j) > 0 ? json_integer_value(j) : def;
}

/* More of them are nobody's, and would make products of them too large. */
static int64_t ranks_of(const struct mb_shards *s, const char *argument)
{
    static const int64_t MOST = 1 << 20;
    const int64_t n = number_of(s, argument, 1);
    return n < MOST ? n : MOST;
}

/* With how many elements a bucket may have ended; 0: with none. Later stages and chunks are not
 * cut. Whether ranks that share samples count has changed. */
static size_t list_bounds(const struct mb_shards *s, const struct buffer *b, uint64_t n_all,
                          uint64_t bounds[BOUNDS])
{
    static const int64_t LEAST = 40000000, PER_RANK = 1000000;
    const int64_t dp = ranks_of(s, "data_parallel_size");
    const int64_t n_buckets = number_of(s, "ddp_num_buckets", 0);
    const int64_t size = number_of(s, "ddp_bucket_size", 0);
    size_t n = 0;
    if (b->stage == 0 && b->chunk == 0 &&
        json_is_true(json_object_get(s->args, "overlap_grad_reduce"))) {
        const int64_t ranks[] = {dp, dp * ranks_of(s, "context_parallel_size")};
        for (int i = 0; i < 2; i++) {
            const int64_t by_ranks = PER_RANK * ranks[i] > LEAST ? PER_RANK * ranks[i] : LEAST;
            bounds[n++] = n_buckets > 0 ? n_all / (uint64_t)n_buckets
                          : size > 0    ? (uint64_t)size
                                        : (uint64_t)by_ranks;
        }
    }
    bounds[n++] = 0;
    return n;
}

static int cut_whole(const struct mb_shards *s, const struct mb_shards_file *f, struct buffer *b,
                     uint64_t n_all, uint64_t have, struct mb_err *err)
{
    uint64_t bounds[BOUNDS];
    const size_t n = list_bounds(s, b, n_all, bounds);
    for (size_t i = 0; i < n; i++) {
        uint64_t sum = 0;
        b->n_sizes = mb_param_buffer_cut(b->p, b->n, bounds[i], b->sizes);
        for (size_t k = 0; k < b->n_sizes; k++) {
            sum += b->sizes[k];
        }
        if (sum == have && mb_param_buffer_fill(b->p, b->n, b->sizes, b->n_sizes) == 0) {
            return 0;
        }
    }
    return does_not_fit(s, f, b, have, err);
}

static int take_whole(struct mb_shards *s, const struct mb_shards_file *f, const char *prefix,
                      struct buffer *b, const struct mb_shards_param *params, uint64_t n_all,
                      struct mb_err *err)
{
    int rc = 0;
    for (int k = 0; k < MB_SHARDS_STATES && rc == 0; k++) {
        char name[NAME_BYTES];
        snprintf(name, sizeof name, "%s%zu.0.%s", prefix, b->number, KEYS[k]);
        const struct mb_torch_tensor *t = mb_shards_look_up(f, name);
        if (t == NULL || t->n_dims != 1 || t->dtype != MB_ST_F32) {
            return mb_err_set(err, MB_ECORRUPT,
                              "%s: tensor %s is missing, or no list of fp32 numbers: the buffers "
                              "are not as Megatron-LM saves them since 2024",
                              f->path, name);
        }
        rc = cut_whole(s, f, b, n_all, t->n, err);
        uint64_t bucket_at = 0;
        for (size_t i = 0, bucket = 0; i < b->n && rc == 0; i++) {
            for (; bucket < b->p[i].bucket; bucket++) {
                bucket_at += b->sizes[bucket];
            }
            set_place(s, b, &params[b->which[i]], (enum mb_shards_state)k,
                      (struct mb_shards_place){
                          .torch = f->torch, .in_torch = t, .from = bucket_at + b->p[i].begin});
        }
    }
    return rc;
}

/* ---- buckets, of torch_dist ---- */

/* Gradients are of the same kind, or fp32. NULL: there is no such bucket. */
static const struct mb_dist_tensor *find_bucket(const struct mb_shards *s, const struct buffer *b,
                                                size_t bucket, const char *key)
{
    static const char *const NAMES[] = {
        [MB_ST_F32] = "float32", [MB_ST_F16] = "float16", [MB_ST_BF16] = "bfloat16"};
    const struct mb_dist_tensor *t = NULL;
    for (int i = 0; i < 2 && t == NULL; i++) {
        char name[NAME_BYTES];
        snprintf(name, sizeof name,
                 "optimizer.distributed.dp_group_idx_%" PRIu64
                 ".gbuf_idx_%zu.dtype_(torch.%s, torch.%s).bucket_idx_%zu.%s",
                 b->stage * s->run.tp + b->rank, b->number, NAMES[b->dtype],
                 NAMES[i == 0 ? MB_ST_F32 : b->dtype], bucket, key);
        t = mb_dist_find(s->dist, name);
    }
    return t;
}

static int take_bucket(struct mb_shards *s, struct buffer *b, const struct mb_shards_param *params,
                       size_t bucket, enum mb_shards_state which, struct mb_err *err)
{
    const struct mb_dist_tensor *t = find_bucket(s, b, bucket, KEYS[which]);
    int rc = t != NULL ? mb_dist_use(s->dist, t, err)
                       : mb_err_set(err, MB_ECORRUPT,
                                    "%s: bucket %zu of buffer %zu of the optimizer of "
                                    "tensor-parallel rank %" PRIu64 ", stage %" PRIu64 " has no %s",
                                    s->dir, bucket, b->number, b->rank, b->stage, KEYS[which]);
    if (rc == 0 && (t->n_dims != 1 || t->n != b->sizes[bucket] ||
                    (which == MB_SHARDS_MASTER && t->dtype != MB_ST_F32))) {
        rc = mb_err_set(err, MB_ECORRUPT,
                        "%s: tensor %s is of another size than the bucket's others, or of other "
                        "numbers than F32",
                        s->dir, t->name);
    }
    for (size_t i = 0; i < b->n && rc == 0; i++) {
        if (b->p[i].bucket == bucket) {
            set_place(s, b, &params[b->which[i]], which,
                      (struct mb_shards_place){.in_dist = t, .from = b->p[i].begin});
        }
    }
    return rc;
}

static int take_buckets(struct mb_shards *s, struct buffer *b, const struct mb_shards_param *params,
                        struct mb_err *err)
{
    const struct mb_dist_tensor *t;
    uint64_t have = 0;
    int rc = 0;
    b->n_sizes = 0;
    while ((t = find_bucket(s, b, b->n_sizes, KEYS[MB_SHARDS_MASTER])) != NULL &&
           b->n_sizes < b->n) {
        b->sizes[b->n_sizes++] = t->n;
        have += t->n;
    }
    if (t != NULL || mb_param_buffer_fill(b->p, b->n, b->sizes, b->n_sizes) != 0) {
        return does_not_fit(s, NULL, b, have, err);
    }
    for (size_t i = 0; i < b->n_sizes && rc == 0; i++) {
        for (int k = 0; k < MB_SHARDS_STATES && rc == 0; k++) {
            rc = take_bucket(s, b, params, i, (enum mb_shards_state)k, err);
        }
    }
    return rc;
}

/* ---- a rank's buffers ---- */

struct room {
    size_t *which;
    struct mb_buffered_param *p;
    uint64_t *sizes;
};

static void fill_buffer(const struct mb_shards *s, const struct mb_shards_param *params, size_t n,
                        const struct room *room, struct buffer *b)
{
    b->n = 0;
    for (size_t i = n; i-- > 0;) {
        if (params[i].chunk == b->chunk && params[i].dtype == b->dtype) {
            room->which[b->n] = i;
            room->p[b->n++] =
                (struct mb_buffered_param){.n = params[i].n, .is_shared = is_shared(s, &params[i])};
        }
    }
    b->which = room->which;
    b->p = room->p;
    b->sizes = room->sizes;
}

int mb_shards_take_buffers(struct mb_shards *s, const struct mb_shards_file *f, const char *prefix,
                           uint64_t stage, uint64_t rank, const struct mb_shards_param *params,
                           size_t n, struct mb_err *err)
{
    const struct room room = {.which = mb_calloc(n + 1, sizeof(size_t)),
                              .p = mb_calloc(n + 1, sizeof(struct mb_buffered_param)),
                              .sizes = mb_calloc(n + 1, sizeof(uint64_t))};
    struct buffer b = {.stage = stage, .rank = rank};
    unsigned kinds = 0; /* of the chunk, that were there before */
    uint64_t n_all = 0;
    int rc = room.which != NULL && room.p != NULL && room.sizes != NULL
                 ? 0
                 : mb_shards_no_memory(s, err);
    for (size_t i = 0; i < n; i++) {
        n_all += params[i].n;
    }
    for (size_t i = 0; i < n && rc == 0; i++) {
        const unsigned kind = 1u << params[i].dtype;
        kinds = i > 0 && params[i].chunk != params[i - 1].chunk ? 0 : kinds;
        if ((kinds & kind) != 0) {
            continue;
        }
        kinds |= kind;
        b.chunk = params[i].chunk;
        b.dtype = params[i].dtype;
        fill_buffer(s, params, n, &room, &b);
        rc = f != NULL ? take_whole(s, f, prefix, &b, params, n_all, err)
                       : take_buckets(s, &b, params, err);
        b.number++;
    }
    mb_free(room.which);
    mb_free(room.p);
    mb_free(room.sizes);
    return rc;
}

/* ---- whether they are whose they are taken for ---- */

/* How far a number of a kind is from what it was rounded from, as a part of it. */
static float rounding(enum mb_st_dtype dtype)
{
    return dtype == MB_ST_BF16 ? 0x1p-7f : dtype == MB_ST_F16 ? 0x1p-9f : 0;
}

static int are_alike(const float *weights, const float *masters, size_t n, enum mb_st_dtype dtype)
{
    for (size_t i = 0; i < n; i++) {
        const float way = fabsf(weights[i] - masters[i]);
        const float least = dtype == MB_ST_F16 ? 0x1p-24f : 0; /* its numbers are no smaller */
        if (!(way <= fabsf(masters[i]) * rounding(dtype) + least) &&
            !(isnan(weights[i]) && isnan(masters[i])) && weights[i] != masters[i]) {
            return 0;
        }
    }
    return 1;
}

static int refuse(const struct mb_shards *s, size_t i, struct mb_err *err)
{
    return mb_err_set(err, MB_ECORRUPT,
                      "%s: what the distributed optimizer has in the place of %s are not its "
                      "weights: its buffers are laid out in another way than is known, or were "
                      "saved from the wrong places",
                      s->dir, s->layout.tensors[i].name);
}

/* Elements [from, from + n), PIECE at most; room: for twice as many. */
static int compare_piece(struct mb_shards *s, size_t i, uint64_t from, size_t n, float *room,
                         struct mb_err *err)
{
    const enum mb_st_dtype dtype = (enum mb_st_dtype)(s->compared[i] - 1);
    float *weights = room, *masters = room + PIECE;
    int rc = mb_shards_read(s, &s->tensors[i], from, n, weights, err);
    if (rc == 0) {
        rc = mb_shards_read_state(s, MB_SHARDS_MASTER, &s->tensors[i], from, n, masters, err);
    }
    return rc != 0 || are_alike(weights, masters, n, dtype) ? rc : refuse(s, i, err);
}

static int compare_range(struct mb_shards *s, size_t i, uint64_t from, uint64_t n, float *room,
                         struct mb_err *err)
{
    int rc = 0;
    for (uint64_t at = 0; at < n && rc == 0; at += PIECE) {
        const size_t k = n - at < PIECE ? (size_t)(n - at) : PIECE;
        rc = compare_piece(s, i, from + at, k, room, err);
    }
    return rc;
}

int mb_shards_compare_masters(struct mb_shards *s, size_t i, enum mb_st_dtype dtype,
                              struct mb_err *err)
{
    const struct mb_megatron_part p = mb_megatron_part(&s->layout.tensors[i], s->states_tp);
    const uint64_t n = p.run < COMPARED ? p.run : COMPARED;
    if (s->compared == NULL) {
        s->compared = mb_calloc(s->layout.n, sizeof *s->compared);
    }
    float *room = s->compared != NULL ? mb_reallocarray(NULL, 2 * PIECE, sizeof *room) : NULL;
    if (room == NULL) {
        return mb_shards_no_memory(s, err);
    }
    s->compared[i] = (uint8_t)(dtype + 1);
    int rc = 0;
    for (uint64_t rank = 0; rank < p.stride / p.run && rc == 0; rank++) {
        rc = compare_range(s, i, rank * p.run, n, room, err);
    }
    mb_free(room);
    return rc;
}

int mb_shards_compare_all_masters(struct mb_shards *s, const struct mb_torch_watch *watch,
                                  struct mb_err *err)
{
    float *room = s->compared != NULL ? mb_reallocarray(NULL, 2 * PIECE, sizeof *room) : NULL;
    int rc = s->compared == NULL || room != NULL ? 0 : mb_shards_no_memory(s, err);
    for (size_t i = 0; s->compared != NULL && i < s->layout.n && rc == 0; i++) {
        const struct mb_st_tensor *t = &s->tensors[i];
        if (s->compared[i] != 0) {
            rc = compare_range(s, i, 0, (t->end - t->begin) / sizeof(float), room, err);
            rc = rc == 0 && watch != NULL ? watch->cb(watch->arg, err) : rc;
        }
    }
    mb_free(room);
    return rc;
}
