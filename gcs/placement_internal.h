/* The inside of mb_placement, shared by the placement_*.c files only. */
#ifndef MOBULA_GCS_PLACEMENT_INTERNAL_H
#define MOBULA_GCS_PLACEMENT_INTERNAL_H

#include "gcs/placement.h"

enum state {
    PENDING,
    PREPARING,
    PREPARED,
    CREATED,
    RESCHEDULING,
    REPREPARING,
    REPREPARED,
    REMOVED,
    N_STATES
};

enum event { PLACED, REFUSED, ALL_PREPARED, ALL_COMMITTED, BUNDLE_LOST, REMOVE, N_EVENTS };

enum phase { NONE, WANT_PREPARE, PREPARE_SENT, HELD, WANT_COMMIT, COMMIT_SENT, COMMITTED };

enum return_phase {
    NO_RETURN,
    RETURN_AWAITS_PREPARE,
    RETURN_AWAITS_COMMIT,
    WANT_RETURN,
    RETURN_SENT
};

struct returning {
    enum return_phase phase;
    size_t node;
    uint64_t ticket;
    uint64_t not_before_ms;
    int is_late; /* the node did not take it when it was asked: nobody waits for it */
};

struct bundle {
    struct mb_gcs_bundle *pub; /* in group.bundles */
    enum phase phase;
    size_t node; /* valid unless phase is NONE */
    uint64_t ticket;
    uint64_t not_before_ms;
    struct returning back[MB_PLACE_RETURNS];
};

struct group {
    struct mb_gcs_pg pub;
    struct mb_gcs_bundle *bundles;
    struct bundle *b;
    size_t *scratch; /* indexes for one action */
    char *text;      /* the name and the resource names */
    struct mb_gcs_resource *resources;
    enum state state;
    enum mb_place_wait wait;
    unsigned attempts;
    uint64_t try_ms;     /* not before, after a refusal */
    uint64_t recheck_ms; /* at the latest, while nothing fits */
    uint64_t seen_epoch; /* capacity at the last failed plan */
    int changed;
    /* The queue. */
    int priority;
    uint64_t seq;              /* names the group for others; never 0 */
    uint64_t waiting_since_ms; /* 0: not tried yet */
    unsigned overtaken;
    uint64_t behind;     /* seq of the group without which it could start; 0: none */
    int blocked;         /* by strict order: not tried at all */
    uint64_t seen_ahead; /* seq of the group that kept places at the last failed plan */
    uint64_t orphan_ms;  /* its driver is away since then; 0: it is not */
    int is_expected;     /* this head has not heard of its driver yet: the head is new */
    size_t *pins;        /* [n_bundles]: node kept for the bundle, or PLACE_NOWHERE */
    uint64_t pins_epoch; /* fleet when the pins were chosen */
    int fits_fleet;      /* the nodes could hold it, were they empty */
    uint64_t soon_seen;  /* ledger and fleet when fits_soon was found */
    int fits_soon;       /* the nodes can hold it when all that is on its way back has come */
};

struct node {
    uint8_t id[MB_NODE_ID_BYTES];
    int up;
    int draining;
    uint64_t refusals; /* tried later by those who were refused */
    char *text;
    struct mb_gcs_resource *total;
    struct mb_gcs_resource *booked; /* same names and order as total */
    struct mb_gcs_resource *back;   /* of that: what is on its way back; same order */
    struct mb_gcs_resource *said;   /* last reported as free; same order */
    struct mb_gcs_resource *free;   /* scratch of a plan */
    size_t n;
};

struct mb_placement {
    struct node **nodes;
    size_t n_nodes;
    struct group **groups;
    size_t n_groups;
    uint64_t next_ticket;
    uint64_t epoch;     /* counts changes after which a plan may go better */
    uint64_t fleet;     /* counts changes of the nodes themselves */
    uint64_t ledger;    /* counts changes of what is booked and what comes back */
    size_t n_returning; /* bundles on their way back */
    uint64_t next_seq;
    enum mb_place_order order;
    uint64_t patience_ms;
    uint64_t rng;
};

#define PLACE_NOWHERE ((size_t)-1)

/* placement.c */
void place_transition(struct group *g, enum event e);
void place_leave(struct mb_placement *p, struct bundle *b);
void place_end_return(struct mb_placement *p, struct bundle *b, struct returning *r);
/* Return what this attempt holds; everything: what is committed too. */
void place_roll_back(struct mb_placement *p, struct group *g, int everything);
int place_is_attempting(const struct group *g);
enum mb_place_wait place_wait_of(enum state s);
enum mb_pg_state place_outside_of(enum state s);

/* placement_nodes.c */
size_t place_find_node(const struct mb_placement *p, const uint8_t *id);
void place_book(struct node *node, const struct mb_gcs_bundle *b, double sign);
/* What is booked is on its way back (+1), or has come (-1). */
void place_expect_back(struct mb_placement *p, size_t node, const struct mb_gcs_bundle *b,
                       int sign);
void place_free_node(struct node *node);
char *place_put_name(char **end, const char *name);

/* placement_groups.c */
struct group *place_find_group(const struct mb_placement *p, const uint8_t *id);
void place_free_group(struct group *g);

int place_is_waiting(const struct group *g);
int place_is_orphan(const struct group *g);

/* placement_try.c */
/* 1 if the group got places; ahead: the group before it that keeps what it needs, or NULL. */
int place_try(struct mb_placement *p, struct group *g, const struct group *ahead, uint64_t now_ms);
/* 1 if the groups behind g must leave it what it needs; chooses its pins. */
int place_keeps(struct mb_placement *p, struct group *g, uint64_t now_ms);
/* What is free on a node for others than `ahead`; with ahead NULL: what is not booked. */
double place_free(const struct mb_placement *p, size_t node, size_t resource,
                  const struct group *ahead);

#endif
