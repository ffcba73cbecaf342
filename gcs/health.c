/*
 *  1. A node that sends is never asked: every message moves the next question away.
 *  2. A question that goes well clears the failures, and with them what the second channel said;
 *     a failed one leads to the next 1.5 s after it was asked.
 *  3. While there are failures the second channel is asked, too. An answer keeps the node alive
 *     until two of its questions in a row have failed, or the doubt has lasted too long.
 *  4. The verdict is given by the next tick. Silence has its own minimum, because questions to a
 *     process that is not there fail at once.
 */
#include "gcs/health.h"

void mb_health_init(struct mb_health *h, int has_second, uint64_t now_ms)
{
    *h = (struct mb_health){
        .heard_ms = now_ms, .next_ms = now_ms + MB_HEALTH_PERIOD_MS, .has_second = has_second};
}

void mb_health_heard(struct mb_health *h, uint64_t now_ms)
{
    h->failures = h->second_failures = 0;
    h->in_doubt = 0;
    h->heard_ms = now_ms;
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

int mb_health_second(struct mb_health *h, int ok)
{
    h->asking_second = 0;
    if (!ok) {
        if (h->failures > 0) /* else it was asked in a doubt that is over */
            h->second_failures++;
        return 0;
    }
    h->second_failures = 0;
    if (h->in_doubt || h->failures < MB_HEALTH_FAILURES)
        return 0;
    h->in_doubt = 1;
    return 1;
}

static int is_dead(const struct mb_health *h, uint64_t now_ms)
{
    uint64_t silent_ms = now_ms - h->heard_ms;

    if (silent_ms < MB_HEALTH_SILENCE_MS)
        return 0;
    if (!h->has_second)
        return h->failures >= MB_HEALTH_FAILURES_ALONE;
    return h->failures >= MB_HEALTH_FAILURES &&
           (h->second_failures >= MB_HEALTH_SECOND_FAILURES || silent_ms >= MB_HEALTH_DOUBT_MAX_MS);
}

enum mb_health_action mb_health_tick(struct mb_health *h, uint64_t now_ms)
{
    if (h->dead)
        return MB_HEALTH_WAIT;
    if (is_dead(h, now_ms)) {
        h->dead = 1;
        return MB_HEALTH_DEAD;
    }
    if (!h->asking && now_ms >= h->next_ms) {
        h->asking = 1;
        h->next_ms = now_ms + MB_HEALTH_TIMEOUT_MS;
        return MB_HEALTH_CHECK;
    }
    if (h->has_second && h->failures > 0 && !h->asking_second && now_ms >= h->second_next_ms) {
        h->asking_second = 1;
        h->second_next_ms = now_ms + MB_HEALTH_TIMEOUT_MS;
        return MB_HEALTH_SECOND;
    }
    return MB_HEALTH_WAIT;
}

const char *mb_health_reason(const struct mb_health *h)
{
    return h->has_second && h->second_failures < MB_HEALTH_SECOND_FAILURES
               ? "no answer to health checks for 60 s, although its HTTP port answers"
               : "health check failed due to missing too many heartbeats";
}
