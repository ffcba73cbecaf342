/*
 * Takes one iteration out of a store, in the order that leaves no reader with half of it: pointer
 * check -> manifest -> files. Loop-thread only.
 */
#ifndef MOBULA_AGENT_UPLOAD_REMOVE_H
#define MOBULA_AGENT_UPLOAD_REMOVE_H

#include "agent/upload/inventory.h"
#include "base/err.h"
#include "base/s3/store.h"

struct mb_remove_opts {
    const struct mb_inventory *inv;          /* borrowed until cb */
    const struct mb_inventory_iteration *it; /* of inv */
    /* What the pointer names, or a writer claims, may go as well. The pointer then moves to the
     * newest older whole one first, or goes if there is none. */
    int force;
};

/* Runs once. err MB_ESTATE: the pointer names it, or, without a pointer, it is the newest whole
 * one, which is what a reader takes (or the pointer came to name it while we were at it: the
 * manifest is put back), or a writer is at it. n_removed: objects. */
typedef void (*mb_remove_cb)(void *arg, const struct mb_err *err, size_t n_removed);
int mb_remove_start(struct mb_store *store, const struct mb_remove_opts *opts, mb_remove_cb cb,
                    void *arg, struct mb_err *err);

/* Pure: 1 if keeping the newest `keep` whole iterations lets this one go. Never the one that the
 * pointer names, nothing newer than the oldest that is kept, nothing while fewer than keep are
 * whole. */
int mb_remove_is_old(const struct mb_inventory *inv, const struct mb_inventory_iteration *it,
                     int64_t keep);

#endif
