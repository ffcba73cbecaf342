/*
 * mobula train: a gang of native workers with Megatron-LM's own arguments.
 *  1. Our own options are taken out of the command line; everything else goes to the workers as it
 *     stands, in order, so that Megatron's rules (last wins, lists) hold there; but a misspelt
 * option of ours is refused here, with the right one (train_words.h).
 *  2. --load with a URL is pulled by the agents before the ranks start; --save,
 *     --distributed-backend and the batch sizes are read, not taken.
 *     Data, tokenizers and a base model with s3:// URLs are fetched by them, too (train_inputs.h).
 *  3. --help prints our options, then the workers' argument groups.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"
#include "cli/launch.h"
#include "cli/options.h"
#include "cli/train_inputs.h"
#include "cli/train_words.h"

/* Value of the last --name in words[0..n), NULL if absent; with index of its first word. */
static const char *find_value(char **words, int n, const char *name, int *at)
{
    size_t len = strlen(name);
    const char *found = NULL;

    for (int i = 0; i < n; i++) {
        if (strncmp(words[i], name, len) != 0)
            continue;
        if (words[i][len] == '=') {
            found = words[i] + len + 1;
            *at = i;
        } else if (words[i][len] == '\0' && i + 1 < n) {
            found = words[i + 1];
            *at = i;
        }
    }
    return found;
}

static int remove_words(char **words, int n, int at)
{
    int k = strchr(words[at], '=') ? 1 : 2;

    memmove(words + at, words + at + k, (size_t)(n - at - k + 1) * sizeof(*words));
    return n - k;
}

static int worker_help(struct mb_cli *cli, const struct mb_verb *verb)
{
    struct mb_err err = {0};
    char *dir = mb_fs_self_dir(&err);
    char *path = dir ? mb_path_join(dir, "mobula-worker") : NULL;
    int status = 0;
    pid_t pid;

    mb_options_help(cli, verb, stdout);
    printf("\nArguments of the trainer (Megatron-LM's names):\n");
    fflush(stdout);
    if (!path) {
        status = mb_cli_fail(cli, &err);
        goto out;
    }
    pid = fork();
    if (pid == 0) {
        execl(path, path, "--help", (char *)NULL);
        fprintf(stderr, "mobula: cannot run %s\n", path);
        _exit(127);
    }
    if (pid < 0 || waitpid(pid, &status, 0) < 0 || !WIFEXITED(status))
        status = mb_exit_status(MB_EIO);
    else
        status = WEXITSTATUS(status);
out:
    mb_free(path);
    mb_free(dir);
    return status;
}

/* 0 when it is not given, or not a number: the workers say so. */
static int64_t find_number(char **words, int n, const char *name)
{
    int at = 0;
    const char *text = find_value(words, n, name, &at);
    int64_t value = 0;

    return text && mb_parse_i64(text, 1, INT32_MAX, name, &value, NULL) == 0 ? value : 0;
}

/* 0 when it is not given, or more than there can be ranks. */
static int64_t find_model_ranks(char **words, int n)
{
    static const char *const SIZES[] = {"--tensor-model-parallel-size", "--context-parallel-size",
                                        "--pipeline-model-parallel-size"};
    int64_t ranks = 1;

    for (size_t i = 0; i < sizeof(SIZES) / sizeof(SIZES[0]) && ranks <= INT32_MAX; i++) {
        const int64_t size = find_number(words, n, SIZES[i]);
        ranks *= size > 0 ? size : 1;
    }
    return ranks <= INT32_MAX ? ranks : 0;
}

static void read_megatron(struct mb_train *t, char **words, int *n)
{
    int at = 0;
    const char *backend = find_value(words, *n, "--distributed-backend", &at);
    const char *load;

    t->launch.use_gpu = !backend || strcmp(backend, "gloo") != 0;
    t->launch.save_dir = find_value(words, *n, "--save", &at);
    t->launch.global_batch = find_number(words, *n, "--global-batch-size");
    t->launch.micro_batch = find_number(words, *n, "--micro-batch-size");
    t->launch.ranks_per_model = find_model_ranks(words, *n);
    load = find_value(words, *n, "--load", &at);
    if (load && mb_launch_is_url(load)) {
        t->launch.load_url = load;
        *n = remove_words(words, *n, at);
    }
}

static int train_run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct mb_train t;
    struct mb_err err = {0};
    char **own = mb_calloc((size_t)argc + 1, sizeof(*own));
    char **words = mb_calloc((size_t)argc + 1, sizeof(*words));
    struct mb_driver_input *inputs = NULL;
    int n_own = 0, n_words = 0, unused = 0, status;

    mb_launch_defaults(&t.launch);
    if (!own || !words) {
        mb_err_set(&err, MB_ENOMEM, "out of memory");
        status = mb_cli_fail(cli, &err);
        goto out;
    }
    own[n_own++] = argv[0];
    words[n_words++] = (char *)(uintptr_t) "mobula-worker";
    for (int i = 1; i < argc; i++) {
        int k = mb_train_own_words(argv[i], i + 1 < argc);

        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            status = worker_help(cli, verb);
            goto out;
        }
        if (k == 0 && mb_train_check_word(argv[i], &err) != 0) {
            status = mb_cli_fail(cli, &err);
            goto out;
        }
        if (k == 0)
            words[n_words++] = argv[i];
        for (; k > 0; k--, i += k > 0)
            own[n_own++] = argv[i];
    }
    if (mb_options_parse(cli, verb, n_own, own, 0, &t, &unused, &err) < 0) {
        status = mb_cli_fail(cli, &err);
        goto out;
    }
    read_megatron(&t, words, &n_words);
    if (t.launch.checkpoint_url && !find_value(words, n_words, "--save-interval", &unused)) {
        mb_err_set(&err, MB_EINVAL,
                   "--checkpoint-url needs --save-interval N: after how many iterations to save");
        status = mb_cli_fail(cli, &err);
        goto out;
    }
    if (mb_train_inputs(words, n_words, &inputs, &t.launch.n_inputs, &err) != MB_OK) {
        status = mb_cli_fail(cli, &err);
        goto out;
    }
    t.launch.inputs = inputs;
    t.launch.argv = (const char *const *)words;
    t.launch.entrypoint = "mobula train";
    t.launch.is_worker = 1;
    status = mb_launch_run(cli, &t.launch);
out:
    mb_free(inputs);
    mb_free(words);
    mb_free(own);
    return status;
}

const struct mb_verb mb_verb_train = {
    .name = "train",
    .summary = "train a model: a gang of native workers with Megatron-LM's arguments",
    .synopsis = "[options] MEGATRON-ARGUMENTS...",
    .examples =
        "  mobula train --num-nodes 2 --gpus-per-node 8 --checkpoint-url s3://bucket/run1 \\\n"
        "      --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 \\\n"
        "      --max-position-embeddings 1024 --micro-batch-size 8 --global-batch-size 512 \\\n"
        "      --train-iters 1000 --lr 6e-4 --data-path data/corpus_text_document \\\n"
        "      --vocab-file vocab.json --merge-file merges.txt --save-interval 100\n"
        "  mobula train --data-path s3://data/corpus_text_document --tokenizer-model "
        "s3://models/llama ...\n"
        "  mobula train --distributed-backend gloo --mock-data ...     # on the CPU\n",
    .options = mb_train_options,
    .run = train_run,
};
