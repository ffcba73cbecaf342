/*
 * What goes out over TLS goes to the connection several records at a time: OpenSSL hands on each
 * record of 16 KiB by itself, and each of these is a system call that has the kernel make a packet.
 *
 * 1. A handshake is through: a filter of ours (a BIO) is put between OpenSSL's writing and what
 *    libcurl has there. It lives and ends with the connection, and changes nothing yet.
 * 2. libcurl has got bytes of a body, and they are not the last ones: what OpenSSL makes of them is
 *    kept until no record fits any more, and goes on in one piece then, from inside OpenSSL's
 *    write, so inside of a turn of libcurl. libcurl has more to write, so nothing waits for long.
 * 3. The last ones: what is kept goes on with the next record, and no more is kept.
 * 4. The connection takes no more: OpenSSL hears that when nothing more fits here, and libcurl
 *    tries again when the loop tells it to.
 * For want of memory: as without this file. A transfer that ends before its body does leaves the
 * filter with bytes, and libcurl closes its connection.
 */
#include <openssl/bio.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <string.h>
#include "base/alloc.h"
#include "base/http/client_internal.h"

enum { RECORD_BYTES = 16 * 1024 + 256 /* RFC 8446 section 5.2 */, KEPT_BYTES = 8 * RECORD_BYTES };

struct out {
    int keeps;
    size_t from, to;
    uint8_t *kept; /* [KEPT_BYTES]; NULL: none yet */
};

/* 1: nothing is left. Else what the write below said. */
static int drain(BIO *bio, struct out *o)
{
    while (o->from < o->to) {
        int n = BIO_write(BIO_next(bio), o->kept + o->from, (int)(o->to - o->from));
        if (n <= 0) {
            BIO_copy_next_retry(bio);
            return n;
        }
        o->from += (size_t)n;
    }
    o->from = o->to = 0;
    return 1;
}

static int out_write(BIO *bio, const char *p, int len)
{
    struct out *o = BIO_get_data(bio);
    int n = 1;
    BIO_clear_retry_flags(bio);
    if (len <= 0)
        return 0;
    if (o->keeps && !o->kept && !(o->kept = mb_alloc(KEPT_BYTES)))
        o->keeps = 0;
    if (!o->keeps || (size_t)len > KEPT_BYTES - o->to)
        n = drain(bio, o);
    if (n <= 0)
        return n;
    if (o->keeps && (size_t)len <= KEPT_BYTES) {
        memcpy(o->kept + o->to, p, (size_t)len);
        o->to += (size_t)len;
        return len;
    }
    n = BIO_write(BIO_next(bio), p, len);
    BIO_copy_next_retry(bio);
    return n;
}

static long out_ctrl(BIO *bio, int what, long n, void *p)
{
    struct out *o = BIO_get_data(bio);
    BIO *next = BIO_next(bio);
    long rc = 1;
    if (!next)
        return 0;
    BIO_clear_retry_flags(bio);
    if (what == BIO_CTRL_FLUSH)
        rc = drain(bio, o);
    if (rc > 0) {
        rc = BIO_ctrl(next, what, n, p);
        BIO_copy_next_retry(bio);
    }
    return what == BIO_CTRL_WPENDING ? rc + (long)(o->to - o->from) : rc;
}

static int out_destroy(BIO *bio)
{
    struct out *o = BIO_get_data(bio);
    mb_free(o ? o->kept : NULL);
    mb_free(o);
    return 1;
}

static BIO_METHOD *method; /* NULL: no memory */
static int type;

static void make_method(void)
{
    int wanted = BIO_get_new_index() | BIO_TYPE_FILTER;
    BIO_METHOD *m = BIO_meth_new(wanted, "several records at a time");
    if (m && BIO_meth_set_write(m, out_write) && BIO_meth_set_ctrl(m, out_ctrl) &&
        BIO_meth_set_destroy(m, out_destroy)) {
        method = m;
        type = wanted;
    } else {
        BIO_meth_free(m);
    }
}

void mb_client_tls_out_open(SSL *ssl)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    BIO *plain = SSL_get_wbio(ssl), *bio;
    struct out *o;
    pthread_once(&once, make_method);
    if (!plain || !method || BIO_method_type(plain) == type)
        return;
    o = mb_calloc(1, sizeof *o);
    bio = o ? BIO_new(method) : NULL;
    if (!bio || BIO_up_ref(plain) != 1) {
        BIO_free(bio);
        mb_free(o);
        return;
    }
    BIO_set_data(bio, o);
    BIO_set_init(bio, 1);
    SSL_set0_wbio(ssl, BIO_push(bio, plain)); /* frees what it had, which is in the chain now */
}

void mb_client_tls_out_keep(const struct mb_http_fetch *f, int keeps)
{
    SSL *ssl = f->is_read_ahead ? mb_client_ssl(f) : NULL;
    BIO *bio = ssl ? SSL_get_wbio(ssl) : NULL;
    if (bio && BIO_method_type(bio) == type)
        ((struct out *)BIO_get_data(bio))->keeps = keeps;
}
