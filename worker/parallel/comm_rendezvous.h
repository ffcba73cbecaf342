/*
 * How the ranks of a gang meet: listener, endpoint text, and the handshake that leaves every pair
 * with a control socket and a carrier of data (a second socket, or shared memory on one host).
 */
#ifndef MOBULA_WORKER_PARALLEL_COMM_RENDEZVOUS_H
#define MOBULA_WORKER_PARALLEL_COMM_RENDEZVOUS_H

#include <netinet/in.h>
#include <sys/socket.h>
#include "worker/parallel/comm.h"
#include "worker/parallel/comm_shm.h"

enum { MB_COOKIE_BYTES = 16, MB_HOST_ID_MAX = 80, MB_CONTROL_TEXT_MAX = 512 };

/* "mobula-tcp/1 ADDRESS PORT HOST-ID COOKIE": ranks with equal host ids share boot and processes.
 */
struct mb_endpoint {
    struct sockaddr_storage address;
    socklen_t address_len;
    char host_id[MB_HOST_ID_MAX];
    uint8_t cookie[MB_COOKIE_BYTES];
};

int mb_endpoint_parse(const char *text, struct mb_endpoint *out, struct mb_err *err);

struct mb_comm_listener {
    struct mb_comm_options options; /* address is not kept */
    int fd;
    struct mb_endpoint self;
    char text[MB_COMM_ENDPOINT_MAX];
};

struct mb_peer {
    int control;                            /* never blocks; -1 for this rank itself */
    int data;                               /* never blocks; -1 when shm carries the data */
    struct mb_shm *shm;                     /* or NULL */
    int left;                               /* it said goodbye */
    int is_silent;                          /* it was asked, and has not answered */
    int is_idle;                            /* its last answer: it was in no operation, ... */
    uint32_t n_collectives;                 /* ... and had begun so many of the world's */
    uint8_t inbox[MB_CONTROL_TEXT_MAX + 8]; /* control bytes that are no whole frame yet */
    size_t n_inbox;
};

void mb_peer_close(struct mb_peer *p);

/* peers[world_size], prepared by the caller with mb_peer_init; on failure the caller closes them.
 */
void mb_peer_init(struct mb_peer *p);
int mb_rendezvous(const struct mb_comm_listener *l, const char *const *endpoints,
                  struct mb_peer *peers, struct mb_err *err);

#endif
