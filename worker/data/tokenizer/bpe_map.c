/*
 * Token texts by id and by bytes: all texts in one buffer, a hash table of ids over it. A token
 * given twice, by id or by text, and an empty one that is not special are MB_ECORRUPT. Special
 * tokens are not in the table. Most bytes that are asked for are no token; for seven of eight of
 * those a bit of a small table says so, without a look at the large one.
 */
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/bpe_private.h"

static int is_at(const struct mb_bpe_map *map, const struct mb_bpe_map_slot *slot, uint32_t tag,
                 const uint8_t *bytes, size_t n)
{
    return slot->tag == tag && slot->n == n && memcmp(map->text.data + slot->start, bytes, n) == 0;
}

enum { AHEAD = 16 }; /* tokens whose slots are asked for; a power of two */

/* hash: of its bytes, unless it is special. */
static int add(struct mb_bpe_map *map, const struct mb_bpe_token *token, uint64_t hash,
               struct mb_err *err)
{
    uint32_t id = (uint32_t)token->id;
    uint32_t at;

    if ((token->n == 0 && !token->is_special) || map->starts[id] != UINT32_MAX)
        return mb_err_set(err, MB_ECORRUPT, "token id %d is %s", token->id,
                          map->starts[id] == UINT32_MAX ? "an empty text" : "given twice");
    if (map->text.len + token->n >= UINT32_MAX)
        return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
    map->starts[id] = (uint32_t)map->text.len;
    map->lengths[id] = (uint32_t)token->n;
    if (!token->is_special) {
        for (at = (uint32_t)hash & map->mask; map->slots[at].id != 0; at = (at + 1) & map->mask) {
            if (is_at(map, &map->slots[at], (uint32_t)(hash >> 32), token->bytes, token->n))
                return mb_err_set(err, MB_ECORRUPT, "token ids %u and %d have the same text",
                                  map->slots[at].id - 1, token->id);
        }
        map->hashes[(hash >> map->hash_shift) / 64] |= (uint64_t)1
                                                       << (hash >> map->hash_shift) % 64;
        map->slots[at] = (struct mb_bpe_map_slot){id + 1, (uint32_t)(hash >> 32),
                                                  (uint32_t)map->text.len, (uint32_t)token->n};
        if (token->n > map->longest)
            map->longest = (uint32_t)token->n;
    }
    if (mb_buf_add(&map->text, token->bytes, token->n) != 0)
        return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
    return 0;
}

static int allocate(struct mb_bpe_map *map, size_t n_tokens)
{
    size_t n_slots = 16;

    while (n_slots < 2 * n_tokens)
        n_slots *= 2;
    map->mask = (uint32_t)n_slots - 1;
    map->hash_shift = 64 - (unsigned)__builtin_ctzll(4 * n_slots); /* 8 to 16 bits a token */
    map->hashes = mb_calloc(4 * n_slots / 64, sizeof(*map->hashes));
    map->starts = mb_reallocarray(NULL, map->n_ids, sizeof(*map->starts));
    map->lengths = mb_calloc(map->n_ids, sizeof(*map->lengths));
    map->slots = mb_alloc_huge(n_slots * sizeof(*map->slots));
    if (map->starts == NULL || map->lengths == NULL || map->slots == NULL || map->hashes == NULL)
        return MB_ENOMEM;
    memset(map->slots, 0, n_slots * sizeof(*map->slots));
    memset(map->starts, 0xff, map->n_ids * sizeof(*map->starts));
    return 0;
}

static int add_all(struct mb_bpe_map *map, const struct mb_bpe_token *tokens, size_t n,
                   struct mb_err *err)
{
    uint64_t hashes[AHEAD] = {0};
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < n + AHEAD; i++) {
        uint64_t hash = hashes[i % AHEAD];

        if (i < n && !tokens[i].is_special && tokens[i].n > 0) {
            hashes[i % AHEAD] = mb_bpe_hash(tokens[i].bytes, tokens[i].n);
            __builtin_prefetch(&map->slots[(uint32_t)hashes[i % AHEAD] & map->mask]);
        }
        if (i >= AHEAD)
            rc = add(map, &tokens[i - AHEAD], hash, err);
    }
    return rc;
}

int mb_bpe_map_make(struct mb_bpe_map *map, const struct mb_bpe_token *tokens, size_t n,
                    struct mb_err *err)
{
    int rc = 0;

    *map = (struct mb_bpe_map){0};
    for (size_t i = 0; i < n; i++) {
        if (tokens[i].id < 0 || tokens[i].id > MB_BPE_MAX_IDS - 256)
            return mb_err_set(err, MB_EUNSUPPORTED, "token id %d is not from 0 to %d", tokens[i].id,
                              MB_BPE_MAX_IDS - 256);
        if ((uint32_t)tokens[i].id >= map->n_ids)
            map->n_ids = (uint32_t)tokens[i].id + 1;
    }
    if (allocate(map, n) != 0)
        rc = mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
    if (rc == 0)
        rc = add_all(map, tokens, n, err);
    if (rc != 0)
        mb_bpe_map_close(map);
    return rc;
}

void mb_bpe_map_close(struct mb_bpe_map *map)
{
    mb_free(map->starts);
    mb_free(map->lengths);
    mb_free(map->slots);
    mb_free(map->hashes);
    mb_buf_close(&map->text);
    *map = (struct mb_bpe_map){0};
}

void mb_bpe_map_ask(const struct mb_bpe_map *map, const uint8_t *bytes, size_t n,
                    struct mb_bpe_map_probe *out)
{
    uint64_t hash = mb_bpe_hash(bytes, n);
    uint64_t bit = hash >> map->hash_shift;
    uint32_t may_be = (uint32_t)(map->hashes[bit / 64] >> (bit % 64) & 1);

    *out = (struct mb_bpe_map_probe){bytes, (uint32_t)n, (uint32_t)hash & map->mask,
                                     (uint32_t)(hash >> 32), may_be};
    /* Without a branch: the first slot is near. */
    __builtin_prefetch(&map->slots[out->at & (0 - may_be)]);
}

enum mb_bpe_map_seen mb_bpe_map_look(const struct mb_bpe_map *map, struct mb_bpe_map_probe *probe)
{
    if (!probe->may_be)
        return MB_BPE_MAP_NONE;
    for (;; probe->at = (probe->at + 1) & map->mask) {
        const struct mb_bpe_map_slot *slot = &map->slots[probe->at];

        if (slot->id == 0)
            return MB_BPE_MAP_NONE;
        if (slot->tag == probe->tag && slot->n == probe->n) {
            __builtin_prefetch(map->text.data + slot->start);
            return MB_BPE_MAP_MAYBE;
        }
    }
}

int32_t mb_bpe_map_compare(const struct mb_bpe_map *map, struct mb_bpe_map_probe *probe)
{
    const struct mb_bpe_map_slot *slot = &map->slots[probe->at];

    if (is_at(map, slot, probe->tag, probe->bytes, probe->n))
        return (int32_t)slot->id - 1;
    probe->at = (probe->at + 1) & map->mask;
    return -1;
}

int32_t mb_bpe_map_find(const struct mb_bpe_map *map, const uint8_t *bytes, size_t n)
{
    struct mb_bpe_map_probe probe;
    int32_t id = -1;

    if (n == 0 || n > map->longest)
        return -1;
    mb_bpe_map_ask(map, bytes, n, &probe);
    while (id < 0 && mb_bpe_map_look(map, &probe) == MB_BPE_MAP_MAYBE)
        id = mb_bpe_map_compare(map, &probe);
    return id;
}
