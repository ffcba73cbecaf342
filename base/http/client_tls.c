/*
 * What comes over TLS is read ahead of OpenSSL: it asks a socket for the five bytes of a record's
 * head and then for its body, and servers whose records are of 4 KiB make that half a million
 * system calls a GiB.
 *
 * 1. A handshake is through: a buffer of OpenSSL's (BIO_f_buffer) is put between the connection and
 *    what libcurl has there. It lives and ends with the connection. Writing goes past it.
 * 2. libcurl looks at the socket, which says nothing of records that are in the buffer already. So
 *    after each of its turns those of whose buffer OpenSSL took something get another one, until it
 *    took nothing: then the buffer has no whole record and the socket no byte, and the loop tells
 * of the next ones. What libcurl told would not do: of the frame of a chunk, or the body of an
 *    answer that leads elsewhere, it tells nobody.
 * 3. After TURNS others of the loop have theirs first.
 * A libcurl with another TLS library, or without a buffer for want of memory: as without this file.
 * A transfer that pauses gets nothing; resuming it has libcurl read without looking at the socket.
 */
#include <openssl/bio.h>
#include <openssl/ssl.h>
#include <string.h>
#include <strings.h>
#include "base/http/client_internal.h"

enum { AHEAD_BYTES = 64 * 1024, TURNS = 64 };

static void on_handshake(const SSL *of, int where, int ret)
{
    SSL *ssl = (SSL *)of; /* that of the callback's signature is const, the connection is ours */
    BIO *plain = SSL_get_rbio(ssl), *ahead;
    (void)ret;
    if (!(where & SSL_CB_HANDSHAKE_DONE) || !plain || BIO_method_type(plain) == BIO_TYPE_BUFFER)
        return;
    mb_client_tls_out_open(ssl);
    ahead = BIO_new(BIO_f_buffer());
    if (!ahead || BIO_set_read_buffer_size(ahead, AHEAD_BYTES) != 1 || BIO_up_ref(plain) != 1) {
        BIO_free(ahead);
        return;
    }
    SSL_set0_rbio(ssl, BIO_push(ahead, plain)); /* frees what it had, which is in the chain now */
}

static CURLcode on_context(CURL *easy, void *context, void *arg)
{
    (void)easy;
    (void)arg;
    SSL_CTX_set_info_callback(context, on_handshake);
    SSL_CTX_clear_mode(context, SSL_MODE_RELEASE_BUFFERS); /* 16 KiB taken and given a record */
    return CURLE_OK;
}

void mb_client_tls_start(struct mb_http_fetch *f, const struct mb_http_request *r)
{
    const char *library = curl_version_info(CURLVERSION_NOW)->ssl_version;
    if (strncasecmp(r->url, "https:", 6) != 0 && !r->follow_redirects)
        return;
    if (library && strncmp(library, "OpenSSL/3", 9) == 0)
        f->is_read_ahead =
            curl_easy_setopt(f->easy, CURLOPT_SSL_CTX_FUNCTION, on_context) == CURLE_OK;
}

/* On its connection; and on those to other addresses that have the same port here, which is in
 * vain. A watch that is closed by that stays in memory until the loop has its turn. */
static void take_turn(const struct mb_http_fetch *f)
{
    struct watch *next;
    int running;
    for (struct watch *w = f->client->watches; w; w = next) {
        next = w->next;
        if (mb_client_port_of(w) == f->local_port)
            curl_multi_socket_action(f->client->multi, w->fd, CURL_CSELECT_IN, &running);
    }
}

struct ssl_st *mb_client_ssl(const struct mb_http_fetch *f)
{
    struct curl_tlssessioninfo *tls = NULL;
    if (curl_easy_getinfo(f->easy, CURLINFO_TLS_SSL_PTR, &tls) != CURLE_OK || !tls ||
        tls->backend != CURLSSLBACKEND_OPENSSL)
        return NULL;
    return tls->internals;
}

/* Bytes that OpenSSL ever took of the buffer of f's connection; 0: there is none. */
static uint64_t taken_bytes(const struct mb_http_fetch *f)
{
    SSL *ssl = f->is_read_ahead ? mb_client_ssl(f) : NULL;
    BIO *b = ssl ? SSL_get_rbio(ssl) : NULL;
    return b && BIO_method_type(b) == BIO_TYPE_BUFFER ? BIO_number_read(b) : 0;
}

/* Once for each of whose buffer something was taken since it was looked at. */
static int take_turns(struct mb_http_client *c)
{
    int n = 0;
    for (struct mb_http_fetch *f = c->fetches; f; f = f->next) {
        uint64_t taken = taken_bytes(f);
        if (taken == 0 || taken == f->taken_bytes)
            continue;
        f->taken_bytes = taken;
        take_turn(f);
        n++;
    }
    return n;
}

static void on_more(uv_timer_t *timer)
{
    struct mb_http_client *c = timer->data;
    mb_client_tls_turns(c);
    c->reap(c);
}

void mb_client_tls_turns(struct mb_http_client *c)
{
    for (int i = 0; i < TURNS; i++) {
        if (take_turns(c) == 0)
            return;
    }
    uv_timer_start(&c->more_timer, on_more, 0, 0);
}
