/* What save.c and load.c share. Nobody else includes this. */
#ifndef MOBULA_WORKER_CHECKPOINT_COMMON_H
#define MOBULA_WORKER_CHECKPOINT_COMMON_H

#include "base/buf.h"
#include "worker/checkpoint/checkpoint.h"

enum { MB_CHECKPOINT_STATE_MAX = 64 << 20, MB_CHECKPOINT_PIECE = 1 << 18 /* floats */ };

#define MB_CHECKPOINT_MODEL_FILE "model_tp00_pp00.safetensors"
#define MB_CHECKPOINT_STATE_FILE "state.json"

/* "iter_0000010", "optim_dp_000_of_002.safetensors" */
void mb_checkpoint_iter_name(int64_t iteration, char out[32]);
void mb_checkpoint_optim_name(uint32_t rank, uint32_t world_size, char out[48]);

/* Every rank brings its own outcome; 0 if all are 0. Else rc, or MB_EUNAVAIL naming a rank. */
int mb_checkpoint_agree(struct mb_comm *comm, int rc, const char *what, struct mb_err *err);

/* state.json */
int mb_checkpoint_state_encode(const struct mb_checkpoint_model *m,
                               const struct mb_checkpoint_state *s, struct mb_buf *out,
                               struct mb_err *err);
int mb_checkpoint_state_decode(const char *name, const void *text, size_t n,
                               struct mb_checkpoint_state *out, struct mb_err *err);

#endif
