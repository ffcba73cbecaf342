/* Gathers ranges from the end of a buffer into buckets of at least a target, the last one excepted.
 */
#include "worker/parallel/buckets.h"

#include <assert.h>
#include "worker/parallel/comm.h"

enum { LEAST = 40 * 1000 * 1000, LEAST_OF_A_RANK = 1000 * 1000 };

size_t mb_buckets_default(uint32_t world_size)
{
    size_t by_ranks = (size_t)world_size * LEAST_OF_A_RANK;
    return by_ranks > LEAST ? by_ranks : LEAST;
}

void mb_buckets_start(struct mb_buckets *b, size_t n_elements, size_t target)
{
    assert(target > 0);
    *b = (struct mb_buckets){.target = target, .begin = n_elements, .end = n_elements};
}

int mb_buckets_add(struct mb_buckets *b, size_t begin, size_t end, size_t *from, size_t *to)
{
    (void)end;
    assert(begin <= end && end == b->begin);
    b->begin = begin;
    if (b->begin == b->end || (b->end - b->begin < b->target && b->begin > 0)) {
        return 0;
    }
    *from = b->begin;
    *to = b->end;
    b->end = b->begin;
    return 1;
}

int mb_buckets_part(size_t n, uint32_t world_size, uint32_t rank, size_t *begin, size_t *end)
{
    size_t first, last;
    mb_comm_range(n, world_size, rank, &first, &last);
    *begin = *begin < first ? first : *begin;
    *end = *end > last ? last : *end;
    return *begin < *end;
}
