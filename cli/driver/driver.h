/*
 * The driver of a gang: reserves a placement group, launches one process per rank through the
 * agents of its nodes, relays what they report, and ends when everything that was saved is durable.
 * A plain process: a job's entrypoint, or typed in a shell. Blocking; owns its loop.
 */
#ifndef MOBULA_CLI_DRIVER_H
#define MOBULA_CLI_DRIVER_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"
#include "cli/driver/resume.h"

/* What ranks read from an object store; kind as in agent.proto. */
struct mb_driver_input {
    const char *url;
    int kind;
    int is_of_rank_0; /* only the node of rank 0 needs it */
};

struct mb_driver_opts {
    const char *address;       /* GCS host:port */
    const char *token;         /* NULL: none */
    const char *job_id;        /* name of the run: the submission id inside a job */
    const char *submission_id; /* NULL when not inside a submitted job */
    const char *entrypoint;    /* for people */
    uint32_t num_nodes;
    uint32_t ranks_per_node;
    int use_gpu;             /* bundles ask mobula_gpu too */
    int as_driver;           /* one rank that is a job's driver: on a node with GPUs, in no slot */
    uint32_t driver_gpus;    /* as_driver: devices that it gets */
    const char *const *argv; /* what every rank runs; NULL-terminated */
    const char *const *env;  /* "NAME=value"; NULL-terminated */
    const char *cwd;         /* "" = the agent's own */
    int is_worker;           /* the ranks are mobula-worker */
    int tag_ranks;           /* prefix every line of output with its rank */
    const char *save_dir;    /* NULL: one is chosen when checkpoint_url or load_url is given */
    const char *checkpoint_url;           /* NULL: local only */
    uint32_t checkpoint_keep_last;        /* in the store; 0: all */
    uint32_t local_keep_last;             /* of a foreign trainer in save_dir; 0: all */
    const char *load_url;                 /* NULL: nothing is pulled */
    enum mb_resume resume;                /* from checkpoint_url, before load_url */
    const struct mb_driver_input *inputs; /* fetched by the nodes before the ranks start */
    size_t n_inputs;
    int priority; /* of the gang in the head's queue */
    uint64_t reserve_timeout_ms;
    uint64_t stop_grace_ms;
    uint64_t drain_timeout_ms; /* for uploads once all ranks have ended; 0: as long as it takes */
    uint64_t lease_ms;
    uint64_t deadline_unix_ms;           /* what was saved is to be durable by then; 0: none */
    uint64_t estimated_deadline_unix_ms; /* the same, as our node knows it; 0: none */
    uint32_t max_restarts;               /* attempts after the first; restart.h decides */
    uint64_t restart_delay_ms;           /* before the first of them */
    uint32_t min_nodes;                  /* of a later attempt; 0: num_nodes. elastic.h decides */
    uint64_t elastic_wait_ms;            /* for all num_nodes, before fewer are asked for */
    uint64_t global_batch;               /* what has to divide on fewer nodes; 0: anything does */
    uint64_t micro_batch;
    uint32_t ranks_per_model; /* ranks that share a model; 0: each has its own */
};

/* Returns the exit status of the process: 0 only if every rank exited 0 and everything saved with a
 * checkpoint_url is committed; as_driver: that of the rank, 128 more than the signal that ended it.
 * Prints the first failure as one line to stderr. */
int mb_driver_run(const struct mb_driver_opts *opts);

#endif
