/*
 * The wire of the static client. A request:
 *  1. connect within 10 s; 2. send the head and the body (a file is never in memory as a whole)
 * while the answer is read already: a server may refuse before it has heard everything;
 *  3. the answer is whole, or the connection ends, or nothing moves for 30 s, or time is up.
 * A connection serves one request.
 */
#include "cli/wire.h"

#include <event2/buffer.h>
#include <event2/bufferevent_ssl.h>
#include <openssl/crypto.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/http/answer.h"
#include "cli/client/link.h"

enum { CONNECT_TIMEOUT_MS = 10000, STALL_TIMEOUT_MS = 30000 };

/* ---- life ---- */

int mb_wire_open(struct mb_wire **out, struct mb_err *err)
{
    struct mb_wire *w = mb_calloc(1, sizeof(*w));

    /* The machine's openssl.cnf may name modules, which a static program cannot load. */
    OPENSSL_init_crypto(OPENSSL_INIT_NO_LOAD_CONFIG, NULL);
    if (w != NULL && (w->base = event_base_new()) != NULL) {
        w->timer = evtimer_new(w->base, mb_link_on_timer, NULL);
        w->dns = evdns_base_new(w->base, EVDNS_BASE_DISABLE_WHEN_INACTIVE);
    }
    if (w == NULL || w->timer == NULL || w->dns == NULL) {
        mb_wire_close(w);
        return mb_err_set(err, MB_ENOMEM, "no event loop");
    }
    /* Without the file: a server on 127.0.0.1, as everywhere. */
    (void)evdns_base_resolv_conf_parse(w->dns, DNS_OPTIONS_ALL, "/etc/resolv.conf");
    /* localhost is this machine, also when /etc/hosts does not say so. */
    (void)evdns_base_load_hosts(w->dns, NULL);
    /* As glibc asks: some servers answer in the letters they like. */
    (void)evdns_base_set_option(w->dns, "randomize-case:", "0");
    *out = w;
    return 0;
}

void mb_wire_close(struct mb_wire *w)
{
    if (w == NULL)
        return;
    if (w->dns != NULL)
        evdns_base_free(w->dns, 0);
    if (w->timer != NULL)
        event_free(w->timer);
    if (w->base != NULL)
        event_base_free(w->base);
    SSL_CTX_free(w->tls);
    mb_free(w);
}

/* ---- a request ---- */

struct fetch {
    struct bufferevent *be;
    struct mb_http_answer answer;
    struct mb_buf *body;
    struct mb_err *err;
    uint64_t moved_mono_ms; /* when a byte went out or came in last */
    int done, rc;
};

static void on_readable(struct bufferevent *be, void *arg)
{
    struct fetch *f = arg;
    struct evbuffer *in = bufferevent_get_input(be);

    f->moved_mono_ms = mb_mono_ms();
    while (!f->done && evbuffer_get_length(in) > 0) {
        struct evbuffer_iovec v;
        const uint8_t *body;
        size_t used, n;

        evbuffer_peek(in, -1, NULL, &v, 1);
        f->rc = mb_http_answer_feed(&f->answer, v.iov_base, v.iov_len, &used, &body, &n, f->err);
        if (f->rc == 0 && mb_buf_add(f->body, body, n) != 0)
            f->rc = mb_err_set(f->err, MB_ENOMEM, "out of memory");
        f->done = f->rc != 0 || f->answer.state == MB_HTTP_ANSWER_DONE;
        evbuffer_drain(in, used);
    }
}

static void on_moved(struct evbuffer *out, const struct evbuffer_cb_info *info, void *arg)
{
    struct fetch *f = arg;

    (void)out;
    if (info->n_deleted > 0)
        f->moved_mono_ms = mb_mono_ms();
}

static void on_event(struct bufferevent *be, short what, void *arg)
{
    struct fetch *f = arg;
    char why[256];

    /* It takes no more; what it has said of that may still be read. */
    if (f->done || ((what & BEV_EVENT_WRITING) && !(what & BEV_EVENT_READING) &&
                    bufferevent_openssl_get_ssl(be) == NULL))
        return;
    f->done = 1;
    if (what & BEV_EVENT_EOF) {
        f->rc = mb_http_answer_end(&f->answer, f->err);
        return;
    }
    mb_link_why(be, what, why, sizeof(why));
    f->rc = mb_err_set(f->err, MB_EUNAVAIL, "%s", why);
}

static int build_head(const struct mb_wire_request *r, const struct mb_link_target *t,
                      struct mb_buf *out)
{
    int has_body =
        r->body_len > 0 || strcmp(r->method, "PUT") == 0 || strcmp(r->method, "POST") == 0;
    int rc = mb_buf_printf(out, "%s %s%.*s HTTP/1.1\r\nHost: ", r->method,
                           *t->path == '/' ? "" : "/", (int)strcspn(t->path, "#"), t->path);

    rc |= mb_link_host(t, out);
    rc |= mb_buf_puts(out, "\r\nAccept: */*\r\nConnection: close\r\n");
    if (has_body)
        rc |= mb_buf_printf(out, "Content-Length: %zu\r\n", r->body_len);
    for (const char *const *h = r->headers; h != NULL && *h != NULL; h++)
        rc |= mb_buf_printf(out, "%s\r\n", *h);
    return rc | mb_buf_puts(out, "\r\n");
}

/* libevent closes the descriptor when the last byte is out: it gets its own. */
static int add_file(struct evbuffer *out, const struct mb_wire_request *r)
{
    int fd = dup(r->body_fd);

    if (fd < 0)
        return -1;
    if (evbuffer_add_file(out, fd, 0, (ev_off_t)r->body_len) == 0)
        return 0;
    close(fd);
    return -1;
}

static int send_request(struct fetch *f, const struct mb_wire_request *r,
                        const struct mb_link_target *t)
{
    struct evbuffer *out = bufferevent_get_output(f->be);
    struct mb_buf head = {0};
    int rc = build_head(r, t, &head);

    evbuffer_add_cb(out, on_moved, f);
    bufferevent_setcb(f->be, on_readable, NULL, on_event, f);
    if (rc == 0)
        rc = evbuffer_add(out, head.data, head.len);
    if (rc == 0 && r->body_len > 0)
        rc = r->body_fd >= 0 ? add_file(out, r) : evbuffer_add(out, r->body, r->body_len);
    mb_buf_close(&head);
    if (rc != 0 || bufferevent_enable(f->be, EV_READ | EV_WRITE) != 0)
        return mb_err_set(f->err, MB_ENOMEM, "out of memory");
    return 0;
}

static int wait_for_answer(struct mb_wire *w, struct fetch *f, uint64_t deadline_mono_ms)
{
    for (;;) {
        uint64_t stalled = f->moved_mono_ms + STALL_TIMEOUT_MS;

        if (!mb_link_wait(w, &f->done, stalled < deadline_mono_ms ? stalled : deadline_mono_ms))
            return f->rc;
        if (mb_mono_ms() >= deadline_mono_ms)
            return mb_err_set(f->err, MB_ETIMEOUT, "no answer in time");
        if (mb_mono_ms() >= f->moved_mono_ms + STALL_TIMEOUT_MS)
            return mb_err_set(f->err, MB_ETIMEOUT, "nothing moved for %d s",
                              STALL_TIMEOUT_MS / 1000);
    }
}

int mb_wire_fetch(struct mb_wire *w, const struct mb_wire_request *r, long *status,
                  struct mb_buf *body, struct mb_err *err)
{
    uint64_t now = mb_mono_ms(), deadline = now + r->timeout_ms;
    uint64_t connected =
        now + (r->timeout_ms < CONNECT_TIMEOUT_MS ? r->timeout_ms : CONNECT_TIMEOUT_MS);
    struct fetch f = {.answer = {.no_body = strcmp(r->method, "HEAD") == 0,
                                 .max_body_bytes = r->max_answer_bytes},
                      .body = body,
                      .err = err};
    struct mb_link_target t;
    int rc = mb_link_target(r->url, &t, err);

    if (rc == 0)
        rc = mb_link_open(w, &t, connected, &f.be, err);
    if (rc != 0)
        return rc;
    f.moved_mono_ms = mb_mono_ms();
    rc = send_request(&f, r, &t);
    if (rc == 0)
        rc = wait_for_answer(w, &f, deadline);
    *status = f.answer.status;
    evbuffer_remove_cb(bufferevent_get_output(f.be), on_moved, &f);
    bufferevent_free(f.be);
    mb_http_answer_close(&f.answer);
    return rc;
}
