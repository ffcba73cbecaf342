/*
 * The node's own truth about its resources: which bundle of which placement group holds what.
 * Pure: no clock, no file, no loop. The GCS may overbook a node (its view is overwritten by our
 * reports), so a request beyond what is free here is refused whatever the GCS believes.
 *
 * Amounts are whole units (one mobula_gpu is one device, one mobula_slot one process); Ray's
 * doubles are converted by the caller with mb_ledger_units(). Devices of `mobula_gpu` are numbered
 * from 0; a bundle holds particular ones.
 *
 * A bundle that is removed while processes of its placement group exist stays held (RELEASING)
 * until mb_ledger_unhold(): its devices go to nobody else before they are really free. Source of
 * the rules: Ray's NodeManagerService bundle calls (all or nothing per request, Commit idempotent
 * and never failed).
 */
#ifndef MOBULA_AGENT_LEDGER_H
#define MOBULA_AGENT_LEDGER_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"
#include "gcs/types.h"

#define MB_RESOURCE_GPU  "mobula_gpu"
#define MB_RESOURCE_SLOT "mobula_slot"
/* A place for a job's driver, on nodes that have GPUs: so a driver that wants to be near them takes
 * no slot of a gang. */
#define MB_RESOURCE_DRIVER "mobula_driver"

enum { MB_RESOURCE_NAME_MAX = 64, MB_LEDGER_KINDS_MAX = 8 };

struct mb_pg_id {
    uint8_t bytes[MB_PG_ID_BYTES];
};

struct mb_resource {
    char name[MB_RESOURCE_NAME_MAX];
    uint32_t units;
};

enum mb_bundle_state {
    MB_BUNDLE_FREE, /* not in the ledger */
    MB_BUNDLE_PREPARED,
    MB_BUNDLE_COMMITTED,
    MB_BUNDLE_RELEASING, /* removed by the GCS, processes not gone yet */
    MB_BUNDLE_N_STATES
};

struct mb_bundle {
    struct mb_pg_id pg;
    int32_t index;
    enum mb_bundle_state state;
    int is_late;   /* committed without having been prepared */
    int is_adrift; /* committed to a head that has taken this node for dead since */
    int is_stale;  /* in doubt when mb_ledger_drop_stale() looked */
    struct mb_resource want[MB_LEDGER_KINDS_MAX];
    size_t n_want;
    uint32_t *gpus; /* owned by the ledger; ascending device numbers */
    size_t n_gpus;
    int was_held; /* processes have existed: its devices may need a look afterwards */
};

enum mb_gpu_state {
    MB_LEDGER_GPU_FREE,
    MB_LEDGER_GPU_TAKEN,      /* by a bundle */
    MB_LEDGER_GPU_CHECKED,    /* given back by a bundle, not confirmed free yet: nobody gets it */
    MB_LEDGER_GPU_QUARANTINED /* not free after all: no part of the total either */
};

/* One bundle of a request. */
struct mb_bundle_spec {
    struct mb_pg_id pg;
    int32_t index;
    struct mb_resource want[MB_LEDGER_KINDS_MAX];
    size_t n_want;
};

struct mb_ledger;

/* totals is copied; at most MB_LEDGER_KINDS_MAX kinds. */
int mb_ledger_create(const struct mb_resource *totals, size_t n, struct mb_ledger **out,
                     struct mb_err *err);
void mb_ledger_destroy(struct mb_ledger *l); /* NULL is legal */

/* Ray's double to whole units: MB_EINVAL for a fraction, a negative number or more than a million.
 */
int mb_ledger_units(const char *name, double value, uint32_t *out, struct mb_err *err);

/* All bundles or none. MB_EFULL: more than is free; MB_EINVAL: a resource this node does not have;
 * MB_ESTATE: a bundle is still being released. A bundle already prepared or committed with the same
 * amounts is fine. */
int mb_ledger_prepare(struct mb_ledger *l, const struct mb_bundle_spec *specs, size_t n,
                      struct mb_err *err);
/* Commits each bundle; one that was never prepared is reserved first if that is possible. On error
 * (the caller logs it, and answers the GCS with success all the same) the others are committed. */
int mb_ledger_commit(struct mb_ledger *l, const struct mb_bundle_spec *specs, size_t n,
                     struct mb_err *err);
/* Removes one bundle; unknown bundles are fine. 1 if it is still held by processes, else 0. */
int mb_ledger_remove(struct mb_ledger *l, const struct mb_pg_id *pg, int32_t index);
/* Removes every bundle that is not listed; the placement groups whose bundles became RELEASING are
 * found through mb_ledger_at(). Returns how many bundles were removed. */
size_t mb_ledger_release_unused(struct mb_ledger *l, const struct mb_bundle_spec *in_use, size_t n);

/* The head took this node for dead: what it knows of its bundles is void, and it places them again,
 * here or elsewhere. Bundles of groups whose processes run stay, adrift, and are offered to the
 * head again: a Prepare or Commit of the same bundle brings it back. Others are removed. Returns
 * how many are adrift. */
size_t mb_ledger_set_adrift(struct mb_ledger *l);
/* What the head may place here: what is available, and what adrift bundles have. */
uint32_t mb_ledger_offered(const struct mb_ledger *l, size_t kind);

/* Processes of this placement group exist here from now on / are all gone (frees what is
 * RELEASING). */
void mb_ledger_hold(struct mb_ledger *l, const struct mb_pg_id *pg);
void mb_ledger_unhold(struct mb_ledger *l, const struct mb_pg_id *pg);

/* After a restart: frees bundles that only wait for processes of groups that nobody holds. Returns
 * how many. */
size_t mb_ledger_drop_unheld(struct mb_ledger *l);

/* Called now and then: frees bundles that were in doubt at the last call too: PREPARED, or
 * committed without having been prepared, and not held. What a head sent before it died can arrive
 * after its successor asked for the truth; nobody would ever remove it. Returns how many. */
size_t mb_ledger_drop_stale(struct mb_ledger *l);

/* The fence: MB_ESTATE if attempt is older than the newest seen for this gang (named by the
 * placement group of its first attempt), else it becomes the newest. The last 256 are remembered,
 * and are part of the dump. */
int mb_ledger_fence(struct mb_ledger *l, const struct mb_pg_id *gang, uint32_t attempt,
                    struct mb_err *err);
uint32_t mb_ledger_newest(struct mb_ledger *l, const struct mb_pg_id *gang); /* 0: none seen */

/* Borrowed until the next change; NULL if unknown. */
const struct mb_bundle *mb_ledger_find(const struct mb_ledger *l, const struct mb_pg_id *pg,
                                       int32_t index);
size_t mb_ledger_count(const struct mb_ledger *l);
const struct mb_bundle *mb_ledger_at(const struct mb_ledger *l, size_t i);
size_t mb_ledger_prepared(const struct mb_ledger *l); /* bundles that wait for their commit */
/* 1 if the placement group has at least one committed bundle here. */
int mb_ledger_is_committed(const struct mb_ledger *l, const struct mb_pg_id *pg);

size_t mb_ledger_kinds(const struct mb_ledger *l);
const struct mb_resource *mb_ledger_total(const struct mb_ledger *l, size_t kind);
uint32_t mb_ledger_available(const struct mb_ledger *l, size_t kind);
/* Changes with every change of what is available; a reporter sends when it moved. */
uint64_t mb_ledger_version(const struct mb_ledger *l);

/* From now on devices of bundles that were held become CHECKED when they are given back. */
void mb_ledger_check_gpus(struct mb_ledger *l);
size_t mb_ledger_gpus(const struct mb_ledger *l); /* all that the node began with */
enum mb_gpu_state mb_ledger_gpu_state(const struct mb_ledger *l, size_t device);
/* The verdict on a device that is not TAKEN: FREE, CHECKED or QUARANTINED. 1 if it changed. */
int mb_ledger_set_gpu(struct mb_ledger *l, size_t device, enum mb_gpu_state state);

const char *mb_bundle_state_name(enum mb_bundle_state s);
/* NULL, or a text naming the promise that is broken: sums, ranges and double use of a device. */
const char *mb_ledger_invariant(const struct mb_ledger *l);

/* {"bundles": [...], "fences": [...]} as one JSON text (owned by the caller) and back; loading
 * wants an empty ledger and changes nothing when it fails (MB_ECORRUPT). A restarted agent goes on
 * with what it had promised, and refuses what it had refused. */
char *mb_ledger_dump(const struct mb_ledger *l);
int mb_ledger_load(struct mb_ledger *l, const char *text, struct mb_err *err);

#endif
