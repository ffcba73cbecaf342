/* GPT2BPETokenizer: the scanner, the piece cache and the merges put together. Used by tokenizer.c.
 * mb_gpt2 is immutable and may be read by any thread; each thread has a scratch of its own. */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_GPT2_H
#define MOBULA_WORKER_DATA_TOKENIZER_GPT2_H

#include "worker/data/tokenizer/bpe.h"
#include "worker/data/tokenizer/split.h"

struct mb_gpt2 {
    struct mb_bpe *bpe;
    struct mb_class_table classes;
};

struct mb_gpt2_scratch;

int mb_gpt2_scratch_create(struct mb_gpt2_scratch **out, struct mb_err *err);
void mb_gpt2_scratch_destroy(struct mb_gpt2_scratch *s);

int mb_gpt2_encode(const struct mb_gpt2 *g, struct mb_gpt2_scratch *s, const uint8_t *text,
                   size_t n, struct mb_ids *out);

#endif
