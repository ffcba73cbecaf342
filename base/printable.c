#include "base/printable.h"

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

/* What ends a line, or begins a column, of a text that may have several lines. */
static int is_layout(const uint8_t *p, size_t left)
{
    return p[0] == '\n' || p[0] == '\t' || (p[0] == '\r' && left > 1 && p[1] == '\n');
}

static int add_printable(const char *text, int has_lines, struct mb_buf *out)
{
    const uint8_t *p = (const uint8_t *)text;
    size_t left = strlen(text);
    int rc = 0;

    while (rc == 0 && left > 0) {
        size_t len = 1;
        enum mb_utf8 kind = mb_utf8_look(p, left, &len);

        if (kind == MB_UTF8_WHOLE && (is_plain(p, len) || (has_lines && is_layout(p, left)))) {
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

int mb_printable(const char *text, struct mb_buf *out)
{
    return add_printable(text, 0, out);
}

int mb_printable_lines(const char *text, struct mb_buf *out)
{
    return add_printable(text, 1, out);
}

void mb_printable_say(FILE *out, const char *before, const char *text, const char *after)
{
    struct mb_buf shown = {0};

    if (mb_printable_lines(text, &shown) == 0)
        fprintf(out, "%s%s%s", before, mb_buf_str(&shown), after);
    else
        fprintf(out, "%s(out of memory)%s", before, after);
    mb_buf_close(&shown);
}

static unsigned code_point(const uint8_t *p, size_t len)
{
    return len == 1   ? p[0]
           : len == 2 ? (p[0] & 0x1fU) << 6 | (p[1] & 0x3fU)
                      : (p[0] & 0x0fU) << 12 | (p[1] & 0x3fU) << 6 | (p[2] & 0x3fU);
}

/* A piece of JSON: characters are whole in it, and those of 4 bytes are all plain. */
static int write_piece(const char *text, size_t n, void *arg)
{
    const uint8_t *p = (const uint8_t *)text;
    FILE *out = arg;
    size_t from = 0, i = 0;

    while (i < n) {
        size_t len = 1;

        if (p[i] >= 0x7f && mb_utf8_look(p + i, n - i, &len) == MB_UTF8_WHOLE &&
            !is_plain(p + i, len)) {
            fwrite(p + from, 1, i - from, out);
            fprintf(out, "\\u%04X", code_point(p + i, len));
            from = i + len;
        }
        i += len;
    }
    fwrite(p + from, 1, n - from, out);
    return ferror(out) ? -1 : 0;
}

int mb_printable_json(const json_t *j, size_t flags, FILE *out)
{
    return json_dump_callback(j, write_piece, out, flags);
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
