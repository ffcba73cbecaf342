/*
 * One rank's training: everything it holds, and the steps it takes. main.c makes one, setup.c fills
 * it, trainer_data.c its data, train.c runs it, trainer_pipeline.c passes micro batches through the
 * model, trainer_gradients.c sums gradients, trainer_plan.c plans its memory, trainer_schedule.c
 * has the learning rate's schedule, trainer_checkpoint.c saves and loads it, trainer_log.c,
 * trainer_timers.c and trainer_memory.c print it, trainer_tensorboard.c tells TensorBoard.
 *
 * Ranks stay in step: what one decides alone (a signal, a wish of its agent, the clock) takes
 * effect only after a collective has told all. Every function that says "collective" is called by
 * all ranks. One thread, and that of asynchronous saves (saver.h); signal handlers only set flags.
 */
#ifndef MOBULA_WORKER_TRAINER_H
#define MOBULA_WORKER_TRAINER_H

#include <jansson.h>
#include <signal.h>
#include "worker/args.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/checkpoint/saver.h"
#include "worker/data/loader.h"
#include "worker/data/tokenizer/tokenizer.h"
#include "worker/kernels/backend.h"
#include "worker/model/gpt.h"
#include "worker/model/loss_scale.h"
#include "worker/model/optimizer.h"
#include "worker/model/schedule.h"
#include "worker/parallel/buckets.h"
#include "worker/parallel/comm.h"
#include "worker/parallel/pipeline.h"
#include "worker/report_client.h"

/* What --timing-log-level 1 tells of a step. */
enum mb_step_timer {
    MB_TIMER_FORWARD_BACKWARD,
    MB_TIMER_GRADS_SYNC,
    MB_TIMER_OPTIMIZER, /* with the all-gather of weights */
    MB_N_STEP_TIMERS
};

/* What is summed between two log lines. */
struct mb_log_window {
    double loss_sum;      /* of the iterations' losses */
    int64_t n_iterations; /* that changed the weights */
    int64_t n_skipped, n_nan, n_ran;
    uint64_t elapsed_us; /* without checkpoints and evaluations */
    uint64_t timers_us[MB_N_STEP_TIMERS];
};

/* What a stage of a pipeline has with its neighbours; with chunks, on the CPU, stages are a ring.
 */
enum mb_link_kind {
    MB_LINK_OUTPUT,       /* to the next stage */
    MB_LINK_INPUT,        /* from the one before */
    MB_LINK_GRADIENT_IN,  /* from the next stage */
    MB_LINK_GRADIENT_OUT, /* to the one before */
    MB_N_LINKS
};

struct mb_link {
    struct mb_comm *comm; /* NULL: there is no such neighbour */
    uint32_t peer;        /* its rank there */
};

struct mb_trainer {
    struct mb_args args;
    uint32_t rank, world_size;
    struct mb_report_client *report; /* NULL: nobody to report to */
    struct mb_comm *comm;            /* of all ranks */
    /* Of the ranks that share this one's layers, of those that share its samples, of the stages of
     * its model, and of those with the same part of a model: whoever has other samples, or other
     * rows of the same. Where there is one rank the first three are NULL; dp_comm is comm itself
     * where every rank has all of the model. */
    struct mb_comm *tp_comm, *cp_comm, *pp_comm, *dp_comm;
    struct mb_comm *tied_comm;        /* of a pipeline's first and last stage, which both have the
                                         embedding's weights; NULL: this rank has no such peer */
    struct mb_link links[MB_N_LINKS]; /* in host memory each is pp_comm */
    struct mb_comm *ring; /* between GPUs, with several chunks: each link is this; else NULL */
    /* tp neighbours, then cp, then those with other samples; dp counts the last two together. */
    uint32_t tp_rank, tp_size, cp_rank, cp_size, dp_rank, dp_size, pp_rank, pp_size;
    uint32_t data_rank;        /* which of the data parallel samples are this rank's */
    struct mb_comm *save_comm; /* with --async-save: of the saver's threads */
    struct mb_saver *saver;    /* NULL: saves are synchronous */
    struct mb_device dev;
    struct mb_gpt *gpt;
    struct mb_optimizer *optimizer;
    uint16_t *grads_bf16; /* device, [n_elements]: where --grad-reduce-in-bf16 has the gradients
                             summed; NULL: they are where they lie */
    struct mb_schedule schedule;
    struct mb_loss_scale_config loss_scaling;
    struct mb_loss_scale loss_scale; /* 1 without --fp16 */
    struct mb_loader *loaders[MB_N_SPLITS];
    struct mb_checkpoint_tensor *tensors; /* of the whole model, for checkpoints */
    struct mb_checkpoint_part *parts;     /* what this rank has of them; NULL: all */
    struct mb_checkpoint_layout layout;
    struct mb_checkpoint_torch torch; /* with --ckpt-format torch */ /* with parts */
    struct mb_param *whole_params; /* what tensors' names are in */
    size_t n_tensors, n_whole_elements;
    size_t n_elements;
    size_t begin,
        end; /* this rank's range of the flat buffers, for norms and the sharded optimizer */
    double *norm_device; /* one double of device memory, for sums */
    int32_t *tokens, *labels;
    int32_t *position_ids; /* with --reset-position-ids; else NULL */
    float *loss_mask;
    struct mb_buckets buckets; /* with --overlap-grad-reduce */
    struct mb_pipeline pipeline;
    struct mb_batch_ramp ramp;
    int64_t batch; /* samples of the newest iteration */
    uint64_t vocab_size;
    int32_t eod;

    int64_t iteration, skipped_iterations, schedule_samples, last_saved;
    double grad_norm;         /* NaN: of a step that fp16's overflow has left out */
    double num_zeros_in_grad; /* of the whole model's gradient, if asked for; NaN as above */
    double params_norm;       /* of the newest iteration that tells it */
    double validation_loss;
    double last_loss;         /* of the newest iteration */
    uint64_t last_elapsed_us; /* of its step */
    uint64_t started_us;
    struct mb_log_window window;
    int has_told_memory, has_told_graphs;
    struct mb_tensorboard *tensorboard; /* NULL: this rank tells nothing */
    int hangs; /* a thread that may never end uses data and arguments: nothing is freed any more */
    int everybody_knows; /* the failure is found by all ranks alike: rank 0 prints it */
};

/* Set by the signal handler. */
extern volatile sig_atomic_t mb_trainer_signal;

/* Meets the other ranks, once; what is needed of the arguments are the timeout and --async-save.
 * Collective. */
int mb_trainer_meet(struct mb_trainer *t, struct mb_err *err);
/* For --use-checkpoint-args, before the arguments are validated: meets the other ranks and takes
 * the model's arguments from the checkpoint that will be loaded, if there is one. Collective. */
int mb_trainer_adopt(struct mb_trainer *t, struct mb_err *err);
/* Meets the other ranks and builds model, data and optimizer; loads a checkpoint. Collective. */
int mb_trainer_create(struct mb_trainer *t, struct mb_err *err);
/* Trains until the end or until it is asked to stop; evaluates, saves. Collective. */
int mb_trainer_run(struct mb_trainer *t, struct mb_err *err);
void mb_trainer_close(struct mb_trainer *t);
/* That one operation between ranks may take. */
uint64_t mb_trainer_timeout_ms(const struct mb_trainer *t);
/* Borrowed from the arguments. */
struct mb_tokenizer_options mb_trainer_tokenizer_options(const struct mb_args *a);

/* ---- the data ---- */
/* Where the run goes on from a checkpoint: the sizes of weighted blends, and what is to be said. */
int mb_trainer_settle_blend(struct mb_trainer *t, const struct mb_checkpoint_state *s,
                            struct mb_err *err);
/* Loaders of all splits, and room for a micro batch. Collective. */
int mb_trainer_build_data(struct mb_trainer *t, struct mb_err *err);

/* ---- the model ---- */
/* Prints what will be taken of memory, and refuses what there is not. Collective. */
int mb_trainer_plan(struct mb_trainer *t, struct mb_err *err);
/* All micro batches of a global batch, forward, and backward if it trains; the loss is the model's.
 * Collective. */
int mb_trainer_pass_batch(struct mb_trainer *t, enum mb_split split, int64_t n_micro, int trains,
                          struct mb_err *err);

/* Before an iteration and, before it is saved, after it: where --profile says that a profiler
 * records. */
int mb_trainer_start_profile(struct mb_trainer *t, struct mb_err *err);
int mb_trainer_stop_profile(struct mb_trainer *t, struct mb_err *err);

/* ---- between stages ---- */
/* Collective; nothing with one stage. */
int mb_trainer_make_links(struct mb_trainer *t, struct mb_err *err);
void mb_trainer_close_links(struct mb_trainer *t);
/* Whether they go from GPU to GPU. */
int mb_trainer_links_devices(const struct mb_trainer *t);
/* Until everything that was begun on the link is done, or has failed; in host memory on all links.
 */
int mb_trainer_wait_link(struct mb_trainer *t, enum mb_link_kind kind, struct mb_err *err);
/* Until everything is sent and received, or has failed. */
int mb_trainer_wait_links(struct mb_trainer *t, struct mb_err *err);

/* ---- the schedule ---- */
int mb_trainer_build_schedule(struct mb_trainer *t, struct mb_err *err);
/* With the checkpoint's: args, its arguments. */
int mb_trainer_settle_schedule(struct mb_trainer *t, const struct mb_checkpoint_state *s,
                               const json_t *args, struct mb_err *err);

/* ---- gradients ---- */
/* Of a chunk's last micro batch's step: gradients are reduced while it runs, if that was asked for.
 * is_first: of the chunk with which a global batch's last passes begin. */
void mb_trainer_overlap(struct mb_trainer *t, struct mb_gpt_step *step, int is_first);
/* The sum over the ranks with the same part of the model; each its own range at least. *norm2 is of
 * that range, without what another rank counts. Collective. */
int mb_trainer_reduce_gradients(struct mb_trainer *t, double *norm2, struct mb_err *err);
/* How many elements of this rank's range are 0, of what the norm counts. Device. */
int mb_trainer_count_zeros(struct mb_trainer *t, double *n_zeros, struct mb_err *err);
/* Of the elements [begin, end) of a flat buffer that this rank counts: all but, with tensor
 * parallelism on all ranks of a model except its first, the parameters that each of them has; and
 * but what is a copy of the pipeline's first stage's. */
int mb_trainer_squared_norm(struct mb_trainer *t, const struct mb_master *flat, size_t begin,
                            size_t end, double *out, struct mb_err *err);

/* Of embedding and output layer now: --decoupled-lr's schedule, without it everybody's. */
double mb_trainer_decoupled_lr(const struct mb_trainer *t);

/* ---- checkpoints ---- */
int mb_trainer_build_saver(struct mb_trainer *t, struct mb_err *err); /* with --async-save */
int mb_trainer_save(struct mb_trainer *t, struct mb_err *err);        /* collective */
/* Until a save in flight is on disk, or has failed: 0 or its failure. */
int mb_trainer_wait_saved(struct mb_trainer *t, struct mb_err *err);
int mb_trainer_load(struct mb_trainer *t,
                    struct mb_err *err); /* collective; also when nothing is there */

/* ---- lines ---- */
int mb_trainer_is_last(const struct mb_trainer *t);
/* printf on rank 0 only, flushed. */
void mb_trainer_say(const struct mb_trainer *t, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* What differs between a pipeline's stages is told by the first rank of each. */
void mb_trainer_say_of_stage(const struct mb_trainer *t, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
void mb_trainer_say_datetime(const struct mb_trainer *t,
                             const char *what); /* "[what] datetime: .." */
void mb_trainer_now(char out[32]);              /* "2025-04-25 10:11:12" */
/* Megatron's lines of timers over all ranks, in the form of --timing-log-option, printed by the
 * last; a timer of 0 is left out. Collective. */
struct mb_timer {
    const char *name;
    double ms;
};
int mb_trainer_say_timers(struct mb_trainer *t, const struct mb_timer *timers, size_t n,
                          struct mb_err *err);
int mb_trainer_say_timer(struct mb_trainer *t, const char *name, double ms, struct mb_err *err);
/* Of the step's timers, behind an iteration's line; with --timing-log-level 1 or 2. Collective. */
int mb_trainer_say_step_timers(struct mb_trainer *t, struct mb_err *err);
void mb_trainer_say_iteration(struct mb_trainer *t);
/* Megatron-LM's estimate, and what is allocated; once, behind the first logged iteration. */
void mb_trainer_say_memory(struct mb_trainer *t);
/* Events for --tensorboard-dir; no-ops where there is none. */
int mb_trainer_open_tensorboard(struct mb_trainer *t, struct mb_err *err);
void mb_trainer_tell_iteration(struct mb_trainer *t);
void mb_trainer_tell_window(struct mb_trainer *t, double elapsed_ms, double tflops);
void mb_trainer_tell_timer(struct mb_trainer *t, const char *name, double most_ms);
void mb_trainer_tell_validation(struct mb_trainer *t, double loss);
void mb_trainer_say_validation(struct mb_trainer *t, const char *prefix, double loss);

#endif
