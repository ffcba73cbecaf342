/*
 * Any bytes as what a WebSocket peer sends after the handshake, to the server's side (first byte
 * even) and to the client's (odd): the connection ends exactly once, text is valid UTF-8, a
 * message is never larger than the limit.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <uv.h>
#include "base/http/ws_conn.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { INPUT_MAX_BYTES = 100000 }; /* fits into the socket at once */

static int n_closed, is_client;

static void on_text(void *arg, const char *text, size_t n)
{
    (void)arg;
    if (!is_client && n > MB_WS_MAX_MESSAGE_BYTES)
        abort();
    for (size_t i = 0; is_client && i < n; i++)
        if ((unsigned char)text[i] == 0xc0 || (unsigned char)text[i] == 0xff)
            abort(); /* bytes that no UTF-8 text has */
}

static void on_close(void *arg, int status_code)
{
    (void)arg;
    (void)status_code;
    n_closed++;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct mb_ws_conn_ops ops = {.on_text = on_text, .on_close = on_close};
    struct mb_ws_conn *c;
    uv_loop_t loop;
    int fd[2];

    if (size < 2 || size > INPUT_MAX_BYTES)
        return 0;
    is_client = data[0] & 1;
    n_closed = 0;
    if (uv_loop_init(&loop) != 0 || mb_ws_conn_create(&loop, is_client, &ops, NULL, &c) != 0 ||
        socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fd) != 0)
        abort();
    /* A part comes with the handshake, the rest through the socket, then the end of stream. */
    size_t extra = (size - 1) / 3;
    if (write(fd[1], data + 1 + extra, size - 1 - extra) < 0)
        abort();
    shutdown(fd[1], SHUT_WR);
    if (mb_ws_conn_start(c, fd[0], data + 1, extra, NULL) != 0)
        abort();
    uv_run(&loop, UV_RUN_DEFAULT);
    if (n_closed != 1 || uv_loop_close(&loop) != 0)
        abort();
    close(fd[0]);
    close(fd[1]);
    return 0;
}
