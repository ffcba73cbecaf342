/*
 * A JSON text read from front to back, without a tree: tokenizer.json has some hundred thousand
 * strings, of which a tree would take ten times the file. Parts that are small are handed to
 * jansson (mb_json_scan_value gives their bytes). Strings and what is entered are read
 * strictly (RFC 8259); a value that is passed is only taken apart. The text is borrowed; one
 * thread.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_JSON_SCAN_H
#define MOBULA_WORKER_DATA_TOKENIZER_JSON_SCAN_H

#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/err.h"

/* Set text, p, end, name and err; p moves on. */
struct mb_json_scan {
    const char *text;
    const char *p;
    const char *end;
    const char *name;   /* of the file, for errors */
    struct mb_err *err; /* may be NULL */
};

/* All return 0 or MB_ECORRUPT with "FILE:LINE: ..."; a string can also be MB_ENOMEM. */

/* Steps into an object or an array ('{' or '['). */
int mb_json_scan_enter(struct mb_json_scan *s, char open);
/* Moves to the next member: 1 if there is one, 0 at the end (which is then passed), negative for an
 * error. *n counts them; zero it before the first call. With key, the member's name goes there
 * (reset first) and the value is next. */
int mb_json_scan_member(struct mb_json_scan *s, size_t *n, struct mb_buf *key);
int mb_json_scan_item(struct mb_json_scan *s, size_t *n);
/* The first character of the value that is next, 0 at the end of the text. */
char mb_json_scan_peek(struct mb_json_scan *s);
/* Appends a string's UTF-8 bytes. */
int mb_json_scan_string(struct mb_json_scan *s, struct mb_buf *out);
int mb_json_scan_int(struct mb_json_scan *s, int64_t *out);
/* Passes a value of any kind; its bytes are at *start (which may be NULL). */
int mb_json_scan_value(struct mb_json_scan *s, const char **start, size_t *n);
/* Nothing but white space is left. */
int mb_json_scan_end(struct mb_json_scan *s);
/* MB_ECORRUPT at the present place: what was expected. */
int mb_json_scan_fail(struct mb_json_scan *s, const char *expected);

#endif
