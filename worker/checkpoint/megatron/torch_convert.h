/*
 * Files of torch.save into safetensors files and back: the same tensors, bit by bit, under the
 * names of torch_file.h. "args" (JSON) and "iteration" are in the safetensors file's metadata;
 * where it has such arguments, the way back makes a checkpoint of Megatron-LM (torch_write.h), else
 * one dictionary. The target appears under its name only when it is whole. Blocking; any thread.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_MEGATRON_TORCH_CONVERT_H
#define MOBULA_WORKER_CHECKPOINT_MEGATRON_TORCH_CONVERT_H

#include "worker/checkpoint/megatron/torch_file.h"

/* The target must not exist: MB_EEXIST. MB_ECORRUPT if a checksum of the source is another. */
int mb_torch_to_safetensors(struct mb_torch_file *source, const char *target, struct mb_err *err);
int mb_torch_from_safetensors(struct mb_st_reader *source, const char *target, struct mb_err *err);

#endif
