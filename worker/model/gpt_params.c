/*
 * The parameter table and the initial weights.
 *
 * Order in the flat buffers is the order of use: embeddings, layers, final norm, output. So
 * gradients become final from the end of the buffer to its start. Element e of a parameter takes
 * normal e % 4 of Philox block e / 4 under (seed, hash of the name): four words give four normals
 * by Box-Muller in double. Weights of embeddings, qkv, fc1 and output have the given deviation;
 * those that write to the residual stream have it divided by sqrt(2 layers); norms are 1 (0 where
 * the difference from 1 is kept), biases 0. An element depends on nothing else, so threads draw
 * a piece side by side.
 */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/kernels/philox.h"
#include "worker/model/gpt_internal.h"

enum { PARAMS_PER_LAYER = 12, PARAMS_OUTSIDE = 5, DRAW_PIECE = 1 << 22 };
/* Of a piece that is smaller one thread draws all. */
enum { DRAW_THREADS_MAX = 16, DRAW_BLOCKS_MIN = 1 << 14 };

static const uint32_t INIT_DOMAIN = 0x696e6974; /* keeps these draws apart from dropout's sites */

/* Append a parameter; columns 0 makes it 1-D. Returns its flat offset. */
__attribute__((format(printf, 4, 5))) static size_t add(struct mb_gpt *m, size_t rows,
                                                        size_t columns, const char *name, ...)
{
    struct mb_param *p = &m->params[m->n_params++];
    va_list ap;
    va_start(ap, name);
    vsnprintf(p->name, sizeof(p->name), name, ap);
    va_end(ap);
    p->shape[0] = rows;
    p->shape[1] = columns ? columns : 1;
    p->n_dims = columns ? 2 : 1;
    p->no_weight_decay = columns == 0;
    p->n = rows * p->shape[1];
    p->offset = m->n_elements;
    m->n_elements += (p->n + MB_PARAM_ALIGN - 1) / MB_PARAM_ALIGN * MB_PARAM_ALIGN;
    m->n_parameters += p->n;
    return p->offset;
}

/* A linear layer's or a norm's; columns 0: a norm. */
static struct mb_gpt_pair add_pair(struct mb_gpt *m, size_t rows, size_t columns, int has_bias,
                                   size_t l, const char *name)
{
    struct mb_gpt_pair at = {.bias = MB_GPT_NONE};
    const char *norm = columns ? "" : "layer_norm_";
    at.weight = add(m, rows, columns, "decoder.layers.%zu.%s.%sweight", l, name, norm);
    if (has_bias)
        at.bias = add(m, rows, 0, "decoder.layers.%zu.%s.%sbias", l, name, norm);
    return at;
}

static void add_layer(struct mb_gpt *m, size_t l)
{
    const struct mb_gpt_config *c = &m->c;
    struct mb_gpt_layer *y = &m->layers[l];
    const size_t h = c->hidden, qkv = mb_gpt_qkv_width(c), fc1 = mb_gpt_fc1_width(c);
    const int bias = c->linear_bias, norm_bias = c->norm == MB_GPT_LAYERNORM;
    y->begin = m->n_elements;
    y->norm1 = (struct mb_gpt_norm_at){add_pair(m, h, 0, norm_bias, l, "self_attention.linear_qkv"),
                                       2 * l};
    y->qkv = add_pair(m, qkv, h, bias || c->qkv_bias, l, "self_attention.linear_qkv");
    y->proj = add_pair(m, h, mb_gpt_attention_width(c), bias, l, "self_attention.linear_proj");
    y->norm2 =
        (struct mb_gpt_norm_at){add_pair(m, h, 0, norm_bias, l, "mlp.linear_fc1"), 2 * l + 1};
    y->fc1 = add_pair(m, fc1, h, bias, l, "mlp.linear_fc1");
    y->fc2 = add_pair(m, h, c->ffn_hidden, bias, l, "mlp.linear_fc2");
    y->end = m->n_elements;
}

int mb_gpt_params_create(struct mb_gpt *m, struct mb_err *err)
{
    const struct mb_gpt_config *c = &m->c;
    m->layers = mb_calloc(c->n_layers, sizeof(*m->layers));
    m->params = mb_calloc(c->n_layers * PARAMS_PER_LAYER + PARAMS_OUTSIDE, sizeof(*m->params));
    if (m->layers == NULL || m->params == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory for the parameter table of %zu layers",
                          c->n_layers);
    m->word_embedding = add(m, c->padded_vocab, c->hidden, "embedding.word_embeddings.weight");
    m->params[m->n_params - 1].is_embedding_or_output = 1;
    m->position_embedding = MB_GPT_NONE;
    if (c->positions == MB_GPT_LEARNED)
        m->position_embedding =
            add(m, c->max_positions, c->hidden, "embedding.position_embeddings.weight");
    for (size_t l = 0; l < c->n_layers; l++)
        add_layer(m, l);
    m->layers_end = m->n_elements;
    m->final_norm = (struct mb_gpt_norm_at){.at.bias = MB_GPT_NONE, .index = 2 * c->n_layers};
    m->final_norm.at.weight = add(m, c->hidden, 0, "decoder.final_layernorm.weight");
    if (c->norm == MB_GPT_LAYERNORM)
        m->final_norm.at.bias = add(m, c->hidden, 0, "decoder.final_layernorm.bias");
    m->output_weight = m->word_embedding;
    if (c->untie_output) {
        m->output_weight = add(m, c->padded_vocab, c->hidden, "output_layer.weight");
        m->params[m->n_params - 1].is_embedding_or_output = 1;
    }
    return 0;
}

int mb_gpt_count_parameters(const struct mb_gpt_config *c, size_t *out, struct mb_err *err)
{
    struct mb_gpt m = {.c = *c};
    int rc = mb_gpt_config_check(c, err);
    if (rc == 0) {
        mb_gpt_config_complete(&m.c);
        rc = mb_gpt_params_create(&m, err);
    }
    *out = m.n_parameters;
    mb_free(m.params);
    mb_free(m.layers);
    return rc;
}

/* FNV-1a: the parameter's share of the counter. */
static uint32_t hash_name(const char *name)
{
    uint32_t h = 2166136261u;
    for (; *name != '\0'; name++)
        h = (h ^ (uint8_t)*name) * 16777619u;
    return h;
}

static void draw_normals(uint64_t seed, uint32_t stream, size_t first_block, size_t n_blocks,
                         double std, float *out)
{
    const double to_unit = 1.0 / 4294967296.0, two_pi = 6.283185307179586;
    for (size_t b = 0; b < n_blocks; b++) {
        struct mb_philox r = mb_philox(seed, first_block + b, stream, INIT_DOMAIN);
        for (size_t i = 0; i < 4; i += 2) {
            double radius = std * sqrt(-2 * log(((double)r.word[i] + 0.5) * to_unit));
            double angle = two_pi * ((double)r.word[i + 1] + 0.5) * to_unit;
            out[4 * b + i] = (float)(radius * cos(angle));
            out[4 * b + i + 1] = (float)(radius * sin(angle));
        }
    }
}

struct share {
    pthread_t thread;
    uint64_t seed;
    uint32_t stream;
    size_t first_block, n_blocks;
    double std;
    float *out;
};

static void *draw_share(void *arg)
{
    const struct share *s = arg;
    draw_normals(s->seed, s->stream, s->first_block, s->n_blocks, s->std, s->out);
    return NULL;
}

/* As many as may run here, and as there is work for. */
static size_t threads_for(size_t n_blocks)
{
    cpu_set_t set;
    size_t n = sched_getaffinity(0, sizeof(set), &set) == 0 ? (size_t)CPU_COUNT(&set) : 1;
    size_t most = n_blocks / DRAW_BLOCKS_MIN;
    n = n < DRAW_THREADS_MAX ? n : DRAW_THREADS_MAX;
    n = n < most ? n : most;
    return n > 0 ? n : 1;
}

/* The first share is the caller's; one whose thread cannot be made is, too. */
static void draw_piece(uint64_t seed, uint32_t stream, size_t first_block, size_t n_blocks,
                       double std, float *out)
{
    struct share shares[DRAW_THREADS_MAX];
    const size_t n = threads_for(n_blocks);
    int is_running[DRAW_THREADS_MAX] = {0};
    for (size_t i = 0; i < n; i++) {
        const size_t from = n_blocks * i / n, to = n_blocks * (i + 1) / n;
        shares[i] = (struct share){.seed = seed,
                                   .stream = stream,
                                   .first_block = first_block + from,
                                   .n_blocks = to - from,
                                   .std = std,
                                   .out = out + 4 * from};
        if (i > 0)
            is_running[i] = pthread_create(&shares[i].thread, NULL, draw_share, &shares[i]) == 0;
    }
    for (size_t i = 0; i < n; i++)
        if (!is_running[i])
            draw_share(&shares[i]);
    for (size_t i = 0; i < n; i++)
        if (is_running[i])
            pthread_join(shares[i].thread, NULL);
}

static int ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), n_end = strlen(end);
    return n >= n_end && strcmp(s + n - n_end, end) == 0;
}

static void draw_param(struct mb_gpt *m, const struct mb_param *p, float *piece)
{
    double std = (double)m->c.init_std;
    if (ends_with(p->name, "linear_proj.weight") || ends_with(p->name, "linear_fc2.weight"))
        std /= sqrt(2.0 * (double)m->c.n_layers);
    uint32_t stream = hash_name(p->name);
    if (p->n_dims == 1) /* a norm's weight; what stays out of here is already zero */
        for (size_t i = 0; i < DRAW_PIECE && i < p->n; i++)
            piece[i] = 1;
    for (size_t first = 0; first < p->n; first += DRAW_PIECE) {
        size_t n = p->n - first < DRAW_PIECE ? p->n - first : DRAW_PIECE;
        if (p->n_dims == 2)
            draw_piece(m->c.seed, stream, first / 4, (n + 3) / 4, std, piece);
        m->dev->ops->copy_in(m->dev->ctx, m->dev->stream, m->weights + p->offset + first, piece,
                             n * sizeof(float));
    }
}

int mb_gpt_params_draw(struct mb_gpt *m, struct mb_err *err)
{
    float *piece = mb_calloc(DRAW_PIECE, sizeof(*piece));
    if (piece == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory drawing the initial weights");
    for (size_t i = 0; i < m->n_params; i++)
        if (m->params[i].n_dims == 2 || !(m->c.norm_1p || ends_with(m->params[i].name, "bias")))
            draw_param(m, &m->params[i], piece);
    mb_free(piece);
    return m->dev->ops->synchronize(m->dev->ctx, m->dev->stream, err);
}
