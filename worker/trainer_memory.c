/*
 * What a run says of memory behind its first logged iteration, as Megatron-LM does: what it would
 * need by Megatron-LM's estimate, and what this process has taken. The estimate is for sequence
 * parallelism and selective recomputation, and of the stage that has most. The backend has no cache
 * of memory: what is reserved is what is allocated. Nothing here fails.
 */
#include "worker/trainer.h"

#include <math.h>
#include <stdio.h>

static const double MEGABYTE = 1024 * 1024;

/* Parameters of the fullest stage's tensor-parallel rank. */
static double most_parameters(const struct mb_args *a)
{
    const double h = (double)a->hidden_size, layers = (double)a->num_layers;
    const double heads = (double)a->num_attention_heads;
    const double width = (double)a->kv_channels * heads / h; /* of all heads */
    const double attention = (1 + (double)a->num_query_groups / heads) * width;
    const double mlp = (double)a->ffn_hidden_size / h * (a->swiglu ? 1.5 : 1);
    const double in_layers = 2 * layers * h * h * (attention + mlp + 2 / h + 1 / (layers * h));
    const double embedding = h * (double)a->padded_vocab_size;
    const int has_both =
        a->untie_embeddings_and_output_weights && a->pipeline_model_parallel_size == 1;
    return (in_layers / (double)a->pipeline_model_parallel_size + (has_both ? 2 : 1) * embedding) /
           (double)a->tensor_model_parallel_size;
}

static double weights_and_optimizer_bytes(const struct mb_args *a)
{
    const double each = a->use_distributed_optimizer ? 6 + 12 / (double)a->data_parallel_size : 18;
    return most_parameters(a) * each;
}

/* Of the first stage, with as many micro batches in flight as there are stages. */
static double activation_bytes(const struct mb_args *a, int64_t n_micro)
{
    const double h = (double)a->hidden_size, stages = (double)a->pipeline_model_parallel_size;
    const double tokens = (double)a->seq_length * (double)a->micro_batch_size;
    double bytes = tokens * h * (18 + 4 * (double)a->ffn_hidden_size / h) * (double)a->num_layers;
    bytes += 8 * tokens * stages + tokens * h * stages; /* of the embedding */
    if (a->virtual_pipeline_model_parallel_size != MB_ARGS_NONE) {
        bytes *= 1 + (stages - 1) / (stages * (double)a->virtual_pipeline_model_parallel_size);
    } else if (stages > 1) {
        bytes *= fmin(1, (double)n_micro / stages);
    }
    if (a->pipeline_model_parallel_size == 1) { /* of the output layer and the loss */
        bytes += tokens * h * 4 * (1 + (double)a->padded_vocab_size / h);
    }
    return bytes / (double)a->tensor_model_parallel_size;
}

void mb_trainer_say_memory(struct mb_trainer *t)
{
    const struct mb_args *a = &t->args;
    const int64_t n_micro = t->batch / (a->micro_batch_size * a->data_parallel_size);
    const double kept = weights_and_optimizer_bytes(a) / MEGABYTE;
    const double activations = activation_bytes(a, n_micro) / MEGABYTE;
    char now[MB_ARG_FLOAT_TEXT_MAX], most[MB_ARG_FLOAT_TEXT_MAX];
    size_t now_bytes, most_bytes, n_blocks;
    mb_trainer_say(t,
                   "Theoretical memory footprints: weight and optimizer=%.2f MB, activation=%.2f "
                   "MB, total=%.2f MB\n",
                   kept, activations, kept + activations);
    if (t->data_rank > 0) {
        return;
    }
    t->dev.ops->allocated(t->dev.ctx, &now_bytes, &most_bytes, &n_blocks);
    mb_arg_float_text((double)now_bytes / MEGABYTE, now);
    mb_arg_float_text((double)most_bytes / MEGABYTE, most);
    printf("[Rank %u] (after %lld iterations) memory (MB) | allocated: %s | max allocated: %s | "
           "reserved: %s | max reserved: %s\n",
           t->rank, (long long)t->iteration, now, most, now, most);
    fflush(stdout);
}
