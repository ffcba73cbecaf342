/*
 * Mutual TLS as Ray has it: one certificate and key for both roles, one CA file that signs all
 * peers. A runtime that has it (mb_grpc_secure() in grpc.h) uses it for every channel and server.
 * Blocking, any thread: files are read when a program starts, and again while it runs.
 */
#ifndef MOBULA_BASE_GRPC_TLS_H
#define MOBULA_BASE_GRPC_TLS_H

#include <stdint.h>
#include "base/err.h"

struct mb_grpc_tls_files {
    const char *cert; /* PEM, the own certificate first, then intermediate ones */
    const char *key;  /* PEM, without a password */
    const char *ca;   /* PEM, one or more */
};

struct mb_grpc_tls;

/* A key that everybody on this machine may read is warned of in the log.
 * MB_EDENIED for a certificate that is not valid now, MB_EINVAL for files that are no such PEM or
 * do not belong together; the text says which file. */
int mb_grpc_tls_read(const struct mb_grpc_tls_files *files, struct mb_grpc_tls **out,
                     struct mb_err *err);
void mb_grpc_tls_free(struct mb_grpc_tls *t); /* NULL is legal */

/* Peers that dial host, an address or a name, accept the own certificate: else MB_EDENIED. */
int mb_grpc_tls_names(const struct mb_grpc_tls *t, const char *host, struct mb_err *err);

/*
 * Why nobody can talk to "host:port": one handshake beside the channel's own. t NULL: this side is
 * plain. MB_EDENIED: it is the certificates, or only one side has TLS; the text says what to do.
 * MB_EUNSUPPORTED: neither side has TLS, and the peer speaks HTTP/1.
 * MB_OK: TLS is not the reason, as far as can be seen (nobody listens; all is well). Takes at most
 * patience_ms, as long again if the peer hangs up, and once more for a plain side that asks whether
 * it is HTTP/1; *cancelled (read atomically), set by another thread, ends it within 100 ms. Neither
 * bounds the look-up of a host's name, which is the resolver's: 5 s a try and twice for each
 * server, unless resolv.conf says otherwise.
 */
int mb_grpc_tls_probe(const struct mb_grpc_tls *t, const char *target, uint64_t patience_ms,
                      const int *cancelled, struct mb_err *err);

#endif
