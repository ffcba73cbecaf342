/*
 * Loading.
 *
 *  1. find: rank 0 reads the tracker and tells the others.
 *  2. load_state: rank 0 reads state.json and broadcasts its text; all decode it. Of a checkpoint
 *     of Megatron-LM's rank 0 makes that text from what its files say (weights.h).
 *  3. load: rank 0 reads the weights, in whichever format they are, checks every name and shape
 * against the model, and broadcasts the flat buffer. Each rank looks through the optimizer files of
 * its own directory that are of the size which state.json says, and reads the parts that cover its
 * range; without the distributed optimizer ranks then exchange their ranges.
 *  4. Of Megatron-LM's optimizer rank 0 reads all, like the weights: ranks get their ranges of it
 *     from there.
 *  5. Ranks that share a model get their parts by an exchange of what rank 0 reads of the weights,
 *     and of the same ranges of the optimizer.
 *
 * What has checksums is compared with them before it is used.
 * Failures: a tracker that holds no positive number, a missing or damaged file (a flipped byte
 * too), a tensor that is missing, unknown or of another shape, a range that no file covers: the
 * text names the file, the tensor and both shapes. All ranks return together.
 */
#include "worker/checkpoint/common.h"
#include "worker/checkpoint/exchange.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"
#include "worker/checkpoint/moments.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/weights.h"

static const char WHAT[] = "loading the checkpoint";

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "checkpoint: out of memory");
}

/* ---- tracker ---- */

int mb_checkpoint_read_tracker(const char *dir, int64_t *iteration, struct mb_err *err)
{
    struct mb_buf text = {0};
    char *path = mb_path_join(dir, MB_CHECKPOINT_TRACKER);
    int rc = path != NULL ? mb_fs_read(path, 64, &text, err) : no_memory(err);
    *iteration = 0;
    if (rc == MB_ENOENT) {
        rc = 0;
    } else if (rc == 0) {
        while (text.len > 0 && isspace(text.data[text.len - 1])) {
            text.data[--text.len] = '\0';
        }
        if (strcmp(mb_buf_str(&text), "release") == 0) {
            *iteration = MB_CHECKPOINT_RELEASE;
        } else if (mb_parse_i64(mb_buf_str(&text), 1, INT64_MAX, "iteration", iteration, NULL) !=
                   0) {
            rc = mb_err_set(err, MB_ECORRUPT,
                            "ERROR: Invalid metadata file %s: \"%s\" is no iteration", path,
                            mb_buf_str(&text));
        }
    }
    mb_buf_close(&text);
    mb_free(path);
    return rc;
}

int mb_checkpoint_find(struct mb_comm *comm, const char *dir, int64_t *iteration,
                       struct mb_err *err)
{
    *iteration = 0;
    int rc = 0;
    /* Where nothing can be renamed, what is not there is named later. */
    mb_checkpoint_put_back(dir, NULL);
    if (mb_comm_rank(comm) == 0) {
        rc = mb_checkpoint_read_tracker(dir, iteration, err);
    }
    rc = mb_checkpoint_agree(comm, rc, WHAT, err);
    if (rc != 0) {
        return rc;
    }
    mb_comm_broadcast(comm, NULL, iteration, 1, MB_COMM_I64, 0);
    return mb_comm_synchronize(comm, err);
}

/* ---- state ---- */

static char *file_path(const char *dir, int64_t iteration, const char *name)
{
    char iter[32];
    mb_checkpoint_iter_name(iteration, iter);
    return mb_asprintf("%s/%s/%s", dir, iter, name);
}

/* On rank 0: the text; elsewhere buf is empty. */
static int broadcast_text(struct mb_comm *comm, struct mb_buf *text, struct mb_err *err)
{
    int64_t n = (int64_t)text->len;
    mb_comm_broadcast(comm, NULL, &n, 1, MB_COMM_I64, 0);
    int rc = mb_comm_synchronize(comm, err);
    if (rc != 0) {
        return rc;
    }
    size_t words = ((size_t)n + 7) / 8; /* buffers travel in 8-byte elements */
    int64_t *copy = mb_calloc(words + 1, sizeof *copy);
    rc = mb_checkpoint_agree(comm, copy != NULL ? 0 : no_memory(err), WHAT, err);
    if (rc == 0) {
        memcpy(copy, mb_buf_str(text), text->len);
        mb_comm_broadcast(comm, NULL, copy, words, MB_COMM_I64, 0);
        rc = mb_comm_synchronize(comm, err);
    }
    if (rc == 0) {
        mb_buf_reset(text);
        rc = mb_buf_add(text, copy, (size_t)n) == 0 ? 0 : no_memory(err);
    }
    mb_free(copy);
    return rc;
}

/* The text of state.json, of a checkpoint of Megatron-LM's as it would be. */
static int read_state(const char *dir, int64_t iteration, const char *path, struct mb_buf *text,
                      struct mb_err *err)
{
    char *iter_dir = mb_weights_dir(dir, iteration);
    struct mb_weights w = {0};
    struct mb_checkpoint_state s = {0};
    const struct mb_checkpoint_model no_layout = {0};
    int rc = iter_dir != NULL ? 0 : no_memory(err);
    if (rc == 0 && !mb_weights_are_megatrons(iter_dir)) {
        rc = mb_fs_read(path, MB_CHECKPOINT_STATE_MAX, text, err);
    } else if (rc == 0) {
        rc = mb_weights_open(iter_dir, &w, err);
        if (rc == 0) {
            rc = mb_weights_state(w.megatron, iter_dir, iteration, &s, err);
        }
        if (rc == 0) {
            rc = mb_checkpoint_state_encode(&no_layout, &s, text, err);
        }
    }
    mb_checkpoint_state_close(&s);
    mb_weights_close(&w);
    mb_free(iter_dir);
    return rc;
}

int mb_checkpoint_load_state(struct mb_comm *comm, const char *dir, int64_t iteration,
                             struct mb_checkpoint_state *out, struct mb_err *err)
{
    struct mb_buf text = {0};
    char *path = file_path(dir, iteration, MB_CHECKPOINT_STATE_FILE);
    int rc = path != NULL ? 0 : no_memory(err);
    memset(out, 0, sizeof *out);
    if (rc == 0 && mb_comm_rank(comm) == 0) {
        rc = read_state(dir, iteration, path, &text, err);
    }
    rc = mb_checkpoint_agree(comm, rc, WHAT, err);
    if (rc == 0) {
        rc = broadcast_text(comm, &text, err);
    }
    if (rc == 0) {
        rc = mb_checkpoint_state_decode(path, text.data, text.len, out, err);
    }
    if (rc == 0 && iteration == MB_CHECKPOINT_RELEASE) {
        out->iteration = iteration;
    }
    if (rc == 0 && out->iteration != iteration) {
        rc = mb_err_set(err, MB_ECORRUPT, "%s: says iteration %" PRId64 ", the directory %" PRId64,
                        path, out->iteration, iteration);
        mb_checkpoint_state_close(out);
    }
    mb_buf_close(&text);
    mb_free(path);
    return rc;
}

/* ---- weights ---- */

/* Floats of a tensor, from element `from` on, into device memory; without a device into the host's.
 */
static int read_floats(struct mb_device *d, struct mb_st_reader *r, const struct mb_st_tensor *t,
                       size_t from, float *dst, size_t n, float *piece, struct mb_err *err)
{
    if (d == NULL) {
        return mb_st_read(r, t, from * sizeof *dst, dst, n * sizeof *dst, err);
    }
    while (n > 0) {
        size_t k = n < MB_CHECKPOINT_PIECE ? n : MB_CHECKPOINT_PIECE;
        int rc = mb_st_read(r, t, from * sizeof *dst, piece, k * sizeof *dst, err);
        if (rc != 0) {
            return rc;
        }
        d->ops->copy_in(d->ctx, d->stream, dst, piece, k * sizeof *dst);
        from += k;
        dst += k;
        n -= k;
    }
    return 0;
}

static int check_tensor(const char *path, const struct mb_checkpoint_tensor *want,
                        const struct mb_st_tensor *have, struct mb_err *err)
{
    if (have == NULL) {
        return mb_err_set(err, MB_ECORRUPT, "%s: tensor %s is missing", path, want->name);
    }
    uint64_t s1 = have->n_dims > 1 ? have->shape[1] : 1;
    if (have->dtype != MB_ST_F32 || have->n_dims != want->n_dims ||
        have->shape[0] != want->shape[0] || s1 != (want->n_dims > 1 ? want->shape[1] : 1)) {
        return mb_err_set(err, MB_EINVAL,
                          "%s: tensor %s: %d dimensions [%" PRIu64 ", %" PRIu64
                          "] in the checkpoint, %d [%zu, %zu] in the model (fp32 expected)",
                          path, want->name, have->n_dims, have->shape[0], s1, want->n_dims,
                          want->shape[0], want->shape[1]);
    }
    return 0;
}

/* *w is to be closed in either case. */
static int open_model(const struct mb_checkpoint_model *m, const char *iter_dir,
                      struct mb_weights *w, struct mb_err *err)
{
    char *path = mb_path_join(iter_dir, MB_CHECKPOINT_MODEL_FILE);
    int rc = path != NULL ? mb_weights_open(iter_dir, w, err) : no_memory(err);
    const char *name = w->megatron != NULL ? iter_dir : path;
    for (size_t i = 0; i < m->n_tensors && rc == 0; i++) {
        rc = check_tensor(name, &m->tensors[i], mb_weights_find(w, m->tensors[i].name), err);
    }
    if (rc == 0 && mb_weights_n(w) != m->n_tensors) {
        rc = mb_err_set(err, MB_EINVAL, "%s: %zu tensors, the model has %zu", name, mb_weights_n(w),
                        m->n_tensors);
    }
    mb_free(path);
    return rc;
}

/* Comparing Megatron-LM's files may take longer than an operation of the ranks: while it goes on,
 * those that wait for rank 0 hear of it. */
static int tell(struct mb_comm *comm, int64_t goes_on, struct mb_err *err)
{
    mb_comm_broadcast(comm, NULL, &goes_on, 1, MB_COMM_I64, 0);
    return mb_comm_synchronize(comm, err);
}

static int goes_on(void *arg, struct mb_err *err)
{
    return tell(arg, 1, err);
}

static int hear_the_end(struct mb_comm *comm, struct mb_err *err)
{
    int64_t more = 1;
    int rc = 0;
    while (rc == 0 && more) {
        mb_comm_broadcast(comm, NULL, &more, 1, MB_COMM_I64, 0);
        rc = mb_comm_synchronize(comm, err);
    }
    return rc;
}

/* And the optimizer, which no rank but this one reads. Ours is compared with its checksums as it is
 * read, Megatron-LM's is read once before. */
static int open_all(const struct mb_checkpoint_model *m, const char *iter_dir,
                    const struct mb_checkpoint_state *s, struct mb_weights *w, struct mb_err *err)
{
    int rc = open_model(m, iter_dir, w, err);
    if (rc == 0 && s->is_megatrons != (w->megatron != NULL)) {
        rc = mb_err_set(err, MB_ECORRUPT, "%s: its files are others than a moment ago", iter_dir);
    }
    if (rc == 0 && s->is_megatrons && m->exp_avg != NULL) {
        rc = mb_weights_take_optimizer(w, iter_dir, s, err);
    }
    const struct mb_torch_watch watch = {goes_on, m->comm};
    return rc == 0 && s->is_megatrons ? mb_shards_verify(w->megatron, &watch, err) : rc;
}

/* On rank 0; the others wait. rc: what went wrong here before. All ranks call it. */
static int open_on_first(const struct mb_checkpoint_model *m, const char *iter_dir,
                         const struct mb_checkpoint_state *s, struct mb_weights *w, int rc,
                         struct mb_err *err)
{
    const int is_first = mb_comm_rank(m->comm) == 0;
    struct mb_err of_comm;
    if (is_first && rc == 0) {
        rc = open_all(m, iter_dir, s, w, err);
    }
    if (!s->is_megatrons) {
        return rc;
    }
    const int told = is_first ? tell(m->comm, 0, &of_comm) : hear_the_end(m->comm, &of_comm);
    if (rc == 0 && told != 0) {
        *err = of_comm;
        rc = told;
    }
    return rc;
}

/* One tensor of the weights into device memory. */
static int read_weights(struct mb_device *d, struct mb_weights *w, const struct mb_st_tensor *t,
                        const struct mb_master *dst, size_t begin, size_t n, float *piece,
                        struct mb_err *err)
{
    int rc = 0;
    for (size_t at = 0; at < n && rc == 0;) {
        const size_t k = n - at < MB_CHECKPOINT_PIECE ? n - at : MB_CHECKPOINT_PIECE;
        rc = mb_weights_read(w, t, at, k, piece, err);
        if (rc == 0) {
            mb_master_copy_in(d, dst, begin + at, k, piece);
        }
        at += k;
    }
    return rc;
}

static int read_model(const struct mb_checkpoint_model *m, struct mb_weights *w, float *piece,
                      struct mb_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < m->n_tensors && rc == 0; i++) {
        const struct mb_checkpoint_tensor *t = &m->tensors[i];
        rc = read_weights(m->dev, w, mb_weights_find(w, t->name), &m->weights, t->offset, t->n,
                          piece, err);
    }
    return rc == 0 ? m->dev->ops->synchronize(m->dev->ctx, m->dev->stream, err) : rc;
}

/* ---- optimizer ---- */

struct cover {
    size_t begin, end; /* of the flat buffer */
};

static int by_begin(const void *a, const void *b)
{
    const struct cover *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

static int n_moments_of(const struct mb_checkpoint_model *m)
{
    return m->exp_avg_sq != NULL ? MB_MOMENTS_ADAM : MB_MOMENTS_SGD;
}

static float *moment_of(const struct mb_checkpoint_model *m, int which)
{
    return which == 0 ? m->exp_avg : m->exp_avg_sq;
}

/* Reads what the shard has of our range; *part says what that was. */
static int read_shard(const struct mb_checkpoint_model *m, const char *path, float *piece,
                      struct cover *part, struct mb_err *err)
{
    struct mb_st_reader *r = NULL;
    struct cover has = {0, 0};
    const int n_moments = n_moments_of(m);
    int rc = mb_st_open(path, &r, err);
    if (rc == 0) {
        rc = mb_moments_range(path, r, m->n_elements, n_moments, &has.begin, &has.end, err);
    }
    if (rc == 0) {
        size_t begin = has.begin > m->state_begin ? has.begin : m->state_begin;
        size_t end = has.end < m->state_end ? has.end : m->state_end;
        *part = (struct cover){begin, end > begin ? end : begin};
        size_t n = part->end - part->begin, from = part->begin - has.begin;
        for (int i = 0; i < n_moments && n > 0 && rc == 0; i++) {
            rc = read_floats(m->dev, r, mb_st_find(r, mb_moments_name(n_moments, i)), from,
                             moment_of(m, i) + (begin - m->state_begin), n, piece, err);
        }
    }
    mb_st_close(r);
    return rc;
}

static int is_shard(const struct dirent *e)
{
    return mb_moments_is_file(e->d_name, 0);
}

static int check_covered(const struct mb_checkpoint_model *m, const char *dir, int64_t world_size,
                         struct cover *parts, size_t n_parts, struct mb_err *err)
{
    size_t at = m->state_begin;
    qsort(parts, n_parts, sizeof *parts, by_begin);
    for (size_t i = 0; i < n_parts; i++) {
        if (parts[i].begin > at) {
            break;
        }
        at = parts[i].end > at ? parts[i].end : at;
    }
    return at < m->state_end ? mb_moments_missing(dir, m->n_elements, world_size, at, err) : 0;
}

static int read_optimizer(const struct mb_checkpoint_model *m, const char *dir, int64_t world_size,
                          float *piece, struct mb_err *err)
{
    struct dirent **list = NULL;
    int n = scandir(dir, &list, is_shard, alphasort);
    if (n < 0) {
        return mb_err_sys(err, errno, "%s", dir);
    }
    struct cover *parts = mb_calloc((size_t)n + 1, sizeof *parts);
    size_t n_parts = 0;
    int rc = parts != NULL ? 0 : no_memory(err);
    for (int i = 0; i < n && rc == 0; i++) {
        if (!mb_moments_is_file(list[i]->d_name, world_size)) {
            continue;
        }
        char *path = mb_path_join(dir, list[i]->d_name);
        rc = path != NULL ? read_shard(m, path, piece, &parts[n_parts++], err) : no_memory(err);
        mb_free(path);
    }
    if (rc == 0) {
        rc = check_covered(m, dir, world_size, parts, n_parts, err);
    }
    if (rc == 0 && m->dev != NULL) {
        rc = m->dev->ops->synchronize(m->dev->ctx, m->dev->stream, err);
    }
    for (int i = 0; i < n; i++) {
        free(list[i]); /* scandir's own */
    }
    free(list);
    mb_free(parts);
    return rc;
}

/* Who holds the whole optimizer reads only what a sharded one would, and gets the rest from its
 * peers: ranks with a directory each have no more than that on disk. */
static int load_optimizer(const struct mb_checkpoint_model *m, const char *dir, int64_t world_size,
                          float *piece, struct mb_err *err)
{
    struct mb_checkpoint_model part = *m;
    int whole = m->state_begin == 0 && m->state_end == m->n_elements;
    if (whole) {
        mb_comm_range(m->n_elements, mb_comm_world_size(m->comm), mb_comm_rank(m->comm),
                      &part.state_begin, &part.state_end);
        part.exp_avg += part.state_begin;
        part.exp_avg_sq = m->exp_avg_sq != NULL ? m->exp_avg_sq + part.state_begin : NULL;
    }
    int rc =
        mb_checkpoint_agree(m->comm, read_optimizer(&part, dir, world_size, piece, err), WHAT, err);
    if (rc == 0 && whole) {
        for (int i = 0; i < n_moments_of(m); i++) {
            mb_comm_allgather(m->comm, m->dev, moment_of(m, i), m->n_elements, MB_COMM_F32);
        }
        rc = mb_comm_synchronize(m->comm, err);
    }
    return rc;
}

/* ---- a model that ranks share ---- */

struct reading {
    const struct mb_checkpoint_model *m;
    struct mb_weights w;
    int moment; /* 0, 1: that; -1: the weights */
};

/* Elements [begin, end) of the whole flat buffer; gaps between tensors stay as they are. */
static int read_window(void *arg, float *p, size_t begin, size_t end, struct mb_err *err)
{
    struct reading *a = arg;
    int rc = 0;
    for (size_t i = 0; i < a->m->n_tensors && rc == 0; i++) {
        const struct mb_checkpoint_tensor *t = &a->m->tensors[i];
        size_t from = t->offset > begin ? t->offset : begin;
        size_t to = t->offset + t->n < end ? t->offset + t->n : end;
        if (from < to) {
            const struct mb_st_tensor *have = mb_weights_find(&a->w, t->name);
            const size_t at = from - t->offset, n = to - from;
            float *to_p = p + (from - begin);
            rc = a->moment < 0 ? mb_weights_read(&a->w, have, at, n, to_p, err)
                               : mb_weights_read_moment(&a->w, a->moment, have, at, n, to_p, err);
        }
    }
    return rc;
}

/* To host memory of this rank's part, [begin, end) of it, and from there to the device. */
static int take_part(const struct mb_checkpoint_model *m, const struct mb_exchange_side *give,
                     const struct mb_master *device, size_t begin, size_t end, float *memory,
                     struct mb_err *err)
{
    float *host = memory + MB_EXCHANGE_WINDOW;
    const struct mb_exchange_side take = {host, begin, end, m->layout != NULL, NULL, NULL};
    memset(host, 0, (end - begin) * sizeof *host); /* gaps stay zeros */
    int rc = mb_checkpoint_exchange(m, m->comm, give, &take, memory, err);
    if (rc == 0) {
        mb_master_copy_in(m->dev, device, 0, end - begin, host);
        rc = m->dev->ops->synchronize(m->dev->ctx, m->dev->stream, err);
    }
    return rc;
}

/* What load_optimizer() would read of a model that is not shared, exchanged for the rank's part. */
static int share_optimizer(const struct mb_checkpoint_model *m, const char *dir, int64_t world_size,
                           float *memory, float *range, struct mb_err *err)
{
    struct mb_checkpoint_model whole = *m;
    whole.dev = NULL;
    mb_comm_range(m->n_elements, mb_comm_world_size(m->comm), mb_comm_rank(m->comm),
                  &whole.state_begin, &whole.state_end);
    whole.exp_avg = range;
    whole.exp_avg_sq = m->exp_avg_sq != NULL ? range + (whole.state_end - whole.state_begin) : NULL;
    int rc =
        mb_checkpoint_agree(m->comm, read_optimizer(&whole, dir, world_size, NULL, err), WHAT, err);
    for (int i = 0; i < n_moments_of(m) && rc == 0; i++) {
        const struct mb_exchange_side give = {
            .p = moment_of(&whole, i), .begin = whole.state_begin, .end = whole.state_end};
        const struct mb_master states = {.whole = moment_of(m, i)};
        rc = take_part(m, &give, &states, m->state_begin, m->state_end, memory, err);
    }
    return rc;
}

/* Of Megatron-LM's files, which rank 0 has open. memory: a window, and the range after it. */
static int hand_out_moments(const struct mb_checkpoint_model *m, struct reading *reading,
                            float *memory, struct mb_err *err)
{
    int rc = 0;
    for (int i = 0; i < n_moments_of(m) && rc == 0; i++) {
        const int reads = mb_comm_rank(m->comm) == 0;
        const struct mb_exchange_side give = {.read = reads ? read_window : NULL, .arg = reading};
        const struct mb_master states = {.whole = moment_of(m, i)};
        reading->moment = i;
        rc = take_part(m, &give, &states, m->state_begin, m->state_end, memory, err);
    }
    return rc;
}

static int load_shared(const struct mb_checkpoint_model *m, const char *iter_dir,
                       const struct mb_checkpoint_state *s, struct mb_err *err)
{
    const size_t part = MB_EXCHANGE_WINDOW + m->layout->n_elements;
    const size_t range = m->n_elements / mb_comm_world_size(m->comm) + 1;
    struct reading reading = {.m = m, .moment = -1};
    float *memory = mb_alloc((part + (m->exp_avg != NULL ? 2 * range : 0)) * sizeof *memory);
    int rc = memory != NULL ? 0 : no_memory(err);
    rc = open_on_first(m, iter_dir, s, &reading.w, rc, err);
    rc = mb_checkpoint_agree(m->comm, rc, WHAT, err);
    if (rc == 0) {
        const int reads = mb_comm_rank(m->comm) == 0;
        const struct mb_exchange_side give = {.read = reads ? read_window : NULL, .arg = &reading};
        rc = take_part(m, &give, &m->weights, 0, m->layout->n_elements, memory, err);
    }
    if (rc == 0 && m->exp_avg != NULL) {
        rc = s->is_megatrons
                 ? hand_out_moments(m, &reading, memory, err)
                 : share_optimizer(m, iter_dir, s->data_parallel_size, memory, memory + part, err);
    }
    mb_weights_close(&reading.w);
    mb_free(memory);
    return rc;
}

/* ---- all of it ---- */

static void broadcast_weights(const struct mb_checkpoint_model *m)
{
    if (m->weights.whole != NULL) {
        mb_comm_broadcast(m->comm, m->dev, m->weights.whole, m->n_elements, MB_COMM_F32, 0);
        return;
    }
    mb_comm_broadcast(m->comm, m->dev, m->weights.upper, m->n_elements, MB_COMM_BF16, 0);
    mb_comm_broadcast(m->comm, m->dev, m->weights.lower, m->n_elements, MB_COMM_BF16, 0);
}

static int load_whole(const struct mb_checkpoint_model *m, const char *iter_dir,
                      const struct mb_checkpoint_state *s, struct mb_err *err)
{
    const int hands_out = s->is_megatrons && m->exp_avg != NULL;
    const size_t n =
        hands_out ? MB_EXCHANGE_WINDOW + (m->state_end - m->state_begin) : MB_CHECKPOINT_PIECE;
    struct reading reading = {.m = m, .moment = -1};
    float *piece = mb_alloc(n * sizeof *piece);
    int rc = piece != NULL ? 0 : no_memory(err);
    rc = open_on_first(m, iter_dir, s, &reading.w, rc, err);
    if (rc == 0 && mb_comm_rank(m->comm) == 0) {
        rc = read_model(m, &reading.w, piece, err);
    }
    rc = mb_checkpoint_agree(m->comm, rc, WHAT, err);
    if (rc == 0) {
        broadcast_weights(m);
        rc = mb_comm_synchronize(m->comm, err);
    }
    if (rc == 0 && m->exp_avg != NULL) {
        rc = hands_out ? hand_out_moments(m, &reading, piece, err)
                       : load_optimizer(m, iter_dir, s->data_parallel_size, piece, err);
    }
    mb_weights_close(&reading.w);
    mb_free(piece);
    return rc;
}

int mb_checkpoint_load(const struct mb_checkpoint_model *m, const char *dir,
                       const struct mb_checkpoint_state *s, struct mb_err *err)
{
    char *iter_dir = mb_weights_dir(dir, s->iteration);
    int rc = mb_checkpoint_agree(m->comm, iter_dir != NULL ? 0 : no_memory(err), WHAT, err);
    if (rc == 0) {
        rc = m->layout != NULL ? load_shared(m, iter_dir, s, err) : load_whole(m, iter_dir, s, err);
    }
    mb_free(iter_dir);
    return rc;
}
