/*
 * A set of byte strings, each with a number, walked byte by byte. One hash table of
 * (node, byte) -> node: a step is one probe. Built once, then immutable; any thread walks it.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_SENTENCEPIECE_TRIE_H
#define MOBULA_WORKER_DATA_TOKENIZER_SENTENCEPIECE_TRIE_H

#include <stddef.h>
#include <stdint.h>

/* A slot is node, byte, child in 28 + 8 + 28 bits. */
#define MB_SPM_TRIE_MAX_NODES (1u << 28)
#define MB_SPM_TRIE_EMPTY     UINT64_MAX
#define MB_SPM_TRIE_ROOT      0u
#define MB_SPM_TRIE_NO_NODE   UINT32_MAX

struct mb_spm_trie {
    uint64_t *slots; /* open addressing, at most half full; NULL: the empty set */
    size_t mask;
    unsigned shift;
    uint32_t n_nodes;
    uint32_t cap;
    int32_t *values;         /* by node; -1: no string ends here */
    uint8_t starts[256 / 8]; /* bit b: some string begins with byte b */
};

/* Add a string of n > 0 bytes; an equal one's number is replaced. MB_ENOMEM, MB_EFULL. */
int mb_spm_trie_add(struct mb_spm_trie *t, const uint8_t *p, size_t n, int32_t value);
void mb_spm_trie_close(struct mb_spm_trie *t);

/* Only for a trie that is not empty. */
static inline uint32_t mb_spm_trie_step(const struct mb_spm_trie *t, uint32_t node, uint8_t byte)
{
    uint64_t key = (uint64_t)node << 8 | byte;

    for (size_t i = (size_t)(key * 0x9e3779b97f4a7c15u >> t->shift);; i = (i + 1) & t->mask) {
        uint64_t slot = t->slots[i];
        if (slot >> 28 == key)
            return (uint32_t)slot & (MB_SPM_TRIE_MAX_NODES - 1);
        if (slot == MB_SPM_TRIE_EMPTY)
            return MB_SPM_TRIE_NO_NODE;
    }
}

static inline int mb_spm_trie_may_start(const struct mb_spm_trie *t, uint8_t byte)
{
    return t->starts[byte >> 3] >> (byte & 7) & 1;
}

#endif
