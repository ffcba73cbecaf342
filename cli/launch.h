/*
 * What `train` and `run` share: the options of a gang, who we are (inside a submitted job or not),
 * the environment that ranks get, and the call of the driver. Blocking; the main thread of a verb.
 */
#ifndef MOBULA_CLI_LAUNCH_H
#define MOBULA_CLI_LAUNCH_H

#include <stdint.h>
#include "base/err.h"
#include "cli/options.h"

struct mb_driver_input;

struct mb_launch {
    const char *address;
    const char *name;
    int64_t num_nodes; /* 0: not given; 1, or those of the Slurm step */
    int64_t gpus_per_node;
    int64_t ranks_per_node; /* without GPUs; 0: not given */
    const char *checkpoint_url;
    int64_t checkpoint_keep_last;
    const char *resume;      /* NULL: not given; resume.h */
    int64_t local_keep_last; /* of `run`; a trainer keeps its own directory */
    const char *load_url;
    const char *save_dir;
    int64_t priority;
    uint64_t wait_timeout_ms;
    uint64_t stop_grace_ms;
    uint64_t drain_timeout_ms; /* 0: not given, as long as it takes */
    uint64_t lease_ms;
    int64_t max_restarts;
    uint64_t restart_delay_ms;
    int64_t min_nodes; /* 0: not given, all of num_nodes */
    uint64_t elastic_wait_ms;
    const char *deadline; /* NULL: MOBULA_DEADLINE, or none */
    /* Filled by the verb, not by options. */
    const char *const *argv; /* of a rank; NULL-terminated */
    const char *entrypoint;
    const struct mb_driver_input *inputs; /* of a trainer, from object stores */
    size_t n_inputs;
    int use_gpu;
    int is_worker;
    int tag_ranks;
    int as_driver; /* the command is the driver of the job that we are in */
    int64_t driver_gpus;
    int64_t global_batch, micro_batch; /* of a trainer whose batches have to divide; 0: unknown */
    int64_t ranks_per_model;           /* of its ranks share a model; 0: unknown */
};

/* Rows of an option table for the common part; `type` is the verb's struct, `field` its member of
 * type struct mb_launch. */
#define MB_LAUNCH_OPTIONS(type, field)                                                             \
    {"num-nodes",                                                                                  \
     0,                                                                                            \
     "N",                                                                                          \
     MB_OPTION_INT,                                                                                \
     offsetof(type, field.num_nodes),                                                              \
     "nodes of the gang (1; under srun: all)",                                                     \
     1,                                                                                            \
     65536},                                                                                       \
        {"gpus-per-node",                                                                          \
         0,                                                                                        \
         "N",                                                                                      \
         MB_OPTION_INT,                                                                            \
         offsetof(type, field.gpus_per_node),                                                      \
         "ranks on each node, one GPU each",                                                       \
         1,                                                                                        \
         1024},                                                                                    \
        {"checkpoint-url",                                                                         \
         0,                                                                                        \
         "URL",                                                                                    \
         MB_OPTION_STRING,                                                                         \
         offsetof(type, field.checkpoint_url),                                                     \
         "s3://bucket/prefix or file:///dir that checkpoints are made durable in",                 \
         0,                                                                                        \
         0},                                                                                       \
        {"checkpoint-keep-last",                                                                   \
         0,                                                                                        \
         "K",                                                                                      \
         MB_OPTION_INT,                                                                            \
         offsetof(type, field.checkpoint_keep_last),                                               \
         "delete all but the newest K checkpoints below --checkpoint-url (0: keep all)",           \
         0,                                                                                        \
         100000},                                                                                  \
        {"resume",                                                                                 \
         0,                                                                                        \
         "HOW",                                                                                    \
         MB_OPTION_STRING,                                                                         \
         offsetof(type, field.resume),                                                             \
         "auto: go on from the newest checkpoint in --checkpoint-url, if it has any; required: "   \
         "fail if it has none; never (never)",                                                     \
         0,                                                                                        \
         0},                                                                                       \
        {"address",                                                                                \
         0,                                                                                        \
         "HOST:PORT",                                                                              \
         MB_OPTION_STRING,                                                                         \
         offsetof(type, field.address),                                                            \
         "GCS of the cluster ($RAY_ADDRESS, else 127.0.0.1:6379)",                                 \
         0,                                                                                        \
         0},                                                                                       \
        {"name",                                                                                   \
         0,                                                                                        \
         "NAME",                                                                                   \
         MB_OPTION_STRING,                                                                         \
         offsetof(type, field.name),                                                               \
         "name of the run (the submission id inside a job)",                                       \
         0,                                                                                        \
         0},                                                                                       \
        {"priority",                                                                               \
         0,                                                                                        \
         "N",                                                                                      \
         MB_OPTION_INT,                                                                            \
         offsetof(type, field.priority),                                                           \
         "a gang with a higher one gets its nodes first (0)",                                      \
         -1000,                                                                                    \
         1000},                                                                                    \
        {"wait-timeout",                                                                           \
         0,                                                                                        \
         "TIME",                                                                                   \
         MB_OPTION_DURATION,                                                                       \
         offsetof(type, field.wait_timeout_ms),                                                    \
         "how long to wait for free nodes (1h)",                                                   \
         0,                                                                                        \
         0},                                                                                       \
        {"stop-grace",                                                                             \
         0,                                                                                        \
         "TIME",                                                                                   \
         MB_OPTION_DURATION,                                                                       \
         offsetof(type, field.stop_grace_ms),                                                      \
         "between SIGTERM and SIGKILL of a rank (60s)",                                            \
         0,                                                                                        \
         0},                                                                                       \
        {"drain-timeout",                                                                          \
         0,                                                                                        \
         "TIME",                                                                                   \
         MB_OPTION_DURATION,                                                                       \
         offsetof(type, field.drain_timeout_ms),                                                   \
         "for uploads once all ranks have ended; then the job fails and says what is lost (none)", \
         0,                                                                                        \
         0},                                                                                       \
        {"max-restarts",                                                                           \
         0,                                                                                        \
         "N",                                                                                      \
         MB_OPTION_INT,                                                                            \
         offsetof(type, field.max_restarts),                                                       \
         "attempts after a failed one, from the last durable checkpoint (0)",                      \
         0,                                                                                        \
         1000000},                                                                                 \
        {"deadline",                                                                               \
         0,                                                                                        \
         "TIME",                                                                                   \
         MB_OPTION_STRING,                                                                         \
         offsetof(type, field.deadline),                                                           \
         "save and end so that all is durable by then: 90m, 2026-11-22T10:00:00Z "                 \
         "($MOBULA_DEADLINE)",                                                                     \
         0,                                                                                        \
         0},                                                                                       \
        {"restart-delay",                                                                          \
         0,                                                                                        \
         "TIME",                                                                                   \
         MB_OPTION_DURATION,                                                                       \
         offsetof(type, field.restart_delay_ms),                                                   \
         "before the first of them; doubles while attempts get nowhere (1s)",                      \
         0,                                                                                        \
         0},                                                                                       \
        {"min-nodes",                                                                              \
         0,                                                                                        \
         "N",                                                                                      \
         MB_OPTION_INT,                                                                            \
         offsetof(type, field.min_nodes),                                                          \
         "a restart goes on with as few as these, if no more are there (--num-nodes)",             \
         1,                                                                                        \
         65536},                                                                                   \
        {"elastic-wait",                                                                           \
         0,                                                                                        \
         "TIME",                                                                                   \
         MB_OPTION_DURATION,                                                                       \
         offsetof(type, field.elastic_wait_ms),                                                    \
         "how long it waits for all nodes before (30s)",                                           \
         0,                                                                                        \
         0},                                                                                       \
    {                                                                                              \
        "lease", 0, "TIME", MB_OPTION_DURATION, offsetof(type, field.lease_ms),                    \
            "how long agents keep the gang without its driver (60s)", 0, 0                         \
    }

void mb_launch_defaults(struct mb_launch *l);

/* Runs the gang to its end; returns the exit status. Errors are printed. */
int mb_launch_run(struct mb_cli *cli, const struct mb_launch *l);

/* s3://, gs://, file:// - what the object store understands. */
int mb_launch_is_url(const char *s);

#endif
