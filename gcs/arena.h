/*
 * Memory that is freed all at once: what encoding or decoding one message needs. Zero-initialise
 * (`struct mb_arena a = {0}`), end with mb_arena_close(). Any thread, one at a time.
 */
#ifndef MOBULA_GCS_ARENA_H
#define MOBULA_GCS_ARENA_H

#include <stddef.h>

struct mb_arena_block;

struct mb_arena {
    struct mb_arena_block *blocks;
};

void *mb_arena_calloc(struct mb_arena *a, size_t n, size_t size_bytes); /* NULL: out of memory */
void *mb_arena_dup(struct mb_arena *a, const void *p, size_t n);        /* a NUL is added */
char *mb_arena_strdup(struct mb_arena *a, const char *s);               /* NULL gives "" */
void mb_arena_close(struct mb_arena *a);

#endif
