/*
 * Where the server listens: at one address, or besides at 127.0.0.1, the same port.
 *
 * 1. open: our own sockets, so that a port in use is a clear error. Without a port one is picked
 *    that both addresses have free, and another one if somebody was faster.
 * 2. libmicrohttpd knows one of them. Connections to the second are accepted here and handed to it.
 * 3. At the limit of connections or descriptors the second is not looked at, so that further ones
 * wait in the kernel's queue, as those of the first do; it is again when one was closed.
 *
 * Failure: a second socket that the loop does not take is closed, and that is said: what dials the
 * node by its address, as every other machine does, finds it.
 */
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/http/internal.h"
#include "base/log.h"
#include "base/ports.h"

static const char local_addr[] = "127.0.0.1";

static int open_at(const char *bind_addr, int wanted, int *out_fd, struct mb_err *err)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST | AI_PASSIVE};
    struct addrinfo *addr = NULL;
    char port[16];
    int one = 1;
    snprintf(port, sizeof port, "%d", wanted);
    int rc = getaddrinfo(bind_addr, port, &hints, &addr);
    if (rc != 0)
        return mb_err_set(err, MB_EINVAL,
                          "cannot listen on %s port %d: %s (an IP address is needed)", bind_addr,
                          wanted, gai_strerror(rc));
    int fd = socket(addr->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) != 0 ||
        bind(fd, addr->ai_addr, addr->ai_addrlen) != 0 || listen(fd, 511) != 0) {
        int e = errno;
        if (e == EADDRINUSE)
            rc = mb_err_set(err, MB_EEXIST,
                            "port %d on %s is in use: stop what listens there or choose another",
                            wanted, bind_addr);
        else
            rc = mb_err_sys(err, e, "cannot listen on %s port %d", bind_addr, wanted);
        if (fd >= 0)
            close(fd);
    } else {
        *out_fd = fd;
    }
    freeaddrinfo(addr);
    return rc;
}

static int socket_port(int fd)
{
    struct sockaddr_storage addr;
    socklen_t len = sizeof addr;
    char port[16] = "0";
    if (getsockname(fd, (struct sockaddr *)&addr, &len) == 0)
        getnameinfo((struct sockaddr *)&addr, len, NULL, 0, port, sizeof port, NI_NUMERICSERV);
    return (int)strtol(port, NULL, 10);
}

static int open_both(struct mb_http_server *srv, int wanted, int *out_fd, struct mb_err *err)
{
    int rc = open_at(srv->bind_addr, wanted, out_fd, err);
    if (rc == 0 && srv->is_local_too) {
        rc = open_at(local_addr, socket_port(*out_fd), &srv->local_fd, err);
        if (rc != 0)
            close(*out_fd);
    }
    return rc;
}

int mb_http_listen_open(struct mb_http_server *srv, int *out_fd, int *out_port, struct mb_err *err)
{
    int rc = MB_EEXIST;

    if (srv->port != 0)
        rc = open_both(srv, srv->port, out_fd, err);
    for (int i = 0; srv->port == 0 && i < MB_PORT_RACES && rc == MB_EEXIST; i++)
        rc = open_both(srv, mb_port_pick(srv->bind_addr), out_fd, err);
    if (rc == 0)
        *out_port = socket_port(*out_fd);
    return rc;
}

static void on_local(uv_poll_t *poll, int status, int events)
{
    struct mb_http_server *srv = poll->data;
    struct sockaddr_storage addr;
    socklen_t len = sizeof addr;
    (void)status;
    (void)events;
    if (srv->stopping)
        return;
    if (srv->n_conns >= srv->max_connections) {
        uv_poll_stop(poll);
        return;
    }
    int fd = accept4(srv->local_fd, (struct sockaddr *)&addr, &len, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
        MHD_add_connection(srv->daemon, fd, (struct sockaddr *)&addr, len); /* or closes it */
        mb_http_server_wake(srv);
    } else if (errno == EMFILE || errno == ENFILE) {
        uv_poll_stop(poll); /* until the daemon has run, which without a connection nothing asks */
        mb_http_server_wake_soon(srv);
    }
}

void mb_http_listen_local(struct mb_http_server *srv)
{
    if (srv->local_fd < 0)
        return;
    int rc = uv_poll_init(srv->loop, &srv->local_poll, srv->local_fd);
    if (rc != 0) {
        mb_warn("http", "nothing listens on %s: uv_poll_init: %s", local_addr, uv_strerror(rc));
        mb_http_listen_drop(srv);
        return;
    }
    srv->local_poll.data = srv;
    srv->is_local_polled = 1;
    srv->n_handles++;
    mb_http_listen_again(srv);
}

void mb_http_listen_again(struct mb_http_server *srv)
{
    if (srv->is_local_polled && !srv->stopping && srv->n_conns < srv->max_connections &&
        !uv_is_active((uv_handle_t *)&srv->local_poll))
        uv_poll_start(&srv->local_poll, UV_READABLE, on_local);
}

void mb_http_listen_drop(struct mb_http_server *srv)
{
    if (srv->local_fd >= 0)
        close(srv->local_fd);
    srv->local_fd = -1;
}
