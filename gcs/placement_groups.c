/* Placement: groups come, are restored, go. */
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"
#include "gcs/placement_internal.h"

struct group *place_find_group(const struct mb_placement *p, const uint8_t *id)
{
    for (size_t i = 0; i < p->n_groups; i++)
        if (memcmp(p->groups[i]->pub.id, id, MB_PG_ID_BYTES) == 0)
            return p->groups[i];
    return NULL;
}

void place_free_group(struct group *g)
{
    if (!g)
        return;
    mb_free(g->bundles);
    mb_free(g->b);
    mb_free(g->scratch);
    mb_free(g->pins);
    mb_free(g->text);
    mb_free(g->resources);
    mb_free(g);
}

static size_t text_bytes(const struct mb_gcs_pg *pg, size_t *n_resources)
{
    size_t bytes = strlen(pg->name ? pg->name : "") + 1;

    *n_resources = 0;
    for (size_t i = 0; i < pg->n_bundles; i++) {
        for (size_t k = 0; k < pg->bundles[i].n_resources; k++)
            bytes += strlen(pg->bundles[i].resources[k].name) + 1;
        *n_resources += pg->bundles[i].n_resources;
    }
    return bytes;
}

static struct group *copy_group(const struct mb_gcs_pg *pg)
{
    size_t n_resources, bytes = text_bytes(pg, &n_resources), at = 0;
    struct group *g = mb_calloc(1, sizeof *g);

    if (!g)
        return NULL;
    g->pub = *pg;
    g->bundles = mb_calloc(pg->n_bundles, sizeof *g->bundles);
    g->b = mb_calloc(pg->n_bundles, sizeof *g->b);
    g->scratch = mb_calloc(pg->n_bundles, sizeof *g->scratch);
    g->pins = mb_calloc(pg->n_bundles, sizeof *g->pins);
    g->resources = mb_calloc(n_resources, sizeof *g->resources);
    char *end = g->text = mb_calloc(1, bytes);
    if (!g->bundles || !g->b || !g->scratch || !g->pins || !g->resources || !g->text) {
        place_free_group(g);
        return NULL;
    }
    g->pub.name = place_put_name(&end, pg->name ? pg->name : "");
    g->pub.bundles = g->bundles;
    for (size_t i = 0; i < pg->n_bundles; i++) {
        const struct mb_gcs_bundle *in = &pg->bundles[i];
        g->bundles[i].resources = g->resources + at;
        g->bundles[i].n_resources = in->n_resources;
        for (size_t k = 0; k < in->n_resources; k++)
            g->resources[at++] = (struct mb_gcs_resource){
                place_put_name(&end, in->resources[k].name), in->resources[k].amount};
        g->b[i].pub = &g->bundles[i];
        g->b[i].node = g->pins[i] = PLACE_NOWHERE;
    }
    g->priority = mb_placement_priority_of(pg->name);
    return g;
}

/* ---- names ---- */

static const char gang_prefix[] = "mobula-", priority_mark[] = "@priority=";

static const char *mark_in(const char *name)
{
    const char *at = NULL;

    if (!name || strncmp(name, gang_prefix, sizeof gang_prefix - 1) != 0)
        return NULL;
    for (const char *s = name; (s = strstr(s, priority_mark)); s++)
        at = s;
    return at;
}

int mb_placement_priority_of(const char *name)
{
    const char *at = mark_in(name);
    int64_t n = 0;

    if (at && mb_parse_i64(at + sizeof priority_mark - 1, -MB_PLACE_PRIORITY_MAX,
                           MB_PLACE_PRIORITY_MAX, "priority", &n, NULL) != 0)
        n = 0;
    return (int)n;
}

size_t mb_placement_name_bytes(const char *name)
{
    const char *at = mark_in(name);

    return at ? (size_t)(at - name) : strlen(name);
}

static int same_name(const char *a, const char *b)
{
    size_t n = mb_placement_name_bytes(a);

    return n == mb_placement_name_bytes(b) && memcmp(a, b, n) == 0;
}

static int check_new(const struct mb_placement *p, const struct mb_gcs_pg *pg, struct mb_err *err)
{
    if (pg->n_bundles == 0)
        return mb_err_set(err, MB_EINVAL, "a placement group needs at least one bundle");
    if ((unsigned)pg->strategy > MB_PG_STRICT_SPREAD)
        return mb_err_set(err, MB_EINVAL, "unknown placement strategy %d", (int)pg->strategy);
    for (size_t i = 0; i < pg->n_bundles; i++)
        for (size_t k = 0; k < pg->bundles[i].n_resources; k++)
            if (!(pg->bundles[i].resources[k].amount >= 0))
                return mb_err_set(err, MB_EINVAL, "bundle %zu asks for a negative amount of %s", i,
                                  pg->bundles[i].resources[k].name);
    for (size_t i = 0; pg->name && *pg->name && i < p->n_groups; i++)
        if (p->groups[i]->state != REMOVED && same_name(p->groups[i]->pub.name, pg->name))
            return mb_err_set(err, MB_EEXIST,
                              "Failed to create placement group '%s' because name '%s' already "
                              "exists.",
                              pg->name, pg->name);
    return 0;
}

static int goes_before(const struct group *a, const struct group *b)
{
    if (a->priority != b->priority)
        return a->priority > b->priority;
    return a->pub.created_unix_ms < b->pub.created_unix_ms;
}

static int append_group(struct mb_placement *p, const struct mb_gcs_pg *pg, struct group **out,
                        struct mb_err *err)
{
    struct group **groups = mb_reallocarray(p->groups, p->n_groups + 1, sizeof *groups);

    if (groups)
        p->groups = groups;
    *out = groups ? copy_group(pg) : NULL;
    if (!*out)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    /* Its place in the queue: behind its equals. */
    size_t at = p->n_groups++;
    while (at > 0 && goes_before(*out, p->groups[at - 1])) {
        p->groups[at] = p->groups[at - 1];
        at--;
    }
    p->groups[at] = *out;
    (*out)->seq = ++p->next_seq;
    return 0;
}

int mb_placement_add(struct mb_placement *p, const struct mb_gcs_pg *pg, struct mb_err *err)
{
    struct group *g;
    int rc;

    if (place_find_group(p, pg->id))
        return 0;
    rc = check_new(p, pg, err);
    if (rc == 0)
        rc = append_group(p, pg, &g, err);
    if (rc == 0) {
        g->state = PENDING;
        g->pub.state = MB_PG_PENDING;
        g->changed = 1;
    }
    return rc;
}

int mb_placement_restore(struct mb_placement *p, const struct mb_gcs_pg *pg, struct mb_err *err)
{
    struct group *g;
    int rc, missing = 0;

    if (pg->n_bundles == 0)
        return mb_err_set(err, MB_EINVAL, "a stored placement group has no bundles");
    rc = append_group(p, pg, &g, err);
    if (rc != 0)
        return rc;
    int keeps = pg->state == MB_PG_CREATED || pg->state == MB_PG_RESCHEDULING;
    for (size_t i = 0; i < pg->n_bundles; i++) {
        size_t node = keeps && pg->bundles[i].has_node ? place_find_node(p, pg->bundles[i].node_id)
                                                       : PLACE_NOWHERE;
        if (node == PLACE_NOWHERE || !p->nodes[node]->up) {
            missing = 1;
            continue;
        }
        g->b[i].phase = COMMITTED;
        g->b[i].node = node;
        g->bundles[i].has_node = 1;
        memcpy(g->bundles[i].node_id, p->nodes[node]->id, MB_NODE_ID_BYTES);
        place_book(p->nodes[node], g->b[i].pub, +1);
    }
    g->state = pg->state == MB_PG_REMOVED ? REMOVED
               : !keeps                   ? PENDING
               : missing                  ? RESCHEDULING
                                          : CREATED;
    g->is_expected = g->state == PENDING;
    g->wait = place_wait_of(g->state);
    g->pub.state = place_outside_of(g->state);
    g->changed = g->pub.state != pg->state;
    return 0;
}

int mb_placement_remove(struct mb_placement *p, const uint8_t pg_id[MB_PG_ID_BYTES])
{
    struct group *g = place_find_group(p, pg_id);

    if (!g)
        return MB_ENOENT;
    place_roll_back(p, g, 1);
    place_transition(g, REMOVE);
    return 0;
}

void mb_placement_attend(struct mb_placement *p, const uint8_t pg_id[MB_PG_ID_BYTES],
                         int is_attended, uint64_t now_ms)
{
    struct group *g = place_find_group(p, pg_id);

    if (!g || strncmp(g->pub.name, gang_prefix, sizeof gang_prefix - 1) != 0)
        return;
    if (is_attended) {
        g->is_expected = 0;
        g->orphan_ms = 0;
    } else if (g->orphan_ms == 0) {
        g->orphan_ms = now_ms ? now_ms : 1;
    }
}

static int is_quiet(const struct group *g)
{
    for (size_t i = 0; i < g->pub.n_bundles; i++)
        for (size_t k = 0; k < MB_PLACE_RETURNS; k++)
            if (g->b[i].back[k].phase != NO_RETURN)
                return 0;
    return !g->changed;
}

int mb_placement_forget(struct mb_placement *p, const uint8_t pg_id[MB_PG_ID_BYTES])
{
    for (size_t i = 0; i < p->n_groups; i++) {
        struct group *g = p->groups[i];
        if (memcmp(g->pub.id, pg_id, MB_PG_ID_BYTES) != 0)
            continue;
        if (g->state != REMOVED || !is_quiet(g))
            return 0;
        place_free_group(g);
        memmove(p->groups + i, p->groups + i + 1, (p->n_groups - i - 1) * sizeof *p->groups);
        p->n_groups--;
        return 1;
    }
    return 0;
}

static unsigned waiting_before(const struct mb_placement *p, const struct group *g)
{
    unsigned n = 0;

    for (size_t i = 0; i < p->n_groups && p->groups[i] != g; i++)
        n += place_is_waiting(p->groups[i]) != 0;
    return n;
}

static const struct mb_gcs_pg *outside(const struct mb_placement *p, const struct group *g,
                                       struct mb_place_info *info)
{
    if (info)
        *info = (struct mb_place_info){.wait = g->wait,
                                       .attempts = g->attempts,
                                       .priority = g->priority,
                                       .is_waiting = place_is_waiting(g),
                                       .ahead = waiting_before(p, g),
                                       .overtaken = g->overtaken,
                                       .waiting_since_ms = g->waiting_since_ms};
    return &g->pub;
}

const struct mb_gcs_pg *mb_placement_get(const struct mb_placement *p,
                                         const uint8_t pg_id[MB_PG_ID_BYTES],
                                         struct mb_place_info *info)
{
    struct group *g = place_find_group(p, pg_id);

    return g ? outside(p, g, info) : NULL;
}

size_t mb_placement_count(const struct mb_placement *p)
{
    return p->n_groups;
}

const struct mb_gcs_pg *mb_placement_at(const struct mb_placement *p, size_t i,
                                        struct mb_place_info *info)
{
    return outside(p, p->groups[i], info);
}
