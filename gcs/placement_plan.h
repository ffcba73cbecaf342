/*
 * Which node for which bundle: the planning step of placement, on plain arrays. Pure.
 * Strategies are Ray's: STRICT_SPREAD one bundle per node, SPREAD the same as far as possible, PACK
 * as few nodes as possible, STRICT_PACK all on one.
 */
#ifndef MOBULA_GCS_PLACEMENT_PLAN_H
#define MOBULA_GCS_PLACEMENT_PLAN_H

#include "gcs/types.h"

/* A node that may be used, in order of preference. */
struct mb_plan_node {
    struct mb_gcs_resource *free; /* the plan's scratch: reduced by what is planned onto it */
    size_t n_free;
    size_t n_held; /* bundles of this group that stay on it */
};

/* 1 if the amounts are there. */
int mb_plan_fits(const struct mb_gcs_bundle *b, const struct mb_gcs_resource *free, size_t n_free);

/* Chooses for each of the n bundles an index into nodes, into out[n]. 1: done; 0: impossible with
 * these nodes (out and free are then void); MB_ENOMEM. */
int mb_plan_bundles(enum mb_pg_strategy strategy, const struct mb_gcs_bundle *const *bundles,
                    size_t n, struct mb_plan_node *nodes, size_t n_nodes, size_t *out);

#endif
