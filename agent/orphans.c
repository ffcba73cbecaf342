/* 1. Forget who is no orphan any more. 2. Note the new ones. 3. Name those that waited enough. */
#include "agent/orphans.h"

#include <string.h>

enum { JOB_ID_BYTES = 4 };

static int is_orphan(const struct mb_ledger *l, const struct mb_pg_id *pg,
                     mb_orphans_has_gang has_gang, void *arg)
{
    static const uint8_t no_job[JOB_ID_BYTES];

    return mb_ledger_is_committed(l, pg) && !has_gang(arg, pg) &&
           memcmp(pg->bytes + sizeof(pg->bytes) - JOB_ID_BYTES, no_job, JOB_ID_BYTES) != 0;
}

int mb_orphans_has(const struct mb_orphans *o, const struct mb_pg_id *pg)
{
    for (size_t i = 0; i < o->n; i++)
        if (memcmp(&o->list[i].pg, pg, sizeof(*pg)) == 0)
            return 1;
    return 0;
}

size_t mb_orphans_new(const struct mb_orphans *o, const struct mb_ledger *l,
                      mb_orphans_has_gang has_gang, void *arg)
{
    size_t n = 0;

    for (size_t i = 0; i < mb_ledger_count(l) && o->n + n < MB_ORPHANS_MAX; i++) {
        const struct mb_pg_id *pg = &mb_ledger_at(l, i)->pg;

        n += !mb_orphans_has(o, pg) && is_orphan(l, pg, has_gang, arg);
    }
    return n;
}

size_t mb_orphans_look(struct mb_orphans *o, const struct mb_ledger *l,
                       mb_orphans_has_gang has_gang, void *arg, uint64_t now_ms,
                       struct mb_pg_id *out)
{
    size_t kept = 0, n_out = 0;

    for (size_t i = 0; i < o->n; i++)
        if (is_orphan(l, &o->list[i].pg, has_gang, arg))
            o->list[kept++] = o->list[i];
    o->n_changes += kept != o->n;
    o->n = kept;
    for (size_t i = 0; i < mb_ledger_count(l) && o->n < MB_ORPHANS_MAX; i++) {
        const struct mb_pg_id *pg = &mb_ledger_at(l, i)->pg;

        if (mb_orphans_has(o, pg) || !is_orphan(l, pg, has_gang, arg))
            continue;
        o->list[o->n].pg = *pg;
        o->list[o->n++].since_ms = now_ms;
        o->n_changes++;
    }
    for (size_t i = 0; i < o->n; i++)
        if (now_ms - o->list[i].since_ms >= MB_ORPHAN_MS) {
            o->list[i].since_ms = now_ms;
            out[n_out++] = o->list[i].pg;
        }
    return n_out;
}
