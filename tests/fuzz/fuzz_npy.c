/* The .npy header: whatever the bytes, it is refused, or it is one of what the index cache has, its
 * elements begin within the bytes, and the header that is made of it says the same. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "worker/data/npy.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_npy_shape s, back;
    size_t header = 0, made_header = 0;
    char made[MB_NPY_MADE_MAX];
    struct mb_err err;

    if (mb_npy_header_parse(data, size, &s, &header, &err) != 0)
        return 0;
    if (header > size || s.n_dims < 1 || s.n_dims > 2 || (s.n_dims == 1 && s.dims[1] != 1) ||
        mb_npy_element_bytes(s.type) == 0)
        abort();
    size_t n = mb_npy_header_make(&s, made);
    if (n > sizeof made || n % 64 != 0 ||
        mb_npy_header_parse(made, n, &back, &made_header, &err) != 0 || made_header != n ||
        memcmp(&s, &back, sizeof s) != 0)
        abort();
    return 0;
}
