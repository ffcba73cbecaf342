/*
 * The meeting of a gang's ranks.
 *
 *  1. mb_comm_listen: bind a free port of the given address, draw a cookie, print the endpoint.
 *  2. mb_rendezvous: each rank dials every lower rank and accepts every higher one. The dialler's
 *     hello shows the cookie of the endpoint it dialled and its own; the answer shows the dialler's
 *     cookie, so each side knows that the other was given the endpoints of this gang.
 *  3. On one host the dialler offers a memfd in its hello; if the other side can open it, it says
 * so and the pair needs no data socket. Otherwise the dialler makes a second connection for data.
 *  4. Done when every peer has a control socket and a carrier.
 * Failures
 *  5. A connection with a wrong hello is a stranger: it is closed, the first of them is logged, we
 * go on. One that says nothing is closed when its place is needed; it never delays the others.
 *  6. A dialled rank that refuses, answers wrongly, or a met one that goes away: MB_EUNAVAIL naming
 *     the rank. Ranks that do not come before the deadline: MB_ETIMEOUT naming the first.
 */
#include "worker/parallel/comm_rendezvous.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"

enum { HELLO_BYTES = 80, REPLY_BYTES = 32, CONTROL = 0, DATA = 1, PENDING_EXTRA = 64 };

static const char MAGIC[8] = {'M', 'B', 'C', 'O', 'M', 'M', '0', '2'};

struct hello {
    uint32_t kind, rank, world_size;
    int32_t shm_fd; /* -1: none offered */
    int64_t pid;
    uint8_t to_cookie[MB_COOKIE_BYTES], from_cookie[MB_COOKIE_BYTES];
    uint8_t shm_cookie[MB_SHM_COOKIE_BYTES];
};

/* One connection that we dialled or accepted, until its handshake is over. */
struct conn {
    int fd;        /* -1: free */
    int dialled;   /* 1: we dialled `rank` */
    int connected; /* dialled only: the hello is out */
    uint32_t rank, kind;
    struct mb_shm *shm; /* offered, dialled only */
    int shm_fd;
    uint8_t shm_cookie[MB_SHM_COOKIE_BYTES];
    uint8_t buf[HELLO_BYTES];
    size_t got;
    uint64_t since_ms;
};

struct meeting {
    const struct mb_comm_listener *l;
    struct mb_endpoint *ends; /* [world] */
    struct mb_peer *peers;
    struct conn *conns;
    size_t n_conns;
    struct pollfd *polls; /* [1 + n_conns + world] */
    uint64_t deadline_ms;
    unsigned n_strangers; /* refused so far; only the first is logged */
};

/* ---- endpoints ---- */

static void put32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++) {
        p[i] = (uint8_t)(v >> 8 * i);
    }
}

static uint32_t get32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static int cookies_equal(const uint8_t *a, const uint8_t *b)
{
    unsigned diff = 0; /* the time must not tell how many bytes were right */
    for (int i = 0; i < MB_COOKIE_BYTES; i++) {
        diff |= (unsigned)(a[i] ^ b[i]);
    }
    return diff == 0;
}

static int address_parse(const char *text, uint16_t port, struct mb_endpoint *e)
{
    struct sockaddr_in *in4 = (struct sockaddr_in *)&e->address;
    struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)&e->address;
    memset(&e->address, 0, sizeof e->address);
    if (inet_pton(AF_INET, text, &in4->sin_addr) == 1) {
        in4->sin_family = AF_INET;
        in4->sin_port = htons(port);
        e->address_len = sizeof *in4;
        return 0;
    }
    if (inet_pton(AF_INET6, text, &in6->sin6_addr) == 1) {
        in6->sin6_family = AF_INET6;
        in6->sin6_port = htons(port);
        e->address_len = sizeof *in6;
        return 0;
    }
    return -1;
}

int mb_endpoint_parse(const char *text, struct mb_endpoint *out, struct mb_err *err)
{
    char address[64], host[MB_HOST_ID_MAX], cookie[2 * MB_COOKIE_BYTES + 2];
    unsigned port = 0;
    int used = 0;
    if (sscanf(text, "mobula-tcp/1 %63s %5u %79s %33s%n", address, &port, host, cookie, &used) !=
            4 ||
        text[used] != '\0' || port == 0 || port > 65535 ||
        address_parse(address, (uint16_t)port, out) != 0 || strlen(cookie) != 2 * MB_COOKIE_BYTES ||
        mb_unhex(cookie, out->cookie, MB_COOKIE_BYTES) != 0) {
        return mb_err_set(err, MB_EPROTO, "not an endpoint of this version of mobula-worker");
    }
    snprintf(out->host_id, sizeof out->host_id, "%s", host);
    return 0;
}

/* Ranks that see each other's /proc: same boot, same process namespace. */
static void host_id(char out[MB_HOST_ID_MAX])
{
    struct mb_buf boot = {0};
    char ns[40] = "";
    ssize_t n = readlink("/proc/self/ns/pid", ns, sizeof ns - 1);
    ns[n > 0 ? n : 0] = '\0';
    if (mb_fs_read("/proc/sys/kernel/random/boot_id", 128, &boot, NULL) != 0) {
        mb_buf_reset(&boot);
    }
    int len = (int)strcspn(mb_buf_str(&boot), "\n");
    snprintf(out, MB_HOST_ID_MAX, "%.*s/%s", len < 36 ? len : 36, mb_buf_str(&boot), ns);
    mb_buf_close(&boot);
}

int mb_comm_listen(const struct mb_comm_options *o, struct mb_comm_listener **out,
                   struct mb_err *err)
{
    const char *address = o->address != NULL ? o->address : "127.0.0.1";
    if (o->world_size == 0 || o->world_size > MB_COMM_WORLD_MAX || o->rank >= o->world_size) {
        return mb_err_set(err, MB_EINVAL, "rank %u of a world of %u: 1 to %d ranks are possible",
                          o->rank, o->world_size, (int)MB_COMM_WORLD_MAX);
    }
    struct mb_comm_listener *l = mb_calloc(1, sizeof *l);
    if (l == NULL) {
        return mb_err_set(err, MB_ENOMEM, "communicator: out of memory");
    }
    l->options = *o;
    l->options.address = NULL;
    l->fd = -1;
    int rc = 0;
    if (address_parse(address, 0, &l->self) != 0) {
        rc = mb_err_set(err, MB_EINVAL, "\"%s\" is not a numeric IPv4 or IPv6 address", address);
        goto out;
    }
    l->fd = socket(l->self.address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (l->fd < 0 ||
        bind(l->fd, (const struct sockaddr *)&l->self.address, l->self.address_len) != 0 ||
        listen(l->fd, 2 * MB_COMM_WORLD_MAX) != 0) {
        rc = mb_err_sys(err, errno, "cannot listen on %s", address);
        goto out;
    }
    socklen_t len = sizeof l->self.address;
    if (getsockname(l->fd, (struct sockaddr *)&l->self.address, &len) != 0) {
        rc = mb_err_sys(err, errno, "getsockname");
        goto out;
    }
    unsigned port = ntohs(l->self.address.ss_family == AF_INET
                              ? ((struct sockaddr_in *)&l->self.address)->sin_port
                              : ((struct sockaddr_in6 *)&l->self.address)->sin6_port);
    host_id(l->self.host_id);
    mb_random_bytes(l->self.cookie, MB_COOKIE_BYTES);
    char hex[2 * MB_COOKIE_BYTES + 1];
    snprintf(l->text, sizeof l->text, "mobula-tcp/1 %s %u %s %s", address, port, l->self.host_id,
             mb_hex(l->self.cookie, MB_COOKIE_BYTES, hex));
    *out = l;
    return 0;
out:
    mb_comm_listener_destroy(l);
    return rc;
}

const char *mb_comm_listener_endpoint(const struct mb_comm_listener *l)
{
    return l->text;
}

void mb_comm_listener_destroy(struct mb_comm_listener *l)
{
    if (l == NULL) {
        return;
    }
    if (l->fd >= 0) {
        close(l->fd);
    }
    mb_free(l);
}

/* ---- peers ---- */

void mb_peer_init(struct mb_peer *p)
{
    memset(p, 0, sizeof *p);
    p->control = p->data = -1;
}

void mb_peer_close(struct mb_peer *p)
{
    if (p->control >= 0) {
        close(p->control);
    }
    if (p->data >= 0) {
        close(p->data);
    }
    mb_shm_destroy(p->shm);
    mb_peer_init(p);
}

static int peer_met(const struct mb_peer *p)
{
    return p->control >= 0 && (p->data >= 0 || p->shm != NULL);
}

/* ---- hello and answer ---- */

static void hello_write(const struct hello *h, uint8_t out[HELLO_BYTES])
{
    memcpy(out, MAGIC, 8);
    put32(out + 8, h->kind);
    put32(out + 12, h->rank);
    put32(out + 16, h->world_size);
    put32(out + 20, (uint32_t)h->shm_fd);
    put32(out + 24, (uint32_t)((uint64_t)h->pid & 0xffffffffU));
    put32(out + 28, (uint32_t)((uint64_t)h->pid >> 32));
    memcpy(out + 32, h->to_cookie, MB_COOKIE_BYTES);
    memcpy(out + 48, h->from_cookie, MB_COOKIE_BYTES);
    memcpy(out + 64, h->shm_cookie, MB_SHM_COOKIE_BYTES);
}

static int hello_read(const uint8_t in[HELLO_BYTES], struct hello *h)
{
    if (memcmp(in, MAGIC, 8) != 0) {
        return -1;
    }
    h->kind = get32(in + 8);
    h->rank = get32(in + 12);
    h->world_size = get32(in + 16);
    h->shm_fd = (int32_t)get32(in + 20);
    h->pid = (int64_t)((uint64_t)get32(in + 24) | (uint64_t)get32(in + 28) << 32);
    memcpy(h->to_cookie, in + 32, MB_COOKIE_BYTES);
    memcpy(h->from_cookie, in + 48, MB_COOKIE_BYTES);
    memcpy(h->shm_cookie, in + 64, MB_SHM_COOKIE_BYTES);
    return 0;
}

/* Control traffic is single bytes that somebody waits for. Where nothing is acknowledged any more,
 * be it said or asked whether somebody is there, the connection stands for as long as an operation
 * may take: a network that is cut for minutes ends no gang. That a host is gone its nodes' head
 * finds out. */
static void tune(int fd, uint64_t timeout_ms)
{
    int one = 1, idle_s = 5, interval_s = 2;
    unsigned int stands_ms = timeout_ms < INT_MAX ? (unsigned int)timeout_ms : INT_MAX;

    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &stands_ms, sizeof stands_ms);
}

/* ---- connections in progress ---- */

static void conn_close(struct conn *c)
{
    if (c->fd >= 0) {
        close(c->fd);
    }
    if (c->shm_fd >= 0) {
        close(c->shm_fd);
    }
    mb_shm_destroy(c->shm);
    *c = (struct conn){.fd = -1, .shm_fd = -1};
}

/* A free place; if there is none, that of the stranger who has been silent longest. */
static struct conn *conn_take(struct meeting *m)
{
    struct conn *oldest = NULL;
    for (size_t i = 0; i < m->n_conns; i++) {
        struct conn *c = &m->conns[i];
        if (c->fd < 0) {
            return c;
        }
        if (!c->dialled && (oldest == NULL || c->since_ms < oldest->since_ms)) {
            oldest = c;
        }
    }
    if (oldest != NULL) {
        conn_close(oldest);
    }
    return oldest;
}

static int dial(struct meeting *m, uint32_t rank, uint32_t kind, struct mb_err *err)
{
    const struct mb_endpoint *e = &m->ends[rank];
    struct conn *c = conn_take(m);
    if (c == NULL) {
        return mb_err_set(err, MB_EFULL, "rendezvous: no place for a connection to rank %u", rank);
    }
    c->dialled = 1;
    c->rank = rank;
    c->kind = kind;
    c->since_ms = mb_mono_ms();
    c->fd = socket(e->address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0 || (connect(c->fd, (const struct sockaddr *)&e->address, e->address_len) != 0 &&
                      errno != EINPROGRESS)) {
        int rc =
            mb_err_set(err, MB_EUNAVAIL, "rank %u cannot be reached: %s", rank, strerror(errno));
        conn_close(c);
        return rc;
    }
    if (kind == CONTROL && !m->l->options.no_shared_memory &&
        strcmp(e->host_id, m->l->self.host_id) == 0) {
        struct mb_err why;
        if (mb_shm_create(&c->shm, &c->shm_fd, c->shm_cookie, &why) != 0) {
            mb_warn("comm", "rank %u will be reached by TCP: %s", rank, why.text);
            c->shm = NULL;
            c->shm_fd = -1;
        }
    }
    return 0;
}

static int dialled_failed(struct conn *c, const char *why, struct mb_err *err)
{
    int rc = mb_err_set(err, MB_EUNAVAIL, "rank %u cannot be reached: %s", c->rank, why);
    conn_close(c);
    return rc;
}

static int send_hello(struct meeting *m, struct conn *c, struct mb_err *err)
{
    int so_error = 0;
    socklen_t len = sizeof so_error;
    getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &so_error, &len);
    if (so_error != 0) {
        return dialled_failed(c, strerror(so_error), err);
    }
    struct hello h = {.kind = c->kind,
                      .rank = m->l->options.rank,
                      .world_size = m->l->options.world_size,
                      .shm_fd = c->shm_fd,
                      .pid = getpid()};
    memcpy(h.to_cookie, m->ends[c->rank].cookie, MB_COOKIE_BYTES);
    memcpy(h.from_cookie, m->l->self.cookie, MB_COOKIE_BYTES);
    memcpy(h.shm_cookie, c->shm_cookie, MB_SHM_COOKIE_BYTES);
    uint8_t wire[HELLO_BYTES];
    hello_write(&h, wire);
    tune(c->fd, m->l->options.timeout_ms);
    /* The send buffer of a fresh socket is empty: it takes these bytes whole. */
    if (send(c->fd, wire, sizeof wire, MSG_NOSIGNAL) != (ssize_t)sizeof wire) {
        return dialled_failed(c, strerror(errno), err);
    }
    c->connected = 1;
    return 0;
}

/* 1: the answer is complete and right, the connection now belongs to its peer. */
static int take_reply(struct meeting *m, struct conn *c, struct mb_err *err)
{
    ssize_t n = recv(c->fd, c->buf + c->got, REPLY_BYTES - c->got, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return 0;
    }
    if (n <= 0) {
        return dialled_failed(
            c, n == 0 ? "it closed the connection during the handshake" : strerror(errno), err);
    }
    c->got += (size_t)n;
    if (c->got < REPLY_BYTES) {
        return 0;
    }
    if (memcmp(c->buf, MAGIC, 8) != 0 || get32(c->buf + 8) != c->rank ||
        !cookies_equal(c->buf + 16, m->l->self.cookie)) {
        return dialled_failed(c, "what answers at its endpoint is not that rank of this gang", err);
    }
    struct mb_peer *p = &m->peers[c->rank];
    uint32_t rank = c->rank, kind = c->kind;
    int shm_ok = get32(c->buf + 12) == 1;
    if (kind == CONTROL) {
        p->control = c->fd;
        if (shm_ok && c->shm != NULL) {
            p->shm = c->shm;
            c->shm = NULL;
        }
    } else {
        p->data = c->fd;
    }
    c->fd = -1;
    conn_close(c);
    if (kind == CONTROL && p->shm == NULL) {
        return dial(m, rank, DATA, err);
    }
    return 0;
}

static void accept_all(struct meeting *m)
{
    for (;;) {
        int fd = accept4(m->l->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            return;
        }
        struct conn *c = conn_take(m);
        if (c == NULL) {
            close(fd);
            return;
        }
        c->fd = fd;
        c->since_ms = mb_mono_ms();
        tune(fd, m->l->options.timeout_ms);
    }
}

static int hello_fits(const struct meeting *m, const struct hello *h)
{
    const struct mb_comm_options *o = &m->l->options;
    if (h->world_size != o->world_size || h->rank <= o->rank || h->rank >= o->world_size ||
        h->kind > DATA || !cookies_equal(h->to_cookie, m->l->self.cookie) ||
        !cookies_equal(h->from_cookie, m->ends[h->rank].cookie)) {
        return 0;
    }
    const struct mb_peer *p = &m->peers[h->rank];
    return h->kind == CONTROL ? p->control < 0 : p->control >= 0 && p->data < 0 && p->shm == NULL;
}

static void take_hello(struct meeting *m, struct conn *c)
{
    ssize_t n = recv(c->fd, c->buf + c->got, HELLO_BYTES - c->got, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (n <= 0) {
        conn_close(c);
        return;
    }
    c->got += (size_t)n;
    if (c->got < HELLO_BYTES) {
        return;
    }
    struct hello h;
    if (hello_read(c->buf, &h) != 0 || !hello_fits(m, &h)) {
        if (m->n_strangers++ == 0) {
            mb_warn("comm", "a stranger tried to join the gang and was refused");
        }
        conn_close(c);
        return;
    }
    struct mb_peer *p = &m->peers[h.rank];
    struct mb_shm *shm = NULL;
    if (h.kind == CONTROL && h.shm_fd >= 0 && !m->l->options.no_shared_memory) {
        struct mb_err why;
        if (mb_shm_attach(h.pid, h.shm_fd, h.shm_cookie, &shm, &why) != 0) {
            mb_info("comm", "rank %u is reached by TCP: %s", h.rank, why.text);
            shm = NULL;
        }
    }
    uint8_t reply[REPLY_BYTES];
    memcpy(reply, MAGIC, 8);
    put32(reply + 8, m->l->options.rank);
    put32(reply + 12, shm != NULL);
    memcpy(reply + 16, m->ends[h.rank].cookie, MB_COOKIE_BYTES);
    if (send(c->fd, reply, sizeof reply, MSG_NOSIGNAL) != (ssize_t)sizeof reply) {
        mb_shm_destroy(shm);
        conn_close(c);
        return;
    }
    if (h.kind == CONTROL) {
        p->control = c->fd;
        p->shm = shm;
    } else {
        p->data = c->fd;
    }
    c->fd = -1;
    conn_close(c);
}

/* ---- the loop ---- */

static int first_missing(const struct meeting *m)
{
    for (uint32_t r = 0; r < m->l->options.world_size; r++) {
        if (r != m->l->options.rank && !peer_met(&m->peers[r])) {
            return (int)r;
        }
    }
    return -1;
}

static size_t fill_polls(struct meeting *m)
{
    size_t n = 0;
    m->polls[n++] = (struct pollfd){.fd = m->l->fd, .events = POLLIN};
    for (size_t i = 0; i < m->n_conns; i++) {
        const struct conn *c = &m->conns[i];
        short events = c->dialled && !c->connected ? POLLOUT : POLLIN;
        m->polls[n++] = (struct pollfd){.fd = c->fd, .events = events};
    }
    for (uint32_t r = 0; r < m->l->options.world_size; r++) {
        m->polls[n++] = (struct pollfd){.fd = m->peers[r].control, .events = POLLRDHUP};
    }
    return n;
}

static int turn(struct meeting *m, struct mb_err *err)
{
    int missing = first_missing(m);
    uint64_t now = mb_mono_ms();
    if (now >= m->deadline_ms) {
        return mb_err_set(err, MB_ETIMEOUT, "rendezvous: rank %d did not come within %llu s",
                          missing, (unsigned long long)(m->l->options.timeout_ms / 1000));
    }
    size_t n = fill_polls(m);
    uint64_t wait_ms = m->deadline_ms - now;
    if (poll(m->polls, n, wait_ms > 1000 ? 1000 : (int)wait_ms) < 0 && errno != EINTR) {
        return mb_err_sys(err, errno, "rendezvous: poll");
    }
    for (size_t i = 0; i < m->n_conns; i++) {
        struct conn *c = &m->conns[i];
        if (c->fd < 0 || m->polls[1 + i].fd != c->fd || m->polls[1 + i].revents == 0) {
            continue;
        }
        int rc = 0;
        if (!c->dialled) {
            take_hello(m, c);
        } else if (!c->connected) {
            rc = send_hello(m, c, err);
        } else {
            rc = take_reply(m, c, err);
        }
        if (rc < 0) {
            return rc;
        }
    }
    if (m->polls[0].revents != 0) {
        accept_all(m);
    }
    for (uint32_t r = 0; r < m->l->options.world_size; r++) {
        const struct pollfd *p = &m->polls[1 + m->n_conns + r];
        if (p->fd >= 0 && (p->revents & (POLLRDHUP | POLLHUP | POLLERR))) {
            return mb_err_set(err, MB_EUNAVAIL, "rendezvous: rank %u went away", r);
        }
    }
    return 0;
}

int mb_rendezvous(const struct mb_comm_listener *l, const char *const *endpoints,
                  struct mb_peer *peers, struct mb_err *err)
{
    uint32_t world = l->options.world_size;
    struct meeting m = {.l = l,
                        .peers = peers,
                        .n_conns = 2 * (size_t)world + PENDING_EXTRA,
                        .deadline_ms = mb_mono_ms() + l->options.timeout_ms};
    m.ends = mb_calloc(world, sizeof *m.ends);
    m.conns = mb_calloc(m.n_conns, sizeof *m.conns);
    m.polls = mb_calloc(1 + m.n_conns + world, sizeof *m.polls);
    int rc = 0;
    if (m.ends == NULL || m.conns == NULL || m.polls == NULL) {
        rc = mb_err_set(err, MB_ENOMEM, "rendezvous: out of memory");
        goto out;
    }
    for (size_t i = 0; i < m.n_conns; i++) {
        m.conns[i] = (struct conn){.fd = -1, .shm_fd = -1};
    }
    for (uint32_t r = 0; r < world && rc == 0; r++) {
        rc = mb_endpoint_parse(endpoints[r], &m.ends[r], err);
        if (rc != 0) {
            mb_err_wrap(err, "rendezvous: rank %u", r);
        }
    }
    if (rc == 0 && !cookies_equal(m.ends[l->options.rank].cookie, l->self.cookie)) {
        rc = mb_err_set(err, MB_EPROTO,
                        "rendezvous: the endpoint handed out for rank %u is not ours",
                        l->options.rank);
    }
    for (uint32_t r = 0; r < l->options.rank && rc == 0; r++) {
        rc = dial(&m, r, CONTROL, err);
    }
    while (rc == 0 && first_missing(&m) >= 0) {
        rc = turn(&m, err);
    }
out:
    for (size_t i = 0; m.conns != NULL && i < m.n_conns; i++) {
        conn_close(&m.conns[i]);
    }
    mb_free(m.ends);
    mb_free(m.conns);
    mb_free(m.polls);
    return rc;
}
