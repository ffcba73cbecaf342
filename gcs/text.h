/* Log bytes as text: what is no UTF-8 becomes U+FFFD, or every byte a character. Pure. */
#ifndef MOBULA_GCS_TEXT_H
#define MOBULA_GCS_TEXT_H

#include <stddef.h>
#include "base/buf.h"

enum { MB_TEXT_ESCAPE_MAX = 6 }; /* bytes that one input byte can become in a JSON string */

/* Writes as much of in[0..n) as the inside of a JSON string into out (MB_TEXT_ESCAPE_MAX * n bytes
 * are enough). A sequence cut off at the end is left for the next call unless at_end. Returns the
 * bytes written; *used says how many input bytes they stand for. */
size_t mb_text_json(const void *in, size_t n, int at_end, char *out, size_t *used);

/* The same without a loss: byte B becomes the character U+0000 + B. Returns the bytes written. */
size_t mb_text_json_bytes(const void *in, size_t n, char *out);
/* Back: appends the bytes that such characters stand for. MB_EPROTO: others are among them. */
int mb_text_bytes(const char *in, size_t n, struct mb_buf *out);

/* Appends in with everything that is no UTF-8 replaced. 0 or MB_ENOMEM. */
int mb_text_clean(const char *in, size_t n, struct mb_buf *out);

#endif
