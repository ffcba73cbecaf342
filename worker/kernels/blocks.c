/* A list without an order: a context has some tens of blocks. */
#include "worker/kernels/blocks.h"

#include "base/alloc.h"

int mb_blocks_reserve(struct mb_blocks *b, size_t size_bytes, struct mb_err *err)
{
    if (b->n < b->cap)
        return 0;
    size_t cap = b->cap ? 2 * b->cap : 8;
    struct mb_block *at = mb_reallocarray(b->at, cap, sizeof(*at));
    if (at == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory allocating %zu bytes", size_bytes);
    b->at = at;
    b->cap = cap;
    return 0;
}

void mb_blocks_add(struct mb_blocks *b, void *given, void *raw, size_t size_bytes)
{
    b->at[b->n++] = (struct mb_block){given, raw, size_bytes};
    b->now_bytes += size_bytes;
    b->most_bytes = b->now_bytes > b->most_bytes ? b->now_bytes : b->most_bytes;
}

void *mb_blocks_take(struct mb_blocks *b, const void *given)
{
    for (size_t i = 0; given != NULL && i < b->n; i++) {
        if (b->at[i].given != given)
            continue;
        void *raw = b->at[i].raw;
        b->now_bytes -= b->at[i].size_bytes;
        b->at[i] = b->at[--b->n];
        return raw;
    }
    return NULL;
}

void mb_blocks_close(struct mb_blocks *b, void (*free_raw)(void *raw))
{
    for (size_t i = 0; i < b->n; i++)
        free_raw(b->at[i].raw);
    mb_free(b->at);
    *b = (struct mb_blocks){0};
}
