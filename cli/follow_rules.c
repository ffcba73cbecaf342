#include "cli/follow_rules.h"

enum { CLEAN = 1000, SERVERS_ERROR = 1011 };

enum mb_follow_verdict mb_follow_judge(const struct mb_follow_end *e, uint64_t now_ms,
                                       uint64_t *seen_ms)
{
    const int may_end = e->once || e->is_terminal;

    if (!e->answers)
        return now_ms - *seen_ms > MB_FOLLOW_LOST_MS ? MB_FOLLOW_SILENT : MB_FOLLOW_AGAIN;
    if (e->http_status == 0 && e->status_code == CLEAN && may_end)
        return MB_FOLLOW_DONE;
    if (e->http_status == 404 || e->status_code == MB_FOLLOW_NO_SUCH_LOG)
        return MB_FOLLOW_NOWHERE;
    if ((e->http_status >= 400 && e->http_status < 500) ||
        (e->status_code == SERVERS_ERROR && may_end))
        return MB_FOLLOW_UNREADABLE;
    if (!e->is_terminal && e->status_code != SERVERS_ERROR)
        *seen_ms = now_ms;
    return now_ms - *seen_ms > MB_FOLLOW_LOST_MS ? MB_FOLLOW_BROKEN : MB_FOLLOW_AGAIN;
}
