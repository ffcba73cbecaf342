/*
 * What mb_args_validate() checks of the model: required sizes; shapes, and what derives from them;
 * positions; recomputation. Texts are Megatron-LM's where it has one.
 */
#include "worker/args_table.h"

#include <string.h>
#include "base/alloc.h"
#include "worker/model/ffn.h"

static int invalid(struct mb_err *err, const char *text)
{
    return mb_err_set(err, MB_EINVAL, "%s", text);
}

static int none(int64_t v)
{
    return v == MB_ARGS_NONE;
}

int mb_args_check_required(struct mb_args *a, struct mb_err *err)
{
    const struct {
        int64_t value;
        const char *name;
    } required[] = {
        {a->num_layers, "num_layers"},
        {a->hidden_size, "hidden_size"},
        {a->num_attention_heads, "num_attention_heads"},
        {a->max_position_embeddings, "max_position_embeddings"},
        {a->seq_length, "seq_length"},
    };
    for (size_t i = 0; i < sizeof required / sizeof required[0]; i++) {
        if (none(required[i].value)) {
            a->is_usage = 1;
            return mb_err_set(err, MB_EINVAL, "%s argument is None", required[i].name);
        }
        if (required[i].value <= 0 || required[i].value > INT32_MAX) {
            return mb_err_set(err, MB_EINVAL, "%s is %lld: it must be from 1 to %d",
                              required[i].name, (long long)required[i].value, INT32_MAX);
        }
    }
    return 0;
}

int mb_args_check_shape(struct mb_args *a, struct mb_err *err)
{
    if (none(a->ffn_hidden_size)) {
        a->ffn_hidden_size = (int64_t)mb_gpt_default_ffn((size_t)a->hidden_size, (int)a->swiglu);
    }
    if (none(a->kv_channels) && a->hidden_size % a->num_attention_heads != 0) {
        return mb_err_set(err, MB_EINVAL,
                          "hidden size (%lld) is not divisible by the number of attention heads "
                          "(%lld)",
                          (long long)a->hidden_size, (long long)a->num_attention_heads);
    }
    if (none(a->kv_channels)) {
        a->kv_channels = a->hidden_size / a->num_attention_heads;
    }
    if (a->kv_channels <= 0) {
        return invalid(err, "kv-channels must be positive");
    }
    if (a->add_bias_linear) {
        a->add_qkv_bias = 1; /* as Megatron-LM has it, and its checkpoints */
    }
    if (!a->group_query_attention) {
        a->num_query_groups = a->num_attention_heads;
    }
    if (a->num_query_groups <= 0 || a->num_attention_heads % a->num_query_groups != 0) {
        return mb_err_set(err, MB_EINVAL,
                          "The number of attention heads (%lld) must be divisible by the number "
                          "of query groups (%lld)",
                          (long long)a->num_attention_heads, (long long)a->num_query_groups);
    }
    if (a->max_position_embeddings < a->seq_length) {
        return mb_err_set(err, MB_EINVAL,
                          "max_position_embeddings (%lld) must not be below seq_length (%lld)",
                          (long long)a->max_position_embeddings, (long long)a->seq_length);
    }
    if (a->ffn_hidden_size <= 0 || a->make_vocab_size_divisible_by <= 0) {
        return invalid(err, "ffn-hidden-size and make-vocab-size-divisible-by must be positive");
    }
    return 0;
}

/* The short form of selective. Megatron-LM lets it win over full; what was asked for is kept here,
 * and it is what the memory plan advises. */
static int take_recompute_activations(struct mb_args *a, struct mb_err *err)
{
    int bad = 0;
    if (a->recompute_activations && a->recompute_granularity == NULL) {
        a->recompute_granularity = mb_strdup("selective");
        bad = a->recompute_granularity == NULL;
    } else if (a->recompute_activations && strcmp(a->recompute_granularity, "full") == 0) {
        bad = mb_buf_puts(&a->notes, "note: --recompute-activations has no effect with "
                                     "--recompute-granularity full (in Megatron-LM that one has "
                                     "none)\n");
    }
    return bad ? mb_err_set(err, MB_ENOMEM, "out of memory for the arguments") : 0;
}

static int check_recompute(struct mb_args *a, struct mb_err *err)
{
    int rc = take_recompute_activations(a, err);
    if (rc != 0) {
        return rc;
    }
    if (a->recompute_granularity == NULL) {
        return a->recompute_method == NULL ||
                       mb_buf_puts(&a->notes, "note: --recompute-method has no effect without "
                                              "--recompute-granularity\n") == 0
                   ? 0
                   : mb_err_set(err, MB_ENOMEM, "out of memory for notes");
    }
    if (strcmp(a->recompute_granularity, "selective") == 0) {
        return a->recompute_method == NULL
                   ? 0
                   : invalid(err, "recompute method is not yet supported for selective recomputing "
                                  "granularity");
    }
    if (a->recompute_method == NULL) {
        return invalid(err, "with --recompute-granularity full, recompute-method must be one of "
                            "\"block\" or \"uniform\"");
    }
    if (strcmp(a->recompute_method, "block") == 0 &&
        (none(a->recompute_num_layers) || a->recompute_num_layers < 1 ||
         a->recompute_num_layers > a->num_layers)) {
        return mb_err_set(err, MB_EINVAL,
                          "--recompute-method block needs --recompute-num-layers from 1 to %lld",
                          (long long)a->num_layers);
    }
    return 0;
}

static int check_positions(struct mb_args *a, struct mb_err *err)
{
    if (a->use_rotary_position_embeddings) {
        char *rope = mb_strdup("rope");
        if (rope == NULL ||
            mb_buf_puts(&a->notes, "--use-rotary-position-embeddings is deprecated, use "
                                   "--position-embedding-type\n") != 0) {
            mb_free(rope);
            return mb_err_set(err, MB_ENOMEM, "out of memory for the arguments");
        }
        mb_free(a->position_embedding_type);
        a->position_embedding_type = rope;
    }
    const char *type = a->position_embedding_type;
    const int rope = strcmp(type, "rope") == 0;
    if (a->reset_position_ids && strcmp(type, "learned_absolute") != 0) {
        a->reset_position_ids = 0;
        if (mb_buf_puts(&a->notes, "note: --reset-position-ids has no effect without learned "
                                   "positions, as in Megatron-LM\n") != 0) {
            return mb_err_set(err, MB_ENOMEM, "out of memory for the arguments");
        }
    }
    if (!rope && strcmp(type, "learned_absolute") != 0 && strcmp(type, "none") != 0) {
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "--position-embedding-type %s: not provided by this version; use "
                          "learned_absolute, rope or none",
                          type);
    }
    if (!a->add_position_embedding && !rope) {
        return invalid(err,
                       "--no-position-embedding is deprecated, use --position-embedding-type none");
    }
    if (!rope && (a->use_rope_scaling || !none(a->rotary_seq_len_interpolation_factor))) {
        return invalid(err, "--use-rope-scaling and --rotary-seq-len-interpolation-factor need "
                            "--position-embedding-type rope");
    }
    if (rope && (a->rotary_base <= 0 || !(a->rotary_percent > 0 && a->rotary_percent <= 1) ||
                 !(a->rope_scaling_factor > 0))) {
        return invalid(err, "rotary-base and rope-scaling-factor must be positive, rotary-percent "
                            "must be above 0 and at most 1");
    }
    if (!none(a->rotary_seq_len_interpolation_factor) &&
        a->rotary_seq_len_interpolation_factor <= 0) {
        return invalid(err, "rotary-seq-len-interpolation-factor must be positive");
    }
    return 0;
}

int mb_args_check_use(struct mb_args *a, struct mb_err *err)
{
    int rc = check_positions(a, err);
    return rc == 0 ? check_recompute(a, err) : rc;
}
