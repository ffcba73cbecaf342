/*
 * What a checkpoint's arguments say of its model: taken, or compared with the command line's.
 *
 *  1. adopt (--use-checkpoint-args, as Megatron-LM's load_args_from_checkpoint): sizes are taken
 *     where the command line has none; what else makes the model is the checkpoint's, whatever the
 *     command line says. Each that is taken, and each that the checkpoint does not have, is a line
 *     of the notes. How ranks share the model is taken if that was asked for, too. What a
 *     checkpoint has as null it does not provide: the command line's stays.
 *  2. compare: what makes tensors mean something else must be equal. What only changes how they are
 *     used must be, too, while the same training goes on; a new one may mean it (a longer context),
 *     and hears a line about it. An argument that the checkpoint does not have is not compared.
 * Failure: a value that its argument could not have is MB_ECORRUPT, with the argument's text;
 * another model is MB_EINVAL, with Megatron's text.
 */
#include "worker/args_table.h"

#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/printable.h"

static const struct {
    const char *dest;
    int forced;
} TAKEN[] = {
    {"num_layers", 0},
    {"hidden_size", 0},
    {"ffn_hidden_size", 0},
    {"seq_length", 0},
    {"num_attention_heads", 0},
    {"kv_channels", 0},
    {"max_position_embeddings", 0},
    {"num_query_groups", 1},
    {"group_query_attention", 1},
    {"position_embedding_type", 1},
    {"add_position_embedding", 1},
    {"use_rotary_position_embeddings", 1},
    {"rotary_base", 1},
    {"rotary_percent", 1},
    {"rotary_seq_len_interpolation_factor", 1},
    {"use_rope_scaling", 1},
    {"rope_scaling_factor", 1},
    {"add_bias_linear", 1},
    {"add_qkv_bias", 1},
    {"swiglu", 1},
    {"bias_gelu_fusion", 1},
    {"untie_embeddings_and_output_weights", 1},
    {"apply_layernorm_1p", 1},
    {"normalization", 1},
    {"norm_epsilon", 1},
    {"attention_dropout", 1},
    {"hidden_dropout", 1},
    {"tiktoken_pattern", 1},
};

/* With --use-mp-args-from-checkpoint-args: how ranks share the model. */
static const char *const LAYOUT[] = {"tensor_model_parallel_size", "pipeline_model_parallel_size",
                                     "num_layers_per_virtual_pipeline_stage",
                                     "num_virtual_stages_per_pipeline_rank"};

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "out of memory for the checkpoint's arguments");
}

size_t mb_arg_row_of(const char *dest)
{
    char name[64];
    size_t i = 0;
    for (; i < MB_ARG_N_ROWS; i++) {
        mb_arg_dest(&MB_ARG_ROWS[i], name);
        if (strcmp(name, dest) == 0) {
            break;
        }
    }
    return i;
}

enum { VALUE_MAX = 4096 }; /* a path's */

/* Values become lines of logs: what would end one, or move a cursor, is no value. */
int mb_arg_check_text(const char *dest, const char *text, struct mb_err *err)
{
    struct mb_buf shown = {0};
    if (strlen(text) >= VALUE_MAX) {
        return mb_err_set(err, MB_ECORRUPT, "the checkpoint's argument %s is longer than %d bytes",
                          dest, VALUE_MAX - 1);
    }
    int rc = mb_printable(text, &shown) == 0 ? 0 : no_memory(err);
    if (rc == 0 && strcmp(mb_buf_str(&shown), text) != 0) {
        rc = mb_err_set(err, MB_ECORRUPT,
                        "the checkpoint's argument %s has control characters: %.200s", dest,
                        mb_buf_str(&shown));
    }
    mb_buf_close(&shown);
    return rc;
}

/* As people would write it; 0: null, or nothing that an argument can be. */
static int text_of(const json_t *j, char out[VALUE_MAX])
{
    if (json_is_integer(j)) {
        return snprintf(out, VALUE_MAX, "%lld", (long long)json_integer_value(j)) > 0;
    }
    if (json_is_real(j)) {
        mb_arg_float_text(json_real_value(j), out);
        return 1;
    }
    if (json_is_boolean(j)) {
        return snprintf(out, VALUE_MAX, "%s", json_is_true(j) ? "True" : "False") > 0;
    }
    const char *s = json_string_value(j);
    return s != NULL && strlen(s) < VALUE_MAX && snprintf(out, VALUE_MAX, "%s", s) >= 0;
}

static int say_none(struct mb_args *a, const char *dest, struct mb_err *err)
{
    return mb_buf_printf(&a->notes, "Checkpoint did not provide arguments %s\n", dest) == 0
               ? 0
               : no_memory(err);
}

static int say_taken(struct mb_args *a, const char *dest, const char *text, struct mb_err *err)
{
    return mb_buf_printf(&a->notes, "Setting %s to %s from checkpoint\n", dest, text) == 0
               ? 0
               : no_memory(err);
}

int mb_arg_adopt(struct mb_args *a, const char *dest, const json_t *j, struct mb_err *err)
{
    char text[VALUE_MAX];
    const size_t row = mb_arg_row_of(dest);
    const int is_flag =
        MB_ARG_ROWS[row].type == MB_ARG_FLAG || MB_ARG_ROWS[row].type == MB_ARG_FLAG_OFF;
    int rc;
    if (j == NULL || json_is_null(j)) {
        return say_none(a, dest, err);
    }
    if (json_is_string(j) && (rc = mb_arg_check_text(dest, json_string_value(j), err)) != 0) {
        return rc;
    }
    if (!text_of(j, text) || is_flag != json_is_boolean(j)) {
        return mb_err_set(err, MB_ECORRUPT, "the checkpoint's argument %s has a wrong type", dest);
    }
    if (is_flag) {
        int given = json_is_true(j) == (MB_ARG_ROWS[row].type == MB_ARG_FLAG);
        rc = mb_arg_set(a, row, given ? "" : NULL, err);
    } else {
        rc = mb_arg_set(a, row, text, err);
    }
    if (rc != 0) {
        return rc == MB_ENOMEM ? rc
                               : mb_err_set(err, MB_ECORRUPT,
                                            "the checkpoint's argument %s "
                                            "has the value %s",
                                            dest, text);
    }
    return say_taken(a, dest, text, err);
}

/* Here a null takes back what the command line says: a layout is one thing. */
static int adopt_layout(struct mb_args *a, const json_t *o, struct mb_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < sizeof LAYOUT / sizeof LAYOUT[0] && rc == 0; i++) {
        const json_t *j = json_object_get(o, LAYOUT[i]);
        if (json_is_null(j)) {
            rc = mb_arg_set(a, mb_arg_row_of(LAYOUT[i]), NULL, err);
        } else if (j != NULL) {
            rc = mb_arg_adopt(a, LAYOUT[i], j, err);
        }
    }
    return rc;
}

static int adopt_vocabulary(struct mb_args *a, const json_t *j, struct mb_err *err)
{
    char text[VALUE_MAX];
    if (!json_is_integer(j) || json_integer_value(j) <= 0) {
        return say_none(a, "padded_vocab_size", err);
    }
    a->checkpoint_padded_vocab_size = json_integer_value(j);
    return text_of(j, text) ? say_taken(a, "padded_vocab_size", text, err) : 0;
}

/* A run that goes on saves what its readers know, if we write it. */
static int adopt_format(struct mb_args *a, const json_t *j, struct mb_err *err)
{
    static const char *const WRITTEN[] = {"safetensors", "torch", "torch_dist"};
    static const char NAME[] = "ckpt_format";
    const char *theirs = json_string_value(j);
    if (a->raw[mb_arg_row_of(NAME)].given) {
        return 0;
    }
    for (size_t i = 0; i < sizeof WRITTEN / sizeof WRITTEN[0] && theirs != NULL; i++) {
        if (strcmp(theirs, WRITTEN[i]) == 0) {
            return mb_arg_adopt(a, NAME, j, err);
        }
    }
    if (theirs == NULL) {
        return say_none(a, NAME, err);
    }
    int rc = mb_arg_check_text(NAME, theirs, err);
    if (rc != 0) {
        return rc;
    }
    return mb_buf_printf(&a->notes,
                         "note: the checkpoint's ckpt_format, %.80s, is not written: --ckpt-format "
                         "says what is\n",
                         theirs) == 0
               ? 0
               : no_memory(err);
}

int mb_args_adopt(struct mb_args *a, const char *args_json, struct mb_err *err)
{
    json_error_t je;
    json_t *o = json_loads(args_json, JSON_REJECT_DUPLICATES, &je);
    int rc =
        json_is_object(o) ? 0 : mb_err_set(err, MB_ECORRUPT, "the checkpoint's args are no object");
    for (size_t i = 0; i < sizeof TAKEN / sizeof TAKEN[0] && rc == 0; i++) {
        if (TAKEN[i].forced || !a->raw[mb_arg_row_of(TAKEN[i].dest)].given) {
            rc = mb_arg_adopt(a, TAKEN[i].dest, json_object_get(o, TAKEN[i].dest), err);
        }
    }
    if (rc == 0) {
        rc = mb_args_find_tokenizer(a, o, err);
    }
    if (rc == 0) {
        rc = adopt_vocabulary(a, json_object_get(o, "padded_vocab_size"), err);
    }
    if (rc == 0) {
        rc = adopt_format(a, json_object_get(o, "ckpt_format"), err);
    }
    if (rc == 0 && a->use_mp_args_from_checkpoint_args) {
        rc = adopt_layout(a, o, err);
    }
    json_decref(o);
    return rc;
}

/* ---- comparing ---- */

/* What an argument is to a model. */
enum matters { STRUCTURE, QKV_BIAS, POSITIONS, ROTARY, SCALING, GELU, NORM };

static const struct {
    const char *dest;
    enum matters matters;
} COMPARED[] = {
    {"num_layers", STRUCTURE},
    {"hidden_size", STRUCTURE},
    {"num_attention_heads", STRUCTURE},
    {"num_query_groups", STRUCTURE},
    {"ffn_hidden_size", STRUCTURE},
    {"max_position_embeddings", POSITIONS},
    {"padded_vocab_size", STRUCTURE},
    {"kv_channels", STRUCTURE},
    {"position_embedding_type", STRUCTURE},
    {"normalization", STRUCTURE},
    {"swiglu", STRUCTURE},
    {"apply_layernorm_1p", STRUCTURE},
    {"add_bias_linear", STRUCTURE},
    {"add_qkv_bias", QKV_BIAS},
    {"untie_embeddings_and_output_weights", STRUCTURE},
    {"rotary_base", ROTARY},
    {"rotary_percent", ROTARY},
    {"rotary_seq_len_interpolation_factor", ROTARY},
    {"use_rope_scaling", ROTARY},
    {"rope_scaling_factor", SCALING},
    {"norm_epsilon", NORM},
    {"bias_gelu_fusion", GELU},
};

static int is_used(const struct mb_args *a, enum matters m)
{
    const int rope = strcmp(a->position_embedding_type, "rope") == 0;
    switch (m) {
    case ROTARY:
        return rope;
    case SCALING:
        return rope && a->use_rope_scaling;
    case GELU:
        return !a->swiglu;
    case QKV_BIAS: /* with all biases Megatron-LM has it set, ours of before had not */
        return !a->add_bias_linear;
    default:
        return 1;
    }
}

static int is_structure(const struct mb_args *a, enum matters m)
{
    return m == STRUCTURE || m == QKV_BIAS ||
           (m == POSITIONS && strcmp(a->position_embedding_type, "learned_absolute") == 0);
}

static int is_equal(const json_t *a, const json_t *b)
{
    return json_is_number(a) && json_is_number(b) ? json_number_value(a) == json_number_value(b)
                                                  : json_equal(a, b);
}

static const char *shown(const json_t *j, char text[VALUE_MAX])
{
    struct mb_err err;
    if (json_is_string(j) && mb_arg_check_text("", json_string_value(j), &err) != 0) {
        return "a text that is no value";
    }
    return text_of(j, text) ? text : json_is_null(j) ? "None" : "of a wrong type";
}

static int compare(const struct mb_args *a, const json_t *ours, const json_t *theirs, int is_new,
                   struct mb_buf *notes, struct mb_err *err)
{
    char their_text[VALUE_MAX], our_text[VALUE_MAX];
    int rc = 0;
    for (size_t i = 0; i < sizeof COMPARED / sizeof COMPARED[0] && rc == 0; i++) {
        const char *dest = COMPARED[i].dest;
        const json_t *their = json_object_get(theirs, dest), *our = json_object_get(ours, dest);
        if (their == NULL || !is_used(a, COMPARED[i].matters) || is_equal(their, our)) {
            continue;
        }
        const char *they_have = shown(their, their_text), *we_have = shown(our, our_text);
        if (is_structure(a, COMPARED[i].matters) || !is_new) {
            rc = mb_err_set(err, MB_EINVAL,
                            "%s value from checkpoint (%s) is not equal to the input argument "
                            "value (%s).",
                            dest, they_have, we_have);
        } else if (mb_buf_printf(notes,
                                 " %s is %s as the command line says; in the checkpoint it is "
                                 "%s\n",
                                 dest, we_have, they_have) != 0) {
            rc = no_memory(err);
        }
    }
    return rc;
}

/* No reason to refuse: a configuration may say more tokens than its tokenizer has. But ids of
 * another tokenizer are other text, and nothing else would tell. */
static int compare_tokens(const json_t *ours, const json_t *theirs, struct mb_buf *notes,
                          struct mb_err *err)
{
    const json_t *our = json_object_get(ours, "true_vocab_size");
    const json_t *their = json_object_get(theirs, "true_vocab_size");
    if (!json_is_integer(our) || !json_is_integer(their) || is_equal(our, their)) {
        return 0;
    }
    return mb_buf_printf(notes,
                         "WARNING: the tokenizer has %" JSON_INTEGER_FORMAT
                         " tokens, the checkpoint was made with %" JSON_INTEGER_FORMAT
                         ": if it is another one, its ids mean other text\n",
                         json_integer_value(our), json_integer_value(their)) == 0
               ? 0
               : no_memory(err);
}

int mb_args_compare(const struct mb_args *a, const char *args_json, int is_new,
                    struct mb_buf *notes, struct mb_err *err)
{
    json_error_t je;
    char *text = mb_args_json(a);
    json_t *ours = text != NULL ? json_loads(text, 0, &je) : NULL;
    json_t *theirs = json_loads(args_json, 0, &je);
    int rc = 0;
    if (ours == NULL) {
        rc = no_memory(err);
    } else if (!json_is_object(theirs)) {
        rc = mb_err_set(err, MB_ECORRUPT, "the checkpoint's args are no object");
    } else {
        rc = compare(a, ours, theirs, is_new, notes, err);
        rc = rc == 0 ? compare_tokens(ours, theirs, notes, err) : rc;
    }
    json_decref(ours);
    json_decref(theirs);
    mb_free(text);
    return rc;
}
