/*
 * The memory that a context gave out and did not get back, so that closing it leaves nothing. Every
 * backend has this compiled in. Threads: those that may call the context's alloc() and free().
 */
#ifndef MOBULA_WORKER_KERNELS_BLOCKS_H
#define MOBULA_WORKER_KERNELS_BLOCKS_H

#include <stddef.h>
#include "base/err.h"

struct mb_blocks {
    struct mb_block {
        void *given, *raw; /* what the caller has, and what is freed for it */
        size_t size_bytes;
    } * at;
    size_t n, cap;
    size_t now_bytes, most_bytes; /* of all, and the most that this ever was */
};

/* Room for one more; size_bytes is for the text of MB_ENOMEM. */
int mb_blocks_reserve(struct mb_blocks *b, size_t size_bytes, struct mb_err *err);
/* After mb_blocks_reserve(). */
void mb_blocks_add(struct mb_blocks *b, void *given, void *raw, size_t size_bytes);
/* The raw pointer of what was given out, which is forgotten; NULL if it is not known here. */
void *mb_blocks_take(struct mb_blocks *b, const void *given);
/* Frees every block with free_raw. */
void mb_blocks_close(struct mb_blocks *b, void (*free_raw)(void *raw));

#endif
