/*
 * AWS Signature Version 4 as S3 wants it: pure, time comes in. Source: AWS, "Authenticating
 * Requests: Using the Authorization Header (AWS Signature Version 4)" of the S3 API reference.
 */
#ifndef MOBULA_BASE_S3_SIGV4_H
#define MOBULA_BASE_S3_SIGV4_H

#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"

#define MB_SIGV4_UNSIGNED "UNSIGNED-PAYLOAD"

struct mb_sigv4_header {
    const char *name; /* lower-case */
    const char *value;
};

struct mb_sigv4_request {
    const char *method;
    const char *path;  /* percent-encoded, starts with '/' */
    const char *query; /* percent-encoded "a=b&c=", sorted by name; "" when none */
    /* All signed headers, sorted by name; host, x-amz-date and x-amz-content-sha256 among them. */
    const struct mb_sigv4_header *headers;
    size_t n_headers;
    const char *payload_hash; /* hex SHA-256 or MB_SIGV4_UNSIGNED */
    const char *amz_date;     /* "20130524T000000Z", the value of x-amz-date */
    const char *region;
    const char *access_key;
    const char *secret_key;
};

/* "YYYYMMDDTHHMMSSZ" and a NUL into out[17]. */
void mb_sigv4_date(uint64_t unix_ms, char out[17]);
/* Appends the value of the Authorization header to out. 0 or MB_ENOMEM. */
int mb_sigv4_authorization(const struct mb_sigv4_request *req, struct mb_buf *out);

#endif
