/*
 * mobula run -- CMD: the same gang around any command, with torchrun's environment variables.
 *
 * --as-driver is what `mobula job submit --driver-on gpu-node` puts in front of the entrypoint for
 * a stock Ray head (mobula's places drivers itself): the driver that the head runs is then only the
 * keeper of a gang of one, on a node with GPUs, whose command is the real driver. Output, exit
 * status, a stop, restarts of agents and of the head go the way they go for every gang.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"
#include "cli/launch.h"
#include "cli/options.h"
#include "cli/train_inputs.h"

struct run {
    struct mb_launch launch;
    int no_tag, fetch_inputs;
};

static const struct mb_option options[] = {
    MB_LAUNCH_OPTIONS(struct run, launch),
    {"ranks-per-node", 0, "N", MB_OPTION_INT, offsetof(struct run, launch.ranks_per_node),
     "ranks on each node, without GPUs (1)", 1, 1024},
    {"save", 0, "DIR", MB_OPTION_STRING, offsetof(struct run, launch.save_dir),
     "directory the command saves checkpoints in (%n: the node's rank); rank 0's tracker file "
     "there seals them",
     0, 0},
    {"keep-last-k", 0, "K", MB_OPTION_INT, offsetof(struct run, launch.local_keep_last),
     "remove all but the newest K durable checkpoints from --save (0: keep all)", 0, 100000},
    {"load-url", 0, "URL", MB_OPTION_STRING, offsetof(struct run, launch.load_url),
     "checkpoint that is pulled into --save before the ranks start", 0, 0},
    {"fetch-inputs", 0, NULL, MB_OPTION_FLAG, offsetof(struct run, fetch_inputs),
     "s3:// behind COMMAND's --data-path, --tokenizer-model, --load, ... is fetched before the "
     "ranks start, as by train",
     0, 0},
    {"no-tag", 0, NULL, MB_OPTION_FLAG, offsetof(struct run, no_tag),
     "print the ranks' lines as they are, without [rank N]", 0, 0},
    {"as-driver", 0, NULL, MB_OPTION_FLAG, offsetof(struct run, launch.as_driver),
     "inside a job: COMMAND is its driver, on a node with GPUs", 0, 0},
    {"driver-gpus", 0, "N", MB_OPTION_INT, offsetof(struct run, launch.driver_gpus),
     "with --as-driver: GPUs that are its own (0)", 0, 1024},
    {0},
};

/* The head waits this long before it kills us: what we keep gets a second less. */
static void set_drivers_grace(struct mb_launch *l)
{
    const char *wait_s = getenv("RAY_JOB_STOP_WAIT_TIME_S");
    double seconds = 30;

    if (wait_s && mb_parse_double(wait_s, "RAY_JOB_STOP_WAIT_TIME_S", &seconds, NULL) < 0)
        seconds = 30;
    l->stop_grace_ms = (uint64_t)(seconds > 2 ? seconds * 1000 - 1000 : seconds * 500) + 1;
}

/* Another program's ranks all read the model they begin with. */
static int find_inputs(struct mb_launch *l, char **words, int n, struct mb_driver_input **inputs,
                       struct mb_err *err)
{
    int rc = mb_train_inputs(words, n, inputs, &l->n_inputs, err);

    for (size_t i = 0; rc == MB_OK && i < l->n_inputs; i++)
        (*inputs)[i].is_of_rank_0 = 0;
    l->inputs = *inputs;
    return rc;
}

static int run_run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct run r = {0};
    struct mb_driver_input *inputs = NULL;
    struct mb_err err = {0};
    int n_words = 0, rc, status;

    mb_launch_defaults(&r.launch);
    rc = mb_options_parse(cli, verb, argc, argv, 1, &r, &n_words, &err);
    if (rc == 1)
        return 0;
    if (!rc && n_words == 0)
        rc = mb_err_set(&err, MB_EINVAL, "no command: mobula run [options] -- COMMAND [ARG...]");
    if (!rc && r.launch.gpus_per_node && r.launch.ranks_per_node)
        rc = mb_err_set(&err, MB_EINVAL, "--gpus-per-node and --ranks-per-node exclude each other");
    if (!rc && (r.launch.checkpoint_url || r.launch.load_url) && !r.launch.save_dir)
        rc = mb_err_set(&err, MB_EINVAL,
                        "--checkpoint-url and --load-url need --save DIR: where COMMAND saves");
    if (!rc && r.launch.local_keep_last && !r.launch.checkpoint_url)
        rc = mb_err_set(&err, MB_EINVAL,
                        "--keep-last-k needs --checkpoint-url: nothing goes before it is durable");
    if (!rc && r.launch.as_driver &&
        (r.launch.num_nodes > 1 || r.launch.gpus_per_node || r.launch.ranks_per_node ||
         r.launch.save_dir))
        rc =
            mb_err_set(&err, MB_EINVAL, "--as-driver: one process; --driver-gpus is its only size");
    if (!rc && r.launch.driver_gpus && !r.launch.as_driver)
        rc = mb_err_set(&err, MB_EINVAL, "--driver-gpus needs --as-driver");
    if (!rc && r.fetch_inputs)
        rc = find_inputs(&r.launch, argv + 1, n_words, &inputs, &err);
    if (rc < 0)
        return mb_cli_fail(cli, &err);
    if (r.launch.as_driver) {
        r.launch.num_nodes = 1; /* whatever Slurm says */
        set_drivers_grace(&r.launch);
    }
    argv[1 + n_words] = NULL;
    r.launch.argv = (const char *const *)argv + 1;
    r.launch.entrypoint = argv[1];
    r.launch.use_gpu = r.launch.gpus_per_node > 0;
    r.launch.tag_ranks = !r.no_tag;
    status = mb_launch_run(cli, &r.launch);
    mb_free(inputs);
    return status;
}

const struct mb_verb mb_verb_run = {
    .name = "run",
    .summary = "run any command as a gang: RANK, WORLD_SIZE, MASTER_ADDR, ... are set",
    .synopsis = "[options] -- COMMAND [ARG...]",
    .examples =
        "  mobula run --num-nodes 2 -- sh -c 'echo rank $RANK of $WORLD_SIZE'\n"
        "  mobula run --num-nodes 2 --gpus-per-node 8 --save /ckpt \\\n"
        "      --checkpoint-url s3://bucket/run1 -- python pretrain_gpt.py ... --save /ckpt\n",
    .options = options,
    .run = run_run,
};
