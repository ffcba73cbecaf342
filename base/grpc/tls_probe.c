/*
 * Why a connection fails, which the library keeps to itself.
 *
 *  1. TCP. Nobody there: TLS is not the reason.
 *  2. A plain side says hello in TLS, without trusting anybody: if the peer answers in TLS, one
 * side has it and the other has not.
 *  3. A side with TLS does the whole handshake, as the library would. What it says about the peer's
 *     certificate is our verdict; an alert that comes then (TLS 1.3: after our end is done) is the
 *     peer's about ours; bytes that are no TLS at all mean a plain peer.
 *  4. A plain side whose peer has no TLS: it may be a server of HTTP/1, which says so when it hears
 *     the first words of HTTP/2.
 *  5. gRPC's own server says nothing about a certificate that it refuses, it hangs up. So may one
 *     that ends just then: only the second time it is a verdict.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/grpc/tls_internal.h"
#include "base/str.h"

enum { SLICE_MS = 100, QUIET_MS = 500, HELLO_MS = 3000 };

struct probe {
    const struct mb_grpc_tls *tls;
    const char *target;
    char host[256];
    int fd;
    uint64_t end_ms;
    const int *cancelled;
    int hung_up; /* the peer, after a handshake that was well for us */
};

/* 1: ready. 0: the time is over, or somebody has lost interest. */
static int wait_fd(const struct probe *p, short events, uint64_t end_ms)
{
    struct pollfd fd = {.fd = p->fd, .events = events};

    while (mb_mono_ms() < end_ms && !__atomic_load_n(p->cancelled, __ATOMIC_RELAXED))
        if (poll(&fd, 1, SLICE_MS) > 0)
            return 1;
    return 0;
}

static int dial(struct probe *p, const struct addrinfo *to)
{
    socklen_t len = sizeof(int);
    int e = 0;

    p->fd = socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (p->fd < 0)
        return 0;
    if (connect(p->fd, to->ai_addr, to->ai_addrlen) == 0)
        return 1;
    if (errno == EINPROGRESS && wait_fd(p, POLLOUT, p->end_ms) &&
        getsockopt(p->fd, SOL_SOCKET, SO_ERROR, &e, &len) == 0 && e == 0)
        return 1;
    close(p->fd);
    p->fd = -1;
    return 0;
}

static int reach(struct probe *p)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *list = NULL;
    const char *port = strrchr(p->target, ':');
    int done = 0;

    if (port == NULL || (size_t)(port - p->target) >= sizeof(p->host))
        return 0;
    snprintf(p->host, sizeof(p->host), "%.*s", (int)(port - p->target), p->target);
    if (p->host[0] == '[' && mb_ends_with(p->host, "]")) {
        memmove(p->host, p->host + 1, strlen(p->host));
        p->host[strlen(p->host) - 1] = '\0';
    }
    if (getaddrinfo(p->host, port + 1, &hints, &list) != 0)
        return 0;
    for (const struct addrinfo *a = list; a != NULL && !done; a = a->ai_next)
        done = dial(p, a);
    freeaddrinfo(list);
    return done;
}

/* ---- what is offered ---- */

static int add_ca(SSL_CTX *ctx, const char *pem)
{
    BIO *bio = BIO_new_mem_buf(pem, -1);
    X509_STORE *store = SSL_CTX_get_cert_store(ctx);
    X509 *cert;
    int n = 0;

    while (bio != NULL && (cert = PEM_read_bio_X509(bio, NULL, NULL, NULL)) != NULL) {
        n += X509_STORE_add_cert(store, cert) == 1;
        X509_free(cert);
    }
    BIO_free(bio);
    return n > 0;
}

static int add_own(SSL_CTX *ctx, const struct mb_grpc_tls *t)
{
    BIO *bio = BIO_new_mem_buf(t->key_pem, -1);
    EVP_PKEY *key = bio != NULL ? PEM_read_bio_PrivateKey(bio, NULL, NULL, NULL) : NULL;
    X509 *more;
    int done;

    BIO_free(bio);
    done = key != NULL && SSL_CTX_use_certificate(ctx, t->cert) == 1 &&
           SSL_CTX_use_PrivateKey(ctx, key) == 1;
    EVP_PKEY_free(key);
    bio = done ? BIO_new_mem_buf(t->cert_pem, -1) : NULL;
    X509_free(bio != NULL ? PEM_read_bio_X509(bio, NULL, NULL, NULL) : NULL);
    while (bio != NULL && (more = PEM_read_bio_X509(bio, NULL, NULL, NULL)) != NULL)
        if (SSL_CTX_add0_chain_cert(ctx, more) != 1)
            X509_free(more);
    BIO_free(bio);
    return done;
}

static SSL *make_session(const struct probe *p, SSL_CTX *ctx)
{
    static const unsigned char h2[] = {2, 'h', '2'};
    unsigned char ip[sizeof(struct in6_addr)];
    X509_VERIFY_PARAM *param;
    SSL *ssl;

    if (SSL_CTX_set_alpn_protos(ctx, h2, sizeof(h2)) != 0 ||
        (p->tls != NULL && (!add_ca(ctx, p->tls->ca_pem) || !add_own(ctx, p->tls))))
        return NULL;
    SSL_CTX_set_verify(ctx, p->tls != NULL ? SSL_VERIFY_PEER : SSL_VERIFY_NONE, NULL);
    ssl = SSL_new(ctx);
    if (ssl == NULL || SSL_set_fd(ssl, p->fd) != 1) {
        SSL_free(ssl);
        return NULL;
    }
    param = SSL_get0_param(ssl);
    if (inet_pton(AF_INET, p->host, ip) == 1 || inet_pton(AF_INET6, p->host, ip) == 1) {
        X509_VERIFY_PARAM_set1_ip_asc(param, p->host);
    } else {
        X509_VERIFY_PARAM_set1_host(param, p->host, 0);
        SSL_set_tlsext_host_name(ssl, p->host);
    }
    return ssl;
}

/* ---- what is seen ---- */

/* 1: done, 0: failed, -1: the time is over. */
static int turn(const struct probe *p, SSL *ssl, int (*step)(SSL *ssl), uint64_t end_ms)
{
    for (;;) {
        int rc, want;

        ERR_clear_error();
        rc = step(ssl);
        if (rc > 0)
            return 1;
        want = SSL_get_error(ssl, rc);
        if (want != SSL_ERROR_WANT_READ && want != SSL_ERROR_WANT_WRITE)
            return 0;
        if (!wait_fd(p, want == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT, end_ms))
            return -1;
    }
}

static int read_a_byte(SSL *ssl)
{
    char byte;

    return SSL_read(ssl, &byte, 1);
}

static int about_peer(const struct probe *p, long verdict, struct mb_err *err)
{
    const char *ca = p->tls->ca_path;

    switch (verdict) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
        return mb_err_set(err, MB_EDENIED, "the certificate of %s has expired: renew it there",
                          p->target);
    case X509_V_ERR_CERT_NOT_YET_VALID:
        return mb_err_set(err, MB_EDENIED,
                          "the certificate of %s is not valid yet: look at the clocks of both "
                          "machines",
                          p->target);
    case X509_V_ERR_IP_ADDRESS_MISMATCH:
    case X509_V_ERR_HOSTNAME_MISMATCH:
        return mb_err_set(err, MB_EDENIED,
                          "the certificate of %s is not for %s: it needs that as a subjectAltName",
                          p->target, p->host);
    default:
        return mb_err_set(err, MB_EDENIED,
                          "the certificate of %s is not of the CA in %s (%s): all of a cluster "
                          "need one RAY_TLS_CA_CERT",
                          p->target, ca, X509_verify_cert_error_string(verdict));
    }
}

/* Of RFC 8446 and RFC 5246: those that speak of the certificate that was shown, or of none. */
static int is_about_certificate(int alert)
{
    switch (alert) {
    case SSL_AD_HANDSHAKE_FAILURE: /* TLS 1.2: none was shown that fits */
    case SSL_AD_BAD_CERTIFICATE:
    case SSL_AD_UNSUPPORTED_CERTIFICATE:
    case SSL_AD_CERTIFICATE_REVOKED:
    case SSL_AD_CERTIFICATE_EXPIRED:
    case SSL_AD_CERTIFICATE_UNKNOWN:
    case SSL_AD_UNKNOWN_CA:
    case SSL_AD_ACCESS_DENIED:
    case SSL_AD_DECRYPT_ERROR:
    case SSL_AD_CERTIFICATE_REQUIRED:
        return 1;
    default:
        return 0;
    }
}

/* An alert, the connection's end, or no TLS at all, by the library's last error. */
static int about_us(struct probe *p, int is_done, struct mb_err *err)
{
    unsigned long e = ERR_peek_error();
    int reason = ERR_GET_REASON(e);
    int is_alert = ERR_GET_LIB(e) == ERR_LIB_SSL && reason > SSL_AD_REASON_OFFSET;
    int is_refused = is_alert || (is_done && p->hung_up);

    p->hung_up = is_done;
    if (is_alert && !is_about_certificate(reason - SSL_AD_REASON_OFFSET))
        return mb_err_set(err, MB_EDENIED,
                          "%s ends the TLS handshake (%s): both sides need a common version of TLS",
                          p->target, ERR_reason_error_string(e));
    /* It was valid when it was read. */
    if (is_refused && mb_grpc_tls_check_dates(p->tls, err) != MB_OK)
        return mb_err_wrap(err, "%s refuses our certificate", p->target);
    if (is_refused)
        return mb_err_set(err, MB_EDENIED,
                          "%s refuses our certificate %s (%s): it must be valid and of the CA that "
                          "is RAY_TLS_CA_CERT there",
                          p->target, p->tls->cert_path,
                          is_alert ? ERR_reason_error_string(e) : "it hangs up");
    if (ERR_GET_LIB(e) == ERR_LIB_SSL &&
        (reason == SSL_R_WRONG_VERSION_NUMBER || reason == SSL_R_HTTP_REQUEST))
        return mb_err_set(err, MB_EDENIED,
                          "%s speaks no TLS, and RAY_USE_TLS=1 is set here: start it with TLS too, "
                          "or unset RAY_USE_TLS",
                          p->target);
    return MB_OK;
}

static int look(struct probe *p, SSL *ssl, struct mb_err *err)
{
    int rc = turn(p, ssl, SSL_connect, p->end_ms);
    int is_done = rc == 1;
    long verdict;

    if (p->tls == NULL) /* an alert is an answer in TLS, too */
        return rc == 1 || ERR_GET_REASON(ERR_peek_error()) > SSL_AD_REASON_OFFSET
                   ? mb_err_set(err, MB_EDENIED,
                                "%s speaks TLS: set RAY_USE_TLS=1, RAY_TLS_SERVER_CERT, "
                                "RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT here",
                                p->target)
                   : MB_OK;
    verdict = SSL_get_verify_result(ssl);
    if (rc == 0 && verdict != X509_V_OK)
        return about_peer(p, verdict, err);
    if (rc == 1)
        rc = turn(p, ssl, read_a_byte, mb_mono_ms() + QUIET_MS);
    return rc == 0 ? about_us(p, is_done, err) : MB_OK;
}

/* MB_OK unless it is certain. */
static int say_hello_in_http2(struct probe *p, struct mb_err *err)
{
    static const char hello[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", says[] = "HTTP/1.";
    char answer[sizeof(says) - 1];
    uint64_t end_ms;
    ssize_t got = 1;
    size_t n = 0;

    if (!reach(p))
        return MB_OK;
    end_ms = mb_mono_ms() + HELLO_MS < p->end_ms ? mb_mono_ms() + HELLO_MS : p->end_ms;
    if (send(p->fd, hello, sizeof(hello) - 1, MSG_NOSIGNAL) == (ssize_t)sizeof(hello) - 1)
        while (n < sizeof(answer) && got > 0 && wait_fd(p, POLLIN, end_ms)) {
            got = recv(p->fd, answer + n, sizeof(answer) - n, 0);
            n += got > 0 ? (size_t)got : 0;
        }
    close(p->fd);
    if (n < sizeof(answer) || memcmp(answer, says, sizeof(answer)) != 0)
        return MB_OK;
    return mb_err_set(err, MB_EUNSUPPORTED,
                      "%s answers in HTTP/1, not in gRPC: that is the port of a dashboard, or of "
                      "another program; the head's GCS port is wanted (6379 unless it was given)",
                      p->target);
}

static int handshake(struct probe *p, struct mb_err *err)
{
    SSL_CTX *ctx;
    SSL *ssl;
    int rc = MB_OK;

    if (!reach(p))
        return MB_OK;
    ctx = SSL_CTX_new(TLS_client_method());
    ssl = ctx != NULL ? make_session(p, ctx) : NULL;
    if (ssl != NULL)
        rc = look(p, ssl, err);
    SSL_free(ssl);
    SSL_CTX_free(ctx);
    ERR_clear_error();
    close(p->fd);
    return rc;
}

/* OpenSSL writes with write(2), and the peer may be gone: that is an error code here, whatever the
 * program does about SIGPIPE. The signal is the thread's own, and so is what holds it. */
static void hold_sigpipe(sigset_t *before, int *was_pending)
{
    sigset_t pipe, pending;

    sigemptyset(&pending);
    sigpending(&pending);
    *was_pending = sigismember(&pending, SIGPIPE);
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, before);
}

static void release_sigpipe(const sigset_t *before, int was_pending)
{
    static const struct timespec at_once;
    sigset_t pipe;

    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    while (!was_pending && sigtimedwait(&pipe, NULL, &at_once) < 0 && errno == EINTR)
        continue;
    pthread_sigmask(SIG_SETMASK, before, NULL);
}

int mb_grpc_tls_probe(const struct mb_grpc_tls *t, const char *target, uint64_t patience_ms,
                      const int *cancelled, struct mb_err *err)
{
    struct mb_grpc_tls *now = NULL; /* it may have been renewed */
    struct probe p = {.tls = t,
                      .target = target,
                      .fd = -1,
                      .end_ms = mb_mono_ms() + patience_ms,
                      .cancelled = cancelled};
    sigset_t before;
    int rc, was_pending;

    if (t != NULL &&
        mb_grpc_tls_load(&(struct mb_grpc_tls_files){t->cert_path, t->key_path, t->ca_path}, &now,
                         err) == MB_EDENIED)
        return MB_EDENIED;
    if (now != NULL)
        p.tls = now;
    mb_err_clear(err);
    hold_sigpipe(&before, &was_pending);
    rc = handshake(&p, err);
    if (p.hung_up && rc == MB_OK) {
        p.end_ms = mb_mono_ms() + patience_ms;
        rc = handshake(&p, err);
    }
    if (t == NULL && rc == MB_OK) {
        p.end_ms = mb_mono_ms() + patience_ms; /* a peer may have waited for more of TLS's hello */
        rc = say_hello_in_http2(&p, err);
    }
    release_sigpipe(&before, was_pending);
    mb_grpc_tls_free(now);
    return rc;
}
