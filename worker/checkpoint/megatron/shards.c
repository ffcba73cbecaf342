/*
 * Of torch_dist: common.pt, or an object in the chunks, has the arguments, dist.h the tensors,
 * whole. Of torch:
 *
 *  1. The directory's mp_rank_* are listed; the first rank's file says by its arguments how many
 *     there have to be. No one is missing and no other is there.
 *  2. All are opened. What they say of the model and the layout is the same in each.
 *  3. Layers are numbered within a chunk of the model: how many each chunk has is counted, and they
 *     must add up. Stages have chunks in turn (interleaved pipelines): chunk 0 of all stages comes
 *     before chunk 1 of the first.
 *  4. Every tensor of the arguments' model is looked up in all files that have a part of it. What
 *     is in a file besides is refused, but for scales of fp8 (_extra_state), and the copy of tied
 *     embeddings that the last stage has.
 *  5. Reading: an element of the whole is found by part and place in it, stretch by stretch.
 * Failures: as listed; the text names directory or file, and tensor, rank or argument.
 */
#include "worker/checkpoint/megatron/shards.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"
#include "worker/checkpoint/megatron/shards_private.h"

#define FILE_NAME "model_optim_rng.pt"

enum { PIECE_BYTES = 1 << 18, PREFIX_MAX = 32 };

static int no_memory(const struct mb_shards *s, struct mb_err *err)
{
    return mb_shards_no_memory(s, err);
}

int mb_shards_no_memory(const struct mb_shards *s, struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "%s: out of memory", s->dir);
}

/* ---- the directory ---- */

/* Two digits or more, or three for a stage: as many as are printed of such a number. */
static int take_number(const char **p, int n_min, uint64_t *out)
{
    int n = 0;
    for (*out = 0; (*p)[n] >= '0' && (*p)[n] <= '9' && n < 6; n++) {
        *out = *out * 10 + (uint64_t)((*p)[n] - '0');
    }
    const int fits = n >= n_min && (n == n_min || (*p)[0] != '0');
    *p += n;
    return fits;
}

enum name { NO_RANK, OF_RANK, OF_STAGE, OF_EXPERT };

/* What an entry of the directory is: "mp_rank_01", "mp_rank_01_003". */
static enum name parse_name(const char *name, uint64_t *rank, uint64_t *stage)
{
    static const char START[] = "mp_rank_";
    *stage = 0;
    if (!mb_starts_with(name, START)) {
        return NO_RANK;
    }
    name += sizeof START - 1;
    if (!take_number(&name, 2, rank)) {
        return NO_RANK;
    }
    if (*name == '\0') {
        return OF_RANK;
    }
    if (*name++ != '_' || !take_number(&name, 3, stage)) {
        return NO_RANK;
    }
    return *name == '\0' ? OF_STAGE : OF_EXPERT;
}

int mb_shards_are_in(const char *dir)
{
    uint64_t rank, stage;
    DIR *d = opendir(dir);
    int found = 0;
    for (struct dirent *e; d != NULL && !found && (e = readdir(d)) != NULL;) {
        found = parse_name(e->d_name, &rank, &stage) != NO_RANK;
    }
    if (d != NULL) {
        closedir(d);
    }
    return found || mb_dist_is_in(dir);
}

static int list_ranks(struct mb_shards *s, struct mb_err *err)
{
    DIR *d = opendir(s->dir);
    int rc = d != NULL ? 0 : mb_err_sys(err, errno, "%s", s->dir), n_plain = 0, n_staged = 0;
    for (struct dirent *e; rc == 0 && (e = readdir(d)) != NULL;) {
        uint64_t rank, stage;
        const enum name is = parse_name(e->d_name, &rank, &stage);
        if (is == OF_EXPERT) {
            rc = mb_err_set(err, MB_EUNSUPPORTED, "%s/%s: expert parallelism is not provided",
                            s->dir, e->d_name);
        } else if (is != NO_RANK) {
            s->max_rank = rank > s->max_rank ? rank : s->max_rank;
            s->max_stage = stage > s->max_stage ? stage : s->max_stage;
            n_plain += is == OF_RANK;
            n_staged += is == OF_STAGE;
        }
    }
    if (d != NULL) {
        closedir(d);
    }
    if (rc == 0 && (n_plain > 0) == (n_staged > 0)) {
        rc = mb_err_set(err, MB_ECORRUPT,
                        n_plain > 0
                            ? "%s: has directories mp_rank_TT and mp_rank_TT_PPP: of two runs"
                            : "%s: no directory mp_rank_TT or mp_rank_TT_PPP is there",
                        s->dir);
    }
    s->has_stages = n_staged > 0;
    return rc;
}

static char *path_of(const struct mb_shards *s, uint64_t rank, uint64_t stage)
{
    return s->has_stages ? mb_asprintf("%s/mp_rank_%02" PRIu64 "_%03" PRIu64 "/" FILE_NAME, s->dir,
                                       rank, stage)
                         : mb_asprintf("%s/mp_rank_%02" PRIu64 "/" FILE_NAME, s->dir, rank);
}

/* ---- files ---- */

static int open_file(const struct mb_shards *s, uint64_t rank, uint64_t stage,
                     struct mb_shards_file *f, struct mb_err *err)
{
    f->path = path_of(s, rank, stage);
    if (f->path == NULL) {
        return no_memory(s, err);
    }
    int rc = mb_torch_open(f->path, &f->torch, err);
    if (rc == MB_ENOENT) {
        return mb_err_set(err, MB_ECORRUPT,
                          "%s is missing: the checkpoint is not whole (its tensor-parallel size is "
                          "%" PRIu64 ", its pipeline-parallel size %" PRIu64 ")",
                          f->path, s->layout.tp, s->layout.pp);
    }
    if (rc == 0 && mb_torch_args(f->torch) == NULL) {
        rc = mb_err_set(err, MB_ECORRUPT, "%s: it has no \"args\": no checkpoint of Megatron-LM",
                        f->path);
    }
    rc = rc == 0 ? mb_torch_rest(f->torch, err) : rc; /* there may be thousands */
    f->is_taken = rc == 0 ? mb_calloc(mb_torch_n_tensors(f->torch) + 1, 1) : NULL;
    return rc != 0 || f->is_taken != NULL ? rc : no_memory(s, err);
}

void mb_shards_close_file(struct mb_shards_file *f)
{
    mb_torch_close(f->torch);
    mb_free(f->path);
    mb_free(f->is_taken);
    *f = (struct mb_shards_file){0};
}

int mb_shards_take_args(const struct mb_shards *s, const struct mb_shards_file *f, json_t **out,
                        struct mb_err *err)
{
    json_error_t je;
    *out = json_loads(mb_torch_args(f->torch), 0, &je);
    return *out != NULL ? mb_megatron_args(f->path, *out, err) : no_memory(s, err);
}

/* What all files must say alike. */
static int check_alike(const struct mb_shards *s, const struct mb_shards_file *f,
                       struct mb_err *err)
{
    static const char *const ALIKE[] = {
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "padded_vocab_size",
        "max_position_embeddings",
        "swiglu",
        "normalization",
        "position_embedding_type",
        "add_bias_linear",
        "add_qkv_bias",
        "untie_embeddings_and_output_weights",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "consumed_train_samples",
    };
    json_t *args = NULL;
    int rc = mb_shards_take_args(s, f, &args, err);
    for (size_t i = 0; i < sizeof ALIKE / sizeof ALIKE[0] && rc == 0; i++) {
        json_t *here = json_object_get(args, ALIKE[i]), *first = json_object_get(s->args, ALIKE[i]);
        if (here != first && !json_equal(here, first)) {
            rc = mb_err_set(err, MB_ECORRUPT, "%s: argument %s is another than in %s", f->path,
                            ALIKE[i], s->files[0].path);
        }
    }
    if (rc == 0 && mb_torch_iteration(f->torch) != mb_shards_iteration(s)) {
        rc =
            mb_err_set(err, MB_ECORRUPT, "%s: iteration %" PRId64 ", in %s it is %" PRId64, f->path,
                       mb_torch_iteration(f->torch), s->files[0].path, mb_shards_iteration(s));
    }
    json_decref(args);
    return rc;
}

static int open_first(struct mb_shards *s, struct mb_err *err)
{
    struct mb_shards_file first = {0};
    s->layout.tp = s->max_rank + 1; /* until the arguments say it */
    s->layout.pp = s->max_stage + 1;
    int rc = open_file(s, 0, 0, &first, err);
    if (rc == 0) {
        rc = mb_shards_take_args(s, &first, &s->args, err);
    }
    if (rc == 0) {
        rc = mb_megatron_sizes(first.path, s->args, &s->layout, err);
    }
    if (rc == 0 && (s->max_rank >= s->layout.tp || s->max_stage >= s->layout.pp)) {
        rc = mb_err_set(err, MB_ECORRUPT,
                        "%s: there are ranks up to %" PRIu64 " and stages up to %" PRIu64
                        ", but by its arguments the tensor-parallel size is %" PRIu64
                        " and the pipeline-parallel size %" PRIu64,
                        first.path, s->max_rank, s->max_stage, s->layout.tp, s->layout.pp);
    }
    if (rc == 0) {
        s->files = mb_calloc(s->layout.tp * s->layout.pp, sizeof *s->files);
        rc = s->files != NULL ? 0 : no_memory(s, err);
    }
    if (rc != 0) {
        mb_shards_close_file(&first);
        return rc;
    }
    s->files[0] = first;
    return 0;
}

static int open_files(struct mb_shards *s, struct mb_err *err)
{
    int rc = open_first(s, err);
    for (uint64_t i = 1; rc == 0 && i < s->layout.tp * s->layout.pp; i++) {
        rc = open_file(s, i % s->layout.tp, i / s->layout.tp, &s->files[i], err);
        if (rc == 0) {
            rc = check_alike(s, &s->files[i], err);
        }
    }
    return rc;
}

/* ---- layers ---- */

/* "model.", or "model1." where a stage has several chunks. */
static size_t prefix_of(const struct mb_shards *s, uint64_t chunk, char out[PREFIX_MAX])
{
    const int n = s->layout.n_chunks > 1 ? snprintf(out, PREFIX_MAX, "model%" PRIu64 ".", chunk)
                                         : snprintf(out, PREFIX_MAX, "model.");
    return (size_t)n;
}

/* Layers of a chunk in a file: one more than the highest number. */
static uint64_t count_layers(const struct mb_shards *s, const struct mb_shards_file *f,
                             uint64_t chunk)
{
    char start[PREFIX_MAX + 16];
    uint64_t n = 0;
    prefix_of(s, chunk, start);
    strcat(start, "decoder.layers.");
    for (size_t i = 0; i < mb_torch_n_tensors(f->torch); i++) {
        const char *name = mb_torch_tensor(f->torch, i)->name;
        if (mb_starts_with(name, start)) {
            const uint64_t layer = strtoull(name + strlen(start), NULL, 10);
            n = layer >= n && layer < MB_MEGATRON_LAYERS_MAX ? layer + 1 : n;
        }
    }
    return n;
}

static int number_layers(struct mb_shards *s, struct mb_err *err)
{
    const struct mb_megatron_layout *l = &s->layout;
    const uint64_t n = l->n_chunks * l->pp;
    uint64_t at = 0;
    s->first_layer = mb_calloc(n + 1, sizeof *s->first_layer);
    if (s->first_layer == NULL) {
        return no_memory(s, err);
    }
    for (uint64_t i = 0; i < n; i++) {
        s->first_layer[i] = at;
        at += count_layers(s, &s->files[i % l->pp * l->tp], i / l->pp);
    }
    s->first_layer[n] = at;
    return at == l->n_layers
               ? 0
               : mb_err_set(err, MB_ECORRUPT,
                            "%s: its files have %" PRIu64 " layers, the arguments say %" PRIu64,
                            s->dir, at, l->n_layers);
}

/* ---- tensors ---- */

const struct mb_torch_tensor *mb_shards_look_up(const struct mb_shards_file *f, const char *name)
{
    size_t low = 0, high = mb_torch_n_tensors(f->torch);
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        const int order = strcmp(mb_torch_tensor(f->torch, middle)->name, name);
        if (order == 0) {
            f->is_taken[middle] = 1;
            return mb_torch_tensor(f->torch, middle);
        }
        if (order < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return NULL;
}

/* A tensor's stage, and its name in that stage's files; other: the same by another name, or "". */
static size_t place_of(const struct mb_shards *s, const struct mb_megatron_tensor *t,
                       char name[2 * MB_MEGATRON_NAME_MAX], char other[2 * MB_MEGATRON_NAME_MAX])
{
    const uint64_t n = s->layout.n_chunks * s->layout.pp;
    uint64_t at = t->place == MB_MEGATRON_LAST ? n - 1 : 0;
    other[0] = '\0';
    if (t->place != MB_MEGATRON_LAYER) {
        const size_t k = prefix_of(s, at / s->layout.pp, name);
        snprintf(name + k, 2 * MB_MEGATRON_NAME_MAX - k, "%s", t->name);
        return at % s->layout.pp;
    }
    while (t->layer >= s->first_layer[at + 1]) { /* it is below the total */
        at++;
    }
    char local[MB_MEGATRON_NAME_MAX];
    mb_megatron_local_name(t->in_layer, local);
    const size_t k = prefix_of(s, at / s->layout.pp, name);
    const uint64_t layer = t->layer - s->first_layer[at];
    memcpy(other, name, k + 1);
    snprintf(name + k, 2 * MB_MEGATRON_NAME_MAX - k, "decoder.layers.%" PRIu64 ".%s", layer,
             t->in_layer);
    if (local[0] != '\0') {
        snprintf(other + k, 2 * MB_MEGATRON_NAME_MAX - k, "decoder.layers.%" PRIu64 ".%s", layer,
                 local);
    } else {
        other[0] = '\0';
    }
    return at % s->layout.pp;
}

static int check_part(const struct mb_shards *s, const struct mb_shards_file *f,
                      const struct mb_torch_tensor *have, const struct mb_megatron_tensor *want,
                      struct mb_err *err)
{
    const struct mb_megatron_part p = mb_megatron_part(want, s->layout.tp);
    const int n_dims = want->columns > 0 ? 2 : 1;
    if (have->n_dims != n_dims || have->shape[0] != p.shape[0] ||
        (n_dims == 2 && have->shape[1] != p.shape[1])) {
        return mb_err_set(err, MB_ECORRUPT,
                          "%s: tensor %s: %d dimensions [%" PRIu64 ", %" PRIu64
                          "]; with tensor-parallel size %" PRIu64 " the arguments need %d [%" PRIu64
                          ", %" PRIu64 "]",
                          f->path, have->name, have->n_dims, have->n_dims > 0 ? have->shape[0] : 0,
                          have->n_dims > 1 ? have->shape[1] : 0, s->layout.tp, n_dims, p.shape[0],
                          p.shape[1]);
    }
    if (have->dtype != MB_ST_F32 && have->dtype != MB_ST_F16 && have->dtype != MB_ST_BF16) {
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "%s: tensor %s: its numbers are neither F32 nor F16 nor BF16", f->path,
                          have->name);
    }
    return 0;
}

static int take_tensor(struct mb_shards *s, size_t i, struct mb_err *err)
{
    char name[2 * MB_MEGATRON_NAME_MAX], other[2 * MB_MEGATRON_NAME_MAX];
    const struct mb_megatron_tensor *want = &s->layout.tensors[i];
    const uint64_t tp = s->layout.tp;
    int rc = 0;
    s->stage_of[i] = place_of(s, want, name, other);
    for (uint64_t rank = 0; rank < tp && rc == 0; rank++) {
        const struct mb_shards_file *f = &s->files[s->stage_of[i] * tp + rank];
        const struct mb_torch_tensor *part = mb_shards_look_up(f, name);
        part = part == NULL && other[0] != '\0' ? mb_shards_look_up(f, other) : part;
        if (part == NULL) {
            return mb_err_set(err, MB_ECORRUPT, "%s: tensor %s is missing", f->path, name);
        }
        s->parts[i * tp + rank] = part;
        s->bytes += part->n * mb_st_dtype_size(part->dtype);
        rc = check_part(s, f, part, want, err);
    }
    return rc;
}

static void describe(struct mb_shards *s, size_t i)
{
    const struct mb_megatron_tensor *want = &s->layout.tensors[i];
    const uint64_t columns = want->columns > 0 ? want->columns : 1;
    struct mb_st_tensor *t = &s->tensors[i];
    *t = (struct mb_st_tensor){.name = want->name,
                               .dtype = MB_ST_F32,
                               .n_dims = want->columns > 0 ? 2 : 1,
                               .shape = {want->rows, want->columns},
                               .begin = i > 0 ? s->tensors[i - 1].end : 0};
    t->end = t->begin + want->rows * columns * sizeof(float);
}

/* What is none of the model's tensors, and yet no loss. */
static int is_passed_over(const struct mb_shards *s, const char *name)
{
    return mb_ends_with(name, "_extra_state") || mb_ends_with(name, ".inv_freq") ||
           (!s->layout.untied && mb_ends_with(name, ".output_layer.weight"));
}

/* Every other tensor of the model's own names would be lost. */
static int check_rest(const struct mb_shards *s, struct mb_err *err)
{
    for (uint64_t i = 0; i < s->layout.tp * s->layout.pp; i++) {
        const struct mb_shards_file *f = &s->files[i];
        for (size_t k = 0; k < mb_torch_n_tensors(f->torch); k++) {
            const char *name = mb_torch_tensor(f->torch, k)->name;
            if (mb_starts_with(name, "model") && !f->is_taken[k] && !is_passed_over(s, name)) {
                return mb_err_set(err, MB_EUNSUPPORTED,
                                  "%s: tensor %s is none of this model: it would be lost", f->path,
                                  name);
            }
        }
    }
    return 0;
}

/* Arguments that were saved before the tokenizer was there do not say it. */
static int take_vocab(struct mb_shards *s, struct mb_err *err)
{
    char name[PREFIX_MAX + 64];
    prefix_of(s, 0, name);
    strcat(name, "embedding.word_embeddings.weight");
    const struct mb_torch_tensor *t = mb_shards_look_up(&s->files[0], name);
    if (s->layout.padded_vocab > 0) {
        return 0;
    }
    if (t == NULL || t->n_dims != 2 || t->shape[0] == 0 || t->shape[0] > 1u << 30) {
        return mb_err_set(err, MB_ECORRUPT, "%s: tensor %s is missing, or none of rows",
                          s->files[0].path, name);
    }
    s->layout.padded_vocab = t->shape[0] * s->layout.tp;
    return json_object_set_new(s->args, "padded_vocab_size",
                               json_integer((json_int_t)s->layout.padded_vocab)) == 0
               ? 0
               : no_memory(s, err);
}

/* The whole tensors, of the layout that arguments and parts say. */
static int make_layout(struct mb_shards *s, struct mb_err *err)
{
    int rc = mb_megatron_layout_create(s->files[0].path, s->args, &s->layout, err);
    if (rc != 0) {
        return rc;
    }
    s->tensors = mb_calloc(s->layout.n, sizeof *s->tensors);
    s->piece = mb_alloc(PIECE_BYTES);
    s->args_text = json_dumps(s->args, JSON_COMPACT);
    if (s->tensors == NULL || s->piece == NULL || s->args_text == NULL) {
        return no_memory(s, err);
    }
    for (size_t i = 0; i < s->layout.n; i++) {
        describe(s, i);
    }
    return 0;
}

static int take_tensors(struct mb_shards *s, struct mb_err *err)
{
    int rc = number_layers(s, err);
    if (rc == 0) {
        rc = take_vocab(s, err);
    }
    if (rc == 0) {
        rc = make_layout(s, err);
    }
    if (rc != 0) {
        return rc;
    }
    s->stage_of = mb_calloc(s->layout.n, sizeof *s->stage_of);
    s->parts = mb_calloc(s->layout.n * s->layout.tp, sizeof *s->parts);
    rc = s->stage_of != NULL && s->parts != NULL ? 0 : no_memory(s, err);
    for (size_t i = 0; i < s->layout.n && rc == 0; i++) {
        rc = take_tensor(s, i, err);
    }
    return rc == 0 ? check_rest(s, err) : rc;
}

static void take_run(struct mb_shards *s)
{
    s->run.tp = s->layout.tp;
    s->run.pp = s->layout.pp;
    s->run.n_chunks = s->layout.n_chunks;
}

/* ---- torch_dist ---- */

static int open_dist(struct mb_shards *s, struct mb_err *err)
{
    int rc = mb_dist_open(s->dir, &s->dist, err);
    if (rc == 0) {
        rc = mb_shards_open_common(s, err);
        take_run(s);
        s->layout.tp = s->layout.pp = s->layout.n_chunks = 1; /* here there are whole tensors */
    }
    if (rc == 0 && s->layout.padded_vocab == 0) {
        s->layout.padded_vocab = mb_dist_vocab(s->dist);
        rc = s->layout.padded_vocab == 0
                 ? mb_err_set(err, MB_ECORRUPT, "%s: there are no embeddings", s->dir)
             : json_object_set_new(s->args, "padded_vocab_size",
                                   json_integer((json_int_t)s->layout.padded_vocab)) == 0
                 ? 0
                 : no_memory(s, err);
    }
    if (rc == 0) {
        rc = mb_dist_check_layers(s->dist, s->layout.n_layers, err);
    }
    if (rc == 0) {
        rc = make_layout(s, err);
    }
    return rc == 0 ? mb_dist_take(s->dist, &s->layout, &s->bytes, err) : rc;
}

static int open_torch(struct mb_shards *s, struct mb_err *err)
{
    int rc = list_ranks(s, err);
    if (rc == 0) {
        rc = open_files(s, err);
    }
    take_run(s);
    return rc == 0 ? take_tensors(s, err) : rc;
}

int mb_shards_open(const char *dir, struct mb_shards **out, struct mb_err *err)
{
    struct mb_shards *s = mb_calloc(1, sizeof *s);
    if (s == NULL) {
        return mb_err_set(err, MB_ENOMEM, "%s: out of memory", dir);
    }
    s->dir = mb_strdup(dir);
    int rc = s->dir != NULL ? 0 : mb_err_set(err, MB_ENOMEM, "%s: out of memory", dir);
    if (rc == 0) {
        rc = mb_dist_is_in(dir) ? open_dist(s, err) : open_torch(s, err);
    }
    if (rc != 0) {
        mb_shards_close(s);
        return rc;
    }
    *out = s;
    return 0;
}

void mb_shards_close(struct mb_shards *s)
{
    if (s == NULL) {
        return;
    }
    for (uint64_t i = 0; s->files != NULL && i < s->layout.tp * s->layout.pp; i++) {
        mb_shards_close_file(&s->files[i]);
    }
    mb_shards_close_buffers(s);
    mb_dist_close(s->dist);
    mb_megatron_layout_close(&s->layout);
    json_decref(s->args);
    mb_free(s->args_text);
    mb_free(s->files);
    mb_free(s->first_layer);
    mb_free(s->tensors);
    mb_free(s->stage_of);
    mb_free(s->parts);
    mb_free(s->states);
    mb_free(s->compared);
    mb_free(s->piece);
    mb_free(s->dir);
    mb_free(s);
}

/* ---- facts ---- */

const char *mb_shards_args(const struct mb_shards *s)
{
    return s->args_text;
}

int64_t mb_shards_iteration(const struct mb_shards *s)
{
    return mb_torch_iteration(s->files[0].torch);
}

int64_t mb_shards_consumed(const struct mb_shards *s, int of_validation)
{
    const json_int_t n = json_integer_value(json_object_get(
        s->args, of_validation ? "consumed_valid_samples" : "consumed_train_samples"));
    return n > 0 ? n : 0;
}

int mb_shards_are_dist(const struct mb_shards *s)
{
    return s->dist != NULL;
}

static int has_optimizer(const struct mb_torch_file *f)
{
    int has = json_object_get(mb_torch_settings(f), "optimizer") != NULL;
    for (size_t i = 0; i < mb_torch_n_tensors(f) && !has; i++) {
        has = mb_starts_with(mb_torch_tensor(f, i)->name, "optimizer.");
    }
    return has;
}

int mb_shards_has_optimizer(const struct mb_shards *s)
{
    int has = s->dist != NULL && mb_dist_has_optimizer(s->dist);
    for (uint64_t i = 0; s->dist == NULL && i < s->layout.tp * s->layout.pp && !has; i++) {
        has = has_optimizer(s->files[i].torch);
    }
    return has;
}

const struct mb_megatron_layout *mb_shards_layout(const struct mb_shards *s)
{
    return &s->layout;
}

size_t mb_shards_n_files(const struct mb_shards *s)
{
    return s->dist != NULL ? mb_dist_n_files(s->dist) : s->layout.tp * s->layout.pp;
}

uint64_t mb_shards_bytes(const struct mb_shards *s)
{
    return s->bytes;
}

size_t mb_shards_n_tensors(const struct mb_shards *s)
{
    return s->layout.n;
}

const struct mb_st_tensor *mb_shards_tensor(const struct mb_shards *s, size_t i)
{
    return &s->tensors[i];
}

const struct mb_st_tensor *mb_shards_find(const struct mb_shards *s, const char *name)
{
    for (size_t i = 0; i < s->layout.n; i++) {
        if (strcmp(s->tensors[i].name, name) == 0) {
            return &s->tensors[i];
        }
    }
    return NULL;
}

/* ---- reading ---- */

/* Elements of one part, widened. */
static int read_part(struct mb_shards *s, struct mb_torch_file *f, const struct mb_torch_tensor *t,
                     uint64_t from, uint64_t n, float *out, struct mb_err *err)
{
    const size_t most = PIECE_BYTES / mb_st_dtype_size(t->dtype);
    int rc = 0;
    while (n > 0 && rc == 0) {
        const size_t k = n < most ? (size_t)n : most;
        rc = mb_torch_read(f, t, from, k, s->piece, err);
        if (rc == 0) {
            mb_st_widen(s->piece, t->dtype, k, out);
        }
        from += k;
        out += k;
        n -= k;
    }
    return rc;
}

/* Elements of the whole that follow each other in a rank's part: n of them, from its at on. */
struct stretch {
    uint64_t rank, at;
    size_t n;
};

static struct stretch stretch_of(const struct mb_megatron_part *p, uint64_t from, size_t n)
{
    const uint64_t in_stride = from % p->stride, in_run = in_stride % p->run;
    return (struct stretch){.rank = in_stride / p->run,
                            .at = from / p->stride * p->run + in_run,
                            .n = p->run - in_run < n ? (size_t)(p->run - in_run) : n};
}

static int read_split(struct mb_shards *s, size_t i, uint64_t from, size_t n, float *out,
                      struct mb_err *err)
{
    const uint64_t tp = s->layout.tp;
    const struct mb_megatron_part p = mb_megatron_part(&s->layout.tensors[i], tp);
    int rc = 0;
    while (n > 0 && rc == 0) {
        const struct stretch r = stretch_of(&p, from, n);
        rc = read_part(s, s->files[s->stage_of[i] * tp + r.rank].torch, s->parts[i * tp + r.rank],
                       r.at, r.n, out, err);
        from += r.n;
        out += r.n;
        n -= r.n;
    }
    return rc;
}

int mb_shards_read(struct mb_shards *s, const struct mb_st_tensor *t, uint64_t from, size_t n,
                   float *out, struct mb_err *err)
{
    const size_t i = (size_t)(t - s->tensors);
    return s->dist != NULL ? mb_dist_read(s->dist, i, from, n, out, err)
                           : read_split(s, i, from, n, out, err);
}

static int read_place(struct mb_shards *s, const struct mb_shards_place *p, uint64_t from, size_t n,
                      float *out, struct mb_err *err)
{
    if (p->torch != NULL) {
        return read_part(s, p->torch, p->in_torch, p->from + from, n, out, err);
    }
    return p->in_dist != NULL
               ? mb_dist_read_tensor(s->dist, p->in_dist, p->from + from, n, out, err)
               : mb_dist_read_part(s->dist, &p->part, from, n, out, err);
}

int mb_shards_read_state(struct mb_shards *s, enum mb_shards_state which,
                         const struct mb_st_tensor *t, uint64_t from, size_t n, float *out,
                         struct mb_err *err)
{
    const size_t i = (size_t)(t - s->tensors);
    const struct mb_megatron_part p = mb_megatron_part(&s->layout.tensors[i], s->states_tp);
    int rc = 0;
    while (n > 0 && rc == 0) {
        const struct stretch r = stretch_of(&p, from, n);
        rc = read_place(s, mb_shards_state_of(s, which, i, r.rank), r.at, r.n, out, err);
        from += r.n;
        out += r.n;
        n -= r.n;
    }
    return rc;
}

int mb_shards_verify(struct mb_shards *s, const struct mb_torch_watch *watch, struct mb_err *err)
{
    int rc = 0;
    for (uint64_t i = 0; i < s->layout.tp * s->layout.pp && rc == 0; i++) {
        rc = mb_torch_verify(s->files[i].torch, s->files[i].is_taken, watch, err);
    }
    for (uint64_t i = 0; s->buffers != NULL && i < s->run.tp * s->run.pp && rc == 0; i++) {
        const struct mb_shards_file *f = &s->buffers[i];
        rc = f->torch != NULL ? mb_torch_verify(f->torch, f->is_taken, watch, err) : 0;
    }
    if (rc == 0 && s->dist != NULL) {
        rc = mb_dist_verify(s->dist, watch, err);
    }
    return rc == 0 && s->has_taken_optimizer ? mb_shards_compare_all_masters(s, watch, err) : rc;
}
