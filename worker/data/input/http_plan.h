/*
 * What to do about a download that breaks: pure, so that tests need no server and no time.
 *
 * A download is one GET, and after each interruption another one with a Range that begins at the
 * first byte that is missing. It goes on only if the server still has the same bytes: equal ETag,
 * else equal Last-Modified, and equal length. A server that ignores Range sends all again; what is
 * known is then dropped. Source: RFC 9110, sections 8.8, 13 and 14.
 */
#ifndef MOBULA_WORKER_DATA_INPUT_HTTP_PLAN_H
#define MOBULA_WORKER_DATA_INPUT_HTTP_PLAN_H

#include <stdint.h>
#include "base/err.h"

enum { MB_HTTP_PLAN_HEADER_MAX = 256, MB_HTTP_PLAN_FIRST_TRIES = 3 };

struct mb_http_plan {
    uint64_t outage_ms;  /* without a byte for so long: give up */
    uint64_t offset;     /* of the next byte that is missing */
    uint64_t skip_bytes; /* of the answer that runs: known already */
    int has_total;
    uint64_t total_bytes;
    char etag[MB_HTTP_PLAN_HEADER_MAX];     /* of the first answer; "" if it had none */
    char modified[MB_HTTP_PLAN_HEADER_MAX]; /* Last-Modified */
    int has_answer;                         /* there was a 2xx */
    unsigned n_failures;                    /* since the last byte */
    uint64_t failing_since_ms;
};

/* Headers of an answer, NULL where absent. */
struct mb_http_plan_head {
    long status;
    const char *etag;
    const char *modified;
    const char *content_range;
    const char *content_length;
};

enum mb_http_plan_next { MB_HTTP_PLAN_END, MB_HTTP_PLAN_RETRY, MB_HTTP_PLAN_FAIL };

void mb_http_plan_init(struct mb_http_plan *p, uint64_t offset, uint64_t outage_ms);
/* "Range: bytes=N-" into out, or "" when all is wanted. */
const char *mb_http_plan_range(const struct mb_http_plan *p, char out[64]);
/* A 2xx answer begins: 0 and skip_bytes set; MB_ESTATE if it is not the same resource any more. */
int mb_http_plan_answer(struct mb_http_plan *p, const struct mb_http_plan_head *h,
                        struct mb_err *err);
/* n bytes of it came: how many of them, at the front, are to be dropped. */
uint64_t mb_http_plan_bytes(struct mb_http_plan *p, uint64_t n);
/* The request ended. code: MB_E* of the transfer with its detail, or 0 and the status of h. RETRY:
 * again in *delay_ms; retry_after_s is the header's number or 0; random: any 64 bits. FAIL: err has
 * what happened in both cases, and if it FAILs what to do. */
enum mb_http_plan_next mb_http_plan_done(struct mb_http_plan *p, int code, const char *detail,
                                         const struct mb_http_plan_head *h, uint64_t retry_after_s,
                                         uint64_t now_ms, uint64_t random, uint64_t *delay_ms,
                                         struct mb_err *err);

/* "bytes 7-99/100" or "bytes 7-99/" "*": 0, or MB_EINVAL. */
int mb_http_content_range(const char *s, uint64_t *first, int *has_total, uint64_t *total_bytes);

#endif
