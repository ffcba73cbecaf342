/*
 * The agents connected to a supervisor. Events are kept in one log; every client has its own place
 * in it, so that the replay for a new agent and the news for an old one are the same thing, and a
 * slow reader costs nothing. libc only; the caller owns poll().
 */
#ifndef MOBULA_AGENT_SUPERVISE_CLIENTS_H
#define MOBULA_AGENT_SUPERVISE_CLIENTS_H

#include <poll.h>
#include <stddef.h>
#include "agent/supervise/protocol.h"
#include "agent/supervise/state.h"

enum {
    MB_SUP_CLIENTS_MAX = 8, /* one agent, its predecessor not yet closed, a person debugging */
    MB_SUP_CLIENTS_POLL_MAX = MB_SUP_CLIENTS_MAX + 1,
    /* started, failed and exit of each child; ending and all-exited */
    MB_SUP_EVENTS_MAX = 3 * MB_SUP_CHILDREN_MAX + 2
};

struct mb_sup_client {
    int fd; /* -1: free */
    int greeted, greeting_due, replayed;
    int deaf;          /* it cannot be sent to any more */
    size_t next_event; /* index into the log */
    size_t next_fd;    /* children below this got their fd sent; n_children: the end mark is due */
};

struct mb_sup_clients {
    const struct mb_sup_state *state; /* borrowed: who we are */
    int listen_fd;                    /* -1: closed */
    struct mb_sup_client clients[MB_SUP_CLIENTS_MAX];
    struct mb_sup_msg events[MB_SUP_EVENTS_MAX];
    size_t n_events;
    struct mb_sup_msg requests[MB_SUP_CLIENTS_MAX]; /* at most one a client and turn */
    size_t n_requests, next_request;
    int released; /* an agent said release after all-exited */
};

/* Binds MB_SUP_SOCKET in the working directory. 0, or -1 with a line in text. */
int mb_sup_clients_listen(struct mb_sup_clients *c, const struct mb_sup_state *state, char *text);
void mb_sup_clients_close(struct mb_sup_clients *c);

void mb_sup_clients_event(struct mb_sup_clients *c, const struct mb_sup_msg *m);

/* What to poll for: fills fds[MB_SUP_CLIENTS_POLL_MAX], returns how many. */
nfds_t mb_sup_clients_poll(const struct mb_sup_clients *c, struct pollfd *fds);
/* Accepts and reads at most one packet a client. */
void mb_sup_clients_read(struct mb_sup_clients *c, const struct pollfd *fds, nfds_t n);
/* The next stop or kill that was read; 0 when there is none. */
int mb_sup_clients_next(struct mb_sup_clients *c, struct mb_sup_msg *out);
/* Sends what is due as far as sockets take it; report_fds by child, -1: none. */
void mb_sup_clients_flush(struct mb_sup_clients *c, const int *report_fds);

#endif
