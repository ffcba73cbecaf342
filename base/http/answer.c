/*
 * 1. Lines are gathered up to their LF: status, headers, an empty one.
 * 2. The head says how the body ends: chunks, a length, or the end of the connection.
 * 3. Body bytes are handed out where they lie; nothing of them is kept.
 * Failures: a line or number that is none, lengths that differ, a coding that was not asked for
 * (MB_EPROTO); a head or body beyond its bound (MB_EFULL).
 */
#include "base/http/answer.h"

#include <string.h>
#include <strings.h>
#include "base/alloc.h"
#include "base/http/headers.h"
#include "base/str.h"

void mb_http_answer_close(struct mb_http_answer *a)
{
    mb_buf_close(&a->head);
    mb_buf_close(&a->line);
}

const char *mb_http_answer_header(const struct mb_http_answer *a, const char *name)
{
    return mb_http_headers_next(&a->head, name, NULL);
}

/* ---- lines ---- */

static int take_status(struct mb_http_answer *a, const char *line, struct mb_err *err)
{
    const char *digits = strncmp(line, "HTTP/1.", 7) == 0 && line[7] != '\0' ? line + 9 : "";
    if (line[0] == '\0' || strspn(digits, "0123456789") != 3 || line[8] != ' ' ||
        digits[0] == '0' || (digits[3] != ' ' && digits[3] != '\0'))
        return mb_err_set(err, MB_EPROTO, "the answer is not HTTP");
    a->status = (digits[0] - '0') * 100 + (digits[1] - '0') * 10 + (digits[2] - '0');
    mb_buf_reset(&a->head);
    a->state = MB_HTTP_ANSWER_HEADER;
    return 0;
}

static int take_header(struct mb_http_answer *a, char *line, struct mb_err *err)
{
    char *colon = strchr(line, ':');
    size_t n = colon ? (size_t)(colon - line) : 0;
    if (n == 0 || strcspn(line, " \t") < n)
        return mb_err_set(err, MB_EPROTO, "the answer has a header line that is none");
    char *value = colon + 1 + strspn(colon + 1, " \t");
    size_t len = strlen(value);
    while (len > 0 && (value[len - 1] == ' ' || value[len - 1] == '\t'))
        len--;
    if (mb_http_headers_add(&a->head, line, n, value, len) != 0)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    return 0;
}

/* All Content-Length headers; 1: *out is set, 0: there is none. */
static int content_length(const struct mb_http_answer *a, uint64_t *out, struct mb_err *err)
{
    const char *value = NULL;
    int found = 0;
    while ((value = mb_http_headers_next(&a->head, "Content-Length", value))) {
        int64_t n;
        if (strspn(value, "0123456789") != strlen(value) ||
            mb_parse_i64(value, 0, INT64_MAX, "Content-Length", &n, err) != 0 ||
            (found && (uint64_t)n != *out))
            return mb_err_set(err, MB_EPROTO, "the answer has no valid Content-Length");
        *out = (uint64_t)n;
        found = 1;
    }
    return found;
}

static int begin_body(struct mb_http_answer *a, struct mb_err *err)
{
    const char *coding = mb_http_answer_header(a, "Transfer-Encoding");
    int rc;
    if (a->status / 100 == 1 && a->status != 101) {
        a->state = MB_HTTP_ANSWER_STATUS;
    } else if (a->no_body || a->status == 101 || a->status == 204 || a->status == 304) {
        a->state = MB_HTTP_ANSWER_DONE;
    } else if (coding && strcasecmp(coding, "chunked") == 0) {
        a->state = MB_HTTP_ANSWER_CHUNK_SIZE;
    } else if (coding) {
        return mb_err_set(err, MB_EPROTO, "the answer has an unknown Transfer-Encoding");
    } else if ((rc = content_length(a, &a->left, err)) < 0) {
        return rc;
    } else if (rc == 0) {
        a->state = MB_HTTP_ANSWER_OPEN;
    } else {
        a->state = a->left > 0 ? MB_HTTP_ANSWER_LENGTH : MB_HTTP_ANSWER_DONE;
    }
    return 0;
}

static int take_chunk_size(struct mb_http_answer *a, const char *line, struct mb_err *err)
{
    size_t n = strspn(line, "0123456789abcdefABCDEF");
    a->left = 0;
    if (n == 0 || n > 15 || (line[n] != '\0' && !strchr("; \t", line[n])))
        return mb_err_set(err, MB_EPROTO, "the answer has a chunk without a size");
    for (size_t i = 0; i < n; i++) {
        int c = line[i] | 0x20; /* digits have that bit already */
        a->left = a->left * 16 + (uint64_t)(c >= 'a' ? c - 'a' + 10 : c - '0');
    }
    a->state = a->left > 0 ? MB_HTTP_ANSWER_CHUNK : MB_HTTP_ANSWER_TRAILER;
    return 0;
}

static int take_line(struct mb_http_answer *a, struct mb_err *err)
{
    char *line = (char *)a->line.data;
    size_t n = a->line.len - 1; /* without LF */
    if (n > 0 && line[n - 1] == '\r')
        n--;
    line[n] = '\0';
    if (strlen(line) != n)
        return mb_err_set(err, MB_EPROTO, "the head of the answer has a NUL");
    switch (a->state) {
    case MB_HTTP_ANSWER_STATUS:
        return take_status(a, line, err);
    case MB_HTTP_ANSWER_HEADER:
        return n == 0 ? begin_body(a, err) : take_header(a, line, err);
    case MB_HTTP_ANSWER_CHUNK_SIZE:
        return take_chunk_size(a, line, err);
    case MB_HTTP_ANSWER_CHUNK_END:
        a->state = MB_HTTP_ANSWER_CHUNK_SIZE;
        return n == 0 ? 0 : mb_err_set(err, MB_EPROTO, "a chunk of the answer is too long");
    default: /* a trailer: nothing of it is wanted */
        if (n == 0)
            a->state = MB_HTTP_ANSWER_DONE;
        return 0;
    }
}

/* ---- bytes ---- */

static int feed_line(struct mb_http_answer *a, const uint8_t *p, size_t n, size_t *used,
                     struct mb_err *err)
{
    const uint8_t *lf = memchr(p, '\n', n);
    int rc = 0;
    *used = lf ? (size_t)(lf - p) + 1 : n;
    if (a->state == MB_HTTP_ANSWER_CHUNK_SIZE || a->state == MB_HTTP_ANSWER_CHUNK_END) {
        if (a->line.len + *used > 4096)
            return mb_err_set(err, MB_EPROTO, "the answer has a chunk without a size");
    } else if ((a->head_bytes += *used) > MB_HTTP_HEAD_MAX_BYTES) {
        return mb_err_set(err, MB_EFULL, "the head of the answer is larger than allowed");
    }
    if (mb_buf_add(&a->line, p, *used) != 0)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    if (lf) {
        rc = take_line(a, err);
        mb_buf_reset(&a->line);
    }
    return rc;
}

static int is_body(const struct mb_http_answer *a)
{
    return a->state == MB_HTTP_ANSWER_LENGTH || a->state == MB_HTTP_ANSWER_OPEN ||
           a->state == MB_HTTP_ANSWER_CHUNK;
}

int mb_http_answer_feed(struct mb_http_answer *a, const void *p, size_t n, size_t *used,
                        const uint8_t **body, size_t *body_len, struct mb_err *err)
{
    *body = p;
    *body_len = 0;
    *used = 0;
    if (a->state == MB_HTTP_ANSWER_DONE || n == 0)
        return 0;
    if (!is_body(a))
        return feed_line(a, p, n, used, err);
    size_t take = a->state == MB_HTTP_ANSWER_OPEN || n < a->left ? n : (size_t)a->left;
    if (take > a->max_body_bytes - a->body_bytes)
        return mb_err_set(err, MB_EFULL, "the answer is larger than allowed");
    *used = *body_len = take;
    a->body_bytes += take;
    if (a->state == MB_HTTP_ANSWER_OPEN)
        return 0;
    a->left -= take;
    if (a->left == 0)
        a->state =
            a->state == MB_HTTP_ANSWER_CHUNK ? MB_HTTP_ANSWER_CHUNK_END : MB_HTTP_ANSWER_DONE;
    return 0;
}

int mb_http_answer_end(struct mb_http_answer *a, struct mb_err *err)
{
    if (a->state == MB_HTTP_ANSWER_OPEN)
        a->state = MB_HTTP_ANSWER_DONE;
    if (a->state == MB_HTTP_ANSWER_DONE)
        return 0;
    return mb_err_set(err, MB_EUNAVAIL, "the connection ended %s",
                      a->state == MB_HTTP_ANSWER_STATUS ? "without an answer"
                                                        : "in the middle of the answer");
}
