/*
 * A window of text as bit masks: for each class of byte one bit a byte, 64 bytes a word. The masks
 * of bytes below 128 are made by a kernel (AVX-512, AVX2 or plain C, chosen by what the processor
 * has; all give the same bits), those of longer characters one by one. split_block.c finds the
 * boundaries by shifts. Nobody else includes this but tests.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_SPLIT_MASKS_H
#define MOBULA_WORKER_DATA_TOKENIZER_SPLIT_MASKS_H

#include "worker/data/tokenizer/split.h"

enum { MB_WINDOW_BYTES = 4096, MB_WINDOW_WORDS = MB_WINDOW_BYTES / 64 };
/* Room for the ends of a window's pieces; 64 more are written to. */
enum { MB_WINDOW_ENDS = MB_WINDOW_BYTES + 64 };

/* All bytes of a character have its class. A byte in none of the first three is other. */
struct mb_split_masks {
    uint64_t letter[MB_WINDOW_WORDS];
    uint64_t number[MB_WINDOW_WORDS];
    uint64_t space[MB_WINDOW_WORDS];
    uint64_t line_end[MB_WINDOW_WORDS];   /* CR, LF */
    uint64_t blank[MB_WINDOW_WORDS];      /* U+0020 */
    uint64_t apostrophe[MB_WINDOW_WORDS]; /* U+0027 */
    uint64_t wide[MB_WINDOW_WORDS];       /* bytes above 127 */
    uint64_t tail[MB_WINDOW_WORDS];       /* second and later bytes of a character */
};

enum mb_split_kernel { MB_KERNEL_PLAIN, MB_KERNEL_AVX2, MB_KERNEL_AVX512, MB_KERNEL_BEST };

/* Masks of n > 0 bytes at p, up to MB_WINDOW_BYTES; bits from n on are those of NUL bytes. Bytes
 * from p + n up to end are looked at to finish the last character. A kernel that the processor
 * lacks is replaced by the best that it has. */
void mb_split_masks_make(const struct mb_class_table *t, enum mb_split_kernel kernel,
                         const uint8_t *p, size_t n, const uint8_t *end, struct mb_split_masks *m);
enum mb_split_kernel mb_split_kernel_best(void);

/* The first pieces of [p, end), as offsets of their ends from p in ascending order; returns how
 * many there are, 0 if the first piece is longer than a window (mb_split_next finds its end). For
 * the families of GPT-2 and of words. */
size_t mb_split_block(const struct mb_split *s, enum mb_split_kernel kernel, const uint8_t *p,
                      const uint8_t *end, uint16_t ends[MB_WINDOW_ENDS]);
/* 1 if mb_split_block knows the family. */
int mb_split_has_block(enum mb_split_family family);

#endif
