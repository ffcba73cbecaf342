/*
 * Whether a model on a local disk is whole, every byte of it read: a checkpoint of ours, one of
 * Megatron-LM's, or a Hugging Face directory. Blocking; any thread.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_VERIFY_H
#define MOBULA_WORKER_CHECKPOINT_VERIFY_H

#include "worker/checkpoint/hf/convert.h"

struct mb_verified {
    enum mb_model_kind kind;
    int64_t iteration; /* as in mb_model_facts */
    size_t n_files;    /* checked */
    uint64_t total_bytes;
    size_t n_without_sums; /* of them, those that nothing could be compared with */
    /* Why the optimizer, which is there, was not compared: of a form that is not read. Code 0: it
     * was, or there is none. */
    struct mb_err not_compared;
};

/*
 * iteration -1: the newest. MB_ENOENT: dir is no model. MB_ECORRUPT, or what a load would return,
 * names the file and what is wrong with it. Ours: state.json, shapes, all of the optimizer's
 * ranges, checksums. Megatron-LM's: what a load with the optimizer checks, and every entry of every
 * file of torch.save; of torch_dist the chunks of weights and of the optimizer, unless
 * out->not_compared says that this one's were not. Hugging Face's: shapes, and the checksums of
 * files that mobula wrote.
 */
int mb_checkpoint_verify(const char *dir, int64_t iteration, struct mb_verified *out,
                         struct mb_err *err);

#endif
