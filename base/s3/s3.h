/* The s3:// backend's parts: settings, one signed request with retries, uploads, downloads. */
#ifndef MOBULA_BASE_S3_S3_H
#define MOBULA_BASE_S3_S3_H

#include "base/http/client.h"
#include "base/s3/internal.h"
#include "base/s3/s3_xml.h"

enum { S3_MAX_CONNECTIONS = 16, S3_PARTS_IN_FLIGHT = 4, S3_MAX_HEADERS = 8, S3_VALUE_BYTES = 200 };
#define S3_SINGLE_PUT_BYTES (64ull * 1024 * 1024)
#define S3_MIN_PART_BYTES   (16ull * 1024 * 1024)
#define S3_CHECKSUM_HEADER  "x-amz-checksum-crc64nvme"

struct s3 {
    uv_loop_t *loop;
    struct mb_http_client *http;
    char *endpoint; /* "https://s3.us-east-1.amazonaws.com", "http://minio:9000" */
    char *host;     /* of the Host header, port included when not the scheme's own */
    char *bucket;
    char *prefix; /* "" or "a/b/" */
    char region[64];
    char *access_key;
    char *secret_key;
    char *session_token; /* NULL: none */
    int is_aws;          /* the endpoint follows the region */
    int path_style;
    int no_checksum;   /* the server refused x-amz-checksum headers */
    int64_t skew_ms;   /* server clock minus ours */
    unsigned parallel; /* parts in flight now; halved on SlowDown */
    unsigned n_calls;  /* whose timers are not closed yet */
    void (*closed_cb)(void *arg);
    void *closed_arg;
    int http_stopped;
};

/* s3_env.c: fills s from the URL behind s3:// and the environment. */
int s3_settings(struct s3 *s, const char *rest, struct mb_err *err);
void s3_settings_free(struct s3 *s);
/* Host and endpoint after a change of region. 0 or MB_ENOMEM. */
int s3_use_region(struct s3 *s, const char *region);

/* ---- s3_call.c: one request, signed and retried until the operation's deadline ---- */

struct s3_header {
    const char *name; /* lower-case, static */
    char value[S3_VALUE_BYTES];
};

struct s3_answer {
    int error;                           /* 0 or MB_E* */
    char code[64];                       /* S3's own error code, "" if none */
    char text[400];                      /* for people */
    const struct mb_http_response *http; /* on success */
    int ambiguous; /* an earlier attempt may have been carried out though no answer came */
};

struct s3_call;
typedef void (*s3_done_cb)(void *arg, const struct s3_answer *answer);

struct s3_request {
    const char *method;
    const char *key;                          /* relative to the prefix; NULL: the bucket itself */
    const char *query;                        /* canonical: encoded, sorted; NULL: none */
    struct s3_header headers[S3_MAX_HEADERS]; /* any order; host, date and hash are added */
    size_t n_headers;
    const void *body; /* borrowed until done */
    size_t body_len;
    int body_fd; /* -1: none; borrowed until done */
    uint64_t body_offset;
    size_t max_body_bytes; /* of the answer */
    int long_answer;       /* the server may think for minutes; a 200 may hold an error */
};

void s3_request_header(struct s3_request *r, const char *name, const char *value);
/* x-amz-checksum-crc64nvme, unless the server refused it. */
void s3_request_checksum(const struct s3 *s, struct s3_request *r, uint64_t crc);
/* Base64 of the big-endian value. */
void s3_checksum_text(uint64_t crc, char out[16]);
/* 0: done comes once from the loop, also after a cancel. */
int s3_call_start(struct mb_store_op *op, const struct s3_request *request, s3_done_cb done,
                  void *arg, struct s3_call **out, struct mb_err *err);
void s3_call_cancel(struct s3_call *call);
/* Copies an answer's failure into the operation's error. */
void s3_op_fail(struct mb_store_op *op, const struct s3_answer *a);
/* ETag header of an answer into out, "" if absent. */
void s3_answer_etag(const struct s3_answer *a, char *out, size_t size);

/* ---- the long operations; op->impl is theirs ---- */
int s3_upload_start(struct mb_store_op *op, struct mb_err *err);
void s3_upload_cancel(struct mb_store_op *op);
int s3_download_start(struct mb_store_op *op, struct mb_err *err);
void s3_download_cancel(struct mb_store_op *op);

/* What a cancel leaves of a store that closes; see store_s3.c. */
void s3_call_ended(struct s3 *s);

#endif
