/*
 * Placement groups that are committed here and that no driver ever said Hello for: it died between
 * the reservation and the launch, and the GCS does not watch drivers that are no actors. Pure.
 *
 * After MB_ORPHAN_MS the agents that hold such a group give it back to the GCS, the embedded one or
 * Ray's. A driver that waits longer with a reservation has to give it back itself. Groups whose id
 * has no job (zero bytes at its end) are the agent's own and are left alone.
 */
#ifndef MOBULA_AGENT_ORPHANS_H
#define MOBULA_AGENT_ORPHANS_H

#include <stddef.h>
#include <stdint.h>
#include "agent/ledger.h"

enum { MB_ORPHANS_MAX = 64, MB_ORPHAN_MS = 60000 };

struct mb_orphans {
    struct {
        struct mb_pg_id pg;
        uint64_t since_ms;
    } list[MB_ORPHANS_MAX]; /* more than that have their turn later */
    size_t n;
    unsigned n_changes; /* of who is in the list */
};

/* 1: a gang of this group is known on this node. */
typedef int (*mb_orphans_has_gang)(void *arg, const struct mb_pg_id *pg);

/* 1: it was one at the last look. */
int mb_orphans_has(const struct mb_orphans *o, const struct mb_pg_id *pg);
/* How many groups would be noted now that are not: until they are, somebody may ask again soon. */
size_t mb_orphans_new(const struct mb_orphans *o, const struct mb_ledger *l,
                      mb_orphans_has_gang has_gang, void *arg);

/* Look at the ledger. Returns how many groups are to be given back, their ids in out (at most
 * MB_ORPHANS_MAX); each is named again only after another MB_ORPHAN_MS. */
size_t mb_orphans_look(struct mb_orphans *o, const struct mb_ledger *l,
                       mb_orphans_has_gang has_gang, void *arg, uint64_t now_ms,
                       struct mb_pg_id *out);

#endif
