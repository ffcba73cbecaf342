/*
 * Checkpoints as mobula writes them, below a directory DIR:
 *
 *   DIR/iter_0000010/model_tp00_pp00.safetensors     weights by name, written by rank 0
 *   DIR/iter_0000010/optim_dp_000_of_002.safetensors one per rank: exp_avg and exp_avg_sq of its
 *                                                    range [begin, end) of the flat buffer; of SGD
 *                                                    momentum_buffer
 *   DIR/iter_0000010/state.json                      counters, layout, arguments
 *   DIR/latest_checkpointed_iteration.txt            digits of the newest iteration, last of all
 *
 * What is on disk are whole tensors, and ranges of the flat buffer of a rank with all of them, also
 * where ranks share a model (tensor and pipeline parallelism): they exchange their parts through
 * host memory when they save and load (exchange.h). So any layout goes on from any other's
 * checkpoint, and nothing that reads one has to know by which it was written.
 *
 * The weights are fp32, so the optimizer has no master copy of its own to save. A run with any
 * number of ranks reads the ranges that it needs from whichever files hold them. Rank 0 alone reads
 * state and weights and hands them on; every other rank needs in its own DIR only the shards it
 * reads. So ranks may share DIR or have one each.
 *
 * DIR may also be Megatron-LM's (--ckpt-format torch or torch_dist): it is loaded, whatever tensor
 * and pipeline parallel sizes wrote it, by any layout; of its optimizer those forms that
 * megatron/shards.h names. A model with torch is saved so: rank 0 writes all files (torch_save.h).
 *
 * All functions are collective: every rank calls them; if one fails, all fail, and the one at fault
 * has the text. A save is written into a hidden temporary directory, fsynced and renamed when every
 * rank has finished; a kill at any moment leaves the tracker at a whole checkpoint. Blocking; the
 * thread that owns the device and the communicator.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_CHECKPOINT_H
#define MOBULA_WORKER_CHECKPOINT_CHECKPOINT_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/kernels/backend.h"
#include "worker/kernels/master.h"
#include "worker/parallel/comm.h"

#define MB_CHECKPOINT_TRACKER "latest_checkpointed_iteration.txt"

enum {
    MB_CHECKPOINT_VERSION = 1,
    MB_CHECKPOINT_RELEASE = -1 /* what a tracker means by "release": weights, of no iteration */
};

struct mb_checkpoint_tensor {
    const char *name;
    int n_dims;
    size_t shape[2];
    size_t offset, n; /* elements of the flat buffer */
};

/* A rank's part of a tensor: element e of it is element start + e / run * stride + e % run of the
 * whole, and element offset + e of the rank's flat buffer. n 0: it has nothing of it. */
struct mb_checkpoint_part {
    size_t offset, n, start, run, stride;
    int is_another_s; /* has the same and tells it; this one only takes it */
};

/* Of a rank that shares its model with others. */
struct mb_checkpoint_layout {
    const struct mb_checkpoint_part *parts; /* [n_tensors] */
    size_t n_elements;                      /* of the rank's flat buffer */
    size_t begin,
        end; /* of it the share that no rank with the same parts has; all of them have all */
};

/* A save makes Megatron-LM's files (--ckpt-format torch) of it, of the run's own layout. The
 * optimizer is Adam's. */
struct mb_checkpoint_torch {
    uint64_t tp, pp, n_chunks; /* ranks of a tensor group, stages, chunks of layers a stage has */
    enum mb_st_dtype dtype;    /* of the weights; of halves, the optimizer has the fp32 ones */
    int is_local;              /* names of --transformer-impl local, not of Transformer Engine */
};

/* What lives on the device. Everything is borrowed. */
struct mb_checkpoint_progress; /* watch.h */

struct mb_checkpoint_model {
    struct mb_device *dev; /* NULL: the pointers below are host memory; saving only */
    struct mb_comm *comm;
    const struct mb_checkpoint_tensor *tensors;
    size_t n_tensors;
    struct mb_master weights; /* [n_elements], device */
    size_t n_elements;
    float *exp_avg, *exp_avg_sq; /* [state_end - state_begin], device; NULL: no optimizer. SGD has
                                    momentum_buffer in the first's place, and no second */
    size_t state_begin, state_end;
    /* NULL: the rank has all of the model. Else weights and the optimizer's range are of the
     * layout's flat buffer; tensors and n_elements are those of the whole model in either case. */
    const struct mb_checkpoint_layout *layout;
    const struct mb_checkpoint_torch *torch; /* NULL: files of ours */
    /* With dev NULL: a save in which nothing of any rank is written for stall_ms fails (watch.h).
     * 0: it waits. */
    uint64_t stall_ms;
    struct mb_checkpoint_progress *progress;
};

struct mb_checkpoint_state {
    int64_t iteration;
    int64_t consumed_train_samples;
    int64_t consumed_valid_samples;
    int64_t optimizer_steps;
    int64_t skipped_iterations;
    /* The learning rate's schedule, in samples: how far it has come, and what it was. */
    int64_t schedule_samples, warmup_samples, decay_samples;
    int has_optimizer;
    int has_sum;                     /* read only: state.json was compared with its checksum */
    int is_megatrons;                /* files of Megatron-LM's: rank 0 alone reads them */
    struct mb_err optimizer_refused; /* there is one, and this is why it is not read. Code 0: no */
    /* Of fp16 with a dynamic loss scale, else has_grad_scaler is 0: worker/model/loss_scale.h. */
    int has_grad_scaler;
    double loss_scale;
    int64_t growth_tracker, hysteresis_tracker;
    int64_t data_parallel_size; /* of the run that saved: so many shards. Read only; 0: unknown */
    char *args_json;            /* one JSON object of the run's arguments by name; owned */
};

void mb_checkpoint_state_close(struct mb_checkpoint_state *s);

struct mb_checkpoint_file {
    char *path; /* relative to dir */
    uint64_t size_bytes;
    uint64_t crc64nvme;
};

/* What this rank wrote. */
struct mb_checkpoint_saved {
    char *dir;                        /* DIR/iter_NNNNNNN */
    struct mb_checkpoint_file *files; /* [n_files], owned */
    size_t n_files;
    int hangs;    /* it failed, and a thread still uses model, state and dir: never free them */
    int is_owner; /* of the ranks that share DIR, this one put the checkpoint in its place */
};

void mb_checkpoint_saved_close(struct mb_checkpoint_saved *s);

int mb_checkpoint_save(const struct mb_checkpoint_model *m, const char *dir,
                       const struct mb_checkpoint_state *s, struct mb_checkpoint_saved *out,
                       struct mb_err *err);

/* How a save went, over all ranks. */
struct mb_checkpoint_times {
    uint64_t stall_us;     /* the longest that a rank's training stood still for it */
    uint64_t write_us;     /* until it was whole on disk, the slowest rank's */
    uint64_t own_stall_us; /* this rank's */
    uint64_t total_bytes;  /* files of all ranks */
};

/* Ranks tell each other; t comes with this rank's own_stall_us and write_us. */
int mb_checkpoint_share_times(struct mb_comm *comm, const struct mb_checkpoint_saved *saved,
                              struct mb_checkpoint_times *t, struct mb_err *err);

/* The tracker's iteration on every rank: > 0, MB_CHECKPOINT_RELEASE, or 0 when rank 0's DIR has no
 * tracker. */
int mb_checkpoint_find(struct mb_comm *comm, const char *dir, int64_t *iteration,
                       struct mb_err *err);
int mb_checkpoint_load_state(struct mb_comm *comm, const char *dir, int64_t iteration,
                             struct mb_checkpoint_state *out, struct mb_err *err);
/* Weights; and exp_avg, exp_avg_sq of [state_begin, state_end) unless m has none. s: what
 * load_state gave; optimizer files of a run of another size than it says are passed over. */
int mb_checkpoint_load(const struct mb_checkpoint_model *m, const char *dir,
                       const struct mb_checkpoint_state *s, struct mb_err *err);

#endif
