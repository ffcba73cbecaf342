/* base/http/answer: every answer, fed whole and byte by byte, gives the same body or the same code.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "base/alloc.h"
#include "base/http/answer.h"
#include "base/http/headers.h"

struct row {
    const char *in;
    const char *body;
    long status;
    int code; /* of feed, or of the end */
    int no_body;
};

static const struct row rows[] = {
    {"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "hello", 200, 0, 0},
    {"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello", "hello", 200, 0, 0},
    {"HTTP/1.0 200\r\n\r\nto the end", "to the end", 200, 0, 0},
    {"HTTP/1.1 404 Not Found\nContent-Length: 2\n\nno", "no", 404, 0, 0},
    {"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
     "HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n",
     "", 201, 0, 0},
    {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=1\r\nhello\r\n0B\r\n, old "
     "world\r\n0\r\n"
     "Trailer: 1\r\n\r\n",
     "hello, old world", 200, 0, 0},
    {"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", "", 200, 0, 1},
    {"HTTP/1.1 204 No Content\r\nContent-Length: 9\r\n\r\n", "", 204, 0, 0},
    {"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", "", 304, 0, 0},
    {"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n", "", 101, 0, 0},
    {"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello", "hello", 200, MB_EUNAVAIL, 0},
    {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", "hello", 200,
     MB_EUNAVAIL, 0},
    {"", "", 0, MB_EUNAVAIL, 0},
    {"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", "", 200, MB_EPROTO, 0},
    {"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "", 200, MB_EPROTO, 0},
    {"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n", "", 200, MB_EPROTO, 0},
    {"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", "", 200, MB_EPROTO, 0},
    {"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "", 200, MB_EPROTO, 0},
    {"HTTP/1.1 200 OK\r\nA : b\r\n\r\n", "", 200, MB_EPROTO, 0},
    {"HTTP/1.1 20 OK\r\n\r\n", "", 0, MB_EPROTO, 0},
    {"HTTP/1.1 2000 OK\r\n\r\n", "", 0, MB_EPROTO, 0},
    {"HTTP/2 200 OK\r\n\r\n", "", 0, MB_EPROTO, 0},
    {"SSH-2.0-OpenSSH_9.2\r\n", "", 0, MB_EPROTO, 0},
    {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhelloX\r\n", "hello", 200,
     MB_EPROTO, 0},
    {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "", 200, MB_EPROTO, 0},
    {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1000000000000000\r\n", "", 200,
     MB_EPROTO, 0},
    {"HTTP/1.1 200 OK\r\nContent-Length: 65\r\n\r\n"
     "01234567890123456789012345678901234567890123456789012345678901234",
     "0123456789012345678901234567890123456789012345678901234567890123", 200, MB_EFULL, 0},
};

/* In pieces of `step` bytes, each in its own block of memory: a sanitizer sees a look beyond. */
static int feed(struct mb_http_answer *a, const char *in, size_t step, struct mb_buf *body)
{
    size_t n = strlen(in);
    struct mb_err err;

    for (size_t at = 0; at < n && a->state != MB_HTTP_ANSWER_DONE;) {
        size_t len = n - at < step ? n - at : step, used, body_len;
        uint8_t *piece = (uint8_t *)mb_strndup(in + at, len);
        const uint8_t *p;
        assert_non_null(piece);
        int rc = mb_http_answer_feed(a, piece, len, &used, &p, &body_len, &err);
        if (rc == 0)
            rc = mb_buf_add(body, p, body_len);
        mb_free(piece);
        if (rc != 0)
            return rc;
        assert_in_range(used, 1, len);
        at += used;
    }
    return mb_http_answer_end(a, &err);
}

static void test_rows(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        for (size_t step = 1; step < 80; step++) {
            const struct row *r = &rows[i];
            struct mb_http_answer a = {.no_body = r->no_body, .max_body_bytes = 64};
            struct mb_buf body = {0};
            int rc = feed(&a, r->in, step, &body);
            if (rc != r->code || a.status != r->status)
                fail_msg("row %zu step %zu: code %d status %ld", i, step, rc, a.status);
            /* Of a body that is too long a part may have come before. */
            if (strncmp(mb_buf_str(&body), r->body, body.len) != 0 ||
                (rc != MB_EFULL && body.len != strlen(r->body)))
                fail_msg("row %zu step %zu: %s", i, step, mb_buf_str(&body));
            mb_http_answer_close(&a);
            mb_buf_close(&body);
        }
    }
}

static void test_headers(void **state)
{
    struct mb_http_answer a = {.max_body_bytes = 64};
    struct mb_buf body = {0};
    (void)state;
    assert_int_equal(
        feed(&a,
             "HTTP/1.1 100 C\r\nX: before\r\n\r\nHTTP/1.1 200 OK\r\nX:  1 \t\r\nx: 2\r\n"
             "Empty:\r\nContent-Length: 0\r\n\r\n",
             1000, &body),
        0);
    const char *first = mb_http_answer_header(&a, "x");
    assert_string_equal(first, "1");
    const char *second = mb_http_headers_next(&a.head, "X", first);
    assert_string_equal(second, "2");
    assert_null(mb_http_headers_next(&a.head, "X", second));
    assert_string_equal(mb_http_answer_header(&a, "EMPTY"), "");
    assert_null(mb_http_answer_header(&a, "Y"));
    mb_http_answer_close(&a);
    mb_buf_close(&body);
}

static void test_a_head_without_end_is_bounded(void **state)
{
    static const char start[] = "HTTP/1.1 200 OK\r\n", line[] = "X: 0123456789\r\n";
    struct mb_http_answer a = {.max_body_bytes = 64};
    const uint8_t *body;
    size_t used, body_len, fed = 0;
    struct mb_err err;
    int rc = mb_http_answer_feed(&a, start, strlen(start), &used, &body, &body_len, &err);
    (void)state;
    for (; rc == 0 && fed < 2 * MB_HTTP_HEAD_MAX_BYTES; fed += used)
        rc = mb_http_answer_feed(&a, line, strlen(line), &used, &body, &body_len, &err);
    assert_int_equal(rc, MB_EFULL);
    assert_in_range(a.head.cap, 1, 2 * MB_HTTP_HEAD_MAX_BYTES);
    mb_http_answer_close(&a);
}

static void test_memory_runs_out(void **state)
{
    static const char in[] = "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx";
    int failed = 1;
    (void)state;
    for (unsigned long nth = 1; failed; nth++) {
        struct mb_http_answer a = {.max_body_bytes = 64};
        const uint8_t *body;
        size_t used, len, at = 0;
        struct mb_err err;
        int rc = 0;
        mb_alloc_fail_nth(nth);
        while (rc == 0 && at < strlen(in)) {
            rc = mb_http_answer_feed(&a, in + at, strlen(in) - at, &used, &body, &len, &err);
            at += used;
        }
        failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        assert_int_equal(rc, failed ? MB_ENOMEM : 0);
        mb_http_answer_close(&a);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_headers),
        cmocka_unit_test(test_a_head_without_end_is_bounded),
        cmocka_unit_test(test_memory_runs_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
