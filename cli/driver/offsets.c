#include "cli/driver/offsets.h"

size_t mb_drv_known_bytes(uint64_t *next, uint64_t offset, size_t n, uint64_t *missing)
{
    uint64_t known = offset < *next ? *next - offset : 0;

    *missing = offset > *next ? offset - *next : 0;
    if (known >= n && known > 0)
        return n;
    *next = offset + n;
    return (size_t)known;
}
