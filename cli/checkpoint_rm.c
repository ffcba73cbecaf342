/* mobula checkpoint rm URL: iterations out of a store, never the one the pointer names. */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include "agent/upload/remove.h"
#include "base/alloc.h"
#include "base/str.h"
#include "cli/checkpoint.h"

struct rm_args {
    int json, force, dry_run;
    int64_t iteration, keep_last;
    uint64_t retry_for_ms;
};

static const struct mb_option rm_options[] = {
    {"iteration", 0, "N", MB_OPTION_INT, offsetof(struct rm_args, iteration), "this one", 0,
     INT64_MAX},
    {"keep-last", 0, "K", MB_OPTION_INT, offsetof(struct rm_args, keep_last),
     "all that are older than the newest K whole ones, the pointer's among these", 1, INT64_MAX},
    {"force", 0, NULL, MB_OPTION_FLAG, offsetof(struct rm_args, force),
     "with --iteration: also what the pointer names (it moves to the one before), or a job claims",
     0, 0},
    {"dry-run", 0, NULL, MB_OPTION_FLAG, offsetof(struct rm_args, dry_run),
     "only say what would go", 0, 0},
    {"retry-for", 0, "TIME", MB_OPTION_DURATION, offsetof(struct rm_args, retry_for_ms),
     "how long a store that does not answer is asked again; default 10s", 0, 0},
    {"json", 0, NULL, MB_OPTION_FLAG, offsetof(struct rm_args, json),
     "print JSON lines, errors too", 0, 0},
    {0},
};

struct run {
    struct mb_checkpoint_loop l;
    struct mb_store *store;
    const struct mb_inventory *inv;
    const struct mb_inventory_iteration **going; /* n of them */
    size_t n, next;
    const struct rm_args *args;
    struct mb_err err;
};

static void say(const struct run *r, const struct mb_inventory_iteration *it, size_t n_removed)
{
    char bytes[16];

    if (r->args->json)
        printf("{\"event\": \"%s\", \"iteration\": %" PRId64
               ", \"objects\": %zu, \"bytes\": %" PRIu64 "}\n",
               r->args->dry_run ? "would_remove" : "removed", it->iteration, n_removed,
               it->stored_bytes);
    else
        printf("%s: iteration %" PRId64 ", %zu objects, %s\n",
               r->args->dry_run ? "would remove" : "removed", it->iteration, n_removed,
               mb_human_bytes(it->stored_bytes, bytes));
    fflush(stdout);
}

static void remove_next(struct run *r);

static void on_removed(void *arg, const struct mb_err *err, size_t n_removed)
{
    struct run *r = arg;

    r->err = *err;
    if (err->code == 0)
        say(r, r->going[r->next], n_removed);
    r->next++;
    remove_next(r);
}

static void remove_next(struct run *r)
{
    struct mb_remove_opts opts = {.inv = r->inv, .force = r->args->force};

    if (r->err.code == 0 && r->next < r->n) {
        opts.it = r->going[r->next];
        if (mb_remove_start(r->store, &opts, on_removed, r, &r->err) == 0)
            return;
    }
    mb_checkpoint_loop_stop(&r->l);
    mb_store_close(r->store, NULL, NULL);
}

static void cancel(void *arg)
{
    mb_store_close(((struct run *)arg)->store, NULL, NULL);
}

static void no_facts(void *arg, struct mb_transfer_facts *out)
{
    (void)arg;
    out->verb = "rm";
    out->phase = "removing";
}

/* Those that have to go, oldest first. */
static int choose(struct run *r, const char *url)
{
    r->going = mb_calloc(r->inv->n + 1, sizeof(*r->going));
    if (!r->going)
        return mb_err_set(&r->err, MB_ENOMEM, "out of memory");
    if (r->args->keep_last > 0 && r->inv->latest < 0)
        return mb_err_set(&r->err, MB_ESTATE,
                          "%s: without a pointer that can be read nobody knows which are old", url);
    for (size_t i = 0; i < r->inv->n; i++) {
        const struct mb_inventory_iteration *it = &r->inv->iterations[i];

        if (r->args->keep_last > 0 ? mb_remove_is_old(r->inv, it, r->args->keep_last)
                                   : it->iteration == r->args->iteration)
            r->going[r->n++] = it;
    }
    if (r->args->keep_last == 0 && r->n == 0)
        return mb_err_set(&r->err, MB_ENOENT, "%s has no iteration %" PRId64, url,
                          r->args->iteration);
    return 0;
}

static void remove_all(struct run *r, const char *url)
{
    if (choose(r, url) != 0)
        return;
    if (r->args->dry_run) {
        for (size_t i = 0; i < r->n; i++)
            say(r, r->going[i], r->going[i]->n_keys);
        return;
    }
    if (mb_checkpoint_loop_init(&r->l, 0, &r->err) != 0)
        return;
    r->l.view.is_terminal = 0;
    if (mb_store_open(&r->l.loop, url, &r->store, &r->err) == 0) {
        mb_store_set_outage(r->store, r->args->retry_for_ms);
        remove_next(r);
    }
    mb_checkpoint_loop_run(&r->l, r->store ? no_facts : NULL, cancel, r);
}

static int rm_run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct rm_args args = {.iteration = -1, .retry_for_ms = MB_CHECKPOINT_ASK_FOR_MS};
    struct mb_inventory inv = {0};
    struct run r = {.inv = &inv, .args = &args};
    int n_words = 0, rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &r.err);

    if (rc == 1)
        return 0;
    if (!rc && n_words != 1)
        rc = mb_err_set(&r.err, MB_EINVAL,
                        "from which store? mobula checkpoint rm --iteration N URL");
    if (!rc && (args.iteration >= 0) == (args.keep_last > 0))
        rc = mb_err_set(&r.err, MB_EINVAL, "which iterations? --iteration N or --keep-last K");
    if (!rc && args.force && args.keep_last > 0)
        rc = mb_err_set(&r.err, MB_EINVAL, "--force goes with --iteration only");
    if (args.retry_for_ms == 0) /* as push has it */
        args.retry_for_ms = MB_CHECKPOINT_ASK_FOR_MS;
    if (!rc)
        rc = mb_checkpoint_inventory(argv[1], args.retry_for_ms, &inv, &r.err);
    if (!rc)
        remove_all(&r, argv[1]);
    mb_free(r.going);
    mb_inventory_close(&inv);
    return r.err.code ? mb_checkpoint_fail(cli, args.json, &r.err) : 0;
}

const struct mb_verb mb_verb_checkpoint_rm = {
    .name = "rm",
    .summary = "remove iterations from a store, never the one its pointer names",
    .synopsis =
        "--iteration N [--force] | --keep-last K  [--dry-run] [--retry-for TIME] [--json] URL",
    .examples = "  mobula checkpoint rm --keep-last 3 s3://bucket/run1\n"
                "  mobula checkpoint rm --iteration 20 s3://bucket/run1\n",
    .options = rm_options,
    .run = rm_run,
};
