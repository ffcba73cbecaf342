/*
 * mobula preprocess: JSON Lines to .bin and .idx with Megatron-LM's own argument names
 * (tools/preprocess_data.py). The work is done in worker/data.
 *
 * stdout has "Opening FILE" and "Time to startup: S", or with --json one object at the end; stderr
 * has Megatron-LM's progress lines, what is skipped, and the totals. If stderr is a terminal, its
 * last line is a bar that is drawn again about ten times a second and taken away before any other
 * line.
 */
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include "base/fs.h"
#include "base/printable.h"
#include "cli/tokenizer_fetch.h"
#include "worker/data/preprocess.h"
#include "worker/data/preprocess_publish.h"

struct preprocess_args {
    struct mb_tokenizer_flags tokenizer;
    struct mb_words input, json_keys, workers_to_check, special_tokens, tokenizer_special_tokens;
    const char *output_prefix, *scratch_dir, *invalid_utf8, *lang, *tokenizer_metadata,
        *performance_dir, *dataset_impl, *prompt_format, *sft_prompt_format, *image_tag_type,
        *chat_template;
    int64_t workers, partitions, log_interval, padded_vocab_size, vocab_extra_ids, max_documents,
        chunk_size, make_vocab_size_divisible_by, null_eod_id, null_pad_id;
    uint64_t max_line_bytes, resume_interval_ms;
    int append_eod, skip_bad_lines, no_resume, json, keep_sequential_samples;
    int split_sentences, keep_newlines, find_optimal_num_workers, legacy_tokenizer;
    int trust_remote_code, tokenizer_hf_no_use_fast, tokenizer_hf_use_fast,
        tokenizer_hf_include_special_tokens, sentencepiece_legacy, force_system_message;
};

enum { NOT_GIVEN = INT32_MIN }; /* of an id, which may be -1 */

#define OPTION(name_, arg_, kind_, field_, help_, min_, max_)                                      \
    {                                                                                              \
        name_, 0, arg_, MB_OPTION_##kind_, offsetof(struct preprocess_args, field_), help_, min_,  \
            max_                                                                                   \
    }
/* Flags of Megatron-LM that change nothing here, or are refused with a reason. */
#define HIDDEN(name_, arg_, kind_, field_) OPTION(name_, arg_, kind_, field_, NULL, 0, 0)

static const struct mb_option options[] = {
    OPTION("input", "FILE...", WORDS, input, "JSON Lines, also .gz, .xz, .zst; globs, URLs, -", 0,
           0),
    OPTION("json-keys", "KEY...", WORDS, json_keys, "fields to tokenize (text)", 0, 0),
    OPTION("output-prefix", "PREFIX", STRING, output_prefix,
           "writes PREFIX_KEY_document.bin and .idx; s3://BUCKET/KEY too", 0, 0),
    OPTION("scratch-dir", "DIR", STRING, scratch_dir,
           "where files for s3:// are made first (TMPDIR)", 0, 0),
    MB_TOKENIZER_ROWS OPTION("append-eod", NULL, FLAG, append_eod, "end every document with <eod>",
                             0, 0),
    OPTION("workers", "N", INT, workers, "threads that tokenize (1)", 1, 1024),
    OPTION("partitions", "N", INT, partitions, "order of the output: line i in partition i mod N",
           1, 1024),
    OPTION("keep-sequential-samples", NULL, FLAG, keep_sequential_samples,
           "with --partitions: the order of the input", 0, 0),
    OPTION("log-interval", "N", INT, log_interval, "documents between progress lines (1000)", 1,
           INT32_MAX),
    OPTION("skip-bad-lines", NULL, FLAG, skip_bad_lines, "leave out what is no such JSON; count it",
           0, 0),
    OPTION("invalid-utf8", "fail|replace", STRING, invalid_utf8,
           "a line that is no UTF-8 is bad (fail), or gets U+FFFD", 0, 0),
    OPTION("max-line-bytes", "BYTES", SIZE, max_line_bytes, "longer lines are refused (1GiB)", 0,
           0),
    OPTION("no-resume", NULL, FLAG, no_resume, "do not go on with a run that was killed", 0, 0),
    OPTION("resume-interval", "TIME", DURATION, resume_interval_ms, "between durable points (5s)",
           0, 0),
    OPTION("json", NULL, FLAG, json, "print the totals as JSON, errors too", 0, 0),
    HIDDEN("split-sentences", NULL, FLAG, split_sentences),
    HIDDEN("keep-newlines", NULL, FLAG, keep_newlines),
    HIDDEN("lang", "LANGUAGE", STRING, lang),
    HIDDEN("find-optimal-num-workers", NULL, FLAG, find_optimal_num_workers),
    HIDDEN("workers-to-check", "N...", WORDS, workers_to_check),
    HIDDEN("max-documents", "N", INT, max_documents),
    HIDDEN("performance-dir", "DIR", STRING, performance_dir),
    HIDDEN("padded-vocab-size", "N", INT, padded_vocab_size),
    HIDDEN("vocab-extra-ids", "N", INT, vocab_extra_ids),
    HIDDEN("tokenizer-metadata", "FILE", STRING, tokenizer_metadata),
    HIDDEN("legacy-tokenizer", NULL, FLAG, legacy_tokenizer),
    HIDDEN("trust-remote-code", NULL, FLAG, trust_remote_code),
    HIDDEN("tokenizer-hf-no-use-fast", NULL, FLAG, tokenizer_hf_no_use_fast),
    HIDDEN("tokenizer-hf-use-fast", NULL, FLAG, tokenizer_hf_use_fast),
    HIDDEN("tokenizer-hf-include-special-tokens", NULL, FLAG, tokenizer_hf_include_special_tokens),
    HIDDEN("tokenizer-sentencepiece-legacy", NULL, FLAG, sentencepiece_legacy),
    HIDDEN("tokenizer-special-tokens", "TOKEN...", WORDS, tokenizer_special_tokens),
    HIDDEN("null-tokenizer-eod-id", "N", INT, null_eod_id),
    HIDDEN("null-tokenizer-pad-id", "N", INT, null_pad_id),
    HIDDEN("special-tokens", "TOKEN...", WORDS, special_tokens),
    HIDDEN("tokenizer-prompt-format", "FORMAT", STRING, prompt_format),
    HIDDEN("sft-tokenizer-prompt-format", "FORMAT", STRING, sft_prompt_format),
    HIDDEN("image-tag-type", "TYPE", STRING, image_tag_type),
    HIDDEN("force-system-message", NULL, FLAG, force_system_message),
    HIDDEN("chat-template", "TEMPLATE", STRING, chat_template),
    HIDDEN("make-vocab-size-divisible-by", "N", INT, make_vocab_size_divisible_by),
    /* Of releases up to core 0.5 and before. */
    HIDDEN("dataset-impl", "FORM", STRING, dataset_impl),
    HIDDEN("chunk-size", "N", INT, chunk_size),
    HIDDEN("vocab", "FILE", STRING, tokenizer.vocab_file),
    {0},
};

static volatile sig_atomic_t interrupted;

static void on_signal(int signal)
{
    (void)signal;
    interrupted = 1;
}

/* ---- what is shown ---- */

struct view {
    const char *program;
    FILE *facts;     /* Megatron-LM's lines for stdout */
    int on_terminal; /* stderr is one: there is a bar */
    int bar_is_shown;
};

static void hide_bar(struct view *v)
{
    if (v->bar_is_shown)
        fputs("\r\033[K", stderr);
    v->bar_is_shown = 0;
}

static int is_cancelled(void *ctx)
{
    (void)ctx;
    return interrupted;
}

static void on_opening(void *ctx, const char *name)
{
    struct view *v = ctx;

    hide_bar(v);
    fprintf(v->facts, "Opening %s\n", name);
    fflush(v->facts);
}

static void on_started(void *ctx, double startup_s)
{
    struct view *v = ctx;
    char line[MB_PREPROCESS_LINE_MAX];

    fprintf(v->facts, "%s\n", mb_preprocess_startup_line(startup_s, line));
    fflush(v->facts);
}

static void on_progress(void *ctx, const struct mb_preprocess_progress *p)
{
    char line[MB_PREPROCESS_LINE_MAX];

    hide_bar(ctx);
    fprintf(stderr, "%s\n", mb_preprocess_progress_line(p, line));
}

static void on_tick(void *ctx, const struct mb_preprocess_progress *p)
{
    struct view *v = ctx;
    char line[MB_PREPROCESS_LINE_MAX];
    struct winsize size;
    unsigned columns = 80;

    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0)
        columns = size.ws_col;
    fprintf(stderr, "\r%s\033[K", mb_preprocess_bar_line(p, columns, line));
    v->bar_is_shown = 1;
}

static void on_notice(void *ctx, const char *text)
{
    struct view *v = ctx;

    hide_bar(v);
    fprintf(stderr, "%s: %s\n", v->program, text);
}

static void on_bad_line(void *ctx, const char *text)
{
    struct view *v = ctx;

    hide_bar(v);
    fprintf(stderr, "%s: skipped: %s\n", v->program, text);
}

static double rate(double n, double seconds)
{
    return seconds > 0 ? n / seconds : 0;
}

static int print_json(const struct mb_preprocess_options *o, const char *prefix,
                      const struct mb_preprocess_progress *p, struct mb_err *err)
{
    json_t *prefixes = json_array();
    json_t *all;
    int rc;

    for (size_t i = 0; i < (o->n_json_keys > 0 ? o->n_json_keys : 1); i++)
        json_array_append_new(
            prefixes,
            json_sprintf("%s_%s_document", prefix, o->n_json_keys > 0 ? o->json_keys[i] : "text"));
    all = json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:f,s:f,s:f,s:f,s:f,s:b,s:o}", "documents",
                    (json_int_t)p->n_documents, "sequences", (json_int_t)p->n_sequences, "tokens",
                    (json_int_t)p->n_tokens, "text_bytes", (json_int_t)p->text_bytes, "json_chars",
                    (json_int_t)p->json_chars, "skipped_lines", (json_int_t)p->n_bad_lines,
                    "repaired_lines", (json_int_t)p->n_repaired_lines, "elapsed_s", p->elapsed_s,
                    "documents_per_s", rate((double)p->n_documents, p->elapsed_s), "text_mb_per_s",
                    rate((double)p->text_bytes / 1e6, p->elapsed_s), "json_mib_per_s",
                    rate((double)p->json_chars / 1048576, p->elapsed_s), "tokens_per_s",
                    rate((double)p->n_tokens, p->elapsed_s), "resumed", p->is_resumed,
                    "output_prefixes", prefixes);
    rc = all == NULL ? -1 : mb_printable_json(all, JSON_SORT_KEYS | JSON_REAL_PRECISION(9), stdout);
    json_decref(all);
    return rc == 0 && putchar('\n') != EOF && fflush(stdout) == 0
               ? 0
               : mb_err_set(err, MB_EIO, "the totals cannot be written to standard output");
}

/* ---- options ---- */

static int check_required(const struct preprocess_args *a, struct mb_err *err)
{
    const char *missing = a->input.n == 0                       ? "input"
                          : a->output_prefix == NULL            ? "output-prefix"
                          : a->tokenizer.tokenizer_type == NULL ? "tokenizer-type"
                                                                : NULL;

    if (missing != NULL)
        return mb_err_set(err, MB_EINVAL, "preprocess: --%s is required", missing);
    if (a->invalid_utf8 != NULL && strcmp(a->invalid_utf8, "fail") != 0 &&
        strcmp(a->invalid_utf8, "replace") != 0)
        return mb_err_set(err, MB_EINVAL, "preprocess: --invalid-utf8 %s: fail or replace",
                          a->invalid_utf8);
    if (a->partitions > 1 && a->workers % a->partitions != 0)
        return mb_err_set(
            err, MB_EINVAL,
            "preprocess: --workers %lld is not a multiple of --partitions %lld, which "
            "Megatron-LM demands",
            (long long)a->workers, (long long)a->partitions);
    return 0;
}

static int has_type(const struct preprocess_args *a, const char *type)
{
    return strcmp(a->tokenizer.tokenizer_type, type) == 0;
}

/* Arguments of a tokenizer that would change tokens, and do not here. */
static int check_tokenizer(const struct preprocess_args *a, struct mb_err *err)
{
    if (a->tokenizer_metadata != NULL)
        return mb_err_set(
            err, MB_EUNSUPPORTED,
            "preprocess: --tokenizer-metadata is not provided: give --tokenizer-type");
    if (a->tokenizer_special_tokens.n > 0 && !has_type(a, "TikTokenizer"))
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "preprocess: --tokenizer-special-tokens is provided for TikTokenizer "
                          "only: others take the special tokens of their files");
    if (a->sentencepiece_legacy)
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "preprocess: --tokenizer-sentencepiece-legacy is not provided");
    if (a->null_eod_id != NOT_GIVEN && has_type(a, "NullTokenizer") &&
        a->null_eod_id != a->tokenizer.vocab_size)
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "preprocess: --null-tokenizer-eod-id %lld is not provided: the eod of "
                          "the NullTokenizer is --vocab-size",
                          (long long)a->null_eod_id);
    return 0;
}

/* What Megatron-LM does and this program does not. */
static int check_refused(const struct preprocess_args *a, struct mb_err *err)
{
    if (a->split_sentences)
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "preprocess: --split-sentences needs the trained punkt models of nltk, "
                          "which are Python pickles; split the texts before, a list of texts under "
                          "a key becomes the sequences of one document");
    if (a->find_optimal_num_workers)
        return mb_err_set(
            err, MB_EUNSUPPORTED,
            "preprocess: --find-optimal-num-workers is not provided: as many --workers "
            "as there are cores are the fastest");
    if (a->dataset_impl != NULL && strcmp(a->dataset_impl, "mmap") != 0)
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "preprocess: --dataset-impl %s is not provided: mmap is the form that "
                          "Megatron-LM has kept",
                          a->dataset_impl);
    return check_tokenizer(a, err);
}

static void note_ignored(const struct view *v, const struct preprocess_args *a)
{
    static const char of_sentences[] = "it belongs to --split-sentences",
                      of_workers[] = "it belongs to --find-optimal-num-workers",
                      of_chats[] = "it belongs to tokenizers of conversations and images",
                      no_file[] = "padding changes no file", one[] = "there is one implementation";
    const struct {
        int given;
        const char *name, *why;
    } rows[] = {
        {a->keep_newlines, "keep-newlines", of_sentences},
        {a->lang != NULL, "lang", of_sentences},
        {a->workers_to_check.n > 0, "workers-to-check", of_workers},
        {a->max_documents != 0, "max-documents", of_workers},
        {a->performance_dir != NULL, "performance-dir", of_workers},
        {a->padded_vocab_size != 0, "padded-vocab-size", no_file},
        {a->make_vocab_size_divisible_by != 0, "make-vocab-size-divisible-by", no_file},
        {a->vocab_extra_ids != 0, "vocab-extra-ids", "Megatron-LM sets it to 0 here"},
        {a->legacy_tokenizer, "legacy-tokenizer", one},
        {a->trust_remote_code, "trust-remote-code", "no code of a model is run"},
        {a->tokenizer_hf_no_use_fast, "tokenizer-hf-no-use-fast", one},
        {a->tokenizer_hf_use_fast, "tokenizer-hf-use-fast", one},
        {a->tokenizer_hf_include_special_tokens, "tokenizer-hf-include-special-tokens",
         "it is so without it"},
        {a->null_eod_id != NOT_GIVEN, "null-tokenizer-eod-id",
         "the eod of the NullTokenizer is --vocab-size"},
        {a->null_pad_id != NOT_GIVEN, "null-tokenizer-pad-id", no_file},
        {a->special_tokens.n > 0, "special-tokens", of_chats},
        {a->prompt_format != NULL, "tokenizer-prompt-format", of_chats},
        {a->sft_prompt_format != NULL, "sft-tokenizer-prompt-format", of_chats},
        {a->image_tag_type != NULL, "image-tag-type", of_chats},
        {a->force_system_message, "force-system-message", of_chats},
        {a->chat_template != NULL, "chat-template", of_chats},
        {a->dataset_impl != NULL, "dataset-impl", "mmap is the only form"},
        {a->chunk_size != 0, "chunk-size", "workers are given what has about 512 KiB"},
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (rows[i].given)
            fprintf(stderr, "%s: --%s has no effect: %s\n", v->program, rows[i].name, rows[i].why);
    }
}

static struct mb_preprocess_options options_of(const struct preprocess_args *a, struct view *v)
{
    return (struct mb_preprocess_options){
        .inputs = a->input.at,
        .n_inputs = a->input.n,
        .max_line_bytes = a->max_line_bytes,
        .json_keys = a->json_keys.at,
        .n_json_keys = a->json_keys.n,
        .output_prefix = a->output_prefix,
        .tokenizer = mb_tokenizer_flags_read(&a->tokenizer),
        .append_eod = a->append_eod,
        .skip_bad_lines = a->skip_bad_lines,
        .repair_utf8 = a->invalid_utf8 != NULL && strcmp(a->invalid_utf8, "replace") == 0,
        .workers = (unsigned)a->workers,
        .partitions = a->keep_sequential_samples ? 1 : (unsigned)a->partitions,
        .log_interval = (uint64_t)a->log_interval,
        .no_resume = a->no_resume,
        .resume_interval_ms = a->resume_interval_ms,
        .opening_cb = on_opening,
        .started_cb = on_started,
        .progress_cb = on_progress,
        .tick_cb = v->on_terminal ? on_tick : NULL,
        .notice_cb = on_notice,
        .bad_line_cb = on_bad_line,
        .cancelled_cb = is_cancelled,
        .ctx = v,
    };
}

/* The run itself, into a local prefix; what belongs into a bucket is then sent there. */
static int run_and_publish(const struct preprocess_args *a, struct mb_preprocess_options *o,
                           struct view *v, struct mb_preprocess_progress *total, struct mb_err *err)
{
    static const char *const text_only[] = {"text"};
    struct mb_publish_options po = {
        .prefix = a->output_prefix,
        .scratch_dir = a->scratch_dir,
        .keys = o->n_json_keys > 0 ? o->json_keys : text_only,
        .n_keys = o->n_json_keys > 0 ? o->n_json_keys : 1,
        .cancelled_cb = is_cancelled,
    };
    struct mb_publish *publish = NULL;
    int rc = mb_publish_open(&po, &publish, err);

    if (rc != 0)
        return rc;
    o->output_prefix = mb_publish_local_prefix(publish); /* lives until the close */
    rc = mb_preprocess_run(o, total, err);
    hide_bar(v);
    if (rc == 0)
        rc = mb_publish_run(publish, err);
    o->output_prefix = a->output_prefix;
    mb_publish_close(publish);
    return rc;
}

static int run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct preprocess_args args = {.workers = 1,
                                   .partitions = 1,
                                   .log_interval = 1000,
                                   .null_eod_id = NOT_GIVEN,
                                   .null_pad_id = NOT_GIVEN};
    const char *term = getenv("TERM");
    struct view v = {.program = cli->program};
    struct mb_preprocess_options o;
    struct mb_preprocess_progress total;
    struct mb_tokenizer_fetched fetched = {0};
    char line[MB_PREPROCESS_LINE_MAX];
    struct mb_err err;
    int n_words, rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &err);

    if (rc == 1)
        return 0;
    if (rc == 0)
        rc = check_required(&args, &err);
    if (rc == 0)
        rc = check_refused(&args, &err);
    if (args.tokenizer_special_tokens.n > 0) /* its name in later releases */
        args.tokenizer.tiktoken_special_tokens = args.tokenizer_special_tokens;
    if (rc == 0)
        rc = mb_tokenizer_fetch(&args.tokenizer, &fetched, &err);
    if (rc != 0)
        return mb_cli_fail(cli, &err);
    note_ignored(&v, &args);
    v.facts = args.json ? stderr : stdout;
    v.on_terminal = isatty(STDERR_FILENO) && term != NULL && strcmp(term, "dumb") != 0;
    o = options_of(&args, &v);
    (void)mb_fs_open_files_max(); /* many partitions and keys are three files each */
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    rc = run_and_publish(&args, &o, &v, &total, &err);
    if (rc == 0) {
        fprintf(stderr, "%s\n", mb_preprocess_total_line(&total, line));
        rc = args.json ? print_json(&o, args.output_prefix, &total, &err) : 0;
    }
    mb_tokenizer_fetched_close(&fetched); /* the options point into it */
    return rc != 0 ? mb_cli_fail(cli, &err) : 0;
}

const struct mb_verb mb_verb_preprocess = {
    .name = "preprocess",
    .summary = "tokenize JSON Lines into Megatron-LM's .bin and .idx",
    .synopsis = "--input FILE... --output-prefix PREFIX --tokenizer-type TYPE [OPTIONS]",
    .examples = "  mobula preprocess --input corpus.jsonl --output-prefix data/corpus \\\n"
                "    --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json \\\n"
                "    --merge-file merges.txt --append-eod --workers 8\n"
                "  mobula preprocess --input 'part-*.jsonl.zst' --json-keys title text \\\n"
                "    --output-prefix data/web --tokenizer-type HuggingFaceTokenizer \\\n"
                "    --tokenizer-model Llama-3.1-8B --workers 16 --skip-bad-lines --json\n",
    .options = options,
    .no_words = 1,
    .run = run,
};
