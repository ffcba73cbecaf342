/*
 * What a directory of torch_dist says beside its tensors: arguments, counters and the optimizer's
 * settings.
 *
 *  1. common.pt has it, a file of torch.save.
 *  2. Without that, as megatron-core 0.19 writes, an object among the chunks: a file of
 *     torch.save as well, which is a list of that one dictionary.
 * Failures: neither is there, or it is no such dictionary.
 */
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"
#include "worker/checkpoint/megatron/shards_private.h"

#define COMMON_NAME "common.pt"

/* megatron-core 0.19 has no common.pt: what was in it lies among the chunks. */
static int open_in_chunks(struct mb_shards *s, const struct mb_dist_tensor *common,
                          struct mb_shards_file *f, struct mb_err *err)
{
    char *path = mb_asprintf("%s/" MB_DIST_COMMON, s->dir);
    if (path == NULL) {
        return mb_shards_no_memory(s, err);
    }
    mb_free(f->path);
    f->path = path;
    return mb_dist_open_object(s->dist, common, &f->torch, err);
}

int mb_shards_open_common(struct mb_shards *s, struct mb_err *err)
{
    s->files = mb_calloc(1, sizeof *s->files);
    if (s->files == NULL) {
        return mb_shards_no_memory(s, err);
    }
    struct mb_shards_file *f = &s->files[0];
    f->path = mb_path_join(s->dir, COMMON_NAME);
    const struct mb_dist_tensor *common = mb_dist_common(s->dist);
    int rc = f->path != NULL ? mb_torch_open(f->path, &f->torch, err) : mb_shards_no_memory(s, err);
    if (rc == MB_ENOENT && common != NULL) {
        rc = open_in_chunks(s, common, f, err);
    } else if (rc == MB_ENOENT) {
        rc = mb_err_set(err, MB_ECORRUPT,
                        "%s is missing, and no " MB_DIST_COMMON
                        " is in .metadata: there are no arguments",
                        f->path);
    }
    if (rc == 0 && mb_torch_args(f->torch) == NULL) {
        rc = mb_err_set(err, MB_ECORRUPT, "%s: it has no \"args\": no checkpoint of Megatron-LM",
                        f->path);
    }
    f->is_taken = rc == 0 ? mb_calloc(mb_torch_n_tensors(f->torch) + 1, 1) : NULL;
    if (rc == 0) {
        rc = f->is_taken != NULL ? mb_shards_take_args(s, f, &s->args, err)
                                 : mb_shards_no_memory(s, err);
    }
    if (rc == 0) {
        rc = mb_megatron_sizes(f->path, s->args, &s->layout, err);
    }
    return rc;
}
