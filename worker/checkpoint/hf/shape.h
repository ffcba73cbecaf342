/*
 * What a model is, as far as both Hugging Face's config.json and our state.json say it, and the two
 * texts. Parsers refuse, by the field's name, what the other side could not express: a converted
 * model computes the same or is not converted. Pure; any thread.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_HF_SHAPE_H
#define MOBULA_WORKER_CHECKPOINT_HF_SHAPE_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum mb_hf_family { MB_HF_LLAMA, MB_HF_GPT2 };

struct mb_hf_shape {
    enum mb_hf_family family;
    uint64_t n_layers, hidden, ffn, n_heads, n_groups, head_dim, max_positions;
    uint64_t vocab;        /* rows that mean something */
    uint64_t padded_vocab; /* rows in our checkpoint, >= vocab; of a config.json: vocab */
    double norm_eps;
    int untied, biases; /* biases of all linear layers; GPT-2 always has them */
    /* Llama */
    int64_t rope_base;
    int64_t rope_interpolation; /* 1: none */
    double rope_factor;         /* of Llama 3.1's scaling; 0: none */
    /* GPT-2 */
    int gelu_erf;
    double attention_dropout, hidden_dropout;
};

/* Sizes that are sane and go together; both parsers ask. */
int mb_hf_shape_check(const char *name, const struct mb_hf_shape *s, struct mb_err *err);

/* config.json; name is for texts. MB_ECORRUPT: no such JSON; MB_EUNSUPPORTED: a model that ours
 * cannot be. */
int mb_hf_config_parse(const char *name, const void *text, size_t n, struct mb_hf_shape *out,
                       struct mb_err *err);
/* dtype as config.json has it: "float32". NULL: out of memory. */
char *mb_hf_config_text(const struct mb_hf_shape *s, const char *dtype);

/* Megatron-LM's arguments as state.json keeps them. vocab > 0: the rows that mean something,
 * whatever the arguments say. */
int mb_hf_args_parse(const char *name, const char *args_json, uint64_t vocab,
                     struct mb_hf_shape *out, struct mb_err *err);
char *mb_hf_args_text(const struct mb_hf_shape *s);

#endif
