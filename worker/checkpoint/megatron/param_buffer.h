/*
 * Where Megatron-LM's distributed optimizer has a parameter: a chunk of the model on a rank has a
 * flat buffer for each kind of numbers, its parameters from the last to the first, and cuts it into
 * buckets (megatron/core/distributed/param_and_grad_buffer.py). What is padded between buckets is
 * not saved, what is padded in them is. Pure.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_MEGATRON_PARAM_BUFFER_H
#define MOBULA_WORKER_CHECKPOINT_MEGATRON_PARAM_BUFFER_H

#include <stddef.h>
#include <stdint.h>

enum { MB_PARAM_BUFFER_ALIGN = 64 /* elements: where a parameter begins in a bucket */ };

struct mb_buffered_param {
    uint64_t n;     /* elements, 1 at least */
    int is_shared;  /* the table of tied embeddings of several stages, which has its own bucket */
    size_t bucket;  /* filled in */
    uint64_t begin; /* filled in: in its bucket */
};

/* Cuts as a run does: a bucket ends where it has bound elements or more, 0: it never does. sizes
 * [n]: of buckets. Returned: how many there are. */
size_t mb_param_buffer_cut(const struct mb_buffered_param *params, size_t n, uint64_t bound,
                           uint64_t *sizes);
/* Into buckets of these sizes, which are all filled. -1: they do not fit. */
int mb_param_buffer_fill(struct mb_buffered_param *params, size_t n, const uint64_t *sizes,
                         size_t n_sizes);

#endif
