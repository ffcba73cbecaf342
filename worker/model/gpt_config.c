/*
 * The configuration: defaults, checks, counts. Every check names the two numbers that do not fit,
 * in the words of Megatron's arguments.
 */
#include <math.h>
#include "worker/model/ffn.h"
#include "worker/model/gpt_internal.h"

void mb_gpt_config_init(struct mb_gpt_config *c)
{
    *c = (struct mb_gpt_config){.rope = {10000, 1, 1, 0, 8},
                                .linear_bias = 1,
                                .qkv_bias = 1,
                                .gelu = MB_GELU_TANH,
                                .norm_eps = 1e-5f,
                                .init_std = 0.02f,
                                .hidden_dropout = 0.1f,
                                .attention_dropout = 0.1f,
                                .seed = 1234};
}

size_t mb_gpt_padded_vocab(size_t vocab, size_t divisible_by, size_t tensor_parallel)
{
    size_t multiple = divisible_by * tensor_parallel;
    return (vocab + multiple - 1) / multiple * multiple;
}

size_t mb_gpt_attention_width(const struct mb_gpt_config *c)
{
    return c->n_heads * c->head_dim;
}

size_t mb_gpt_qkv_width(const struct mb_gpt_config *c)
{
    return (c->n_heads + 2 * c->n_groups) * c->head_dim;
}

size_t mb_gpt_fc1_width(const struct mb_gpt_config *c)
{
    return (c->swiglu ? 2 : 1) * c->ffn_hidden;
}

void mb_gpt_config_complete(struct mb_gpt_config *c)
{
    if (c->head_dim == 0)
        c->head_dim = c->hidden / c->n_heads;
    if (c->n_groups == 0)
        c->n_groups = c->n_heads;
    if (c->ffn_hidden == 0)
        c->ffn_hidden = mb_gpt_default_ffn(c->hidden, c->swiglu);
}

size_t mb_gpt_tensor_parts(const struct mb_gpt_config *c)
{
    const size_t n = c->tensor_group != NULL ? mb_comm_world_size(c->tensor_group) : 0;
    return n > 0 ? n : c->n_tensor_parts > 0 ? c->n_tensor_parts : 1;
}

size_t mb_gpt_context_parts(const struct mb_gpt_config *c)
{
    const size_t n = c->context_group != NULL ? mb_comm_world_size(c->context_group) : 0;
    return n > 0 ? n : c->n_context_parts > 0 ? c->n_context_parts : 1;
}

/* Bounds that people never reach and below which no count of elements or bytes overflows. */
static const size_t MAX_LAYERS = 1 << 16, MAX_SIZE = (size_t)1 << 30;
static const double MAX_PARAMETERS = 1125899906842624.0; /* 2^50 */

static int check_sizes(const struct mb_gpt_config *c, struct mb_err *err)
{
    const struct {
        size_t value, min, max;
        const char *what;
    } sizes[] = {{c->n_layers, 1, MAX_LAYERS, "number of layers"},
                 {c->hidden, 1, MAX_SIZE, "hidden size"},
                 {c->ffn_hidden, 0, MAX_SIZE, "ffn hidden size"},
                 {c->n_heads, 1, MAX_SIZE, "number of attention heads"},
                 {c->head_dim, 0, MAX_SIZE, "number of channels of a head"},
                 {c->n_groups, 0, MAX_SIZE, "number of query groups"},
                 {c->seq, 1, MAX_SIZE, "sequence length"},
                 {c->max_positions, 1, MAX_SIZE, "max position embeddings"},
                 {c->vocab, 1, MAX_SIZE, "vocabulary size"},
                 {c->padded_vocab, 1, MAX_SIZE, "padded vocabulary size"}};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        if (sizes[i].value < sizes[i].min || sizes[i].value > sizes[i].max)
            return mb_err_set(err, MB_EINVAL, "%s is %zu and must lie in [%zu, %zu]", sizes[i].what,
                              sizes[i].value, sizes[i].min, sizes[i].max);
    double h = (double)c->hidden, ffn = c->ffn_hidden ? (double)c->ffn_hidden : 4 * h;
    double attention = c->head_dim ? (double)c->n_heads * (double)c->head_dim : h;
    double n = h * (2 * (double)c->padded_vocab + (double)c->max_positions) +
               (double)c->n_layers * h * (4 * attention + (c->swiglu ? 3 : 2) * ffn);
    if (n > MAX_PARAMETERS)
        return mb_err_set(
            err, MB_EINVAL,
            "a model of %zu layers, hidden size %zu and ffn hidden size %.0f has about %.2g "
            "parameters: at most %.2g can be addressed",
            c->n_layers, c->hidden, ffn, n, MAX_PARAMETERS);
    return 0;
}

static int check_rates(const struct mb_gpt_config *c, struct mb_err *err)
{
    const struct {
        float value;
        const char *what;
    } rates[] = {{c->hidden_dropout, "hidden dropout"},
                 {c->attention_dropout, "attention dropout"}};
    for (size_t i = 0; i < 2; i++)
        if (!(rates[i].value >= 0 && rates[i].value < 1))
            return mb_err_set(err, MB_EINVAL, "%s is %g and must lie in [0, 1)", rates[i].what,
                              (double)rates[i].value);
    if (!(c->norm_eps > 0))
        return mb_err_set(err, MB_EINVAL, "norm epsilon is %g and must be positive",
                          (double)c->norm_eps);
    if (!(c->init_std >= 0) || !isfinite(c->init_std))
        return mb_err_set(err, MB_EINVAL, "init method std is %g and must not be negative",
                          (double)c->init_std);
    return 0;
}

static int check_rope(const struct mb_gpt_config *c, struct mb_err *err)
{
    const struct mb_rope_config *r = &c->rope;
    if (c->positions != MB_GPT_ROPE)
        return 0;
    if (!(r->base > 0) || !isfinite(r->base))
        return mb_err_set(err, MB_EINVAL, "rotary base is %g and must be positive", r->base);
    if (!(r->percent > 0 && r->percent <= 1))
        return mb_err_set(err, MB_EINVAL, "rotary percent is %g and must lie in (0, 1]",
                          r->percent);
    if (!(r->interpolation > 0) || !(r->scaling_factor > 0))
        return mb_err_set(err, MB_EINVAL, "rotary scaling factors must be positive");
    size_t head_dim = c->head_dim ? c->head_dim : c->hidden / c->n_heads;
    size_t dim = mb_rope_dim(r, head_dim);
    if (dim == 0 || dim % 2 != 0)
        return mb_err_set(err, MB_EINVAL,
                          "rotary percent %g of %zu channels of a head is %zu channels: it must be "
                          "an even number",
                          r->percent, head_dim, dim);
    return 0;
}

/* What is split over the ranks of a tensor group, and over stages. Texts of Megatron-LM where it
 * has one. */
static int check_parts(const struct mb_gpt_config *given, struct mb_err *err)
{
    struct mb_gpt_config c = *given;
    mb_gpt_config_complete(&c);
    const size_t n = mb_gpt_tensor_parts(&c);
    const struct {
        size_t size;
        const char *name;
    } split[] = {{c.n_heads, "num_attention_heads"}, {c.n_groups, "num_query_groups"}};
    for (size_t i = 0; i < sizeof(split) / sizeof(split[0]); i++)
        if (split[i].size % n != 0)
            return mb_err_set(err, MB_EINVAL,
                              "%s (%zu) must be a multiple of tensor_model_parallel_size (%zu).",
                              split[i].name, split[i].size, n);
    if (c.ffn_hidden % n != 0)
        return mb_err_set(err, MB_EINVAL, "ffn_hidden_size: %zu is not divisible by %zu",
                          c.ffn_hidden, n);
    const size_t n_stages = c.n_stages > 0 ? c.n_stages : 1;
    if (c.own_stage >= n_stages || c.n_layers % n_stages != 0)
        return mb_err_set(err, MB_EINVAL,
                          "Number of layers should be divisible by the pipeline-model-parallel "
                          "size: %zu layers, stage %zu of %zu",
                          c.n_layers, c.own_stage, n_stages);
    if (c.n_chunks > 1 && (n_stages == 1 || c.n_layers / n_stages % c.n_chunks != 0))
        return mb_err_set(err, MB_EINVAL, "%zu layers on %zu stages cannot be %zu chunks on each",
                          c.n_layers, n_stages, c.n_chunks);
    if (c.padded_vocab % n != 0)
        return mb_err_set(err, MB_EINVAL, "padded_vocab_size: %zu is not divisible by %zu",
                          c.padded_vocab, n);
    const size_t n_contexts = mb_gpt_context_parts(&c);
    if (n_contexts > 1 && c.seq % (2 * n_contexts) != 0)
        return mb_err_set(err, MB_EINVAL,
                          "seq-length should be a multiple of 2 * context-parallel-size if "
                          "context-parallel-size > 1.: %zu with %zu",
                          c.seq, n_contexts);
    if (c.sequence_parallel && c.seq / n_contexts % n != 0)
        return mb_err_set(err, MB_EINVAL,
                          "sequence parallel: seq_length: %zu is not divisible by %zu",
                          c.seq / n_contexts, n);
    return 0;
}

int mb_gpt_config_check(const struct mb_gpt_config *c, struct mb_err *err)
{
    int rc = check_sizes(c, err);
    if (rc == 0)
        rc = check_rates(c, err);
    if (rc != 0)
        return rc;
    if (c->head_dim == 0 && c->hidden % c->n_heads != 0)
        return mb_err_set(err, MB_EINVAL,
                          "number of attention heads (%zu) must divide hidden size (%zu)",
                          c->n_heads, c->hidden);
    if (c->n_groups != 0 && c->n_heads % c->n_groups != 0)
        return mb_err_set(
            err, MB_EINVAL,
            "number of query groups (%zu) must divide number of attention heads (%zu)", c->n_groups,
            c->n_heads);
    if (c->max_positions < c->seq)
        return mb_err_set(
            err, MB_EINVAL,
            "max position embeddings (%zu) must be at least the sequence length (%zu)",
            c->max_positions, c->seq);
    if (c->padded_vocab < c->vocab)
        return mb_err_set(err, MB_EINVAL,
                          "padded vocabulary (%zu) must be at least the vocabulary (%zu)",
                          c->padded_vocab, c->vocab);
    if (c->recompute_layers > c->n_layers)
        return mb_err_set(err, MB_EINVAL, "%zu layers are recomputed, the model has %zu",
                          c->recompute_layers, c->n_layers);
    if (c->ffn_hidden == 0 && mb_gpt_default_ffn(c->hidden, c->swiglu) == 0)
        return mb_err_set(err, MB_EINVAL,
                          "hidden size %zu gives no ffn hidden size with SwiGLU: give one",
                          c->hidden);
    rc = check_rope(c, err);
    return rc == 0 ? check_parts(c, err) : rc;
}

double mb_gpt_flops_per_sample(const struct mb_gpt_config *given)
{
    struct mb_gpt_config c = *given;
    mb_gpt_config_complete(&c);
    double s = (double)c.seq, layers = (double)c.n_layers, h = (double)c.hidden;
    double groups = (double)c.n_groups / (double)c.n_heads;
    double attention = (1 + groups + s / h) * (double)mb_gpt_attention_width(&c) / h;
    double mlp = (double)c.ffn_hidden / h * (c.swiglu ? 1.5 : 1);
    return 12 * s * layers * h * h * (attention + mlp + (double)c.padded_vocab / (2 * layers * h));
}
