/*
 * A directory of Megatron-LM's --ckpt-format torch_dist: metadata.json, .metadata, and chunks of
 * tensors, each a file of torch.save, one behind another in *.distcp. Layers lie in one tensor, or
 * each in its own. The optimizer's tensors and objects are there by their names. Blocking; one
 * thread per object.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_MEGATRON_DIST_H
#define MOBULA_WORKER_CHECKPOINT_MEGATRON_DIST_H

#include "worker/checkpoint/megatron/dist_meta.h"
#include "worker/checkpoint/megatron/layout.h"
#include "worker/checkpoint/megatron/torch_file.h"

struct mb_dist;

/* 1: dir has a metadata.json. */
int mb_dist_is_in(const char *dir);

/* MB_ECORRUPT and MB_EUNSUPPORTED name the file, and the tensor. */
int mb_dist_open(const char *dir, struct mb_dist **out, struct mb_err *err);
void mb_dist_close(struct mb_dist *d); /* NULL is legal */

int mb_dist_has_optimizer(const struct mb_dist *d);
size_t mb_dist_n_files(const struct mb_dist *d);
/* Rows of the embeddings; 0: there are none. */
uint64_t mb_dist_vocab(const struct mb_dist *d);

/* Whether it has that many layers: before a list of their tensors is made, which a file of a few
 * bytes could else make long. MB_ECORRUPT. */
int mb_dist_check_layers(const struct mb_dist *d, uint64_t n_layers, struct mb_err *err);

/* Finds the layout's tensors, and opens every chunk of them; no other may be there. *bytes: of
 * their numbers. Once, before what follows; the layout is borrowed until close. */
int mb_dist_take(struct mb_dist *d, const struct mb_megatron_layout *l, uint64_t *bytes,
                 struct mb_err *err);
/* Elements [from, from + n) of the layout's tensor i. */
int mb_dist_read(struct mb_dist *d, size_t i, uint64_t from, size_t n, float *out,
                 struct mb_err *err);
/* Of what numbers that one is. */
enum mb_st_dtype mb_dist_dtype(const struct mb_dist *d, size_t i);

/* A tensor or object of the optimizer; NULL: there is none. What is found belongs to d. */
const struct mb_dist_tensor *mb_dist_find(const struct mb_dist *d, const char *name);
/*
 * Where a tensor of the layout lies in one of torch_dist's, which may be of all layers: from
 * element from on, whole, or, as megatron-core before 0.14 saved its distributed optimizer, cut as
 * ranks had it: into n_rows times n_columns parts of rows times columns elements, one behind
 * another.
 */
struct mb_dist_part {
    const struct mb_dist_tensor *t; /* NULL: there is none */
    uint64_t from;
    uint64_t n_rows, n_columns; /* whole: 1 */
    uint64_t rows, columns;     /* of a list 1 column */
};

/* Tensor w of the layout under a name that begins with prefix ("optimizer.state.exp_avg."). */
int mb_dist_find_state(const struct mb_dist *d, const char *prefix,
                       const struct mb_megatron_layout *l, size_t w, struct mb_dist_part *out,
                       struct mb_err *err);
/* Opens every chunk of a tensor that was found; it is compared by mb_dist_verify() from now on. */
int mb_dist_use(struct mb_dist *d, const struct mb_dist_tensor *t, struct mb_err *err);
/* Elements [from, from + n) of one that is used; of a part in the order of the layout's tensor. */
int mb_dist_read_tensor(struct mb_dist *d, const struct mb_dist_tensor *t, uint64_t from, size_t n,
                        float *out, struct mb_err *err);
int mb_dist_read_part(struct mb_dist *d, const struct mb_dist_part *p, uint64_t from, size_t n,
                      float *out, struct mb_err *err);
/* The object that says arguments and counters; NULL: there is none. */
const struct mb_dist_tensor *mb_dist_common(const struct mb_dist *d);
/* An object that was found, which the caller closes, and compares himself; its name is its file's
 * path. */
int mb_dist_open_object(struct mb_dist *d, const struct mb_dist_tensor *t,
                        struct mb_torch_file **out, struct mb_err *err);
/* One of the optimizer's that was neither used nor opened; NULL: there is none. */
const struct mb_dist_tensor *mb_dist_unused(const struct mb_dist *d);

/* Reads all bytes of all tensors of the model, and of those of the optimizer that are used:
 * MB_ECORRUPT if a checksum is another. */
int mb_dist_verify(struct mb_dist *d, const struct mb_torch_watch *watch, struct mb_err *err);

#endif
