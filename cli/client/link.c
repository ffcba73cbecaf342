/*
 * 1. The URL is taken apart; a proxy in the environment that is meant for it is refused by name,
 * since going around it silently would be worse.
 * 2. libevent's resolver asks the servers of /etc/resolv.conf itself and reads /etc/hosts: glibc's
 *    needs shared objects of the very glibc that it was linked with, which a static program has
 * not.
 * 3. Each address is tried until one accepts, for as long as the deadline allows.
 * 4. TLS: the certificate must be good for the host; AWS_CA_BUNDLE and SSL_CERT_FILE name the
 *    authorities, else the places where distributions keep them.
 */
#include "cli/client/link.h"

#include <arpa/inet.h>
#include <errno.h>
#include <event2/bufferevent_ssl.h>
#include <event2/util.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/str.h"

/* ---- the URL ---- */

/* NO_PROXY: a list of hosts and domains, "*" for all. */
static int is_exempt(const char *list, const char *host)
{
    size_t host_len = strlen(host);

    while (list != NULL && *list != '\0') {
        size_t n;

        list += strspn(list, ", ");
        n = strcspn(list, ", ");
        if (n == 1 && *list == '*')
            return 1;
        if (n > 0 && *list == '.') {
            list++;
            n--;
        }
        if (n > 0 && n <= host_len && strncasecmp(host + host_len - n, list, n) == 0 &&
            (n == host_len || host[host_len - n - 1] == '.'))
            return 1;
        list += n;
    }
    return 0;
}

static const char *env_of(const char *small, const char *large)
{
    const char *value = getenv(small);

    if (value == NULL && large != NULL)
        value = getenv(large);
    return value != NULL && *value != '\0' ? value : NULL;
}

/* The variables that libcurl looks at: http_proxy counts in small letters only. */
static int check_proxy(const struct mb_link_target *t, struct mb_err *err)
{
    const char *proxy =
        t->is_tls ? env_of("https_proxy", "HTTPS_PROXY") : env_of("http_proxy", NULL);

    if (proxy == NULL)
        proxy = env_of("all_proxy", "ALL_PROXY");
    if (proxy == NULL || is_exempt(env_of("no_proxy", "NO_PROXY"), t->host))
        return 0;
    return mb_err_set(
        err, MB_EUNSUPPORTED,
        "the environment names a proxy: this is the client, which uses none; add %s to "
        "NO_PROXY, or use the full package",
        t->host);
}

int mb_link_target(const char *url, struct mb_link_target *out, struct mb_err *err)
{
    const char *p, *host, *host_end, *port = "";
    size_t authority, host_len;
    int64_t number;

    memset(out, 0, sizeof(*out));
    out->is_tls = mb_starts_with(url, "https://");
    if (!out->is_tls && !mb_starts_with(url, "http://"))
        return mb_err_set(err, MB_EINVAL, "http://HOST:PORT or https://HOST:PORT is expected");
    p = strstr(url, "://") + 3;
    authority = strcspn(p, "/?#");
    out->path = p + authority;
    host = *p == '[' ? p + 1 : p;
    host_end = *p == '[' ? memchr(p, ']', authority) : memchr(p, ':', authority);
    if (host_end == NULL)
        host_end = p + authority;
    host_len = (size_t)(host_end - host);
    snprintf(out->port, sizeof(out->port), "%s", out->is_tls ? "443" : "80");
    if (*p == '[' && host_end < p + authority)
        host_end++;
    if (host_end < p + authority) {
        port = host_end + 1;
        snprintf(out->port, sizeof(out->port), "%.*s", (int)(p + authority - port), port);
    }
    if (host_len == 0 || host_len >= sizeof(out->host) || memchr(p, '@', authority) != NULL ||
        (*p == '[' && memchr(p, ']', authority) == NULL) || strpbrk(url, " \t\r\n") != NULL ||
        (*host_end == ':' ? p + authority - port > 5 : host_end < p + authority) ||
        mb_parse_i64(out->port, 1, 65535, "port", &number, err) != 0)
        return mb_err_set(err, MB_EINVAL,
                          "the address has a host, a port or a space that it may not have");
    memcpy(out->host, host, host_len);
    return check_proxy(out, err);
}

int mb_link_host(const struct mb_link_target *t, struct mb_buf *out)
{
    int is_v6 = strchr(t->host, ':') != NULL;
    int is_default = strcmp(t->port, t->is_tls ? "443" : "80") == 0;

    return mb_buf_printf(out, "%s%s%s%s%s", is_v6 ? "[" : "", t->host, is_v6 ? "]" : "",
                         is_default ? "" : ":", is_default ? "" : t->port);
}

/* ---- waiting ---- */

void mb_link_on_timer(evutil_socket_t fd, short what, void *arg)
{
    (void)fd;
    (void)what;
    (void)arg;
}

int mb_link_wait(struct mb_wire *w, const int *done, uint64_t deadline_mono_ms)
{
    int late = 0;

    while (!*done && !late) {
        uint64_t now = mb_mono_ms();
        uint64_t left = now < deadline_mono_ms ? deadline_mono_ms - now : 0;
        struct timeval tv = {.tv_sec = (time_t)(left / 1000),
                             .tv_usec = (suseconds_t)(left % 1000) * 1000};

        late = left == 0 || evtimer_add(w->timer, &tv) != 0;
        if (!late)
            event_base_loop(w->base, EVLOOP_ONCE);
    }
    evtimer_del(w->timer);
    return late;
}

/* ---- the name ---- */

struct lookup {
    struct evutil_addrinfo *addrs;
    int error, done;
};

static void on_addrs(int error, struct evutil_addrinfo *addrs, void *arg)
{
    struct lookup *l = arg;

    l->error = error;
    l->addrs = addrs;
    l->done = 1;
}

static int look_up(struct mb_wire *w, const struct mb_link_target *t, uint64_t deadline_mono_ms,
                   struct evutil_addrinfo **out, struct mb_err *err)
{
    struct evutil_addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_protocol = IPPROTO_TCP};
    struct lookup l = {0};
    struct evdns_getaddrinfo_request *request =
        evdns_getaddrinfo(w->dns, t->host, t->port, &hints, on_addrs, &l);

    if (mb_link_wait(w, &l.done, deadline_mono_ms)) {
        evdns_getaddrinfo_cancel(request);
        while (!l.done)
            event_base_loop(w->base, EVLOOP_ONCE); /* says that it was cancelled */
        if (l.addrs != NULL)
            evutil_freeaddrinfo(l.addrs);
        return mb_err_set(err, MB_ETIMEOUT, "no answer about the name %s from a name server",
                          t->host);
    }
    if (l.error != 0)
        return mb_err_set(err, MB_EUNAVAIL, "cannot resolve %s: %s", t->host,
                          evutil_gai_strerror(l.error));
    *out = l.addrs;
    return 0;
}

/* ---- TLS ---- */

static int load_authorities(SSL_CTX *tls, struct mb_err *err)
{
    static const char *const places[] = {"/etc/ssl/certs/ca-certificates.crt", /* Debian, Alpine */
                                         "/etc/pki/tls/certs/ca-bundle.crt",   /* Fedora, RHEL */
                                         "/etc/ssl/ca-bundle.pem",             /* SUSE */
                                         "/etc/ssl/cert.pem", NULL};
    const char *file = env_of("AWS_CA_BUNDLE", NULL);

    if (file == NULL)
        file = env_of("SSL_CERT_FILE", NULL);
    for (int i = 0; file == NULL && places[i] != NULL; i++)
        file = access(places[i], R_OK) == 0 ? places[i] : NULL;
    if (file == NULL)
        return mb_err_set(err, MB_EDENIED,
                          "no file of certificate authorities is here: name one by SSL_CERT_FILE");
    if (SSL_CTX_load_verify_locations(tls, file, NULL) != 1)
        return mb_err_set(err, MB_EDENIED, "%s: no certificate authorities can be read from it",
                          file);
    return 0;
}

static int make_tls(struct mb_wire *w, struct mb_err *err)
{
    SSL_CTX *tls = SSL_CTX_new(TLS_client_method());
    int rc = 0;

    if (tls == NULL || SSL_CTX_set_min_proto_version(tls, TLS1_2_VERSION) != 1)
        rc = mb_err_set(err, MB_ENOMEM, "TLS cannot be set up");
    if (rc == 0)
        rc = load_authorities(tls, err);
    if (rc != 0) {
        SSL_CTX_free(tls);
        return rc;
    }
    SSL_CTX_set_verify(tls, SSL_VERIFY_PEER, NULL);
    w->tls = tls;
    return 0;
}

/* Good for t's host only. */
static SSL *make_ssl(struct mb_wire *w, const struct mb_link_target *t)
{
    SSL *ssl = SSL_new(w->tls);
    struct in6_addr ip;
    int is_ip = inet_pton(AF_INET, t->host, &ip) == 1 || inet_pton(AF_INET6, t->host, &ip) == 1, ok;

    if (ssl == NULL)
        return NULL;
    ok = is_ip ? X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), t->host) == 1
               : SSL_set1_host(ssl, t->host) == 1 && SSL_set_tlsext_host_name(ssl, t->host) == 1;
    if (ok)
        return ssl;
    SSL_free(ssl);
    return NULL;
}

/* ---- the connection ---- */

struct attempt {
    int done, code;
    char why[256];
};

void mb_link_why(struct bufferevent *be, short what, char *out, size_t size)
{
    SSL *ssl = bufferevent_openssl_get_ssl(be);
    unsigned long tls_error = ssl != NULL ? bufferevent_get_openssl_error(be) : 0;
    const char *reason = tls_error != 0 ? ERR_reason_error_string(tls_error) : NULL;

    if (what & BEV_EVENT_EOF)
        snprintf(out, size, "the connection was closed");
    else if (ssl != NULL && SSL_get_verify_result(ssl) != X509_V_OK)
        snprintf(out, size, "the server's certificate is refused: %s",
                 X509_verify_cert_error_string(SSL_get_verify_result(ssl)));
    else if (reason != NULL)
        snprintf(out, size, "TLS: %s", reason);
    else if (EVUTIL_SOCKET_ERROR() != 0)
        snprintf(out, size, "%s", evutil_socket_error_to_string(EVUTIL_SOCKET_ERROR()));
    else
        snprintf(out, size, "the connection broke");
}

static void on_connected(struct bufferevent *be, short what, void *arg)
{
    struct attempt *a = arg;
    SSL *ssl = bufferevent_openssl_get_ssl(be);

    if (a->done)
        return;
    a->done = 1;
    if (what & BEV_EVENT_CONNECTED)
        return;
    mb_link_why(be, what, a->why, sizeof(a->why));
    a->code = ssl != NULL && SSL_get_verify_result(ssl) != X509_V_OK ? MB_EDENIED : MB_EUNAVAIL;
}

static struct bufferevent *make_socket(struct mb_wire *w, const struct mb_link_target *t)
{
    SSL *ssl = t->is_tls ? make_ssl(w, t) : NULL;
    struct bufferevent *be =
        !t->is_tls    ? bufferevent_socket_new(w->base, -1, BEV_OPT_CLOSE_ON_FREE)
        : ssl != NULL ? bufferevent_openssl_socket_new(w->base, -1, ssl, BUFFEREVENT_SSL_CONNECTING,
                                                       BEV_OPT_CLOSE_ON_FREE)
                      : NULL;

    if (be == NULL)
        SSL_free(ssl);
    return be;
}

/* A peer that vanished is noticed within 90 s, also while nothing is said. */
static void keep_alive(struct bufferevent *be)
{
    int fd = bufferevent_getfd(be), one = 1, idle_s = 60, between_s = 10, probes = 3;
    unsigned unacknowledged_ms = 90 * 1000;

    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &between_s, sizeof(between_s));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacknowledged_ms,
                     sizeof(unacknowledged_ms));
}

static int try_address(struct mb_wire *w, const struct mb_link_target *t,
                       const struct evutil_addrinfo *addr, uint64_t deadline_mono_ms,
                       struct bufferevent **out, struct mb_err *err)
{
    struct bufferevent *be = make_socket(w, t);
    struct attempt a = {0};

    if (be == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    bufferevent_setcb(be, NULL, NULL, on_connected, &a);
    errno = 0;
    if (bufferevent_socket_connect(be, addr->ai_addr, (int)addr->ai_addrlen) != 0 && !a.done) {
        a.done = 1;
        a.code = MB_EUNAVAIL;
        snprintf(a.why, sizeof(a.why), "%s", strerror(errno));
    }
    if (mb_link_wait(w, &a.done, deadline_mono_ms)) {
        a.code = MB_ETIMEOUT;
        snprintf(a.why, sizeof(a.why), "no answer in time");
    }
    bufferevent_setcb(be, NULL, NULL, NULL, NULL);
    if (a.code == 0) {
        keep_alive(be);
        *out = be;
        return 0;
    }
    bufferevent_free(be);
    return mb_err_set(err, a.code, "cannot connect to %s port %s: %s", t->host, t->port, a.why);
}

int mb_link_open(struct mb_wire *w, const struct mb_link_target *t, uint64_t deadline_mono_ms,
                 struct bufferevent **out, struct mb_err *err)
{
    struct evutil_addrinfo *addrs = NULL;
    struct mb_err last; /* of an address: the next one may be better, and err stays clean */
    size_t n = 0;
    int rc = t->is_tls && w->tls == NULL ? make_tls(w, err) : 0;

    if (rc == 0)
        rc = look_up(w, t, deadline_mono_ms, &addrs, err);
    if (rc != 0)
        return rc;
    for (const struct evutil_addrinfo *a = addrs; a != NULL; a = a->ai_next)
        n++;
    rc = mb_err_set(&last, MB_EUNAVAIL, "%s has no address", t->host);
    for (const struct evutil_addrinfo *a = addrs; a != NULL && rc != 0; a = a->ai_next) {
        uint64_t now = mb_mono_ms();
        uint64_t left = now < deadline_mono_ms ? deadline_mono_ms - now : 0;

        /* An address that is silent leaves the others their share. */
        rc = try_address(w, t, a, now + left / n--, out, &last);
    }
    evutil_freeaddrinfo(addrs);
    return rc == 0 ? 0 : mb_err_set(err, rc, "%s", last.text);
}
