/*
 * Gangs whose node the head took for dead while they went on: a network was cut for longer than
 * Ray waits. The head has their bundles to place again. When the node is back under a new id it
 * offers what they hold (mb_ledger_offered()); the head usually places them here again, and nothing
 * has happened to the gang. Meanwhile the head is asked what became of the groups.
 */
#ifndef MOBULA_AGENT_ADRIFT_H
#define MOBULA_AGENT_ADRIFT_H

#include <uv.h>
#include "agent/ledger.h"
#include "agent/node.h"

enum mb_adrift_verdict { MB_ADRIFT_WAIT, MB_ADRIFT_LOST };

struct mb_gcs_pg;
/* Pure: of bundle index of a group as the head has it now (NULL: it has none, or it was removed),
 * for a node of this id, so long after it was given up. why: what a lost one is told, borrowed. */
enum mb_adrift_verdict mb_adrift_decide(const struct mb_gcs_pg *pg, int32_t index,
                                        const uint8_t own_id[MB_NODE_ID_BYTES], uint64_t since_ms,
                                        const char **why);

struct mb_adrift {
    uv_timer_t timer;
    struct mb_ledger *ledger;
    struct mb_node *node;
    uint64_t since_ms;
    struct mb_pg_id asked;              /* while op is under way */
    uint8_t asked_as[MB_NODE_ID_BYTES]; /* the node's id then */
    struct mb_gcs_op *op;
    size_t turn;
    /* The bundle was removed from the ledger. */
    void (*on_lost)(void *arg, const struct mb_pg_id *pg);
    void *arg;
};

void mb_adrift_init(struct mb_adrift *d, uv_loop_t *loop);
/* The head gave the node up: bundles without processes go, the others are adrift. */
void mb_adrift_begin(struct mb_adrift *d, const char *why);
/* After a restart: some may be adrift still. */
void mb_adrift_resume(struct mb_adrift *d);
void mb_adrift_stop(struct mb_adrift *d);
void mb_adrift_close(struct mb_adrift *d);

#endif
