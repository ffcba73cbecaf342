/*
 * What a turn of the loop sends leaves together.
 *
 * The library writes to the socket with every call and every answer; each write travels through the
 * kernel by itself and wakes the peer: a third of what a small call costs. It has no way to hold
 * writes back, but the kernel has (TCP_CORK).
 *
 *  1. The first message of a turn to a connection goes at once: most turns have only one.
 *  2. With the second (the first, if the turn before had more) the connection is corked; before the
 *     next turn it is uncorked, and what was written since goes out in as few segments as it fills.
 *     A turn is bounded (MB_GRPC_TURN_TAGS), although more in a segment costs less: with all calls
 *     of a window in one, both sides wait for each other in turns, and each core half the time.
 *  3. The library does not tell which descriptor a call uses, so it is looked for once among those
 *     of this process, by its peer's address, and checked again in each turn that corks it. A busy
 *     connection that is not found (it has closed, or is beyond the bounds below) is as fast as it
 *     was without.
 *  4. Nothing depends on the descriptor being the right one: a socket that is corked is uncorked
 *     before the loop waits, whatever it is, and uncorking one that was not is no change. And the
 *     kernel itself holds nothing back for more than 200 ms.
 */
#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include "base/grpc/internal.h"

enum {
    LOOK_PAUSE_MS = 1000, /* between two searches: with 4096 descriptors one takes milliseconds */
    LOOK_MAX = 4096       /* descriptors */
};

enum { CORK_NOT_TRIED, CORK_ON, CORK_IMPOSSIBLE };

/* As the library writes it: "ipv4:1.2.3.4:5", "ipv6:%5B::1%5D:5". */
static void peer_text(const struct sockaddr_storage *from, char out[MB_GRPC_PEER_MAX])
{
    const struct sockaddr_in *in4 = (const struct sockaddr_in *)from;
    const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)from;
    char text[INET6_ADDRSTRLEN] = "";

    if (from->ss_family == AF_INET) {
        inet_ntop(AF_INET, &in4->sin_addr, text, sizeof(text));
        snprintf(out, MB_GRPC_PEER_MAX, "ipv4:%s:%d", text, ntohs(in4->sin_port));
    } else if (IN6_IS_ADDR_V4MAPPED(&in6->sin6_addr)) {
        inet_ntop(AF_INET, &in6->sin6_addr.s6_addr[12], text, sizeof(text));
        snprintf(out, MB_GRPC_PEER_MAX, "ipv4:%s:%d", text, ntohs(in6->sin6_port));
    } else {
        inet_ntop(AF_INET6, &in6->sin6_addr, text, sizeof(text));
        snprintf(out, MB_GRPC_PEER_MAX, "ipv6:%%5B%s%%5D:%d", text, ntohs(in6->sin6_port));
    }
}

static int is_peer_of(int fd, const char *peer)
{
    struct sockaddr_storage from;
    socklen_t len = sizeof(from);
    char text[MB_GRPC_PEER_MAX];

    memset(&from, 0, sizeof(from));
    if (fd < 0 || getpeername(fd, (struct sockaddr *)&from, &len) != 0 ||
        (from.ss_family != AF_INET && from.ss_family != AF_INET6))
        return 0;
    peer_text(&from, text);
    return strcmp(text, peer) == 0;
}

/* -1: none, or it is too early to look again. */
static int find_descriptor(struct mb_grpc *g, const char *peer)
{
    uint64_t now_ms = uv_now(g->loop);
    struct dirent *entry;
    int n = 0, fd = -1;
    DIR *dir;

    if (now_ms < g->look_after_ms)
        return -1;
    g->look_after_ms = now_ms + LOOK_PAUSE_MS;
    dir = opendir("/proc/self/fd");
    if (dir == NULL)
        return -1;
    while (fd < 0 && n++ < LOOK_MAX && (entry = readdir(dir)) != NULL) {
        if (entry->d_name[0] != '.' && is_peer_of(atoi(entry->d_name), peer))
            fd = atoi(entry->d_name);
    }
    closedir(dir);
    return fd;
}

static int set_cork(int fd, int on)
{
    return setsockopt(fd, IPPROTO_TCP, TCP_CORK, &on, sizeof(on));
}

static void cork(struct mb_grpc *g, struct mb_grpc_busy *b)
{
    if (!is_peer_of(b->fd, b->peer))
        b->fd = find_descriptor(g, b->peer);
    b->corked = b->fd >= 0 && set_cork(b->fd, 1) == 0 ? CORK_ON : CORK_IMPOSSIBLE;
}

static void on_before_wait(uv_prepare_t *prepare)
{
    struct mb_grpc *g = prepare->data;

    for (int i = 0; i < MB_GRPC_BUSY_MAX; i++) {
        struct mb_grpc_busy *b = &g->busy[i];

        if (b->corked == CORK_ON)
            set_cork(b->fd, 0);
        b->corked = CORK_NOT_TRIED;
        b->was_busy = b->n_sent > 1;
        b->n_sent = 0;
    }
    uv_prepare_stop(prepare);
}

/* The connection's place, or one that this turn does not need; NULL when all are busy. */
static struct mb_grpc_busy *place_of(struct mb_grpc *g, const char *peer)
{
    struct mb_grpc_busy *unused = NULL;

    for (int i = 0; i < MB_GRPC_BUSY_MAX; i++) {
        struct mb_grpc_busy *b = &g->busy[i];

        if (strcmp(b->peer, peer) == 0)
            return b;
        if (b->n_sent == 0 && (unused == NULL || b->peer[0] == '\0'))
            unused = b;
    }
    if (unused != NULL) {
        snprintf(unused->peer, sizeof(unused->peer), "%s", peer);
        unused->fd = -1;
        unused->was_busy = 0;
    }
    return unused;
}

void mb_grpc_sending(struct mb_grpc *g, const char *peer)
{
    struct mb_grpc_busy *b;

    if (g->stopping || peer == NULL || peer[0] == '\0' || strlen(peer) >= MB_GRPC_PEER_MAX)
        return;
    b = place_of(g, peer);
    if (b == NULL)
        return;
    if (b->n_sent++ == 0)
        uv_prepare_start(&g->before_wait, on_before_wait);
    if ((b->n_sent > 1 || b->was_busy) && b->corked == CORK_NOT_TRIED)
        cork(g, b);
}
