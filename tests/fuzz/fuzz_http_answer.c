/*
 * Any bytes as the answer of a server, fed in pieces whose length the first byte says: feeding
 * ends, hands out only bytes it was given, and cut elsewhere the answer is the same.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "base/http/answer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { BODY_MAX_BYTES = 1000 };

/* Returns the code; the body goes to *sum, the bytes that were used to *all. */
static int feed(const uint8_t *data, size_t size, size_t step, struct mb_http_answer *a,
                struct mb_buf *sum)
{
    struct mb_err err;
    int rc = 0;

    for (size_t at = 0; at < size && rc == 0 && a->state != MB_HTTP_ANSWER_DONE;) {
        size_t len = size - at < step ? size - at : step, used, n;
        const uint8_t *body;

        rc = mb_http_answer_feed(a, data + at, len, &used, &body, &n, &err);
        if (rc != 0)
            break;
        if (used == 0 || used > len || n > used || body != data + at)
            abort();
        if (mb_buf_add(sum, body, n) != 0 || sum->len > BODY_MAX_BYTES)
            abort();
        at += used;
    }
    return rc != 0 ? rc : mb_http_answer_end(a, &err);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_http_answer pieces = {.max_body_bytes = BODY_MAX_BYTES}, whole = pieces;
    struct mb_buf a = {0}, b = {0};

    if (size < 2)
        return 0;
    int ra = feed(data + 1, size - 1, data[0] ? data[0] : 1, &pieces, &a);
    int rb = feed(data + 1, size - 1, size, &whole, &b);
    /* What is too long may be seen earlier or later. */
    if (ra != rb || pieces.status != whole.status)
        abort();
    if (ra == 0 && (a.len != b.len || memcmp(mb_buf_str(&a), mb_buf_str(&b), a.len) != 0))
        abort();
    mb_http_answer_close(&pieces);
    mb_http_answer_close(&whole);
    mb_buf_close(&a);
    mb_buf_close(&b);
    return 0;
}
