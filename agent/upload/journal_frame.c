/*
 * Records in a file: length, CRC32C, payload. See journal.h; the journal of a push has them too.
 */
#include <string.h>
#include "agent/upload/journal.h"
#include "base/checksum.h"

#define MAGIC "mobula-journal 1\n"

enum { MAGIC_LEN = sizeof(MAGIC) - 1, HEAD_LEN = 8 };

static uint32_t get_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

int mb_journal_scan(const void *p, size_t n, mb_journal_record_cb cb, void *arg,
                    size_t *valid_bytes, struct mb_err *err)
{
    const uint8_t *bytes = p;
    size_t at = MAGIC_LEN;

    *valid_bytes = 0;
    if (n < MAGIC_LEN && memcmp(bytes, MAGIC, n) == 0)
        return MB_OK; /* torn in its first line: nothing was ever noted */
    if (n < MAGIC_LEN || memcmp(bytes, MAGIC, MAGIC_LEN) != 0)
        return mb_err_set(err, MB_ECORRUPT, "it does not begin with \"mobula-journal 1\"");
    for (;;) {
        uint32_t len;
        int rc;

        *valid_bytes = at;
        if (n - at < HEAD_LEN)
            return MB_OK;
        len = get_u32(bytes + at);
        if (len == 0 || len > MB_JOURNAL_RECORD_MAX)
            return mb_err_set(err, MB_ECORRUPT, "offset %zu: a record of %u bytes is impossible",
                              at, len);
        if (n - at - HEAD_LEN < len)
            return MB_OK;
        if (mb_crc32c(0, bytes + at + HEAD_LEN, len) != get_u32(bytes + at + 4)) {
            if (n - at - HEAD_LEN == len)
                return MB_OK;
            return mb_err_set(err, MB_ECORRUPT, "offset %zu: the record fails its checksum", at);
        }
        rc = cb(arg, bytes + at + HEAD_LEN, len, err);
        if (rc != MB_OK) {
            mb_err_wrap(err, "offset %zu", at);
            return rc;
        }
        at += HEAD_LEN + len;
    }
}

int mb_journal_frame(struct mb_buf *out, const void *payload, size_t n)
{
    size_t before = out->len;
    int rc = MB_EFULL;

    if (n == 0 || n > MB_JOURNAL_RECORD_MAX)
        return rc;
    rc = mb_buf_u32le(out, (uint32_t)n);
    if (rc == MB_OK)
        rc = mb_buf_u32le(out, mb_crc32c(0, payload, n));
    if (rc == MB_OK)
        rc = mb_buf_add(out, payload, n);
    if (rc != MB_OK)
        out->len = before;
    return rc;
}
