/*
 * How many nodes an attempt of a gang asks for when it may go on with fewer than it began with, as
 * torchrun's --nnodes MIN:MAX and Slurm's --nodes=MIN-MAX have it. Pure; time is an argument.
 *
 * The rule:
 *  - The first attempt asks for max_nodes and for nothing else.
 *  - A later one asks for max_nodes, too. Whatever is asked for is given wait_ms. Then the largest
 *    size from min_nodes to max_nodes is asked for that the nodes suffice for and that divides the
 *    global batch; there is none: max_nodes, and explain says what is waited for.
 *  - The size of an attempt that runs stays. A restart whose nodes are well keeps them, unless the
 *    nodes that are alive would do for a larger size.
 * The global batch divides at n nodes when their ranks make whole models of ranks_per_model ranks
 * each, and it is a multiple of micro_batch * those models: then the samples of every iteration are
 * the same, in the same order (Megatron's rule).
 */
#ifndef MOBULA_CLI_DRIVER_ELASTIC_H
#define MOBULA_CLI_DRIVER_ELASTIC_H

#include <stddef.h>
#include <stdint.h>

struct mb_elastic {
    uint32_t min_nodes; /* max_nodes: never fewer */
    uint32_t max_nodes;
    uint32_t ranks_per_node;
    uint64_t global_batch; /* 0: any number of ranks will do */
    uint64_t micro_batch;
    uint32_t ranks_per_model; /* ranks that share a model; 0: each has its own */
    uint64_t wait_ms;
    /* Of the present attempt. */
    uint32_t n_nodes;  /* asked for, or held */
    uint64_t asked_ms; /* since when */
    int may_shrink;
};

/* An attempt looks for nodes now. keeps: those of the attempt before. */
void mb_elastic_begin(struct mb_elastic *e, int is_first, int keeps, uint64_t now_ms);
/* It still looks, and n_nodes are there for it. is_guess: they are alive, but nobody says whether
 * they are free; then what was waited for in vain is taken for not there. Returns what to ask for:
 * another number than before means that the group has to be asked for anew. */
uint32_t mb_elastic_look(struct mb_elastic *e, uint32_t n_nodes, int is_guess, uint64_t now_ms);
/* 1: an attempt that failed on nodes that are well had better keep them; so many are alive. */
int mb_elastic_keeps(const struct mb_elastic *e, uint32_t n_alive);
int mb_elastic_divides(const struct mb_elastic *e, uint32_t n_nodes);
/* Why it waits although wait_ms are over, "" if that needs no words. Ends in ": ". */
void mb_elastic_explain(const struct mb_elastic *e, uint32_t n_nodes, uint64_t now_ms, char *out,
                        size_t size);

#endif
