/*
 * Any bytes as what a client sends to the HTTP server, in two pieces (the first byte says where the
 * cut is, and whether the server wants a token): whatever comes, each request that a handler got is
 * answered, what it can ask of the request may be read, a body beyond the bound is never handed
 * out, and when the client is gone nothing of it is left.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <netinet/in.h>
#include <unistd.h>
#include "base/http/internal.h"
#include "base/log.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { BODY_MAX_BYTES = 64, TURNS_MAX = 10000 };

static uv_loop_t loop;
static struct mb_http_server *servers[2]; /* open; with a token */
static volatile size_t seen;
static size_t streamed_bytes;

static void use_text(const char *s)
{
    seen += s ? strlen(s) : 0;
}

static void use_request(const struct mb_http_req *req)
{
    static const char *const names[] = {"Host",          "Content-Length", "Cookie",
                                        "Authorization", "Expect",         "Transfer-Encoding"};

    use_text(mb_http_req_method(req));
    use_text(mb_http_req_path(req));
    use_text(mb_http_req_param(req, "id"));
    use_text(mb_http_req_param(req, "rest"));
    use_text(mb_http_req_query(req, "q"));
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        use_text(mb_http_req_header(req, names[i]));
    seen += (size_t)mb_http_req_is_browser(req);
}

static void on_plain(void *arg, struct mb_http_req *req)
{
    size_t n;
    const char *body = mb_http_req_body(req, &n);

    (void)arg;
    use_request(req);
    if (n > BODY_MAX_BYTES || (n > 0 && body[n] != '\0'))
        abort();
    mb_http_reply(req, 200, "application/octet-stream", body, n);
}

static int on_piece(void *arg, struct mb_http_req *req, const void *p, size_t n, int error_code)
{
    (void)arg;
    for (size_t i = 0; i < n; i++)
        seen += ((const uint8_t *)p)[i];
    streamed_bytes += n;
    if (n == 0 && error_code != 0)
        mb_http_reply_text(req, 400, "cut");
    else if (n == 0)
        mb_http_reply_text(req, 200, "%zu", streamed_bytes);
    return 0;
}

static void on_streamed(void *arg, struct mb_http_req *req)
{
    (void)arg;
    use_request(req);
    streamed_bytes = 0;
    mb_http_req_body_cb(req, on_piece, NULL);
}

static long pull(void *arg, void *buf, size_t max)
{
    int *left = arg;

    if (*left == 0)
        return MB_HTTP_PULL_END;
    *left -= 1;
    memset(buf, 'x', max < 10 ? max : 10);
    return max < 10 ? (long)max : 10;
}

static void on_answer_streamed(void *arg, struct mb_http_req *req)
{
    int *left = malloc(sizeof *left);

    (void)arg;
    *left = 3;
    mb_http_reply_stream(req, 200, "text/plain", pull, free, left);
}

static const struct mb_http_route routes[] = {
    {"GET", "/a/{id}", on_plain, 0},
    {"POST", "/a/{id}", on_plain, 0},
    {"PUT", "/s/{rest*}", on_streamed, MB_HTTP_BODY_STREAM},
    {"GET", "/s/{rest*}", on_answer_streamed, MB_HTTP_PUBLIC},
};

static void begin(void)
{
    int quiet_fd = open("/dev/null", O_WRONLY | O_CLOEXEC);

    mb_log_init(quiet_fd, MB_LOG_ERROR);
    if (uv_loop_init(&loop) != 0)
        abort();
    for (int i = 0; i < 2; i++) {
        struct mb_http_server_opts opts = {.token = i ? "secret" : NULL,
                                           .max_body_bytes = BODY_MAX_BYTES,
                                           .browser_guard_status = i ? 403 : 405};
        int port;
        if (mb_http_server_create(&loop, &opts, &servers[i], NULL) != 0 ||
            mb_http_server_add(servers[i], routes, sizeof routes / sizeof routes[0], NULL, NULL) !=
                0 ||
            mb_http_server_listen(servers[i], &port, NULL) != 0)
            abort();
    }
}

/* By a connection whose end leaves nothing behind: thousands a second would use up the ports. */
static int dial(const struct mb_http_server *srv)
{
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)srv->port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct linger at_once = {.l_onoff = 1};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to) != 0 ||
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once) != 0 ||
        fcntl(fd, F_SETFL, O_NONBLOCK) != 0)
        abort();
    return fd;
}

static void turns(int n)
{
    while (n-- > 0)
        uv_run(&loop, UV_RUN_NOWAIT);
}

static void send_piece(int fd, const uint8_t *p, size_t n)
{
    if (n > 0) /* may fail: the server has closed the connection */
        seen += (size_t)send(fd, p, n, MSG_NOSIGNAL);
    turns(4);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char answer[4096];

    if (size < 1 || size > 16384)
        return 0;
    if (servers[0] == NULL)
        begin();
    struct mb_http_server *srv = servers[data[0] & 1];
    size_t n = size - 1, cut = (size_t)(data[0] >> 1) < n ? (size_t)(data[0] >> 1) : n;
    int fd = dial(srv);

    send_piece(fd, data + 1, cut);
    send_piece(fd, data + 1 + cut, n - cut);
    shutdown(fd, SHUT_WR);
    turns(4);
    while (recv(fd, answer, sizeof answer, 0) > 0)
        turns(1);
    close(fd);
    for (int i = 0; srv->n_conns > 0 || srv->reqs != NULL; i++) {
        if (i == TURNS_MAX)
            abort(); /* something of it stays */
        uv_run(&loop, i < 100 ? UV_RUN_NOWAIT : UV_RUN_ONCE);
    }
    return 0;
}
