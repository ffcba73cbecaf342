/*
 *  1. The three files are read and checked here, because the library says of a bad one no more than
 *     that a handshake failed.
 *  2. The library reads the files itself, again and again, in a thread of its own that all channels
 *     and ports share: what is renewed is used by every later connection.
 *  3. The key stays in memory (the library keeps its own copy too); it is wiped at the end.
 */
#include "base/grpc/tls.h"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <string.h>
#include <sys/stat.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/fs.h"
#include "base/grpc/tls_internal.h"
#include "base/log.h"
#include "base/str.h"

enum { PEM_MAX = 1 << 20, LOOK_AGAIN_S = 10 };

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "TLS: out of memory");
}

static int read_file(const char *path, char **out, struct mb_err *err)
{
    struct mb_buf text = {0};
    int rc = mb_fs_read(path, PEM_MAX, &text, err);

    if (rc == MB_OK && (*out = mb_strdup(mb_buf_str(&text))) == NULL)
        rc = no_memory(err);
    if (text.data != NULL)
        explicit_bzero(text.data, text.len);
    mb_buf_close(&text);
    return rc;
}

/* A file with a password cannot be asked for one: there is nobody to answer. */
static int no_password(char *buf, int size, int is_write, void *arg)
{
    (void)buf, (void)size, (void)is_write, (void)arg;
    return 0;
}

static X509 *first_certificate(const char *pem)
{
    BIO *bio = BIO_new_mem_buf(pem, -1);
    X509 *cert = bio != NULL ? PEM_read_bio_X509(bio, NULL, no_password, NULL) : NULL;

    BIO_free(bio);
    return cert;
}

static EVP_PKEY *private_key(const char *pem)
{
    BIO *bio = BIO_new_mem_buf(pem, -1);
    EVP_PKEY *key = bio != NULL ? PEM_read_bio_PrivateKey(bio, NULL, no_password, NULL) : NULL;

    BIO_free(bio);
    return key;
}

static void date_text(const ASN1_TIME *at, char *out, size_t n)
{
    BIO *bio = BIO_new(BIO_s_mem());
    int len = 0;

    if (bio != NULL && ASN1_TIME_print(bio, at) == 1)
        len = BIO_read(bio, out, (int)n - 1);
    out[len > 0 ? len : 0] = '\0';
    BIO_free(bio);
}

int mb_grpc_tls_check_dates(const struct mb_grpc_tls *t, struct mb_err *err)
{
    const ASN1_TIME *from = X509_get0_notBefore(t->cert), *to = X509_get0_notAfter(t->cert);
    char date[64];

    if (X509_cmp_current_time(to) < 0) {
        date_text(to, date, sizeof(date));
        return mb_err_set(err, MB_EDENIED, "%s: the certificate expired on %s: renew it",
                          t->cert_path, date);
    }
    if (X509_cmp_current_time(from) > 0) {
        date_text(from, date, sizeof(date));
        return mb_err_set(err, MB_EDENIED,
                          "%s: the certificate begins on %s: look at this machine's clock",
                          t->cert_path, date);
    }
    return MB_OK;
}

static int check(struct mb_grpc_tls *t, const char *ca_path, const char *key_path,
                 struct mb_err *err)
{
    EVP_PKEY *key = private_key(t->key_pem);
    X509 *ca = first_certificate(t->ca_pem);
    int rc = MB_OK;

    t->cert = first_certificate(t->cert_pem);
    if (t->cert == NULL)
        rc = mb_err_set(err, MB_EINVAL, "%s: no PEM certificate in it", t->cert_path);
    else if (key == NULL)
        rc =
            mb_err_set(err, MB_EINVAL, "%s: no PEM private key without a password in it", key_path);
    else if (ca == NULL)
        rc = mb_err_set(err, MB_EINVAL, "%s: no PEM certificate in it", ca_path);
    else if (X509_check_private_key(t->cert, key) != 1)
        rc = mb_err_set(err, MB_EINVAL, "%s is not the key of the certificate %s", key_path,
                        t->cert_path);
    else
        rc = mb_grpc_tls_check_dates(t, err);
    ERR_clear_error();
    EVP_PKEY_free(key);
    X509_free(ca);
    return rc;
}

/* Members of its group may: so Kubernetes gives a secret to a user who is not root. */
static void warn_if_open(const char *key_path)
{
    struct stat st;

    if (stat(key_path, &st) == 0 && (st.st_mode & S_IROTH) != 0)
        mb_warn("grpc", "%s: everybody on this machine may read this key (mode %04o): chmod 600 it",
                key_path, (unsigned)st.st_mode & 07777);
}

int mb_grpc_tls_load(const struct mb_grpc_tls_files *files, struct mb_grpc_tls **out,
                     struct mb_err *err)
{
    struct mb_grpc_tls *t = mb_calloc(1, sizeof(*t));
    int rc = MB_OK;

    *out = NULL;
    if (t == NULL || (t->cert_path = mb_strdup(files->cert)) == NULL ||
        (t->key_path = mb_strdup(files->key)) == NULL ||
        (t->ca_path = mb_strdup(files->ca)) == NULL)
        rc = no_memory(err);
    if (rc == MB_OK)
        rc = read_file(files->cert, &t->cert_pem, err);
    if (rc == MB_OK)
        rc = read_file(files->key, &t->key_pem, err);
    if (rc == MB_OK)
        rc = read_file(files->ca, &t->ca_pem, err);
    if (rc == MB_OK)
        rc = check(t, files->ca, files->key, err);
    if (rc != MB_OK) {
        mb_grpc_tls_free(t);
        return rc;
    }
    *out = t;
    return MB_OK;
}

int mb_grpc_tls_read(const struct mb_grpc_tls_files *files, struct mb_grpc_tls **out,
                     struct mb_err *err)
{
    int rc = mb_grpc_tls_load(files, out, err);

    if (rc == MB_OK)
        warn_if_open(files->key);
    return rc;
}

void mb_grpc_tls_free(struct mb_grpc_tls *t)
{
    if (t == NULL)
        return;
    X509_free(t->cert);
    if (t->files != NULL)
        grpc_tls_certificate_provider_release(t->files);
    if (t->key_pem != NULL)
        explicit_bzero(t->key_pem, strlen(t->key_pem));
    mb_free(t->key_pem);
    mb_free(t->cert_pem);
    mb_free(t->ca_pem);
    mb_free(t->cert_path);
    mb_free(t->key_path);
    mb_free(t->ca_path);
    mb_free(t);
}

int mb_grpc_tls_names(const struct mb_grpc_tls *t, const char *host, struct mb_err *err)
{
    unsigned char ip[sizeof(struct in6_addr)];
    int is_ip = inet_pton(AF_INET, host, ip) == 1 || inet_pton(AF_INET6, host, ip) == 1;
    int fits = is_ip ? X509_check_ip_asc(t->cert, host, 0)
                     : X509_check_host(t->cert, host, strlen(host), 0, NULL);

    ERR_clear_error();
    if (fits == 1)
        return MB_OK;
    return mb_err_set(err, MB_EDENIED,
                      "%s: the certificate is not for %s, so nobody could call this node: it needs "
                      "a subjectAltName %s:%s",
                      t->cert_path, host, is_ip ? "IP" : "DNS", host);
}

static grpc_tls_credentials_options *options(struct mb_grpc_tls *t)
{
    grpc_tls_credentials_options *o = grpc_tls_credentials_options_create();

    if (t->files == NULL)
        t->files = grpc_tls_certificate_provider_file_watcher_create(t->key_path, t->cert_path,
                                                                     t->ca_path, LOOK_AGAIN_S);
    grpc_tls_credentials_options_set_certificate_provider(o, t->files);
    grpc_tls_credentials_options_watch_root_certs(o);
    grpc_tls_credentials_options_watch_identity_key_cert_pairs(o);
    return o;
}

grpc_channel_credentials *mb_grpc_tls_client(struct mb_grpc_tls *t)
{
    return t == NULL ? grpc_insecure_credentials_create() : grpc_tls_credentials_create(options(t));
}

grpc_server_credentials *mb_grpc_tls_server(struct mb_grpc_tls *t)
{
    grpc_tls_credentials_options *o;

    if (t == NULL)
        return grpc_insecure_server_credentials_create();
    o = options(t);
    grpc_tls_credentials_options_set_cert_request_type(
        o, GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
    return grpc_tls_server_credentials_create(o);
}
