/*
 * Saving. Steps between which all ranks agree that nobody has failed:
 *
 *  1. Make the directory, remove what killed attempts left in it under hidden names.
 *  2. Write: rank 0 weights and state.json, every rank its part of the optimizer. Each file is
 *     checksummed on its way and fsynced. Of Megatron-LM's files rank 0 writes all (torch_save.h).
 *  3. Claim the temporary directory by a rename to a name of the rank's own; of ranks that share it
 *     one succeeds and the others leave the rest to it. Of Megatron-LM's files it is rank 0.
 *  4. Rename it into place. An older directory of this iteration, which the tracker may name,
 *     changes places with it, so that at no moment there is none. fsync of the parent. A file
 * system that cannot exchange two names has it under a name of its own for a moment, from which the
 *     next load or save puts it back (put_back.c).
 *  5. Rank 0 writes the tracker. Remove what step 4 replaced.
 * Failures: a rank that fails in 1 to 3 makes all fail; each removes what it wrote. A disk that
 * hangs in 2 is one that fails, if the model says when (watch.h); what was written there stays. The
 * tracker still names the checkpoint before. A kill leaves at most hidden directories, which the
 * next save removes.
 */
#include "worker/checkpoint/common.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/fs.h"
#include "base/str.h"
#include "worker/checkpoint/moments.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/snapshot.h"
#include "worker/checkpoint/torch_save.h"
#include "worker/checkpoint/watch.h"

struct saving {
    const struct mb_checkpoint_model *m;
    const struct mb_checkpoint_state *state;
    struct mb_checkpoint_saved written;
    const char *dir;
    char *tmp;   /* DIR/.iter_0000010.tmp */
    char *final; /* DIR/iter_0000010 */
    char *claim; /* DIR/.iter_0000010.of-RANK */
    int claimed; /* this rank renames it into place */
    int hangs;   /* a thread that will perhaps never end uses all of this */
    float *piece;
};

static const char WHAT[] = "saving a checkpoint";

/* Of Megatron-LM's files rank 0 has all, and the others touch no disk. */
static int has_files(const struct saving *s)
{
    return s->m->torch == NULL || mb_comm_rank(s->m->comm) == 0;
}

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "checkpoint: out of memory");
}

/* n floats into the file: device memory through the piece buffer, host memory as it lies. */
static int write_floats(struct saving *s, struct mb_st_writer *w, const struct mb_master *p,
                        size_t at, size_t n, struct mb_err *err)
{
    struct mb_device *d = s->m->dev;
    if (d == NULL) {
        return mb_st_write(w, p->whole + at, n * sizeof *p->whole, err);
    }
    while (n > 0) {
        size_t k = n < MB_CHECKPOINT_PIECE ? n : MB_CHECKPOINT_PIECE;
        mb_master_copy_out(d, p, at, k, s->piece);
        int rc = d->ops->synchronize(d->ctx, d->stream, err);
        if (rc == 0) {
            rc = mb_st_write(w, s->piece, k * sizeof *s->piece, err);
        }
        if (rc != 0) {
            return rc;
        }
        at += k;
        n -= k;
    }
    return 0;
}

/* Of a writer that was just created. */
static void watch(struct saving *s, struct mb_st_writer *w, const char *path)
{
    if (s->m->progress != NULL) {
        mb_checkpoint_progress_file(s->m->progress, path);
        mb_st_watch(w, mb_checkpoint_progress_add, s->m->progress);
    }
}

static int finish_file(struct saving *s, struct mb_st_writer *w, int rc, const char *name,
                       struct mb_err *err)
{
    uint64_t size = 0, crc = 0;
    if (rc != 0) {
        mb_st_abandon(w);
        return rc;
    }
    rc = mb_st_finish(w, &size, &crc, err);
    return rc != 0 ? rc : mb_checkpoint_note_file(&s->written, name, size, crc, err);
}

static int write_model(struct saving *s, struct mb_err *err)
{
    const struct mb_checkpoint_model *m = s->m;
    struct mb_st_meta meta = {"format", "pt"};
    struct mb_st_writer *w = NULL;
    char *path = mb_path_join(s->tmp, MB_CHECKPOINT_MODEL_FILE);
    struct mb_st_tensor *tensors = mb_calloc(m->n_tensors + 1, sizeof *tensors);
    if (path == NULL || tensors == NULL) {
        mb_free(path);
        mb_free(tensors);
        return no_memory(err);
    }
    for (size_t i = 0; i < m->n_tensors; i++) {
        tensors[i].name = m->tensors[i].name;
        tensors[i].dtype = MB_ST_F32;
        tensors[i].n_dims = m->tensors[i].n_dims;
        tensors[i].shape[0] = m->tensors[i].shape[0];
        tensors[i].shape[1] = m->tensors[i].shape[1];
    }
    int rc = mb_st_create(path, tensors, m->n_tensors, &meta, 1, &w, err);
    if (rc == 0) {
        watch(s, w, path);
        for (size_t i = 0; i < m->n_tensors && rc == 0; i++) {
            rc = write_floats(s, w, &m->weights, m->tensors[i].offset, m->tensors[i].n, err);
        }
        rc = finish_file(s, w, rc, MB_CHECKPOINT_MODEL_FILE, err);
    }
    mb_free(tensors);
    mb_free(path);
    return rc;
}

static int write_optimizer(struct saving *s, struct mb_err *err)
{
    const struct mb_checkpoint_model *m = s->m;
    uint32_t rank = mb_comm_rank(m->comm), world = mb_comm_world_size(m->comm);
    size_t begin, end;
    mb_comm_range(m->n_elements, world, rank, &begin, &end);
    char name[48], begin_text[24], end_text[24], total_text[24];
    snprintf(begin_text, sizeof begin_text, "%zu", begin);
    snprintf(end_text, sizeof end_text, "%zu", end);
    snprintf(total_text, sizeof total_text, "%zu", m->n_elements);
    struct mb_st_meta meta[] = {
        {"begin", begin_text}, {"end", end_text}, {"flat_elements", total_text}};
    struct mb_st_tensor tensors[2] = {{.dtype = MB_ST_F32, .n_dims = 1, .shape = {end - begin}},
                                      {.dtype = MB_ST_F32, .n_dims = 1, .shape = {end - begin}}};
    float *const moments[] = {m->exp_avg, m->exp_avg_sq};
    const int n_moments = m->exp_avg_sq != NULL ? MB_MOMENTS_ADAM : MB_MOMENTS_SGD;
    for (int i = 0; i < n_moments; i++) {
        tensors[i].name = mb_moments_name(n_moments, i);
    }
    mb_checkpoint_optim_name(rank, world, name);
    char *path = mb_path_join(s->tmp, name);
    struct mb_st_writer *w = NULL;
    int rc = path != NULL ? 0 : no_memory(err);
    if (rc == 0) {
        rc = mb_st_create(path, tensors, (size_t)n_moments, meta, 3, &w, err);
    }
    if (rc == 0) {
        watch(s, w, path);
        for (int i = 0; i < n_moments && rc == 0; i++) {
            const struct mb_master moment = {.whole = moments[i]};
            rc = write_floats(s, w, &moment, begin - m->state_begin, end - begin, err);
        }
        rc = finish_file(s, w, rc, name, err);
    }
    mb_free(path);
    return rc;
}

static int write_state(struct saving *s, struct mb_err *err)
{
    struct mb_buf text = {0};
    char *path = mb_path_join(s->tmp, MB_CHECKPOINT_STATE_FILE);
    int rc = path != NULL ? 0 : no_memory(err);
    if (rc == 0) {
        rc = mb_checkpoint_state_encode(s->m, s->state, &text, err);
    }
    if (rc == 0) {
        rc = mb_fs_write_atomic(path, text.data, text.len, 0644, err);
    }
    if (rc == 0) {
        rc = mb_checkpoint_note_file(&s->written, MB_CHECKPOINT_STATE_FILE, text.len,
                                     mb_crc64nvme(0, text.data, text.len), err);
    }
    mb_buf_close(&text);
    mb_free(path);
    return rc;
}

/* After each step that a disk can hold up: is the rest still wanted? */
static int goes_on(struct saving *s, int rc, struct mb_err *err)
{
    if (rc == 0 && s->m->progress != NULL) {
        rc = mb_checkpoint_progress_add(s->m->progress, 0);
        if (rc != 0) {
            mb_err_set(err, rc, "cancelled");
        }
    }
    return rc;
}

static int write_files(void *arg, struct mb_err *err)
{
    struct saving *s = arg;
    int rc = goes_on(s, mb_fs_mkdir_p(s->tmp, 0755, err), err);
    if (rc == 0 && mb_comm_rank(s->m->comm) == 0) {
        rc = goes_on(s, write_model(s, err), err);
        if (rc == 0) {
            rc = goes_on(s, write_state(s, err), err);
        }
    }
    if (rc == 0 && s->m->exp_avg != NULL) {
        rc = write_optimizer(s, err);
    }
    return rc == 0 ? mb_fs_sync_dir(s->tmp, err) : rc;
}

static int claim(struct saving *s, struct mb_err *err)
{
    if (!has_files(s)) {
        return 0;
    }
    s->claimed = rename(s->tmp, s->claim) == 0;
    if (!s->claimed && errno != ENOENT) { /* ENOENT: a rank that shares the directory was first */
        return mb_err_sys(err, errno, "%s: renaming it to %s", s->tmp, s->claim);
    }
    return 0;
}

/* This file system cannot: for a moment there is neither under its name. */
static int exchange_by_hand(struct saving *s, struct mb_err *err)
{
    char *old = mb_checkpoint_old_name(s->dir, s->state->iteration);
    int rc = 0;
    if (old == NULL) {
        return no_memory(err);
    }
    if (rename(s->final, old) != 0) {
        rc = mb_err_sys(err, errno, "%s: renaming it to %s", s->final, old);
    } else if (rename(s->claim, s->final) != 0) {
        rc = mb_err_sys(err, errno, "%s: renaming it to %s", s->claim, s->final);
        rename(old, s->final);
    } else if (rename(old, s->claim) != 0) {
        rc = mb_err_sys(err, errno, "%s: renaming it to %s", old, s->claim);
    }
    mb_free(old);
    return rc;
}

/* Afterwards the older directory, if there was one, has the claim's name. */
static int exchange(struct saving *s, struct mb_err *err)
{
    if (renameat2(AT_FDCWD, s->claim, AT_FDCWD, s->final, RENAME_EXCHANGE) == 0) {
        return 0;
    }
    if (errno == EINVAL || errno == ENOSYS) {
        return exchange_by_hand(s, err);
    }
    return mb_err_sys(err, errno, "%s: replacing it by %s", s->final, s->claim);
}

static int move_into_place(struct saving *s, struct mb_err *err)
{
    if (!s->claimed) {
        return 0;
    }
    int rc = 0;
    if (mb_fs_exists(s->final)) {
        rc = exchange(s, err);
    } else if (rename(s->claim, s->final) != 0) {
        rc = mb_err_sys(err, errno, "%s: renaming it to %s", s->claim, s->final);
    }
    return rc == 0 ? mb_fs_sync_dir(s->dir, err) : rc;
}

static int write_tracker(struct saving *s, struct mb_err *err)
{
    char digits[24];
    if (!mb_fs_exists(s->final)) { /* no rank could claim the temporary directory */
        return mb_err_set(err, MB_ENOENT, "%s: it vanished while the checkpoint was saved", s->tmp);
    }
    int n = snprintf(digits, sizeof digits, "%" PRId64, s->state->iteration);
    char *path = mb_path_join(s->dir, MB_CHECKPOINT_TRACKER);
    int rc = path != NULL ? mb_fs_write_atomic(path, digits, (size_t)n, 0644, err) : no_memory(err);
    mb_free(path);
    return rc;
}

static int is_leftover(const struct dirent *e)
{
    return mb_starts_with(e->d_name, ".iter_") &&
           (mb_ends_with(e->d_name, ".tmp") || strstr(e->d_name, ".of-") != NULL);
}

/* Of whatever iteration: it may never be saved again. Nobody writes until all ranks are here. */
static int remove_leftovers(const char *dir, struct mb_err *err)
{
    struct dirent **list = NULL;
    int n = scandir(dir, &list, is_leftover, NULL);
    if (n < 0) {
        return mb_err_sys(err, errno, "%s", dir);
    }
    int rc = 0;
    for (int i = 0; i < n; i++) {
        char *path = rc == 0 ? mb_path_join(dir, list[i]->d_name) : NULL;
        if (rc == 0) {
            rc = path != NULL ? mb_fs_remove_tree(path, err) : no_memory(err);
        }
        mb_free(path);
        free(list[i]); /* scandir's own */
    }
    free(list);
    return rc;
}

static int names(struct saving *s, struct mb_err *err)
{
    char iter[32];
    mb_checkpoint_iter_name(s->state->iteration, iter);
    s->final = mb_path_join(s->dir, iter);
    s->tmp = mb_asprintf("%s/.%s.tmp", s->dir, iter);
    s->claim = mb_asprintf("%s/.%s.of-%u", s->dir, iter, mb_comm_rank(s->m->comm));
    s->piece = mb_alloc(MB_CHECKPOINT_PIECE * sizeof *s->piece);
    s->written.dir = mb_strdup(s->final);
    if (s->final == NULL || s->tmp == NULL || s->claim == NULL || s->piece == NULL ||
        s->written.dir == NULL) {
        return no_memory(err);
    }
    if (!has_files(s)) {
        return 0;
    }
    int rc = mb_fs_mkdir_p(s->dir, 0755, err);
    if (rc == 0) {
        rc = mb_checkpoint_put_back(s->dir, err);
    }
    return rc == 0 ? remove_leftovers(s->dir, err) : rc;
}

static void free_saving(struct saving *s)
{
    mb_free(s->tmp);
    mb_free(s->final);
    mb_free(s->claim);
    mb_free(s->piece);
    mb_free(s);
}

/* The disk came back, long after the save has failed. */
static void release(void *arg)
{
    struct saving *s = arg;
    mb_checkpoint_saved_close(&s->written);
    free_saving(s);
}

/* Step 2. */
static int write_all(struct saving *s, struct mb_err *err)
{
    const struct mb_checkpoint_model *m = s->m;
    int rc = m->torch != NULL
                 ? mb_torch_save(m, s->tmp, s->state, release, s, &s->written, &s->hangs, err)
             : m->stall_ms > 0 ? mb_checkpoint_watch(m->comm, m->progress, m->stall_ms, write_files,
                                                     release, s, &s->hangs, err)
                               : write_files(s, err);
    return mb_checkpoint_agree(m->comm, rc, WHAT, err);
}

/* Steps 2 to 5. */
static int write_and_place(struct saving *s, struct mb_err *err)
{
    struct mb_comm *comm = s->m->comm;
    int rc = write_all(s, err);
    if (rc == 0) {
        rc = mb_checkpoint_agree(comm, claim(s, err), WHAT, err);
    }
    if (rc != 0 && !s->hangs && has_files(s)) {
        mb_fs_remove_tree(s->tmp, NULL);
        mb_fs_remove_tree(s->claim, NULL);
    }
    if (rc == 0) {
        rc = mb_checkpoint_agree(comm, move_into_place(s, err), WHAT, err);
    }
    if (rc == 0) {
        int own = mb_comm_rank(comm) == 0 ? write_tracker(s, err) : 0;
        rc = mb_checkpoint_agree(comm, own, WHAT, err);
    }
    if (rc == 0 && has_files(s)) {
        mb_fs_remove_tree(s->claim, NULL);
    }
    return rc;
}

/* Of ranks that share a model: from a copy in which it is whole. */
static int save_shared(const struct mb_checkpoint_model *m, const char *dir,
                       const struct mb_checkpoint_state *state, struct mb_checkpoint_saved *out,
                       struct mb_err *err)
{
    const size_t n = mb_snapshot_floats(m, m->comm);
    struct mb_snapshot s;
    char size[16];
    float *memory = mb_alloc(n * sizeof *memory);
    int rc = memory != NULL ? 0
                            : mb_err_set(err, MB_ENOMEM, "a checkpoint needs %s of host memory",
                                         mb_human_bytes(n * sizeof *memory, size));
    if (rc == 0) {
        mb_snapshot_lay_out(&s, m, m->comm, memory);
        rc = mb_snapshot_copy(&s, m, m->dev, err);
    }
    rc = mb_checkpoint_agree(m->comm, rc, WHAT, err);
    if (rc == 0) {
        rc = mb_snapshot_join(&s, m, err);
    }
    if (rc == 0) {
        rc = mb_checkpoint_save(&s.model, dir, state, out, err);
    }
    mb_free(memory);
    return rc;
}

int mb_checkpoint_save(const struct mb_checkpoint_model *m, const char *dir,
                       const struct mb_checkpoint_state *state, struct mb_checkpoint_saved *out,
                       struct mb_err *err)
{
    memset(out, 0, sizeof *out);
    if (m->layout != NULL) {
        return save_shared(m, dir, state, out, err);
    }
    struct saving *s = mb_calloc(1, sizeof *s);
    int rc = no_memory(err);
    if (s != NULL) {
        *s = (struct saving){.m = m, .state = state, .dir = dir};
        rc = names(s, err);
    }
    rc = mb_checkpoint_agree(m->comm, rc, WHAT, err);
    if (rc == 0) {
        rc = write_and_place(s, err);
    }
    if (s == NULL) {
        return rc;
    }
    if (s->hangs) { /* the thread still uses all of it */
        out->hangs = 1;
        return rc;
    }
    *out = s->written;
    out->is_owner = s->claimed;
    if (rc != 0) {
        mb_checkpoint_saved_close(out);
    }
    free_saving(s);
    return rc;
}
