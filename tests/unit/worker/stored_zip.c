#include "stored_zip.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { EXTRA_BYTES = 28, FULL = -1 };

static void must(int ok)
{
    if (!ok) {
        abort();
    }
}

static void u16(struct mb_buf *b, size_t v)
{
    const uint8_t bytes[2] = {(uint8_t)v, (uint8_t)(v >> 8)};
    must(mb_buf_add(b, bytes, 2) == 0);
}

static void u32(struct mb_buf *b, size_t v)
{
    must(mb_buf_u32le(b, (uint32_t)v) == 0);
}

static void u64(struct mb_buf *b, size_t v)
{
    must(mb_buf_u64le(b, v) == 0);
}

void stored_zip_put(struct stored_zip *z, const char *name, const void *p, size_t n, int is_wide)
{
    struct mb_buf *b = &z->bytes, *d = &z->directory;
    const size_t at = b->len;
    u32(d, 0x02014b50);
    for (int i = 0; i < 4; i++) { /* versions, flags and method, date, checksum */
        u32(d, 0);
    }
    u32(d, is_wide ? (size_t)FULL : n);
    u32(d, is_wide ? (size_t)FULL : n);
    u16(d, strlen(name));
    u16(d, is_wide ? EXTRA_BYTES : 0);
    u16(d, 0);
    u32(d, 0);
    u32(d, 0);
    u32(d, is_wide ? (size_t)FULL : at);
    must(mb_buf_puts(d, name) == 0);
    if (is_wide) {
        u16(d, 1);
        u16(d, EXTRA_BYTES - 4);
        u64(d, n);
        u64(d, n);
        u64(d, at);
    }
    u32(b, 0x04034b50);
    for (int i = 0; i < 11; i++) { /* the reader takes sizes from the directory */
        u16(b, 0);
    }
    u16(b, strlen(name));
    u16(b, 0);
    must(mb_buf_puts(b, name) == 0 && mb_buf_add(b, p, n) == 0);
    z->n++;
}

void stored_zip_end(struct stored_zip *z, int is_wide)
{
    struct mb_buf *b = &z->bytes;
    const size_t at = b->len, n = z->directory.len, end_at = at + n;
    must(mb_buf_add(b, z->directory.data, n) == 0);
    if (is_wide) {
        u32(b, 0x06064b50);
        u64(b, 44);
        u32(b, 0);
        u64(b, 0);
        u64(b, z->n);
        u64(b, z->n);
        u64(b, n);
        u64(b, at);
        u32(b, 0x07064b50);
        u32(b, 0);
        u64(b, end_at);
        u32(b, 1);
    }
    u32(b, 0x06054b50);
    u32(b, 0);
    u16(b, is_wide ? (size_t)FULL : z->n);
    u16(b, is_wide ? (size_t)FULL : z->n);
    u32(b, is_wide ? (size_t)FULL : n);
    u32(b, is_wide ? (size_t)FULL : at);
    u16(b, 0);
}

void stored_zip_close(struct stored_zip *z)
{
    mb_buf_close(&z->bytes);
    mb_buf_close(&z->directory);
}

int stored_zip_fd(const void *p, size_t n)
{
    const int fd = memfd_create("stored zip", MFD_CLOEXEC);
    must(fd >= 0 && write(fd, p, n) == (ssize_t)n);
    return fd;
}
