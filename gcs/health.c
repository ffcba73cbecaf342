/*
 *  1. A node that sends is never asked: every message moves the next question away.
 *  2. A question that goes well clears the failures; a failed one leads to the next a period after
 *     the last was asked.
 *  3. The fourth failure in a row is the verdict, given by the next tick.
 */
#include "gcs/health.h"

void mb_health_init(struct mb_health *h, uint64_t now_ms)
{
    *h = (struct mb_health){.next_ms = now_ms + MB_HEALTH_GRACE_MS};
}

void mb_health_heard(struct mb_health *h, uint64_t now_ms)
{
    h->failures = 0;
    if (h->next_ms < now_ms + MB_HEALTH_PERIOD_MS)
        h->next_ms = now_ms + MB_HEALTH_PERIOD_MS;
}

void mb_health_result(struct mb_health *h, int ok, uint64_t now_ms)
{
    h->asking = 0;
    if (ok)
        mb_health_heard(h, now_ms);
    else
        h->failures++;
}

enum mb_health_action mb_health_tick(struct mb_health *h, uint64_t now_ms)
{
    if (h->dead)
        return MB_HEALTH_WAIT;
    if (h->failures >= MB_HEALTH_FAILURES) {
        h->dead = 1;
        return MB_HEALTH_DEAD;
    }
    if (h->asking || now_ms < h->next_ms)
        return MB_HEALTH_WAIT;
    h->asking = 1;
    h->next_ms = now_ms + MB_HEALTH_PERIOD_MS;
    return MB_HEALTH_CHECK;
}
