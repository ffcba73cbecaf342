/*
 *  1. What the source is: config.json makes it Hugging Face's, a tracker or iteration ours or
 *     Megatron-LM's (weights.h). Shape and tensors are checked as a whole before anything is
 *     written.
 *  2. Everything is written into a directory that gets its name at the end (target.h): from and to
 *     Megatron-LM's by megatron/join.h and split.h, else here.
 *  3. Tensor by tensor of the target, in its order: each run of rows is read, narrowed, written;
 *     rows that pad the vocabulary are zeros.
 * Failures: a target that is not empty; a way that there is not; an option of another way; a number
 * that the target's type has no room for; whatever source, shape and disk say.
 */
#include "worker/checkpoint/hf/convert.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/fs.h"
#include "base/str.h"
#include "worker/checkpoint/hf/files.h"
#include "worker/checkpoint/hf/target.h"
#include "worker/checkpoint/megatron/join.h"
#include "worker/checkpoint/megatron/split.h"

enum { CONFIG_MAX = 16 << 20, PIECE_FLOATS = 1 << 18, DIVISIBLE_BY = 128 };

static const uint64_t FILE_BYTES = 5000000000u;

struct model {
    struct mb_model_facts facts;
    struct mb_hf_map map;
    struct mb_hf_source *source;
    /* Of Megatron-LM's, or for it; and then there is no source. */
    struct mb_weights weights;
    struct mb_checkpoint_state state;
    struct mb_splitter *split; /* what they become, for it */
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

/* What arguments say; any model that can be trained, not only those of two families. */
static void take_sizes(const struct mb_megatron_layout *l, struct model *m)
{
    m->facts.shape = (struct mb_hf_shape){.n_layers = l->n_layers,
                                          .hidden = l->hidden,
                                          .ffn = l->ffn,
                                          .n_heads = l->n_heads,
                                          .n_groups = l->n_groups,
                                          .head_dim = l->head_dim,
                                          .max_positions = l->max_positions,
                                          .vocab = l->padded_vocab,
                                          .padded_vocab = l->padded_vocab,
                                          .untied = l->untied};
    m->facts.n_tensors = mb_weights_n(&m->weights);
    for (size_t i = 0; i < m->facts.n_tensors; i++) {
        const struct mb_st_tensor *t = mb_weights_tensor(&m->weights, i);
        m->facts.n_parameters += (t->end - t->begin) / sizeof(float);
    }
}

static void take_megatron_facts(struct model *m)
{
    const struct mb_megatron_layout *l = mb_shards_layout(m->weights.megatron);
    take_sizes(l, m);
    m->facts.n_files = mb_shards_n_files(m->weights.megatron);
    m->facts.total_bytes = mb_shards_bytes(m->weights.megatron);
    m->facts.is_dist = mb_shards_are_dist(m->weights.megatron);
    m->facts.tensor_parallel_size = l->tp;
    m->facts.pipeline_parallel_size = l->pp;
    m->facts.optimizer_steps = m->state.has_optimizer ? m->state.optimizer_steps : -1;
    m->facts.optimizer_refused = m->state.optimizer_refused;
}

static int open_megatrons(const char *iter_dir, struct model *m, struct mb_err *err)
{
    int rc = mb_weights_open(iter_dir, &m->weights, err);
    if (rc == 0) {
        rc = mb_weights_state(m->weights.megatron, iter_dir, m->facts.iteration, &m->state, err);
    }
    if (rc == 0) {
        take_megatron_facts(m);
    }
    return rc;
}

/* path: where it is, owned by the caller. */
static int read_state(const char *dir, int64_t iteration, char **path,
                      struct mb_checkpoint_state *state, struct mb_err *err)
{
    char iter[32];
    struct mb_buf text = {0};
    mb_checkpoint_iter_name(iteration, iter);
    *path = mb_asprintf("%s/%s/" MB_CHECKPOINT_STATE_FILE, dir, iter);
    int rc =
        *path != NULL ? mb_fs_read(*path, MB_CHECKPOINT_STATE_MAX, &text, err) : no_memory(err);
    if (rc == 0) {
        rc = mb_checkpoint_state_decode(*path, text.data, text.len, state, err);
    }
    mb_buf_close(&text);
    return rc;
}

/* For Megatron-LM: a model of any kind. */
static int open_weights(const char *dir, const char *iter_dir, struct model *m, struct mb_err *err)
{
    struct mb_megatron_layout sizes;
    char *file;
    int rc = read_state(dir, m->facts.iteration, &file, &m->state, err);
    if (rc == 0) {
        rc = mb_weights_open(iter_dir, &m->weights, err);
    }
    json_error_t je;
    json_t *args = rc == 0 ? json_loads(m->state.args_json, 0, &je) : NULL;
    if (rc == 0) {
        rc = args != NULL ? mb_megatron_sizes(file, args, &sizes, err) : no_memory(err);
    }
    if (rc == 0) {
        take_sizes(&sizes, m);
        m->facts.n_files = 1;
        m->facts.total_bytes = m->facts.n_parameters * sizeof(float);
    }
    json_decref(args);
    mb_free(file);
    return rc;
}

static int open_ours(const char *dir, uint64_t vocab, struct model *m, struct mb_err *err)
{
    char iter[32], *file;
    struct mb_checkpoint_state state = {0};
    mb_checkpoint_iter_name(m->facts.iteration, iter);
    char *weights = mb_asprintf("%s/%s/" MB_CHECKPOINT_MODEL_FILE, dir, iter);
    int rc = read_state(dir, m->facts.iteration, &file, &state, err);
    if (rc == 0 && weights == NULL) {
        rc = no_memory(err);
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
    mb_free(file);
    mb_free(weights);
    return rc;
}

static void close_model(struct model *m)
{
    mb_hf_source_close(m->source);
    mb_hf_map_close(&m->map);
    mb_splitter_close(m->split);
    mb_weights_close(&m->weights);
    mb_checkpoint_state_close(&m->state);
}

/* What is not read is no loss to who does not want it, and an error else. */
static int take_optimizer(const struct mb_convert_options *o, const char *iter_dir, struct model *m,
                          struct mb_err *err)
{
    if (o->no_load_optim) {
        m->state.has_optimizer = 0;
        return 0;
    }
    if (m->state.optimizer_refused.code != 0) {
        return mb_err_set(err, m->state.optimizer_refused.code,
                          "%s; --no-load-optim converts it without the optimizer",
                          m->state.optimizer_refused.text);
    }
    m->facts.has_optimizer = m->state.has_optimizer;
    return m->state.has_optimizer ? mb_weights_take_optimizer(&m->weights, iter_dir, &m->state, err)
                                  : 0;
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
    } else if (rc == 0 && o->to == MB_MODEL_MEGATRON) {
        rc = open_weights(o->source, iter_dir, m, err);
    } else if (rc == 0) {
        rc = open_ours(o->source, o->vocab, m, err);
    }
    if (rc == 0 && o->to == MB_MODEL_MEGATRON) {
        const struct mb_splitter_options split = {
            .tp = o->tensor_parallel_size > 0 ? o->tensor_parallel_size : 1,
            .pp = o->pipeline_parallel_size > 0 ? o->pipeline_parallel_size : 1,
            .vocab = o->vocab,
            .divisible_by = o->divisible_by,
            .dtype = o->dtype,
            .is_local = o->is_local};
        rc = mb_splitter_create(iter_dir, &m->weights, &m->state, &split, &m->split, err);
    }
    if (rc == 0 && (o->to == MB_MODEL_MEGATRON || m->facts.kind == MB_MODEL_MEGATRON)) {
        rc = take_optimizer(o, iter_dir, m, err);
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

int mb_model_inspect(const char *dir, int64_t iteration, int checks_bytes,
                     struct mb_model_facts *out, struct mb_err *err)
{
    const struct mb_convert_options o = {
        .source = dir, .iteration = iteration, .to = -1, .no_load_optim = 1};
    struct model m;
    int rc = open_model(&o, &m, err);
    if (rc != 0) {
        return rc;
    }
    if (checks_bytes) {
        rc = m.facts.kind == MB_MODEL_MEGATRON
                 ? mb_shards_verify(m.weights.megatron, NULL, err)
                 : mb_hf_source_verify(m.source, &m.facts.n_without_sums, err);
    }
    *out = m.facts;
    close_model(&m);
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

/* n values as they lie in the file. */
static int put(struct writing *c, const float *p, uint64_t n, struct mb_err *err)
{
    if (c->dtype == MB_ST_F32) {
        return mb_st_write(c->w, p, n * sizeof *p, err);
    }
    int rc = 0;
    while (n > 0 && rc == 0) {
        size_t k = n < PIECE_FLOATS ? (size_t)n : PIECE_FLOATS;
        rc = mb_st_narrow(c->name, p, k, c->dtype, c->halves, err);
        if (rc == 0) {
            rc = mb_st_write(c->w, c->halves, k * sizeof *c->halves, err);
        }
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

/* ---- a conversion ---- */

struct converting {
    struct writing *c;
    const struct mb_convert_options *o;
};

static int write_into(void *arg, const char *dir, struct mb_err *err)
{
    const struct converting *v = arg;
    struct model *m = v->c->m;
    int rc = 0;
    if (m->facts.kind == MB_MODEL_MEGATRON) {
        rc = mb_shards_verify(m->weights.megatron, NULL, err);
    }
    if (rc == 0 && m->split != NULL) {
        return mb_splitter_write(m->split, dir, err);
    }
    if (rc != 0 || m->facts.kind == MB_MODEL_MEGATRON) {
        return rc != 0 ? rc : mb_megatron_join(&m->weights, &m->state, dir, err);
    }
    rc = begin_writing(v->c, err);
    if (rc == 0) {
        rc = v->c->to == MB_HF_OURS ? write_ours(v->c, dir, err)
                                    : write_theirs(v->c, v->o, dir, err);
    }
    return rc;
}

/* The ways there are, as bits. */
enum way {
    NO_WAY,
    HF_TO_OURS = 1,
    MEGATRON_TO_OURS = 2,
    OURS_TO_HF = 4,
    OURS_TO_MEGATRON = 8,
    MEGATRON_TO_MEGATRON = 16
};

static int find_way(const struct mb_convert_options *o, enum mb_model_kind source, enum way *way,
                    struct mb_err *err)
{
    static const struct {
        enum way way;
        enum mb_model_kind from, to; /* the first of a source is what is made where none is named */
    } WAYS[] = {
        {HF_TO_OURS, MB_MODEL_HUGGING_FACE, MB_MODEL_OURS},
        {MEGATRON_TO_OURS, MB_MODEL_MEGATRON, MB_MODEL_OURS},
        {MEGATRON_TO_MEGATRON, MB_MODEL_MEGATRON, MB_MODEL_MEGATRON},
        {OURS_TO_HF, MB_MODEL_OURS, MB_MODEL_HUGGING_FACE},
        {OURS_TO_MEGATRON, MB_MODEL_OURS, MB_MODEL_MEGATRON},
    };
    for (size_t i = 0; i < sizeof WAYS / sizeof WAYS[0]; i++) {
        if (WAYS[i].from == source && (o->to < 0 || o->to == (int)WAYS[i].to)) {
            *way = WAYS[i].way;
            return 0;
        }
    }
    return mb_err_set(err, MB_EINVAL,
                      o->to == (int)source
                          ? "%s is %s already"
                          : "%s is %s: convert it into a checkpoint of ours, and that again",
                      o->source, mb_model_kind_name(source));
}

/* What was asked for and has no meaning for this source and target. */
static int check_options(const struct mb_convert_options *o, enum mb_model_kind kind, enum way way,
                         struct mb_err *err)
{
    const unsigned to_megatron = OURS_TO_MEGATRON | MEGATRON_TO_MEGATRON;
    const struct {
        const char *name;
        int is_given;
        unsigned ways;
    } options[] = {
        {"--dtype", o->dtype != MB_ST_F32, OURS_TO_HF | to_megatron},
        {"--max-shard-size", o->max_file_bytes > 0, OURS_TO_HF},
        {"--vocab-size", o->vocab > 0, OURS_TO_HF | to_megatron},
        {"--iteration", o->iteration >= 0, MEGATRON_TO_OURS | OURS_TO_HF | to_megatron},
        {"--make-vocab-size-divisible-by", o->divisible_by > 0, HF_TO_OURS | to_megatron},
        {"--tensor-model-parallel-size", o->tensor_parallel_size > 0, to_megatron},
        {"--pipeline-model-parallel-size", o->pipeline_parallel_size > 0, to_megatron},
        {"--transformer-impl", o->is_local, to_megatron},
        {"--no-load-optim", o->no_load_optim, MEGATRON_TO_OURS | to_megatron},
    };
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        if (options[i].is_given && (options[i].ways & way) == 0) {
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
    enum way way = NO_WAY;
    int rc = mb_target_check(o->target, err);
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
    struct converting v = {.c = &c, .o = o};
    rc = find_way(o, m.facts.kind, &way, err);
    if (rc == 0) {
        rc = check_options(o, m.facts.kind, way, err);
    }
    if (rc == 0) {
        m.facts.target = m.split != NULL     ? MB_MODEL_MEGATRON
                         : way == OURS_TO_HF ? MB_MODEL_HUGGING_FACE
                                             : MB_MODEL_OURS;
        rc = mb_target_write(o->target, o->source, write_into, &v, err);
    }
    mb_free(c.piece);
    mb_free(c.halves);
    *source = m.facts;
    close_model(&m);
    return rc;
}
