/* mobula checkpoint pull URL DIR: the newest whole checkpoint of a store, checked, into a
 * directory; with --plain what lies there, as it is. */
#include <inttypes.h>
#include <fnmatch.h>
#include <stdio.h>
#include "agent/upload/pull.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"
#include "cli/checkpoint.h"
#include "cli/checkpoint_pull_plain.h"

struct pull_args {
    int json, plain, cached;
    int64_t iteration;
    const char *files;
    uint64_t retry_for_ms;
};

static const struct mb_option pull_options[] = {
    {"iteration", 0, "N", MB_OPTION_INT, offsetof(struct pull_args, iteration),
     "that one and no other instead of the newest whole one", 0, INT64_MAX},
    {"files", 0, "PATTERN", MB_OPTION_STRING, offsetof(struct pull_args, files),
     "only files whose path matches, e.g. 'model*'", 0, 0},
    {"cached", 0, NULL, MB_OPTION_FLAG, offsetof(struct pull_args, cached),
     "leave the files in the page cache, for a program that reads them at once; takes more CPU "
     "time",
     0, 0},
    {"plain", 0, NULL, MB_OPTION_FLAG, offsetof(struct pull_args, plain),
     "all objects below URL as they are, no checkpoint; a file of the same size is kept", 0, 0},
    {"retry-for", 0, "TIME", MB_OPTION_DURATION, offsetof(struct pull_args, retry_for_ms),
     "how long a store that does not answer is asked again; default 10m", 0, 0},
    {"json", 0, NULL, MB_OPTION_FLAG, offsetof(struct pull_args, json),
     "print JSON lines, errors too", 0, 0},
    {0},
};

struct run {
    struct mb_checkpoint_loop l;
    struct mb_pull *pull;
    struct mb_err err;
    int64_t iteration;
    struct mb_pull_status status;
    const struct pull_args *args;
};

static void on_pulled(void *arg, const struct mb_err *err, int64_t iteration)
{
    struct run *r = arg;

    mb_pull_status(r->pull, &r->status);
    r->err = *err;
    r->iteration = iteration;
    mb_checkpoint_loop_stop(&r->l);
}

static void get_facts(void *arg, struct mb_transfer_facts *out)
{
    struct run *r = arg;
    struct mb_pull_status s;

    mb_pull_status(r->pull, &s);
    *out = (struct mb_transfer_facts){.verb = "pull",
                                      .phase = "fetching",
                                      .iteration = s.iteration,
                                      .done_bytes = s.done_bytes,
                                      .kept_bytes = s.kept_bytes,
                                      .total_bytes = s.total_bytes,
                                      .n_done = s.n_done,
                                      .n_files = s.n_files};
}

static void cancel(void *arg)
{
    mb_pull_cancel(((struct run *)arg)->pull);
}

static void leave(void *arg)
{
    mb_pull_clear(((struct run *)arg)->pull);
}

static int wants(void *arg, const char *path)
{
    struct run *r = arg;

    return fnmatch(r->args->files, path, 0) == 0;
}

static void pull(struct run *r, const char *url, const char *dir)
{
    int rc = mb_checkpoint_loop_init(&r->l, r->args->json, &r->err);

    if (rc != 0)
        return;
    rc = mb_fs_mkdir_p(dir, 0777, &r->err);
    if (rc == 0)
        rc = mb_pull_start(&r->l.loop, url, dir, r->args->retry_for_ms, on_pulled, r, &r->pull,
                           &r->err);
    if (rc == 0 && r->args->iteration >= 0)
        mb_pull_set_iteration(r->pull, r->args->iteration);
    if (rc == 0 && !r->args->cached)
        mb_pull_set_direct(r->pull);
    if (rc == 0 && r->args->files)
        mb_pull_set_filter(r->pull, wants, r);
    r->l.leave = leave;
    mb_checkpoint_loop_run(&r->l, rc == 0 ? get_facts : NULL, cancel, r);
    if (r->err.code == 0 && r->iteration < 0)
        mb_err_set(&r->err, MB_ENOENT, "%s: no checkpoint: there is no pointer", url);
    if (r->err.code == 0 && r->status.n_files == 0)
        mb_err_set(&r->err, MB_ENOENT, "iteration %" PRId64 " has no file that matches %s",
                   r->iteration, r->args->files ? r->args->files : "*");
}

static void print_end(const struct run *r, const char *dir)
{
    char bytes[16], kept[16];

    if (r->args->json) {
        printf("{\"event\": \"done\", \"iteration\": %" PRId64
               ", \"files\": %zu, \"bytes\": %" PRIu64 ", \"kept_bytes\": %" PRIu64
               ", \"newer_not_whole\": %u}\n",
               r->iteration, r->status.n_files, r->status.total_bytes, r->status.kept_bytes,
               r->status.n_bad);
        return;
    }
    if (r->status.n_bad > 0)
        printf("newer iterations that are not whole: %u; the one before is taken\n",
               r->status.n_bad);
    printf("pulled: iteration %" PRId64 ", %zu files, %s (%s there before), into %s\n",
           r->iteration, r->status.n_files, mb_human_bytes(r->status.total_bytes, bytes),
           mb_human_bytes(r->status.kept_bytes, kept), dir);
}

static int run_plain(struct mb_cli *cli, const struct pull_args *args, const char *url,
                     const char *dir)
{
    struct mb_plain_wishes wishes = {.files = args->files,
                                     .retry_for_ms = args->retry_for_ms,
                                     .json = args->json,
                                     .cached = args->cached};
    struct mb_plain_result done;
    struct mb_err err;
    char bytes[16], kept[16];

    if (mb_checkpoint_pull_plain(url, dir, &wishes, &done, &err) != 0)
        return mb_checkpoint_fail(cli, args->json, &err);
    if (args->json)
        printf("{\"event\": \"done\", \"iteration\": -1, \"files\": %" PRIu64
               ", \"bytes\": %" PRIu64 ", \"kept_bytes\": %" PRIu64 "}\n",
               done.n_files, done.total_bytes, done.kept_bytes);
    else
        printf("pulled: %" PRIu64 " files, %s (%s there before), into %s\n", done.n_files,
               mb_human_bytes(done.total_bytes, bytes), mb_human_bytes(done.kept_bytes, kept), dir);
    return 0;
}

static int pull_run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct pull_args args = {.iteration = -1, .retry_for_ms = MB_CHECKPOINT_RETRY_FOR_MS};
    struct run r = {.iteration = -1, .args = &args};
    int n_words = 0, rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &r.err);

    if (rc == 1)
        return 0;
    if (args.retry_for_ms == 0) /* as push has it */
        args.retry_for_ms = MB_CHECKPOINT_RETRY_FOR_MS;
    if (!rc && n_words != 2)
        rc = mb_err_set(&r.err, MB_EINVAL, "from where to where? mobula checkpoint pull URL DIR");
    if (!rc && args.plain && args.iteration >= 0)
        rc = mb_err_set(&r.err, MB_EINVAL, "--plain and --iteration: files as they are have none");
    if (!rc && args.plain)
        return run_plain(cli, &args, argv[1], argv[2]);
    if (!rc) {
        mb_log_init(2, MB_LOG_WARN); /* the story is told by the bar; what is not whole is not */
        pull(&r, argv[1], argv[2]);
    }
    if (r.err.code)
        return mb_checkpoint_fail(cli, args.json, &r.err);
    print_end(&r, argv[2]);
    return 0;
}

const struct mb_verb mb_verb_checkpoint_pull = {
    .name = "pull",
    .summary = "fetch the newest whole checkpoint of a store, checked; what is there is kept",
    .synopsis = "[--iteration N | --plain] [--files PATTERN] [--retry-for TIME] [--json] URL DIR",
    .examples = "  mobula checkpoint pull s3://bucket/run1 /ckpt/run1\n"
                "  mobula checkpoint pull --plain s3://bucket/corpus /data/corpus\n",
    .options = pull_options,
    .run = pull_run,
};
