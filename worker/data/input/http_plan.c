/*
 * The plan of a download; see http_plan.h.
 *
 * 1. The first 2xx answer tells length, ETag and date; later ones are compared with them.
 * 2. A transfer that ends too early, that cannot be reached, or whose server is busy is tried again
 *    after a back-off with jitter, for outage_ms without a byte. Before the first answer only a few
 *    times: a wrong name should be told at once.
 * 3. Anything else (404, 403, a certificate) is final, in words that say what to do.
 */
#include "worker/data/input/http_plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/clock.h"
#include "base/str.h"

enum { BACKOFF_BASE_MS = 250, BACKOFF_CAP_MS = 15000, RETRY_AFTER_MAX_S = 60 };

void mb_http_plan_init(struct mb_http_plan *p, uint64_t offset, uint64_t outage_ms)
{
    *p = (struct mb_http_plan){.offset = offset, .outage_ms = outage_ms};
}

const char *mb_http_plan_range(const struct mb_http_plan *p, char out[64])
{
    out[0] = '\0';
    if (p->offset > 0)
        snprintf(out, 64, "Range: bytes=%" PRIu64 "-", p->offset);
    return out;
}

/* Digits at *s, moved behind them. */
static int number(const char **s, uint64_t *out)
{
    uint64_t v = 0;
    const char *p = *s;

    if (*p < '0' || *p > '9')
        return MB_EINVAL;
    for (; *p >= '0' && *p <= '9'; p++) {
        if (v > (UINT64_MAX - 9) / 10)
            return MB_EINVAL;
        v = 10 * v + (uint64_t)(*p - '0');
    }
    *s = p;
    *out = v;
    return 0;
}

int mb_http_content_range(const char *s, uint64_t *first, int *has_total, uint64_t *total_bytes)
{
    uint64_t last;

    *has_total = 0;
    *total_bytes = 0;
    if (!mb_starts_with(s, "bytes "))
        return MB_EINVAL;
    s += 6;
    if (number(&s, first) != 0 || *s++ != '-' || number(&s, &last) != 0 || *s++ != '/' ||
        last < *first)
        return MB_EINVAL;
    if (strcmp(s, "*") == 0)
        return 0;
    *has_total = 1;
    return number(&s, total_bytes) != 0 || *s != '\0' || *total_bytes <= last ? MB_EINVAL : 0;
}

static int changed(const char *what, struct mb_err *err)
{
    return mb_err_set(err, MB_ESTATE,
                      "the server's file changed while it was read (another %s); run again", what);
}

/* Length and, of a part, its first byte. */
static int measure(const struct mb_http_plan_head *h, uint64_t *first, int *has_total,
                   uint64_t *total_bytes, struct mb_err *err)
{
    *first = 0;
    *has_total = 0;
    if (h->status == 206) {
        if (h->content_range == NULL ||
            mb_http_content_range(h->content_range, first, has_total, total_bytes) != 0)
            return mb_err_set(err, MB_EPROTO,
                              "the server sent a part of the file without a valid Content-Range");
    } else if (h->content_length != NULL) {
        const char *s = h->content_length;
        *has_total = number(&s, total_bytes) == 0 && *s == '\0';
    }
    return 0;
}

static void keep(char *out, const char *value)
{
    snprintf(out, MB_HTTP_PLAN_HEADER_MAX, "%s", value != NULL ? value : "");
}

/* A value too long to keep whole is compared as far as it is kept. */
static int differs(const char *kept, const char *value)
{
    return kept[0] != '\0' && value != NULL &&
           strncmp(kept, value, MB_HTTP_PLAN_HEADER_MAX - 1) != 0;
}

static int compare(const struct mb_http_plan *p, const struct mb_http_plan_head *h, int has_total,
                   uint64_t total_bytes, struct mb_err *err)
{
    if (differs(p->etag, h->etag))
        return changed("ETag", err);
    /* Behind one name may be servers whose clocks differ: the ETag alone decides if there is one.
     */
    if ((p->etag[0] == '\0' || h->etag == NULL) && differs(p->modified, h->modified))
        return changed("date", err);
    if (p->has_total && has_total && p->total_bytes != total_bytes)
        return changed("length", err);
    if (p->offset > 0 && p->etag[0] == '\0' && p->modified[0] == '\0' && !p->has_total)
        return mb_err_set(err, MB_ESTATE,
                          "the connection was lost, and the server names neither ETag, date nor "
                          "length: going on could mix two files; download it first");
    return 0;
}

int mb_http_plan_answer(struct mb_http_plan *p, const struct mb_http_plan_head *h,
                        struct mb_err *err)
{
    uint64_t first;
    uint64_t total_bytes = 0;
    int has_total;
    int rc = measure(h, &first, &has_total, &total_bytes, err);

    if (rc == 0 && p->has_answer)
        rc = compare(p, h, has_total, total_bytes, err);
    if (rc != 0)
        return rc;
    if (first > p->offset)
        return mb_err_set(err, MB_EPROTO,
                          "byte %" PRIu64 " was asked for, the server begins at %" PRIu64,
                          p->offset, first);
    if (!p->has_answer) {
        keep(p->etag, h->etag);
        keep(p->modified, h->modified);
    }
    if (has_total) {
        p->has_total = 1;
        p->total_bytes = total_bytes;
    }
    p->has_answer = 1;
    p->skip_bytes = p->offset - first;
    return 0;
}

uint64_t mb_http_plan_bytes(struct mb_http_plan *p, uint64_t n)
{
    uint64_t dropped = n < p->skip_bytes ? n : p->skip_bytes;

    p->skip_bytes -= dropped;
    p->offset += n - dropped;
    if (n > dropped)
        p->n_failures = 0;
    return dropped;
}

static int is_passing(int code, long status)
{
    if (code != 0)
        return code == MB_EUNAVAIL || code == MB_ETIMEOUT;
    return status == 408 || status == 425 || status == 429 || status == 500 || status == 502 ||
           status == 503 || status == 504;
}

static enum mb_http_plan_next final(int code, const char *detail, long status, struct mb_err *err)
{
    if (code == MB_EDENIED)
        mb_err_set(err, code, "%s; an authority of your own is named in SSL_CERT_FILE", detail);
    else if (code != 0)
        mb_err_set(err, code, "%s", detail);
    else if (status == 401 || status == 403 || status == 407)
        mb_err_set(err, MB_EDENIED,
                   "HTTP %ld: the server refuses; give an address that may be read, such as a "
                   "signed one",
                   status);
    else if (status == 404 || status == 410)
        mb_err_set(err, MB_ENOENT, "HTTP %ld: the server has no such file; check the address",
                   status);
    else if (status / 100 == 3)
        mb_err_set(err, MB_EPROTO, "HTTP %ld: a redirection that leads nowhere", status);
    else
        mb_err_set(err, status / 100 == 5 ? MB_EUNAVAIL : MB_EPROTO,
                   "HTTP %ld: the server does not send the file", status);
    return MB_HTTP_PLAN_FAIL;
}

static enum mb_http_plan_next again(struct mb_http_plan *p, int code, const char *detail,
                                    long status, uint64_t retry_after_s, uint64_t now_ms,
                                    uint64_t random, uint64_t *delay_ms, struct mb_err *err)
{
    char what[32];
    uint64_t since_ms;

    if (p->n_failures++ == 0)
        p->failing_since_ms = now_ms;
    *delay_ms = mb_backoff_ms(p->n_failures - 1, BACKOFF_BASE_MS, BACKOFF_CAP_MS, random);
    if (retry_after_s > 0)
        *delay_ms += 1000 * (retry_after_s < RETRY_AFTER_MAX_S ? retry_after_s : RETRY_AFTER_MAX_S);
    since_ms = now_ms - p->failing_since_ms;
    snprintf(what, sizeof(what), "HTTP %ld", status);
    mb_err_set(err, code != 0 ? code : MB_EUNAVAIL, "%s after %" PRIu64 " bytes",
               code != 0 ? detail : what, p->offset);
    if ((p->has_answer || p->n_failures < MB_HTTP_PLAN_FIRST_TRIES) &&
        since_ms + *delay_ms <= p->outage_ms)
        return MB_HTTP_PLAN_RETRY;
    mb_err_set(err, code != 0 ? code : MB_EUNAVAIL,
               "%s after %" PRIu64 " bytes, %u tries in %" PRIu64 " s; %s",
               code != 0 ? detail : what, p->offset, p->n_failures, since_ms / 1000,
               p->has_answer ? "run again later" : "check the address and the network");
    return MB_HTTP_PLAN_FAIL;
}

enum mb_http_plan_next mb_http_plan_done(struct mb_http_plan *p, int code, const char *detail,
                                         const struct mb_http_plan_head *h, uint64_t retry_after_s,
                                         uint64_t now_ms, uint64_t random, uint64_t *delay_ms,
                                         struct mb_err *err)
{
    long status = code == 0 ? h->status : 0;
    int is_short = p->has_total && p->offset < p->total_bytes;

    *delay_ms = 0;
    if (code == 0 && status / 100 == 2 && !is_short)
        return MB_HTTP_PLAN_END;
    /* Nothing is left behind the last byte: what a server says that sent all and no length. */
    if (status == 416 && p->has_answer && p->offset > 0 && !is_short)
        return MB_HTTP_PLAN_END;
    if (code == 0 && status / 100 == 2)
        return again(p, MB_EUNAVAIL, "the connection ended too early", 0, 0, now_ms, random,
                     delay_ms, err);
    if (is_passing(code, status))
        return again(p, code, detail, status, retry_after_s, now_ms, random, delay_ms, err);
    return final(code, detail, status, err);
}
