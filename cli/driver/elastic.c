/*
 *  1. begin: all nodes, or those that the attempt before leaves. The clock of the wait starts.
 *  2. look, wait_ms later: the largest size that is there. Another size than before: its clock
 *     starts, so that a gang does not lose its place in the queue again and again.
 *  3. Nothing fits: all nodes, for as long as the driver's own deadline allows.
 */
#include "cli/driver/elastic.h"

#include <stdio.h>

int mb_elastic_divides(const struct mb_elastic *e, uint32_t n_nodes)
{
    const uint64_t ranks = (uint64_t)n_nodes * e->ranks_per_node;
    const uint64_t to_a_model = e->ranks_per_model > 0 ? e->ranks_per_model : 1;

    if (e->global_batch == 0 || e->micro_batch == 0 || ranks == 0)
        return 1;
    /* One factor after the other: their product may be more than 64 bits hold. */
    return ranks % to_a_model == 0 && e->global_batch % e->micro_batch == 0 &&
           e->global_batch / e->micro_batch % (ranks / to_a_model) == 0;
}

/* 0: none. */
static uint32_t largest(const struct mb_elastic *e, uint32_t bound)
{
    uint32_t n = bound < e->max_nodes ? bound : e->max_nodes;

    while (n >= e->min_nodes && n > 0 && !mb_elastic_divides(e, n))
        n--;
    return n >= e->min_nodes ? n : 0;
}

void mb_elastic_begin(struct mb_elastic *e, int is_first, int keeps, uint64_t now_ms)
{
    if (!keeps)
        e->n_nodes = e->max_nodes;
    e->asked_ms = now_ms;
    e->may_shrink = !is_first && e->min_nodes < e->max_nodes;
}

static int still_waits(const struct mb_elastic *e, uint64_t now_ms)
{
    return !e->may_shrink || now_ms < e->asked_ms + e->wait_ms;
}

uint32_t mb_elastic_look(struct mb_elastic *e, uint32_t n_nodes, int is_guess, uint64_t now_ms)
{
    uint32_t size;

    if (still_waits(e, now_ms))
        return e->n_nodes;
    size = largest(e, is_guess && n_nodes >= e->n_nodes ? e->n_nodes - 1 : n_nodes);
    if (size == 0 && is_guess) /* every size was waited for: from the largest again */
        size = largest(e, n_nodes);
    if (size == 0)
        size = e->max_nodes;
    if (size != e->n_nodes) {
        e->n_nodes = size;
        e->asked_ms = now_ms;
    }
    return e->n_nodes;
}

int mb_elastic_keeps(const struct mb_elastic *e, uint32_t n_alive)
{
    return largest(e, n_alive) <= e->n_nodes;
}

void mb_elastic_explain(const struct mb_elastic *e, uint32_t n_nodes, uint64_t now_ms, char *out,
                        size_t size)
{
    char shared[32] = "";

    out[0] = '\0';
    if (still_waits(e, now_ms) || e->n_nodes < e->max_nodes || largest(e, n_nodes) > 0)
        return;
    if (n_nodes < e->min_nodes) {
        snprintf(out, size, "%u of at least %u nodes (--min-nodes) are there: ", n_nodes,
                 e->min_nodes);
    } else {
        if (e->ranks_per_model > 1)
            snprintf(shared, sizeof(shared), ", %u to a model,", e->ranks_per_model);
        snprintf(out, size,
                 "%u nodes are there, but neither %llu ranks nor fewer on at least %u nodes%s "
                 "divide --global-batch-size %llu by --micro-batch-size %llu: ",
                 n_nodes, (unsigned long long)n_nodes * e->ranks_per_node, e->min_nodes, shared,
                 (unsigned long long)e->global_batch, (unsigned long long)e->micro_batch);
    }
}
