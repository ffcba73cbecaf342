/* The journal of preprocess: whatever is read is written back as the same bytes; all else is
 * refused. The checksum in the last line is put right first, so that the reader sees more than its
 * failure. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/checksum.h"
#include "worker/data/preprocess_journal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_buf text = {0}, again = {0};
    struct mb_journal j = {0};
    struct mb_err err;

    if (mb_journal_read(data, size, &j, &err) == 0)
        mb_journal_close(&j);
    if (mb_buf_add(&text, data, size) != 0 ||
        mb_buf_printf(&text, "crc32c %08x\n", mb_crc32c(0, data, size)) != 0)
        abort();
    if (mb_journal_read(text.data, text.len, &j, &err) == 0) {
        if (mb_journal_write(&j, &again) != 0 || again.len != text.len ||
            memcmp(again.data, text.data, text.len) != 0)
            abort();
    }
    mb_journal_close(&j);
    mb_buf_close(&text);
    mb_buf_close(&again);
    return 0;
}
