/*
 * Adam's moments of a checkpoint of ours, which lie in files optim_dp_RRR_of_NNN.safetensors, each
 * a range of the model's flat buffers: as those of whole tensors, and written as one file.
 * Blocking; one thread per object.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_MOMENTS_H
#define MOBULA_WORKER_CHECKPOINT_MOMENTS_H

#include "worker/checkpoint/common.h"
#include "worker/checkpoint/safetensors.h"

struct mb_moments;

/* Elements of the flat buffer before tensor i of the file of weights; i its number: all of them. */
uint64_t mb_moments_offset(const struct mb_st_tensor *tensors, size_t i);

/* Whether a name is that of such a file. A directory may still hold some that its node saved in an
 * attempt of another size, which never became durable; world_size 0: not known. */
int mb_moments_is_file(const char *name, int64_t world_size);
/* MB_ENOENT with the name of the file that should hold element `at` of the flat buffer of so many
 * and is not in dir: ranks share the buffer as mb_comm_range() has it. Of files that are all there,
 * or whose number is not known, none is named. */
int mb_moments_missing(const char *dir, uint64_t flat_elements, int64_t world_size, uint64_t at,
                       struct mb_err *err);
/* What its tensors are called: Adam's two, or SGD's one. */
enum { MB_MOMENTS_ADAM = 2, MB_MOMENTS_SGD = 1 };
const char *mb_moments_name(int n_moments, int which);
/* Which range of the flat buffer a file has, and that its n_moments tensors do. path is for texts.
 */
int mb_moments_range(const char *path, const struct mb_st_reader *r, uint64_t flat_elements,
                     int n_moments, size_t *begin, size_t *end, struct mb_err *err);

/* Of a directory whose weights are open in model, which is borrowed until close. MB_ENOENT: no file
 * has some of it. */
int mb_moments_open(const char *iter_dir, const struct mb_st_reader *model,
                    const struct mb_checkpoint_state *s, struct mb_moments **out,
                    struct mb_err *err);
/* The same of any optimizer's, SGD's too; nothing stays open. */
int mb_moments_check(const char *iter_dir, const struct mb_st_reader *model,
                     const struct mb_checkpoint_state *s, struct mb_err *err);
void mb_moments_close(struct mb_moments *m); /* NULL is legal */
/* Elements [from, from + n) of exp_avg (0) or exp_avg_sq (1) of a tensor of model. */
int mb_moments_read(struct mb_moments *m, int which, const struct mb_st_tensor *t, uint64_t from,
                    size_t n, float *out, struct mb_err *err);

/* Into dir as optim_dp_000_of_001.safetensors; tensors: those of the file of weights, of which read
 * gives elements [from, from + n). */
int mb_moments_write(const char *dir, const struct mb_st_tensor *tensors, size_t n_tensors,
                     int (*read)(void *arg, int which, size_t tensor, uint64_t from, size_t n,
                                 float *out, struct mb_err *err),
                     void *arg, struct mb_err *err);

#endif
