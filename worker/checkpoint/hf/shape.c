/*
 * Bounds of a shape, and the arguments. config.json has a file of its own (config.c).
 *
 *  1. args_parse: which family it is follows from norm, positions and MLP; every argument that this
 *     family has fixed must have that value.
 *  2. args_text: the arguments that describe the model, by Megatron-LM's names.
 * Failures: a field that is missing or out of bounds, a model that is of neither family: the text
 * names the file and the argument.
 */
#include "worker/checkpoint/hf/shape_private.h"

#include <string.h>
#include "base/alloc.h"

static const uint64_t SIZE_LIMIT = (uint64_t)1 << 30, LAYERS_LIMIT = 1 << 16,
                      PIECES_LIMIT = 1 << 22;

int mb_hf_shape_check(const char *name, const struct mb_hf_shape *s, struct mb_err *err)
{
    const struct {
        uint64_t value, max;
        const char *what;
    } sizes[] = {{s->n_layers, LAYERS_LIMIT, "number of layers"},
                 {s->hidden, SIZE_LIMIT, "hidden size"},
                 {s->ffn, SIZE_LIMIT, "width of the MLP"},
                 {s->n_heads, LAYERS_LIMIT, "number of heads"},
                 {s->n_groups, LAYERS_LIMIT, "number of key-value heads"},
                 {s->head_dim, LAYERS_LIMIT, "width of a head"},
                 {s->max_positions, SIZE_LIMIT, "number of positions"},
                 {s->vocab, SIZE_LIMIT, "vocabulary"},
                 {s->padded_vocab, SIZE_LIMIT, "padded vocabulary"}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (sizes[i].value == 0 || sizes[i].value > sizes[i].max) {
            return mb_err_set(err, MB_ECORRUPT, "%s: the %s is %llu: it must be from 1 to %llu",
                              name, sizes[i].what, (unsigned long long)sizes[i].value,
                              (unsigned long long)sizes[i].max);
        }
    }
    if (s->n_heads % s->n_groups != 0) {
        return mb_err_set(err, MB_ECORRUPT,
                          "%s: %llu heads are no multiple of %llu key-value heads", name,
                          (unsigned long long)s->n_heads, (unsigned long long)s->n_groups);
    }
    if (s->vocab > s->padded_vocab) {
        return mb_err_set(err, MB_EINVAL, "%s: a vocabulary of %llu is more than the %llu rows",
                          name, (unsigned long long)s->vocab, (unsigned long long)s->padded_vocab);
    }
    if (s->n_layers * s->n_groups > PIECES_LIMIT) {
        return mb_err_set(err, MB_EUNSUPPORTED, "%s: %llu layers with %llu key-value heads", name,
                          (unsigned long long)s->n_layers, (unsigned long long)s->n_groups);
    }
    if (s->n_heads * s->head_dim > SIZE_LIMIT) {
        return mb_err_set(err, MB_ECORRUPT, "%s: %llu heads of %llu channels", name,
                          (unsigned long long)s->n_heads, (unsigned long long)s->head_dim);
    }
    if (!(s->norm_eps > 0 && s->norm_eps < 1)) {
        return mb_err_set(err, MB_ECORRUPT, "%s: the norm's epsilon is %g", name, s->norm_eps);
    }
    return 0;
}

int mb_hf_take(const char *name, const json_t *o, const struct mb_hf_field *f, struct mb_err *err)
{
    const json_t *j = json_object_get(o, f->name);
    if (j == NULL || json_is_null(j)) {
        if (f->is_optional) {
            return 0;
        }
        return mb_err_set(err, MB_ECORRUPT, "%s: field \"%s\" is missing", name, f->name);
    }
    if (f->size != NULL && json_is_integer(j) && json_integer_value(j) > 0) {
        *f->size = (uint64_t)json_integer_value(j);
        return 0;
    }
    if (f->number != NULL && json_is_number(j)) {
        *f->number = json_number_value(j);
        return 0;
    }
    if (f->flag != NULL && json_is_boolean(j)) {
        *f->flag = json_is_true(j);
        return 0;
    }
    return mb_err_set(err, MB_ECORRUPT, "%s: field \"%s\": expected %s", name, f->name,
                      f->size != NULL     ? "a number from 1 on"
                      : f->number != NULL ? "a number"
                                          : "true or false");
}

int mb_hf_take_all(const char *name, const json_t *o, const struct mb_hf_field *fields, size_t n,
                   struct mb_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < n && rc == 0; i++) {
        rc = mb_hf_take(name, o, &fields[i], err);
    }
    return rc;
}

/* ---- arguments ---- */

static const char *text_of(const json_t *args, const char *name, const char *def)
{
    const char *s = json_string_value(json_object_get(args, name));
    return s != NULL ? s : def;
}

static int is_set(const json_t *args, const char *name, int def)
{
    const json_t *j = json_object_get(args, name);
    return json_is_boolean(j) ? json_is_true(j) : def;
}

static int unlike(const char *name, const char *argument, const char *family, struct mb_err *err)
{
    return mb_err_set(err, MB_EUNSUPPORTED,
                      "%s: with %s this is no model that transformers' %s can "
                      "be",
                      name, argument, family);
}

static int take_llama(const char *name, const json_t *args, struct mb_hf_shape *s,
                      struct mb_err *err)
{
    static const char FAMILY[] = "LlamaForCausalLM";
    const json_t *factor = json_object_get(args, "rotary_seq_len_interpolation_factor");
    double percent = 1, scaling = 8, base = 10000;
    const struct mb_hf_field fields[] = {
        {.name = "rotary_percent", .number = &percent, .is_optional = 1},
        {.name = "rope_scaling_factor", .number = &scaling, .is_optional = 1},
        {.name = "rotary_base", .number = &base, .is_optional = 1},
    };
    int rc = mb_hf_take_all(name, args, fields, sizeof fields / sizeof fields[0], err);
    if (rc != 0) {
        return rc;
    }
    if (!is_set(args, "swiglu", 0)) {
        return unlike(name, "RMSNorm and no --swiglu", FAMILY, err);
    }
    if (strcmp(text_of(args, "position_embedding_type", ""), "rope") != 0) {
        return unlike(name, "RMSNorm and no --position-embedding-type rope", FAMILY, err);
    }
    if (percent != 1) {
        return unlike(name, "--rotary-percent", FAMILY, err);
    }
    if (!(base >= 1 && base <= 1e15)) {
        return mb_err_set(err, MB_ECORRUPT, "%s: rotary_base is %g", name, base);
    }
    s->rope_base = (int64_t)base;
    s->rope_interpolation = json_is_integer(factor) ? json_integer_value(factor) : 1;
    s->rope_factor = is_set(args, "use_rope_scaling", 0) ? scaling : 0;
    if (s->rope_interpolation < 1 || (s->rope_interpolation > 1 && s->rope_factor > 0)) {
        return unlike(name, "--rotary-seq-len-interpolation-factor and --use-rope-scaling", FAMILY,
                      err);
    }
    s->biases = is_set(args, "add_bias_linear", 1);
    if (!s->biases && is_set(args, "add_qkv_bias", 0)) {
        return unlike(name, "--add-qkv-bias", FAMILY, err);
    }
    return 0;
}

static int take_gpt2(const char *name, const json_t *args, struct mb_hf_shape *s,
                     struct mb_err *err)
{
    static const char FAMILY[] = "GPT2LMHeadModel";
    const struct mb_hf_field fields[] = {
        {.name = "attention_dropout", .number = &s->attention_dropout, .is_optional = 1},
        {.name = "hidden_dropout", .number = &s->hidden_dropout, .is_optional = 1},
    };
    int rc = mb_hf_take_all(name, args, fields, sizeof fields / sizeof fields[0], err);
    if (rc != 0) {
        return rc;
    }
    if (is_set(args, "swiglu", 0)) {
        return unlike(name, "LayerNorm and --swiglu", FAMILY, err);
    }
    if (strcmp(text_of(args, "position_embedding_type", "learned_absolute"), "learned_absolute") !=
        0) {
        return unlike(name, "LayerNorm and --position-embedding-type", FAMILY, err);
    }
    if (!is_set(args, "add_bias_linear", 1)) {
        return unlike(name, "LayerNorm and --disable-bias-linear", FAMILY, err);
    }
    if (s->n_groups != s->n_heads) {
        return unlike(name, "--group-query-attention", FAMILY, err);
    }
    if (s->head_dim * s->n_heads != s->hidden) {
        return unlike(name, "--kv-channels", FAMILY, err);
    }
    s->biases = 1;
    s->gelu_erf = !is_set(args, "bias_gelu_fusion", 1);
    return 0;
}

int mb_hf_args_parse(const char *name, const char *args_json, uint64_t vocab, struct mb_hf_shape *s,
                     struct mb_err *err)
{
    json_error_t je;
    json_t *args = json_loads(args_json, JSON_REJECT_DUPLICATES, &je);
    *s = (struct mb_hf_shape){.norm_eps = 1e-5, .vocab = vocab};
    uint64_t true_vocab = 0;
    const struct mb_hf_field fields[] = {
        {.name = "num_layers", .size = &s->n_layers},
        {.name = "hidden_size", .size = &s->hidden},
        {.name = "ffn_hidden_size", .size = &s->ffn},
        {.name = "num_attention_heads", .size = &s->n_heads},
        {.name = "kv_channels", .size = &s->head_dim},
        {.name = "num_query_groups", .size = &s->n_groups},
        {.name = "max_position_embeddings", .size = &s->max_positions},
        {.name = "padded_vocab_size", .size = &s->padded_vocab},
        {.name = "true_vocab_size", .size = &true_vocab, .is_optional = 1},
        {.name = "norm_epsilon", .number = &s->norm_eps, .is_optional = 1},
        {.name = "untie_embeddings_and_output_weights", .flag = &s->untied, .is_optional = 1},
    };
    int rc =
        json_is_object(args) ? 0 : mb_err_set(err, MB_ECORRUPT, "%s: \"args\" is no object", name);
    if (rc == 0) {
        rc = mb_hf_take_all(name, args, fields, sizeof fields / sizeof fields[0], err);
    }
    if (rc == 0 && s->vocab == 0) {
        s->vocab = true_vocab != 0 ? true_vocab : s->padded_vocab;
    }
    if (rc == 0 && is_set(args, "apply_layernorm_1p", 0)) {
        rc = unlike(name, "--apply-layernorm-1p", "models", err);
    }
    if (rc == 0) {
        s->family = strcmp(text_of(args, "normalization", "LayerNorm"), "RMSNorm") == 0
                        ? MB_HF_LLAMA
                        : MB_HF_GPT2;
        rc = s->family == MB_HF_LLAMA ? take_llama(name, args, s, err)
                                      : take_gpt2(name, args, s, err);
    }
    json_decref(args);
    return rc == 0 ? mb_hf_shape_check(name, s, err) : rc;
}

char *mb_hf_args_text(const struct mb_hf_shape *s)
{
    const int llama = s->family == MB_HF_LLAMA;
    json_t *o = json_pack(
        "{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:b, s:b, s:b, s:b, s:s, s:s, s:f, "
        "s:f}",
        "num_layers", (json_int_t)s->n_layers, "hidden_size", (json_int_t)s->hidden,
        "ffn_hidden_size", (json_int_t)s->ffn, "num_attention_heads", (json_int_t)s->n_heads,
        "kv_channels", (json_int_t)s->head_dim, "num_query_groups", (json_int_t)s->n_groups,
        "max_position_embeddings", (json_int_t)s->max_positions, "padded_vocab_size",
        (json_int_t)s->padded_vocab, "true_vocab_size", (json_int_t)s->vocab, "norm_epsilon",
        s->norm_eps, "untie_embeddings_and_output_weights", s->untied, "group_query_attention",
        s->n_groups != s->n_heads, "add_bias_linear", s->biases, "apply_layernorm_1p", 0,
        "normalization", llama ? "RMSNorm" : "LayerNorm", "position_embedding_type",
        llama ? "rope" : "learned_absolute", "attention_dropout", s->attention_dropout,
        "hidden_dropout", s->hidden_dropout);
    int bad = o == NULL;
    bad |= json_object_set_new(o, "swiglu", json_boolean(llama));
    bad |= json_object_set_new(o, "add_qkv_bias", json_boolean(0));
    if (llama) {
        bad |= json_object_set_new(o, "rotary_base", json_integer(s->rope_base));
        bad |= json_object_set_new(o, "rotary_percent", json_real(1));
        bad |= json_object_set_new(o, "use_rope_scaling", json_boolean(s->rope_factor > 0));
        bad |= json_object_set_new(o, "rope_scaling_factor",
                                   json_real(s->rope_factor > 0 ? s->rope_factor : 8));
        bad |= json_object_set_new(o, "rotary_seq_len_interpolation_factor",
                                   s->rope_interpolation > 1 ? json_integer(s->rope_interpolation)
                                                             : json_null());
    } else {
        bad |= json_object_set_new(o, "bias_gelu_fusion", json_boolean(!s->gelu_erf));
    }
    char *text = bad ? NULL : json_dumps(o, JSON_COMPACT);
    json_decref(o);
    return text;
}
