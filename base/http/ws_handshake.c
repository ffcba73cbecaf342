/*
 * The opening handshake.
 *
 * 1. The request must say Upgrade: websocket, Connection: Upgrade, version 13 and carry a key of 16
 *    base64-coded bytes.
 * 2. The answer proves that the server understood: base64(SHA-1(key + fixed text)).
 * Failures: wrong version 426, anything else missing or malformed 400.
 */

/* The SHA1_* functions, which 3.0 deprecates: EVP would load the default provider, and the first
 * reader of a log would cost the head 2 MiB of libcrypto for good, for 20 bytes that are no secret.
 */
#define OPENSSL_API_COMPAT 0x10100000L

#include "base/http/ws_handshake.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <openssl/sha.h>
#include "base/checksum.h"
#include "base/err.h"

int mb_ws_accept_key(const char *key, char out[MB_WS_ACCEPT_BYTES])
{
    char text[128];
    unsigned char digest[SHA_DIGEST_LENGTH];
    SHA_CTX sha;
    int len = snprintf(text, sizeof text, "%.64s258EAFA5-E914-47DA-95CA-C5AB0DC85B11", key);
    if (!SHA1_Init(&sha) || !SHA1_Update(&sha, text, (size_t)len) || !SHA1_Final(digest, &sha))
        return MB_ENOMEM;
    mb_base64(digest, sizeof digest, out);
    return 0;
}

int mb_ws_has_token(const char *list, const char *token)
{
    size_t token_len = strlen(token);
    while (list && *list) {
        list += strspn(list, " \t,");
        size_t n = strcspn(list, ",");
        size_t len = n;
        while (len > 0 && (list[len - 1] == ' ' || list[len - 1] == '\t'))
            len--;
        if (len == token_len && strncasecmp(list, token, len) == 0)
            return 1;
        list += n;
    }
    return 0;
}

static int key_is_valid(const char *key)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    return key && strlen(key) == 24 && strspn(key, digits) == 22 && strcmp(key + 22, "==") == 0;
}

int mb_ws_check_request(const char *connection, const char *upgrade, const char *version,
                        const char *key, const char **text)
{
    if (!mb_ws_has_token(upgrade, "websocket") || !mb_ws_has_token(connection, "upgrade")) {
        *text = "this path is a WebSocket: send Connection: Upgrade and Upgrade: websocket";
        return 400;
    }
    if (!version || strcmp(version, "13") != 0) {
        *text = "unsupported WebSocket version: 13 is spoken here";
        return 426;
    }
    if (!key_is_valid(key)) {
        *text = "Sec-WebSocket-Key is missing or not 16 base64-coded bytes";
        return 400;
    }
    return 0;
}
