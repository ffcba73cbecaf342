/*
 *  1. What the source is: config.json makes it Hugging Face's, a tracker or iteration ours or
 *     Megatron-LM's (weights.h). Shape and tensors are checked as a whole before anything is
 * written.
 *  2. Everything is written below TARGET.mobula-convert, which is then renamed; what a killed
 *     conversion left there, as a file in it says, goes first.
 *  3. Tensor by tensor of the target, in its order: each run of rows is read, narrowed, written;
 *     rows that pad the vocabulary are zeros.
 * Failures: a target that is not empty; an option of the other way; a number that the target's type
 * has no room for; whatever source, shape and disk say. The partial target is removed.
 */
#include "worker/checkpoint/hf/convert.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/fs.h"
#include "base/half.h"
#include "base/str.h"
#include "worker/checkpoint/hf/files.h"
#include "worker/checkpoint/megatron/join.h"

enum { CONFIG_MAX = 16 << 20, PIECE_FLOATS = 1 << 18, DIVISIBLE_BY = 128 };

static const uint64_t FILE_BYTES = 5000000000u;
static const char MARKER[] = ".mobula-convert"; /* in a partial target: it is ours to remove */

struct model {
    struct mb_model_facts facts;
    struct mb_hf_map map;
    struct mb_hf_source *source;
    struct mb_shards *shards;         /* of Megatron-LM's, and then there is no source */
    struct mb_checkpoint_state state; /* with shards */
};

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "out of memory converting a model");
}

/* ---- what is there ---- */

/* What Hugging Face's files have besides: buffers, and the tied output's second name. */
static int is_known_of_theirs(const char *name)
{
    return mb_ends_with(name, ".rotary_emb.inv_freq") || mb_ends_with(name, ".attn.bias") ||
           mb_ends_with(name, ".attn.masked_bias");
}

static int is_known_of_tied(const char *name)
{
    return is_known_of_theirs(name) || strcmp(name, "lm_head.weight") == 0;
}

static int is_known_of_ours(const char *name)
{
    (void)name;
    return 0;
}

static int check_source(struct model *m, enum mb_hf_side side, struct mb_err *err)
{
    int (*known)(const char *) = side == MB_HF_OURS      ? is_known_of_ours
                                 : m->facts.shape.untied ? is_known_of_theirs
                                                         : is_known_of_tied;
    m->facts.n_parameters = mb_hf_map_count(&m->map, side);
    m->facts.n_tensors = m->map.n_tensors[side];
    m->facts.n_files = mb_hf_source_n_files(m->source);
    m->facts.total_bytes = mb_hf_source_bytes(m->source);
    return mb_hf_source_check(m->source, m->map.tensors[side], m->map.n_tensors[side], known, err);
}

/* Before there is a list of all that the shape asks for, which may be large. */
static int check_layers(const char *name, const struct model *m, struct mb_err *err)
{
    const uint64_t n_layers = m->facts.shape.n_layers;
    const size_t n_tensors = mb_hf_source_n_tensors(m->source);
    return n_layers <= n_tensors
               ? 0
               : mb_err_set(err, MB_ECORRUPT, "%s: %" PRIu64 " layers, but only %zu tensors", name,
                            n_layers, n_tensors);
}

static int open_theirs(const char *dir, const char *config, uint64_t divisible_by, struct model *m,
                       struct mb_err *err)
{
    struct mb_hf_shape *s = &m->facts.shape;
    struct mb_buf text = {0};
    int rc = mb_fs_read(config, CONFIG_MAX, &text, err);
    if (rc == 0) {
        rc = mb_hf_config_parse(config, text.data, text.len, s, err);
    }
    if (rc == 0) {
        s->padded_vocab = (s->vocab + divisible_by - 1) / divisible_by * divisible_by;
        rc = mb_hf_shape_check(config, s, err);
    }
    if (rc == 0) {
        rc = mb_hf_source_open_dir(dir, &m->source, err);
    }
    if (rc == 0) {
        rc = check_layers(config, m, err);
    }
    if (rc == 0) {
        rc = mb_hf_map_create(s, &m->map, err);
    }
    if (rc == 0) {
        rc = check_source(m, MB_HF_THEIRS, err);
    }
    mb_buf_close(&text);
    return rc;
}

/* What the arguments of Megatron-LM say; any model that can be trained, not only those of two
 * families. */
static void take_facts(struct model *m)
{
    const struct mb_megatron_layout *l = mb_shards_layout(m->shards);
    struct mb_model_facts *f = &m->facts;
    f->shape = (struct mb_hf_shape){.n_layers = l->n_layers,
                                    .hidden = l->hidden,
                                    .ffn = l->ffn,
                                    .n_heads = l->n_heads,
                                    .n_groups = l->n_groups,
                                    .head_dim = l->head_dim,
                                    .max_positions = l->max_positions,
                                    .vocab = l->padded_vocab,
                                    .padded_vocab = l->padded_vocab,
                                    .untied = l->untied};
    f->n_tensors = mb_shards_n_tensors(m->shards);
    f->n_parameters = mb_shards_tensor(m->shards, f->n_tensors - 1)->end / sizeof(float);
    f->n_files = mb_shards_n_files(m->shards);
    f->total_bytes = mb_shards_bytes(m->shards);
    f->tensor_parallel_size = l->tp;
    f->pipeline_parallel_size = l->pp;
}

static int open_megatrons(const char *iter_dir, struct model *m, struct mb_err *err)
{
    int rc = mb_shards_open(iter_dir, &m->shards, err);
    if (rc == 0) {
        rc = mb_weights_state(m->shards, iter_dir, m->facts.iteration, &m->state, err);
    }
    if (rc == 0) {
        take_facts(m);
    }
    return rc;
}

static int open_ours(const char *dir, uint64_t vocab, struct model *m, struct mb_err *err)
{
    char iter[32];
    struct mb_buf text = {0};
    struct mb_checkpoint_state state = {0};
    mb_checkpoint_iter_name(m->facts.iteration, iter);
    char *file = mb_asprintf("%s/%s/" MB_CHECKPOINT_STATE_FILE, dir, iter);
    char *weights = mb_asprintf("%s/%s/" MB_CHECKPOINT_MODEL_FILE, dir, iter);
    int rc = file != NULL && weights != NULL ? 0 : no_memory(err);
    if (rc == 0) {
        rc = mb_fs_read(file, MB_CHECKPOINT_STATE_MAX, &text, err);
    }
    if (rc == 0) {
        rc = mb_checkpoint_state_decode(file, text.data, text.len, &state, err);
    }
    if (rc == 0) {
        rc = mb_hf_args_parse(file, state.args_json, vocab, &m->facts.shape, err);
    }
    if (rc == 0) {
        rc = mb_hf_source_open_file(weights, &m->source, err);
    }
    if (rc == 0) {
        rc = check_layers(file, m, err);
    }
    if (rc == 0) {
        rc = mb_hf_map_create(&m->facts.shape, &m->map, err);
    }
    if (rc == 0) {
        rc = check_source(m, MB_HF_OURS, err);
    }
    mb_checkpoint_state_close(&state);
    mb_buf_close(&text);
    mb_free(file);
    mb_free(weights);
    return rc;
}

static void close_model(struct model *m)
{
    mb_hf_source_close(m->source);
    mb_hf_map_close(&m->map);
    mb_shards_close(m->shards);
    mb_checkpoint_state_close(&m->state);
}

/* A directory of iterations: ours, or Megatron-LM's. */
static int open_saved(const struct mb_convert_options *o, struct model *m, struct mb_err *err)
{
    int rc = 0;
    if (o->iteration < 0) {
        rc = mb_checkpoint_read_tracker(o->source, &m->facts.iteration, err);
        if (rc == 0 && m->facts.iteration == 0) {
            rc = mb_err_set(err, MB_ENOENT,
                            "%s: neither config.json nor " MB_CHECKPOINT_TRACKER " is there",
                            o->source);
        }
    }
    char *iter_dir = rc == 0 ? mb_weights_dir(o->source, m->facts.iteration) : NULL;
    if (rc == 0 && iter_dir == NULL) {
        rc = no_memory(err);
    }
    if (rc == 0 && mb_weights_are_megatrons(iter_dir)) {
        m->facts.kind = MB_MODEL_MEGATRON;
        rc = open_megatrons(iter_dir, m, err);
    } else if (rc == 0) {
        rc = open_ours(o->source, o->vocab, m, err);
    }
    mb_free(iter_dir);
    return rc;
}

static int open_model(const struct mb_convert_options *o, struct model *m, struct mb_err *err)
{
    char *config = mb_path_join(o->source, "config.json");
    *m = (struct model){.facts.iteration = o->iteration};
    if (config == NULL) {
        return no_memory(err);
    }
    m->facts.kind = mb_fs_exists(config) ? MB_MODEL_HUGGING_FACE : MB_MODEL_OURS;
    int rc = m->facts.kind == MB_MODEL_OURS
                 ? open_saved(o, m, err)
                 : open_theirs(o->source, config,
                               o->divisible_by > 0 ? o->divisible_by : DIVISIBLE_BY, m, err);
    mb_free(config);
    if (rc != 0) {
        close_model(m);
    }
    return rc;
}

int mb_model_inspect(const char *dir, int64_t iteration, struct mb_model_facts *out,
                     struct mb_err *err)
{
    const struct mb_convert_options o = {.source = dir, .iteration = iteration};
    struct model m;
    int rc = open_model(&o, &m, err);
    if (rc == 0) {
        *out = m.facts;
        close_model(&m);
    }
    return rc;
}

/* ---- writing tensors ---- */

struct writing {
    struct model *m;
    enum mb_hf_side to;
    enum mb_st_dtype dtype;
    struct mb_st_writer *w;
    size_t at_run;    /* the next one, in the target's order */
    const char *name; /* of the tensor that is being written */
    float *piece;
    uint16_t *halves;
};

/* One finite number becomes an infinite one: the model would be another. */
static int no_room(const struct writing *c, struct mb_err *err)
{
    return c->dtype == MB_ST_F16
               ? mb_err_set(err, MB_EUNSUPPORTED,
                            "tensor %s has values beyond 65504; use --dtype bf16", c->name)
               : mb_err_set(err, MB_EUNSUPPORTED,
                            "tensor %s has values beyond those of bf16; use --dtype fp32", c->name);
}

/* k values into halves; 0 if there is no room for one. */
static int narrow(struct writing *c, const float *p, size_t k)
{
    const uint16_t infinite = c->dtype == MB_ST_BF16 ? 0x7f80 : 0x7c00;
    int fits = 1;
    for (size_t i = 0; i < k; i++) {
        c->halves[i] = c->dtype == MB_ST_BF16 ? mb_float_bf16(p[i]) : mb_float_f16(p[i]);
        fits &= (c->halves[i] & 0x7fff) != infinite || isinf(p[i]);
    }
    return fits;
}

/* n values as they lie in the file. */
static int put(struct writing *c, const float *p, uint64_t n, struct mb_err *err)
{
    if (c->dtype == MB_ST_F32) {
        return mb_st_write(c->w, p, n * sizeof *p, err);
    }
    int rc = 0;
    while (n > 0 && rc == 0) {
        size_t k = n < PIECE_FLOATS ? (size_t)n : PIECE_FLOATS;
        rc = narrow(c, p, k) ? mb_st_write(c->w, c->halves, k * sizeof *c->halves, err)
                             : no_room(c, err);
        p += k;
        n -= k;
    }
    return rc;
}

/* Rows of the source, a piece at a time, to the file or, if whole is given, to its place there. */
static int copy_run(struct writing *c, const struct mb_hf_run *r, float *whole, struct mb_err *err)
{
    const enum mb_hf_side from = 1 - c->to;
    const struct mb_hf_tensor *source = &c->m->map.tensors[from][r->tensor[from]];
    const uint64_t columns = source->columns > 0 ? source->columns : 1;
    const uint64_t most = columns < PIECE_FLOATS ? PIECE_FLOATS / columns : 1;
    int rc = 0;
    for (uint64_t row = 0; row < r->n_rows && rc == 0;) {
        uint64_t k = r->n_rows - row < most ? r->n_rows - row : most;
        float *dst = whole != NULL ? whole + (r->row[c->to] + row) * columns : c->piece;
        rc = mb_hf_source_rows(c->m->source, source, r->row[from] + row, k, dst, err);
        if (rc == 0 && whole == NULL) {
            rc = put(c, dst, k * columns, err);
        }
        row += k;
    }
    return rc;
}

static int put_zeros(struct writing *c, uint64_t n, struct mb_err *err)
{
    memset(c->piece, 0, PIECE_FLOATS * sizeof *c->piece);
    int rc = 0;
    while (n > 0 && rc == 0) {
        uint64_t k = n < PIECE_FLOATS ? n : PIECE_FLOATS;
        rc = put(c, c->piece, k, err);
        n -= k;
    }
    return rc;
}

static int put_turned(struct writing *c, const struct mb_hf_tensor *t, const float *whole,
                      struct mb_err *err)
{
    int rc = 0;
    for (uint64_t column = 0; column < t->columns && rc == 0; column++) {
        for (uint64_t row = 0; row < t->rows && rc == 0;) {
            uint64_t k = 0;
            for (; k < PIECE_FLOATS && row < t->rows; k++, row++) {
                c->piece[k] = whole[row * t->columns + column];
            }
            rc = put(c, c->piece, k, err);
        }
    }
    return rc;
}

static int write_tensor(struct writing *c, size_t i, struct mb_err *err)
{
    const struct mb_hf_map *map = &c->m->map;
    const struct mb_hf_tensor *t = &map->tensors[c->to][i];
    const uint64_t columns = t->columns > 0 ? t->columns : 1;
    uint64_t row = 0;
    float *whole = t->turned ? mb_calloc(t->rows * columns, sizeof *whole) : NULL;
    int rc = !t->turned || whole != NULL ? 0 : no_memory(err);
    c->name = t->name;
    for (; c->at_run < map->n_runs && map->runs[c->at_run].tensor[c->to] == i && rc == 0;
         c->at_run++) {
        rc = copy_run(c, &map->runs[c->at_run], whole, err);
        row += map->runs[c->at_run].n_rows;
    }
    if (rc == 0) {
        rc = whole != NULL ? put_turned(c, t, whole, err)
                           : put_zeros(c, (t->rows - row) * columns, err);
    }
    mb_free(whole);
    return rc;
}

/* Tensors [begin, end) of the target, as a file has them. */
static void list_tensors(const struct writing *c, size_t begin, size_t end,
                         struct mb_st_tensor *out)
{
    for (size_t i = begin; i < end; i++) {
        const struct mb_hf_tensor *t = &c->m->map.tensors[c->to][i];
        out[i - begin] = (struct mb_st_tensor){
            .name = t->name,
            .dtype = c->dtype,
            .n_dims = t->columns > 0 ? 2 : 1,
            .shape = {t->turned ? t->columns : t->rows, t->turned ? t->rows : t->columns}};
    }
}

/* Tensors [begin, end) of the target into one file. */
static int write_file(struct writing *c, const char *path, size_t begin, size_t end,
                      struct mb_err *err)
{
    struct mb_st_meta meta = {"format", "pt"};
    struct mb_st_tensor *tensors = mb_calloc(end - begin, sizeof *tensors);
    if (tensors == NULL) {
        return no_memory(err);
    }
    list_tensors(c, begin, end, tensors);
    int rc = mb_st_create(path, tensors, end - begin, &meta, 1, &c->w, err);
    if (rc == 0) {
        for (size_t i = begin; i < end && rc == 0; i++) {
            rc = write_tensor(c, i, err);
        }
        uint64_t size, crc;
        if (rc == 0) {
            rc = mb_st_finish(c->w, &size, &crc, err);
        } else {
            mb_st_abandon(c->w);
        }
    }
    mb_free(tensors);
    return rc;
}

static int begin_writing(struct writing *c, struct mb_err *err)
{
    const struct mb_hf_map *map = &c->m->map;
    uint64_t widest = PIECE_FLOATS;
    for (size_t i = 0; i < map->n_tensors[0]; i++) {
        widest = map->tensors[0][i].columns > widest ? map->tensors[0][i].columns : widest;
    }
    c->piece = mb_calloc(widest, sizeof *c->piece);
    c->halves = mb_calloc(PIECE_FLOATS, sizeof *c->halves);
    mb_hf_map_sort(&c->m->map, c->to);
    return c->piece != NULL && c->halves != NULL ? 0 : no_memory(err);
}

/* ---- a Hugging Face directory ---- */

static uint64_t bytes_of(const struct mb_hf_tensor *t, enum mb_st_dtype dtype)
{
    return t->rows * (t->columns > 0 ? t->columns : 1) * mb_st_dtype_size(dtype);
}

/* The end of the file that begins with this tensor; a tensor is never cut. */
static size_t file_end(const struct writing *c, size_t begin, uint64_t max_bytes)
{
    const struct mb_hf_map *map = &c->m->map;
    uint64_t n = 0;
    size_t i = begin;
    while (i < map->n_tensors[c->to]) {
        n += bytes_of(&map->tensors[c->to][i], c->dtype);
        if (n > max_bytes && i > begin) {
            break;
        }
        i++;
    }
    return i;
}

static int write_index(const struct writing *c, const char *dir, json_t *weight_map,
                       struct mb_err *err)
{
    uint64_t n = mb_hf_map_count(&c->m->map, c->to) * mb_st_dtype_size(c->dtype);
    json_t *o = json_pack("{s:{s:I}, s:O}", "metadata", "total_size", (json_int_t)n, "weight_map",
                          weight_map);
    char *text = o != NULL ? json_dumps(o, JSON_INDENT(2) | JSON_SORT_KEYS) : NULL;
    char *path = mb_path_join(dir, "model.safetensors.index.json");
    int rc = text != NULL && path != NULL ? mb_fs_write_atomic(path, text, strlen(text), 0644, err)
                                          : no_memory(err);
    json_decref(o);
    mb_free(text);
    mb_free(path);
    return rc;
}

static int write_shards(struct writing *c, const char *dir, uint64_t max_bytes, struct mb_err *err)
{
    const size_t n = c->m->map.n_tensors[c->to];
    size_t n_files = 0;
    json_t *weight_map = json_object();
    int rc = weight_map != NULL ? 0 : no_memory(err);
    for (size_t i = 0; i < n; i = file_end(c, i, max_bytes)) {
        n_files++;
    }
    for (size_t i = 0, file = 1; i < n && rc == 0; file++) {
        size_t end = file_end(c, i, max_bytes);
        char name[64] = "model.safetensors";
        if (n_files > 1) {
            snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", file, n_files);
        }
        char *path = mb_path_join(dir, name);
        rc = path != NULL ? write_file(c, path, i, end, err) : no_memory(err);
        mb_free(path);
        for (; i < end; i++) {
            if (json_object_set_new(weight_map, c->m->map.tensors[c->to][i].name,
                                    json_string(name)) != 0 &&
                rc == 0) {
                rc = no_memory(err);
            }
        }
    }
    if (rc == 0 && n_files > 1) {
        rc = write_index(c, dir, weight_map, err);
    }
    json_decref(weight_map);
    return rc;
}

static int write_theirs(struct writing *c, const struct mb_convert_options *o, const char *dir,
                        struct mb_err *err)
{
    int rc = write_shards(c, dir, o->max_file_bytes > 0 ? o->max_file_bytes : FILE_BYTES, err);
    char *text = mb_hf_config_text(&c->m->facts.shape, c->dtype == MB_ST_F32    ? "float32"
                                                       : c->dtype == MB_ST_BF16 ? "bfloat16"
                                                                                : "float16");
    char *path = mb_path_join(dir, "config.json");
    if (rc == 0) {
        rc = text != NULL && path != NULL ? mb_fs_write_atomic(path, text, strlen(text), 0644, err)
                                          : no_memory(err);
    }
    mb_free(text);
    mb_free(path);
    return rc;
}

/* ---- a checkpoint of ours ---- */

static int write_weights(void *arg, const char *path, struct mb_st_tensor *tensors, size_t n,
                         struct mb_err *err)
{
    (void)tensors;
    return write_file(arg, path, 0, n, err);
}

static int write_ours(struct writing *c, const char *dir, struct mb_err *err)
{
    const struct mb_hf_map *map = &c->m->map;
    const size_t n = map->n_tensors[MB_HF_OURS];
    struct mb_st_tensor *tensors = mb_calloc(n, sizeof *tensors);
    const struct mb_checkpoint_state state = {.iteration = 1,
                                              .args_json = mb_hf_args_text(&c->m->facts.shape)};
    int rc = tensors != NULL && state.args_json != NULL ? 0 : no_memory(err);
    if (rc == 0) {
        list_tensors(c, 0, n, tensors);
        rc = mb_weights_write(dir, tensors, n, &state, write_weights, c, err);
    }
    mb_free(state.args_json);
    mb_free(tensors);
    return rc;
}

/* ---- the target ---- */

static int is_empty(const char *dir, int *out, struct mb_err *err)
{
    DIR *d = opendir(dir);
    if (d == NULL) {
        return mb_err_sys(err, errno, "%s", dir);
    }
    int n = 0;
    while (readdir(d) != NULL) {
        n++;
    }
    closedir(d);
    *out = n <= 2;
    return 0;
}

static int check_target(const char *target, struct mb_err *err)
{
    int empty = 1;
    int rc = mb_fs_exists(target) ? is_empty(target, &empty, err) : 0;
    return rc != 0 || empty
               ? rc
               : mb_err_set(err, MB_EEXIST, "%s is not empty: nothing is overwritten", target);
}

/* Whether dir is where, or anywhere above it. */
static int holds(const char *dir, const char *where)
{
    char *outer = realpath(dir, NULL), *inner = realpath(where, NULL);
    size_t n = outer != NULL ? strlen(outer) : 0;
    int held = outer != NULL && inner != NULL && strncmp(outer, inner, n) == 0 &&
               (inner[n] == '\0' || inner[n] == '/');
    mb_free(outer);
    mb_free(inner);
    return held;
}

/* Removes what a killed conversion left at partial, and nothing else. */
static int clear_partial(const char *partial, const char *marker, const char *source,
                         struct mb_err *err)
{
    if (!mb_fs_exists(partial)) {
        return 0;
    }
    if (holds(partial, source)) {
        return mb_err_set(err, MB_EINVAL,
                          "%s would be overwritten while it is read: choose another "
                          "target",
                          source);
    }
    int ours = mb_fs_exists(marker);
    int rc = ours ? 0 : is_empty(partial, &ours, err);
    if (rc == 0 && !ours) {
        rc = mb_err_set(err, MB_EEXIST,
                        "%s is no conversion's: nothing is overwritten; move it away", partial);
    }
    return rc == 0 ? mb_fs_remove_tree(partial, err) : rc;
}

/* The target's new name is on disk. */
static int sync_parent(const char *target, struct mb_err *err)
{
    char *parent = mb_path_join(target, "..");
    int rc = parent != NULL ? mb_fs_sync_dir(parent, err) : no_memory(err);
    mb_free(parent);
    return rc;
}

static int write_into(struct writing *c, const struct mb_convert_options *o, const char *dir,
                      struct mb_err *err)
{
    if (c->m->facts.kind == MB_MODEL_MEGATRON) {
        return mb_megatron_join(c->m->shards, &c->m->state, dir, err);
    }
    int rc = begin_writing(c, err);
    if (rc == 0) {
        rc = c->to == MB_HF_OURS ? write_ours(c, dir, err) : write_theirs(c, o, dir, err);
    }
    return rc;
}

static int write_partial(struct writing *c, const struct mb_convert_options *o, const char *partial,
                         const char *marker, struct mb_err *err)
{
    int rc = mb_fs_mkdir_p(partial, 0755, err);
    if (rc == 0) {
        rc = mb_fs_write_atomic(marker, "", 0, 0644, err);
    }
    if (rc == 0) {
        rc = write_into(c, o, partial, err);
    }
    if (rc == 0 && unlink(marker) != 0) {
        rc = mb_err_sys(err, errno, "%s", marker);
    }
    if (rc == 0) {
        rc = mb_fs_sync_dir(partial, err);
    }
    if (rc == 0 && rename(partial, o->target) != 0) {
        rc = mb_err_sys(err, errno, "%s: renaming it to %s", partial, o->target);
    }
    if (rc != 0) {
        mb_fs_remove_tree(partial, NULL);
    } else {
        rc = sync_parent(o->target, err);
    }
    mb_free(c->piece);
    mb_free(c->halves);
    return rc;
}

static int write_target(struct writing *c, const struct mb_convert_options *o, struct mb_err *err)
{
    size_t len = strlen(o->target);
    while (len > 1 && o->target[len - 1] == '/') {
        len--;
    }
    char *partial = mb_asprintf("%.*s.mobula-convert", (int)len, o->target);
    char *marker = partial != NULL ? mb_path_join(partial, MARKER) : NULL;
    int rc = marker != NULL ? clear_partial(partial, marker, o->source, err) : no_memory(err);
    if (rc == 0) {
        rc = write_partial(c, o, partial, marker, err);
    }
    mb_free(partial);
    mb_free(marker);
    return rc;
}

/* What was asked for and has no meaning for this source. */
static int check_options(const struct mb_convert_options *o, enum mb_model_kind kind,
                         struct mb_err *err)
{
    const unsigned ours = 1 << MB_MODEL_OURS, hf = 1 << MB_MODEL_HUGGING_FACE;
    const unsigned megatron = 1 << MB_MODEL_MEGATRON;
    const struct {
        const char *name;
        int is_given;
        unsigned kinds; /* of sources */
    } options[] = {
        {"--dtype", o->dtype != MB_ST_F32, ours},
        {"--max-shard-size", o->max_file_bytes > 0, ours},
        {"--vocab-size", o->vocab > 0, ours},
        {"--iteration", o->iteration >= 0, ours | megatron},
        {"--make-vocab-size-divisible-by", o->divisible_by > 0, hf},
    };
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        if (options[i].is_given && (options[i].kinds & 1u << kind) == 0) {
            return mb_err_set(err, MB_EINVAL, "%s: %s is %s: it has no effect there",
                              options[i].name, o->source, mb_model_kind_name(kind));
        }
    }
    return 0;
}

const char *mb_model_kind_name(enum mb_model_kind kind)
{
    static const char *const NAMES[] = {
        [MB_MODEL_HUGGING_FACE] = "a Hugging Face directory",
        [MB_MODEL_OURS] = "a checkpoint of ours",
        [MB_MODEL_MEGATRON] = "a checkpoint of Megatron-LM",
    };
    return NAMES[kind];
}

int mb_model_convert(const struct mb_convert_options *o, struct mb_model_facts *source,
                     struct mb_err *err)
{
    struct model m;
    int rc = check_target(o->target, err);
    if (rc == 0) {
        rc = open_model(o, &m, err);
    }
    if (rc != 0) {
        return rc;
    }
    const int is_ours = m.facts.kind == MB_MODEL_OURS;
    struct writing c = {.m = &m,
                        .to = is_ours ? MB_HF_THEIRS : MB_HF_OURS,
                        .dtype = is_ours ? o->dtype : MB_ST_F32};
    rc = check_options(o, m.facts.kind, err);
    if (rc == 0) {
        rc = write_target(&c, o, err);
    }
    *source = m.facts;
    close_model(&m);
    return rc;
}
