/*
 * The lease that makes one of several heads the head, as this process sees it. Pure: time is an
 * argument (milliseconds of a monotonic clock), what the store answered is an event.
 *
 * The store keeps the lease for ttl_ms after a request reached it; we count from when the request
 * was sent, less a tenth for clocks that run apart. So we stop serving before anybody else begins.
 * An epoch, counted up by every new holder, goes with every write: a deposed head's writes fail.
 */
#ifndef MOBULA_GCS_LEASE_H
#define MOBULA_GCS_LEASE_H

#include <stdint.h>

enum mb_lease_state {
    MB_LEASE_STANDBY, /* asks for it */
    MB_LEASE_HELD,    /* renews it; serves while mb_lease_valid() */
    MB_LEASE_LOST     /* another head was elected, or the store lost us: for good */
};

struct mb_lease {
    enum mb_lease_state state;
    uint64_t ttl_ms;
    int64_t epoch;           /* ours, while HELD */
    uint64_t valid_until_ms; /* HELD: serve before it */
    uint64_t ask_at_ms;      /* when to ask next */
    uint64_t asked_ms;       /* when the question without an answer was sent */
    int asking;
};

void mb_lease_init(struct mb_lease *l, uint64_t ttl_ms, uint64_t now_ms);
/* 1: ask now (STANDBY: acquire, HELD: renew); the question counts as sent. 0: not yet. */
int mb_lease_tick(struct mb_lease *l, uint64_t now_ms);
/* The answers. Each ends the question. */
void mb_lease_granted(struct mb_lease *l, int64_t epoch);                     /* STANDBY -> HELD */
void mb_lease_refused(struct mb_lease *l, uint64_t left_ms, uint64_t now_ms); /* STANDBY stays */
void mb_lease_renewed(struct mb_lease *l);                                    /* HELD stays */
void mb_lease_deposed(struct mb_lease *l);                                    /* -> LOST */
/* No answer will come: the connection broke, or the store refused to work. */
void mb_lease_unanswered(struct mb_lease *l, uint64_t now_ms);
/* 1: nobody else can be the head now. */
int mb_lease_valid(const struct mb_lease *l, uint64_t now_ms);

#endif
