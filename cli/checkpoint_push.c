/* mobula checkpoint push DIR URL: a directory into a store, resumed where an earlier call ended. */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include "base/printable.h"
#include "agent/upload/push.h"
#include "base/str.h"
#include "cli/checkpoint.h"

struct push_args {
    int json, force, plain, abandon;
    int64_t iteration;
    const char *state_dir;
    uint64_t retry_for_ms;
};

static const struct mb_option push_options[] = {
    {"iteration", 0, "N", MB_OPTION_INT, offsetof(struct push_args, iteration),
     "that one instead of the one the tracker file names", 0, INT64_MAX},
    {"plain", 0, NULL, MB_OPTION_FLAG, offsetof(struct push_args, plain),
     "all files as they are, without a manifest", 0, 0},
    {"force", 0, NULL, MB_OPTION_FLAG, offsetof(struct push_args, force),
     "the store's pointer may go back to an older iteration", 0, 0},
    {"abandon", 0, NULL, MB_OPTION_FLAG, offsetof(struct push_args, abandon),
     "send nothing; abort what earlier pushes left unfinished", 0, 0},
    {"state-dir", 0, "DIR", MB_OPTION_STRING, offsetof(struct push_args, state_dir),
     "where it notes what is done; default: the directory itself", 0, 0},
    {"retry-for", 0, "TIME", MB_OPTION_DURATION, offsetof(struct push_args, retry_for_ms),
     "how long a store that does not answer is asked again; default 10m", 0, 0},
    {"json", 0, NULL, MB_OPTION_FLAG, offsetof(struct push_args, json),
     "print JSON lines, errors too", 0, 0},
    {0},
};

struct run {
    struct mb_checkpoint_loop l;
    struct mb_push *push;
    struct mb_err err;
    struct mb_push_status status;
};

static void on_pushed(void *arg, const struct mb_err *err, const struct mb_push_status *status)
{
    struct run *r = arg;

    r->err = *err;
    r->status = *status;
    r->push = NULL;
    mb_checkpoint_loop_stop(&r->l);
}

static void get_facts(void *arg, struct mb_transfer_facts *out)
{
    struct run *r = arg;
    struct mb_push_status s;

    mb_push_status(r->push, &s);
    *out = (struct mb_transfer_facts){.verb = "push",
                                      .phase = mb_push_phase_name(s.phase),
                                      .iteration = s.iteration,
                                      .done_bytes = s.done_bytes,
                                      .kept_bytes = s.kept_bytes,
                                      .total_bytes = s.total_bytes,
                                      .n_done = s.n_done,
                                      .n_files = s.n_files};
}

static void cancel(void *arg)
{
    mb_push_cancel(((struct run *)arg)->push);
}

static void print_end(const struct push_args *args, const char *dir, const char *url,
                      const struct mb_push_status *s)
{
    char bytes[16], kept[16];

    if (args->json) {
        json_t *j =
            json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:b, s:s}", "event", "done", "iteration",
                      (json_int_t)s->iteration, "files", (json_int_t)s->n_files, "bytes",
                      (json_int_t)s->total_bytes, "kept_bytes", (json_int_t)s->kept_bytes, "latest",
                      (json_int_t)s->latest, "aborted", (json_int_t)s->n_aborted, "was_there",
                      s->was_whole, "url", url);

        if ((j == NULL || mb_printable_json(j, 0, stdout) != 0) && !ferror(stdout))
            fputs("{\"event\": \"done\"}", stdout);
        putchar('\n');
        json_decref(j);
        return;
    }
    mb_human_bytes(s->total_bytes, bytes);
    mb_human_bytes(s->kept_bytes, kept);
    if (args->abandon)
        printf("abandoned: %zu unfinished uploads aborted in %s\n", s->n_aborted, url);
    else if (s->iteration < 0)
        printf("pushed: %zu files, %s (%s there before), to %s\n%s has no tracker file, or was "
               "pushed with --plain: there is no manifest, and readers of checkpoints will not see "
               "it\n",
               s->n_files, bytes, kept, url, dir);
    else if (s->was_whole)
        printf("iteration %" PRId64 " is in %s already, with the same contents\n", s->iteration,
               url);
    else
        printf("pushed: iteration %" PRId64 ", %zu files, %s (%s there before), to %s\n",
               s->iteration, s->n_files, bytes, kept, url);
    if (!args->abandon && s->iteration >= 0 && s->latest != s->iteration)
        printf("the latest pointer stays at iteration %" PRId64 " (--force moves it back)\n",
               s->latest);
}

static int push_run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct push_args args = {.iteration = -1};
    struct mb_push_opts opts = {0};
    struct run r = {0};
    int n_words = 0;
    int rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &r.err);

    if (rc == 1)
        return 0;
    if (!rc && n_words != 2)
        rc = mb_err_set(&r.err, MB_EINVAL, "from where to where? mobula checkpoint push DIR URL");
    if (!rc)
        rc = mb_checkpoint_loop_init(&r.l, args.json, &r.err);
    if (rc)
        return mb_checkpoint_fail(cli, args.json, &r.err);
    opts = (struct mb_push_opts){.dir = argv[1],
                                 .url = argv[2],
                                 .state_dir = args.state_dir,
                                 .iteration = args.iteration,
                                 .is_plain = args.plain,
                                 .force = args.force,
                                 .abandon = args.abandon,
                                 .retry_for_ms = args.retry_for_ms};
    rc = mb_push_start(&r.l.loop, &opts, on_pushed, &r, &r.push, &r.err);
    mb_checkpoint_loop_run(&r.l, rc ? NULL : get_facts, cancel, &r);
    if (r.err.code)
        return mb_checkpoint_fail(cli, args.json, &r.err);
    print_end(&args, argv[1], argv[2], &r.status);
    return 0;
}

const struct mb_verb mb_verb_checkpoint_push = {
    .name = "push",
    .summary = "send a checkpoint, or any directory, to a store; again: goes on where it was",
    .synopsis = "[--iteration N] [--plain] [--force] [--abandon] [--json] DIR URL",
    .examples = "  mobula checkpoint push /ckpt/run1 s3://bucket/run1\n"
                "  mobula checkpoint push --plain /data/corpus s3://bucket/corpus\n",
    .options = push_options,
    .run = push_run,
};
