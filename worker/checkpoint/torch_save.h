/*
 * The files of a save as Megatron-LM's --ckpt-format torch has them. A zip of torch.save is one
 * stream of bytes, and a rank's file needs what others have of its optimizer; loading reads all
 * files on rank 0. So rank 0 writes them all: the weights are in its memory, the moments come from
 * the other ranks a piece at a time. Each rank needs 1 MB for that, rank 0 besides 1 MB for each
 * rank of a tensor group, and 2.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_TORCH_SAVE_H
#define MOBULA_WORKER_CHECKPOINT_TORCH_SAVE_H

#include "worker/checkpoint/checkpoint.h"

/* Whether such a model and state can be saved so, without a disk, or what is refused: of a run
 * before it trains, where the first save would be late. name is for texts. No rank waits for
 * another. */
int mb_torch_save_check(const char *name, const struct mb_checkpoint_model *m,
                        const struct mb_checkpoint_state *state, struct mb_err *err);

/*
 * Collective, of a model without a layout: rank 0 makes iter_dir/mp_rank_TT[_PPP], all of it
 * fsynced, and adds the files to out; the other ranks touch no disk. Ranks that wait hear of the
 * progress, beyond the communicator's time-out. With m->stall_ms no step of the disk for so long is
 * MB_ETIMEOUT on rank 0, and *hangs is 1: a thread still uses m, state and iter_dir; it calls
 * release(arg) if it ever ends. Else it waits for the disk, and the others do so for the
 * communicator's time-out. One rank may fail alone: mb_checkpoint_agree() is to follow.
 */
int mb_torch_save(const struct mb_checkpoint_model *m, const char *iter_dir,
                  const struct mb_checkpoint_state *state, void (*release)(void *arg), void *arg,
                  struct mb_checkpoint_saved *out, int *hangs, struct mb_err *err);

#endif
