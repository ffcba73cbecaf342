/*
 *  1. What it is: config.json makes it Hugging Face's; else the tracker, or the caller, names the
 *     iteration, and its files say whose they are (weights.h).
 *  2. Ours: state.json and its layout against the file of weights, the optimizer's ranges; then
 *     every file that a load would read is compared with its checksums.
 *  3. Megatron-LM's: opened as by a load, the optimizer too; then every zip below the directory is
 *     read.
 * Failures: what is missing or damaged, or contradicts the rest, is named; nothing is repaired.
 */
#include "worker/checkpoint/verify.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"
#include "worker/checkpoint/megatron/zip.h"
#include "worker/checkpoint/moments.h"
#include "worker/checkpoint/weights.h"

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "out of memory verifying a checkpoint");
}

static void add_file(struct mb_verified *v, const char *path)
{
    struct stat st;
    v->n_files++;
    v->total_bytes += stat(path, &st) == 0 ? (uint64_t)st.st_size : 0;
}

/* file: a name in dir, or in a directory of it. */
static int each_file(const char *dir, int (*is_wanted)(const struct dirent *e),
                     int (*check)(void *arg, const char *path, struct mb_err *err), void *arg,
                     struct mb_err *err)
{
    struct dirent **list = NULL;
    const int n = scandir(dir, &list, is_wanted, alphasort);
    if (n < 0) {
        return mb_err_sys(err, errno, "%s", dir);
    }
    int rc = 0;
    for (int i = 0; i < n; i++) {
        char *path = rc == 0 ? mb_path_join(dir, list[i]->d_name) : NULL;
        if (rc == 0) {
            rc = path != NULL ? check(arg, path, err) : no_memory(err);
        }
        mb_free(path);
        free(list[i]); /* scandir's own */
    }
    free(list);
    return rc;
}

/* ---- ours ---- */

struct ours {
    struct mb_verified *v;
    struct mb_checkpoint_state state;
    json_t *layout; /* state.json's: name and elements of every tensor */
};

static int read_state(struct ours *o, const char *path, struct mb_err *err)
{
    struct mb_buf text = {0};
    json_error_t je;
    int rc = mb_fs_read(path, MB_CHECKPOINT_STATE_MAX, &text, err);
    if (rc == 0) {
        rc = mb_checkpoint_state_decode(path, text.data, text.len, &o->state, err);
    }
    if (rc == 0 && o->v->iteration != MB_CHECKPOINT_RELEASE &&
        o->state.iteration != o->v->iteration) {
        rc = mb_err_set(err, MB_ECORRUPT, "%s: says iteration %" PRId64 ", the directory %" PRId64,
                        path, o->state.iteration, o->v->iteration);
    }
    json_t *root = rc == 0 ? json_loadb((const char *)text.data, text.len, 0, &je) : NULL;
    if (rc == 0) {
        o->layout = json_incref(json_object_get(root, "layout"));
        if (!json_is_array(o->layout)) {
            rc = mb_err_set(err, MB_ECORRUPT, "%s: field \"layout\" is missing", path);
        }
        o->v->n_without_sums += !o->state.has_sum;
        add_file(o->v, path);
    }
    json_decref(root);
    mb_buf_close(&text);
    return rc;
}

static int check_tensors(const struct ours *o, const char *path, const struct mb_st_reader *r,
                         struct mb_err *err)
{
    size_t i;
    json_t *want;
    json_array_foreach(o->layout, i, want)
    {
        const char *name = json_string_value(json_object_get(want, "name"));
        const json_int_t n = json_integer_value(json_object_get(want, "elements"));
        const struct mb_st_tensor *t = name != NULL ? mb_st_find(r, name) : NULL;
        if (t == NULL) {
            return mb_err_set(err, MB_ECORRUPT, "%s: tensor %s is missing", path,
                              name != NULL ? name : "without a name");
        }
        if (t->dtype != MB_ST_F32 || n < 0 || t->end - t->begin != (uint64_t)n * sizeof(float)) {
            return mb_err_set(err, MB_ECORRUPT,
                              "%s: tensor %s has %" PRIu64 " bytes of %s, " MB_CHECKPOINT_STATE_FILE
                              " says %" JSON_INTEGER_FORMAT " elements of F32",
                              path, name, t->end - t->begin, mb_st_dtype_name(t->dtype), n);
        }
    }
    return mb_st_n_tensors(r) == json_array_size(o->layout)
               ? 0
               : mb_err_set(err, MB_ECORRUPT,
                            "%s: %zu tensors, " MB_CHECKPOINT_STATE_FILE " says %zu", path,
                            mb_st_n_tensors(r), json_array_size(o->layout));
}

static int check_bytes(void *arg, const char *path, struct mb_err *err)
{
    struct ours *o = arg;
    struct mb_st_reader *r = NULL;
    const char *name = strrchr(path, '/') + 1;
    const int is_model = strcmp(name, MB_CHECKPOINT_MODEL_FILE) == 0;
    if (!is_model &&
        !(o->state.has_optimizer && mb_moments_is_file(name, o->state.data_parallel_size))) {
        return 0;
    }
    int rc = mb_st_open(path, &r, err);
    if (rc == 0) {
        o->v->n_without_sums += !mb_st_has_sums(r);
        add_file(o->v, path);
        rc = mb_st_verify(r, err);
    }
    mb_st_close(r);
    return rc;
}

static int is_safetensors(const struct dirent *e)
{
    return mb_ends_with(e->d_name, ".safetensors");
}

static int verify_ours(const char *iter_dir, struct mb_verified *v, struct mb_err *err)
{
    struct ours o = {.v = v};
    struct mb_weights w = {0};
    char *state = mb_path_join(iter_dir, MB_CHECKPOINT_STATE_FILE);
    char *model = mb_path_join(iter_dir, MB_CHECKPOINT_MODEL_FILE);
    int rc = state != NULL && model != NULL ? read_state(&o, state, err) : no_memory(err);
    if (rc == 0) {
        rc = mb_weights_open(iter_dir, &w, err);
    }
    if (rc == 0) {
        rc = check_tensors(&o, model, w.ours, err);
    }
    if (rc == 0 && o.state.has_optimizer) {
        rc = mb_moments_check(iter_dir, w.ours, &o.state, err);
    }
    if (rc == 0) {
        rc = each_file(iter_dir, is_safetensors, check_bytes, &o, err);
    }
    mb_weights_close(&w);
    mb_checkpoint_state_close(&o.state);
    json_decref(o.layout);
    mb_free(state);
    mb_free(model);
    return rc;
}

/* ---- Megatron-LM's ---- */

/* torch.save can be told not to compute checksums. */
static int has_sums(const struct mb_zip *zip)
{
    for (size_t i = 0; i < mb_zip_n_entries(zip); i++) {
        const struct mb_zip_entry *e = mb_zip_entry(zip, i);
        if (e->n > 0 && e->crc32 == 0) {
            return 0;
        }
    }
    return 1;
}

static int check_zip(void *arg, const char *path, struct mb_err *err)
{
    struct mb_zip *zip = NULL;
    int rc = mb_zip_open(path, &zip, err);
    if (rc == 0) {
        add_file(arg, path);
        ((struct mb_verified *)arg)->n_without_sums += !has_sums(zip);
        rc = mb_zip_verify_all(zip, err);
    }
    mb_zip_close(zip);
    return rc;
}

static int is_torch(const struct dirent *e)
{
    return mb_ends_with(e->d_name, ".pt");
}

static int is_rank(const struct dirent *e)
{
    return mb_starts_with(e->d_name, "mp_rank_");
}

static int check_rank(void *arg, const char *path, struct mb_err *err)
{
    return each_file(path, is_torch, check_zip, arg, err);
}

static int is_chunks(const struct dirent *e)
{
    return mb_ends_with(e->d_name, ".distcp");
}

/* Its chunks were compared before. */
static int count_file(void *arg, const char *path, struct mb_err *err)
{
    (void)err;
    add_file(arg, path);
    return 0;
}

/* One of a form that is not read cannot be judged; whatever else is wrong with it is an error. */
static int check_optimizer(const char *iter_dir, struct mb_verified *v, struct mb_err *err)
{
    struct mb_weights w;
    struct mb_err why = {0};
    int rc = mb_weights_open(iter_dir, &w, err);
    const int of_optimizer = rc == 0 && mb_shards_has_optimizer(w.megatron)
                                 ? mb_shards_take_optimizer(w.megatron, &why)
                                 : 0;
    mb_weights_close(&w);
    if (of_optimizer == MB_EUNSUPPORTED) {
        v->not_compared = why;
    } else if (of_optimizer != 0) {
        *err = why;
        rc = of_optimizer;
    }
    return rc;
}

static int verify_megatrons(const char *dir, const char *iter_dir, struct mb_verified *v,
                            struct mb_err *err)
{
    struct mb_model_facts facts;
    int rc = mb_model_inspect(dir, v->iteration > 0 ? v->iteration : -1, 1, &facts, err);
    if (rc == 0) {
        rc = check_optimizer(iter_dir, v, err);
    }
    if (rc == 0) {
        rc = each_file(iter_dir, is_torch, check_zip, v, err);
    }
    if (rc == 0) {
        rc = facts.is_dist ? each_file(iter_dir, is_chunks, count_file, v, err)
                           : each_file(iter_dir, is_rank, check_rank, v, err);
    }
    return rc;
}

/* ---- any ---- */

static int verify_theirs(const char *dir, struct mb_verified *v, struct mb_err *err)
{
    struct mb_model_facts facts;
    int rc = mb_model_inspect(dir, -1, 1, &facts, err);
    if (rc == 0) {
        v->n_files = facts.n_files;
        v->total_bytes = facts.total_bytes;
        v->n_without_sums = facts.n_without_sums;
    }
    return rc;
}

static int verify_saved(const char *dir, struct mb_verified *v, struct mb_err *err)
{
    int rc = 0;
    if (v->iteration < 0) {
        rc = mb_checkpoint_read_tracker(dir, &v->iteration, err);
        if (rc == 0 && v->iteration == 0) {
            rc = mb_err_set(err, MB_ENOENT,
                            "%s: neither config.json nor " MB_CHECKPOINT_TRACKER " is there", dir);
        }
    }
    if (rc != 0) {
        return rc;
    }
    char *iter_dir = mb_weights_dir(dir, v->iteration);
    if (iter_dir == NULL) {
        return no_memory(err);
    }
    if (mb_weights_are_megatrons(iter_dir)) {
        v->kind = MB_MODEL_MEGATRON;
        rc = verify_megatrons(dir, iter_dir, v, err);
    } else {
        v->kind = MB_MODEL_OURS;
        rc = verify_ours(iter_dir, v, err);
    }
    mb_free(iter_dir);
    return rc;
}

int mb_checkpoint_verify(const char *dir, int64_t iteration, struct mb_verified *out,
                         struct mb_err *err)
{
    char *config = mb_path_join(dir, "config.json");
    *out = (struct mb_verified){.kind = MB_MODEL_HUGGING_FACE, .iteration = iteration};
    if (config == NULL) {
        return no_memory(err);
    }
    const int is_theirs = mb_fs_exists(config);
    mb_free(config);
    return is_theirs ? verify_theirs(dir, out, err) : verify_saved(dir, out, err);
}
