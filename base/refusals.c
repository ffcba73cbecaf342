/*
 *  1. A kind, who and why, that was not said within a minute is said, with how often it came since.
 *  2. Else it is counted. A new kind takes the place of the one that was said first, if that was
 *     more than a minute ago.
 */
#include "base/refusals.h"

#include <stdio.h>
#include <string.h>
#include "base/clock.h"
#include "base/log.h"

enum { PAUSE_MS = 60000 };

static int is_over(const struct mb_refusal *k, uint64_t now_ms)
{
    return k->why[0] == '\0' || now_ms - k->said_ms >= PAUSE_MS;
}

unsigned mb_refusals_count(struct mb_refusals *r, const char *who, const char *why, uint64_t now_ms)
{
    struct mb_refusal wanted = {.said_ms = now_ms}, *oldest = &r->kept[0];
    unsigned n = 1;

    snprintf(wanted.who, sizeof(wanted.who), "%s", who);
    snprintf(wanted.why, sizeof(wanted.why), "%s", why);
    for (struct mb_refusal *k = r->kept; k < r->kept + MB_REFUSALS_KEPT; k++) {
        if (oldest->why[0] != '\0' && (k->why[0] == '\0' || k->said_ms < oldest->said_ms))
            oldest = k;
        if (strcmp(k->who, wanted.who) != 0 || strcmp(k->why, wanted.why) != 0)
            continue;
        n = ++k->n_unsaid;
        oldest = k;
        break;
    }
    if (!is_over(oldest, now_ms))
        return 0;
    *oldest = wanted;
    return n;
}

void mb_refusals_say(struct mb_refusals *r, const char *module, const char *who, const char *why)
{
    const char *from = who[0] != '\0' ? " from " : "";
    unsigned n = mb_refusals_count(r, who, why, mb_mono_ms());

    if (n == 1)
        mb_warn(module, "refused a caller%s%s: %s", from, who, why);
    else if (n > 1)
        mb_warn(module, "refused a caller%s%s: %s (%u times since this was said)", from, who, why,
                n);
}
