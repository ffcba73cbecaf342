/*
 * What Ray's nodes are told of bundles here that no driver of ours speaks for: the rows that a
 * raylet has for each committed bundle (`bundle_group_PG`, `mobula_gpu_group_INDEX_PG`; Ray's
 * bundle_spec). A task or an actor in such a group asks for them. Without the rows no node fits,
 * and it waits without a word; with them it is sent here, and leases.c refuses it at once. Gangs of
 * ours have no rows: a thousand nodes would send them to each other every 2 s. Pure.
 *
 * All but bundle_group is in use, so that Ray's tools go on counting it.
 */
#ifndef MOBULA_AGENT_GROUP_ROWS_H
#define MOBULA_AGENT_GROUP_ROWS_H

#include "agent/ledger.h"
#include "gcs/arena.h"
#include "gcs/types.h"

enum { MB_GROUP_ROWS_BUNDLES_MAX = 32 }; /* more have no rows */

/* 1: the group of this bundle is to be told of. */
typedef int (*mb_group_rows_is_told)(void *arg, const struct mb_pg_id *pg);

/* Rows that begin with those of the ledger's kinds. In the arena, names of kinds in the ledger.
 * MB_ENOMEM. */
int mb_group_rows(struct mb_arena *a, const struct mb_ledger *l, mb_group_rows_is_told is_told,
                  void *arg, struct mb_gcs_resource **available, struct mb_gcs_resource **total,
                  size_t *n);

#endif
