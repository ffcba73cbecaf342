/*
 * What the file .metadata of torch.distributed.checkpoint says: which tensors there are, and in
 * which bytes of which file each chunk of one is; and where the optimizer's objects are, and that
 * of the arguments, if it is there (megatron-core 0.19 has no file for that). Something
 * wrong with one of the optimizer's is no error before somebody wants it. Pure.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_MEGATRON_DIST_META_H
#define MOBULA_WORKER_CHECKPOINT_MEGATRON_DIST_META_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"
#include "worker/checkpoint/safetensors.h"

enum {
    MB_DIST_DIMS_MAX = 4,
    MB_DIST_CHUNKS_MAX = 1 << 14,     /* of a tensor */
    MB_DIST_ALL_CHUNKS_MAX = 1 << 21, /* of all: 208 MiB */
    MB_DIST_TENSORS_MAX = 1 << 20
};

#define MB_DIST_COMMON "common_state/shard_0_1" /* an object */

struct mb_dist_chunk {
    uint64_t offset[MB_DIST_DIMS_MAX], size[MB_DIST_DIMS_MAX]; /* in the whole tensor */
    uint64_t n;                                                /* elements, 1 at least */
    size_t file;                                               /* one of the list */
    uint64_t at, n_bytes;                                      /* in it: a zip of torch.save */
    int is_there;                                              /* the file is said */
};

struct mb_dist_tensor {
    char *name;
    enum mb_st_dtype dtype;
    int is_read; /* dtype says its numbers; they are F32, F16 or BF16 */
    int n_dims;  /* 1 at least */
    uint64_t shape[MB_DIST_DIMS_MAX], n;
    struct mb_dist_chunk *chunks; /* by offset, and each element is in one */
    size_t n_chunks;
    uint64_t most_rows;  /* of a chunk, in the first dimension */
    int is_of_optimizer; /* then it may be one of these two: */
    int is_object;       /* no tensor: one chunk, which is a file of torch.save, and no dimension */
    const char *is_wrong; /* why it cannot be read: its chunks are not to be looked at; or NULL */
};

struct mb_dist_meta {
    struct mb_dist_tensor *tensors; /* by name, each name once */
    size_t n_tensors;
    char **files; /* names without a directory, each once, by name */
    size_t n_files;
    int has_optimizer;
};

/* name is for texts. MB_ECORRUPT and MB_EUNSUPPORTED name the tensor. */
int mb_dist_meta_parse(const char *name, const void *bytes, size_t n, struct mb_dist_meta *out,
                       struct mb_err *err);
void mb_dist_meta_close(struct mb_dist_meta *m);

struct mb_dist_tensor *mb_dist_meta_find(const struct mb_dist_meta *m, const char *name);

/* Where element i (below n, in the order of the shape) is: of which chunk, which element of that.
 * Returned: so many follow each other in both. */
uint64_t mb_dist_place(const struct mb_dist_tensor *t, uint64_t i, size_t *chunk, uint64_t *at);

#endif
