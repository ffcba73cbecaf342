/* Any bytes as a cloud's notice: refused, none, or one whose time is before the year 10001; the
 * same every time, and spaces around it change nothing. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "agent/notice.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const uint64_t written_ms = 1000000000000u, max_ms = 253433923200000u;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *spaced = malloc(size + 2);
    struct mb_err err = {0};
    uint64_t ms = 0, again_ms = 0;
    int rc, again;

    if (spaced == NULL)
        return 0;
    spaced[0] = ' ';
    memcpy(spaced + 1, data, size);
    spaced[size + 1] = '\n';
    rc = mb_notice_read((const char *)data, size, written_ms, &ms, &err);
    again = mb_notice_read(spaced, size + 2, written_ms, &again_ms, &err);
    if (rc != again || (rc == 1 && ms != again_ms) || (rc == 1 && ms > max_ms) ||
        (rc < 0 && (rc != MB_EPROTO || err.text[0] == '\0')))
        abort();
    free(spaced);
    return 0;
}
