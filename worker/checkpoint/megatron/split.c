/*
 *  1. create: arguments become a Namespace that says the new layout. The vocabulary is padded as
 *     Megatron-LM would with so many ranks, if the tokenizer's size is known: with zeros, or
 *     without rows that only padded it. Every tensor of the model is there, and no other.
 *  2. write: stage by stage, the files of all its ranks at once. Each tensor is read once, a piece
 *     at a time, and each stretch of it goes to the rank whose part it is: parts come in order.
 *  3. Each file, then the directories, then the tracker are on disk before the next.
 * Stages have chunks in turn: of three stages the first has chunks 0, 3, 6 of the model's layers,
 * as model0, model1 and model2, whose parameters its optimizer numbers in this order. What strict
 * loading asks for beside tensors is there as None (_extra_state of linear layers), and the last
 * chunk has its copy of tied embeddings. Failures: layers or rows that cannot be split, a number
 * that has no room in halves, the disk.
 */
#include "worker/checkpoint/megatron/split.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"
#include "worker/checkpoint/megatron/split_optim.h"
#include "worker/checkpoint/megatron/torch_write.h"

#define FILE_NAME "model_optim_rng.pt"

enum { PIECE_FLOATS = 1 << 18, DIVISIBLE_BY = 128, NONES_PER_LAYER = 4, TENSORS_PER_PARAM = 4 };

static const char EMBEDDING[] = "embedding.word_embeddings.weight";
static const char OUTPUT[] = "output_layer.weight";

struct mb_splitter {
    struct mb_weights *w;
    const struct mb_checkpoint_state *state;
    struct mb_splitter_options o;
    json_t *args;
    struct mb_megatron_layout layout;
    const struct mb_st_tensor **sources; /* [layout.n] */
    float *piece;                        /* PIECE_FLOATS */
    uint16_t *narrow;                    /* as many bytes */
};

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "out of memory splitting a checkpoint");
}

/* ---- arguments ---- */

static const char *dtype_name(enum mb_st_dtype dtype)
{
    return dtype == MB_ST_F32    ? "torch.float32"
           : dtype == MB_ST_BF16 ? "torch.bfloat16"
                                 : "torch.float16";
}

static int set_int(json_t *args, const char *name, uint64_t value)
{
    return json_object_set_new(args, name, json_integer((json_int_t)value));
}

/* 0: not said. */
static uint64_t size_of(const json_t *args, const char *name)
{
    const json_int_t v = json_integer_value(json_object_get(args, name));
    return v > 0 && v <= 1 << 30 ? (uint64_t)v : 0;
}

static uint64_t pad_vocab(const struct mb_splitter *s, uint64_t padded)
{
    const uint64_t said = size_of(s->args, "make_vocab_size_divisible_by");
    const uint64_t by = s->o.divisible_by > 0 ? s->o.divisible_by : said > 0 ? said : DIVISIBLE_BY;
    const uint64_t vocab = size_of(s->args, "true_vocab_size"), multiple = by * s->o.tp;
    return vocab > 0 ? (vocab + multiple - 1) / multiple * multiple : padded;
}

static int set_args(struct mb_splitter *s, uint64_t padded, struct mb_err *err)
{
    json_t *args = s->args;
    const int64_t iteration = s->state->iteration > 0 ? s->state->iteration : 0;
    int bad = set_int(args, "tensor_model_parallel_size", s->o.tp);
    bad |= set_int(args, "pipeline_model_parallel_size", s->o.pp);
    bad |= set_int(args, "expert_model_parallel_size", 1);
    bad |= json_object_set_new(args, "virtual_pipeline_model_parallel_size",
                               s->o.n_chunks > 1 ? json_integer((json_int_t)s->o.n_chunks)
                                                 : json_null());
    if (!s->o.is_the_runs) {
        bad |= json_object_set_new(args, "num_layers_per_virtual_pipeline_stage", json_null());
        bad |= json_object_set_new(args, "num_virtual_stages_per_pipeline_rank", json_null());
        bad |= set_int(args, "world_size", s->o.tp * s->o.pp);
        bad |= set_int(args, "data_parallel_size", 1);
        bad |= set_int(args, "context_parallel_size", 1);
    }
    bad |= set_int(args, MB_WEIGHTS_SKIPPED, (uint64_t)s->state->skipped_iterations);
    bad |= json_object_set_new(args, "params_dtype", json_string(dtype_name(s->o.dtype)));
    bad |= json_object_set_new(args, "bf16", json_boolean(s->o.dtype == MB_ST_BF16));
    bad |= json_object_set_new(args, "fp16", json_boolean(s->o.dtype == MB_ST_F16));
    bad |= json_object_set_new(args, "ckpt_format", json_string("torch"));
    bad |= json_object_set_new(args, "use_dist_ckpt", json_false());
    bad |= json_object_set_new(args, "transformer_impl",
                               json_string(s->o.is_local ? "local" : "transformer_engine"));
    bad |= set_int(args, "padded_vocab_size", padded);
    bad |= set_int(args, "iteration", (uint64_t)iteration);
    bad |= set_int(args, "consumed_train_samples", (uint64_t)s->state->consumed_train_samples);
    bad |= set_int(args, "consumed_valid_samples", (uint64_t)s->state->consumed_valid_samples);
    return bad ? no_memory(err) : 0;
}

static int take_args(const char *name, struct mb_splitter *s, struct mb_err *err)
{
    json_error_t je;
    struct mb_megatron_layout source;
    s->args = json_loads(s->state->args_json, 0, &je);
    if (s->args == NULL) { /* it is a text that was made of JSON */
        return no_memory(err);
    }
    if (!json_is_object(s->args)) {
        return mb_err_set(err, MB_ECORRUPT, "%s: its arguments are no JSON object", name);
    }
    /* Runs of ours take it, and train the one model there is. */
    if (json_object_set_new(s->args, "use_legacy_models", json_false()) != 0) {
        return no_memory(err);
    }
    int rc = mb_megatron_args(name, s->args, err);
    if (rc == 0) {
        rc = mb_megatron_sizes(name, s->args, &source, err);
    }
    if (rc == 0 && source.padded_vocab == 0) {
        rc = mb_err_set(err, MB_ECORRUPT, "%s: there is no argument padded_vocab_size", name);
    }
    if (rc == 0 && s->o.vocab > 0) {
        rc = set_int(s->args, "true_vocab_size", s->o.vocab) == 0 ? 0 : no_memory(err);
    }
    if (rc == 0) {
        const uint64_t padded = source.padded_vocab;
        rc = set_args(s, s->o.is_the_runs ? padded : pad_vocab(s, padded), err);
    }
    return rc == 0 ? mb_megatron_sizes(name, s->args, &s->layout, err) : rc;
}

/* ---- tensors ---- */

static int is_of_vocabulary(const struct mb_megatron_tensor *t)
{
    return strcmp(t->name, EMBEDDING) == 0 || strcmp(t->name, OUTPUT) == 0;
}

static int check_source(const char *name, const struct mb_splitter *s, size_t i, struct mb_err *err)
{
    const struct mb_megatron_tensor *want = &s->layout.tensors[i];
    const struct mb_st_tensor *have = s->sources[i];
    if (have == NULL) {
        return mb_err_set(err, MB_ECORRUPT, "%s: tensor %s is missing", name, want->name);
    }
    const int n_dims = want->columns > 0 ? 2 : 1;
    /* Rows that pad it may be more or fewer, the tokenizer's have to be there. */
    const uint64_t vocab = size_of(s->args, "true_vocab_size");
    const int rows_fit = is_of_vocabulary(want) && vocab > 0 ? have->shape[0] >= vocab
                                                             : have->shape[0] == want->rows;
    if (have->dtype != MB_ST_F32 || have->n_dims != n_dims || !rows_fit ||
        (n_dims == 2 && have->shape[1] != want->columns)) {
        return mb_err_set(err, MB_ECORRUPT,
                          "%s: tensor %s: %s of %d dimensions [%" PRIu64 ", %" PRIu64
                          "], the arguments need F32 of %d [%" PRIu64 ", %" PRIu64 "]",
                          name, have->name, mb_st_dtype_name(have->dtype), have->n_dims,
                          have->n_dims > 0 ? have->shape[0] : 0,
                          have->n_dims > 1 ? have->shape[1] : 0, n_dims, want->rows, want->columns);
    }
    return 0;
}

/* Every tensor of the arguments' model was found; these are more. */
static int name_another(const char *name, const struct mb_splitter *s, struct mb_err *err)
{
    const struct mb_st_tensor *t = NULL;
    int is_known = 1;
    for (size_t i = 0; is_known && i < mb_weights_n(s->w); i++) {
        t = mb_weights_tensor(s->w, i);
        is_known = 0;
        for (size_t k = 0; !is_known && k < s->layout.n; k++) {
            is_known = s->sources[k] == t;
        }
    }
    return mb_err_set(err, MB_EUNSUPPORTED, "%s: tensor %s is none of this model: it would be lost",
                      name, t != NULL ? t->name : "");
}

static int find_sources(const char *name, struct mb_splitter *s, struct mb_err *err)
{
    const struct mb_megatron_layout *l = &s->layout;
    int rc = 0;
    s->sources = mb_calloc(l->n, sizeof(const struct mb_st_tensor *));
    if (s->sources == NULL) {
        return no_memory(err);
    }
    for (size_t i = 0; i < l->n && rc == 0; i++) {
        s->sources[i] = mb_weights_find(s->w, l->tensors[i].name);
        rc = check_source(name, s, i, err);
    }
    return rc == 0 && mb_weights_n(s->w) != l->n ? name_another(name, s, err) : rc;
}

static int check_sizes(const char *name, const struct mb_splitter *s, struct mb_err *err)
{
    const struct mb_megatron_layout *l = &s->layout;
    if (l->n_layers > mb_weights_n(s->w)) { /* before there is a list of all of them */
        return mb_err_set(err, MB_ECORRUPT, "%s: %" PRIu64 " layers, but only %zu tensors", name,
                          l->n_layers, mb_weights_n(s->w));
    }
    return l->n_layers % (l->pp * s->o.n_chunks) == 0
               ? 0
               : mb_err_set(err, MB_EINVAL,
                            "%s: its %" PRIu64 " layers are no multiple of the pipeline-parallel "
                            "size %" PRIu64 "%s",
                            name, l->n_layers, l->pp, s->o.n_chunks > 1 ? " times its chunks" : "");
}

int mb_splitter_create(const char *name, struct mb_weights *w,
                       const struct mb_checkpoint_state *state, const struct mb_splitter_options *o,
                       struct mb_splitter **out, struct mb_err *err)
{
    struct mb_splitter *s = mb_calloc(1, sizeof *s);
    if (s == NULL) {
        return no_memory(err);
    }
    s->w = w;
    s->state = state;
    s->o = *o;
    s->o.n_chunks = o->n_chunks > 0 ? o->n_chunks : 1;
    s->piece = mb_alloc(PIECE_FLOATS * sizeof *s->piece);
    s->narrow = mb_alloc(PIECE_FLOATS * sizeof *s->piece);
    int rc = s->piece != NULL && s->narrow != NULL ? take_args(name, s, err) : no_memory(err);
    if (rc == 0) {
        rc = check_sizes(name, s, err);
    }
    if (rc == 0) {
        rc = mb_megatron_layout_create(name, s->args, &s->layout, err);
    }
    if (rc == 0) {
        rc = find_sources(name, s, err);
    }
    if (rc != 0) {
        mb_splitter_close(s);
        return rc;
    }
    *out = s;
    return 0;
}

void mb_splitter_close(struct mb_splitter *s)
{
    if (s == NULL) {
        return;
    }
    mb_megatron_layout_close(&s->layout);
    json_decref(s->args);
    mb_free(s->sources);
    mb_free(s->piece);
    mb_free(s->narrow);
    mb_free(s);
}

const struct mb_megatron_layout *mb_splitter_layout(const struct mb_splitter *s)
{
    return &s->layout;
}

/* ---- a stage ---- */

/* What a tensor of a file is made of. */
enum kind { EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT, SCALE };

/* Of a stage: what each of its ranks' files has. */
struct stage {
    struct mb_st_tensor *tensors; /* shapes of a rank's parts */
    size_t *which;                /* of the layout */
    enum kind *kinds;
    json_t *more; /* of the optimizer; NULL: there is none */
    char (*names)[2 * MB_MEGATRON_NAME_MAX];
    size_t n;
    char (*none_names)[2 * MB_MEGATRON_NAME_MAX];
    const char **nones;
    size_t n_nones;
    struct mb_torch_writer **writers; /* [tp] */
};

static void close_stage(struct stage *g, uint64_t tp)
{
    for (uint64_t rank = 0; g->writers != NULL && rank < tp; rank++) {
        mb_torch_abandon(g->writers[rank]);
    }
    mb_free(g->writers);
    mb_free(g->tensors);
    mb_free(g->which);
    mb_free(g->kinds);
    json_decref(g->more);
    mb_free(g->names);
    mb_free(g->none_names);
    mb_free(g->nones);
}

/* In the file: "model.", or "model1." of a stage that has several chunks. */
static void name_in_file(const struct mb_splitter *s, uint64_t chunk, const char *name,
                         char out[2 * MB_MEGATRON_NAME_MAX])
{
    if (s->o.n_chunks > 1) {
        snprintf(out, 2 * MB_MEGATRON_NAME_MAX, "model%" PRIu64 ".%s", chunk, name);
    } else {
        snprintf(out, 2 * MB_MEGATRON_NAME_MAX, "model.%s", name);
    }
}

static void add(const struct mb_splitter *s, struct stage *g, uint64_t chunk, size_t i,
                const char *name)
{
    const struct mb_megatron_tensor *t = &s->layout.tensors[i];
    const struct mb_megatron_part p = mb_megatron_part(t, s->o.tp);
    char *to = g->names[g->n];
    name_in_file(s, chunk, name, to);
    g->which[g->n] = i;
    g->kinds[g->n] = WEIGHT;
    g->tensors[g->n++] = (struct mb_st_tensor){.name = to,
                                               .dtype = s->o.dtype,
                                               .n_dims = t->columns > 0 ? 2 : 1,
                                               .shape = {p.shape[0], p.shape[1]}};
}

static void add_none(const struct mb_splitter *s, struct stage *g, uint64_t chunk, const char *name)
{
    name_in_file(s, chunk, name, g->none_names[g->n_nones]);
    g->nones[g->n_nones] = g->none_names[g->n_nones];
    g->n_nones++;
}

static void add_nones(const struct mb_splitter *s, struct stage *g, uint64_t chunk,
                      uint64_t n_layers, int is_last)
{
    static const char *const LINEAR[NONES_PER_LAYER] = {"self_attention.linear_proj",
                                                        "self_attention.linear_qkv",
                                                        "mlp.linear_fc1", "mlp.linear_fc2"};
    char name[MB_MEGATRON_NAME_MAX];
    for (uint64_t layer = 0; layer < n_layers; layer++) {
        for (size_t i = 0; i < NONES_PER_LAYER; i++) {
            snprintf(name, sizeof name, "decoder.layers.%" PRIu64 ".%s._extra_state", layer,
                     LINEAR[i]);
            add_none(s, g, chunk, name);
        }
    }
    if (is_last) {
        add_none(s, g, chunk, "output_layer._extra_state");
    }
}

/* A layer's tensors, which begin at i. Returned: how many there are. */
static size_t list_layer(const struct mb_splitter *s, struct stage *g, uint64_t chunk, size_t i,
                         uint64_t number)
{
    const struct mb_megatron_layout *l = &s->layout;
    char name[2 * MB_MEGATRON_NAME_MAX], local[MB_MEGATRON_NAME_MAX];
    size_t n = 1;
    while (i + n < l->n && l->tensors[i + n].place == MB_MEGATRON_LAYER &&
           l->tensors[i + n].layer == l->tensors[i].layer) {
        n++;
    }
    for (int pass = 0; pass < MB_MEGATRON_PASSES; pass++) {
        for (size_t k = i; k < i + n; k++) {
            const struct mb_megatron_tensor *t = &l->tensors[k];
            if (mb_megatron_pass(t->in_layer, s->o.is_local) == pass) {
                mb_megatron_local_name(t->in_layer, local);
                snprintf(name, sizeof name, "decoder.layers.%" PRIu64 ".%s", number,
                         s->o.is_local && local[0] != '\0' ? local : t->in_layer);
                add(s, g, chunk, k, name);
            }
        }
    }
    return n;
}

static void list_chunk(const struct mb_splitter *s, uint64_t stage, uint64_t chunk, struct stage *g)
{
    const struct mb_megatron_layout *l = &s->layout;
    const uint64_t n_chunks = l->pp * s->o.n_chunks, n_layers = l->n_layers / n_chunks;
    const uint64_t which = chunk * l->pp + stage, first = which * n_layers;
    const int is_last = which == n_chunks - 1;
    for (size_t i = 0, n = 1; i < l->n; i += n) {
        const struct mb_megatron_tensor *t = &l->tensors[i];
        n = 1;
        if (t->place != MB_MEGATRON_LAYER) {
            if (t->place == MB_MEGATRON_FIRST ? which == 0 : is_last) {
                add(s, g, chunk, i, t->name);
            }
        } else if (t->layer >= first && t->layer - first < n_layers) {
            n = list_layer(s, g, chunk, i, t->layer - first);
        }
    }
    if (is_last && l->pp > 1 && !l->untied) {
        add(s, g, chunk, 0, OUTPUT); /* its copy of the embeddings, which are the first tensor */
    }
    add_nones(s, g, chunk, n_layers, is_last);
}

/* Behind the parameters, and as their parts lie: what the optimizer has of each. */
static int add_optimizer(const struct mb_splitter *s, struct stage *g, struct mb_err *err)
{
    static const enum kind KINDS[] = {EXP_AVG, EXP_AVG_SQ, MASTER};
    const struct mb_split_optim o = {.args = s->args,
                                     .state = s->state,
                                     .dtype = s->o.dtype,
                                     .is_local = s->o.is_local,
                                     .params = g->tensors,
                                     .n_params = g->n};
    const size_t n = g->n;
    g->more = mb_split_optim_make(&o);
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < mb_split_optim_per_param(s->o.dtype); k++) {
            g->which[g->n] = g->which[i];
            g->kinds[g->n] = KINDS[k];
            g->tensors[g->n] = g->tensors[i];
            g->tensors[g->n].name = strchr(g->tensors[i].name, '.') + 1; /* none of the model's */
            g->tensors[g->n++].dtype = MB_ST_F32;
        }
    }
    if (mb_split_optim_has_scale(&o)) {
        g->kinds[g->n] = SCALE;
        g->tensors[g->n++] = (struct mb_st_tensor){
            .name = "grad_scaler.scale", .dtype = MB_ST_F32, .n_dims = 1, .shape = {1}};
    }
    return g->more != NULL ? 0 : no_memory(err);
}

static int make_stage(const struct mb_splitter *s, uint64_t stage, struct stage *g,
                      struct mb_err *err)
{
    const struct mb_megatron_layout *l = &s->layout;
    const size_t most = (l->n + 1) * TENSORS_PER_PARAM + 1,
                 most_nones = l->n_layers / l->pp * NONES_PER_LAYER + 1;
    *g = (struct stage){.tensors = mb_calloc(most, sizeof *g->tensors),
                        .which = mb_calloc(most, sizeof *g->which),
                        .kinds = mb_calloc(most, sizeof *g->kinds),
                        .names = mb_calloc(l->n + 1, sizeof g->names[0]),
                        .none_names = mb_calloc(most_nones, sizeof g->none_names[0]),
                        .nones = mb_calloc(most_nones, sizeof *g->nones),
                        .writers = mb_calloc(s->o.tp, sizeof(struct mb_torch_writer *))};
    if (g->tensors == NULL || g->which == NULL || g->kinds == NULL || g->names == NULL ||
        g->none_names == NULL || g->nones == NULL || g->writers == NULL) {
        close_stage(g, s->o.tp);
        return no_memory(err);
    }
    for (uint64_t chunk = 0; chunk < s->o.n_chunks; chunk++) {
        list_chunk(s, stage, chunk, g);
    }
    int rc = s->w->has_optimizer ? add_optimizer(s, g, err) : 0;
    if (rc != 0) {
        close_stage(g, s->o.tp);
    }
    return rc;
}

/* ---- writing ---- */

static int put(struct mb_splitter *s, struct mb_torch_writer *w, const struct mb_st_tensor *t,
               const char *name, const float *p, size_t n, struct mb_err *err)
{
    const size_t n_bytes = n * mb_st_dtype_size(t->dtype);
    int rc = mb_st_narrow(name, p, n, t->dtype, s->narrow, err);
    if (rc == 0) {
        rc = mb_torch_write(w, s->narrow, n_bytes, err);
    }
    return rc == 0 && s->o.wrote != NULL ? s->o.wrote(s->o.arg, n_bytes, err) : rc;
}

/* n elements of the whole, which begin at element at, to those whose parts they are. */
static int scatter(struct mb_splitter *s, struct stage *g, size_t which, uint64_t at, size_t n,
                   struct mb_err *err)
{
    const struct mb_megatron_tensor *t = &s->layout.tensors[g->which[which]];
    const struct mb_st_tensor *to = &g->tensors[which];
    const struct mb_megatron_part p = mb_megatron_part(t, s->o.tp);
    const float *from = s->piece;
    int rc = 0;
    if (t->split == MB_MEGATRON_WHOLE) {
        for (uint64_t rank = 0; rank < s->o.tp && rc == 0; rank++) {
            rc = put(s, g->writers[rank], to, t->name, from, n, err);
        }
        return rc;
    }
    while (n > 0 && rc == 0) {
        const uint64_t in_stride = at % p.stride, left = p.run - in_stride % p.run;
        const size_t k = left < n ? (size_t)left : n;
        rc = put(s, g->writers[in_stride / p.run], to, t->name, from, k, err);
        at += k;
        from += k;
        n -= k;
    }
    return rc;
}

static int read_kind(struct mb_splitter *s, enum kind kind, const struct mb_st_tensor *source,
                     uint64_t at, size_t n, struct mb_err *err)
{
    return kind < MASTER ? mb_weights_read_moment(s->w, kind, source, at, n, s->piece, err)
                         : mb_weights_read(s->w, source, at, n, s->piece, err);
}

static int write_scale(struct mb_splitter *s, struct stage *g, size_t which, struct mb_err *err)
{
    const float scale = (float)s->state->loss_scale;
    int rc = 0;
    for (uint64_t rank = 0; rank < s->o.tp && rc == 0; rank++) {
        rc = put(s, g->writers[rank], &g->tensors[which], "scale", &scale, 1, err);
    }
    return rc;
}

static int write_tensor(struct mb_splitter *s, struct stage *g, size_t which, struct mb_err *err)
{
    const enum kind kind = g->kinds[which];
    const size_t i = g->which[which];
    const struct mb_megatron_tensor *t = &s->layout.tensors[i];
    const struct mb_st_tensor *source = s->sources[i];
    const uint64_t n = t->rows * (t->columns > 0 ? t->columns : 1);
    const uint64_t n_source = (source->end - source->begin) / sizeof(float);
    int rc = 0;
    for (uint64_t at = 0; at < n && rc == 0;) {
        const size_t k = n - at < PIECE_FLOATS ? (size_t)(n - at) : PIECE_FLOATS;
        const uint64_t there = at < n_source ? n_source - at : 0;
        const size_t n_read = there < k ? (size_t)there : k;
        if (n_read > 0) {
            rc = read_kind(s, kind, source, at, n_read, err);
        }
        memset(s->piece + n_read, 0, (k - n_read) * sizeof *s->piece);
        if (rc == 0) {
            rc = scatter(s, g, which, at, k, err);
        }
        at += k;
    }
    return rc;
}

static void rank_name(const struct mb_splitter *s, uint64_t rank, uint64_t stage, char out[64])
{
    const int n = snprintf(out, 64, "mp_rank_%02" PRIu64, rank);
    if (s->o.pp > 1) {
        snprintf(out + n, 64 - (size_t)n, "_%03" PRIu64, stage);
    }
}

static int create_file(struct mb_splitter *s, struct stage *g, const char *dir, uint64_t rank,
                       struct mb_err *err)
{
    const struct mb_torch_megatron m = {.args = s->args,
                                        .iteration =
                                            s->state->iteration > 0 ? s->state->iteration : 0,
                                        .n_chunks = s->o.n_chunks,
                                        .more = g->more,
                                        .nones = g->nones,
                                        .n_nones = g->n_nones};
    char *path = mb_path_join(dir, FILE_NAME);
    int rc = path != NULL ? mb_fs_mkdir_p(dir, 0755, err) : no_memory(err);
    if (rc == 0) {
        rc = mb_torch_create(path, g->tensors, g->n, &m, &g->writers[rank], err);
    }
    mb_free(path);
    return rc;
}

static int finish_file(const struct mb_splitter *s, struct stage *g, const char *dir, uint64_t rank,
                       struct mb_err *err)
{
    char name[96];
    uint64_t size, crc;
    int rc = mb_torch_finish(g->writers[rank], &size, &crc, err);
    g->writers[rank] = NULL; /* whatever it returned */
    if (rc == 0) {
        rc = mb_fs_sync_dir(dir, err);
    }
    snprintf(name, sizeof name, "%s/" FILE_NAME, strrchr(dir, '/') + 1);
    return rc == 0 && s->o.finished != NULL ? s->o.finished(s->o.arg, name, size, crc, err) : rc;
}

/* Of all ranks, in turn: made, or finished. */
static int each_file(struct mb_splitter *s, struct stage *g, const char *iter, uint64_t stage,
                     int finish, struct mb_err *err)
{
    int rc = 0;
    for (uint64_t rank = 0; rank < s->o.tp && rc == 0; rank++) {
        char name[64];
        rank_name(s, rank, stage, name);
        char *dir = mb_path_join(iter, name);
        rc = dir == NULL ? no_memory(err)
             : finish    ? finish_file(s, g, dir, rank, err)
                         : create_file(s, g, dir, rank, err);
        mb_free(dir);
    }
    return rc;
}

static int write_stage(struct mb_splitter *s, const char *iter, uint64_t stage, struct mb_err *err)
{
    struct stage g;
    int rc = make_stage(s, stage, &g, err);
    if (rc != 0) {
        return rc;
    }
    rc = each_file(s, &g, iter, stage, 0, err);
    for (size_t i = 0; i < g.n && rc == 0; i++) {
        rc = g.kinds[i] == SCALE ? write_scale(s, &g, i, err) : write_tensor(s, &g, i, err);
    }
    if (rc == 0) {
        rc = each_file(s, &g, iter, stage, 1, err);
    }
    close_stage(&g, s->o.tp);
    return rc;
}

static int check_optimizer(const struct mb_splitter *s, struct mb_err *err)
{
    return s->w->has_optimizer ? mb_split_optim_check("the checkpoint", s->args, err) : 0;
}

int mb_splitter_check(struct mb_splitter *s, struct mb_err *err)
{
    int rc = check_optimizer(s, err);
    for (uint64_t stage = 0; stage < s->o.pp && rc == 0; stage++) {
        struct stage g;
        rc = make_stage(s, stage, &g, err);
        if (rc == 0) {
            close_stage(&g, s->o.tp);
        }
    }
    return rc;
}

int mb_splitter_write_files(struct mb_splitter *s, const char *iter_dir, struct mb_err *err)
{
    int rc = check_optimizer(s, err);
    if (rc == 0) {
        rc = mb_fs_mkdir_p(iter_dir, 0755, err);
    }
    for (uint64_t stage = 0; stage < s->o.pp && rc == 0; stage++) {
        rc = write_stage(s, iter_dir, stage, err);
    }
    return rc == 0 ? mb_fs_sync_dir(iter_dir, err) : rc;
}

int mb_splitter_write(struct mb_splitter *s, const char *dir, struct mb_err *err)
{
    char number[24] = "release";
    const int64_t iteration = s->state->iteration > 0 ? s->state->iteration : MB_CHECKPOINT_RELEASE;
    if (iteration > 0) {
        snprintf(number, sizeof number, "%" PRId64, iteration);
    }
    char *iter = mb_weights_dir(dir, iteration);
    char *tracker = mb_path_join(dir, MB_CHECKPOINT_TRACKER);
    int rc = iter != NULL && tracker != NULL ? 0 : no_memory(err);
    if (rc == 0) {
        rc = mb_splitter_write_files(s, iter, err);
    }
    if (rc == 0) {
        rc = mb_fs_write_atomic(tracker, number, strlen(number), 0644, err);
    }
    mb_free(iter);
    mb_free(tracker);
    return rc;
}
