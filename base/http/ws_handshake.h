/* The opening handshake of RFC 6455 section 4, as pure functions over header values. */
#ifndef MOBULA_BASE_HTTP_WS_HANDSHAKE_H
#define MOBULA_BASE_HTTP_WS_HANDSHAKE_H

enum {
    MB_WS_ACCEPT_BYTES = 29,
    MB_WS_KEY_BYTES = 25
}; /* base64 of 20 and of 16 bytes, and a NUL */

/* Sec-WebSocket-Accept for a Sec-WebSocket-Key. 0, or MB_ENOMEM if OpenSSL cannot. */
int mb_ws_accept_key(const char *key, char out[MB_WS_ACCEPT_BYTES]);
/* 1 if the comma-separated list holds the token, case-insensitively. NULL list: 0. */
int mb_ws_has_token(const char *list, const char *token);
/* 0: a valid upgrade; 400 or 426 (wrong version) and the reason in *text otherwise. */
int mb_ws_check_request(const char *connection, const char *upgrade, const char *version,
                        const char *key, const char **text);

#endif
