/*
 *  1. The checksums of a file of torch are compared before anything is written.
 *  2. Tensor by tensor goes to TARGET.mobula-convert, a piece at a time; numbers are not touched.
 *  3. That is renamed, unless somebody has taken the name meanwhile.
 * Failures: what the source and the disk say; the partial file is removed, and so is one that a
 * killed conversion left.
 */
#include "worker/checkpoint/megatron/torch_convert.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"
#include "worker/checkpoint/megatron/torch_write.h"

enum { PIECE_BYTES = 1 << 20 };

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "out of memory converting tensors");
}

static int copy(struct mb_torch_file *f, struct mb_st_writer *w, uint8_t *piece, struct mb_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < mb_torch_n_tensors(f); i++) {
        const struct mb_torch_tensor *t = mb_torch_tensor(f, i);
        const size_t size = mb_st_dtype_size(t->dtype);
        for (uint64_t at = 0; at < t->n && rc == 0;) {
            const size_t k =
                t->n - at < PIECE_BYTES / size ? (size_t)(t->n - at) : PIECE_BYTES / size;
            rc = mb_torch_read(f, t, at, k, piece, err);
            if (rc == 0) {
                rc = mb_st_write(w, piece, k * size, err);
            }
            at += k;
        }
    }
    return rc;
}

static int create(const struct mb_torch_file *f, const char *path, struct mb_st_tensor *tensors,
                  struct mb_st_writer **w, struct mb_err *err)
{
    const size_t n = mb_torch_n_tensors(f);
    struct mb_st_meta meta[3] = {{"format", "pt"}};
    size_t n_meta = 1;
    char iteration[24];
    for (size_t i = 0; i < n; i++) {
        const struct mb_torch_tensor *t = mb_torch_tensor(f, i);
        if (strcmp(t->name, "__metadata__") == 0) {
            return mb_err_set(err, MB_EUNSUPPORTED, "no tensor of a safetensors file is called %s",
                              t->name);
        }
        tensors[i] = (struct mb_st_tensor){.name = t->name, .dtype = t->dtype, .n_dims = t->n_dims};
        memcpy(tensors[i].shape, t->shape, sizeof t->shape);
    }
    if (mb_torch_args(f) != NULL) {
        meta[n_meta++] = (struct mb_st_meta){"args", mb_torch_args(f)};
    }
    if (mb_torch_iteration(f) > 0) {
        snprintf(iteration, sizeof iteration, "%" PRId64, mb_torch_iteration(f));
        meta[n_meta++] = (struct mb_st_meta){"iteration", iteration};
    }
    return mb_st_create(path, tensors, n, meta, n_meta, w, err);
}

static int write_safetensors(void *source, const char *path, struct mb_err *err)
{
    struct mb_torch_file *f = source;
    struct mb_st_tensor *tensors = mb_calloc(mb_torch_n_tensors(f), sizeof *tensors);
    uint8_t *piece = mb_alloc(PIECE_BYTES);
    struct mb_st_writer *w = NULL;
    int rc = tensors != NULL && piece != NULL ? create(f, path, tensors, &w, err) : no_memory(err);
    if (rc == 0) {
        rc = copy(f, w, piece, err);
        uint64_t size, crc;
        if (rc == 0) {
            rc = mb_st_finish(w, &size, &crc, err);
        } else {
            mb_st_abandon(w);
        }
    }
    mb_free(tensors);
    mb_free(piece);
    return rc;
}

/* ---- back ---- */

/* What create() put there. *args NULL: nothing of that kind, and then *iteration has no meaning. */
static int take_metadata(const struct mb_st_reader *r, json_t **args, int64_t *iteration,
                         struct mb_err *err)
{
    const char *text = mb_st_metadata(r, "args"), *number = mb_st_metadata(r, "iteration");
    json_error_t je;
    *args = text != NULL ? json_loads(text, 0, &je) : NULL;
    if (text != NULL && *args == NULL && json_error_code(&je) == json_error_out_of_memory) {
        return no_memory(err);
    }
    if (!json_is_object(*args)) { /* another program's word */
        json_decref(*args);
        *args = NULL;
        return 0;
    }
    *iteration = 0;
    return number != NULL
               ? mb_parse_i64(number, 1, INT64_MAX, "\"iteration\" of the metadata", iteration, err)
               : 0;
}

static int copy_back(struct mb_st_reader *r, struct mb_torch_writer *w, uint8_t *piece,
                     struct mb_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < mb_st_n_tensors(r); i++) {
        const struct mb_st_tensor *t = mb_st_tensor(r, i);
        const uint64_t n = t->end - t->begin;
        for (uint64_t at = 0; at < n && rc == 0;) {
            const size_t k = n - at < PIECE_BYTES ? (size_t)(n - at) : PIECE_BYTES;
            rc = mb_st_read(r, t, at, piece, k, err);
            if (rc == 0) {
                rc = mb_torch_write(w, piece, k, err);
            }
            at += k;
        }
    }
    return rc;
}

static int write_torch(void *source, const char *path, struct mb_err *err)
{
    struct mb_st_reader *r = source;
    const size_t n = mb_st_n_tensors(r);
    struct mb_st_tensor *tensors = mb_calloc(n, sizeof *tensors);
    uint8_t *piece = mb_alloc(PIECE_BYTES);
    struct mb_torch_writer *w = NULL;
    json_t *args = NULL;
    int64_t iteration = 0;
    uint64_t size, crc;
    int rc = tensors != NULL && piece != NULL ? take_metadata(r, &args, &iteration, err)
                                              : no_memory(err);
    for (size_t i = 0; i < n && rc == 0; i++) {
        tensors[i] = *mb_st_tensor(r, i);
    }
    if (rc == 0) {
        const struct mb_torch_megatron m = {.args = args, .iteration = iteration};
        rc = mb_torch_create(path, tensors, n, args != NULL ? &m : NULL, &w, err);
    }
    if (rc == 0) {
        rc = copy_back(r, w, piece, err);
        if (rc == 0) {
            rc = mb_torch_finish(w, &size, &crc, err);
        } else {
            mb_torch_abandon(w);
        }
    }
    json_decref(args);
    mb_free(tensors);
    mb_free(piece);
    return rc;
}

/* ---- the target ---- */

static int taken(const char *target, struct mb_err *err)
{
    return mb_err_set(err, MB_EEXIST, "%s exists: nothing is overwritten", target);
}

static int give_name(const char *partial, const char *target, struct mb_err *err)
{
    char *folder = mb_strdup(target);
    int rc = folder != NULL ? 0 : no_memory(err);
    if (rc == 0 && renameat2(AT_FDCWD, partial, AT_FDCWD, target, RENAME_NOREPLACE) != 0) {
        const int e = errno;
        if (e == EINVAL || e == ENOSYS) { /* the file system cannot: it was looked before */
            rc = rename(partial, target) == 0 ? 0 : mb_err_sys(err, errno, "%s", target);
        } else {
            rc = e == EEXIST ? taken(target, err) : mb_err_sys(err, e, "%s", target);
        }
    }
    if (rc != 0) {
        unlink(partial);
    } else {
        rc = mb_fs_sync_dir(dirname(folder), err);
    }
    mb_free(folder);
    return rc;
}

/* write makes a file of source at a path. */
static int make_target(const char *target, void *source,
                       int (*write)(void *source, const char *path, struct mb_err *err),
                       struct mb_err *err)
{
    char *partial = mb_asprintf("%s.mobula-convert", target);
    int rc = partial != NULL ? 0 : no_memory(err);
    if (rc == 0 && unlink(partial) != 0 && errno != ENOENT) {
        rc = mb_err_sys(err, errno, "%s", partial);
    }
    if (rc == 0) {
        rc = write(source, partial, err);
    }
    if (rc == 0) {
        rc = give_name(partial, target, err);
    }
    mb_free(partial);
    return rc;
}

int mb_torch_to_safetensors(struct mb_torch_file *source, const char *target, struct mb_err *err)
{
    int rc = mb_fs_exists(target) ? taken(target, err) : mb_torch_verify(source, NULL, NULL, err);
    return rc == 0 ? make_target(target, source, write_safetensors, err) : rc;
}

int mb_torch_from_safetensors(struct mb_st_reader *source, const char *target, struct mb_err *err)
{
    return mb_fs_exists(target) ? taken(target, err)
                                : make_target(target, source, write_torch, err);
}
