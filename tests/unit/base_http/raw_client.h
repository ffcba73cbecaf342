/* A client for tests that sends given bytes and collects what comes until the end of the stream. */
#ifndef MOBULA_TESTS_BASE_HTTP_RAW_CLIENT_H
#define MOBULA_TESTS_BASE_HTTP_RAW_CLIENT_H

#include <uv.h>
#include "base/buf.h"

struct raw_client {
    uv_tcp_t tcp;
    uv_connect_t connect;
    uv_write_t write;
    struct mb_buf in;  /* received */
    struct mb_buf out; /* to send */
    char chunk[4096];
    int done;
};

/* Connects to 127.0.0.1:port and sends n bytes. */
void raw_client_start(uv_loop_t *loop, struct raw_client *c, int port, const void *p, size_t n);
/* More bytes on the same connection. */
void raw_client_send(struct raw_client *c, const void *p, size_t n);
/* After uv_read_stop() on its tcp. */
void raw_client_read_on(struct raw_client *c);
/* Runs the loop until the peer ended the stream. */
void raw_client_finish(struct raw_client *c);
void raw_client_free(struct raw_client *c); /* ends the connection if it is open */
/* One request, whole answer; the caller closes out. */
void raw_exchange(uv_loop_t *loop, int port, const char *request, struct mb_buf *out);

#endif
