/*
 *  1. Checksums of all files are compared before anything is written.
 *  2. Tensor by tensor, a piece at a time, into the file of weights; then what belongs to it.
 */
#include "worker/checkpoint/megatron/join.h"

#include <string.h>
#include "base/alloc.h"

enum { PIECE_FLOATS = 1 << 18 };

static int copy(struct mb_shards *s, struct mb_st_writer *w, float *piece, struct mb_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < mb_shards_n_tensors(s) && rc == 0; i++) {
        const struct mb_st_tensor *t = mb_shards_tensor(s, i);
        const uint64_t n = (t->end - t->begin) / sizeof *piece;
        for (uint64_t at = 0; at < n && rc == 0;) {
            const size_t k = n - at < PIECE_FLOATS ? (size_t)(n - at) : PIECE_FLOATS;
            rc = mb_shards_read(s, t, at, k, piece, err);
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

int mb_megatron_join(struct mb_shards *shards, const struct mb_checkpoint_state *s, const char *dir,
                     struct mb_err *err)
{
    const size_t n = mb_shards_n_tensors(shards);
    struct mb_checkpoint_state state = *s;
    struct mb_st_tensor *tensors = mb_calloc(n, sizeof *tensors);
    int rc = tensors != NULL ? mb_shards_verify(shards, err)
                             : mb_err_set(err, MB_ENOMEM, "%s: out of memory", dir);
    if (rc == 0) {
        memcpy(tensors, mb_shards_tensor(shards, 0), n * sizeof *tensors);
        state.iteration = s->iteration > 0 ? s->iteration : 1;
        rc = mb_weights_write(dir, tensors, n, &state, write_file, shards, err);
    }
    mb_free(tensors);
    return rc;
}
