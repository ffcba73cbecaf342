/*
 * When which part of the gradients is reduced while the backward pass still runs. Pure.
 *
 * Gradients become final from the end of the flat buffer to its start, a layer at a time. What has
 * become final is one bucket as soon as it has enough elements for an operation worth its latency;
 * the last bucket is what is left. All ranks see the same ranges, so all form the same buckets.
 */
#ifndef MOBULA_WORKER_PARALLEL_BUCKETS_H
#define MOBULA_WORKER_PARALLEL_BUCKETS_H

#include <stddef.h>
#include <stdint.h>

struct mb_buckets {
    size_t target;     /* elements, > 0 */
    size_t begin, end; /* final, and not in a bucket yet */
};

/* Megatron-LM's size where none is given: 40 M elements, 1 M a rank where that is more. */
size_t mb_buckets_default(uint32_t world_size);

void mb_buckets_start(struct mb_buckets *b, size_t n_elements, size_t target);
/* [begin, end) is final; end is the begin of the call before, at first n_elements. 1: the elements
 * [*from, *to) are a bucket. */
int mb_buckets_add(struct mb_buckets *b, size_t begin, size_t end, size_t *from, size_t *to);

/* The part of [begin, end) that belongs to a rank by mb_comm_range() of n elements; 0: none. */
int mb_buckets_part(size_t n, uint32_t world_size, uint32_t rank, size_t *begin, size_t *end);

#endif
