/*
 * What a rank will take of memory, from shapes alone, before anything is taken: weights, gradients,
 * the optimizer's states, activations, scratch, buffers between ranks, indices of the data, copies
 * for checkpoints. And what of the arguments could be changed so that it fits.
 *
 * The model's part comes from the code that lays it out (mb_gpt_measure), so it is exact; the rest
 * is counted here, the data's from the sizes of its files. Left out is what the process has already
 * (program, libraries, a GPU's context), which is no longer available to anybody, and what GPU
 * libraries take when they first run (cuDNN, NCCL as far as it connects late), for which an
 * estimate stands. docs/training.md states how far the truth may be from it.
 *
 * A GPU's memory is its rank's; a host's is that of all ranks of the node, on the CPU backend for
 * everything. Pure but for the sizes of data files; any thread. Errors: MB_EINVAL for a layout that
 * the model cannot have, MB_ENOMEM for the tables of the calculation itself.
 */
#ifndef MOBULA_WORKER_MEMORY_PLAN_H
#define MOBULA_WORKER_MEMORY_PLAN_H

#include "base/buf.h"
#include "worker/args.h"
#include "worker/model/gpt.h"

enum { MB_PLAN_ROWS_MAX = MB_GPT_PLAN_MAX + 12 };

struct mb_plan_row {
    const char *name;
    double bytes;
};

struct mb_plan {
    struct mb_plan_row rows[MB_PLAN_ROWS_MAX];
    size_t n_rows, n_device_rows; /* the device's come first */
    double device_bytes, host_bytes;
    double device_estimate_bytes, host_estimate_bytes; /* of these, what may turn out to be less */
};

/* Who takes part; validated arguments say how they share the model. */
struct mb_plan_gang {
    struct mb_device *dev; /* borrowed; its sizes are asked for, nothing is taken */
    uint64_t vocab_size;   /* unpadded */
    uint32_t world_size;
    uint32_t first_local, n_local; /* ranks of one node */
};

/* What there is. */
struct mb_plan_room {
    double device_bytes; /* of a GPU; on the CPU backend 0 */
    double host_bytes;   /* of the node */
};

/* The model's configuration of a rank, groups left out. */
void mb_plan_config(const struct mb_args *a, uint64_t vocab_size, uint32_t world_size,
                    uint32_t rank, struct mb_gpt_config *c);

/* Of one rank. */
int mb_plan_rank(const struct mb_plan_gang *g, const struct mb_args *a, uint32_t rank,
                 struct mb_plan *out, struct mb_err *err);
/* As a table, a line a part with its bytes; total: the device's on the CPU with the host's. */
int mb_plan_print(const struct mb_plan_gang *g, const struct mb_plan *plan, struct mb_buf *out);

/* Of a node: bytes that its fullest GPU needs, and that the host needs. certain: the same without
 * estimates, what a run that works cannot do without; NULL is legal. */
int mb_plan_need(const struct mb_plan_gang *g, const struct mb_args *a, struct mb_plan_room *out,
                 struct mb_plan_room *certain, struct mb_err *err);
int mb_plan_fits(const struct mb_plan_room *need, const struct mb_plan_room *room);

/* For arguments that do not fit: the nearest that would, as words of the command line with what
 * they need, the least change first; or that none of those that were tried fits, with the least. */
int mb_plan_advise(const struct mb_plan_gang *g, const struct mb_args *a,
                   const struct mb_plan_room *room, struct mb_buf *out);

#endif
