/*
 * Placement under random nodes, deaths, refusals, lost answers and delays, in virtual time.
 * Each seed is one cluster's life; after it, the faults end, everything settles, and then every
 * node must hold exactly the bundles that groups believe to have there. MOBULA_SIM_SEED replays one
 * seed, MOBULA_SIM_SEEDS sets how many are run. Every second seed has strict order: then no group
 * may start while one that is before it in the queue, and that some node could hold, waits.
 * A second life, without faults and with gangs that end, proves that nobody starves: the first in
 * the queue, once its patience is over, starts as soon as what ran at that moment has ended.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "gcs/placement.h"

enum { MAX_NODES = 24, MAX_GROUPS = 40, MAX_BUNDLES = 5, MAX_MSGS = 512, FAULTS_MS = 40000 };

struct held {
    size_t group; /* index, MAX_GROUPS: free slot */
    size_t bundle;
    int committed;
};

struct sim_node {
    uint8_t id[MB_NODE_ID_BYTES];
    int alive;
    int told_dead;
    uint64_t dead_at_ms;
    double total;
    struct held held[MAX_GROUPS * MAX_BUNDLES];
};

struct msg {
    int used;
    int arrived;
    uint64_t at_ms; /* arrival at the node, then of the answer */
    size_t node, group;
    enum mb_place_kind kind;
    uint64_t ticket;
    size_t bundles[MAX_BUNDLES];
    size_t n_bundles;
    int answer_lost;
    enum mb_place_outcome outcome;
};

struct sim {
    uint64_t rng, seed, now_ms;
    struct mb_placement *p;
    struct sim_node nodes[MAX_NODES];
    size_t n_nodes;
    uint8_t groups[MAX_GROUPS][MB_PG_ID_BYTES];
    double demand[MAX_GROUPS][MAX_BUNDLES];
    int removed[MAX_GROUPS];
    size_t n_groups;
    struct msg msgs[MAX_MSGS];
    int faults;
    int strict;
    size_t created;
    size_t overtook;                 /* starts while an earlier group waited */
    uint64_t ends_at_ms[MAX_GROUPS]; /* of a gang that runs; 0: it does not */
    uint64_t first_since_ms[MAX_GROUPS];
    size_t waits; /* times that a group was first beyond its patience */
};

static uint64_t rnd(struct sim *s)
{
    s->rng += 0x9e3779b97f4a7c15u;
    uint64_t z = s->rng;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint64_t below(struct sim *s, uint64_t n)
{
    return rnd(s) % n;
}

static void fail_seed(const struct sim *s, const char *what)
{
    fail_msg("seed %llu at %llu ms: %s", (unsigned long long)s->seed, (unsigned long long)s->now_ms,
             what);
}

static void check(struct sim *s)
{
    struct mb_err err = {0};

    if (mb_placement_check(s->p, &err) != 0)
        fail_seed(s, err.text);
}

static void add_node(struct sim *s)
{
    struct mb_err err = {0};

    if (s->n_nodes == MAX_NODES)
        return;
    struct sim_node *n = &s->nodes[s->n_nodes];
    memset(n, 0, sizeof *n);
    n->id[0] = (uint8_t)(s->n_nodes + 1);
    n->alive = 1;
    n->total = (double)(1 + below(s, 8));
    for (size_t i = 0; i < sizeof n->held / sizeof n->held[0]; i++)
        n->held[i].group = MAX_GROUPS;
    s->n_nodes++;
    struct mb_gcs_resource total = {"mobula_gpu", n->total};
    assert_int_equal(mb_placement_node_up(s->p, n->id, &total, 1, &err), 0);
}

static void add_group(struct sim *s)
{
    struct mb_gcs_resource res[MAX_BUNDLES];
    struct mb_gcs_bundle bundles[MAX_BUNDLES] = {0};
    struct mb_gcs_pg pg = {.bundles = bundles};
    struct mb_err err = {0};

    if (s->n_groups == MAX_GROUPS)
        return;
    size_t g = s->n_groups++;
    pg.id[0] = (uint8_t)(g + 1);
    char name[40];
    snprintf(name, sizeof name, "mobula-%zu@priority=%d", g, (int)below(s, 3));
    pg.name = name;
    pg.strategy = (enum mb_pg_strategy)below(s, 4);
    pg.n_bundles = 1 + below(s, MAX_BUNDLES);
    for (size_t i = 0; i < pg.n_bundles; i++) {
        s->demand[g][i] = (double)(1 + below(s, 4));
        res[i] = (struct mb_gcs_resource){"mobula_gpu", s->demand[g][i]};
        bundles[i].resources = &res[i];
        bundles[i].n_resources = 1;
    }
    memcpy(s->groups[g], pg.id, MB_PG_ID_BYTES);
    assert_int_equal(mb_placement_add(s->p, &pg, &err), 0);
}

static void remove_group(struct sim *s)
{
    if (s->n_groups == 0)
        return;
    size_t g = below(s, s->n_groups);
    s->removed[g] = 1;
    assert_int_equal(mb_placement_remove(s->p, s->groups[g]), 0);
}

static void kill_node(struct sim *s)
{
    if (s->n_nodes == 0)
        return;
    struct sim_node *n = &s->nodes[below(s, s->n_nodes)];
    if (n->alive) {
        n->alive = 0;
        n->dead_at_ms = s->now_ms + below(s, 5000);
    }
}

/* ---- a node ---- */

static double in_use(const struct sim *s, const struct sim_node *n)
{
    double sum = 0;

    for (size_t i = 0; i < sizeof n->held / sizeof n->held[0]; i++)
        if (n->held[i].group != MAX_GROUPS)
            sum += s->demand[n->held[i].group][n->held[i].bundle];
    return sum;
}

static struct held *find_held(struct sim_node *n, size_t g, size_t b)
{
    for (size_t i = 0; i < sizeof n->held / sizeof n->held[0]; i++)
        if (n->held[i].group == g && (g == MAX_GROUPS || n->held[i].bundle == b))
            return &n->held[i];
    return NULL;
}

static enum mb_place_outcome serve(struct sim *s, struct msg *m)
{
    struct sim_node *n = &s->nodes[m->node];

    if (m->kind == MB_PLACE_PREPARE) {
        double want = 0;
        for (size_t i = 0; i < m->n_bundles; i++) {
            if (find_held(n, m->group, m->bundles[i]))
                fail_seed(s, "a node was asked twice to prepare one bundle");
            want += s->demand[m->group][m->bundles[i]];
        }
        if (in_use(s, n) + want > n->total + 1e-9)
            return MB_PLACE_REFUSED;
        if (s->faults && below(s, 10) == 0)
            return MB_PLACE_REFUSED;
        for (size_t i = 0; i < m->n_bundles; i++) {
            struct held *h = find_held(n, MAX_GROUPS, 0);
            h->group = m->group;
            h->bundle = m->bundles[i];
            h->committed = 0;
        }
        return MB_PLACE_OK;
    }
    for (size_t i = 0; i < m->n_bundles; i++) {
        struct held *h = find_held(n, m->group, m->bundles[i]);
        if (m->kind == MB_PLACE_COMMIT && !h)
            fail_seed(s, "commit of a bundle that was never prepared");
        if (m->kind == MB_PLACE_COMMIT)
            h->committed = 1;
        else if (h)
            h->group = MAX_GROUPS;
    }
    return MB_PLACE_OK;
}

/* ---- the network ---- */

static void send_action(struct sim *s, const struct mb_place_action *a)
{
    struct msg *m = NULL;

    for (size_t i = 0; i < MAX_MSGS && !m; i++)
        if (!s->msgs[i].used)
            m = &s->msgs[i];
    if (!m) {
        fail_seed(s, "more messages in flight than the simulation has room for");
        return;
    }
    memset(m, 0, sizeof *m);
    m->used = 1;
    m->kind = a->kind;
    m->ticket = a->ticket;
    m->n_bundles = a->n_bundles;
    memcpy(m->bundles, a->bundles, a->n_bundles * sizeof *a->bundles);
    m->node = (size_t)a->node_id[0] - 1;
    m->group = (size_t)a->pg_id[0] - 1;
    /* Calls may overtake each other, also on their way to one node. */
    m->at_ms = s->now_ms + 1 + below(s, s->faults && below(s, 5) == 0 ? 3000 : 20);
    m->answer_lost = s->faults && below(s, 12) == 0;
}

static void step_message(struct sim *s, struct msg *m)
{
    if (!m->arrived) {
        m->arrived = 1;
        if (!s->nodes[m->node].alive)
            m->outcome = MB_PLACE_FAILED;
        else
            m->outcome = serve(s, m);
        if (m->answer_lost)
            m->outcome = MB_PLACE_FAILED;
        m->at_ms = s->now_ms + 1 + below(s, 20);
        return;
    }
    m->used = 0;
    mb_placement_result(s->p, s->groups[m->group], m->ticket, m->outcome, s->now_ms);
    check(s);
}

/* A group of one bundle that waits before this one, and that a node that is there could hold. */
static int overtakes(struct sim *s, const uint8_t *pg_id)
{
    for (size_t i = 0; i < mb_placement_count(s->p); i++) {
        struct mb_place_info info;
        const struct mb_gcs_pg *pg = mb_placement_at(s->p, i, &info);
        if (memcmp(pg->id, pg_id, MB_PG_ID_BYTES) == 0)
            return 0;
        for (size_t k = 0; info.is_waiting && pg->n_bundles == 1 && k < s->n_nodes; k++)
            if (!s->nodes[k].told_dead && s->nodes[k].total >= s->demand[pg->id[0] - 1][0])
                return 1;
    }
    return 0;
}

static void pump(struct sim *s)
{
    struct mb_place_action a;

    for (int n = 0; mb_placement_next(s->p, s->now_ms, &a); n++) {
        check(s);
        int early = a.kind == MB_PLACE_PREPARE && overtakes(s, a.pg_id);
        s->overtook += early != 0;
        if (early && s->strict)
            fail_seed(s, "a group overtook another one in strict order");
        if (a.kind != MB_PLACE_CHANGED)
            send_action(s, &a);
        else if (mb_placement_get(s->p, a.pg_id, NULL)->state == MB_PG_CREATED)
            s->created++;
        if (n > 1000)
            fail_seed(s, "the engine never comes to rest");
    }
}

static void step(struct sim *s)
{
    s->now_ms++;
    for (size_t i = 0; i < MAX_MSGS; i++)
        if (s->msgs[i].used && s->msgs[i].at_ms <= s->now_ms)
            step_message(s, &s->msgs[i]);
    for (size_t i = 0; i < s->n_nodes; i++) {
        struct sim_node *n = &s->nodes[i];
        if (!n->alive && !n->told_dead && s->now_ms >= n->dead_at_ms) {
            n->told_dead = 1;
            mb_placement_node_dead(s->p, n->id);
            check(s);
        }
    }
    pump(s);
}

/* Jump to the next moment at which anything can happen. */
static void advance(struct sim *s, uint64_t until_ms)
{
    while (s->now_ms < until_ms) {
        uint64_t next = mb_placement_due_ms(s->p);
        for (size_t i = 0; i < MAX_MSGS; i++)
            if (s->msgs[i].used && s->msgs[i].at_ms < next)
                next = s->msgs[i].at_ms;
        for (size_t i = 0; i < s->n_nodes; i++)
            if (!s->nodes[i].alive && !s->nodes[i].told_dead && s->nodes[i].dead_at_ms < next)
                next = s->nodes[i].dead_at_ms;
        if (next > until_ms)
            next = until_ms;
        if (next > s->now_ms + 1)
            s->now_ms = next - 1;
        step(s);
    }
}

static void check_settled(struct sim *s)
{
    size_t expected = 0, found = 0;

    for (size_t g = 0; g < s->n_groups; g++) {
        const struct mb_gcs_pg *pg = mb_placement_get(s->p, s->groups[g], NULL);
        if (s->removed[g] != (pg->state == MB_PG_REMOVED))
            fail_seed(s, "a group is removed that was not, or the other way round");
        for (size_t b = 0; b < pg->n_bundles; b++) {
            if (!pg->bundles[b].has_node)
                continue;
            struct sim_node *n = &s->nodes[pg->bundles[b].node_id[0] - 1];
            struct held *h = find_held(n, g, b);
            if (!n->alive || !h || !h->committed)
                fail_seed(s, "a group believes in a bundle that its node does not have");
            expected++;
        }
        if (pg->state == MB_PG_PENDING && pg->bundles[0].has_node)
            fail_seed(s, "a pending group holds a bundle");
    }
    for (size_t i = 0; i < s->n_nodes; i++) {
        struct sim_node *n = &s->nodes[i];
        for (size_t k = 0; n->alive && k < sizeof n->held / sizeof n->held[0]; k++)
            found += n->held[k].group != MAX_GROUPS;
        if (n->alive && in_use(s, n) > n->total + 1e-9)
            fail_seed(s, "a node is overbooked");
    }
    if (found != expected)
        fail_seed(s, "a bundle leaked on a node");
}

static size_t run_seed(uint64_t seed, size_t *overtook)
{
    static struct sim s;

    memset(&s, 0, sizeof s);
    s.seed = s.rng = seed;
    s.p = mb_placement_create(seed);
    assert_non_null(s.p);
    s.faults = 1;
    s.strict = (int)(seed % 2);
    mb_placement_set_order(s.p, s.strict ? MB_PLACE_STRICT : MB_PLACE_BACKFILL, 3000);
    for (uint64_t n = 2 + below(&s, 4); n > 0; n--)
        add_node(&s);
    while (s.now_ms < FAULTS_MS) {
        switch (below(&s, 8)) {
        case 0:
        case 1:
        case 2:
            add_group(&s);
            break;
        case 3:
            remove_group(&s);
            break;
        case 4:
            kill_node(&s);
            break;
        case 5:
            add_node(&s);
            break;
        default:
            break;
        }
        check(&s);
        advance(&s, s.now_ms + 1 + below(&s, 2000));
    }
    s.faults = 0;
    advance(&s, s.now_ms + 60000);
    check_settled(&s);
    /* With everything removed, nothing may be left anywhere, and every group can be forgotten. */
    for (size_t g = 0; g < s.n_groups; g++) {
        s.removed[g] = 1;
        assert_int_equal(mb_placement_remove(s.p, s.groups[g]), 0);
    }
    advance(&s, s.now_ms + 10000);
    check_settled(&s);
    for (size_t g = 0; g < s.n_groups; g++)
        if (!mb_placement_forget(s.p, s.groups[g]))
            fail_seed(&s, "a removed group has bundles that never came back");
    assert_int_equal(mb_placement_count(s.p), 0);
    size_t created = s.created;
    *overtook += s.overtook;
    mb_placement_destroy(s.p);
    return created;
}

/* ---- nobody starves ---- */

enum { LIFE_MS = 2000, PATIENCE_MS = 3000, PROTOCOL_MS = 500, FAIR_NODES = 3, FAIR_MS = 60000 };

/* Gangs of equal bundles that the empty nodes can always hold. */
static void add_gang(struct sim *s)
{
    struct mb_gcs_resource res;
    struct mb_gcs_bundle bundles[FAIR_NODES];
    struct mb_gcs_pg pg = {.bundles = bundles, .strategy = MB_PG_STRICT_SPREAD};
    struct mb_err err = {0};
    size_t g = 0;

    while (g < s->n_groups && !s->removed[g])
        g++;
    if (g == MAX_GROUPS || (g == s->n_groups && s->n_groups >= MAX_GROUPS / 2))
        return;
    s->n_groups += g == s->n_groups;
    s->removed[g] = 0;
    s->ends_at_ms[g] = s->first_since_ms[g] = 0;
    pg.id[0] = (uint8_t)(g + 1);
    /* Many are small, so that there is always one that fits. */
    int is_large = below(s, 5) == 0;
    pg.n_bundles = is_large ? 1 + below(s, FAIR_NODES) : 1;
    res = (struct mb_gcs_resource){"mobula_gpu", is_large ? 4 : 1};
    for (size_t i = 0; i < pg.n_bundles; i++) {
        s->demand[g][i] = res.amount;
        bundles[i] = (struct mb_gcs_bundle){.resources = &res, .n_resources = 1};
    }
    memcpy(s->groups[g], pg.id, MB_PG_ID_BYTES);
    assert_int_equal(mb_placement_add(s->p, &pg, &err), 0);
}

static void end_gangs(struct sim *s)
{
    for (size_t g = 0; g < s->n_groups; g++) {
        const struct mb_gcs_pg *pg = mb_placement_get(s->p, s->groups[g], NULL);
        if (s->removed[g] || !pg)
            continue;
        if (pg->state == MB_PG_REMOVED)
            s->removed[g] = mb_placement_forget(s->p, s->groups[g]);
        else if (pg->state == MB_PG_CREATED && s->ends_at_ms[g] == 0)
            s->ends_at_ms[g] = s->now_ms + 1 + below(s, LIFE_MS);
        else if (s->ends_at_ms[g] != 0 && s->now_ms >= s->ends_at_ms[g])
            assert_int_equal(mb_placement_remove(s->p, s->groups[g]), 0);
    }
}

static void check_first(struct sim *s)
{
    for (size_t i = 0; i < mb_placement_count(s->p); i++) {
        struct mb_place_info info;
        size_t g = (size_t)mb_placement_at(s->p, i, &info)->id[0] - 1;
        if (!info.is_waiting)
            continue;
        if (info.waiting_since_ms == 0 || s->now_ms < info.waiting_since_ms + PATIENCE_MS)
            return;
        s->waits += s->first_since_ms[g] == 0;
        if (s->first_since_ms[g] == 0)
            s->first_since_ms[g] = s->now_ms;
        if (s->now_ms > s->first_since_ms[g] + LIFE_MS + PROTOCOL_MS)
            fail_seed(s, "the first in the queue starves");
        return; /* the others have their turn when they are first */
    }
}

static size_t run_fair(uint64_t seed)
{
    static struct sim s;

    memset(&s, 0, sizeof s);
    s.seed = s.rng = seed;
    s.p = mb_placement_create(seed);
    assert_non_null(s.p);
    mb_placement_set_order(s.p, MB_PLACE_BACKFILL, PATIENCE_MS);
    for (int n = 0; n < FAIR_NODES; n++) {
        add_node(&s);
        struct mb_gcs_resource total = {"mobula_gpu", s.nodes[n].total = 4 + (double)below(&s, 5)};
        assert_int_equal(mb_placement_node_up(s.p, s.nodes[n].id, &total, 1, NULL), 0);
    }
    while (s.now_ms < FAIR_MS) {
        add_gang(&s);
        advance(&s, s.now_ms + 1 + below(&s, 60));
        end_gangs(&s);
        check_first(&s);
    }
    size_t waits = s.waits;
    mb_placement_destroy(s.p);
    return waits;
}

static void nobody_starves(void **state)
{
    size_t waits = 0;
    uint64_t n = getenv("MOBULA_SIM_SEED") ? 0 : 60;

    (void)state;
    for (uint64_t seed = 1; seed <= n; seed++)
        waits += run_fair(seed);
    assert_true(waits >= n); /* or the seeds are too easy */
    print_message("%llu seeds, %zu times a group was first beyond its patience\n",
                  (unsigned long long)n, waits);
}

static void placement_survives_everything(void **state)
{
    const char *one = getenv("MOBULA_SIM_SEED"), *many = getenv("MOBULA_SIM_SEEDS");
    size_t created = 0, overtook = 0;

    (void)state;
    if (one) {
        run_seed(strtoull(one, NULL, 10), &overtook);
        return;
    }
    uint64_t n = many ? strtoull(many, NULL, 10) : 2000;
    for (uint64_t seed = 1; seed <= n; seed++)
        created += run_seed(seed, &overtook);
    assert_true(overtook > n / 10); /* or strict order had nothing to prevent */
    assert_true(created > n);       /* the faults must not be so many that nothing ever succeeds */
    print_message("%llu seeds, %zu times a group became CREATED, %zu overtook\n",
                  (unsigned long long)n, created, overtook);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(placement_survives_everything),
                                       cmocka_unit_test(nobody_starves)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
