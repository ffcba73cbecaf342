/* From Megatron-LM's arguments to the model's configuration. Pure. */
#ifndef MOBULA_WORKER_ARGS_MODEL_H
#define MOBULA_WORKER_ARGS_MODEL_H

#include "worker/args.h"
#include "worker/model/gpt.h"

/* a is validated and has its padded vocabulary; vocab_size is the tokenizer's. */
void mb_args_model(const struct mb_args *a, uint64_t vocab_size, struct mb_gpt_config *out);

#endif
