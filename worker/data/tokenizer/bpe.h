/*
 * Byte-level byte pair encoding: a vocabulary and merge ranks, as GPT-2's vocab.json and merges.txt
 * give them. mb_bpe_encode is the bare algorithm on one piece; gpt2.c puts the cache in front of
 * it. Source: Sennrich et al. 2016; the byte alphabet and the file forms are GPT-2's. A loaded
 * vocabulary is immutable; any thread may use it with its own work memory.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_BPE_H
#define MOBULA_WORKER_DATA_TOKENIZER_BPE_H

#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/err.h"
#include "worker/data/tokenizer/tokenizer.h"

struct mb_bpe;

/* Work memory of one thread; zero-initialise, end with mb_bpe_work_close(). It grows with the
 * longest piece seen and is given back above 4 MiB. */
struct mb_bpe_work {
    void *block;
    size_t size_bytes;
};

int mb_bpe_load(const char *vocab_file, const char *merge_file, struct mb_bpe **out,
                struct mb_err *err);
void mb_bpe_destroy(struct mb_bpe *b);

uint64_t mb_bpe_vocab_size(const struct mb_bpe *b);
int32_t mb_bpe_eod(const struct mb_bpe *b);

/* Append the ids of one piece of n > 0 bytes. Linear search for short pieces, a heap for long ones.
 */
int mb_bpe_encode(const struct mb_bpe *b, struct mb_bpe_work *work, const uint8_t *piece, size_t n,
                  struct mb_ids *out);
void mb_bpe_work_close(struct mb_bpe_work *work);

/* Append the bytes of one id; MB_EINVAL if there is none such. */
int mb_bpe_decode(const struct mb_bpe *b, int32_t id, struct mb_buf *out);

#endif
