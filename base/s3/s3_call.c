/*
 * One S3 request.
 *
 * 1. start: what the request needs is copied; the first attempt follows at once, or after delay_ms.
 * 2. attempt: date, host and payload hash are added, all is signed, the HTTP request goes out with
 *    what is left of the operation's deadline.
 * 3. The answer is judged: success, a refusal, or a fault worth another attempt after a back-off
 *    with jitter. A wrong clock (the server's Date is taken), a wrong region (the server names its
 *    own) and credentials that ended are each corrected once. A checksum that the endpoint may not
 *    know is replaced by a weaker one; that is remembered when the weaker one was taken.
 * 4. done runs once, from the loop; then the timer closes and the call is freed.
 * Failures: what the deadline cuts off reports the last fault. Texts carry S3's code and message,
 * never a key. An attempt whose answer was lost marks the call ambiguous: a later failed condition
 * may be our own success, which the caller must check.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/s3/s3.h"
#include "base/s3/s3_sum.h"
#include "base/s3/sigv4.h"
#include "base/str.h"

enum {
    BACKOFF_BASE_MS = 100,
    BACKOFF_CAP_MS = 20000,
    TELL_AFTER_MS = 5000, /* of failing */
    TELL_EVERY_MS = 60000,
    CONNECT_MS = 10000,
    MIN_CONNECT_MS = 1000,  /* however little time is left: a handshake over a long way */
    MAX_SKEW_MS = 300000,   /* servers allow 15 minutes */
    LONG_STALL_FACTOR = 20, /* of an answer that the server may think about */
    MAX_CHECKSUM_ATTEMPTS =
        3 /* a transfer that arrives broken is repeated, a changed file is not */
};

struct s3_call {
    struct s3 *s3;
    struct mb_store_op *op;
    struct s3_request request;
    char *path;  /* encoded: "/bucket/prefix/key" or "/prefix/key" */
    char *query; /* "" when none */
    uv_timer_t timer;
    struct mb_http_fetch *fetch;
    struct s3_wait wait; /* for credentials */
    unsigned keys_generation;
    int keys_rejected;
    enum s3_sum sum; /* what this request is tried with */
    uv_work_t work;  /* computes it, where the caller did not */
    enum s3_sum computed;
    char sum_text[S3_SUM_TEXT_BYTES];
    int sum_rc;
    int is_refused; /* nothing is sent */
    unsigned attempt;
    int was_tried;             /* the next attempt is a retry */
    uint64_t failing_since_ms; /* 0: not failing */
    uint64_t began_ms;         /* the last attempt */
    uint64_t silent_ms;        /* ... it heard nothing of the store for so long, when it failed */
    unsigned n_bad_checksums;
    int canceled;
    int is_waited_for; /* canceled, but its answer is still to come */
    int is_fresh; /* the last attempt found no server: the next one asks for its address anew */
    int clock_corrected;
    int region_corrected;
    struct s3_answer answer;
    s3_done_cb done;
    void *arg;
};

void s3_request_header(struct s3_request *r, const char *name, const char *value)
{
    struct s3_header *h = &r->headers[r->n_headers++];
    h->name = name;
    snprintf(h->value, sizeof h->value, "%s", value);
}

void s3_checksum_text(uint64_t crc, char out[16])
{
    uint8_t bytes[8];
    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(crc >> (56 - 8 * i));
    mb_base64(bytes, sizeof bytes, out);
}

void s3_request_checksum(struct s3_request *r, uint64_t crc)
{
    r->has_crc = 1;
    r->crc = crc;
}

void s3_op_fail(struct mb_store_op *op, const struct s3_answer *a)
{
    if (op->err.code == 0)
        mb_err_set(&op->err, a->error, "%s", a->text);
}

void s3_answer_etag(const struct s3_answer *a, char *out, size_t size)
{
    const char *etag = a->http ? a->http->header(a->http, "ETag") : NULL;
    snprintf(out, size, "%s", etag ? etag : "");
}

/* ---- the end ---- */

static void on_timer_closed(uv_handle_t *h)
{
    struct s3_call *call = h->data;
    struct s3 *s = call->s3;
    mb_free(call->path);
    mb_free(call->query);
    mb_free(call);
    s3_call_ended(s);
}

/* When no call fails any more it was an outage that is over: the next one is told of anew. */
static void fails_no_more(struct s3_call *call)
{
    if (call->failing_since_ms != 0 && --call->s3->n_failing == 0)
        call->s3->told_ms = 0;
    call->failing_since_ms = 0;
}

static void finish(struct s3_call *call)
{
    fails_no_more(call);
    uv_close((uv_handle_t *)&call->timer, on_timer_closed);
    call->done(call->arg, &call->answer);
}

/* ---- one attempt ---- */

static void on_response(void *arg, const struct mb_http_response *r);

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct mb_sigv4_header *)a)->name,
                  ((const struct mb_sigv4_header *)b)->name);
}

/* Header lines for the HTTP client, each owned; freed by free_lines. */
struct lines {
    char *line[S3_MAX_HEADERS + 7];
    size_t n;
};

static void free_lines(struct lines *lines)
{
    for (size_t i = 0; i < lines->n; i++) {
        mb_secret_wipe(lines->line[i], strlen(lines->line[i])); /* a session token among them */
        mb_free(lines->line[i]);
    }
}

static int add_line(struct lines *lines, const char *name, const char *value)
{
    char *line = mb_asprintf("%s: %s", name, value);
    if (!line)
        return MB_ENOMEM;
    lines->line[lines->n++] = line;
    return 0;
}

static int sign(struct s3_call *call, const struct mb_s3_keys *keys, struct lines *lines)
{
    struct s3 *s = call->s3;
    struct mb_sigv4_header headers[S3_MAX_HEADERS + 5];
    enum s3_sum sum = s3_sum_of_request(&call->request, call->sum);
    char crc[16];
    struct mb_buf authorization = {0};
    char date[17];
    size_t n = 0;
    const char *hash = MB_SIGV4_UNSIGNED;
    if (call->request.body_len == 0) /* some servers insist on the hash of nothing */
        hash = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    mb_sigv4_date((uint64_t)((int64_t)mb_unix_ms() + s->skew_ms), date);
    headers[n++] = (struct mb_sigv4_header){"host", s->host};
    headers[n++] = (struct mb_sigv4_header){"x-amz-content-sha256", hash};
    headers[n++] = (struct mb_sigv4_header){"x-amz-date", date};
    if (keys->session_token)
        headers[n++] =
            (struct mb_sigv4_header){"x-amz-security-token", mb_secret_text(keys->session_token)};
    for (size_t i = 0; i < call->request.n_headers; i++) {
        const struct s3_header *h = &call->request.headers[i];
        if (!s3_sum_hides(&call->request, i, call->sum))
            headers[n++] = (struct mb_sigv4_header){h->name, h->value};
    }
    s3_checksum_text(call->request.crc, crc);
    if (sum != S3_SUM_NONE)
        headers[n++] = (struct mb_sigv4_header){s3_sum_header(sum),
                                                sum == S3_SUM_CRC64NVME ? crc : call->sum_text};
    qsort(headers, n, sizeof *headers, by_name);
    struct mb_sigv4_request request = {.method = call->request.method,
                                       .path = call->path,
                                       .query = call->query,
                                       .headers = headers,
                                       .n_headers = n,
                                       .payload_hash = hash,
                                       .amz_date = date,
                                       .region = s->region,
                                       .access_key = keys->access_key,
                                       .secret_key = mb_secret_text(keys->secret_key)};
    int rc = mb_sigv4_authorization(&request, &authorization);
    if (rc == 0)
        rc = add_line(lines, "Authorization", mb_buf_str(&authorization));
    for (size_t i = 0; rc == 0 && i < n; i++) {
        if (strcmp(headers[i].name, "host") != 0)
            rc = add_line(lines, headers[i].name, headers[i].value);
    }
    mb_buf_close(&authorization);
    return rc;
}

static void on_retry(uv_timer_t *timer);

static void compute_sum(uv_work_t *work)
{
    struct s3_call *call = work->data;
    call->sum_rc = s3_sum_compute(&call->request, call->computed, call->sum_text);
}

static void on_sum(uv_work_t *work, int status)
{
    struct s3_call *call = work->data;
    if (status == 0 && call->sum_rc != 0 && !call->canceled) {
        call->answer.error = call->sum_rc;
        snprintf(call->answer.text, sizeof call->answer.text,
                 "what is to be sent cannot be read for its checksum");
        finish(call);
        return;
    }
    on_retry(&call->timer);
}

/* 1 if a checksum is computed first. The caller's own is that of all endpoints but a few. */
static int start_sum(struct s3_call *call)
{
    enum s3_sum sum = s3_sum_of_request(&call->request, call->sum);
    if (sum == S3_SUM_NONE || sum == S3_SUM_CRC64NVME || sum == call->computed)
        return 0;
    call->computed = sum;
    call->work.data = call;
    return uv_queue_work(call->s3->loop, &call->work, compute_sum, on_sum) == 0;
}

/* libcurl repeats a request by itself on a connection that was used before (was_repeated in
 * base/http/client.h), which makes its answer an ambiguous one. Create must not be repeated at all:
 * the first one may have been carried out, and its upload would be nobody's. */
static int creates_upload(const struct s3_request *r)
{
    return strcmp(r->method, "POST") == 0 && r->query != NULL && strcmp(r->query, "uploads=") == 0;
}

/* What is left of the outage that the operation may see. */
static uint64_t outage_left_ms(const struct s3_call *call, uint64_t now)
{
    uint64_t end = (call->failing_since_ms ? call->failing_since_ms : now) + call->op->outage_ms;
    return end > now ? end - now : 0;
}

/* A bound of an attempt where the outage has one for all: not far beyond its end. */
static uint64_t bound_ms(const struct s3_call *call, uint64_t ms, uint64_t at_least)
{
    uint64_t left = outage_left_ms(call, call->began_ms);
    if (!call->op->is_outage_of_all || left >= ms)
        return ms;
    return left > at_least ? left : at_least;
}

static int attempt(struct s3_call *call, struct mb_err *err)
{
    struct s3 *s = call->s3;
    struct lines lines = {.n = 0};
    uint64_t now = mb_mono_ms();
    if (start_sum(call))
        return 0; /* on_sum follows */
    const struct mb_s3_keys *keys =
        s3_credentials_get(s->credentials, &call->wait, &call->keys_generation);
    if (!keys)
        return 0; /* on_keys follows */
    call->began_ms = now;
    char *url =
        mb_asprintf("%s%s%s%s", s->endpoint, call->path, call->query[0] ? "?" : "", call->query);
    int rc = url ? sign(call, keys, &lines) : MB_ENOMEM;
    if (rc != 0) {
        mb_err_set(err, rc, "s3: out of memory");
    } else {
        struct mb_http_request request = {
            .method = call->request.method,
            .url = url,
            .headers = (const char *const *)lines.line,
            .body = call->request.body,
            .body_len = call->request.body_len,
            .body_fd = call->request.body_fd,
            .body_offset = call->request.body_offset,
            .max_body_bytes = call->request.max_body_bytes,
            .timeout_ms = call->op->deadline_ms > now ? call->op->deadline_ms - now : 1,
            .connect_timeout_ms = bound_ms(call, CONNECT_MS, MIN_CONNECT_MS),
            .stall_timeout_ms = bound_ms(call, s->stall_ms, MB_STORE_ANSWER_MS) *
                                (call->request.long_answer ? LONG_STALL_FACTOR : 1),
            .sink = call->request.sink,
            .head = call->request.head,
            .sink_arg = call->request.sink_arg,
            .takes_http_proxy = 1,
            .is_fresh = call->is_fresh || creates_upload(&call->request)};
        rc = mb_http_fetch(s->http, &request, on_response, call, &call->fetch, err);
    }
    if (rc == 0) {
        s->n_retries += call->was_tried ? 1 : 0;
        call->was_tried = 1;
    }
    free_lines(&lines);
    mb_free(url);
    return rc;
}

static void say_no_conditions(struct s3_call *call)
{
    call->answer.error = MB_EUNSUPPORTED;
    snprintf(call->answer.text, sizeof call->answer.text,
             "%.200s does not implement conditional writes", call->s3->host);
}

static void on_retry(uv_timer_t *timer)
{
    struct s3_call *call = timer->data;
    struct mb_err err;
    if (call->canceled) {
        call->answer.error = MB_ECANCELED;
        snprintf(call->answer.text, sizeof call->answer.text, "cancelled");
    } else if (call->is_refused) {
        say_no_conditions(call);
    } else if (attempt(call, &err) == 0) {
        return;
    } else {
        call->answer.error = err.code;
        snprintf(call->answer.text, sizeof call->answer.text, "%.300s", err.text);
    }
    finish(call);
}

static void retry_after(struct s3_call *call, uint64_t delay_ms)
{
    uv_timer_start(&call->timer, on_retry, delay_ms, 0);
}

/* Whoever waits for the store should know why, and need not be told of each request. */
static void tell_of_failing(const struct s3_call *call, uint64_t now, uint64_t delay_ms)
{
    struct s3 *s = call->s3;
    uint64_t failing_ms = now - call->failing_since_ms;
    if (failing_ms + delay_ms < TELL_AFTER_MS ||
        (s->told_ms != 0 && now - s->told_ms < TELL_EVERY_MS))
        return;
    s->told_ms = now;
    mb_warn("s3", "%.200s: failing for %.1f s, asking again in %.1f s: %s", s->host,
            (double)failing_ms / 1000, (double)delay_ms / 1000, call->answer.text);
}

/* 1: the call goes on after a pause. 0: it has come to its end. */
static int try_later(struct s3_call *call)
{
    uint64_t now = mb_mono_ms();
    uint64_t delay =
        mb_backoff_ms(call->attempt++, BACKOFF_BASE_MS, BACKOFF_CAP_MS, mb_random_u64());
    if (call->failing_since_ms == 0) {
        call->failing_since_ms = now - call->silent_ms;
        call->s3->n_failing++;
    }
    call->silent_ms = 0;
    if (call->op->outage_ms != 0) { /* the last try is at its very end */
        uint64_t left_ms = outage_left_ms(call, now);
        delay = delay < left_ms ? delay : left_ms;
        if (left_ms == 0) {
            call->answer.error = MB_EUNAVAIL;
            return 0;
        }
    }
    if (now + delay >= call->op->deadline_ms) {
        if (call->answer.error == MB_EUNAVAIL && now >= call->op->deadline_ms)
            call->answer.error = MB_ETIMEOUT;
        return 0;
    }
    tell_of_failing(call, now, delay);
    mb_debug("s3", "retry in %llu ms: %s", (unsigned long long)delay, call->answer.text);
    retry_after(call, delay);
    return 1;
}

/* The credentials are there, or cannot be had. */
static void on_keys(void *arg, const struct mb_err *err)
{
    struct s3_call *call = arg;
    if (err->code == 0) {
        on_retry(&call->timer);
        return;
    }
    call->answer.error = err->code;
    snprintf(call->answer.text, sizeof call->answer.text, "%.390s", err->text);
    if ((err->code != MB_EUNAVAIL && err->code != MB_ETIMEOUT) || !try_later(call))
        finish(call);
}

/* ---- judging an answer ---- */

static int code_is(const struct s3_call *call, const char *code)
{
    return strcmp(call->answer.code, code) == 0;
}

/* Keys that were good once: temporary ones at their end, and rotated ones. */
static int is_expired(const struct s3_call *call)
{
    return code_is(call, "ExpiredToken") || code_is(call, "ExpiredTokenException") ||
           code_is(call, "TokenRefreshRequired") || code_is(call, "InvalidAccessKeyId") ||
           code_is(call, "InvalidClientTokenId") || code_is(call, "InvalidTokenId");
}

static int error_of_status(const struct s3_call *call, long status)
{
    if (status == 404)
        return MB_ENOENT;
    if (status == 412)
        return MB_EEXIST;
    if (status == 401 || status == 403 || is_expired(call) || code_is(call, "InvalidToken"))
        return MB_EDENIED;
    if (status == 501)
        return MB_EUNSUPPORTED;
    if (status >= 500 || status == 429 || status == 408 || code_is(call, "SlowDown") ||
        code_is(call, "InternalError") || code_is(call, "ServiceUnavailable"))
        return MB_EUNAVAIL;
    if (code_is(call, "BadDigest") || code_is(call, "XAmzContentChecksumMismatch"))
        return MB_ECORRUPT;
    return MB_EPROTO;
}

/* Fills the answer from the HTTP result; the XML of an error is looked at when there is one. */
static void read_answer(struct s3_call *call, const struct mb_http_response *r,
                        struct mb_s3_xml_error *xml)
{
    struct s3_answer *a = &call->answer;
    memset(xml, 0, sizeof *xml);
    a->http = NULL;
    a->code[0] = '\0';
    if (r->error != 0) {
        a->error = call->canceled ? MB_ECANCELED : r->error;
        snprintf(a->text, sizeof a->text, "%s", r->detail);
        return;
    }
    int is_error = r->status / 100 != 2;
    if (is_error || call->request.long_answer)
        is_error |= mb_s3_xml_error_parse(r->body, r->body_len, xml);
    if (!is_error) {
        a->error = 0;
        a->text[0] = '\0';
        a->http = r;
        return;
    }
    snprintf(a->code, sizeof a->code, "%s", xml->code);
    a->error = error_of_status(call, r->status);
    snprintf(a->text, sizeof a->text, "S3 answered %ld%s%s%s%.200s", r->status,
             xml->code[0] ? " " : "", xml->code, xml->message[0] ? ": " : "", xml->message);
}

/* It becomes a part of the host's name at AWS: what is no region's name must not lead elsewhere. */
static int is_region(const char *s)
{
    size_t n = strspn(s, "abcdefghijklmnopqrstuvwxyz0123456789-");
    return n > 0 && n < 40 && s[n] == '\0';
}

/* How long the store was not heard of before an attempt ran out of time: since its beginning, if it
 * got no connection, else for as long as it may be silent. */
static uint64_t silence_ms(const struct s3_call *call, const struct mb_http_response *r)
{
    uint64_t all = mb_mono_ms() - call->began_ms;
    uint64_t bound = bound_ms(call, call->s3->stall_ms, MB_STORE_ANSWER_MS);
    if (!call->op->is_outage_of_all || r->error != MB_ETIMEOUT)
        return 0;
    return !r->was_sent || all < bound ? all : bound;
}

/* An answer to HEAD has no body that would say what is wrong. */
static int is_mute(const struct s3_call *call)
{
    return strcmp(call->request.method, "HEAD") == 0 && !call->answer.code[0];
}

/* 1 if the server's clock was taken over. */
static int learn_clock(struct s3_call *call, const struct mb_http_response *r)
{
    struct s3 *s = call->s3;
    const char *date = r->header(r, "Date");
    struct tm tm = {0};
    if (call->clock_corrected || !date ||
        !(code_is(call, "RequestTimeTooSkewed") || (r->status == 403 && is_mute(call))) ||
        !strptime(date, "%a, %d %b %Y %H:%M:%S", &tm)) /* RFC 9110 section 5.6.7 */
        return 0;
    int64_t skew_ms = (int64_t)timegm(&tm) * 1000 - (int64_t)mb_unix_ms();
    int64_t change_ms = skew_ms - s->skew_ms;
    if (is_mute(call) && change_ms < MAX_SKEW_MS && change_ms > -MAX_SKEW_MS)
        return 0; /* it was refused for another reason */
    call->clock_corrected = 1;
    s->skew_ms = skew_ms;
    mb_warn("s3", "clock differs from the server's skew_ms=%lld", (long long)s->skew_ms);
    return 1;
}

/* 1 if something about us was put right and the request should go out again at once. */
static int correct_ourselves(struct s3_call *call, const struct mb_http_response *r,
                             const struct mb_s3_xml_error *xml)
{
    struct s3 *s = call->s3;
    if (learn_clock(call, r))
        return 1;
    if ((is_expired(call) || (r->status == 400 && is_mute(call))) && !call->keys_rejected &&
        s3_credentials_reject(s->credentials, call->keys_generation)) {
        call->keys_rejected = 1;
        mb_info("s3", "credentials were refused (%s): fetching them anew", call->answer.code);
        return 1;
    }
    const char *region = r->header(r, "x-amz-bucket-region");
    if (!region || !*region)
        region = xml->region;
    if ((r->status == 301 || r->status == 307 || r->status == 400) && is_region(region) &&
        strcmp(region, s->region) != 0 && !call->region_corrected) {
        call->region_corrected = 1;
        mb_warn("s3", "bucket %s is in region %.40s, not %s: set AWS_REGION to save a request",
                s->bucket, region, s->region);
        return s3_use_region(s, region) == 0;
    }
    return 0;
}

static int worth_retrying(struct s3_call *call, const struct mb_http_response *r)
{
    if (r->error == MB_EUNAVAIL || r->error == MB_ETIMEOUT || r->error == MB_EPROTO)
        return 1;
    if (r->error != 0)
        return 0;
    if (call->answer.error == MB_ECORRUPT)
        return ++call->n_bad_checksums < MAX_CHECKSUM_ATTEMPTS;
    return call->answer.error == MB_EUNAVAIL || code_is(call, "RequestTimeout") ||
           code_is(call, "ConditionalRequestConflict") || code_is(call, "OperationAborted");
}

static void slow_down(struct s3 *s)
{
    if (s->parallel > 1)
        s->parallel /= 2;
}

static int is_conditional(const struct s3_request *r)
{
    for (size_t i = 0; i < r->n_headers; i++) {
        if (mb_starts_with(r->headers[i].name, "if-"))
            return strcmp(r->method, "PUT") == 0 || strcmp(r->method, "POST") == 0;
    }
    return 0;
}

/* What the endpoint takes is known from what it took. */
static void learn_from_success(struct s3_call *call)
{
    struct s3 *s = call->s3;
    if (!s3_sum_is_in(&call->request) || (s->facts.sum_is_proven && call->sum <= s->facts.sum))
        return;
    if (call->sum != s->facts.sum)
        mb_warn("s3", "%s takes no %s checksums: uploads go with %s", s->host,
                s3_sum_name(s->facts.sum), s3_sum_name(call->sum));
    s->facts.sum = call->sum;
    s->facts.sum_is_proven = 1;
    s->no_checksum = call->sum != S3_SUM_CRC64NVME;
    s3_facts_store(s->endpoint, &s->facts);
}

/* 1 if the request goes out again with a weaker checksum. */
static int weaken_sum(struct s3_call *call, long status)
{
    if (!s3_sum_is_in(&call->request) ||
        !s3_sum_is_refused(&call->s3->facts, call->sum, status, call->answer.code))
        return 0;
    call->sum++;
    return 1;
}

void s3_has_no_conditions(struct s3 *s, const char *why)
{
    if (s->facts.no_conditions)
        return;
    s->facts.no_conditions = 1;
    s3_facts_store(s->endpoint, &s->facts);
    mb_warn("s3",
            "%s DOES NOT IMPLEMENT CONDITIONAL WRITES (%s): nothing but order keeps two writers of "
            "one prefix apart there",
            s->host, why);
}

/* What an answer to a conditional write says of the endpoint. Whatever else a 501 may mean: the
 * write did not happen. */
static void learn_conditions(struct s3_call *call, long status)
{
    struct s3 *s = call->s3;
    if (!is_conditional(&call->request))
        return;
    if (status == 501 || code_is(call, "NotImplemented")) {
        s3_has_no_conditions(s, call->answer.text);
        say_no_conditions(call);
    } else if (status == 412 && !s->facts.conditions_are_proven) {
        s->facts.conditions_are_proven = 1;
        s3_facts_store(s->endpoint, &s->facts);
    }
}

static void on_response(void *arg, const struct mb_http_response *r)
{
    struct s3_call *call = arg;
    struct mb_s3_xml_error xml;
    call->fetch = NULL;
    call->silent_ms = silence_ms(call, r);
    call->s3->n_retries += r->was_repeated ? 1 : 0;
    read_answer(call, r, &xml);
    call->is_fresh = r->error == MB_EUNAVAIL || r->error == MB_ETIMEOUT;
    if (call->is_fresh || r->was_repeated || r->status >= 500 || r->status == 408)
        call->answer.ambiguous = 1;
    if (call->answer.error == 0)
        learn_from_success(call);
    if (call->answer.error == 0 || call->canceled) {
        finish(call);
        return;
    }
    if (r->error == 0 && (correct_ourselves(call, r, &xml) || weaken_sum(call, r->status))) {
        retry_after(call, 0);
        return;
    }
    learn_conditions(call, r->status);
    if (r->status == 503 || r->status == 429)
        slow_down(call->s3);
    if (!worth_retrying(call, r) || !try_later(call))
        finish(call);
}

/* ---- start ---- */

static int encode_path(struct s3 *s, const char *key, struct mb_buf *out)
{
    int rc = mb_buf_puts(out, "/");
    if (rc == 0 && s->path_style)
        rc = mb_buf_url(out, s->bucket, 0);
    if (rc == 0 && key && s->path_style)
        rc = mb_buf_puts(out, "/");
    if (rc == 0 && key)
        rc = mb_buf_url(out, s->prefix, 1);
    return rc == 0 && key ? mb_buf_url(out, key, 1) : rc;
}

int s3_call_start(struct mb_store_op *op, const struct s3_request *request, s3_done_cb done,
                  void *arg, struct s3_call **out, struct mb_err *err)
{
    struct s3 *s = op->store->impl;
    struct mb_buf path = {0};
    struct s3_call *call = mb_calloc(1, sizeof *call);
    if (!call)
        return mb_err_set(err, MB_ENOMEM, "s3: out of memory");
    call->s3 = s;
    call->op = op;
    call->request = *request;
    call->done = done;
    call->arg = arg;
    call->wait.ready = on_keys;
    call->wait.arg = call;
    call->sum = s->facts.sum;
    call->computed = S3_SUM_NONE;
    call->is_refused = s->facts.no_conditions && is_conditional(request);
    call->query = mb_strdup(request->query ? request->query : "");
    call->request.query = call->query;
    call->request.key = NULL; /* it is in path */
    int rc = call->query ? encode_path(s, request->key, &path) : MB_ENOMEM;
    call->path = rc == 0 ? mb_buf_take(&path) : NULL;
    mb_buf_close(&path);
    if (!call->path)
        rc = mb_err_set(err, MB_ENOMEM, "s3: out of memory");
    else if (!call->is_refused && request->delay_ms == 0)
        rc = attempt(call, err);
    if (rc != 0) {
        mb_free(call->path);
        mb_free(call->query);
        mb_free(call);
        return rc;
    }
    uv_timer_init(s->loop, &call->timer);
    call->timer.data = call;
    if (call->is_refused || request->delay_ms > 0)
        retry_after(call, request->delay_ms);
    s->n_calls++;
    if (out)
        *out = call;
    return 0;
}

static void on_waited_enough(uv_timer_t *timer)
{
    struct s3_call *call = timer->data;
    call->is_waited_for = 0;
    if (call->fetch)
        mb_http_fetch_cancel(call->fetch);
}

void s3_call_end(struct s3_call *call, uint64_t patience_ms)
{
    if (call->canceled && patience_ms > 0)
        return;
    if (patience_ms == 0 || !call->fetch || !mb_http_fetch_is_sent(call->fetch)) {
        s3_call_cancel(call);
        return;
    }
    call->canceled = call->is_waited_for = 1;
    uv_timer_start(&call->timer, on_waited_enough, patience_ms, 0);
}

void s3_call_cancel(struct s3_call *call)
{
    if (call->is_waited_for)
        on_waited_enough(&call->timer);
    if (call->canceled)
        return;
    call->canceled = 1;
    if (call->wait.is_waiting) {
        s3_credentials_forget(call->s3->credentials, &call->wait);
        retry_after(call, 0);
    } else if (call->fetch)
        mb_http_fetch_cancel(call->fetch);
    else if (uv_is_active((uv_handle_t *)&call->timer))
        retry_after(call, 0);
}

void s3_call_resume(struct s3_call *call)
{
    if (call->fetch)
        mb_http_fetch_resume(call->fetch);
}
