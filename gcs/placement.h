/*
 * Placement groups: all bundles of a group, or none, get a place on nodes. Pure: events in, actions
 * out, time as an argument. The protocol is Ray's (Prepare on every node, then Commit on every
 * node, Return = RemovePlacementGroupBundles).
 *
 * Rules:
 *  - Nothing is booked beyond what a node has. A booking ends only when the node said that it gave
 *    the bundle back, or is dead; so a hung node costs its own capacity and nobody else's.
 *  - Several groups may be prepared at the same time. The queue is ordered by priority, then by
 *    creation. BACKFILL: a later group may start while an earlier one waits, until that one has
 *    waited for `patience_ms` or was overtaken MB_PLACE_OVERTAKES times; from then on places are
 *    pinned for it, and what it needs there is given to nobody behind it, so that it starts when
 *    what runs there now has ended. One group at a time has pins: the first in the queue.
 *    Before that, too, what nodes are asked to give back is left to the first group that fits when
 * all of it has come: it comes from one node after the other. What a node did not give back when it
 *    was asked is not waited for.
 *    STRICT: nothing behind a group that waits starts.
 *    A group that the nodes that are there could not hold even if they were empty holds nobody up.
 *  - A refusal or failure returns everything of the attempt; the next comes 0.2 to 1 s later.
 *  - A lost node makes a CREATED group RESCHEDULING: survivors keep their bundles, only the lost
 * ones are placed anew.
 *  - A node is not given a bundle of a group while an earlier bundle of it is on its way back.
 *  - A gang whose driver went away while it waits is not placed, and leaves the queue when the
 *    driver has not come back for MB_PLACE_ORPHAN_MS. It holds nobody up, but one of a former head,
 *    whose driver has yet to find this head, keeps its turn in STRICT order meanwhile.
 * Bounds: a bundle has at most MB_PLACE_RETURNS places it is on its way back from; then it waits.
 */
#ifndef MOBULA_GCS_PLACEMENT_H
#define MOBULA_GCS_PLACEMENT_H

#include "base/buf.h"
#include "base/err.h"
#include "gcs/types.h"

enum { MB_PLACE_RETURNS = 4, MB_PLACE_RETRY_MIN_MS = 200, MB_PLACE_RETRY_MAX_MS = 1000 };

/* Of a waiting group, before it keeps places; and the bound of a priority in both directions. */
enum {
    MB_PLACE_OVERTAKES = 16,
    MB_PLACE_PATIENCE_MS = 60000,
    MB_PLACE_PRIORITY_MAX = 1000,
    MB_PLACE_ORPHAN_MS = 30000
};

enum mb_place_order { MB_PLACE_BACKFILL = 0, MB_PLACE_STRICT };

struct mb_placement;

enum mb_place_kind {
    MB_PLACE_CHANGED, /* state or places changed: persist, tell who waits */
    MB_PLACE_PREPARE,
    MB_PLACE_COMMIT,
    MB_PLACE_RETURN
};

struct mb_place_action {
    enum mb_place_kind kind;
    uint8_t pg_id[MB_PG_ID_BYTES];
    uint8_t node_id[MB_NODE_ID_BYTES]; /* not for CHANGED */
    uint64_t ticket;                   /* goes back with mb_placement_result() */
    const size_t *bundles;             /* indexes; borrowed until the next call */
    size_t n_bundles;
};

enum mb_place_outcome {
    MB_PLACE_OK,
    MB_PLACE_REFUSED, /* the node said no: it holds nothing */
    MB_PLACE_FAILED   /* no answer, or an error: what the node did is unknown */
};

/* Why a group waits (Ray's SchedulingState). */
enum mb_place_wait {
    MB_PLACE_QUEUED = 0,
    MB_PLACE_GONE = 1,
    MB_PLACE_STARTED = 2,
    MB_PLACE_NO_RESOURCES = 3,
    MB_PLACE_INFEASIBLE = 4,
    MB_PLACE_FINISHED = 6
};

struct mb_place_info {
    enum mb_place_wait wait;
    unsigned attempts;
    int priority;              /* of its name: mb_placement_priority_of() */
    int is_waiting;            /* it has no places and looks for them */
    unsigned ahead;            /* waiting groups that are before it in the queue */
    unsigned overtaken;        /* groups behind it that started since it waits */
    uint64_t waiting_since_ms; /* 0: it was not tried yet */
};

/* seed: for the jitter of retries. NULL when memory is out. */
struct mb_placement *mb_placement_create(uint64_t seed);
void mb_placement_destroy(struct mb_placement *p);
/* BACKFILL with MB_PLACE_PATIENCE_MS unless said otherwise. */
void mb_placement_set_order(struct mb_placement *p, enum mb_place_order order,
                            uint64_t patience_ms);
/* A gang's group is called "mobula-NAME", or "mobula-NAME@priority=N"; any other name has priority
 * 0. For the uniqueness of names the priority does not count. */
int mb_placement_priority_of(const char *name);
size_t mb_placement_name_bytes(const char *name); /* of the name without its priority */

/* ---- nodes ---- */
/* A node with these totals is there; repeating updates the totals. */
int mb_placement_node_up(struct mb_placement *p, const uint8_t node_id[MB_NODE_ID_BYTES],
                         const struct mb_gcs_resource *total, size_t n, struct mb_err *err);
/* What the node says is free (a hint: nodes that look full are tried last), and whether it drains
 * (then it gets nothing new). Unknown nodes are passed over. */
void mb_placement_node_view(struct mb_placement *p, const uint8_t node_id[MB_NODE_ID_BYTES],
                            const struct mb_gcs_resource *available, size_t n, int is_draining);
void mb_placement_node_dead(struct mb_placement *p, const uint8_t node_id[MB_NODE_ID_BYTES]);

/* ---- groups ---- */
/* pg is copied. MB_EEXIST: the name is taken by another group; the same id again is a success that
 * changes nothing. MB_EINVAL: no bundles, or a negative amount. */
int mb_placement_add(struct mb_placement *p, const struct mb_gcs_pg *pg, struct mb_err *err);
/* From the store, after all nodes: CREATED and RESCHEDULING groups keep the places whose nodes are
 * up; groups caught in between start over. */
int mb_placement_restore(struct mb_placement *p, const struct mb_gcs_pg *pg, struct mb_err *err);
/* Whether a driver waits for this group now; said only of those that somebody waited for, or might
 * have before a restart. Groups that are no gangs of mobula do not care. */
void mb_placement_attend(struct mb_placement *p, const uint8_t pg_id[MB_PG_ID_BYTES],
                         int is_attended, uint64_t now_ms);
/* MB_ENOENT if unknown; removing twice is a success. */
int mb_placement_remove(struct mb_placement *p, const uint8_t pg_id[MB_PG_ID_BYTES]);
/* Drops a REMOVED group whose bundles are all back; 1 if it was dropped. */
int mb_placement_forget(struct mb_placement *p, const uint8_t pg_id[MB_PG_ID_BYTES]);

/* Borrowed until the next event. NULL if unknown; info may be NULL. A bundle has a node in it once
 * it is committed there. */
const struct mb_gcs_pg *mb_placement_get(const struct mb_placement *p,
                                         const uint8_t pg_id[MB_PG_ID_BYTES],
                                         struct mb_place_info *info);
size_t mb_placement_count(const struct mb_placement *p);
const struct mb_gcs_pg *mb_placement_at(const struct mb_placement *p, size_t i,
                                        struct mb_place_info *info); /* in order of the queue */

/* The name of a node for people; borrowed until the next call. */
typedef const char *(*mb_place_name_fn)(void *arg, const uint8_t node_id[MB_NODE_ID_BYTES]);
/*
 * Why a group waits, one line that names what is missing and where: "waiting for 2 more mobula_gpu
 * on 1 node: node a has 1 free of 4, node b has 0 free of 4". It changes when the facts change, not
 * with the clock. Appends nothing for a group that does not wait. 0 or MB_ENOMEM.
 */
int mb_placement_reason(const struct mb_placement *p, const uint8_t pg_id[MB_PG_ID_BYTES],
                        mb_place_name_fn name_of, void *arg, struct mb_buf *out);
/* Of a group that waits: how many nodes have room for its largest open bundle now, the queue apart,
 * or hold one of its bundles. 0 for another group, or without memory. */
size_t mb_placement_nodes_for(const struct mb_placement *p, const uint8_t pg_id[MB_PG_ID_BYTES]);

/* ---- the engine ---- */
/* The next thing to do: 1 and *out, or 0. Call until 0 after every event and when due. */
int mb_placement_next(struct mb_placement *p, uint64_t now_ms, struct mb_place_action *out);
/* Outcome of a PREPARE, COMMIT or RETURN. An outdated ticket is passed over. */
void mb_placement_result(struct mb_placement *p, const uint8_t pg_id[MB_PG_ID_BYTES],
                         uint64_t ticket, enum mb_place_outcome outcome, uint64_t now_ms);
/* When mb_placement_next() may have something without another event; UINT64_MAX: never. */
uint64_t mb_placement_due_ms(const struct mb_placement *p);

/* Tests: 0 if every promise about bookings and states holds, else MB_ESTATE and which one. */
int mb_placement_check(const struct mb_placement *p, struct mb_err *err);

#endif
