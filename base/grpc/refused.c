/*
 * TLS handshakes of callers that failed, which the library tells its log only.
 *
 *  1. With TLS the library's debugging lines are asked for. Of those one tells of a server's
 *     handshake; the reason is OpenSSL's, in the middle of it. Whose it was is not said.
 *  2. A caller that hangs up in the middle, a port scan, has no such reason, and nothing is said.
 *  3. It comes on a thread of the library: hence a lock.
 */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include "base/grpc/internal.h"
#include "base/log.h"
#include "base/refusals.h"

static const char file_name[] = "chttp2_server.cc",
                  begin[] = "Handshaking failed:", openssl[] = ":SSL routines::";

static const struct {
    const char *reason; /* how it begins */
    const char *why;
} reasons[] = {
    {"peer did not return a certificate",
     "it shows no certificate, and gRPC has mutual TLS here (RAY_USE_TLS=1)"},
    {"certificate verify failed",
     "its certificate is not of the CA in RAY_TLS_CA_CERT, or is not valid now"},
    {"wrong version number", "it speaks no TLS (RAY_USE_TLS=1 is set here)"},
    {"http request", "it speaks no TLS (RAY_USE_TLS=1 is set here)"},
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct mb_refusals refusals; /* guarded by lock */

int mb_grpc_refused_why(const char *file, const char *message, char out[MB_GRPC_WHY_MAX])
{
    const char *name = strrchr(file, '/');
    const char *at = strstr(message, openssl);

    name = name != NULL ? name + 1 : file;
    if (strcmp(name, file_name) != 0 || strncmp(message, begin, sizeof(begin) - 1) != 0 ||
        at == NULL)
        return 0;
    at += sizeof(openssl) - 1;
    for (size_t i = 0; i < sizeof(reasons) / sizeof(reasons[0]); i++) {
        if (strncmp(at, reasons[i].reason, strlen(reasons[i].reason)) != 0)
            continue;
        snprintf(out, MB_GRPC_WHY_MAX, "%s", reasons[i].why);
        return 1;
    }
    snprintf(out, MB_GRPC_WHY_MAX, "the TLS handshake failed: %.*s", (int)strcspn(at, "{"), at);
    return 1;
}

void mb_grpc_refused_handshake(const char *file, const char *message)
{
    char why[MB_GRPC_WHY_MAX];

    if (!mb_grpc_refused_why(file, message, why))
        return;
    pthread_mutex_lock(&lock);
    mb_refusals_say(&refusals, "grpc", "", why);
    pthread_mutex_unlock(&lock);
}
