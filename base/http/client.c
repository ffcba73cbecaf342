/*
 * HTTP client: libcurl's multi interface, its sockets and its one deadline watched by the loop.
 *
 * 1. fetch: everything is copied into an easy handle; libcurl arms its timer, nothing runs yet.
 * 2. The loop tells libcurl about sockets and time; it asks for body bytes (memory or pread; a
 *    large file without TLS goes past it, client_send.c) and hands over header lines and body
 *    bytes (the sink of a 2xx answer, or a bounded buffer).
 * 3. A finished transfer is taken out of libcurl first, then its callback runs, then it is freed.
 * 4. On a connection that was used before, libcurl sends a request again, on a new one, when the
 *    server ends it without a byte of an answer, whatever the method: up to five times, and says
 *    nothing. So it is counted how often it begins to, and the answer says so (was_repeated): a
 *    server that died after it had carried out the first one answers the second one otherwise.
 * Failures: libcurl's result becomes an MB_E* code and a text that names no credential; a sink or a
 * bound that refuses keeps its own code. Cancelling only marks the request: its callback comes from
 * the loop, with MB_ECANCELED. stop cancels all, waits for that, then gives everything back.
 */
#include "base/http/client.h"

#include <curl/curl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/http/client_internal.h"
#include "base/http/headers.h"
#include "base/secret.h"

enum {
    DEFAULT_MAX_BODY_BYTES = 16 * 1024 * 1024,
    DEFAULT_TIMEOUT_MS = 60000,
    DEFAULT_STALL_TIMEOUT_MS = 30000,
    CONNECT_TIMEOUT_MS = 10000,
    MAX_HEADER_BYTES = 256 * 1024,
    MAX_HEAD_BYTES = 16 * 1024, /* of a request that has a token */
    UPLOAD_BUFFER_BYTES = 256 * 1024
};

/* ---- callbacks of a transfer ---- */

static size_t on_read(char *buf, size_t size, size_t n, void *arg)
{
    struct mb_http_fetch *f = arg;
    if (f->canceled)
        return CURL_READFUNC_ABORT;
    if (f->is_sent_here)
        return mb_client_send_ask(f);
    ssize_t got = mb_http_body_read(&f->body, buf, size * n);
    if (got < 0) {
        f->failure = (int)got;
        return CURL_READFUNC_ABORT;
    }
    mb_client_tls_out_keep(f, f->body.pos < f->body.len);
    return (size_t)got;
}

/* Before each sending: the first, those to where it is redirected, and again (4 above). */
static int on_sending(void *arg, char *remote_ip, char *local_ip, int remote_port, int local_port)
{
    struct mb_http_fetch *f = arg;
    (void)remote_ip;
    (void)local_ip;
    (void)remote_port;
    f->n_sent++;
    f->local_port = local_port;
    mb_client_tls_out_keep(f, 0);
    if (f->is_sent_here)
        mb_client_send_begin(f, local_port);
    return CURL_PREREQFUNC_OK;
}

static int on_seek(void *arg, curl_off_t offset, int origin)
{
    struct mb_http_fetch *f = arg;
    if (origin != SEEK_SET || offset < 0 || (size_t)offset > f->body.len)
        return CURL_SEEKFUNC_FAIL;
    mb_http_body_seek(&f->body, (size_t)offset);
    return CURL_SEEKFUNC_OK;
}

/* As libcurl would, but not for the programs that this one starts. A size of the receive buffer
 * that the kernel cuts would be worse than none: it ends the kernel's own growing, which may go
 * further. So a socket whose size was cut gives way to another. */
static curl_socket_t on_open_socket(void *arg, curlsocktype purpose, struct curl_sockaddr *a)
{
    const struct mb_http_client *c = arg;
    int type = a->socktype | SOCK_CLOEXEC;
    int fd = socket(a->family, type, a->protocol), got = 0;
    socklen_t len = sizeof got;
    (void)purpose;
    if (fd < 0 || c->receive_bytes == 0)
        return fd;
    if (setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &c->receive_bytes, sizeof c->receive_bytes) == 0 &&
        getsockopt(fd, SOL_SOCKET, SO_RCVBUF, &got, &len) == 0 && got / 2 >= c->receive_bytes)
        return fd; /* the kernel doubles it, for what it needs itself */
    close(fd);
    return socket(a->family, type, a->protocol);
}

static size_t on_header(char *line, size_t size, size_t n, void *arg)
{
    struct mb_http_fetch *f = arg;
    struct mb_buf *out = &f->answer_headers;
    size_t len = n * size;
    n = len;
    while (n > 0 && (line[n - 1] == '\r' || line[n - 1] == '\n' || line[n - 1] == ' '))
        n--;
    if (n >= 5 && strncmp(line, "HTTP/", 5) == 0) { /* a new block: after 100, redirects */
        mb_buf_reset(out);
        return len;
    }
    char *colon = memchr(line, ':', n);
    if (!colon)
        return len;
    char *value = colon + 1;
    while (value < line + n && (*value == ' ' || *value == '\t'))
        value++;
    if (out->len + n > MAX_HEADER_BYTES)
        f->failure = MB_EFULL;
    else if (mb_http_headers_add(out, line, (size_t)(colon - line), value,
                                 (size_t)(line + n - value)) != 0)
        f->failure = MB_ENOMEM;
    return f->failure ? 0 : len;
}

static const char *find_header(const struct mb_http_response *r, const char *name)
{
    const struct mb_http_fetch *f = r->impl;
    return mb_http_headers_next(&f->answer_headers, name, NULL);
}

/* The sink's share of a 2xx answer: what libcurl wants to hear. */
static size_t to_sink(struct mb_http_fetch *f, const char *p, size_t n)
{
    int rc = 0;
    if (f->head) {
        struct mb_http_response r = {
            .status = mb_client_status(f), .detail = "", .header = find_header, .impl = f};
        rc = f->head(f->sink_arg, &r);
        f->head = NULL;
    }
    if (rc == 0)
        rc = f->sink(f->sink_arg, p, n);
    if (rc == MB_HTTP_SINK_PAUSE)
        return CURL_WRITEFUNC_PAUSE;
    /* Both directions: one alone has libcurl look at the socket once more, and read. */
    if (rc == MB_HTTP_SINK_FULL && curl_easy_pause(f->easy, CURLPAUSE_ALL) != CURLE_OK)
        rc = MB_ENOMEM;
    if (rc < 0)
        f->failure = rc;
    return f->failure ? 0 : n;
}

static size_t on_write(char *p, size_t size, size_t n, void *arg)
{
    struct mb_http_fetch *f = arg;
    n *= size;
    if (f->canceled)
        return 0;
    if (f->sink && mb_client_status(f) / 100 == 2)
        return to_sink(f, p, n);
    if (n > f->max_body_bytes - f->answer.len)
        f->failure = MB_EFULL;
    else if ((f->is_secret && mb_buf_reserve(&f->answer, f->max_body_bytes) != 0) ||
             mb_buf_add(&f->answer, p, n) != 0) /* a buffer that grows leaves copies behind */
        f->failure = MB_ENOMEM;
    return f->failure ? 0 : n;
}

/* ---- the end of a transfer ---- */

static int code_of(CURLcode rc)
{
    switch (rc) {
    case CURLE_OK:
        return 0;
    case CURLE_OPERATION_TIMEDOUT:
        return MB_ETIMEOUT;
    case CURLE_OUT_OF_MEMORY:
        return MB_ENOMEM;
    case CURLE_URL_MALFORMAT:
    case CURLE_UNSUPPORTED_PROTOCOL:
        return MB_EINVAL;
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
        return MB_EDENIED;
    case CURLE_TOO_MANY_REDIRECTS:
    case CURLE_WEIRD_SERVER_REPLY:
    case CURLE_BAD_CONTENT_ENCODING:
        return MB_EPROTO;
    default:
        return MB_EUNAVAIL;
    }
}

static const char *failure_text(int code)
{
    switch (code) {
    case MB_ECANCELED:
        return "the request was cancelled";
    case MB_EFULL:
        return "the answer is larger than allowed";
    case MB_ENOMEM:
        return "out of memory";
    case MB_EIO:
        return "the file to send cannot be read";
    case MB_ESTATE:
        return "the file to send became shorter";
    case MB_ETIMEOUT:
        return "nothing went through for too long";
    case MB_EUNAVAIL:
        return "the connection broke while the body was sent";
    default:
        return "the receiver of the answer refused it";
    }
}

static void fetch_free(struct mb_http_fetch *f)
{
    if (f->easy)
        curl_easy_cleanup(f->easy);
    for (struct curl_slist *h = f->headers; h; h = h->next) /* tokens among them */
        mb_secret_wipe(h->data, strlen(h->data));
    if (f->is_secret) {
        mb_secret_wipe(f->body.bytes, f->body.bytes ? f->body.len : 0);
        mb_secret_wipe(f->answer.data, f->answer.cap);
    }
    curl_slist_free_all(f->headers);
    mb_buf_close(&f->answer_headers);
    mb_buf_close(&f->answer);
    mb_free(f->body.bytes);
    mb_free(f);
}

/* What a cancelled request has in the kernel's buffer, megabytes on a slow link, is not sent
 * either: others may need the link. */
static void drop_unsent(struct mb_http_fetch *f)
{
    const struct linger at_once = {.l_onoff = 1, .l_linger = 0};

    if (f->canceled && f->socket != CURL_SOCKET_BAD && f->body.pos > 0 && mb_client_status(f) == 0)
        setsockopt(f->socket, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
}

static void fetch_finish(struct mb_http_fetch *f, CURLcode rc)
{
    struct mb_http_client *c = f->client;
    struct mb_http_response r = {.detail = "", .header = find_header, .impl = f};
    long n_redirects = 0;
    mb_client_send_end(f);
    curl_easy_getinfo(f->easy, CURLINFO_REDIRECT_COUNT, &n_redirects);
    r.was_sent = f->n_sent > 0;
    r.was_repeated = f->n_sent > 1 + n_redirects;
    drop_unsent(f);
    curl_multi_remove_handle(c->multi, f->easy);
    if (f->prev)
        f->prev->next = f->next;
    else
        c->fetches = f->next;
    if (f->next)
        f->next->prev = f->prev;
    r.error = f->canceled ? MB_ECANCELED : f->failure ? f->failure : code_of(rc);
    if (r.error == 0) {
        r.status = mb_client_status(f);
        r.body = (const uint8_t *)mb_buf_str(&f->answer);
        r.body_len = f->answer.len;
    } else if (f->canceled || f->failure) {
        r.detail = failure_text(r.error);
    } else {
        r.detail = f->detail[0] ? f->detail : curl_easy_strerror(rc);
    }
    f->cb(f->arg, &r);
    fetch_free(f);
}

static void reap(struct mb_http_client *c)
{
    CURLMsg *msg;
    int left;
    while (c->multi && (msg = curl_multi_info_read(c->multi, &left))) {
        if (msg->msg != CURLMSG_DONE)
            continue;
        struct mb_http_fetch *f = NULL;
        CURLcode rc = msg->data.result;
        curl_easy_getinfo(msg->easy_handle, CURLINFO_PRIVATE, (char **)&f);
        fetch_finish(f, rc);
    }
}

/* ---- libcurl and the loop ---- */

static void on_poll(uv_poll_t *poll, int status, int events)
{
    struct watch *w = poll->data;
    struct mb_http_client *c = w->client;
    int flags = 0;
    int running;
    if (status < 0)
        flags = CURL_CSELECT_ERR;
    if (events & UV_READABLE)
        flags |= CURL_CSELECT_IN;
    if (events & w->wants & UV_WRITABLE)
        flags |= CURL_CSELECT_OUT;
    if (flags != 0)
        curl_multi_socket_action(c->multi, w->fd, flags, &running);
    mb_client_tls_turns(c);
    reap(c);
    mb_client_send_turn(w, events);
}

static int watch_start(struct watch *w)
{
    return uv_poll_start(&w->poll, w->wants | mb_client_send_events(w), on_poll);
}

static void on_timeout(uv_timer_t *timer)
{
    struct mb_http_client *c = timer->data;
    int running;
    curl_multi_socket_action(c->multi, CURL_SOCKET_TIMEOUT, 0, &running);
    mb_client_tls_turns(c);
    reap(c);
}

static int set_timer(CURLM *multi, long timeout_ms, void *arg)
{
    struct mb_http_client *c = arg;
    (void)multi;
    if (timeout_ms < 0)
        uv_timer_stop(&c->timer);
    else if (!uv_is_closing((uv_handle_t *)&c->timer))
        uv_timer_start(&c->timer, on_timeout, (uint64_t)timeout_ms, 0);
    return 0;
}

static void finish_stop(struct mb_http_client *c)
{
    if (c->n_handles == 0 && c->stop_cb)
        c->stop_cb(c->stop_arg);
}

static void on_watch_closed(uv_handle_t *h)
{
    struct watch *w = h->data;
    struct mb_http_client *c = w->client;
    mb_free(w);
    c->n_handles--;
    finish_stop(c);
}

static void watch_close(struct watch *w)
{
    mb_client_send_unwatch(w);
    if (w->prev)
        w->prev->next = w->next;
    else
        w->client->watches = w->next;
    if (w->next)
        w->next->prev = w->prev;
    uv_close((uv_handle_t *)&w->poll, on_watch_closed);
}

static struct watch *watch_open(struct mb_http_client *c, curl_socket_t fd)
{
    struct watch *w = mb_calloc(1, sizeof *w);
    if (!w || uv_poll_init_socket(c->loop, &w->poll, fd) != 0) {
        mb_free(w);
        return NULL;
    }
    w->poll.data = w;
    w->client = c;
    w->start = watch_start;
    w->fd = fd;
    w->next = c->watches;
    if (c->watches)
        c->watches->prev = w;
    c->watches = w;
    c->n_handles++;
    return w;
}

/* A socket cannot be watched: end its transfer. An error code would end the whole multi handle. */
static int give_up(struct mb_http_client *c, CURL *easy)
{
    struct mb_http_fetch *f = NULL;
    (void)c;
    curl_easy_getinfo(easy, CURLINFO_PRIVATE, (char **)&f);
    if (f)
        mb_client_fail(f, MB_ENOMEM);
    return 0;
}

static int set_socket(CURL *easy, curl_socket_t fd, int what, void *arg, void *socket_arg)
{
    struct mb_http_client *c = arg;
    struct watch *w = socket_arg;
    struct mb_http_fetch *f = NULL;
    curl_easy_getinfo(easy, CURLINFO_PRIVATE, (char **)&f);
    if (f)
        f->socket = what == CURL_POLL_REMOVE ? CURL_SOCKET_BAD : fd;
    if (what == CURL_POLL_REMOVE) {
        if (w) {
            watch_close(w);
            curl_multi_assign(c->multi, fd, NULL);
        }
        return 0;
    }
    if (!w) {
        w = watch_open(c, fd);
        if (!w)
            return give_up(c, easy);
        curl_multi_assign(c->multi, fd, w);
    }
    w->wants = (what & CURL_POLL_IN ? UV_READABLE : 0) | (what & CURL_POLL_OUT ? UV_WRITABLE : 0);
    mb_client_send_watch(w, easy);
    return watch_start(w) == 0 ? 0 : give_up(c, easy);
}

/* ---- client ---- */

static void on_cancel(uv_timer_t *timer);

/* The head of a request, with its tokens, stands at the beginning of buffers of libcurl's: that is
 * overwritten when they are given back. Not all of them: of the large ones most was never touched.
 */
static void give_back(void *p)
{
    size_t n = p ? malloc_usable_size(p) : 0;
    mb_secret_wipe(p, n < MAX_HEAD_BYTES ? n : MAX_HEAD_BYTES);
    free(p);
}

static void *resize(void *p, size_t size_bytes)
{
    size_t n = p ? malloc_usable_size(p) : 0;
    void *grown = n >= size_bytes && p ? p : malloc(size_bytes);
    if (!grown || grown == p)
        return grown;
    if (p)
        memcpy(grown, p, n);
    give_back(p);
    return grown;
}

static void global_init(void)
{
    curl_global_init_mem(CURL_GLOBAL_ALL, malloc, give_back, resize, strdup, calloc);
}

int mb_http_client_create(uv_loop_t *loop, unsigned max_connections, struct mb_http_client **out,
                          struct mb_err *err)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, global_init);
    struct mb_http_client *c = mb_calloc(1, sizeof *c);
    if (!c || !(c->multi = curl_multi_init())) {
        mb_free(c);
        return mb_err_set(err, MB_ENOMEM, "http client: out of memory");
    }
    c->loop = loop;
    c->ca_file = getenv("AWS_CA_BUNDLE");
    if (!c->ca_file || !*c->ca_file)
        c->ca_file = getenv("SSL_CERT_FILE");
    uv_timer_init(loop, &c->timer);
    uv_timer_init(loop, &c->cancel_timer);
    uv_timer_init(loop, &c->stall_timer);
    uv_timer_init(loop, &c->more_timer);
    c->timer.data = c;
    c->cancel_timer.data = c;
    c->stall_timer.data = c;
    c->more_timer.data = c;
    c->on_cancel = on_cancel;
    c->reap = reap;
    c->n_handles = 4;
    curl_multi_setopt(c->multi, CURLMOPT_SOCKETFUNCTION, set_socket);
    curl_multi_setopt(c->multi, CURLMOPT_SOCKETDATA, c);
    curl_multi_setopt(c->multi, CURLMOPT_TIMERFUNCTION, set_timer);
    curl_multi_setopt(c->multi, CURLMOPT_TIMERDATA, c);
    curl_multi_setopt(c->multi, CURLMOPT_MAX_TOTAL_CONNECTIONS, (long)max_connections);
    curl_multi_setopt(c->multi, CURLMOPT_MAXCONNECTS, (long)max_connections);
    *out = c;
    return 0;
}

static void on_handle_closed(uv_handle_t *h)
{
    struct mb_http_client *c = h->data;
    c->n_handles--;
    finish_stop(c);
}

static void on_cancel(uv_timer_t *timer)
{
    struct mb_http_client *c = timer->data;
    struct mb_http_fetch *f = c->fetches;
    while (f) {
        if (f->canceled || f->failure || c->stopping) {
            f->canceled |= f->failure == 0;
            fetch_finish(f, CURLE_ABORTED_BY_CALLBACK);
            f = c->fetches; /* the callback may have changed the list */
        } else {
            mb_client_send_resume(f);
            f = f->next;
        }
    }
    if (!c->stopping)
        return;
    curl_multi_cleanup(c->multi);
    c->multi = NULL;
    while (c->watches)
        watch_close(c->watches);
    uv_close((uv_handle_t *)&c->timer, on_handle_closed);
    uv_close((uv_handle_t *)&c->cancel_timer, on_handle_closed);
    uv_close((uv_handle_t *)&c->stall_timer, on_handle_closed);
    uv_close((uv_handle_t *)&c->more_timer, on_handle_closed);
}

void mb_client_fail(struct mb_http_fetch *f, int code)
{
    f->failure = code;
    uv_timer_start(&f->client->cancel_timer, on_cancel, 0, 0);
}

void mb_http_client_receive_ahead(struct mb_http_client *c, int bytes)
{
    c->receive_bytes = bytes;
}

void mb_http_client_stop(struct mb_http_client *c, void (*cb)(void *arg), void *arg)
{
    if (c->stopping)
        return;
    c->stopping = 1;
    c->stop_cb = cb;
    c->stop_arg = arg;
    uv_timer_start(&c->cancel_timer, on_cancel, 0, 0);
}

void mb_http_client_destroy(struct mb_http_client *c)
{
    mb_free(c);
}

/* ---- fetch ---- */

static int copy_request(struct mb_http_fetch *f, const struct mb_http_request *request)
{
    f->is_secret = request->is_secret;
    f->body = (struct mb_http_body){
        .fd = request->body_fd, .offset = request->body_offset, .len = request->body_len};
    f->sink = request->sink;
    f->head = request->head;
    f->sink_arg = request->sink_arg;
    f->max_body_bytes = request->max_body_bytes ? request->max_body_bytes : DEFAULT_MAX_BODY_BYTES;
    if (f->body.fd < 0 && f->body.len > 0) {
        f->body.bytes = mb_alloc(f->body.len);
        if (!f->body.bytes)
            return MB_ENOMEM;
        memcpy(f->body.bytes, request->body, f->body.len);
    }
    f->stall_ms = request->stall_timeout_ms ? request->stall_timeout_ms : DEFAULT_STALL_TIMEOUT_MS;
    f->is_sent_here = mb_client_sends_here(request);
    for (const char *const *h = request->headers; h && *h; h++) {
        struct curl_slist *grown = curl_slist_append(f->headers, *h);
        if (!grown)
            return MB_ENOMEM;
        f->headers = grown;
    }
    /* The server's 100 costs a round trip and some servers never send it. */
    struct curl_slist *grown = curl_slist_append(f->headers, "Expect:");
    if (!grown)
        return MB_ENOMEM;
    f->headers = grown;
    return f->is_sent_here ? mb_client_send_headers(f) : 0;
}

static CURLcode set_method(struct mb_http_fetch *f, const struct mb_http_request *request)
{
    const char *method = request->method;
    CURLcode rc = curl_easy_setopt(f->easy, CURLOPT_CUSTOMREQUEST, method);
    if (strcmp(method, "HEAD") == 0)
        return rc | curl_easy_setopt(f->easy, CURLOPT_NOBODY, 1L);
    if (f->body.len == 0 && strcmp(method, "PUT") != 0 && strcmp(method, "POST") != 0)
        return rc;
    rc |= curl_easy_setopt(f->easy, CURLOPT_UPLOAD, 1L);
    rc |= curl_easy_setopt(f->easy, CURLOPT_INFILESIZE_LARGE,
                           f->is_sent_here ? -1 : (curl_off_t)f->body.len);
    rc |= curl_easy_setopt(f->easy, CURLOPT_READFUNCTION, on_read);
    rc |= curl_easy_setopt(f->easy, CURLOPT_READDATA, f);
    rc |= curl_easy_setopt(f->easy, CURLOPT_SEEKFUNCTION, on_seek);
    rc |= curl_easy_setopt(f->easy, CURLOPT_SEEKDATA, f);
    rc |= curl_easy_setopt(f->easy, CURLOPT_UPLOAD_BUFFERSIZE, (long)UPLOAD_BUFFER_BYTES);
    return rc;
}

/* libcurl knows HTTP_PROXY not, since a CGI program's client could set it; NULL: none. */
static const char *upper_case_proxy(const char *url)
{
    const char *proxy = getenv("http_proxy");
    if (strncasecmp(url, "http:", 5) != 0 || (proxy && *proxy))
        return NULL;
    proxy = getenv("HTTP_PROXY");
    return proxy && *proxy ? proxy : NULL;
}

static CURLcode set_options(struct mb_http_fetch *f, const struct mb_http_request *request)
{
    CURL *e = f->easy;
    uint64_t timeout_ms = request->timeout_ms ? request->timeout_ms : DEFAULT_TIMEOUT_MS;
    uint64_t connect_ms =
        request->connect_timeout_ms ? request->connect_timeout_ms : CONNECT_TIMEOUT_MS;
    CURLcode rc = set_method(f, request);
    rc |= curl_easy_setopt(e, CURLOPT_URL, request->url);
    if (!request->follow_redirects) /* one that is signed is signed with its dots */
        rc |= curl_easy_setopt(e, CURLOPT_PATH_AS_IS, 1L);
    rc |= curl_easy_setopt(e, CURLOPT_PROTOCOLS_STR, "http,https");
    f->socket = CURL_SOCKET_BAD;
    rc |= curl_easy_setopt(e, CURLOPT_PRIVATE, f);
    rc |= curl_easy_setopt(e, CURLOPT_ERRORBUFFER, f->detail);
    rc |= curl_easy_setopt(e, CURLOPT_HTTPHEADER, f->headers);
    rc |= curl_easy_setopt(e, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    rc |= curl_easy_setopt(e, CURLOPT_NOSIGNAL, 1L);
    rc |= curl_easy_setopt(e, CURLOPT_OPENSOCKETFUNCTION, on_open_socket);
    rc |= curl_easy_setopt(e, CURLOPT_OPENSOCKETDATA, f->client);
    rc |= curl_easy_setopt(e, CURLOPT_TIMEOUT_MS, (long)timeout_ms);
    rc |= curl_easy_setopt(e, CURLOPT_CONNECTTIMEOUT_MS, (long)connect_ms);
    rc |= curl_easy_setopt(e, CURLOPT_PREREQFUNCTION, on_sending);
    rc |= curl_easy_setopt(e, CURLOPT_PREREQDATA, f);
    if (f->is_sent_here) { /* libcurl does not see what goes through */
        mb_client_send_start(f);
    } else {
        rc |= curl_easy_setopt(e, CURLOPT_LOW_SPEED_LIMIT, (long)MB_CLIENT_MIN_BYTES_PER_S);
        rc |= curl_easy_setopt(e, CURLOPT_LOW_SPEED_TIME, (long)((f->stall_ms + 999) / 1000));
    }
    mb_client_tls_start(f, request);
    rc |= curl_easy_setopt(e, CURLOPT_BUFFERSIZE, (long)MB_HTTP_READ_BYTES);
    rc |= curl_easy_setopt(e, CURLOPT_HEADERFUNCTION, on_header);
    rc |= curl_easy_setopt(e, CURLOPT_HEADERDATA, f);
    rc |= curl_easy_setopt(e, CURLOPT_WRITEFUNCTION, on_write);
    rc |= curl_easy_setopt(e, CURLOPT_WRITEDATA, f);
    if (request->follow_redirects) {
        rc |= curl_easy_setopt(e, CURLOPT_FOLLOWLOCATION, 1L);
        rc |= curl_easy_setopt(e, CURLOPT_MAXREDIRS, 5L);
        if (strncasecmp(request->url, "https:", 6) == 0)
            rc |= curl_easy_setopt(e, CURLOPT_REDIR_PROTOCOLS_STR, "https");
        else
            rc |= curl_easy_setopt(e, CURLOPT_REDIR_PROTOCOLS_STR, "http,https");
    }
    if (request->is_direct)
        rc |= curl_easy_setopt(e, CURLOPT_PROXY, "");
    else if (request->takes_http_proxy && upper_case_proxy(request->url))
        rc |= curl_easy_setopt(e, CURLOPT_PROXY, upper_case_proxy(request->url));
    if (request->is_fresh) {
        rc |= curl_easy_setopt(e, CURLOPT_FRESH_CONNECT, 1L);
        rc |= curl_easy_setopt(e, CURLOPT_DNS_CACHE_TIMEOUT, 0L);
    }
    if (request->ca_file)
        rc |= curl_easy_setopt(e, CURLOPT_CAINFO, request->ca_file);
    else if (f->client->ca_file && *f->client->ca_file)
        rc |= curl_easy_setopt(e, CURLOPT_CAINFO, f->client->ca_file);
    return rc;
}

int mb_http_fetch(struct mb_http_client *c, const struct mb_http_request *request,
                  mb_http_response_cb cb, void *arg, struct mb_http_fetch **out, struct mb_err *err)
{
    if (c->stopping)
        return mb_err_set(err, MB_ESTATE, "http client: stopped");
    struct mb_http_fetch *f = mb_calloc(1, sizeof *f);
    if (!f)
        goto nomem;
    f->client = c;
    f->cb = cb;
    f->arg = arg;
    f->easy = curl_easy_init();
    if (!f->easy || copy_request(f, request) != 0 || set_options(f, request) != CURLE_OK ||
        curl_multi_add_handle(c->multi, f->easy) != CURLM_OK)
        goto nomem;
    f->next = c->fetches;
    if (c->fetches)
        c->fetches->prev = f;
    c->fetches = f;
    if (out)
        *out = f;
    return 0;
nomem:
    if (f)
        fetch_free(f);
    return mb_err_set(err, MB_ENOMEM, "http client: out of memory");
}

void mb_http_fetch_cancel(struct mb_http_fetch *f)
{
    f->canceled = 1;
    uv_timer_start(&f->client->cancel_timer, on_cancel, 0, 0);
}

int mb_http_fetch_is_sent(const struct mb_http_fetch *f)
{
    return f->n_sent > 0 && f->body.pos == f->body.len;
}

void mb_http_fetch_resume(struct mb_http_fetch *f)
{
    curl_easy_pause(f->easy, CURLPAUSE_CONT);
}
