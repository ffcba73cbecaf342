/*
 * STANDBY asks when the other head's lease can have run out, at least every third of the time to
 * live; HELD renews at every third, so that two lost answers do not end it.
 */
#include "gcs/lease.h"

#include <string.h>

enum { RETRY_MS = 100 };

void mb_lease_init(struct mb_lease *l, uint64_t ttl_ms, uint64_t now_ms)
{
    memset(l, 0, sizeof *l);
    l->ttl_ms = ttl_ms;
    l->ask_at_ms = now_ms;
}

int mb_lease_tick(struct mb_lease *l, uint64_t now_ms)
{
    if (l->state == MB_LEASE_LOST || l->asking || now_ms < l->ask_at_ms)
        return 0;
    l->asking = 1;
    l->asked_ms = now_ms;
    return 1;
}

static void extend(struct mb_lease *l)
{
    l->asking = 0;
    l->valid_until_ms = l->asked_ms + l->ttl_ms - l->ttl_ms / 10;
    l->ask_at_ms = l->asked_ms + l->ttl_ms / 3;
}

void mb_lease_granted(struct mb_lease *l, int64_t epoch)
{
    if (l->state != MB_LEASE_STANDBY || !l->asking)
        return;
    l->state = MB_LEASE_HELD;
    l->epoch = epoch;
    extend(l);
}

void mb_lease_refused(struct mb_lease *l, uint64_t left_ms, uint64_t now_ms)
{
    uint64_t wait = left_ms < l->ttl_ms / 3 ? left_ms + 1 : l->ttl_ms / 3;

    l->asking = 0;
    l->ask_at_ms = now_ms + wait;
}

void mb_lease_renewed(struct mb_lease *l)
{
    if (l->state == MB_LEASE_HELD && l->asking)
        extend(l);
}

void mb_lease_deposed(struct mb_lease *l)
{
    l->state = MB_LEASE_LOST;
    l->asking = 0;
}

void mb_lease_unanswered(struct mb_lease *l, uint64_t now_ms)
{
    if (!l->asking)
        return;
    l->asking = 0;
    l->ask_at_ms = now_ms + RETRY_MS;
}

int mb_lease_valid(const struct mb_lease *l, uint64_t now_ms)
{
    return l->state == MB_LEASE_HELD && now_ms < l->valid_until_ms;
}
