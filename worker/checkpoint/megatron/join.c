/*
 *  1. Checksums of all files are compared before anything is written.
 *  2. Tensor by tensor, a piece at a time, into the file of weights and that of the optimizer; then
 *     what belongs to them.
 */
#include "worker/checkpoint/megatron/join.h"

#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "worker/checkpoint/moments.h"

enum { PIECE_FLOATS = 1 << 18 };

static int copy(struct mb_weights *s, struct mb_st_writer *w, float *piece, struct mb_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < mb_weights_n(s) && rc == 0; i++) {
        const struct mb_st_tensor *t = mb_weights_tensor(s, i);
        const uint64_t n = (t->end - t->begin) / sizeof *piece;
        for (uint64_t at = 0; at < n && rc == 0;) {
            const size_t k = n - at < PIECE_FLOATS ? (size_t)(n - at) : PIECE_FLOATS;
            rc = mb_weights_read(s, t, at, k, piece, err);
            if (rc == 0) {
                rc = mb_st_write(w, piece, k * sizeof *piece, err);
            }
            at += k;
        }
    }
    return rc;
}

static int write_file(void *arg, const char *path, struct mb_st_tensor *tensors, size_t n,
                      struct mb_err *err)
{
    const struct mb_st_meta meta = {"format", "pt"};
    struct mb_st_writer *w = NULL;
    float *piece = mb_alloc(PIECE_FLOATS * sizeof *piece);
    uint64_t size, crc;
    int rc = piece != NULL ? mb_st_create(path, tensors, n, &meta, 1, &w, err)
                           : mb_err_set(err, MB_ENOMEM, "%s: out of memory", path);
    if (rc == 0) {
        rc = copy(arg, w, piece, err);
        if (rc == 0) {
            rc = mb_st_finish(w, &size, &crc, err);
        } else {
            mb_st_abandon(w);
        }
    }
    mb_free(piece);
    return rc;
}

static int read_moment(void *arg, int which, size_t tensor, uint64_t from, size_t n, float *out,
                       struct mb_err *err)
{
    struct mb_weights *w = arg;
    return mb_weights_read_moment(w, which, mb_weights_tensor(w, tensor), from, n, out, err);
}

/* Before state.json speaks of it. */
static int write_optimizer(struct mb_weights *w, const char *dir, int64_t iteration,
                           struct mb_err *err)
{
    char *iter = mb_weights_dir(dir, iteration);
    int rc = iter != NULL ? mb_fs_mkdir_p(iter, 0755, err)
                          : mb_err_set(err, MB_ENOMEM, "%s: out of memory", dir);
    if (rc == 0) {
        rc = mb_moments_write(iter, mb_weights_tensor(w, 0), mb_weights_n(w), read_moment, w, err);
    }
    mb_free(iter);
    return rc;
}

int mb_megatron_join(struct mb_weights *w, const struct mb_checkpoint_state *s, const char *dir,
                     struct mb_err *err)
{
    const size_t n = mb_weights_n(w);
    struct mb_checkpoint_state state = *s;
    struct mb_st_tensor *tensors = mb_calloc(n, sizeof *tensors);
    int rc = tensors != NULL ? 0 : mb_err_set(err, MB_ENOMEM, "%s: out of memory", dir);
    if (rc == 0) {
        memcpy(tensors, mb_weights_tensor(w, 0), n * sizeof *tensors);
        state.iteration = s->iteration > 0 ? s->iteration : 1;
        state.is_megatrons = 0;
        mb_err_clear(&state.optimizer_refused);
        state.has_optimizer = w->has_optimizer;
        rc = w->has_optimizer ? write_optimizer(w, dir, state.iteration, err) : 0;
    }
    if (rc == 0) {
        rc = mb_weights_write(dir, tensors, n, &state, write_file, w, err);
    }
    mb_free(tensors);
    return rc;
}
