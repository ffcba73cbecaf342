/*
 * Watching for notices.
 *
 *  1. The file is looked for every second. A notice that cannot be read counts as one without a
 *     time: whoever wrote it meant something.
 *  2. The URL is asked every 5 s with a bound of 3 s. Google's servers want a header, which others
 *     do not mind; Amazon's want a token first, below /latest/, and answer 401 without.
 *  3. No answer, 5xx, nonsense: said in the log once until it gets better; nobody is ended by it.
 *  4. A time that changed is told again, the earlier where both say one; what becomes of it is
 *     deadline.c's matter.
 */
#include "agent/notice.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/http/client.h"
#include "base/log.h"

enum { FILE_EVERY_MS = 1000, URL_EVERY_MS = 5000, ASK_MS = 3000, TEXT_MAX = 16 << 10 };

struct mb_notice {
    uv_loop_t *loop;
    struct mb_notice_opts opts;
    void (*on_notice)(void *arg, uint64_t unix_ms);
    void *arg;
    uv_timer_t timer;
    struct mb_http_client *http;
    struct mb_http_fetch *fetch; /* in flight */
    uint64_t next_url_ms;
    char token[600]; /* of EC2's servers, as a header line; "" none */
    struct mb_notice_times times;
    int is_mute;
    int closing, parts_open;
    void (*close_cb)(void *arg);
    void *close_arg;
};

static void take(struct mb_notice *n, enum mb_notice_source from, uint64_t unix_ms)
{
    uint64_t ms;

    if (!mb_notice_take(&n->times, from, unix_ms))
        return;
    ms = n->times.told_ms;
    mb_warn("notice", "this node will be taken away in_ms=%" PRId64 " said by %s",
            ms == 0 ? (int64_t)-1 : (int64_t)(ms - mb_unix_ms()),
            n->times.has_said[MB_NOTICE_FILE] && n->times.unix_ms[MB_NOTICE_FILE] == ms
                ? n->opts.file
                : n->opts.url);
    n->on_notice(n->arg, ms);
}

/* ---- the file ---- */

static void look_at_file(struct mb_notice *n)
{
    struct mb_buf text = {0};
    struct mb_err err = {0};
    struct stat st;
    uint64_t unix_ms = 0, written_ms;
    int was_said = n->times.has_said[MB_NOTICE_FILE], rc;

    if (n->opts.file == NULL || stat(n->opts.file, &st) != 0)
        return;
    written_ms = (uint64_t)st.st_mtim.tv_sec * 1000 + (uint64_t)st.st_mtim.tv_nsec / 1000000;
    rc = mb_fs_read(n->opts.file, TEXT_MAX, &text, &err);
    if (rc == MB_OK)
        rc = mb_notice_read(mb_buf_str(&text), text.len, written_ms, &unix_ms, &err);
    if (rc < 0 && !was_said)
        mb_warn("notice", "%s: %s; taken as a notice without a time", n->opts.file, err.text);
    if (rc == 1 || (rc < 0 && !was_said))
        take(n, MB_NOTICE_FILE, rc < 0 ? 0 : unix_ms);
    mb_buf_close(&text);
}

/* ---- the URL ---- */

static void on_answer(void *arg, const struct mb_http_response *r);

/* Said once, until the URL speaks again. */
static void mute(struct mb_notice *n, const char *why, long status)
{
    if (!n->is_mute && !n->closing)
        mb_warn("notice", "%s says nothing that can be used: %s status=%ld", n->opts.url, why,
                status);
    n->is_mute = 1;
}

static void ask(struct mb_notice *n, const char *method, const char *url, const char *header,
                mb_http_response_cb cb)
{
    const char *headers[] = {"Metadata-Flavor: Google", header, NULL};
    struct mb_http_request q = {.method = method,
                                .url = url,
                                .headers = headers,
                                .body_fd = -1,
                                .max_body_bytes = TEXT_MAX,
                                .timeout_ms = ASK_MS,
                                .connect_timeout_ms = ASK_MS,
                                .is_direct = 1};
    struct mb_err err = {0};

    if (mb_http_fetch(n->http, &q, cb, n, &n->fetch, &err) != MB_OK) {
        n->fetch = NULL;
        mute(n, err.text, 0);
    }
}

static void on_token(void *arg, const struct mb_http_response *r)
{
    struct mb_notice *n = arg;

    n->fetch = NULL;
    if (n->closing)
        return;
    if (r->error != MB_OK || r->status != 200 || r->body_len == 0 || r->body_len > 512 ||
        memchr(r->body, '\n', r->body_len) != NULL || memchr(r->body, '\r', r->body_len) != NULL) {
        mute(n, r->error != MB_OK ? r->detail : "no token", r->status);
        return;
    }
    snprintf(n->token, sizeof(n->token), "X-aws-ec2-metadata-token: %.*s", (int)r->body_len,
             (const char *)r->body);
    ask(n, "GET", n->opts.url, n->token, on_answer);
}

static void ask_for_token(struct mb_notice *n)
{
    const char *path = strstr(n->opts.url, "/latest/");
    char url[1024];

    if (path == NULL || n->token[0] != '\0') {
        n->token[0] = '\0'; /* worn out: a new one with the next question */
        mute(n, "it refuses us", 401);
        return;
    }
    snprintf(url, sizeof(url), "%.*s/latest/api/token", (int)(path - n->opts.url), n->opts.url);
    ask(n, "PUT", url, "X-aws-ec2-metadata-token-ttl-seconds: 21600", on_token);
}

static void on_answer(void *arg, const struct mb_http_response *r)
{
    struct mb_notice *n = arg;
    struct mb_err err = {0};
    uint64_t unix_ms;
    int rc;

    n->fetch = NULL;
    if (n->closing)
        return;
    if (r->error == MB_OK && r->status == 404) {
        n->is_mute = 0;
        return;
    }
    if (r->error == MB_OK && r->status == 401) {
        ask_for_token(n);
        return;
    }
    if (r->error != MB_OK || r->status != 200) {
        mute(n, r->error != MB_OK ? r->detail : "an answer that is none", r->status);
        return;
    }
    rc = mb_notice_read((const char *)r->body, r->body_len, mb_unix_ms(), &unix_ms, &err);
    if (rc < 0) {
        mute(n, err.text, r->status);
        return;
    }
    n->is_mute = 0;
    /* "TRUE" has no time of its own: the first look counts, not each one anew. */
    const uint64_t said_ms = n->times.unix_ms[MB_NOTICE_URL];
    if (rc == 1 && (said_ms == 0 || unix_ms < said_ms))
        take(n, MB_NOTICE_URL, unix_ms);
}

static void on_timer(uv_timer_t *t)
{
    struct mb_notice *n = t->data;
    uint64_t now_ms = mb_mono_ms();

    look_at_file(n);
    if (n->opts.url == NULL || n->fetch != NULL || now_ms < n->next_url_ms)
        return;
    n->next_url_ms = now_ms + URL_EVERY_MS;
    ask(n, "GET", n->opts.url, n->token[0] != '\0' ? n->token : NULL, on_answer);
}

/* ---- life ---- */

int mb_notice_start(uv_loop_t *loop, const struct mb_notice_opts *opts,
                    void (*on_notice)(void *arg, uint64_t unix_ms), void *arg,
                    struct mb_notice **out, struct mb_err *err)
{
    struct mb_notice *n = mb_calloc(1, sizeof(*n));
    int rc = MB_OK;

    if (n == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory to watch for notices");
    n->loop = loop;
    n->opts = *opts;
    n->on_notice = on_notice;
    n->arg = arg;
    if (opts->url != NULL)
        rc = mb_http_client_create(loop, 1, &n->http, err);
    if (rc != MB_OK) {
        mb_free(n);
        return rc;
    }
    uv_timer_init(loop, &n->timer);
    n->timer.data = n;
    uv_timer_start(&n->timer, on_timer, 0, FILE_EVERY_MS);
    *out = n;
    return MB_OK;
}

static void part_closed(struct mb_notice *n)
{
    void (*cb)(void *) = n->close_cb;
    void *arg = n->close_arg;

    if (--n->parts_open > 0)
        return;
    mb_http_client_destroy(n->http);
    mb_free(n);
    cb(arg);
}

static void on_http_stopped(void *arg)
{
    part_closed(arg);
}

static void on_timer_closed(uv_handle_t *h)
{
    part_closed(h->data);
}

void mb_notice_stop(struct mb_notice *n, void (*cb)(void *arg), void *arg)
{
    n->closing = 1;
    n->close_cb = cb;
    n->close_arg = arg;
    n->parts_open = n->http != NULL ? 2 : 1;
    if (n->http != NULL)
        mb_http_client_stop(n->http, on_http_stopped, n);
    uv_close((uv_handle_t *)&n->timer, on_timer_closed);
}
