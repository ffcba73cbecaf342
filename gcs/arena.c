/*
 * A chain of blocks; an allocation comes from the newest block or opens another. Large pieces get a
 * block of their own size.
 */
#include "gcs/arena.h"

#include <stdint.h>
#include <string.h>
#include "base/alloc.h"

enum { BLOCK_BYTES = 4096, ALIGN_BYTES = 16 };

struct mb_arena_block {
    struct mb_arena_block *next;
    size_t used;
    size_t cap;
    _Alignas(ALIGN_BYTES) unsigned char data[];
};

void *mb_arena_calloc(struct mb_arena *a, size_t n, size_t size_bytes)
{
    if (size_bytes != 0 && n > (SIZE_MAX / 2) / size_bytes)
        return NULL;
    size_t want = (n * size_bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
    struct mb_arena_block *b = a->blocks;

    if (!b || b->cap - b->used < want) {
        size_t cap = want > BLOCK_BYTES ? want : BLOCK_BYTES;
        b = mb_alloc(sizeof *b + cap);
        if (!b)
            return NULL;
        b->next = a->blocks;
        b->used = 0;
        b->cap = cap;
        a->blocks = b;
    }
    void *p = b->data + b->used;
    b->used += want;
    memset(p, 0, want);
    return p;
}

void *mb_arena_dup(struct mb_arena *a, const void *p, size_t n)
{
    char *copy = mb_arena_calloc(a, n + 1, 1);

    if (copy && n > 0)
        memcpy(copy, p, n);
    return copy;
}

char *mb_arena_strdup(struct mb_arena *a, const char *s)
{
    return mb_arena_dup(a, s ? s : "", s ? strlen(s) : 0);
}

void mb_arena_close(struct mb_arena *a)
{
    for (struct mb_arena_block *b = a->blocks, *next; b; b = next) {
        next = b->next;
        mb_free(b);
    }
    a->blocks = NULL;
}
