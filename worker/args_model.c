#include "worker/args_model.h"

#include <string.h>

static enum mb_gpt_positions positions_of(const char *type)
{
    if (strcmp(type, "rope") == 0) {
        return MB_GPT_ROPE;
    }
    return strcmp(type, "none") == 0 ? MB_GPT_NO_POSITIONS : MB_GPT_LEARNED;
}

static enum mb_gpt_fp8 fp8_of(const char *format)
{
    if (format == NULL) {
        return MB_GPT_NO_FP8;
    }
    return strcmp(format, "hybrid") == 0 ? MB_GPT_FP8_HYBRID : MB_GPT_FP8_E4M3;
}

static size_t recomputed(const struct mb_args *a)
{
    if (a->recompute_granularity == NULL || strcmp(a->recompute_granularity, "full") != 0) {
        return 0;
    }
    return (size_t)(strcmp(a->recompute_method, "block") == 0 ? a->recompute_num_layers
                                                              : a->num_layers);
}

void mb_args_model(const struct mb_args *a, uint64_t vocab_size, struct mb_gpt_config *c)
{
    int64_t interpolation = a->rotary_seq_len_interpolation_factor;
    mb_gpt_config_init(c);
    c->n_layers = (size_t)a->num_layers;
    c->hidden = (size_t)a->hidden_size;
    c->ffn_hidden = (size_t)a->ffn_hidden_size;
    c->n_heads = (size_t)a->num_attention_heads;
    c->head_dim = (size_t)a->kv_channels;
    c->n_groups = (size_t)a->num_query_groups;
    c->seq = (size_t)a->seq_length;
    c->max_positions = (size_t)a->max_position_embeddings;
    c->vocab = vocab_size;
    c->padded_vocab = (size_t)a->padded_vocab_size;
    c->untie_output = a->untie_embeddings_and_output_weights != 0;
    c->norm = strcmp(a->normalization, "RMSNorm") == 0 ? MB_GPT_RMSNORM : MB_GPT_LAYERNORM;
    c->norm_1p = a->apply_layernorm_1p != 0;
    c->positions = positions_of(a->position_embedding_type);
    c->batch_positions = a->reset_position_ids != 0;
    c->rope = (struct mb_rope_config){.base = (double)a->rotary_base,
                                      .percent = a->rotary_percent,
                                      .interpolation =
                                          interpolation != MB_ARGS_NONE ? (double)interpolation : 1,
                                      .scaling = a->use_rope_scaling != 0,
                                      .scaling_factor = a->rope_scaling_factor};
    c->swiglu = a->swiglu != 0;
    c->linear_bias = a->add_bias_linear != 0;
    c->qkv_bias = a->add_bias_linear != 0 || a->add_qkv_bias != 0;
    c->gelu = a->bias_gelu_fusion ? MB_GELU_TANH : MB_GELU_ERF;
    c->norm_eps = (float)a->norm_epsilon;
    c->init_std = (float)a->init_method_std;
    c->recompute_layers = recomputed(a);
    c->hidden_dropout = (float)a->hidden_dropout;
    c->attention_dropout = (float)a->attention_dropout;
    c->seed = (uint64_t)a->seed;
    c->sequence_parallel = a->sequence_parallel != 0;
    c->graphs = mb_args_wants_graphs(a);
    c->fp8 = fp8_of(a->fp8);
    c->fp8_margin = (int)a->fp8_margin;
    c->dtype = mb_args_computes_in_bf16(a) ? MB_DTYPE_BF16 : a->fp16 ? MB_DTYPE_F16 : MB_DTYPE_F32;
}
