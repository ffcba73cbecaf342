/* Any bytes as a safetensors header: refused, or every tensor lies inside the data. Once more with
 * the checksum of the header made to fit, which no mutation would: what is behind it is read, too.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/sums.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void parse(const char *header, size_t n, uint64_t data_bytes)
{
    struct mb_st_reader *r = NULL;
    struct mb_err err;
    if (mb_st_parse("fuzz", header, n, data_bytes, &r, &err) == 0) {
        for (size_t i = 0; i < mb_st_n_tensors(r); i++) {
            const struct mb_st_tensor *t = mb_st_tensor(r, i);
            if (t->begin > t->end || t->end > data_bytes) {
                abort();
            }
        }
        mb_st_close(r);
    }
}

/* 0: it has none, or no room for its digits. */
static int seal(char *header, size_t n)
{
    char *digits = mb_sums_value(header, n, MB_SUMS_HEADER);
    if (digits == NULL || (size_t)(header + n - digits) < MB_SUMS_DIGITS) {
        return 0;
    }
    memcpy(digits, MB_SUMS_NONE, MB_SUMS_DIGITS);
    mb_seal_set(header, n, MB_SUMS_HEADER);
    if (mb_seal_check(header, n, MB_SUMS_HEADER) != MB_SEAL_FITS) {
        abort();
    }
    return 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2) {
        return 0;
    }
    const uint64_t data_bytes = (uint64_t)data[0] | (uint64_t)data[1] << 8;
    const size_t n = size - 2;
    char *header = malloc(n + 1);
    if (header == NULL) {
        return 0;
    }
    memcpy(header, data + 2, n);
    parse(header, n, data_bytes);
    if (seal(header, n)) {
        parse(header, n, data_bytes);
    }
    free(header);
    return 0;
}
