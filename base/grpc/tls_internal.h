/* What tls.c, tls_probe.c and the runtime share. */
#ifndef MOBULA_BASE_GRPC_TLS_INTERNAL_H
#define MOBULA_BASE_GRPC_TLS_INTERNAL_H

#include <grpc/grpc_security.h>
#include <openssl/x509.h>
#include "base/grpc/tls.h"

struct mb_grpc_tls {
    char *cert_pem;
    char *key_pem;
    char *ca_pem;
    char *cert_path;
    char *key_path;
    char *ca_path;
    X509 *cert;
    grpc_tls_certificate_provider *files; /* NULL: nobody needed it yet */
};

/* mb_grpc_tls_read() without a word to the log: what was read at the start is read again. */
int mb_grpc_tls_load(const struct mb_grpc_tls_files *files, struct mb_grpc_tls **out,
                     struct mb_err *err);
/* MB_EDENIED if the own certificate is not valid now. */
int mb_grpc_tls_check_dates(const struct mb_grpc_tls *t, struct mb_err *err);

/* t NULL: plain. Each connection is made with what the files have by then. NULL only where the
 * library refuses what was checked. */
grpc_channel_credentials *mb_grpc_tls_client(struct mb_grpc_tls *t);
grpc_server_credentials *mb_grpc_tls_server(struct mb_grpc_tls *t);

#endif
