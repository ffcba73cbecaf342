/*
 * 1. Without filter, tag and JSON bytes go to stdout as they come.
 * 2. Else they are cut into lines; what has no end yet is kept, up to a bound: a longer line comes
 *    in pieces of whole characters, wherever the bytes were cut when they came.
 * 3. A line is matched without its end, tagged with its rank, and printed in one piece.
 */
#include "cli/log_view.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include "base/printable.h"
#include "base/str.h"
#include "gcs/text.h"

enum { LINE_MAX_BYTES = 1 << 20 };

int mb_log_view_init(struct mb_log_view *v, const char *pattern, struct mb_err *err)
{
    char why[200];
    int rc;

    *v = (struct mb_log_view){0};
    if (pattern == NULL)
        return 0;
    rc = regcomp(&v->grep, pattern, REG_EXTENDED | REG_NOSUB);
    if (rc != 0) {
        regerror(rc, &v->grep, why, sizeof(why));
        return mb_err_set(err, MB_EINVAL, "--grep %s: %s", pattern, why);
    }
    v->has_grep = 1;
    return 0;
}

void mb_log_view_close(struct mb_log_view *v)
{
    if (v->has_grep)
        regfree(&v->grep);
    v->has_grep = 0;
}

static int put(const void *p, size_t n)
{
    return fwrite(p, 1, n, stdout) == n ? 0 : MB_EIO;
}

static int show_json(const struct mb_log_lines *l, const char *line, size_t n)
{
    struct mb_buf text = {0};
    int rc = mb_text_clean(line, n, &text);
    json_t *rank = l->rank < 0 ? json_null() : json_integer(l->rank);
    json_t *object =
        json_pack("{s:o, s:o}", "rank", rank, "line", json_stringn(mb_buf_str(&text), text.len));

    if (rc == 0 && object == NULL)
        rc = MB_ENOMEM;
    if (rc == 0 && (mb_printable_json(object, JSON_COMPACT, stdout) != 0 || putchar('\n') == EOF))
        rc = MB_EIO;
    json_decref(object);
    mb_buf_close(&text);
    return rc;
}

/* n without the line's end. */
static int show_line(const struct mb_log_lines *l, const char *line, size_t n)
{
    const struct mb_log_view *v = l->view;
    regmatch_t range = {.rm_so = 0, .rm_eo = (regoff_t)n};
    int rc = 0;

    if (v->has_grep && regexec(&v->grep, line, 1, &range, REG_STARTEND) != 0)
        return 0;
    if (v->json)
        return show_json(l, line, n);
    if (v->tag_ranks && printf("[rank %lld] ", (long long)l->rank) < 0)
        rc = MB_EIO;
    if (rc == 0)
        rc = put(line, n);
    return rc == 0 ? put("\n", 1) : rc;
}

/* Of a line beyond the bound what it has of whole characters; the beginning of one is kept. */
static int show_piece(struct mb_log_lines *l)
{
    size_t n = mb_utf8_floor(l->partial.data, l->partial.len);
    int rc = show_line(l, mb_buf_str(&l->partial), n);

    mb_buf_consume(&l->partial, n);
    return rc;
}

static int cut_lines(struct mb_log_lines *l, const char *p, size_t n)
{
    int rc = 0;

    while (rc == 0 && n > 0) {
        const char *end = memchr(p, '\n', n);
        size_t line = end != NULL ? (size_t)(end - p) : n, room = LINE_MAX_BYTES - l->partial.len;
        size_t take = line < room ? line : room;
        int is_end = end != NULL && take == line;

        if (take == 0 && !is_end) {
            rc = show_piece(l);
            continue;
        }
        if (is_end && l->partial.len == 0) {
            rc = show_line(l, p, take);
        } else {
            rc = mb_buf_add(&l->partial, p, take);
            if (rc == 0 && is_end) {
                rc = show_line(l, mb_buf_str(&l->partial), l->partial.len);
                mb_buf_reset(&l->partial);
            }
        }
        take += (size_t)is_end;
        p += take;
        n -= take;
    }
    return rc;
}

static int told(int rc, struct mb_err *err)
{
    if (rc == 0 && fflush(stdout) != 0)
        rc = MB_EIO;
    if (rc == MB_EIO)
        mb_err_set(err, rc, "standard output is closed");
    else if (rc != 0)
        mb_err_set(err, rc, "out of memory");
    return rc;
}

int mb_log_lines_add(struct mb_log_lines *l, const void *p, size_t n, struct mb_err *err)
{
    const struct mb_log_view *v = l->view;

    return told(v->has_grep || v->json || v->tag_ranks ? cut_lines(l, p, n) : put(p, n), err);
}

int mb_log_lines_end(struct mb_log_lines *l, struct mb_err *err)
{
    int rc = l->partial.len > 0 ? show_line(l, mb_buf_str(&l->partial), l->partial.len) : 0;

    mb_buf_close(&l->partial);
    return told(rc, err);
}
