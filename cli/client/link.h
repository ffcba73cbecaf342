/*
 * One connection of the static client: name, address, TCP, TLS. Inside cli/client. Blocking, one
 * thread.
 */
#ifndef MOBULA_CLI_CLIENT_LINK_H
#define MOBULA_CLI_CLIENT_LINK_H

#include <event2/bufferevent.h>
#include <event2/dns.h>
#include <event2/event.h>
#include <openssl/ssl.h>
#include <stdint.h>
#include "cli/wire.h"

struct mb_follow_state;

struct mb_wire {
    struct event_base *base;
    struct event *timer; /* the deadline of who waits */
    struct evdns_base *dns;
    SSL_CTX *tls;                      /* made for the first https:// */
    struct mb_follow_state *following; /* while one is followed */
};

struct mb_link_target {
    int is_tls;
    char host[256]; /* without brackets */
    char port[8];
    const char *path; /* of the URL, with the query; may be empty or begin with '?' */
};

/* MB_EINVAL: no http:// or https:// URL. MB_EUNSUPPORTED: the environment names a proxy for it. */
int mb_link_target(const char *url, struct mb_link_target *out, struct mb_err *err);
/* HOST:PORT or [HOST]:PORT as a Host header has it: without a port that is the scheme's own. */
int mb_link_host(const struct mb_link_target *t, struct mb_buf *out);
/* Tries every address in turn until the deadline. *out is connected, its certificate verified;
 * freed by bufferevent_free(). MB_EUNAVAIL, MB_ETIMEOUT, MB_EDENIED (certificate). */
int mb_link_open(struct mb_wire *w, const struct mb_link_target *t, uint64_t deadline_mono_ms,
                 struct bufferevent **out, struct mb_err *err);
/* What ended a connection, from the flags of its event: "the connection broke: ...". */
void mb_link_why(struct bufferevent *be, short what, char *out, size_t size);

/* A callback for mb_wire.timer: to have come is enough. */
void mb_link_on_timer(evutil_socket_t fd, short what, void *arg);
/* Turns the loop until *done or the deadline; 1 at the deadline. */
int mb_link_wait(struct mb_wire *w, const int *done, uint64_t deadline_mono_ms);

#endif
