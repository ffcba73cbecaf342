/*
 * The ledger of a node.
 *
 * Happy path: prepare reserves every bundle of a request, commit makes them usable, hold marks that
 * processes run, remove plus unhold give everything back.
 *
 *  1. A request that does not fit is refused as a whole: amounts are summed over the request first,
 *     memory is taken next, and only then is anything changed.
 *  2. A prepare repeated with the same amounts changes nothing; with other amounts it is refused.
 *  3. A commit without a prepare (the GCS knew us before a restart) reserves late, if that fits.
 *  4. A bundle removed while its placement group is held becomes RELEASING and stays counted until
 *     the last process is gone; a prepare of the same bundle is refused meanwhile.
 *  5. The fence remembers the newest attempt of each placement group in a ring of bounded size; the
 *     oldest entry that holds no bundle makes room.
 *  6. A device given back after processes used it is CHECKED, if that is asked for: it counts as
 *     used until its verdict. A QUARANTINED one leaves the total.
 *  7. A (state, event) that the table does not know is refused with a text and changes nothing.
 */
#include "agent/ledger.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"

enum bundle_event { EV_PREPARE, EV_COMMIT, EV_REMOVE_IDLE, EV_REMOVE_HELD, EV_GONE, N_EVENTS };

enum { REFUSED = -1, FENCE_MAX = 256 };

static const char *const state_names[MB_BUNDLE_N_STATES] = {
    [MB_BUNDLE_FREE] = "FREE",
    [MB_BUNDLE_PREPARED] = "PREPARED",
    [MB_BUNDLE_COMMITTED] = "COMMITTED",
    [MB_BUNDLE_RELEASING] = "RELEASING",
};

static const signed char next_state[MB_BUNDLE_N_STATES][N_EVENTS] = {
    [MB_BUNDLE_FREE] = {MB_BUNDLE_PREPARED, MB_BUNDLE_COMMITTED, MB_BUNDLE_FREE, MB_BUNDLE_FREE,
                        MB_BUNDLE_FREE},
    [MB_BUNDLE_PREPARED] = {MB_BUNDLE_PREPARED, MB_BUNDLE_COMMITTED, MB_BUNDLE_FREE,
                            MB_BUNDLE_RELEASING, MB_BUNDLE_PREPARED},
    [MB_BUNDLE_COMMITTED] = {MB_BUNDLE_COMMITTED, MB_BUNDLE_COMMITTED, MB_BUNDLE_FREE,
                             MB_BUNDLE_RELEASING, MB_BUNDLE_COMMITTED},
    [MB_BUNDLE_RELEASING] = {REFUSED, REFUSED, MB_BUNDLE_RELEASING, MB_BUNDLE_RELEASING,
                             MB_BUNDLE_FREE},
};

struct fence {
    struct mb_pg_id pg;
    uint32_t attempt;
    int held;
};

struct mb_ledger {
    struct mb_resource totals[MB_LEDGER_KINDS_MAX];
    uint32_t used[MB_LEDGER_KINDS_MAX];
    size_t n_kinds;
    int gpu_kind;       /* index in totals, or -1 */
    uint8_t *gpu_taken; /* enum mb_gpu_state by device number */
    size_t n_gpus;
    int checks_gpus;
    struct mb_bundle *bundles;
    size_t n_bundles;
    size_t cap_bundles;
    struct fence fences[FENCE_MAX]; /* newest last */
    size_t n_fences;
    uint64_t version;
};

const char *mb_bundle_state_name(enum mb_bundle_state s)
{
    return (unsigned)s < MB_BUNDLE_N_STATES ? state_names[s] : "?";
}

static int same_pg(const struct mb_pg_id *a, const struct mb_pg_id *b)
{
    return memcmp(a->bytes, b->bytes, sizeof(a->bytes)) == 0;
}

/* ---- life ---- */

int mb_ledger_create(const struct mb_resource *totals, size_t n, struct mb_ledger **out,
                     struct mb_err *err)
{
    struct mb_ledger *l;

    if (n > MB_LEDGER_KINDS_MAX)
        return mb_err_set(err, MB_EINVAL, "%zu kinds of resources, at most %d are possible", n,
                          MB_LEDGER_KINDS_MAX);
    l = mb_calloc(1, sizeof(*l));
    if (l == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory for the resource ledger");
    l->gpu_kind = -1;
    for (size_t i = 0; i < n; i++) {
        l->totals[i] = totals[i];
        if (strcmp(totals[i].name, MB_RESOURCE_GPU) == 0)
            l->gpu_kind = (int)i;
    }
    l->n_kinds = n;
    l->version = 1;
    if (l->gpu_kind >= 0) {
        l->n_gpus = totals[l->gpu_kind].units;
        l->gpu_taken = mb_calloc(l->n_gpus, 1);
        if (l->gpu_taken == NULL) {
            mb_free(l);
            return mb_err_set(err, MB_ENOMEM, "no memory for the resource ledger");
        }
    }
    *out = l;
    return MB_OK;
}

void mb_ledger_destroy(struct mb_ledger *l)
{
    if (l == NULL)
        return;
    for (size_t i = 0; i < l->n_bundles; i++)
        mb_free(l->bundles[i].gpus);
    mb_free(l->bundles);
    mb_free(l->gpu_taken);
    mb_free(l);
}

int mb_ledger_units(const char *name, double value, uint32_t *out, struct mb_err *err)
{
    if (!(value >= 0) || value > 1e6 || fabs(value - floor(value)) > 1e-9)
        return mb_err_set(err, MB_EINVAL, "resource %s: %g is not a whole number from 0 to 1000000",
                          name, value);
    *out = (uint32_t)value;
    return MB_OK;
}

/* ---- look-ups ---- */

static size_t index_of(const struct mb_ledger *l, const struct mb_pg_id *pg, int32_t index)
{
    for (size_t i = 0; i < l->n_bundles; i++)
        if (l->bundles[i].index == index && same_pg(&l->bundles[i].pg, pg))
            return i;
    return SIZE_MAX;
}

const struct mb_bundle *mb_ledger_find(const struct mb_ledger *l, const struct mb_pg_id *pg,
                                       int32_t index)
{
    size_t i = index_of(l, pg, index);

    return i == SIZE_MAX ? NULL : &l->bundles[i];
}

size_t mb_ledger_count(const struct mb_ledger *l)
{
    return l->n_bundles;
}

const struct mb_bundle *mb_ledger_at(const struct mb_ledger *l, size_t i)
{
    return i < l->n_bundles ? &l->bundles[i] : NULL;
}

size_t mb_ledger_prepared(const struct mb_ledger *l)
{
    size_t n = 0;

    for (size_t i = 0; i < l->n_bundles; i++)
        n += l->bundles[i].state == MB_BUNDLE_PREPARED;
    return n;
}

int mb_ledger_is_committed(const struct mb_ledger *l, const struct mb_pg_id *pg)
{
    for (size_t i = 0; i < l->n_bundles; i++)
        if (l->bundles[i].state == MB_BUNDLE_COMMITTED && same_pg(&l->bundles[i].pg, pg))
            return 1;
    return 0;
}

size_t mb_ledger_kinds(const struct mb_ledger *l)
{
    return l->n_kinds;
}

const struct mb_resource *mb_ledger_total(const struct mb_ledger *l, size_t kind)
{
    return kind < l->n_kinds ? &l->totals[kind] : NULL;
}

uint32_t mb_ledger_available(const struct mb_ledger *l, size_t kind)
{
    return kind < l->n_kinds ? l->totals[kind].units - l->used[kind] : 0;
}

uint64_t mb_ledger_version(const struct mb_ledger *l)
{
    return l->version;
}

static int kind_of(const struct mb_ledger *l, const char *name)
{
    for (size_t i = 0; i < l->n_kinds; i++)
        if (strcmp(l->totals[i].name, name) == 0)
            return (int)i;
    return -1;
}

static uint32_t wanted(const struct mb_resource *want, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(want[i].name, name) == 0)
            return want[i].units;
    return 0;
}

static int same_want(const struct mb_bundle *b, const struct mb_bundle_spec *s)
{
    if (b->n_want != s->n_want)
        return 0;
    for (size_t i = 0; i < s->n_want; i++)
        if (wanted(b->want, b->n_want, s->want[i].name) != s->want[i].units)
            return 0;
    return 1;
}

/* ---- the fence and the holds ---- */

static struct fence *fence_of(struct mb_ledger *l, const struct mb_pg_id *pg)
{
    for (size_t i = 0; i < l->n_fences; i++)
        if (same_pg(&l->fences[i].pg, pg))
            return &l->fences[i];
    return NULL;
}

static int has_bundle(const struct mb_ledger *l, const struct mb_pg_id *pg)
{
    for (size_t i = 0; i < l->n_bundles; i++)
        if (same_pg(&l->bundles[i].pg, pg))
            return 1;
    return 0;
}

static struct fence *fence_make(struct mb_ledger *l, const struct mb_pg_id *pg)
{
    struct fence *f = fence_of(l, pg);
    size_t drop = 0;

    if (f != NULL)
        return f;
    if (l->n_fences == FENCE_MAX) {
        while (drop < FENCE_MAX - 1 && (l->fences[drop].held || has_bundle(l, &l->fences[drop].pg)))
            drop++;
        memmove(&l->fences[drop], &l->fences[drop + 1],
                (FENCE_MAX - 1 - drop) * sizeof(l->fences[0]));
        l->n_fences--;
    }
    f = &l->fences[l->n_fences++];
    *f = (struct fence){.pg = *pg};
    return f;
}

int mb_ledger_fence(struct mb_ledger *l, const struct mb_pg_id *pg, uint32_t attempt,
                    struct mb_err *err)
{
    struct fence *f = fence_make(l, pg);

    if (attempt < f->attempt)
        return mb_err_set(err, MB_ESTATE, "attempt %u is older than attempt %u seen on this node",
                          attempt, f->attempt);
    f->attempt = attempt;
    return MB_OK;
}

uint32_t mb_ledger_newest(struct mb_ledger *l, const struct mb_pg_id *gang)
{
    const struct fence *f = fence_of(l, gang);

    return f != NULL ? f->attempt : 0;
}

static int is_held(struct mb_ledger *l, const struct mb_pg_id *pg)
{
    const struct fence *f = fence_of(l, pg);

    return f != NULL && f->held;
}

/* ---- reserve and give back ---- */

static void take_units(struct mb_ledger *l, struct mb_bundle *b)
{
    uint32_t device = 0;

    for (size_t i = 0; i < b->n_want; i++)
        l->used[kind_of(l, b->want[i].name)] += b->want[i].units;
    for (size_t i = 0; i < b->n_gpus; i++) {
        while (l->gpu_taken[device])
            device++;
        l->gpu_taken[device] = MB_LEDGER_GPU_TAKEN;
        b->gpus[i] = device;
    }
    l->version++;
}

static void drop_bundle(struct mb_ledger *l, size_t at)
{
    struct mb_bundle *b = &l->bundles[at];

    for (size_t i = 0; i < b->n_want; i++)
        l->used[kind_of(l, b->want[i].name)] -= b->want[i].units;
    for (size_t i = 0; i < b->n_gpus; i++) {
        int is_checked = l->checks_gpus && b->was_held;

        l->gpu_taken[b->gpus[i]] = is_checked ? MB_LEDGER_GPU_CHECKED : MB_LEDGER_GPU_FREE;
        l->used[l->gpu_kind] += (uint32_t)is_checked;
    }
    mb_free(b->gpus);
    memmove(b, b + 1, (l->n_bundles - at - 1) * sizeof(*b));
    l->n_bundles--;
    l->version++;
}

/* Sum what is new in the request and compare it with what is free. */
static int check_request(const struct mb_ledger *l, const struct mb_bundle_spec *specs, size_t n,
                         struct mb_err *err)
{
    uint64_t sum[MB_LEDGER_KINDS_MAX] = {0};

    for (size_t s = 0; s < n; s++) {
        const struct mb_bundle *b = mb_ledger_find(l, &specs[s].pg, specs[s].index);

        for (size_t t = 0; t < s; t++)
            if (specs[t].index == specs[s].index && same_pg(&specs[t].pg, &specs[s].pg))
                return mb_err_set(err, MB_EINVAL, "bundle %d is named twice in one request",
                                  specs[s].index);
        if (b != NULL) {
            if (next_state[b->state][EV_PREPARE] == REFUSED)
                return mb_err_set(err, MB_ESTATE, "bundle %d: its processes are still ending",
                                  specs[s].index);
            if (!same_want(b, &specs[s]))
                return mb_err_set(err, MB_ESTATE, "bundle %d: is held here with other amounts",
                                  specs[s].index);
            continue;
        }
        for (size_t i = 0; i < specs[s].n_want; i++) {
            int kind = kind_of(l, specs[s].want[i].name);

            if (kind < 0)
                return mb_err_set(err, MB_EINVAL, "bundle %d: this node has no resource %s",
                                  specs[s].index, specs[s].want[i].name);
            sum[kind] += specs[s].want[i].units;
        }
    }
    for (size_t k = 0; k < l->n_kinds; k++)
        if (sum[k] > l->totals[k].units - l->used[k])
            return mb_err_set(err, MB_EFULL, "%llu %s wanted, %u free", (unsigned long long)sum[k],
                              l->totals[k].name, l->totals[k].units - l->used[k]);
    return MB_OK;
}

/* Room for n more bundles and the device list of each new one, in gpus[]. */
static int take_memory(struct mb_ledger *l, const struct mb_bundle_spec *specs, size_t n,
                       uint32_t **gpus)
{
    if (l->n_bundles + n > l->cap_bundles) {
        size_t cap = l->n_bundles + n + 8;
        struct mb_bundle *grown = mb_reallocarray(l->bundles, cap, sizeof(*grown));

        if (grown == NULL)
            return MB_ENOMEM;
        l->bundles = grown;
        l->cap_bundles = cap;
    }
    for (size_t s = 0; s < n; s++) {
        uint32_t n_gpus = wanted(specs[s].want, specs[s].n_want, MB_RESOURCE_GPU);

        if (n_gpus == 0 || mb_ledger_find(l, &specs[s].pg, specs[s].index) != NULL)
            continue;
        gpus[s] = mb_calloc(n_gpus, sizeof(uint32_t));
        if (gpus[s] == NULL)
            return MB_ENOMEM;
    }
    return MB_OK;
}

static int reserve(struct mb_ledger *l, const struct mb_bundle_spec *specs, size_t n,
                   enum bundle_event event, struct mb_err *err)
{
    uint32_t **gpus;
    int rc = check_request(l, specs, n, err);

    if (rc != MB_OK)
        return rc;
    gpus = mb_calloc(n, sizeof(*gpus));
    if (gpus == NULL || take_memory(l, specs, n, gpus) != MB_OK) {
        rc = mb_err_set(err, MB_ENOMEM, "no memory to reserve %zu bundles", n);
        goto out;
    }
    for (size_t s = 0; s < n; s++) {
        size_t at = index_of(l, &specs[s].pg, specs[s].index);
        struct mb_bundle *b;

        if (at == SIZE_MAX) {
            at = l->n_bundles++;
            b = &l->bundles[at];
            *b = (struct mb_bundle){.pg = specs[s].pg, .index = specs[s].index};
            memcpy(b->want, specs[s].want, sizeof(b->want));
            b->n_want = specs[s].n_want;
            b->n_gpus = wanted(b->want, b->n_want, MB_RESOURCE_GPU);
            b->gpus = gpus[s];
            gpus[s] = NULL;
            take_units(l, b);
        }
        b = &l->bundles[at];
        l->version += (uint64_t)b->is_adrift;
        b->is_adrift = 0;
        b->is_late |= event == EV_COMMIT && b->state == MB_BUNDLE_FREE;
        b->state = (enum mb_bundle_state)next_state[b->state][event];
    }
out:
    for (size_t s = 0; gpus != NULL && s < n; s++)
        mb_free(gpus[s]);
    mb_free(gpus);
    return rc;
}

int mb_ledger_prepare(struct mb_ledger *l, const struct mb_bundle_spec *specs, size_t n,
                      struct mb_err *err)
{
    return reserve(l, specs, n, EV_PREPARE, err);
}

int mb_ledger_commit(struct mb_ledger *l, const struct mb_bundle_spec *specs, size_t n,
                     struct mb_err *err)
{
    int rc = MB_OK;

    for (size_t s = 0; s < n; s++) {
        int one = reserve(l, &specs[s], 1, EV_COMMIT, rc == MB_OK ? err : NULL);

        if (rc == MB_OK)
            rc = one;
    }
    return rc;
}

static int remove_at(struct mb_ledger *l, size_t at)
{
    struct mb_bundle *b = &l->bundles[at];
    enum bundle_event event = is_held(l, &b->pg) ? EV_REMOVE_HELD : EV_REMOVE_IDLE;
    enum mb_bundle_state next = (enum mb_bundle_state)next_state[b->state][event];

    if (next == MB_BUNDLE_FREE) {
        drop_bundle(l, at);
        return 0;
    }
    b->state = next;
    l->version += (uint64_t)b->is_adrift;
    b->is_adrift = 0;
    return 1;
}

int mb_ledger_remove(struct mb_ledger *l, const struct mb_pg_id *pg, int32_t index)
{
    size_t at = index_of(l, pg, index);

    return at == SIZE_MAX ? 0 : remove_at(l, at);
}

size_t mb_ledger_release_unused(struct mb_ledger *l, const struct mb_bundle_spec *in_use, size_t n)
{
    size_t removed = 0;

    for (size_t at = l->n_bundles; at-- > 0;) {
        const struct mb_bundle *b = &l->bundles[at];
        int used = 0;

        for (size_t i = 0; i < n && !used; i++)
            used = in_use[i].index == b->index && same_pg(&in_use[i].pg, &b->pg);
        if (!used && b->state != MB_BUNDLE_RELEASING) {
            remove_at(l, at);
            removed++;
        }
    }
    return removed;
}

size_t mb_ledger_set_adrift(struct mb_ledger *l)
{
    size_t n = 0;

    for (size_t at = l->n_bundles; at-- > 0;) {
        struct mb_bundle *b = &l->bundles[at];

        if (b->state == MB_BUNDLE_COMMITTED && is_held(l, &b->pg)) {
            b->is_adrift = 1;
            n++;
        } else if (b->state != MB_BUNDLE_RELEASING) {
            remove_at(l, at);
        }
    }
    l->version++;
    return n;
}

uint32_t mb_ledger_offered(const struct mb_ledger *l, size_t kind)
{
    uint32_t units = mb_ledger_available(l, kind);

    for (size_t i = 0; i < l->n_bundles; i++)
        if (l->bundles[i].is_adrift)
            units += wanted(l->bundles[i].want, l->bundles[i].n_want, l->totals[kind].name);
    return units;
}

void mb_ledger_hold(struct mb_ledger *l, const struct mb_pg_id *pg)
{
    fence_make(l, pg)->held = 1;
    for (size_t i = 0; i < l->n_bundles; i++)
        if (same_pg(&l->bundles[i].pg, pg))
            l->bundles[i].was_held = 1;
}

void mb_ledger_unhold(struct mb_ledger *l, const struct mb_pg_id *pg)
{
    struct fence *f = fence_of(l, pg);

    if (f != NULL)
        f->held = 0;
    for (size_t at = l->n_bundles; at-- > 0;) {
        struct mb_bundle *b = &l->bundles[at];

        if (!same_pg(&b->pg, pg))
            continue;
        b->state = (enum mb_bundle_state)next_state[b->state][EV_GONE];
        if (b->state == MB_BUNDLE_FREE)
            drop_bundle(l, at);
    }
}

void mb_ledger_check_gpus(struct mb_ledger *l)
{
    l->checks_gpus = 1;
}

size_t mb_ledger_gpus(const struct mb_ledger *l)
{
    return l->n_gpus;
}

enum mb_gpu_state mb_ledger_gpu_state(const struct mb_ledger *l, size_t device)
{
    return (enum mb_gpu_state)l->gpu_taken[device];
}

int mb_ledger_set_gpu(struct mb_ledger *l, size_t device, enum mb_gpu_state state)
{
    enum mb_gpu_state before = mb_ledger_gpu_state(l, device);

    if (before == state || before == MB_LEDGER_GPU_TAKEN)
        return 0;
    l->used[l->gpu_kind] += state == MB_LEDGER_GPU_CHECKED;
    l->used[l->gpu_kind] -= before == MB_LEDGER_GPU_CHECKED;
    l->totals[l->gpu_kind].units -= state == MB_LEDGER_GPU_QUARANTINED;
    l->totals[l->gpu_kind].units += before == MB_LEDGER_GPU_QUARANTINED;
    l->gpu_taken[device] = (uint8_t)state;
    l->version++;
    return 1;
}

size_t mb_ledger_drop_stale(struct mb_ledger *l)
{
    size_t dropped = 0;

    for (size_t at = l->n_bundles; at-- > 0;) {
        struct mb_bundle *b = &l->bundles[at];
        int in_doubt = b->state == MB_BUNDLE_PREPARED || (b->is_late && !is_held(l, &b->pg));

        if (in_doubt && b->is_stale) {
            drop_bundle(l, at);
            dropped++;
        } else {
            b->is_stale = in_doubt;
        }
    }
    return dropped;
}

size_t mb_ledger_drop_unheld(struct mb_ledger *l)
{
    size_t dropped = 0;

    for (size_t at = l->n_bundles; at-- > 0;)
        if (l->bundles[at].state == MB_BUNDLE_RELEASING && !is_held(l, &l->bundles[at].pg)) {
            l->bundles[at].was_held = 1;
            drop_bundle(l, at);
            dropped++;
        }
    return dropped;
}

const char *mb_ledger_invariant(const struct mb_ledger *l)
{
    uint64_t sum[MB_LEDGER_KINDS_MAX] = {0};
    uint64_t devices = 0, checked = 0, quarantined = 0;

    for (size_t g = 0; g < l->n_gpus; g++) {
        checked += l->gpu_taken[g] == MB_LEDGER_GPU_CHECKED;
        quarantined += l->gpu_taken[g] == MB_LEDGER_GPU_QUARANTINED;
    }
    if (l->gpu_kind >= 0)
        sum[l->gpu_kind] = checked;
    if (l->gpu_kind >= 0 && l->totals[l->gpu_kind].units + quarantined != l->n_gpus)
        return "the total of mobula_gpu is not the devices that are not in quarantine";
    for (size_t i = 0; i < l->n_bundles; i++) {
        const struct mb_bundle *b = &l->bundles[i];

        if (b->state == MB_BUNDLE_FREE || (unsigned)b->state >= MB_BUNDLE_N_STATES)
            return "a bundle in the ledger is free";
        for (size_t k = 0; k < b->n_want; k++)
            sum[kind_of(l, b->want[k].name)] += b->want[k].units;
        for (size_t g = 0; g < b->n_gpus; g++) {
            if (l->gpu_taken[b->gpus[g]] != MB_LEDGER_GPU_TAKEN)
                return "a bundle holds a device that is marked free";
            for (size_t j = 0; j < i; j++)
                for (size_t h = 0; h < l->bundles[j].n_gpus; h++)
                    if (l->bundles[j].gpus[h] == b->gpus[g])
                        return "two bundles hold one device";
        }
        devices += b->n_gpus;
    }
    for (size_t k = 0; k < l->n_kinds; k++)
        if (sum[k] != l->used[k] || l->used[k] > l->totals[k].units)
            return "amounts in use are not the sum of the bundles, or exceed the total";
    if (l->gpu_kind >= 0 && devices + checked != l->used[l->gpu_kind])
        return "devices held are not the amount of mobula_gpu in use";
    return NULL;
}

/* ---- as text ---- */

static json_t *dump_fences(const struct mb_ledger *l)
{
    json_t *list = json_array();

    for (size_t i = 0; i < l->n_fences; i++) {
        char gang[2 * MB_PG_ID_BYTES + 1];

        if (l->fences[i].attempt > 0)
            json_array_append_new(list,
                                  json_pack("{s:s, s:I}", "gang",
                                            mb_hex(l->fences[i].pg.bytes, MB_PG_ID_BYTES, gang),
                                            "attempt", (json_int_t)l->fences[i].attempt));
    }
    return list;
}

char *mb_ledger_dump(const struct mb_ledger *l)
{
    json_t *list = json_array();
    json_t *root = NULL;
    char *text = NULL;

    for (size_t i = 0; i < l->n_bundles; i++) {
        const struct mb_bundle *b = &l->bundles[i];
        char pg[2 * MB_PG_ID_BYTES + 1];
        json_t *want = json_object();
        json_t *gpus = json_array();

        for (size_t k = 0; k < b->n_want; k++)
            json_object_set_new(want, b->want[k].name, json_integer(b->want[k].units));
        for (size_t g = 0; g < b->n_gpus; g++)
            json_array_append_new(gpus, json_integer(b->gpus[g]));
        json_array_append_new(
            list,
            json_pack("{s:b, s:b, s:s, s:i, s:s, s:o, s:o}", "is_late", b->is_late, "is_adrift",
                      b->is_adrift, "placement_group_id",
                      mb_hex(b->pg.bytes, sizeof(b->pg.bytes), pg), "bundle_index", (int)b->index,
                      "state", mb_bundle_state_name(b->state), "want", want, "gpus", gpus));
    }
    if (list != NULL && json_array_size(list) == l->n_bundles)
        root = json_pack("{s:O, s:o}", "bundles", list, "fences", dump_fences(l));
    if (root != NULL)
        text = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    json_decref(list);
    return text;
}

static int load_fences(struct mb_ledger *l, json_t *list)
{
    json_t *item;
    size_t i;

    json_array_foreach(list, i, item)
    {
        struct mb_pg_id gang;
        const char *hex;
        json_int_t attempt;

        if (json_unpack(item, "{s:s, s:I}", "gang", &hex, "attempt", &attempt) != 0 ||
            attempt < 1 || attempt > UINT32_MAX ||
            mb_unhex(hex, gang.bytes, sizeof(gang.bytes)) != MB_OK ||
            mb_ledger_fence(l, &gang, (uint32_t)attempt, NULL) != MB_OK)
            return MB_ECORRUPT;
    }
    return MB_OK;
}

/* One bundle of a dump, appended; the caller undoes everything on failure. */
static int load_one(struct mb_ledger *l, json_t *item)
{
    const char *pg_hex = NULL, *state = NULL;
    json_t *want = NULL, *gpus = NULL, *value;
    struct mb_bundle_spec spec = {0};
    struct mb_bundle *b;
    const char *name;
    size_t g;
    int index = 0;

    if (json_unpack(item, "{s:s, s:i, s:s, s:o, s:o}", "placement_group_id", &pg_hex,
                    "bundle_index", &index, "state", &state, "want", &want, "gpus", &gpus) != 0 ||
        mb_unhex(pg_hex, spec.pg.bytes, sizeof(spec.pg.bytes)) != MB_OK)
        return MB_ECORRUPT;
    spec.index = index;
    json_object_foreach(want, name, value)
    {
        if (spec.n_want == MB_LEDGER_KINDS_MAX || strlen(name) >= MB_RESOURCE_NAME_MAX)
            return MB_ECORRUPT;
        snprintf(spec.want[spec.n_want].name, MB_RESOURCE_NAME_MAX, "%s", name);
        spec.want[spec.n_want++].units = (uint32_t)json_integer_value(value);
    }
    if (reserve(l, &spec, 1, EV_PREPARE, NULL) != MB_OK)
        return MB_ECORRUPT;
    b = &l->bundles[l->n_bundles - 1];
    b->is_late = json_is_true(json_object_get(item, "is_late"));
    b->is_adrift = json_is_true(json_object_get(item, "is_adrift"));
    if (json_array_size(gpus) != b->n_gpus)
        return MB_ECORRUPT;
    for (g = 0; g < b->n_gpus; g++)
        l->gpu_taken[b->gpus[g]] = 0;
    json_array_foreach(gpus, g, value)
    {
        json_int_t device = json_integer_value(value);

        if (device < 0 || device >= (json_int_t)l->n_gpus || l->gpu_taken[device]) {
            b->n_gpus = g; /* only these are marked */
            return MB_ECORRUPT;
        }
        b->gpus[g] = (uint32_t)device;
        l->gpu_taken[device] = 1;
    }
    for (int s = MB_BUNDLE_PREPARED; s < MB_BUNDLE_N_STATES; s++)
        if (strcmp(state, state_names[s]) == 0) {
            b->state = (enum mb_bundle_state)s;
            return MB_OK;
        }
    return MB_ECORRUPT;
}

int mb_ledger_load(struct mb_ledger *l, const char *text, struct mb_err *err)
{
    json_t *root = json_loads(text, 0, NULL);
    json_t *list = json_object_get(root, "bundles");
    json_t *item;
    size_t i;
    int rc = MB_ECORRUPT;

    if (l->n_bundles != 0 || l->n_fences != 0 || !json_is_array(list))
        goto out;
    rc = load_fences(l, json_object_get(root, "fences"));
    json_array_foreach(list, i, item)
    {
        if (rc == MB_OK)
            rc = load_one(l, item);
        if (rc != MB_OK)
            break;
    }
    while (rc != MB_OK && l->n_bundles > 0)
        drop_bundle(l, l->n_bundles - 1);
    if (rc != MB_OK)
        l->n_fences = 0;
out:
    json_decref(root);
    return rc == MB_OK ? rc : mb_err_set(err, MB_ECORRUPT, "the saved resource ledger is damaged");
}
