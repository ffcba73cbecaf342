/*
 * An HTTP/1.1 answer, as its bytes come (RFC 9112 sections 4, 6 and 7): pure. For the client that
 * has no libcurl; interim answers (100, 103) are passed over, 101 ends the answer with its head.
 */
#ifndef MOBULA_BASE_HTTP_ANSWER_H
#define MOBULA_BASE_HTTP_ANSWER_H

#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/err.h"

enum { MB_HTTP_HEAD_MAX_BYTES = 256 * 1024 };

enum mb_http_answer_state {
    MB_HTTP_ANSWER_STATUS, /* the first line */
    MB_HTTP_ANSWER_HEADER,
    MB_HTTP_ANSWER_LENGTH, /* a body of known length */
    MB_HTTP_ANSWER_OPEN,   /* a body that ends with the connection */
    MB_HTTP_ANSWER_CHUNK_SIZE,
    MB_HTTP_ANSWER_CHUNK,
    MB_HTTP_ANSWER_CHUNK_END,
    MB_HTTP_ANSWER_TRAILER,
    MB_HTTP_ANSWER_DONE
};

/* Zero-initialise, then set the two settings. */
struct mb_http_answer {
    int no_body;           /* setting: the request was HEAD */
    size_t max_body_bytes; /* setting: a longer body is MB_EFULL */
    enum mb_http_answer_state state;
    long status;
    struct mb_buf head; /* name NUL value NUL ... */
    struct mb_buf line; /* what there is of the line that is being read */
    size_t head_bytes;
    uint64_t left; /* of the body or the chunk */
    size_t body_bytes;
};

void mb_http_answer_close(struct mb_http_answer *a);
/* Takes some of p[0..n), at least a byte: *used says how many. What of it is body stands in
 * *body, *body_len (borrowed from p). Call again with the rest until it is used up or the state is
 * DONE. MB_EPROTO, MB_EFULL, MB_ENOMEM: the answer is broken. */
int mb_http_answer_feed(struct mb_http_answer *a, const void *p, size_t n, size_t *used,
                        const uint8_t **body, size_t *body_len, struct mb_err *err);
/* The connection ended: 0 if the answer is whole (state DONE), else MB_EUNAVAIL. */
int mb_http_answer_end(struct mb_http_answer *a, struct mb_err *err);
/* Value of the first header of that name (case-insensitive); NULL if absent. */
const char *mb_http_answer_header(const struct mb_http_answer *a, const char *name);

#endif
