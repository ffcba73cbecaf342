/*
 *  1. accept: only our own user or root;
 *  2. "hello" (any version up to ours) makes greeting, log and "replayed" due; everything before
 *     it, and whatever is not a message, closes the connection;
 *  3. flush: greeting, events in order, "replayed" once at the end of the log, then fds if asked;
 *  4. EAGAIN: the rest waits for POLLOUT; on any other error nothing more is sent, but what the
 *     client asked before it went (release, stop) is still read. EOF: the client is forgotten.
 */
#include "agent/supervise/clients.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

int mb_sup_clients_listen(struct mb_sup_clients *c, const struct mb_sup_state *state, char *text)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX, .sun_path = MB_SUP_SOCKET};
    mode_t old_mask;
    int rc;

    memset(c, 0, sizeof(*c));
    c->state = state;
    for (size_t i = 0; i < MB_SUP_CLIENTS_MAX; i++)
        c->clients[i].fd = -1;
    c->listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (c->listen_fd < 0) {
        snprintf(text, MB_SUP_TEXT_MAX, "socket: %s", strerror(errno));
        return -1;
    }
    unlink(MB_SUP_SOCKET); /* of a supervisor that was killed; the directory is ours alone */
    old_mask = umask(077);
    rc = bind(c->listen_fd, (struct sockaddr *)&addr, sizeof(addr));
    umask(old_mask);
    if (rc != 0 || listen(c->listen_fd, MB_SUP_CLIENTS_MAX) != 0) {
        snprintf(text, MB_SUP_TEXT_MAX, "socket %s: %s", MB_SUP_SOCKET, strerror(errno));
        return -1;
    }
    return 0;
}

static void forget(struct mb_sup_client *client)
{
    if (client->fd >= 0)
        close(client->fd);
    *client = (struct mb_sup_client){.fd = -1};
}

void mb_sup_clients_close(struct mb_sup_clients *c)
{
    if (c->state == NULL)
        return; /* never listened */
    for (size_t i = 0; i < MB_SUP_CLIENTS_MAX; i++)
        forget(&c->clients[i]);
    if (c->listen_fd >= 0) {
        close(c->listen_fd);
        unlink(MB_SUP_SOCKET);
    }
    c->listen_fd = -1;
}

void mb_sup_clients_event(struct mb_sup_clients *c, const struct mb_sup_msg *m)
{
    if (c->n_events < MB_SUP_EVENTS_MAX) /* each fact happens once, so this always holds */
        c->events[c->n_events++] = *m;
}

static int is_due(const struct mb_sup_clients *c, const struct mb_sup_client *client)
{
    return client->greeted && !client->deaf &&
           (client->greeting_due || client->next_event < c->n_events || !client->replayed ||
            client->next_fd <= c->state->n_children);
}

nfds_t mb_sup_clients_poll(const struct mb_sup_clients *c, struct pollfd *fds)
{
    nfds_t n = 0;

    fds[n++] = (struct pollfd){.fd = c->listen_fd, .events = POLLIN};
    for (size_t i = 0; i < MB_SUP_CLIENTS_MAX; i++) {
        short events = (short)(is_due(c, &c->clients[i]) ? POLLIN | POLLOUT : POLLIN);

        fds[n++] = (struct pollfd){.fd = c->clients[i].fd, .events = events};
    }
    return n;
}

static void accept_one(struct mb_sup_clients *c)
{
    struct ucred peer;
    socklen_t len = sizeof(peer);
    int fd = accept4(c->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    if (fd < 0)
        return; /* it went away again */
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) == 0 &&
        (peer.uid == geteuid() || peer.uid == 0)) {
        for (size_t i = 0; i < MB_SUP_CLIENTS_MAX; i++) {
            if (c->clients[i].fd < 0) {
                c->clients[i].fd = fd;
                return;
            }
        }
    }
    close(fd);
}

static void take(struct mb_sup_clients *c, struct mb_sup_client *client, const struct mb_sup_msg *m)
{
    if (m->type == MB_SUP_MSG_HELLO && !client->greeted && m->version <= MB_SUP_PROTOCOL) {
        client->greeted = client->greeting_due = 1;
        client->next_fd = c->state->n_children + 1;
    } else if (!client->greeted) {
        forget(client);
    } else if (m->type == MB_SUP_MSG_FDS) {
        client->next_fd = 0;
    } else if (m->type == MB_SUP_MSG_STOP || m->type == MB_SUP_MSG_KILL) {
        c->requests[c->n_requests++] = *m;
    } else if (m->type == MB_SUP_MSG_RELEASE) {
        c->released |= c->state->all_exited;
    } else {
        forget(client);
    }
}

static void read_one(struct mb_sup_clients *c, struct mb_sup_client *client)
{
    char packet[MB_SUP_PACKET_MAX];
    struct mb_sup_msg m;
    ssize_t n = recv(client->fd, packet, sizeof(packet), MSG_DONTWAIT);

    /* ECONNRESET says once that it closed with our news unread; its last requests follow. */
    if (n < 0 && (errno == EAGAIN || errno == EINTR || errno == ECONNRESET))
        return;
    if (n <= 0 || mb_sup_msg_parse(packet, (size_t)n, &m) != 0)
        forget(client);
    else
        take(c, client, &m);
}

void mb_sup_clients_read(struct mb_sup_clients *c, const struct pollfd *fds, nfds_t n)
{
    c->n_requests = c->next_request = 0;
    for (nfds_t i = 1; i < n; i++) {
        if ((fds[i].revents & ~POLLOUT) != 0)
            read_one(c, &c->clients[i - 1]);
    }
    if (n > 0 && fds[0].revents != 0)
        accept_one(c);
}

int mb_sup_clients_next(struct mb_sup_clients *c, struct mb_sup_msg *out)
{
    if (c->next_request == c->n_requests)
        return 0;
    *out = c->requests[c->next_request++];
    return 1;
}

/* 1: sent; 0: the socket is full, or nobody reads any more: what it asked before still counts. */
static int send_one(struct mb_sup_client *client, const struct mb_sup_msg *m, int pass_fd)
{
    char packet[MB_SUP_PACKET_MAX];
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {.space = {0}};
    struct iovec iov = {.iov_base = packet, .iov_len = mb_sup_msg_format(m, packet)};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

    if (pass_fd >= 0) {
        struct cmsghdr *head;

        msg.msg_control = control.space;
        msg.msg_controllen = sizeof(control.space);
        head = CMSG_FIRSTHDR(&msg);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(head), &pass_fd, sizeof(int));
    }
    if (sendmsg(client->fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0)
        return 1;
    if (errno != EAGAIN && errno != EINTR && errno != ENOBUFS)
        client->deaf = 1;
    return 0;
}

static void flush_one(struct mb_sup_clients *c, struct mb_sup_client *client, const int *report_fds)
{
    struct mb_sup_msg m = {.type = MB_SUP_MSG_HELLO,
                           .version = MB_SUP_PROTOCOL,
                           .pid = c->state->supervisor_pid,
                           .ticks = c->state->supervisor_ticks,
                           .child = (uint32_t)c->state->n_children};

    if (client->greeting_due && !send_one(client, &m, -1))
        return;
    client->greeting_due = 0;
    while (client->next_event < c->n_events) {
        if (!send_one(client, &c->events[client->next_event], -1))
            return;
        client->next_event++;
    }
    m = (struct mb_sup_msg){.type = MB_SUP_MSG_REPLAYED};
    if (!client->replayed && !send_one(client, &m, -1))
        return;
    client->replayed = 1;
    for (; client->next_fd < c->state->n_children; client->next_fd++) {
        m = (struct mb_sup_msg){.type = MB_SUP_MSG_FD, .child = (uint32_t)client->next_fd};
        if (report_fds[client->next_fd] >= 0 && !send_one(client, &m, report_fds[client->next_fd]))
            return;
    }
    m = (struct mb_sup_msg){.type = MB_SUP_MSG_FDS};
    if (client->next_fd == c->state->n_children && send_one(client, &m, -1))
        client->next_fd++;
}

void mb_sup_clients_flush(struct mb_sup_clients *c, const int *report_fds)
{
    for (size_t i = 0; i < MB_SUP_CLIENTS_MAX; i++) {
        if (c->clients[i].fd >= 0 && is_due(c, &c->clients[i]))
            flush_one(c, &c->clients[i], report_fds);
    }
}
