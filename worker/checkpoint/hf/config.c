/*
 * config.json of transformers, as its releases 4 and 5 write it (rope_theta and rope_scaling, or
 * rope_parameters).
 *
 *  1. model_type decides the family; defaults are transformers' own.
 *  2. Every field that would change the computation must have the value that ours has.
 * Failures: no JSON, a field of a wrong type or out of bounds, another model: named.
 */
#include "worker/checkpoint/hf/shape_private.h"

#include <string.h>
#include "base/alloc.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

static int other(const char *name, const char *field, const char *why, struct mb_err *err)
{
    return mb_err_set(err, MB_EUNSUPPORTED, "%s: field \"%s\": %s", name, field, why);
}

/* A field that must be absent, null, or this. */
static int must_be_text(const char *name, const json_t *o, const char *field,
                        const char *const *good, const char *why, struct mb_err *err)
{
    const json_t *j = json_object_get(o, field);
    const char *s = json_string_value(j);
    if (j == NULL || json_is_null(j)) {
        return 0;
    }
    for (; s != NULL && *good != NULL; good++) {
        if (strcmp(s, *good) == 0) {
            return 0;
        }
    }
    return other(name, field, why, err);
}

static int must_be(const char *name, const json_t *o, const char *field, int value, const char *why,
                   struct mb_err *err)
{
    const json_t *j = json_object_get(o, field);
    if (j == NULL || json_is_null(j) || (json_is_boolean(j) && json_is_true(j) == value)) {
        return 0;
    }
    return other(name, field, why, err);
}

/* ---- rotary positions ---- */

struct scaling {
    int is_said;
    int64_t interpolation; /* as in mb_hf_shape */
    double factor;
};

/* The type's name, or NULL where there is none. */
static int take_type(const char *name, const json_t *o, const char **out, struct mb_err *err)
{
    static const char *const FIELDS[] = {"rope_type", "type"};
    *out = NULL;
    for (size_t i = 0; i < COUNT(FIELDS) && *out == NULL; i++) {
        const json_t *j = json_object_get(o, FIELDS[i]);
        if (j != NULL && !json_is_null(j) && !json_is_string(j)) {
            return other(name, FIELDS[i], "expected a text", err);
        }
        *out = json_string_value(j);
    }
    const json_t *factor = json_object_get(o, "factor");
    return *out == NULL && factor != NULL && !json_is_null(factor)
               ? other(name, "rope_type", "it is missing, but there is a \"factor\"", err)
               : 0;
}

static int take_scaling(const char *name, const char *field, const json_t *o, struct scaling *out,
                        struct mb_err *err)
{
    const char *type;
    double factor = 0, low = 0, high = 0, length = 0;
    const struct mb_hf_field fields[] = {
        {.name = "factor", .number = &factor},
        {.name = "low_freq_factor", .number = &low, .is_optional = 1},
        {.name = "high_freq_factor", .number = &high, .is_optional = 1},
        {.name = "original_max_position_embeddings", .number = &length, .is_optional = 1},
    };
    *out = (struct scaling){.interpolation = 1};
    if (o == NULL || json_is_null(o)) {
        return 0;
    }
    if (!json_is_object(o)) {
        return other(name, field, "expected an object", err);
    }
    int rc = take_type(name, o, &type, err);
    if (rc != 0 || type == NULL) {
        return rc;
    }
    out->is_said = 1;
    if (strcmp(type, "default") == 0) {
        return 0;
    }
    rc = mb_hf_take_all(name, o, fields, COUNT(fields), err);
    if (rc != 0) {
        return rc;
    }
    if (strcmp(type, "linear") == 0) {
        if (!(factor >= 1 && factor <= 1e6) || factor != (double)(int64_t)factor) {
            return other(name, "rope_scaling", "a linear factor must be a whole number", err);
        }
        out->interpolation = (int64_t)factor;
        return 0;
    }
    if (strcmp(type, "llama3") != 0) {
        return other(name, "rope_scaling", "only \"linear\" and \"llama3\" are provided", err);
    }
    if (low != 1 || high != 4 || length != 8192 || !(factor >= 1 && factor <= 1e6)) {
        return other(name, "rope_scaling",
                     "of \"llama3\" only low_freq_factor 1, high_freq_factor 4 and "
                     "original_max_position_embeddings 8192 are provided",
                     err);
    }
    out->factor = factor;
    return 0;
}

static int take_rope(const char *name, const json_t *o, struct mb_hf_shape *s, struct mb_err *err)
{
    const json_t *newer = json_object_get(o, "rope_parameters");
    const json_t *scaling = json_object_get(o, "rope_scaling");
    struct scaling old, new;
    double base = 10000, share = 1;
    const struct mb_hf_field fields[] = {
        {.name = "rope_theta", .number = &base, .is_optional = 1},
        {.name = "partial_rotary_factor", .number = &share, .is_optional = 1},
    };
    int rc = mb_hf_take_all(name, o, fields, COUNT(fields), err);
    if (rc == 0 && json_is_object(newer)) {
        rc = mb_hf_take_all(name, newer, fields, COUNT(fields), err);
    }
    if (rc == 0) {
        rc = take_scaling(name, "rope_scaling", scaling, &old, err);
    }
    if (rc == 0) {
        rc = take_scaling(name, "rope_parameters", newer, &new, err);
    }
    if (rc == 0 && old.is_said && new.is_said &&
        (old.interpolation != new.interpolation || old.factor != new.factor)) {
        rc = other(name, "rope_scaling", "it says something else than \"rope_parameters\"", err);
    }
    if (rc == 0) {
        const struct scaling *said = new.is_said ? &new : &old;
        s->rope_interpolation = said->interpolation;
        s->rope_factor = said->factor;
    }
    if (rc == 0 && share != 1) {
        rc = other(name, "partial_rotary_factor", "only 1 is provided", err);
    }
    if (rc == 0 && (!(base >= 1 && base <= 1e15) || base != (double)(int64_t)base)) {
        rc = other(name, "rope_theta", "it must be a whole number from 1 on", err);
    }
    s->rope_base = rc == 0 ? (int64_t)base : 0;
    return rc;
}

/* ---- the two families ---- */

static int take_llama(const char *name, const json_t *o, struct mb_hf_shape *s, struct mb_err *err)
{
    static const char *const ACTIVATIONS[] = {"silu", "swish", NULL};
    int tied = 0, mlp_bias = 0;
    *s = (struct mb_hf_shape){
        .family = MB_HF_LLAMA, .norm_eps = 1e-6, .rope_interpolation = 1, .max_positions = 2048};
    const struct mb_hf_field fields[] = {
        {.name = "num_hidden_layers", .size = &s->n_layers},
        {.name = "hidden_size", .size = &s->hidden},
        {.name = "intermediate_size", .size = &s->ffn},
        {.name = "num_attention_heads", .size = &s->n_heads},
        {.name = "num_key_value_heads", .size = &s->n_groups, .is_optional = 1},
        {.name = "head_dim", .size = &s->head_dim, .is_optional = 1},
        {.name = "vocab_size", .size = &s->vocab},
        {.name = "max_position_embeddings", .size = &s->max_positions, .is_optional = 1},
        {.name = "rms_norm_eps", .number = &s->norm_eps, .is_optional = 1},
        {.name = "attention_dropout", .number = &s->attention_dropout, .is_optional = 1},
        {.name = "tie_word_embeddings", .flag = &tied, .is_optional = 1},
        {.name = "attention_bias", .flag = &s->biases, .is_optional = 1},
        {.name = "mlp_bias", .flag = &mlp_bias, .is_optional = 1},
    };
    int rc = mb_hf_take_all(name, o, fields, COUNT(fields), err);
    if (rc == 0) {
        rc = take_rope(name, o, s, err);
    }
    if (rc == 0) {
        rc = must_be_text(name, o, "hidden_act", ACTIVATIONS, "only \"silu\" is provided", err);
    }
    if (rc == 0 && mlp_bias != s->biases) {
        rc = other(name, "mlp_bias", "it must be as attention_bias: all layers or none have biases",
                   err);
    }
    s->untied = !tied;
    s->n_groups = s->n_groups != 0 ? s->n_groups : s->n_heads;
    if (rc == 0 && s->head_dim == 0) {
        s->head_dim = s->hidden / s->n_heads;
    }
    return rc;
}

static int take_gpt2(const char *name, const json_t *o, struct mb_hf_shape *s, struct mb_err *err)
{
    static const char *const TANH[] = {"gelu_new", "gelu_pytorch_tanh", "gelu_fast", NULL};
    static const char *const ERF[] = {"gelu", NULL};
    const json_t *activation = json_object_get(o, "activation_function");
    int tied = 1;
    *s = (struct mb_hf_shape){.family = MB_HF_GPT2,
                              .norm_eps = 1e-5,
                              .rope_interpolation = 1,
                              .biases = 1,
                              .attention_dropout = 0.1,
                              .hidden_dropout = 0.1};
    const struct mb_hf_field fields[] = {
        {.name = "n_layer", .size = &s->n_layers},
        {.name = "n_embd", .size = &s->hidden},
        {.name = "n_inner", .size = &s->ffn, .is_optional = 1},
        {.name = "n_head", .size = &s->n_heads},
        {.name = "n_positions", .size = &s->max_positions},
        {.name = "vocab_size", .size = &s->vocab},
        {.name = "layer_norm_epsilon", .number = &s->norm_eps, .is_optional = 1},
        {.name = "attn_pdrop", .number = &s->attention_dropout, .is_optional = 1},
        {.name = "resid_pdrop", .number = &s->hidden_dropout, .is_optional = 1},
        {.name = "tie_word_embeddings", .flag = &tied, .is_optional = 1},
    };
    int rc = mb_hf_take_all(name, o, fields, COUNT(fields), err);
    if (rc == 0 && json_is_string(activation) &&
        must_be_text(name, o, "activation_function", ERF, "", NULL) == 0) {
        s->gelu_erf = 1;
    } else if (rc == 0) {
        rc = must_be_text(name, o, "activation_function", TANH,
                          "only \"gelu_new\" and \"gelu\" are provided", err);
    }
    if (rc == 0) {
        rc = must_be(name, o, "scale_attn_weights", 1, "only true is provided", err);
    }
    if (rc == 0) {
        rc = must_be(name, o, "scale_attn_by_inverse_layer_idx", 0, "only false is provided", err);
    }
    if (rc == 0) {
        rc = must_be(name, o, "add_cross_attention", 0, "only false is provided", err);
    }
    if (rc == 0 && s->hidden % s->n_heads != 0) {
        rc = mb_err_set(err, MB_ECORRUPT, "%s: n_embd %llu is no multiple of n_head %llu", name,
                        (unsigned long long)s->hidden, (unsigned long long)s->n_heads);
    }
    s->untied = !tied;
    s->n_groups = s->n_heads;
    if (rc == 0) {
        s->head_dim = s->hidden / s->n_heads;
        s->ffn = s->ffn != 0 ? s->ffn : 4 * s->hidden;
    }
    return rc;
}

int mb_hf_config_parse(const char *name, const void *text, size_t n, struct mb_hf_shape *out,
                       struct mb_err *err)
{
    json_error_t je;
    json_t *o = json_loadb(text, n, JSON_REJECT_DUPLICATES, &je);
    const char *type = json_string_value(json_object_get(o, "model_type"));
    int rc;
    if (!json_is_object(o)) {
        rc = mb_err_set(err, MB_ECORRUPT, "%s:%d: not valid JSON: %s", name, je.line, je.text);
    } else if (type == NULL) {
        rc = mb_err_set(err, MB_ECORRUPT, "%s: field \"model_type\" is missing", name);
    } else if (strcmp(type, "llama") == 0) {
        rc = take_llama(name, o, out, err);
    } else if (strcmp(type, "gpt2") == 0) {
        rc = take_gpt2(name, o, out, err);
    } else {
        rc = mb_err_set(err, MB_EUNSUPPORTED,
                        "%s: field \"model_type\": \"%s\" is not provided; llama and gpt2 are",
                        name, type);
    }
    json_decref(o);
    if (rc == 0) {
        out->padded_vocab = out->vocab;
        rc = mb_hf_shape_check(name, out, err);
    }
    return rc;
}

/* ---- writing ---- */

static json_t *llama_json(const struct mb_hf_shape *s)
{
    json_t *rope = json_pack("{s:f, s:s}", "rope_theta", (double)s->rope_base, "rope_type",
                             s->rope_factor > 0          ? "llama3"
                             : s->rope_interpolation > 1 ? "linear"
                                                         : "default");
    json_t *o = json_pack(
        "{s:[s], s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:s, s:b, s:b, s:f}",
        "architectures", "LlamaForCausalLM", "model_type", "llama", "num_hidden_layers",
        (json_int_t)s->n_layers, "hidden_size", (json_int_t)s->hidden, "intermediate_size",
        (json_int_t)s->ffn, "num_attention_heads", (json_int_t)s->n_heads, "num_key_value_heads",
        (json_int_t)s->n_groups, "head_dim", (json_int_t)s->head_dim, "vocab_size",
        (json_int_t)s->vocab, "max_position_embeddings", (json_int_t)s->max_positions,
        "rms_norm_eps", s->norm_eps, "hidden_act", "silu", "attention_bias", s->biases, "mlp_bias",
        s->biases, "attention_dropout", s->attention_dropout);
    if (s->rope_factor > 0) {
        json_object_set_new(rope, "factor", json_real(s->rope_factor));
        json_object_set_new(rope, "low_freq_factor", json_real(1));
        json_object_set_new(rope, "high_freq_factor", json_real(4));
        json_object_set_new(rope, "original_max_position_embeddings", json_integer(8192));
    } else if (s->rope_interpolation > 1) {
        json_object_set_new(rope, "factor", json_real((double)s->rope_interpolation));
    }
    /* Release 4 reads these two, release 5 the one. */
    json_object_set_new(o, "rope_theta", json_real((double)s->rope_base));
    if (s->rope_factor > 0 || s->rope_interpolation > 1) {
        json_object_set(o, "rope_scaling", rope);
    }
    json_object_set_new(o, "rope_parameters", rope);
    return o;
}

static json_t *gpt2_json(const struct mb_hf_shape *s)
{
    return json_pack("{s:[s], s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:s, s:f, s:f, s:f}",
                     "architectures", "GPT2LMHeadModel", "model_type", "gpt2", "n_layer",
                     (json_int_t)s->n_layers, "n_embd", (json_int_t)s->hidden, "n_inner",
                     (json_int_t)s->ffn, "n_head", (json_int_t)s->n_heads, "n_positions",
                     (json_int_t)s->max_positions, "vocab_size", (json_int_t)s->vocab,
                     "layer_norm_epsilon", s->norm_eps, "activation_function",
                     s->gelu_erf ? "gelu" : "gelu_new", "attn_pdrop", s->attention_dropout,
                     "resid_pdrop", s->hidden_dropout, "embd_pdrop", s->hidden_dropout);
}

char *mb_hf_config_text(const struct mb_hf_shape *s, const char *dtype)
{
    json_t *o = s->family == MB_HF_LLAMA ? llama_json(s) : gpt2_json(s);
    int bad = o == NULL;
    bad |= json_object_set_new(o, "tie_word_embeddings", json_boolean(!s->untied));
    bad |= json_object_set_new(o, "torch_dtype", json_string(dtype));
    char *text = bad ? NULL : json_dumps(o, JSON_INDENT(2) | JSON_SORT_KEYS);
    json_decref(o);
    return text;
}
