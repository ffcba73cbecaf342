/*
 * A directory of Megatron-LM's --ckpt-format torch_dist: metadata.json, .metadata, and chunks of
 * tensors, each a file of torch.save, one behind another in *.distcp. Layers lie in one tensor, or
 * each in its own. Blocking; one thread per object.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_MEGATRON_DIST_H
#define MOBULA_WORKER_CHECKPOINT_MEGATRON_DIST_H

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
/* Reads all bytes of all tensors: MB_ECORRUPT if a checksum is another. */
int mb_dist_verify(struct mb_dist *d, const struct mb_torch_watch *watch, struct mb_err *err);

#endif
