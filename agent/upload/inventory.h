/*
 * What checkpoints a store has: one listing, the pointer, and the manifests. Linear in the number
 * of objects. Loop-thread only.
 */
#ifndef MOBULA_AGENT_UPLOAD_INVENTORY_H
#define MOBULA_AGENT_UPLOAD_INVENTORY_H

#include <stddef.h>
#include <stdint.h>
#include "agent/upload/manifest.h"
#include "base/err.h"
#include "base/s3/store.h"

enum mb_inventory_state {
    MB_INVENTORY_WHOLE,   /* a manifest, and all its files with their sizes */
    MB_INVENTORY_DAMAGED, /* a manifest, but files are absent or have other sizes, or it is broken
                           */
    MB_INVENTORY_UNFINISHED, /* no manifest: being written, or given up */
    MB_INVENTORY_N_STATES
};
const char *mb_inventory_state_name(enum mb_inventory_state state);

struct mb_inventory_key {
    char *key;
    uint64_t size_bytes;
};

struct mb_inventory_iteration {
    int64_t iteration;
    enum mb_inventory_state state;
    const struct mb_inventory_key *keys; /* all its objects, by key */
    size_t n_keys;
    uint64_t stored_bytes; /* of all of them */
    size_t n_files;        /* of the manifest */
    uint64_t total_bytes;
    char *job_id; /* who wrote the manifest; NULL: unknown */
    uint32_t attempt;
    int is_claimed; /* a writer has said that it writes this one */
    size_t n_bad;
    char *bad; /* the first thing that is wrong; NULL: none */
};

struct mb_inventory {
    int64_t latest; /* -1: there is no pointer; -2: it is damaged */
    struct mb_inventory_key *keys;
    size_t n_keys;
    struct mb_inventory_iteration *iterations; /* ascending */
    size_t n;
};

void mb_inventory_close(struct mb_inventory *inv);
struct mb_inventory_iteration *mb_inventory_find(const struct mb_inventory *inv, int64_t iteration);

/* Runs once. What inv holds is the callee's from then on: mb_inventory_close(). */
typedef void (*mb_inventory_cb)(void *arg, const struct mb_err *err, struct mb_inventory *inv);
/* store must stay open until cb has run. */
int mb_inventory_start(struct mb_store *store, mb_inventory_cb cb, void *arg, struct mb_err *err);

/* Pure: the iteration of "iter_0000020/..."; -1: it is none. */
int64_t mb_iteration_of_key(const char *key);
/* Pure: groups keys, which are sorted, into iterations. 0 or MB_ENOMEM. */
int mb_inventory_group(struct mb_inventory *inv);
/* Pure: judges an iteration by its manifest's bytes; NULL: there is none. MB_ENOMEM or 0. */
int mb_inventory_judge(struct mb_inventory_iteration *it, const void *manifest, size_t n);

#endif
