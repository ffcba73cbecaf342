/* 1. The kinds. 2. Of each bundle that is told of, a row for the group and one for the bundle; the
 * rows of a group are the sums over its bundles here. */
#include "agent/group_rows.h"

#include <stdio.h>
#include <string.h>
#include "base/str.h"

enum {
    NAME_MAX_BYTES = MB_RESOURCE_NAME_MAX + 64, /* _group_, an index and an id behind it */
    BUNDLE_AMOUNT = 1000,                       /* as Ray's: each task takes 0.001 of it */
    ROWS_MAX = MB_LEDGER_KINDS_MAX + MB_GROUP_ROWS_BUNDLES_MAX * 2 * (1 + MB_LEDGER_KINDS_MAX)
};

struct rows {
    struct mb_arena *arena;
    struct mb_gcs_resource *available, *total;
    size_t n;
};

static int add(struct rows *rows, const char *name, double available, double total)
{
    size_t i = 0;

    while (i < rows->n && strcmp(rows->total[i].name, name) != 0)
        i++;
    if (i == rows->n) {
        name = mb_arena_strdup(rows->arena, name);
        if (name == NULL)
            return MB_ENOMEM;
        rows->total[i].name = rows->available[i].name = name;
        rows->n++;
    }
    rows->available[i].amount += available;
    rows->total[i].amount += total;
    return MB_OK;
}

/* Of the bundle, and of its group. */
static int add_both(struct rows *rows, const struct mb_bundle *b, const char *kind,
                    double available, double total)
{
    char name[NAME_MAX_BYTES], pg[2 * MB_PG_ID_BYTES + 1];
    int rc;

    mb_hex(b->pg.bytes, sizeof(b->pg.bytes), pg);
    snprintf(name, sizeof(name), "%s_group_%s", kind, pg);
    rc = add(rows, name, available, total);
    snprintf(name, sizeof(name), "%s_group_%d_%s", kind, b->index, pg);
    return rc == MB_OK ? add(rows, name, available, total) : rc;
}

int mb_group_rows(struct mb_arena *a, const struct mb_ledger *l, mb_group_rows_is_told is_told,
                  void *arg, struct mb_gcs_resource **available, struct mb_gcs_resource **total,
                  size_t *n)
{
    struct rows rows = {.arena = a,
                        .available = mb_arena_calloc(a, ROWS_MAX, sizeof(*rows.available)),
                        .total = mb_arena_calloc(a, ROWS_MAX, sizeof(*rows.total))};
    size_t n_bundles = 0;
    int rc = MB_OK;

    if (rows.available == NULL || rows.total == NULL)
        return MB_ENOMEM;
    for (size_t k = 0; k < mb_ledger_kinds(l); k++) {
        const struct mb_resource *r = mb_ledger_total(l, k);

        rows.available[k] = (struct mb_gcs_resource){r->name, (double)mb_ledger_offered(l, k)};
        rows.total[k] = (struct mb_gcs_resource){r->name, (double)r->units};
    }
    rows.n = mb_ledger_kinds(l);
    for (size_t i = 0; i < mb_ledger_count(l) && n_bundles < MB_GROUP_ROWS_BUNDLES_MAX; i++) {
        const struct mb_bundle *b = mb_ledger_at(l, i);

        if (b->state != MB_BUNDLE_COMMITTED || !is_told(arg, &b->pg))
            continue;
        n_bundles++;
        rc = add_both(&rows, b, "bundle", BUNDLE_AMOUNT, BUNDLE_AMOUNT);
        for (size_t k = 0; k < b->n_want && rc == MB_OK; k++)
            rc = add_both(&rows, b, b->want[k].name, 0, (double)b->want[k].units);
        if (rc != MB_OK)
            return rc;
    }
    *available = rows.available;
    *total = rows.total;
    *n = rows.n;
    return MB_OK;
}
