/* The s3:// backend's parts: settings, one signed request with retries, uploads, downloads. */
#ifndef MOBULA_BASE_S3_S3_H
#define MOBULA_BASE_S3_S3_H

#include "base/http/client.h"
#include "base/s3/credentials.h"
#include "base/s3/internal.h"
#include "base/s3/s3_facts.h"
#include "base/s3/s3_turns.h"
#include "base/s3/s3_xml.h"

enum { S3_MAX_CONNECTIONS = 16, S3_FIRST_PARALLEL = 4, S3_MAX_HEADERS = 8, S3_VALUE_BYTES = 200 };
#define S3_SINGLE_PUT_BYTES (64ull * 1024 * 1024)
#define S3_PART_BYTES       (16ull * 1024 * 1024) /* unless the environment says otherwise */
#define S3_CHECKSUM_HEADER  "x-amz-checksum-crc64nvme"

struct s3 {
    uv_loop_t *loop;
    struct mb_http_client *http;
    char *endpoint; /* "https://s3.us-east-1.amazonaws.com", "http://minio:9000" */
    char *host;     /* of the Host header, port included when not the scheme's own */
    char *bucket;
    char *prefix; /* "" or "a/b/" */
    char region[64];
    int region_is_default; /* a profile may name another */
    struct s3_credentials *credentials;
    int is_aws; /* the endpoint follows the region */
    int path_style;
    struct s3_facts facts;
    int no_checksum;       /* the endpoint takes no CRC64NVME: facts.sum is another */
    int64_t skew_ms;       /* server clock minus ours */
    uint64_t stall_ms;     /* less than 1 kB/s for so long: another attempt on a new connection */
    uint64_t part_bytes;   /* of large files; more where there were too many */
    unsigned max_parallel; /* at most S3_MAX_CONNECTIONS */
    unsigned parallel;     /* transfers at once; halved on SlowDown, one more with each success */
    struct s3_turns turns;
    void *spare_buffers; /* s3_download.c's */
    uint64_t n_retries;  /* requests that were sent again */
    uint64_t told_ms; /* when it was last said that requests fail for long; 0: not in this outage */
    unsigned n_failing; /* calls between a fault and their end */
    unsigned n_calls;   /* whose timers are not closed yet */
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
    int has_crc; /* CRC64NVME of the body, or of the whole object */
    uint64_t crc;
    uint64_t delay_ms;     /* before the first attempt */
    size_t max_body_bytes; /* of the answer */
    int long_answer;       /* the server may think for minutes; a 200 may hold an error */
    /* Body of a 2xx answer, as of mb_http_request: head before its first byte, again for each
     * attempt, whose body begins anew. NULL: buffered. */
    int (*sink)(void *arg, const void *p, size_t n);
    int (*head)(void *arg, const struct mb_http_response *r);
    void *sink_arg;
};

void s3_request_header(struct s3_request *r, const char *name, const char *value);
/* The body goes out with its CRC64NVME, or with what the endpoint takes instead. */
void s3_request_checksum(struct s3_request *r, uint64_t crc);
/* Base64 of the big-endian value. */
void s3_checksum_text(uint64_t crc, char out[16]);
/* 0: done comes once from the loop, also after a cancel. */
int s3_call_start(struct mb_store_op *op, const struct s3_request *request, s3_done_cb done,
                  void *arg, struct s3_call **out, struct mb_err *err);
void s3_call_cancel(struct s3_call *call);
/* A cancel that waits for the answer to what was sent as a whole, for so long: a server may act on
 * a request after its connection ended, on a part also after its upload was aborted.
 * s3_call_cancel() ends the waiting. */
void s3_call_end(struct s3_call *call, uint64_t patience_ms);
/* Noted for the endpoint and said, once. */
void s3_has_no_conditions(struct s3 *s, const char *why);
/* After its sink said MB_HTTP_SINK_PAUSE or _FULL. */
void s3_call_resume(struct s3_call *call);
/* Copies an answer's failure into the operation's error. */
void s3_op_fail(struct mb_store_op *op, const struct s3_answer *a);
/* ETag header of an answer into out, "" if absent. */
void s3_answer_etag(const struct s3_answer *a, char *out, size_t size);

/* ---- the long operations; op->impl is theirs ---- */
int s3_upload_start(struct mb_store_op *op, struct mb_err *err);
void s3_upload_cancel(struct mb_store_op *op);
void s3_upload_go(struct mb_store_op *op, int gives_up);
void s3_upload_set_priority(struct mb_store_op *op);
int s3_download_start(struct mb_store_op *op, struct mb_err *err);
void s3_download_cancel(struct mb_store_op *op);
void s3_download_free_buffers(struct s3 *s); /* when no download is under way */
/* A transfer succeeded: one more at once, up to the connections. */
void s3_went_well(struct s3 *s);

/* Blocking, for the pool. MB_ESTATE: the file is shorter; MB_EIO; MB_ENOMEM. */
int s3_hash_range(int fd, uint64_t offset, uint64_t n, uint64_t *out);

/* ---- s3_abort.c: unfinished uploads; op->impl is its own ---- */
int s3_abort_start(struct mb_store_op *op, struct mb_err *err);
void s3_abort_cancel(struct mb_store_op *op);

/* What a cancel leaves of a store that closes; see store_s3.c. */
void s3_call_ended(struct s3 *s);

#endif
