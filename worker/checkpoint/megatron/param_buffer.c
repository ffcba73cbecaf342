/*
 *  1. cut: parameter after parameter, each from a multiple of 64 on. A bucket ends behind the one
 *     that fills it; before a table of its own it has what is padded, too.
 *  2. fill: the same the other way round, as the buckets' sizes say where they end.
 * Failures: sizes that are no multiple or a parameter too few or too many.
 */
#include "worker/checkpoint/megatron/param_buffer.h"

static uint64_t aligned(uint64_t n)
{
    return (n + MB_PARAM_BUFFER_ALIGN - 1) / MB_PARAM_BUFFER_ALIGN * MB_PARAM_BUFFER_ALIGN;
}

size_t mb_param_buffer_cut(const struct mb_buffered_param *params, size_t n, uint64_t bound,
                           uint64_t *sizes)
{
    uint64_t end = 0; /* in the bucket; 0: it has nothing */
    size_t n_sizes = 0;
    for (size_t i = 0; i < n; i++) {
        const struct mb_buffered_param *p = &params[i];
        if (p->is_shared && end > 0) {
            sizes[n_sizes++] = aligned(end);
            end = 0;
        }
        end = aligned(end) + p->n;
        if (p->is_shared || (bound > 0 && end >= bound)) {
            sizes[n_sizes++] = end;
            end = 0;
        }
    }
    if (end > 0) {
        sizes[n_sizes++] = end;
    }
    return n_sizes;
}

int mb_param_buffer_fill(struct mb_buffered_param *params, size_t n, const uint64_t *sizes,
                         size_t n_sizes)
{
    uint64_t end = 0;
    size_t b = 0;
    for (size_t i = 0; i < n; i++) {
        struct mb_buffered_param *p = &params[i];
        const int is_full = b < n_sizes && end == sizes[b];
        if (end > 0 && (is_full || p->is_shared)) {
            if (!is_full && aligned(end) != sizes[b]) {
                return -1;
            }
            b++;
            end = 0;
        }
        p->bucket = b;
        p->begin = aligned(end);
        if (b == n_sizes || sizes[b] < p->begin || sizes[b] - p->begin < p->n) {
            return -1;
        }
        end = p->begin + p->n;
    }
    return b + 1 == n_sizes && end == sizes[b] ? 0 : -1;
}
