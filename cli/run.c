/* mobula run -- CMD: the same gang around any command, with torchrun's environment variables. */
#include <stdio.h>
#include <string.h>
#include "cli/launch.h"
#include "cli/options.h"

struct run {
    struct mb_launch launch;
    int no_tag;
};

static const struct mb_option options[] = {
    MB_LAUNCH_OPTIONS(struct run, launch),
    {"ranks-per-node", 0, "N", MB_OPTION_INT, offsetof(struct run, launch.ranks_per_node),
     "ranks on each node, without GPUs (1)", 1, 1024},
    {"save", 0, "DIR", MB_OPTION_STRING, offsetof(struct run, launch.save_dir),
     "directory the command saves checkpoints in (%n: the node's rank); rank 0's tracker file "
     "there seals them",
     0, 0},
    {"load-url", 0, "URL", MB_OPTION_STRING, offsetof(struct run, launch.load_url),
     "checkpoint that is pulled into --save before the ranks start", 0, 0},
    {"no-tag", 0, NULL, MB_OPTION_FLAG, offsetof(struct run, no_tag),
     "print the ranks' lines as they are, without [rank N]", 0, 0},
    {0},
};

static int run_run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct run r = {0};
    struct mb_err err = {0};
    int n_words = 0, rc;

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
    if (rc < 0)
        return mb_cli_fail(cli, &err);
    argv[1 + n_words] = NULL;
    r.launch.argv = (const char *const *)argv + 1;
    r.launch.entrypoint = argv[1];
    r.launch.use_gpu = r.launch.gpus_per_node > 0;
    r.launch.tag_ranks = !r.no_tag;
    return mb_launch_run(cli, &r.launch);
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
