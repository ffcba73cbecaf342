#include "cli/printable.h"

#include <stdio.h>
#include <string.h>
#include "base/str.h"

static int is_plain(const uint8_t *p, size_t len)
{
    if (len == 1)
        return p[0] >= 0x20 && p[0] != 0x7f;
    /* C1 controls move cursors as well; U+2028 and U+2029 end lines, U+202A..202E and
     * U+2066..2069 turn the writing around. */
    if (p[0] == 0xc2 && p[1] < 0xa0)
        return 0;
    if (p[0] == 0xe2 && p[1] == 0x80 && p[2] >= 0xa8 && p[2] <= 0xae)
        return 0;
    return !(p[0] == 0xe2 && p[1] == 0x81 && p[2] >= 0xa6 && p[2] <= 0xa9);
}

int mb_printable(const char *text, struct mb_buf *out)
{
    const uint8_t *p = (const uint8_t *)text;
    size_t left = strlen(text);
    int rc = 0;

    while (rc == 0 && left > 0) {
        size_t len = 1;
        enum mb_utf8 kind = mb_utf8_look(p, left, &len);

        if (kind == MB_UTF8_WHOLE && is_plain(p, len)) {
            rc = mb_buf_add(out, p, len);
        } else {
            for (size_t i = 0; rc == 0 && i < len; i++)
                rc = mb_buf_printf(out, "\\x%02x", p[i]);
        }
        p += len;
        left -= len;
    }
    return rc;
}

void mb_err_printable(struct mb_err *err)
{
    struct mb_buf text = {0};

    if (mb_printable(err->text, &text) == 0)
        snprintf(err->text, sizeof(err->text), "%s", mb_buf_str(&text));
    else
        snprintf(err->text, sizeof(err->text), "%s", mb_code_name(err->code));
    mb_buf_close(&text);
}
