/* What save.c, load.c and hf/convert.c share. Nobody else includes this. */
#ifndef MOBULA_WORKER_CHECKPOINT_COMMON_H
#define MOBULA_WORKER_CHECKPOINT_COMMON_H

#include "base/buf.h"
#include "worker/checkpoint/checkpoint.h"

enum { MB_CHECKPOINT_STATE_MAX = 64 << 20, MB_CHECKPOINT_PIECE = 1 << 18 /* floats */ };

#define MB_CHECKPOINT_MODEL_FILE "model_tp00_pp00.safetensors"
#define MB_CHECKPOINT_STATE_FILE "state.json"

/* "iter_0000010" (of MB_CHECKPOINT_RELEASE: "release"), "optim_dp_000_of_002.safetensors" */
void mb_checkpoint_iter_name(int64_t iteration, char out[32]);
void mb_checkpoint_optim_name(uint32_t rank, uint32_t world_size, char out[48]);

/* Where the directory of an iteration is while another takes its place, on a file system that
 * cannot exchange two names: DIR/.iter_0000010.old, owned by the caller. */
char *mb_checkpoint_old_name(const char *dir, int64_t iteration);
/* A kill at that moment left it there: it gets its name back, unless that is taken by now; then it
 * goes. Several ranks may do it at once. */
int mb_checkpoint_put_back(const char *dir, struct mb_err *err);

/* The tracker's iteration: > 0, MB_CHECKPOINT_RELEASE, or 0 when there is no tracker. */
int mb_checkpoint_read_tracker(const char *dir, int64_t *iteration, struct mb_err *err);

/* saved gets one more; path is copied. */
int mb_checkpoint_note_file(struct mb_checkpoint_saved *saved, const char *path,
                            uint64_t size_bytes, uint64_t crc64nvme, struct mb_err *err);

/* Every rank brings its own outcome; 0 if all are 0. Else rc, or MB_EUNAVAIL naming a rank. */
int mb_checkpoint_agree(struct mb_comm *comm, int rc, const char *what, struct mb_err *err);

/* state.json. To encode, m needs its tensors only; without comm there is one rank. */
int mb_checkpoint_state_encode(const struct mb_checkpoint_model *m,
                               const struct mb_checkpoint_state *s, struct mb_buf *out,
                               struct mb_err *err);
int mb_checkpoint_state_decode(const char *name, const void *text, size_t n,
                               struct mb_checkpoint_state *out, struct mb_err *err);

#endif
