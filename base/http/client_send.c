/*
 * The body of a large upload without TLS goes from the page cache to the socket by sendfile(2):
 * through libcurl it would be copied twice.
 *
 * 1. Before libcurl sends the headers it says on which connection (prereq): the body begins anew,
 *    also when it tries again on another one.
 * 2. It asks for body bytes when the headers have gone, and is told to pause. From here on the
 *    socket is ours to write to, and libcurl's to read from.
 * 3. Which of its sockets it is, is known by the local port. The loop says when it takes bytes.
 * 4. All is sent: libcurl goes on, asks again, and hears that this was the end.
 * Failures: an answer before the end stops the sending, and libcurl makes of it what it is (a 2xx
 * is no answer to half a request: MB_EUNAVAIL). A connection that breaks is MB_EUNAVAIL, also where
 * an answer came before and was not read yet. Too few bytes for stall_ms are MB_ETIMEOUT, as they
 * are where libcurl counts them. What libcurl does not know of is the length: its header is ours.
 */
#include <linux/sockios.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include "base/http/client_internal.h"

enum {
    MIN_BYTES = 256 * 1024,   /* below, the detour costs more than the copies */
    TURN_BYTES = 1024 * 1024, /* then other sockets have theirs */
    LOOK_MS = 1000
};

long mb_client_status(struct mb_http_fetch *f)
{
    long status = 0;
    curl_easy_getinfo(f->easy, CURLINFO_RESPONSE_CODE, &status);
    return status;
}

/* TLS to the proxy: bytes must not go past it. */
static int has_tls_proxy(void)
{
    static const char *const names[] = {"http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *url = getenv(names[i]);
        if (url && strncasecmp(url, "https:", 6) == 0)
            return 1;
    }
    return 0;
}

int mb_client_sends_here(const struct mb_http_request *r)
{
    return r->body_fd >= 0 && r->body_len >= MIN_BYTES && strcmp(r->method, "PUT") == 0 &&
           strncasecmp(r->url, "http:", 5) == 0 && !r->follow_redirects &&
           (r->is_direct || !has_tls_proxy());
}

int mb_client_send_headers(struct mb_http_fetch *f)
{
    char length[48];
    snprintf(length, sizeof length, "Content-Length: %zu", f->body.len);
    const char *const lines[] = {length, "Transfer-Encoding:"}; /* not chunked */
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        struct curl_slist *grown = curl_slist_append(f->headers, lines[i]);
        if (!grown)
            return MB_ENOMEM;
        f->headers = grown;
    }
    return 0;
}

static int port_of(curl_socket_t fd)
{
    struct sockaddr_storage a = {0};
    socklen_t n = sizeof a;
    if (getsockname(fd, (struct sockaddr *)&a, &n) != 0)
        return -1;
    if (a.ss_family == AF_INET6)
        return ntohs(((struct sockaddr_in6 *)&a)->sin6_port);
    return a.ss_family == AF_INET ? ntohs(((struct sockaddr_in *)&a)->sin_port) : -1;
}

int mb_client_port_of(struct watch *w)
{
    if (w->port <= 0)
        w->port = port_of(w->fd);
    return w->port;
}

/* The watch is of the connection that has the request. */
static int is_its(const struct watch *w, const struct mb_http_fetch *f)
{
    return f->local_port == port_of(w->fd);
}

/* Bytes of the body that the other side has; the kernel keeps megabytes of what it took. */
static size_t arrived(const struct mb_http_fetch *f)
{
    int queued = 0;
    if (!f->watch || !is_its(f->watch, f) || ioctl(f->watch->fd, SIOCOUTQ, &queued) != 0)
        return f->body.pos;
    return f->body.pos - ((size_t)queued < f->body.pos ? (size_t)queued : f->body.pos);
}

static void mark(struct mb_http_fetch *f)
{
    f->mark_ms = uv_now(f->client->loop);
    f->mark_pos = arrived(f);
}

void mb_client_send_begin(struct mb_http_fetch *f, int local_port)
{
    f->may_send = 0;
    f->is_cut = 0;
    f->local_port = local_port;
    mb_http_body_seek(&f->body, 0);
    mark(f);
}

/* Since the mark, ms ago. Fewer than there were: bytes that the kernel had counted as arrived. */
static int has_moved(const struct mb_http_fetch *f, uint64_t ms)
{
    size_t n = arrived(f);
    return n < f->mark_pos ||
           (n > f->mark_pos && (n - f->mark_pos) * 1000 >= MB_CLIENT_MIN_BYTES_PER_S * ms);
}

/* The mark follows what moves at every look, so that a stall is as old as the mark. */
static void look_for_stalls(uv_timer_t *timer)
{
    struct mb_http_client *c = timer->data;
    int n = 0;
    for (struct mb_http_fetch *f = c->fetches; f; f = f->next) {
        n += f->is_sent_here;
        if (!f->is_sent_here || f->failure || !f->mark_ms)
            continue;
        uint64_t ms = uv_now(c->loop) - f->mark_ms;
        if (has_moved(f, ms))
            mark(f);
        else if (ms >= f->stall_ms)
            mb_client_fail(f, MB_ETIMEOUT);
    }
    if (n == 0)
        uv_timer_stop(timer);
}

void mb_client_send_start(struct mb_http_fetch *f)
{
    if (!uv_is_active((uv_handle_t *)&f->client->stall_timer))
        uv_timer_start(&f->client->stall_timer, look_for_stalls, LOOK_MS, LOOK_MS);
}

int mb_client_send_events(const struct watch *w)
{
    const struct mb_http_fetch *f = w->sender;
    return f && f->may_send && is_its(w, f) ? UV_WRITABLE : 0;
}

size_t mb_client_send_ask(struct mb_http_fetch *f)
{
    if (f->body.pos == f->body.len)
        return 0;
    if (!f->failure && mb_client_status(f) >= 300) { /* refused: libcurl reads why, and closes */
        curl_easy_setopt(f->easy, CURLOPT_FORBID_REUSE, 1L);
        return 0;
    }
    if (f->failure || f->is_cut || mb_client_status(f) >= 200) {
        f->failure = f->failure ? f->failure : MB_EUNAVAIL;
        return CURL_READFUNC_ABORT;
    }
    f->may_send = 1;
    if (f->watch && f->watch->start(f->watch) != 0)
        mb_client_fail(f, MB_ENOMEM);
    return CURL_READFUNC_PAUSE;
}

static void part(struct watch *w)
{
    if (w->sender)
        w->sender->watch = NULL;
    w->sender = NULL;
}

/* libcurl has read all that it wants there, an answer or the end: it waits for the body only. */
void mb_client_send_unwatch(struct watch *w)
{
    struct mb_http_fetch *f = w->sender;
    part(w);
    if (!f || !f->may_send)
        return;
    f->may_send = 0;
    f->is_cut = 1;
    uv_timer_start(&f->client->cancel_timer, f->client->on_cancel, 0, 0);
}

void mb_client_send_resume(struct mb_http_fetch *f)
{
    if (f->is_cut)
        curl_easy_pause(f->easy, CURLPAUSE_CONT);
}

void mb_client_send_end(struct mb_http_fetch *f)
{
    if (f->watch)
        part(f->watch);
}

void mb_client_send_watch(struct watch *w, CURL *easy)
{
    struct mb_http_fetch *f = NULL;
    curl_easy_getinfo(easy, CURLINFO_PRIVATE, (char **)&f);
    if (!f || !f->is_sent_here || w->sender == f)
        return;
    mb_client_send_end(f);
    part(w);
    f->watch = w;
    w->sender = f;
}

/* libcurl asks again. */
static void go_on(struct watch *w)
{
    struct mb_http_fetch *f = w->sender;
    f->may_send = 0;
    if (w->start(w) != 0)
        mb_client_fail(f, MB_ENOMEM);
    curl_easy_pause(f->easy, CURLPAUSE_CONT);
}

void mb_client_send_turn(struct watch *w, int events)
{
    struct mb_http_fetch *f = w->sender;
    if (!mb_client_send_events(w))
        return;
    if (mb_client_status(f) >= 200) { /* it waits for nothing more */
        go_on(w);
        return;
    }
    if (!(events & UV_WRITABLE))
        return;
    int rc = mb_http_body_send(&f->body, w->fd, TURN_BYTES);
    if (rc == MB_EUNAVAIL) {
        f->failure = rc;
        go_on(w);
    } else if (rc != MB_OK) {
        f->may_send = 0;
        mb_client_fail(f, rc);
    } else if (f->body.pos == f->body.len) {
        mark(f);
        go_on(w);
    }
}
