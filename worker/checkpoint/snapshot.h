/*
 * What a rank saves, as a copy in host memory: of a model it has all of, the weights (rank 0) and
 * the rank's range of the optimizer; of one that ranks share, the rank's share first, which the
 * ranks then exchange for the same. Used by asynchronous saves, and by all saves of a shared model.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_SNAPSHOT_H
#define MOBULA_WORKER_CHECKPOINT_SNAPSHOT_H

#include "worker/checkpoint/checkpoint.h"

struct mb_snapshot {
    struct mb_checkpoint_model model;      /* to be saved, when it is whole; in host memory */
    float *window;                         /* NULL: the rank has all of the model */
    float *weights, *exp_avg, *exp_avg_sq; /* of a shared model, the rank's share */
};

/* Floats of memory that it needs. comm: of all ranks that save. */
size_t mb_snapshot_floats(const struct mb_checkpoint_model *m, struct mb_comm *comm);
void mb_snapshot_lay_out(struct mb_snapshot *s, const struct mb_checkpoint_model *m,
                         struct mb_comm *comm, float *memory);
/* From the device; waits. from: the model of lay_out. */
int mb_snapshot_copy(struct mb_snapshot *s, const struct mb_checkpoint_model *from,
                     struct mb_device *dev, struct mb_err *err);
/* Makes it whole. Collective. */
int mb_snapshot_join(struct mb_snapshot *s, const struct mb_checkpoint_model *from,
                     struct mb_err *err);

#endif
