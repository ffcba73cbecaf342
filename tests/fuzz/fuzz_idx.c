/* The .idx reader: whatever the bytes, it refuses them or every token it offers lies inside .bin.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "worker/data/dataset.h"
#include "worker/data/index.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The first two bytes say how many of the others are .bin, at the end. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_index *x;
    struct mb_err err;
    size_t bin_size;
    size_t idx_size;

    if (size < 2)
        return 0;
    bin_size = (size_t)(data[0] | data[1] << 8);
    data += 2;
    size -= 2;
    if (bin_size > size)
        bin_size = size;
    idx_size = size - bin_size;
    if (mb_index_open_memory("fuzz", data, idx_size, data + idx_size, bin_size, &x, &err) != 0)
        return 0;
    for (uint64_t d = 0; d < mb_index_n_documents(x); d++) {
        if (mb_index_document_start(x, d) > mb_index_document_start(x, d + 1))
            abort();
    }
    for (uint64_t i = 0; i < mb_index_n_sequences(x); i++) {
        uint64_t length = (uint64_t)mb_index_length(x, i);
        int32_t ids[64];

        for (uint64_t at = 0; at < length; at += 64) {
            uint64_t n = length - at < 64 ? length - at : 64;
            (void)mb_index_read(x, i, at, n, 50257, ids, &err);
        }
    }
    mb_index_unref(x);
    return 0;
}
