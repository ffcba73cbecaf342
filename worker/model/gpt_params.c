/*
 * The parameter table.
 *
 * Order in the flat buffers is the order of use: embeddings, layers, final norm, output. So
 * gradients become final from the end of the buffer to its start.
 *
 * Over the ranks of a tensor group are split, as in Megatron-LM: the vocabulary by rows; qkv and
 * fc1 by the rows of their outputs, with SwiGLU gates and values each; proj and fc2 by the columns
 * of their inputs. All else is on every rank. Over a pipeline's stages the layers are split evenly,
 * a chunk after the other where stages have several: so a rank's layers are in the whole model's
 * order, and a layer has the name that it has there. The last stage's copy of a tied embedding
 * has the embedding's place and name, so it is drawn like it, and becomes final last like it.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/model/gpt_internal.h"

enum { PARAMS_PER_LAYER = 12, PARAMS_OUTSIDE = 5 };

enum split { WHOLE, BY_ROWS, BY_COLUMNS };

/* A whole parameter; columns 0 makes it 1-D. */
struct whole {
    size_t rows, columns;
    enum split split;
    size_t n_blocks; /* each is split by itself */
};

static void split(struct mb_param *p, const struct whole *w, size_t n_parts, size_t own_part)
{
    const size_t columns = w->columns ? w->columns : 1;
    p->shape[0] = w->rows;
    p->shape[1] = columns;
    p->n_whole = p->run = p->stride = w->rows * columns;
    if (w->split == BY_ROWS) {
        p->shape[0] /= n_parts;
        p->stride = p->n_whole / w->n_blocks;
        p->run = p->stride / n_parts;
    } else if (w->split == BY_COLUMNS) {
        p->shape[1] /= n_parts;
        p->stride = columns;
        p->run = columns / n_parts;
    }
    p->n = p->shape[0] * p->shape[1];
    p->start = p->n < p->n_whole ? own_part * p->run : 0;
    if (p->n == p->n_whole)
        p->run = p->stride = p->n;
}

/* Append a parameter. Returns its flat offset. */
__attribute__((format(printf, 3, 4))) static size_t add(struct mb_gpt *m, struct whole w,
                                                        const char *name, ...)
{
    struct mb_param *p = &m->params[m->n_params++];
    va_list ap;
    va_start(ap, name);
    vsnprintf(p->name, sizeof(p->name), name, ap);
    va_end(ap);
    split(p, &w, m->n_parts, m->own_part);
    p->n_dims = w.columns ? 2 : 1;
    p->no_weight_decay = w.columns == 0;
    p->offset = m->n_elements;
    m->n_elements += (p->n + MB_PARAM_ALIGN - 1) / MB_PARAM_ALIGN * MB_PARAM_ALIGN;
    m->n_parameters += p->n;
    return p->offset;
}

/* A linear layer's or a norm's; columns 0: a norm. The bias is split as the rows are. */
static struct mb_gpt_pair add_pair(struct mb_gpt *m, struct whole w, int has_bias, size_t l,
                                   const char *name)
{
    struct mb_gpt_pair at = {.bias = MB_GPT_NONE};
    const char *norm = w.columns ? "" : "layer_norm_";
    struct whole bias = w;
    bias.columns = 0;
    bias.split = w.split == BY_ROWS ? BY_ROWS : WHOLE;
    at.weight = add(m, w, "decoder.layers.%zu.%s.%sweight", l, name, norm);
    if (has_bias)
        at.bias = add(m, bias, "decoder.layers.%zu.%s.%sbias", l, name, norm);
    return at;
}

static void add_layer(struct mb_gpt *m, size_t l)
{
    const struct mb_gpt_config *c = &m->c;
    struct mb_gpt_layer *y = &m->layers[l];
    const size_t h = c->hidden, qkv = mb_gpt_qkv_width(c), fc1 = mb_gpt_fc1_width(c);
    const int bias = c->linear_bias, norm_bias = c->norm == MB_GPT_LAYERNORM;
    const struct whole norm = {.rows = h};
    const size_t index = 2 * l;
    l = mb_gpt_layer_number(m, l);
    y->begin = m->n_elements;
    y->norm1 = (struct mb_gpt_norm_at){add_pair(m, norm, norm_bias, l, "self_attention.linear_qkv"),
                                       index};
    y->qkv = add_pair(m, (struct whole){qkv, h, BY_ROWS, 1}, bias || c->qkv_bias, l,
                      "self_attention.linear_qkv");
    y->proj = add_pair(m, (struct whole){h, mb_gpt_attention_width(c), BY_COLUMNS, 1}, bias, l,
                       "self_attention.linear_proj");
    y->norm2 =
        (struct mb_gpt_norm_at){add_pair(m, norm, norm_bias, l, "mlp.linear_fc1"), index + 1};
    y->fc1 =
        add_pair(m, (struct whole){fc1, h, BY_ROWS, c->swiglu ? 2 : 1}, bias, l, "mlp.linear_fc1");
    y->fc2 =
        add_pair(m, (struct whole){h, c->ffn_hidden, BY_COLUMNS, 1}, bias, l, "mlp.linear_fc2");
    y->end = m->n_elements;
}

static void add_embedding(struct mb_gpt *m)
{
    const struct mb_gpt_config *c = &m->c;
    m->word_embedding = m->position_embedding = MB_GPT_NONE;
    if (!m->is_first && (!m->is_last || c->untie_output))
        return;
    m->word_embedding = add(m, (struct whole){c->padded_vocab, c->hidden, BY_ROWS, 1},
                            "embedding.word_embeddings.weight");
    m->params[m->n_params - 1].is_embedding_or_output = 1;
    m->params[m->n_params - 1].is_copy = !m->is_first;
    if (m->is_first && c->positions == MB_GPT_LEARNED)
        m->position_embedding =
            add(m, (struct whole){.rows = c->max_positions, .columns = c->hidden},
                "embedding.position_embeddings.weight");
}

static void add_output(struct mb_gpt *m)
{
    const struct mb_gpt_config *c = &m->c;
    const struct whole norm = {.rows = c->hidden};
    m->final_norm = (struct mb_gpt_norm_at){.at.bias = MB_GPT_NONE, .index = 2 * m->part.n_layers};
    m->output_weight = MB_GPT_NONE;
    if (!m->is_last)
        return;
    m->final_norm.at.weight = add(m, norm, "decoder.final_layernorm.weight");
    if (c->norm == MB_GPT_LAYERNORM)
        m->final_norm.at.bias = add(m, norm, "decoder.final_layernorm.bias");
    m->output_weight = m->word_embedding;
    if (c->untie_output) {
        m->output_weight =
            add(m, (struct whole){c->padded_vocab, c->hidden, BY_ROWS, 1}, "output_layer.weight");
        m->params[m->n_params - 1].is_embedding_or_output = 1;
    }
}

/* Layers of other slots have the same parameters. */
static void fill_slots(struct mb_gpt *m)
{
    const size_t n = m->part.n_layers;
    for (size_t s = 0; s < m->n_slots; s++) {
        m->slots[s].layers = m->layers + s * n;
        if (s > 0)
            memcpy(m->slots[s].layers, m->layers, n * sizeof(*m->layers));
    }
}

int mb_gpt_params_create(struct mb_gpt *m, struct mb_err *err)
{
    const size_t n = m->part.n_layers;
    m->slots = mb_calloc(m->n_slots, sizeof(*m->slots));
    m->layers = mb_calloc(m->n_slots * n, sizeof(*m->layers));
    m->params = mb_calloc(n * PARAMS_PER_LAYER + PARAMS_OUTSIDE, sizeof(*m->params));
    if (m->slots == NULL || m->layers == NULL || m->params == NULL) {
        mb_gpt_params_free(m);
        return mb_err_set(err, MB_ENOMEM, "out of memory for the parameter table of %zu layers", n);
    }
    add_embedding(m);
    for (size_t l = 0; l < n; l++)
        add_layer(m, l);
    m->layers_end = m->n_elements;
    add_output(m);
    fill_slots(m);
    return 0;
}

void mb_gpt_params_free(struct mb_gpt *m)
{
    mb_free(m->slots != NULL && m->slots[0].layers != NULL ? m->slots[0].layers : m->layers);
    mb_free(m->slots);
    mb_free(m->params);
    m->slots = NULL;
    m->layers = NULL;
    m->params = NULL;
}

int mb_gpt_count_parameters(const struct mb_gpt_config *c, size_t *out, struct mb_err *err)
{
    struct mb_gpt m = {.c = *c};
    int rc = mb_gpt_config_check(c, err);
    if (rc == 0) {
        mb_gpt_config_complete(&m.c);
        mb_gpt_group_init(&m);
        rc = mb_gpt_params_create(&m, err);
    }
    *out = m.n_parameters;
    mb_gpt_params_free(&m);
    return rc;
}

int mb_gpt_whole_params(const struct mb_gpt_config *c, struct mb_param **out, size_t *n_params,
                        size_t *n_elements, struct mb_err *err)
{
    struct mb_gpt m = {.c = *c};
    m.c.tensor_group = m.c.context_group = NULL;
    m.c.n_tensor_parts = m.c.n_context_parts = 0;
    m.c.n_stages = m.c.own_stage = m.c.n_chunks = m.c.n_in_flight = 0;
    mb_gpt_config_complete(&m.c);
    mb_gpt_group_init(&m);
    int rc = mb_gpt_params_create(&m, err);
    if (rc != 0)
        return rc;
    *out = m.params;
    m.params = NULL;
    mb_gpt_params_free(&m);
    *n_params = m.n_params;
    *n_elements = m.n_elements;
    return 0;
}
