/*
 *  1. Hello: the group needs a committed bundle here, unless the attempt is known already (its
 *     bundles may be gone while it ends); then the fence refuses what is older.
 *  2. Adoption: CREATED has nothing; with processes, the supervisor knows more than gang.json, so
 * it tells all of it again; without, only uploads are left.
 *  3. A supervisor that is not there took its processes along. While LAUNCHING it may never have
 *     been started; that is a failed launch.
 */
#include "agent/gang_rules.h"

#include <signal.h>

/* With a few hundred gangs at most and 7000 ports the second or third try finds one. */
enum { PORT_TRIES = 64 };

int mb_gang_admit(struct mb_ledger *l, const struct mb_pg_id *pg, const struct mb_pg_id *gang,
                  uint32_t attempt, int is_known, struct mb_err *err)
{
    if (!is_known && !mb_ledger_is_committed(l, pg))
        return mb_err_set(err, MB_ENOENT,
                          "no bundle of this placement group is committed on this node");
    return mb_ledger_fence(l, gang, attempt, err);
}

enum mb_gang_adoption mb_gang_adoption(enum mb_gang_state s)
{
    if (s == MB_GANG_CREATED)
        return MB_GANG_ADOPT_NOTHING;
    return s >= MB_GANG_LAUNCHING && s <= MB_GANG_STOPPING ? MB_GANG_ADOPT_PROCESSES
                                                           : MB_GANG_ADOPT_UPLOADS;
}

enum mb_gang_event mb_gang_adoption_lost(enum mb_gang_state s)
{
    return s == MB_GANG_LAUNCHING ? MB_GANG_EV_LAUNCH_FAILED : MB_GANG_EV_ALL_EXITED;
}

int mb_gang_ended_by_stop(int signal, uint64_t since_stop_ms, uint64_t grace_ms)
{
    return signal != SIGKILL || since_stop_ms >= grace_ms;
}

int mb_gang_keeps_node(const struct mb_gang *g, int waits)
{
    return mb_gang_has_processes(g) && !waits;
}

uint32_t mb_gang_port(int (*pick)(void *arg), void *arg, const uint32_t *given, size_t n)
{
    for (int i = 0; i < PORT_TRIES; i++) {
        uint32_t port = (uint32_t)pick(arg);
        size_t k = 0;

        while (k < n && given[k] != port)
            k++;
        if (k == n)
            return port;
    }
    return 0;
}
