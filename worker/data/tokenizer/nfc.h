/*
 * Normal form C of Unicode (UAX #15), as the normalizer "NFC" of Hugging Face's tokenizers gives
 * it: with the characters of Unicode 9.0, which are the ones that package knows. Own code and
 * tables instead of a library: libraries follow newer versions of Unicode, and then the ids differ.
 * The table is immutable once made; any thread may use it with its own work memory.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_NFC_H
#define MOBULA_WORKER_DATA_TOKENIZER_NFC_H

#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/err.h"

struct mb_nfc;

/* Work memory of one thread; zero-initialise, end with mb_nfc_work_close(). It grows with the
 * longest run of combining characters. */
struct mb_nfc_work {
    uint32_t *points; /* of the run in hand, and as much again to sort it */
    uint8_t *classes; /* their combining classes */
    size_t n;
    size_t cap;
};

int mb_nfc_create(struct mb_nfc **out, struct mb_err *err);
void mb_nfc_destroy(struct mb_nfc *nfc);
void mb_nfc_work_close(struct mb_nfc_work *work);

/* Offset of the first character of n bytes of UTF-8 from which on the text may have to change; n:
 * it is in normal form as it stands. Bytes that are no UTF-8 count as characters that stay. */
size_t mb_nfc_first_change(const struct mb_nfc *nfc, const uint8_t *text, size_t n);

/* Append the normal form of n bytes to out. Linear in n. MB_ENOMEM only. */
int mb_nfc_append(const struct mb_nfc *nfc, struct mb_nfc_work *work, const uint8_t *text, size_t n,
                  struct mb_buf *out);

#endif
