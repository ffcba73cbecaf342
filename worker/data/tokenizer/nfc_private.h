/* The tables of nfc.c; tools/make-nfc-table writes them. Nobody else includes this. */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_NFC_PRIVATE_H
#define MOBULA_WORKER_DATA_TOKENIZER_NFC_PRIVATE_H

#include <stddef.h>
#include <stdint.h>

struct mb_nfc_class {
    uint32_t first;
    uint32_t last;
    uint8_t combining; /* canonical combining class, never 0 */
};

struct mb_nfc_pair {
    uint32_t whole;
    uint32_t first;
    uint32_t second; /* 0: the decomposition is one character */
};

/* All ascending by their first member. Hangul syllables are in none: they follow a rule. */
extern const struct mb_nfc_class mb_nfc_classes[];
extern const size_t mb_nfc_n_classes;
extern const struct mb_nfc_pair mb_nfc_pairs[]; /* what is composed again */
extern const size_t mb_nfc_n_pairs;
extern const struct mb_nfc_pair mb_nfc_splits[]; /* what is not */
extern const size_t mb_nfc_n_splits;

#endif
