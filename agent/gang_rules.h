/*
 * Decisions about attempts that need more than one of them: who may say Hello, what becomes of an
 * attempt that a former agent left behind. Pure.
 */
#ifndef MOBULA_AGENT_GANG_RULES_H
#define MOBULA_AGENT_GANG_RULES_H

#include "agent/gang.h"
#include "agent/ledger.h"

/* May this attempt's driver speak here? is_known: the attempt exists on this node; gang: what
 * attempts are counted by. MB_ENOENT: no
 * committed bundle; MB_ESTATE: a newer attempt was here. On success the fence has moved. */
int mb_gang_admit(struct mb_ledger *l, const struct mb_pg_id *pg, const struct mb_pg_id *gang,
                  uint32_t attempt, int is_known, struct mb_err *err);

enum mb_gang_adoption {
    MB_GANG_ADOPT_NOTHING,   /* it waits for its driver */
    MB_GANG_ADOPT_UPLOADS,   /* no process is left: go on with what was saved */
    MB_GANG_ADOPT_PROCESSES, /* hold the node, then ask its supervisor */
};
enum mb_gang_adoption mb_gang_adoption(enum mb_gang_state s);
/* The event for an attempt with processes whose supervisor is not there. */
enum mb_gang_event mb_gang_adoption_lost(enum mb_gang_state s);
/* 1: a rank that ended this long after the stop may have ended by it. SIGKILL is ours only when the
 * grace is over: before, somebody else killed the rank, and that is why the gang stops. */
int mb_gang_ended_by_stop(int signal, uint64_t since_stop_ms, uint64_t grace_ms);
/* 1: this attempt's processes keep the node's devices; waits: its launch waits for an older one. */
int mb_gang_keeps_node(const struct mb_gang *g, int waits);
/* A port for an attempt to meet at: what pick finds, unless one of the n that live was given it and
 * may not listen there yet. 0: none was found. */
uint32_t mb_gang_port(int (*pick)(void *arg), void *arg, const uint32_t *given, size_t n);

#endif
