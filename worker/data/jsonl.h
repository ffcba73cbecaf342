/*
 * One line of a JSON Lines file: the texts under chosen keys of its object, unescaped to UTF-8.
 *
 * The whole line is checked as Python's UTF-8 decoder and json.loads check it (NaN, Infinity and
 * duplicate keys pass, the last of equal keys counts), so that a line is accepted by both or by
 * neither, with one exception: an escaped lone surrogate is refused here, where Python makes a
 * string of it that no tokenizer can encode. Nesting is bounded by MB_JSONL_MAX_DEPTH. A parser
 * belongs to one thread.
 */
#ifndef MOBULA_WORKER_DATA_JSONL_H
#define MOBULA_WORKER_DATA_JSONL_H

#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/err.h"

enum { MB_JSONL_MAX_DEPTH = 900 };

struct mb_jsonl;

/* keys are borrowed and must outlive the parser. */
int mb_jsonl_create(const char *const *keys, size_t n_keys, struct mb_jsonl **out,
                    struct mb_err *err);
void mb_jsonl_destroy(struct mb_jsonl *j);

/* Parse a line of n bytes, with or without its newline. MB_EINVAL: the text says what is wrong and
 * at which byte; a key that is missing, or whose value is neither a string nor a list of strings,
 * too. */
int mb_jsonl_parse(struct mb_jsonl *j, const uint8_t *line, size_t n, struct mb_err *err);

/* The texts of key k of the last line parsed; valid until the next parse. */
size_t mb_jsonl_n_texts(const struct mb_jsonl *j, size_t k);
const uint8_t *mb_jsonl_text(const struct mb_jsonl *j, size_t k, size_t i, size_t *n);

/* As parse, but the texts of the lines before stay, at their places; nothing else of them does. A
 * parse that fails changes none of them. */
int mb_jsonl_parse_more(struct mb_jsonl *j, const uint8_t *line, size_t n, struct mb_err *err);
/* The place of a text of the last line, and what is there: until the next parse. */
size_t mb_jsonl_place(const struct mb_jsonl *j, size_t k, size_t i, size_t *n);
const uint8_t *mb_jsonl_at(const struct mb_jsonl *j, size_t place);

/* Characters (code points) of the last line that was parsed without an error. */
uint64_t mb_jsonl_n_chars(const struct mb_jsonl *j);

/* Characters (code points) of n bytes of UTF-8. */
uint64_t mb_utf8_count(const uint8_t *p, size_t n);

#endif
