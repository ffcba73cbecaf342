/* CRC64NVME of a part of a file, read with pread in blocks that stay in the processor's cache.
 * Holes are not read: they would fill the page cache with zeros. */
#include <errno.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/fs.h"
#include "base/s3/s3.h"

enum { HASH_BLOCK_BYTES = 256 * 1024 };

/* Like pread, of a stretch that is all hole or all data. */
static ssize_t read_block(int fd, uint8_t *block, size_t n, uint64_t offset, int is_hole)
{
    if (!is_hole)
        return pread(fd, block, n, (off_t)offset);
    memset(block, 0, n);
    return (ssize_t)n;
}

int s3_hash_range(int fd, uint64_t offset, uint64_t n, uint64_t *out)
{
    uint8_t *block = mb_alloc(HASH_BLOCK_BYTES);
    uint64_t crc = 0, stretch = 0;
    int rc = block ? 0 : MB_ENOMEM, is_hole = 0;
    while (rc == 0 && n > 0) {
        if (stretch == 0)
            stretch = mb_fs_stretch(fd, offset, n, &is_hole);
        size_t want = stretch < HASH_BLOCK_BYTES ? (size_t)stretch : HASH_BLOCK_BYTES;
        ssize_t got = read_block(fd, block, want, offset, is_hole);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            rc = got < 0 ? MB_EIO : MB_ESTATE;
            break;
        }
        crc = mb_crc64nvme(crc, block, (size_t)got);
        offset += (uint64_t)got;
        stretch -= (uint64_t)got;
        n -= (uint64_t)got;
    }
    mb_free(block);
    *out = crc;
    return rc;
}
