/*
 * mobula preprocess: JSON Lines to .bin and .idx with Megatron-LM's own argument names
 * (tools/preprocess_data.py). The work is done in worker/data.
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include "cli/options.h"
#include "worker/data/preprocess.h"

enum { KEYS_MAX = 64 };

struct preprocess_args {
    const char *input, *json_keys, *output_prefix, *tokenizer_type, *vocab_file, *merge_file;
    int64_t vocab_size, workers, log_interval;
    int append_eod;
};

#define OPTION(name_, arg_, kind_, field_, help_, min_, max_)                                      \
    {                                                                                              \
        name_, 0, arg_, kind_, offsetof(struct preprocess_args, field_), help_, min_, max_         \
    }

static const struct mb_option options[] = {
    OPTION("input", "FILE", MB_OPTION_STRING, input, "JSON Lines, .gz too", 0, 0),
    OPTION("json-keys", "KEY...", MB_OPTION_STRING, json_keys, "fields to tokenize (text)", 0, 0),
    OPTION("output-prefix", "PREFIX", MB_OPTION_STRING, output_prefix,
           "writes PREFIX_KEY_document.bin and .idx", 0, 0),
    OPTION("tokenizer-type", "TYPE", MB_OPTION_STRING, tokenizer_type,
           "GPT2BPETokenizer or NullTokenizer", 0, 0),
    OPTION("vocab-file", "FILE", MB_OPTION_STRING, vocab_file, "vocab.json of GPT-2", 0, 0),
    OPTION("merge-file", "FILE", MB_OPTION_STRING, merge_file, "merges.txt of GPT-2", 0, 0),
    OPTION("vocab-size", "N", MB_OPTION_INT, vocab_size, "of the NullTokenizer", 1, INT32_MAX),
    OPTION("append-eod", NULL, MB_OPTION_FLAG, append_eod, "end every document with <eod>", 0, 0),
    OPTION("workers", "N", MB_OPTION_INT, workers, "threads that tokenize (1)", 1, 1024),
    OPTION("log-interval", "N", MB_OPTION_INT, log_interval,
           "documents between progress lines (1000)", 1, INT32_MAX),
    {0},
};

static volatile sig_atomic_t interrupted;

static void on_signal(int signal)
{
    (void)signal;
    interrupted = 1;
}

static int is_cancelled(void *ctx)
{
    (void)ctx;
    return interrupted;
}

static void on_opening(void *ctx, const char *path)
{
    (void)ctx;
    printf("Opening %s\n", path);
    fflush(stdout);
}

static void on_started(void *ctx, double startup_s)
{
    char line[MB_PREPROCESS_LINE_MAX];

    (void)ctx;
    puts(mb_preprocess_startup_line(startup_s, line));
    fflush(stdout);
}

static void on_progress(void *ctx, const struct mb_preprocess_progress *p)
{
    char line[MB_PREPROCESS_LINE_MAX];

    (void)ctx;
    fprintf(stderr, "%s\n", mb_preprocess_progress_line(p, line));
}

static int check(const struct preprocess_args *a, int n_words, struct mb_err *err)
{
    const char *missing = a->input == NULL            ? "input"
                          : a->output_prefix == NULL  ? "output-prefix"
                          : a->tokenizer_type == NULL ? "tokenizer-type"
                                                      : NULL;

    if (missing != NULL)
        return mb_err_set(err, MB_EINVAL, "preprocess: --%s is required", missing);
    if (n_words > 0 && a->json_keys == NULL)
        return mb_err_set(err, MB_EINVAL, "preprocess: unexpected argument; see --help");
    if (n_words >= KEYS_MAX)
        return mb_err_set(err, MB_EINVAL, "preprocess: --json-keys: at most %d keys", KEYS_MAX);
    return 0;
}

/* --json-keys takes several words, as in argparse: those after the first arrive as plain words. */
static int run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct preprocess_args args = {.workers = 1, .log_interval = 1000};
    const char *keys[KEYS_MAX + 1] = {NULL};
    struct mb_preprocess_options o = {.opening_cb = on_opening,
                                      .started_cb = on_started,
                                      .progress_cb = on_progress,
                                      .cancelled_cb = is_cancelled};
    struct mb_err err;
    int n_words, rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &err);

    if (rc == 1)
        return 0;
    if (rc == 0)
        rc = check(&args, n_words, &err);
    if (rc != 0)
        return mb_cli_fail(cli, &err);
    keys[0] = args.json_keys;
    for (int i = 0; i < n_words; i++)
        keys[1 + i] = argv[1 + i];
    o.input = args.input;
    o.json_keys = args.json_keys != NULL ? keys : NULL;
    o.n_json_keys = args.json_keys != NULL ? (size_t)n_words + 1 : 0;
    o.output_prefix = args.output_prefix;
    o.tokenizer = (struct mb_tokenizer_options){args.tokenizer_type, args.vocab_file,
                                                args.merge_file, args.vocab_size};
    o.append_eod = args.append_eod;
    o.workers = (unsigned)args.workers;
    o.log_interval = (uint64_t)args.log_interval;
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    rc = mb_preprocess_run(&o, NULL, &err);
    return rc != 0 ? mb_cli_fail(cli, &err) : 0;
}

const struct mb_verb mb_verb_preprocess = {
    .name = "preprocess",
    .summary = "tokenize JSON Lines into Megatron-LM's .bin and .idx",
    .synopsis = "--input FILE --output-prefix PREFIX --tokenizer-type TYPE [OPTIONS]",
    .examples = "  mobula preprocess --input corpus.jsonl --output-prefix data/corpus \\\n"
                "    --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json \\\n"
                "    --merge-file merges.txt --append-eod --workers 8\n",
    .options = options,
    .run = run,
};
