/*
 * 1. The scanner cuts the next piece.
 * 2. A piece of up to 15 bytes is looked up in a direct-mapped cache under its exact bytes, so that
 *    a hit cannot be false. 3. A miss, and any longer piece, goes through the merges; up to four
 * ids are kept in the cache, over what was there. The cache is one thread's own and has a fixed
 * size: 65536 entries of 32 bytes.
 */
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/gpt2.h"

enum { CACHE_BITS = 16, MAX_KEY_BYTES = 15, MAX_CACHED_IDS = 4, COUNT_SHIFT = 28 };

struct entry {
    uint64_t key[2]; /* the bytes, zeroes, and the length in the last byte; length 0: empty */
    uint32_t ids[MAX_CACHED_IDS]; /* the first one carries the count above COUNT_SHIFT */
};

struct mb_gpt2_scratch {
    struct entry *cache;
    struct mb_bpe_work work;
};

int mb_gpt2_scratch_create(struct mb_gpt2_scratch **out, struct mb_err *err)
{
    struct mb_gpt2_scratch *s = mb_calloc(1, sizeof(*s));

    if (s != NULL)
        s->cache = mb_calloc((size_t)1 << CACHE_BITS, sizeof(*s->cache));
    if (s == NULL || s->cache == NULL) {
        mb_free(s);
        return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
    }
    *out = s;
    return 0;
}

void mb_gpt2_scratch_destroy(struct mb_gpt2_scratch *s)
{
    if (s == NULL)
        return;
    mb_bpe_work_close(&s->work);
    mb_free(s->cache);
    mb_free(s);
}

/* The key of the n <= 15 bytes at p; readable says that 16 bytes may be loaded there. */
static inline void make_key(const uint8_t *p, size_t n, int readable, uint64_t key[2])
{
    if (readable) {
        memcpy(key, p, 16);
        if (n < 8) {
            key[0] &= ((uint64_t)1 << 8 * n) - 1;
            key[1] = 0;
        } else {
            key[1] &= ((uint64_t)1 << 8 * (n - 8)) - 1;
        }
    } else {
        key[0] = key[1] = 0;
        memcpy(key, p, n);
    }
    key[1] |= (uint64_t)n << 56;
}

static inline size_t slot_of(const uint64_t key[2])
{
    uint64_t h = (key[0] ^ (key[1] * 0x9e3779b97f4a7c15u)) * 0xd6e8feb86659fd93u;

    return (size_t)(h >> (64 - CACHE_BITS));
}

static void remember(struct entry *e, const uint64_t key[2], const int32_t *ids, size_t n)
{
    if (n > MAX_CACHED_IDS)
        return;
    e->key[0] = key[0];
    e->key[1] = key[1];
    for (size_t i = 0; i < n; i++)
        e->ids[i] = (uint32_t)ids[i];
    e->ids[0] |= (uint32_t)n << COUNT_SHIFT;
}

int mb_gpt2_encode(const struct mb_gpt2 *g, struct mb_gpt2_scratch *s, const uint8_t *text,
                   size_t n, struct mb_ids *out)
{
    const uint8_t *end = text + n;
    const uint8_t *next;

    for (const uint8_t *p = text; p < end; p = next) {
        uint64_t key[2];
        struct entry *e = NULL;
        size_t length;
        size_t before = out->n;

        next = mb_split_next(&g->classes, p, end);
        length = (size_t)(next - p);
        if (mb_ids_reserve(out, MAX_CACHED_IDS) != 0)
            return MB_ENOMEM;
        if (length <= MAX_KEY_BYTES) {
            make_key(p, length, end - p >= 16, key);
            e = &s->cache[slot_of(key)];
            if (e->key[0] == key[0] && e->key[1] == key[1]) {
                uint32_t first = e->ids[0];
                memcpy(out->data + out->n, e->ids, sizeof(e->ids));
                out->data[out->n] = (int32_t)(first & ((1u << COUNT_SHIFT) - 1));
                out->n += first >> COUNT_SHIFT;
                continue;
            }
        }
        if (mb_bpe_encode(g->bpe, &s->work, p, length, out) != 0)
            return MB_ENOMEM;
        if (e != NULL)
            remember(e, key, out->data + before, out->n - before);
    }
    return 0;
}
