/*
 *  1. args: what Megatron-LM's own validation would have filled in, and what ours cannot compute.
 *  2. sizes: numbers, each with a bound.
 *  3. layout_create: embeddings, layers, final norm, output: the order of the flat buffers.
 * Failures: an argument that is missing, out of bounds, or not provided: the text names it.
 */
#include "worker/checkpoint/megatron/layout.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"

enum { PER_LAYER_MAX = 12, OUTSIDE_MAX = 5 };

static const int64_t SIZE_LIMIT = (int64_t)1 << 30;

static int no_memory(const char *name, struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "%s: out of memory for its tensors", name);
}

static int is_set(const json_t *args, const char *name, int def)
{
    const json_t *j = json_object_get(args, name);
    return json_is_boolean(j) ? json_is_true(j) : def;
}

static const char *text_of(const json_t *args, const char *name, const char *def)
{
    const char *s = json_string_value(json_object_get(args, name));
    return s != NULL ? s : def;
}

/* ---- arguments ---- */

/* What changes the computation and is none of ours. */
static const char *const REFUSED[] = {
    "squared_relu",
    "rotary_interleaved",
    "multi_latent_attention",
    "qk_layernorm",
    "quick_geglu",
    "openai_gelu",
    "onnx_safe",
    "heterogeneous_layers_config_path",
    "window_size",
    "use_legacy_models",
    "attention_output_gate",
    "mtp_num_layers",
    "is_hybrid_model",
    "num_experts",
};

static int is_used(const json_t *j)
{
    return json_is_true(j) || (json_is_integer(j) && json_integer_value(j) != 0) ||
           json_is_array(j) || json_is_string(j);
}

static int check_features(const char *name, const json_t *args, struct mb_err *err)
{
    for (size_t i = 0; i < sizeof REFUSED / sizeof REFUSED[0]; i++) {
        if (is_used(json_object_get(args, REFUSED[i]))) {
            return mb_err_set(err, MB_EUNSUPPORTED,
                              "%s: a model with %s is not provided by this version", name,
                              REFUSED[i]);
        }
    }
    const json_t *experts = json_object_get(args, "expert_model_parallel_size");
    return !json_is_integer(experts) || json_integer_value(experts) == 1
               ? 0
               : mb_err_set(err, MB_EUNSUPPORTED, "%s: expert parallelism is not provided", name);
}

/* 500000.0 was 500000 for a program that takes integers. */
static int make_integer(json_t *args, const char *name)
{
    const json_t *j = json_object_get(args, name);
    const double v = json_real_value(j);
    return json_is_real(j) && v == floor(v) && fabs(v) <= 1e15
               ? json_object_set_new(args, name, json_integer((json_int_t)v))
               : 0;
}

/* Where nothing was said. */
static int make_default(json_t *args, const char *name, int64_t value)
{
    const json_t *j = json_object_get(args, name);
    return j == NULL || json_is_null(j) ? json_object_set_new(args, name, json_integer(value)) : 0;
}

int mb_megatron_args(const char *name, json_t *args, struct mb_err *err)
{
    int rc = check_features(name, args, err);
    if (rc != 0) {
        return rc;
    }
    const json_int_t hidden = json_integer_value(json_object_get(args, "hidden_size"));
    const json_int_t heads = json_integer_value(json_object_get(args, "num_attention_heads"));
    int bad = make_integer(args, "rotary_base");
    bad |= make_integer(args, "rotary_seq_len_interpolation_factor");
    if (hidden > 0 && hidden <= SIZE_LIMIT && heads > 0) {
        bad |= make_default(args, "kv_channels", hidden / heads);
        bad |= make_default(args, "ffn_hidden_size",
                            is_set(args, "swiglu", 0) ? hidden * 8 / 3 / 64 * 64 : 4 * hidden);
    }
    if (!is_set(args, "group_query_attention", 0)) { /* its default says nothing then */
        bad |= json_object_set_new(args, "num_query_groups", json_integer(heads));
    }
    const json_t *no_biases = json_object_get(args, "disable_bias_linear"); /* so do oldest ones */
    if (json_is_boolean(no_biases)) {
        bad |= json_object_set_new(args, "add_bias_linear", json_boolean(!json_is_true(no_biases)));
    }
    if (is_set(args, "use_rotary_position_embeddings", 0)) { /* the older name */
        bad |= json_object_set_new(args, "position_embedding_type", json_string("rope"));
    }
    return bad ? no_memory(name, err) : 0;
}

static int take(const char *name, const json_t *args, const char *field, int64_t def, int64_t max,
                uint64_t *out, struct mb_err *err)
{
    const json_t *j = json_object_get(args, field);
    if ((j == NULL || json_is_null(j)) && def >= 0) {
        *out = (uint64_t)def;
        return 0;
    }
    if (!json_is_integer(j) || json_integer_value(j) < 1 || json_integer_value(j) > max) {
        return mb_err_set(err, MB_ECORRUPT, "%s: argument %s: expected a number from 1 to %" PRId64,
                          name, field, max);
    }
    *out = (uint64_t)json_integer_value(j);
    return 0;
}

int mb_megatron_sizes(const char *name, const json_t *args, struct mb_megatron_layout *l,
                      struct mb_err *err)
{
    *l = (struct mb_megatron_layout){0};
    const struct {
        const char *field;
        int64_t def, max; /* def -1: it must be there */
        uint64_t *out;
    } fields[] = {
        {"num_layers", -1, MB_MEGATRON_LAYERS_MAX, &l->n_layers},
        {"hidden_size", -1, SIZE_LIMIT, &l->hidden},
        {"num_attention_heads", -1, MB_MEGATRON_LAYERS_MAX, &l->n_heads},
        {"ffn_hidden_size", -1, SIZE_LIMIT, &l->ffn},
        {"num_query_groups", -1, MB_MEGATRON_LAYERS_MAX, &l->n_groups},
        {"kv_channels", -1, MB_MEGATRON_LAYERS_MAX, &l->head_dim},
        {"max_position_embeddings", -1, SIZE_LIMIT, &l->max_positions},
        {"padded_vocab_size", 0, SIZE_LIMIT, &l->padded_vocab},
        {"tensor_model_parallel_size", 1, MB_MEGATRON_RANKS_MAX, &l->tp},
        {"pipeline_model_parallel_size", 1, MB_MEGATRON_RANKS_MAX, &l->pp},
        {"virtual_pipeline_model_parallel_size", 1, MB_MEGATRON_RANKS_MAX, &l->n_chunks},
    };
    int rc = 0;
    for (size_t i = 0; i < sizeof fields / sizeof fields[0] && rc == 0; i++) {
        rc = take(name, args, fields[i].field, fields[i].def, fields[i].max, fields[i].out, err);
    }
    if (rc == 0 && l->tp * l->pp > MB_MEGATRON_RANKS_MAX) {
        rc = mb_err_set(err, MB_EUNSUPPORTED,
                        "%s: tensor-parallel size %" PRIu64 " and pipeline-parallel size %" PRIu64
                        ": more than %d ranks",
                        name, l->tp, l->pp, (int)MB_MEGATRON_RANKS_MAX);
    }
    if (rc == 0 && (l->n_heads % l->n_groups != 0 || l->n_heads * l->head_dim > (1u << 30))) {
        rc = mb_err_set(err, MB_ECORRUPT,
                        "%s: %" PRIu64 " heads of %" PRIu64 " channels in %" PRIu64 " groups", name,
                        l->n_heads, l->head_dim, l->n_groups);
    }
    l->untied = is_set(args, "untie_embeddings_and_output_weights", 0);
    return rc;
}

/* ---- tensors ---- */

/* What they are all made with. */
struct shape {
    uint64_t rows, columns;
    enum mb_megatron_split split;
    uint64_t n_blocks;
};

static void add(struct mb_megatron_layout *l, enum mb_megatron_place place, uint64_t layer,
                struct shape s, const char *name)
{
    struct mb_megatron_tensor *t = &l->tensors[l->n++];
    int n = place == MB_MEGATRON_LAYER
                ? snprintf(t->name, sizeof t->name, "decoder.layers.%" PRIu64 ".", layer)
                : 0;
    snprintf(t->name + n, sizeof t->name - (size_t)n, "%s", name);
    t->in_layer = t->name + n;
    t->rows = s.rows;
    t->columns = s.columns;
    t->place = place;
    t->layer = layer;
    t->split = s.split;
    t->n_blocks = s.n_blocks > 0 ? s.n_blocks : 1;
}

/* A linear layer; its bias is split where its rows are. */
static void add_linear(struct mb_megatron_layout *l, uint64_t layer, struct shape s, int has_bias,
                       const char *weight, const char *bias)
{
    add(l, MB_MEGATRON_LAYER, layer, s, weight);
    if (has_bias) {
        s.columns = 0;
        s.split = s.split == MB_MEGATRON_BY_ROWS ? MB_MEGATRON_BY_ROWS : MB_MEGATRON_WHOLE;
        add(l, MB_MEGATRON_LAYER, layer, s, bias);
    }
}

struct parts {
    int bias, qkv_bias, norm_bias, swiglu;
};

static void add_layer(struct mb_megatron_layout *l, uint64_t i, const struct parts *p)
{
    const uint64_t h = l->hidden, attention = l->n_heads * l->head_dim;
    const uint64_t qkv = attention + 2 * l->n_groups * l->head_dim;
    const struct shape norm = {h, 0, MB_MEGATRON_WHOLE, 1};
    add_linear(l, i, norm, p->norm_bias, "self_attention.linear_qkv.layer_norm_weight",
               "self_attention.linear_qkv.layer_norm_bias");
    add_linear(l, i, (struct shape){qkv, h, MB_MEGATRON_BY_ROWS, 1}, p->qkv_bias,
               "self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias");
    add_linear(l, i, (struct shape){h, attention, MB_MEGATRON_BY_COLUMNS, 1}, p->bias,
               "self_attention.linear_proj.weight", "self_attention.linear_proj.bias");
    add_linear(l, i, norm, p->norm_bias, "mlp.linear_fc1.layer_norm_weight",
               "mlp.linear_fc1.layer_norm_bias");
    add_linear(
        l, i,
        (struct shape){(p->swiglu ? 2 : 1) * l->ffn, h, MB_MEGATRON_BY_ROWS, p->swiglu ? 2 : 1},
        p->bias, "mlp.linear_fc1.weight", "mlp.linear_fc1.bias");
    add_linear(l, i, (struct shape){h, l->ffn, MB_MEGATRON_BY_COLUMNS, 1}, p->bias,
               "mlp.linear_fc2.weight", "mlp.linear_fc2.bias");
}

int mb_megatron_check_split(const char *name, const struct mb_megatron_layout *l,
                            struct mb_err *err)
{
    for (size_t i = 0; i < l->n; i++) {
        const struct mb_megatron_tensor *t = &l->tensors[i];
        const uint64_t n = t->split == MB_MEGATRON_BY_ROWS      ? t->rows / t->n_blocks
                           : t->split == MB_MEGATRON_BY_COLUMNS ? t->columns
                                                                : l->tp;
        if (n % l->tp != 0) {
            return mb_err_set(err, MB_EINVAL,
                              "%s: the %" PRIu64 " %s of tensor %s are no multiple of the "
                              "tensor-parallel size %" PRIu64,
                              name, n, t->split == MB_MEGATRON_BY_ROWS ? "rows" : "columns",
                              t->name, l->tp);
        }
    }
    return 0;
}

int mb_megatron_layout_create(const char *name, const json_t *args, struct mb_megatron_layout *l,
                              struct mb_err *err)
{
    const int bias = is_set(args, "add_bias_linear", 1);
    const int layernorm = strcmp(text_of(args, "normalization", "LayerNorm"), "RMSNorm") != 0;
    const struct parts parts = {bias, bias || is_set(args, "add_qkv_bias", 0), layernorm,
                                is_set(args, "swiglu", 0)};
    const struct shape vocab = {l->padded_vocab, l->hidden, MB_MEGATRON_BY_ROWS, 1};
    const struct shape norm = {l->hidden, 0, MB_MEGATRON_WHOLE, 1};
    l->n = 0;
    l->tensors = mb_calloc(l->n_layers * PER_LAYER_MAX + OUTSIDE_MAX, sizeof *l->tensors);
    if (l->tensors == NULL) {
        return no_memory(name, err);
    }
    add(l, MB_MEGATRON_FIRST, 0, vocab, "embedding.word_embeddings.weight");
    if (strcmp(text_of(args, "position_embedding_type", "learned_absolute"), "learned_absolute") ==
        0) {
        const struct shape table = {l->max_positions, l->hidden, MB_MEGATRON_WHOLE, 1};
        add(l, MB_MEGATRON_FIRST, 0, table, "embedding.position_embeddings.weight");
    }
    for (uint64_t i = 0; i < l->n_layers; i++) {
        add_layer(l, i, &parts);
    }
    add(l, MB_MEGATRON_LAST, 0, norm, "decoder.final_layernorm.weight");
    if (layernorm) {
        add(l, MB_MEGATRON_LAST, 0, norm, "decoder.final_layernorm.bias");
    }
    if (l->untied) {
        add(l, MB_MEGATRON_LAST, 0, vocab, "output_layer.weight");
    }
    return mb_megatron_check_split(name, l, err);
}

void mb_megatron_layout_close(struct mb_megatron_layout *l)
{
    mb_free(l->tensors);
    *l = (struct mb_megatron_layout){0};
}

struct mb_megatron_part mb_megatron_part(const struct mb_megatron_tensor *t, uint64_t tp)
{
    const uint64_t columns = t->columns > 0 ? t->columns : 1, n = t->rows * columns;
    struct mb_megatron_part p = {n, n, n, {t->rows, t->columns}};
    if (tp > 1 && t->split == MB_MEGATRON_BY_ROWS) {
        p.shape[0] /= tp;
        p.stride = n / t->n_blocks;
        p.run = p.stride / tp;
        p.n = n / tp;
    } else if (tp > 1 && t->split == MB_MEGATRON_BY_COLUMNS) {
        p.shape[1] /= tp;
        p.stride = columns;
        p.run = columns / tp;
        p.n = n / tp;
    }
    return p;
}

void mb_megatron_local_name(const char *in_layer, char out[MB_MEGATRON_NAME_MAX])
{
    static const struct {
        const char *fused, *local;
    } norms[] = {{"self_attention.linear_qkv.layer_norm_", "input_layernorm."},
                 {"mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."}};
    out[0] = '\0';
    for (size_t i = 0; i < sizeof norms / sizeof norms[0]; i++) {
        if (mb_starts_with(in_layer, norms[i].fused)) {
            snprintf(out, MB_MEGATRON_NAME_MAX, "%s%s", norms[i].local,
                     in_layer + strlen(norms[i].fused));
        }
    }
}

int mb_megatron_pass(const char *in_layer, int is_local)
{
    const int is_qkv = mb_starts_with(in_layer, "self_attention.linear_qkv.");
    const int is_norm = is_qkv && strstr(in_layer, ".layer_norm_") != NULL;
    return is_norm && is_local                                       ? 0
           : mb_starts_with(in_layer, "self_attention.linear_proj.") ? 1
           : is_qkv                                                  ? 2
                                                                     : MB_MEGATRON_PASSES - 1;
}
