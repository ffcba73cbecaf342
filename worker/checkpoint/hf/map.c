/*
 * The map is made tensor by tensor of ours, in the order of the flat buffers (model/gpt_params.c).
 * linear_qkv has, per group, its queries, one key, one value; Llama has a tensor of each, GPT-2 one
 * with all queries, then all keys, then all values. linear_fc1 of Llama is gate_proj, then up_proj.
 */
#include "worker/checkpoint/hf/map.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include "base/alloc.h"

enum { LAYER_TENSORS_MAX = 16, TENSORS_OUTSIDE = 8, LAYER_RUNS = 32 };

struct making {
    const struct mb_hf_shape *s;
    struct mb_hf_map *m;
};

__attribute__((format(printf, 5, 6))) static size_t add(const struct making *k,
                                                        enum mb_hf_side side, uint64_t rows,
                                                        uint64_t columns, const char *fmt, ...)
{
    struct mb_hf_tensor *t = &k->m->tensors[side][k->m->n_tensors[side]++];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(t->name, sizeof t->name, fmt, ap);
    va_end(ap);
    t->rows = rows;
    t->columns = columns;
    return k->m->n_tensors[side] - 1;
}

static void run(const struct making *k, size_t theirs, uint64_t their_row, size_t ours,
                uint64_t our_row, uint64_t n_rows)
{
    k->m->runs[k->m->n_runs++] =
        (struct mb_hf_run){.tensor = {theirs, ours}, .row = {their_row, our_row}, .n_rows = n_rows};
}

/* One tensor of ours is one of theirs. */
static void same(const struct making *k, size_t theirs, size_t ours)
{
    run(k, theirs, 0, ours, 0, k->m->tensors[MB_HF_THEIRS][theirs].rows);
}

/* q, k and v are their tensors and where in them the first row is. */
static void qkv_runs(const struct making *k, size_t ours, const size_t theirs[3],
                     const uint64_t first[3])
{
    const struct mb_hf_shape *s = k->s;
    const uint64_t d = s->head_dim, q = s->n_heads / s->n_groups * d;
    for (uint64_t g = 0; g < s->n_groups; g++) {
        const uint64_t row = g * (q + 2 * d);
        run(k, theirs[0], first[0] + g * q, ours, row, q);
        run(k, theirs[1], first[1] + g * d, ours, row + q, d);
        run(k, theirs[2], first[2] + g * d, ours, row + q + d, d);
    }
}

static const char LAYER[] = "decoder.layers";

/* kind: "weight" with so many columns, "bias" with 0. */
static void llama_qkv(const struct making *k, unsigned long long l, uint64_t columns,
                      const char *kind)
{
    const struct mb_hf_shape *s = k->s;
    const uint64_t d = s->head_dim, none[3] = {0, 0, 0};
    const char letters[] = "qkv";
    size_t theirs[3];
    size_t ours = add(k, MB_HF_OURS, (s->n_heads + 2 * s->n_groups) * d, columns,
                      "%s.%llu.self_attention.linear_qkv.%s", LAYER, l, kind);
    for (int i = 0; i < 3; i++) {
        theirs[i] = add(k, MB_HF_THEIRS, (i == 0 ? s->n_heads : s->n_groups) * d, columns,
                        "model.layers.%llu.self_attn.%c_proj.%s", l, letters[i], kind);
    }
    qkv_runs(k, ours, theirs, none);
}

static void llama_fc1(const struct making *k, unsigned long long l, uint64_t columns,
                      const char *kind)
{
    const uint64_t ffn = k->s->ffn;
    size_t ours = add(k, MB_HF_OURS, 2 * ffn, columns, "%s.%llu.mlp.linear_fc1.%s", LAYER, l, kind);
    run(k, add(k, MB_HF_THEIRS, ffn, columns, "model.layers.%llu.mlp.gate_proj.%s", l, kind), 0,
        ours, 0, ffn);
    run(k, add(k, MB_HF_THEIRS, ffn, columns, "model.layers.%llu.mlp.up_proj.%s", l, kind), 0, ours,
        ffn, ffn);
}

static void llama_norm(const struct making *k, unsigned long long l, const char *theirs,
                       const char *ours)
{
    same(k, add(k, MB_HF_THEIRS, k->s->hidden, 0, "model.layers.%llu.%s.weight", l, theirs),
         add(k, MB_HF_OURS, k->s->hidden, 0, "%s.%llu.%s.layer_norm_weight", LAYER, l, ours));
}

/* A linear layer that writes to the residual stream, of so many columns. */
static void llama_linear(const struct making *k, unsigned long long l, uint64_t columns,
                         const char *theirs, const char *ours)
{
    const uint64_t h = k->s->hidden;
    same(k, add(k, MB_HF_THEIRS, h, columns, "model.layers.%llu.%s.weight", l, theirs),
         add(k, MB_HF_OURS, h, columns, "%s.%llu.%s.weight", LAYER, l, ours));
    if (k->s->biases) {
        same(k, add(k, MB_HF_THEIRS, h, 0, "model.layers.%llu.%s.bias", l, theirs),
             add(k, MB_HF_OURS, h, 0, "%s.%llu.%s.bias", LAYER, l, ours));
    }
}

static void llama_layer(const struct making *k, unsigned long long l)
{
    const struct mb_hf_shape *s = k->s;
    llama_norm(k, l, "input_layernorm", "self_attention.linear_qkv");
    llama_qkv(k, l, s->hidden, "weight");
    if (s->biases) {
        llama_qkv(k, l, 0, "bias");
    }
    llama_linear(k, l, s->n_heads * s->head_dim, "self_attn.o_proj", "self_attention.linear_proj");
    llama_norm(k, l, "post_attention_layernorm", "mlp.linear_fc1");
    llama_fc1(k, l, s->hidden, "weight");
    if (s->biases) {
        llama_fc1(k, l, 0, "bias");
    }
    llama_linear(k, l, s->ffn, "mlp.down_proj", "mlp.linear_fc2");
}

static void llama(const struct making *k)
{
    const struct mb_hf_shape *s = k->s;
    same(k, add(k, MB_HF_THEIRS, s->vocab, s->hidden, "model.embed_tokens.weight"),
         add(k, MB_HF_OURS, s->padded_vocab, s->hidden, "embedding.word_embeddings.weight"));
    for (uint64_t l = 0; l < s->n_layers; l++) {
        llama_layer(k, l);
    }
    same(k, add(k, MB_HF_THEIRS, s->hidden, 0, "model.norm.weight"),
         add(k, MB_HF_OURS, s->hidden, 0, "decoder.final_layernorm.weight"));
}

/* ---- GPT-2 ---- */

static void gpt2_norm(const struct making *k, unsigned long long l, const char *theirs,
                      const char *ours)
{
    const char *const kinds[] = {"weight", "bias"};
    for (int i = 0; i < 2; i++) {
        same(k,
             add(k, MB_HF_THEIRS, k->s->hidden, 0, "transformer.h.%llu.%s.%s", l, theirs, kinds[i]),
             add(k, MB_HF_OURS, k->s->hidden, 0, "%s.%llu.%s.layer_norm_%s", LAYER, l, ours,
                 kinds[i]));
    }
}

/* Adds weight (columns > 0) or bias of a linear layer on both sides. */
static void gpt2_add(const struct making *k, unsigned long long l, uint64_t rows, uint64_t columns,
                     const char *theirs, const char *ours, size_t out[2])
{
    const char *kind = columns > 0 ? "weight" : "bias";
    out[MB_HF_THEIRS] =
        add(k, MB_HF_THEIRS, rows, columns, "transformer.h.%llu.%s.%s", l, theirs, kind);
    out[MB_HF_OURS] = add(k, MB_HF_OURS, rows, columns, "%s.%llu.%s.%s", LAYER, l, ours, kind);
    k->m->tensors[MB_HF_THEIRS][out[MB_HF_THEIRS]].turned = columns > 0;
}

static void gpt2_linear(const struct making *k, unsigned long long l, uint64_t rows,
                        uint64_t columns, const char *theirs, const char *ours)
{
    size_t at[2];
    gpt2_add(k, l, rows, columns, theirs, ours, at);
    same(k, at[MB_HF_THEIRS], at[MB_HF_OURS]);
    gpt2_add(k, l, rows, 0, theirs, ours, at);
    same(k, at[MB_HF_THEIRS], at[MB_HF_OURS]);
}

static void gpt2_qkv(const struct making *k, unsigned long long l, uint64_t columns)
{
    const uint64_t h = k->s->hidden, first[3] = {0, h, 2 * h};
    size_t at[2];
    gpt2_add(k, l, 3 * h, columns, "attn.c_attn", "self_attention.linear_qkv", at);
    const size_t theirs[3] = {at[MB_HF_THEIRS], at[MB_HF_THEIRS], at[MB_HF_THEIRS]};
    qkv_runs(k, at[MB_HF_OURS], theirs, first);
}

static void gpt2(const struct making *k)
{
    const struct mb_hf_shape *s = k->s;
    const uint64_t h = s->hidden;
    same(k, add(k, MB_HF_THEIRS, s->vocab, h, "transformer.wte.weight"),
         add(k, MB_HF_OURS, s->padded_vocab, h, "embedding.word_embeddings.weight"));
    same(k, add(k, MB_HF_THEIRS, s->max_positions, h, "transformer.wpe.weight"),
         add(k, MB_HF_OURS, s->max_positions, h, "embedding.position_embeddings.weight"));
    for (uint64_t l = 0; l < s->n_layers; l++) {
        gpt2_norm(k, l, "ln_1", "self_attention.linear_qkv");
        gpt2_qkv(k, l, h);
        gpt2_qkv(k, l, 0);
        gpt2_linear(k, l, h, h, "attn.c_proj", "self_attention.linear_proj");
        gpt2_norm(k, l, "ln_2", "mlp.linear_fc1");
        gpt2_linear(k, l, s->ffn, h, "mlp.c_fc", "mlp.linear_fc1");
        gpt2_linear(k, l, h, s->ffn, "mlp.c_proj", "mlp.linear_fc2");
    }
    same(k, add(k, MB_HF_THEIRS, h, 0, "transformer.ln_f.weight"),
         add(k, MB_HF_OURS, h, 0, "decoder.final_layernorm.weight"));
    same(k, add(k, MB_HF_THEIRS, h, 0, "transformer.ln_f.bias"),
         add(k, MB_HF_OURS, h, 0, "decoder.final_layernorm.bias"));
}

int mb_hf_map_create(const struct mb_hf_shape *s, struct mb_hf_map *m, struct mb_err *err)
{
    const struct making k = {s, m};
    const size_t n = s->n_layers * LAYER_TENSORS_MAX + TENSORS_OUTSIDE;
    const size_t n_runs = s->n_layers * (LAYER_RUNS + 6 * s->n_groups) + TENSORS_OUTSIDE;
    *m = (struct mb_hf_map){0};
    for (int side = 0; side < 2; side++) {
        m->tensors[side] = mb_calloc(n, sizeof **m->tensors);
    }
    m->runs = mb_calloc(n_runs, sizeof *m->runs);
    if (m->tensors[0] == NULL || m->tensors[1] == NULL || m->runs == NULL) {
        mb_hf_map_close(m);
        return mb_err_set(err, MB_ENOMEM, "out of memory for the tensors of %llu layers",
                          (unsigned long long)s->n_layers);
    }
    if (s->family == MB_HF_LLAMA) {
        llama(&k);
    } else {
        gpt2(&k);
    }
    if (s->untied) {
        same(&k, add(&k, MB_HF_THEIRS, s->vocab, s->hidden, "lm_head.weight"),
             add(&k, MB_HF_OURS, s->padded_vocab, s->hidden, "output_layer.weight"));
    }
    assert(m->n_tensors[0] <= n && m->n_tensors[1] <= n && m->n_runs <= n_runs);
    return 0;
}

void mb_hf_map_close(struct mb_hf_map *m)
{
    mb_free(m->tensors[0]);
    mb_free(m->tensors[1]);
    mb_free(m->runs);
    *m = (struct mb_hf_map){0};
}

static int compare(const struct mb_hf_run *x, const struct mb_hf_run *y, int side)
{
    if (x->tensor[side] != y->tensor[side]) {
        return x->tensor[side] < y->tensor[side] ? -1 : 1;
    }
    return x->row[side] < y->row[side] ? -1 : x->row[side] > y->row[side];
}

static int by_theirs(const void *x, const void *y)
{
    return compare(x, y, MB_HF_THEIRS);
}

static int by_ours(const void *x, const void *y)
{
    return compare(x, y, MB_HF_OURS);
}

void mb_hf_map_sort(struct mb_hf_map *m, enum mb_hf_side side)
{
    qsort(m->runs, m->n_runs, sizeof *m->runs, side == MB_HF_THEIRS ? by_theirs : by_ours);
}

uint64_t mb_hf_map_count(const struct mb_hf_map *m, enum mb_hf_side side)
{
    uint64_t n = 0;
    for (size_t i = 0; i < m->n_tensors[side]; i++) {
        const struct mb_hf_tensor *t = &m->tensors[side][i];
        n += t->rows * (t->columns > 0 ? t->columns : 1);
    }
    return n;
}
