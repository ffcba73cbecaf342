/* Growing by doubling keeps the table at most half full, so that a walk's probe is short. */
#include <string.h>
#include "base/alloc.h"
#include "base/err.h"
#include "worker/data/tokenizer/sentencepiece/trie.h"

static void put(struct mb_spm_trie *t, uint64_t key, uint32_t child)
{
    size_t i = (size_t)(key * 0x9e3779b97f4a7c15u >> t->shift);

    while (t->slots[i] != MB_SPM_TRIE_EMPTY)
        i = (i + 1) & t->mask;
    t->slots[i] = key << 28 | child;
}

static int grow(struct mb_spm_trie *t)
{
    uint32_t cap = t->cap > 0 ? 2 * t->cap : 256;
    size_t n_slots = 2 * (size_t)cap;
    int32_t *values;
    uint64_t *slots;
    uint64_t *old = t->slots;
    size_t n_old = old != NULL ? t->mask + 1 : 0;

    if (cap > MB_SPM_TRIE_MAX_NODES)
        return MB_EFULL;
    values = mb_reallocarray(t->values, cap, sizeof(*values));
    if (values == NULL)
        return MB_ENOMEM;
    t->values = values;
    slots = mb_reallocarray(NULL, n_slots, sizeof(*slots));
    if (slots == NULL)
        return MB_ENOMEM;
    memset(slots, 0xff, n_slots * sizeof(*slots));
    t->slots = slots;
    t->mask = n_slots - 1;
    t->shift = 64 - (unsigned)__builtin_ctzll(n_slots);
    t->cap = cap;
    for (size_t i = 0; i < n_old; i++) {
        if (old[i] != MB_SPM_TRIE_EMPTY)
            put(t, old[i] >> 28, (uint32_t)old[i] & (MB_SPM_TRIE_MAX_NODES - 1));
    }
    mb_free(old);
    if (t->n_nodes == 0)
        t->values[t->n_nodes++] = -1; /* the root */
    return 0;
}

int mb_spm_trie_add(struct mb_spm_trie *t, const uint8_t *p, size_t n, int32_t value)
{
    uint32_t node = MB_SPM_TRIE_ROOT;

    for (size_t i = 0; i < n; i++) {
        uint32_t child = t->slots != NULL ? mb_spm_trie_step(t, node, p[i]) : MB_SPM_TRIE_NO_NODE;
        if (child == MB_SPM_TRIE_NO_NODE) {
            int rc = t->n_nodes == t->cap ? grow(t) : 0;
            if (rc != 0)
                return rc;
            child = t->n_nodes++;
            t->values[child] = -1;
            put(t, (uint64_t)node << 8 | p[i], child);
        }
        node = child;
    }
    t->values[node] = value;
    t->starts[p[0] >> 3] |= (uint8_t)(1u << (p[0] & 7));
    return 0;
}

void mb_spm_trie_close(struct mb_spm_trie *t)
{
    mb_free(t->slots);
    mb_free(t->values);
    *t = (struct mb_spm_trie){0};
}
