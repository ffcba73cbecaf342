/*
 * Byte-level BPE as a whole: a split, a piece cache for each thread, and the merges. The types of
 * tokenizer that are such (GPT2BPETokenizer, tokenizer.json files, tiktoken files) are loaders in
 * front of it. A bytelevel is immutable and may be read by any thread; each thread has a scratch of
 * its own.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_BYTELEVEL_H
#define MOBULA_WORKER_DATA_TOKENIZER_BYTELEVEL_H

#include "worker/data/tokenizer/bpe.h"
#include "worker/data/tokenizer/split.h"

struct mb_bytelevel;
struct mb_bytelevel_scratch;

/* custom: MB_SPLIT_REGEX only, else NULL. bpe and custom->ctx are taken on success. */
int mb_bytelevel_create(struct mb_bpe *bpe, enum mb_split_family family,
                        const struct mb_split_custom *custom, struct mb_bytelevel **out,
                        struct mb_err *err);
void mb_bytelevel_destroy(struct mb_bytelevel *b);

const struct mb_bpe *mb_bytelevel_bpe(const struct mb_bytelevel *b); /* borrowed */
enum mb_split_family mb_bytelevel_family(const struct mb_bytelevel *b);

int mb_bytelevel_scratch_create(const struct mb_bytelevel *b, struct mb_bytelevel_scratch **out,
                                struct mb_err *err);
void mb_bytelevel_scratch_destroy(struct mb_bytelevel_scratch *s);

/* Append the ids of n bytes of text, but those of pieces that wait for others: until settle, or
 * drop, out has holes and the text must stay where it is. When it fails the ids appended before
 * stay; the caller drops them, and what waits. */
int mb_bytelevel_encode(const struct mb_bytelevel *b, struct mb_bytelevel_scratch *s,
                        const uint8_t *text, size_t n, struct mb_ids *out, struct mb_err *err);

/* *end becomes the number of ids up to here once out is settled. */
int mb_bytelevel_end_text(const struct mb_bytelevel *b, struct mb_bytelevel_scratch *s,
                          struct mb_ids *out, size_t *end, struct mb_err *err);
/* Fills the holes in out. */
int mb_bytelevel_settle(const struct mb_bytelevel *b, struct mb_bytelevel_scratch *s,
                        struct mb_ids *out, struct mb_err *err);
void mb_bytelevel_drop(struct mb_bytelevel_scratch *s);

/* Append the bytes of n ids. MB_EINVAL for an id that is no token. */
int mb_bytelevel_decode(const struct mb_bytelevel *b, const int32_t *ids, size_t n,
                        struct mb_buf *out, struct mb_err *err);

#endif
