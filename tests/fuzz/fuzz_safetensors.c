/* Any bytes as a safetensors header: refused, or every tensor lies inside the data. */
#include <stdint.h>
#include <stdlib.h>
#include "worker/checkpoint/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2) {
        return 0;
    }
    uint64_t data_bytes = (uint64_t)data[0] | (uint64_t)data[1] << 8;
    struct mb_st_reader *r = NULL;
    struct mb_err err;
    if (mb_st_parse("fuzz", data + 2, size - 2, data_bytes, &r, &err) == 0) {
        for (size_t i = 0; i < mb_st_n_tensors(r); i++) {
            const struct mb_st_tensor *t = mb_st_tensor(r, i);
            if (t->begin > t->end || t->end > data_bytes) {
                abort();
            }
        }
        mb_st_close(r);
    }
    return 0;
}
