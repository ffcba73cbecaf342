/* Text that came from outside and may hold anything, for a terminal. Pure, but for those that
 * write. */
#ifndef MOBULA_BASE_PRINTABLE_H
#define MOBULA_BASE_PRINTABLE_H

#include <jansson.h>
#include <stdio.h>
#include "base/buf.h"
#include "base/err.h"

/* Appends text, control characters and what is no UTF-8 as \xNN. 0 or MB_ENOMEM. */
int mb_printable(const char *text, struct mb_buf *out);
/* The same for a text of several lines: their ends, also \r\n, and tabs stay as they are. */
int mb_printable_lines(const char *text, struct mb_buf *out);
/* Writes such a text into out, between words of ours, in one piece. */
void mb_printable_say(FILE *out, const char *before, const char *text, const char *after);
/* json_dumpf() for a terminal: what it would write as it is (DEL, C1 controls, line and paragraph
 * separators, marks that turn the writing around) is \uNNNN, which means the same. */
int mb_printable_json(const json_t *j, size_t flags, FILE *out);
/* err->text made printable; cut if it does not fit any more. */
void mb_err_printable(struct mb_err *err);

#endif
