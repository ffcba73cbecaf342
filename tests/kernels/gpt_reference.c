#include "gpt_reference.h"

#include <stdio.h>
#include <string.h>
#include "reference.h"

const struct mb_param *param_named(const struct mb_gpt *m, const char *name)
{
    size_t n;
    const struct mb_param *p = mb_gpt_params(m, &n);
    for (size_t i = 0; i < n; i++)
        if (strcmp(p[i].name, name) == 0)
            return &p[i];
    fail_msg("no parameter %s", name);
    return NULL;
}

/* fmt is a parameter's name with # for the number of the layer. */
static const double *weight_of(const struct reference *r, const char *fmt, size_t layer)
{
    char name[MB_PARAM_NAME_MAX];
    const char *mark = strchr(fmt, '#');
    if (mark == NULL)
        snprintf(name, sizeof(name), "%s", fmt);
    else
        snprintf(name, sizeof(name), "%.*s%zu%s", (int)(mark - fmt), fmt, layer, mark + 1);
    return r->w + param_named(r->m, name)->offset;
}

static struct mb_dropout site(const struct reference *r, float probability, uint32_t number,
                              size_t elements_per_sample)
{
    if (r->step == NULL)
        return (struct mb_dropout){0};
    return (struct mb_dropout){.seed = mb_gpt_config(r->m)->seed,
                               .iteration = (uint32_t)r->step->iteration,
                               .site = number,
                               .first_element = r->step->first_sample * elements_per_sample,
                               .probability = probability};
}

static void add_dropped(const struct reference *r, double *x, const double *branch, uint32_t number)
{
    struct mb_dropout d = site(r, mb_gpt_config(r->m)->hidden_dropout, number, SEQ * HIDDEN);
    for (size_t i = 0; i < TOKENS * HIDDEN; i++)
        x[i] += branch[i] * ref_dropout(&d, i);
}

/* The bias of that name, NULL where the model has none. */
static const double *bias_of(const struct reference *r, int has, const char *fmt, size_t layer)
{
    return has ? weight_of(r, fmt, layer) : NULL;
}

/* x itself: its norm, by the tensors whose names start with prefix. */
static void reference_norm(const struct reference *r, const double *x, const char *prefix, size_t l,
                           double *out)
{
    const struct mb_gpt_config *c = mb_gpt_config(r->m);
    char name[MB_PARAM_NAME_MAX];
    double w[HIDDEN];
    snprintf(name, sizeof(name), "%sweight", prefix);
    for (size_t i = 0; i < HIDDEN; i++)
        w[i] = weight_of(r, name, l)[i] + (c->norm_1p ? 1 : 0);
    snprintf(name, sizeof(name), "%sbias", prefix);
    if (c->norm == MB_GPT_RMSNORM)
        ref_rmsnorm(x, w, out, TOKENS, HIDDEN, 1e-5);
    else
        ref_layernorm(x, w, weight_of(r, name, l), out, TOKENS, HIDDEN, 1e-5);
}

static void reference_rope(const struct mb_gpt_config *c, double *qkv)
{
    const struct mb_attention_shape shape = {SAMPLES, SEQ, c->n_heads, c->n_groups, c->head_dim};
    const size_t dim = mb_rope_dim(&c->rope, c->head_dim);
    double angle[SEQ * HIDDEN];
    if (c->positions != MB_GPT_ROPE)
        return;
    for (size_t p = 0; p < SEQ; p++)
        for (size_t i = 0; i < dim / 2; i++)
            angle[p * dim / 2 + i] = (double)p * mb_rope_frequency(&c->rope, dim, i);
    ref_rope(&shape, qkv, angle, dim);
}

static void reference_attention(const struct reference *r, double *x, size_t l)
{
    const struct mb_gpt_config *c = mb_gpt_config(r->m);
    double norm[TOKENS * HIDDEN], wide[TOKENS * 8 * HIDDEN], heads[TOKENS * 2 * HIDDEN];
    const size_t qkv = (c->n_heads + 2 * c->n_groups) * c->head_dim;
    const struct mb_attention_shape shape = {SAMPLES, SEQ, c->n_heads, c->n_groups, c->head_dim};
    struct mb_dropout d =
        site(r, c->attention_dropout, (uint32_t)(3 * l + 1), c->n_heads * SEQ * SEQ);
    reference_norm(r, x, "decoder.layers.#.self_attention.linear_qkv.layer_norm_", l, norm);
    ref_linear(norm, weight_of(r, "decoder.layers.#.self_attention.linear_qkv.weight", l),
               bias_of(r, c->linear_bias || c->qkv_bias,
                       "decoder.layers.#.self_attention.linear_qkv.bias", l),
               wide, TOKENS, HIDDEN, qkv);
    reference_rope(c, wide);
    ref_attention(&shape, wide, heads, &d);
    ref_linear(heads, weight_of(r, "decoder.layers.#.self_attention.linear_proj.weight", l),
               bias_of(r, c->linear_bias, "decoder.layers.#.self_attention.linear_proj.bias", l),
               norm, TOKENS, c->n_heads * c->head_dim, HIDDEN);
    add_dropped(r, x, norm, (uint32_t)(3 * l + 2));
}

static void reference_mlp(const struct reference *r, double *x, size_t l)
{
    const struct mb_gpt_config *c = mb_gpt_config(r->m);
    double norm[TOKENS * HIDDEN], wide[TOKENS * 4 * HIDDEN], narrow[TOKENS * 4 * HIDDEN];
    const size_t ffn = c->ffn_hidden;
    reference_norm(r, x, "decoder.layers.#.mlp.linear_fc1.layer_norm_", l, norm);
    ref_linear(norm, weight_of(r, "decoder.layers.#.mlp.linear_fc1.weight", l),
               bias_of(r, c->linear_bias, "decoder.layers.#.mlp.linear_fc1.bias", l), wide, TOKENS,
               HIDDEN, c->swiglu ? 2 * ffn : ffn);
    if (c->swiglu)
        ref_swiglu(wide, narrow, TOKENS, ffn);
    for (size_t i = 0; !c->swiglu && i < TOKENS * ffn; i++)
        narrow[i] = ref_gelu(wide[i], c->gelu);
    ref_linear(narrow, weight_of(r, "decoder.layers.#.mlp.linear_fc2.weight", l),
               bias_of(r, c->linear_bias, "decoder.layers.#.mlp.linear_fc2.bias", l), norm, TOKENS,
               ffn, HIDDEN);
    add_dropped(r, x, norm, (uint32_t)(3 * l + 3));
}

double reference_loss(const struct reference *r)
{
    const struct mb_gpt_config *c = mb_gpt_config(r->m);
    double embedded[TOKENS * HIDDEN], x[TOKENS * HIDDEN] = {0};
    ref_embedding(
        r->tokens, weight_of(r, "embedding.word_embeddings.weight", 0),
        bias_of(r, c->positions == MB_GPT_LEARNED, "embedding.position_embeddings.weight", 0),
        embedded, TOKENS, SEQ, HIDDEN);
    add_dropped(r, x, embedded, 0);
    for (size_t l = 0; l < LAYERS; l++) {
        reference_attention(r, x, l);
        reference_mlp(r, x, l);
    }
    reference_norm(r, x, "decoder.final_layernorm.", 0, embedded);
    const char *output =
        c->untie_output ? "output_layer.weight" : "embedding.word_embeddings.weight";
    return ref_cross_entropy(embedded, weight_of(r, output, 0), r->labels, r->mask, TOKENS, HIDDEN,
                             PADDED);
}
