/* mobula checkpoint verify URL|DIR: read a checkpoint of a store or of a local disk back and check
 * every byte. */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "base/printable.h"
#include "agent/upload/verify.h"
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"
#include "cli/checkpoint.h"
#include "cli/checkpoint_model.h"
#include "worker/checkpoint/common.h"
#include "worker/checkpoint/verify.h"

struct verify_args {
    int json;
    int64_t iteration;
    uint64_t retry_for_ms;
};

static const struct mb_option verify_options[] = {
    {"iteration", 0, "N", MB_OPTION_INT, offsetof(struct verify_args, iteration),
     "that one instead of the newest", 0, INT64_MAX},
    {"retry-for", 0, "TIME", MB_OPTION_DURATION, offsetof(struct verify_args, retry_for_ms),
     "how long a store that does not answer is asked again; default 10m", 0, 0},
    {"json", 0, NULL, MB_OPTION_FLAG, offsetof(struct verify_args, json), "print JSON, errors too",
     0, 0},
    {0},
};

struct run {
    struct mb_checkpoint_loop l;
    struct mb_verify *verify;
    struct mb_err err;
    struct mb_verify_result result;
    struct mb_store *store;
};

static void on_verified(void *arg, const struct mb_err *err, const struct mb_verify_result *result)
{
    struct run *r = arg;

    r->err = *err;
    r->result = *result;
    mb_checkpoint_loop_stop(&r->l);
    mb_store_close(r->store, NULL, NULL);
}

static void get_facts(void *arg, struct mb_transfer_facts *out)
{
    struct run *r = arg;
    struct mb_verify_result v;

    mb_verify_status(r->verify, &v);
    *out = (struct mb_transfer_facts){.verb = "verify",
                                      .phase = "reading",
                                      .iteration = v.iteration,
                                      .done_bytes = v.done_bytes,
                                      .total_bytes = v.all_bytes,
                                      .n_done = v.n_files,
                                      .n_files = v.all_files};
}

static void cancel(void *arg)
{
    mb_store_close(((struct run *)arg)->store, NULL, NULL);
}

/* Runs the loop until the verdict is there. */
static void verify(const char *url, const struct verify_args *args, struct run *r)
{
    /* JSON is one object here, so nothing but a terminal sees progress. */
    int rc = mb_checkpoint_loop_init(&r->l, 0, &r->err);

    if (rc != 0)
        return;
    r->l.view.is_terminal &= !args->json;
    rc = mb_store_open(&r->l.loop, url, &r->store, &r->err);
    if (rc == 0) {
        mb_store_set_outage(r->store, args->retry_for_ms);
        rc = mb_verify_start(r->store, args->iteration, on_verified, r, &r->verify, &r->err);
        if (rc < 0)
            mb_store_close(r->store, NULL, NULL);
    }
    mb_checkpoint_loop_run(&r->l, rc == 0 ? get_facts : NULL, cancel, r);
    if (r->err.code != 0 && strstr(r->err.text, url) == NULL)
        mb_err_wrap(&r->err, "%s", url);
    mb_err_printable(&r->err);
}

static int print_json(const char *url, const struct run *r, struct mb_err *err)
{
    json_t *j = json_pack("{s:s, s:b, s:I, s:I, s:I, s:s}", "url", url, "verified",
                          r->err.code == 0, "iteration", (json_int_t)r->result.iteration, "files",
                          (json_int_t)r->result.n_files, "bytes", (json_int_t)r->result.total_bytes,
                          "error", r->err.text);

    return mb_checkpoint_print_json(j, JSON_INDENT(2), err);
}

/* ---- a local disk ---- */

/* What an uploader or push leaves beside its files. */
static int has_manifests(const char *dir, int64_t iteration)
{
    char iter[32];
    struct mb_err ignored;
    int has = 0;

    if (iteration < 0 && mb_checkpoint_read_tracker(dir, &iteration, &ignored) != 0)
        iteration = 0;
    mb_checkpoint_iter_name(iteration, iter);
    for (int i = 0; i < 2 && !has; i++) {
        char *path =
            i == 0 ? mb_path_join(dir, ".mobula") : mb_asprintf("%s/%s/.mobula", dir, iter);

        has = path != NULL && mb_fs_exists(path);
        mb_free(path);
    }
    return has;
}

static int is_local(const char *name, int64_t iteration)
{
    struct stat st;

    return strstr(name, "://") == NULL && stat(name, &st) == 0 && S_ISDIR(st.st_mode) &&
           !has_manifests(name, iteration);
}

static int print_local_json(const char *dir, const struct mb_verified *v,
                            const struct mb_err *failed)
{
    struct mb_err err;
    json_t *j = json_pack(
        "{s:s, s:b, s:s, s:I, s:I, s:I, s:I, s:s, s:s}", "url", dir, "verified", failed->code == 0,
        "kind", mb_model_kind(v->kind), "iteration", (json_int_t)v->iteration, "files",
        (json_int_t)v->n_files, "bytes", (json_int_t)v->total_bytes, "files_without_checksums",
        (json_int_t)v->n_without_sums, "not_compared", v->not_compared.text, "error", failed->text);

    return mb_checkpoint_print_json(j, JSON_INDENT(2), &err);
}

static void print_local(const char *dir, const struct mb_verified *v)
{
    char bytes[16];

    if (v->n_without_sums > 0)
        fprintf(stderr,
                "warning: %zu of %zu files have no checksums, for what wrote them makes none "
                "(an earlier mobula, another program): their shapes fit, but nobody can say "
                "whether their bytes are those that were written\n",
                v->n_without_sums, v->n_files);
    if (v->not_compared.code != 0)
        fprintf(stderr, "warning: not compared: the optimizer, which is not read: %s\n",
                v->not_compared.text);
    printf("verified: ");
    if (v->iteration > 0)
        printf("iteration %" PRId64 " in ", v->iteration);
    printf("%s, %s, %zu file%s, %s%s%s\n", dir, mb_model_kind(v->kind), v->n_files,
           v->n_files == 1 ? "" : "s", mb_human_bytes(v->total_bytes, bytes),
           v->n_without_sums > 0 ? ", not all with checksums" : "",
           v->not_compared.code != 0 ? ", not its optimizer" : "");
}

static int verify_local(struct mb_cli *cli, const char *dir, const struct verify_args *args)
{
    struct mb_verified v;
    struct mb_err err = {0};
    int rc = mb_checkpoint_verify(dir, args->iteration, &v, &err);

    mb_err_printable(&err);
    mb_err_printable(&v.not_compared);
    if (args->json)
        (void)print_local_json(dir, &v, &err);
    else if (rc == 0)
        print_local(dir, &v);
    return rc ? mb_cli_fail(cli, &err) : 0;
}

static int verify_run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct run r = {.result.iteration = -1};
    struct verify_args args = {.iteration = -1, .retry_for_ms = MB_CHECKPOINT_RETRY_FOR_MS};
    int n_words = 0;
    int rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &r.err);
    char bytes[16];

    if (rc == 1)
        return 0;
    if (args.retry_for_ms == 0) /* as push has it */
        args.retry_for_ms = MB_CHECKPOINT_RETRY_FOR_MS;
    if (!rc && n_words != 1)
        rc = mb_err_set(&r.err, MB_EINVAL, "which checkpoint? mobula checkpoint verify URL|DIR");
    if (!rc && args.json)
        rc = mb_checkpoint_json_name(argv[1], &r.err);
    if (rc)
        return mb_cli_fail(cli, &r.err);
    if (is_local(argv[1], args.iteration))
        return verify_local(cli, argv[1], &args);
    verify(argv[1], &args, &r);
    if (args.json)
        (void)print_json(argv[1], &r, r.err.code ? NULL : &r.err);
    else if (!r.err.code)
        printf("verified: iteration %" PRId64 " in %s, %" PRIu64 " files, %s\n", r.result.iteration,
               argv[1], r.result.n_files, mb_human_bytes(r.result.total_bytes, bytes));
    return r.err.code ? mb_cli_fail(cli, &r.err) : 0;
}

const struct mb_verb mb_verb_checkpoint_verify = {
    .name = "verify",
    .summary =
        "read the newest checkpoint back, from its store or a local disk, and check every file",
    .synopsis = "[--iteration N] [--retry-for TIME] [--json] URL|DIR",
    .examples = "  mobula checkpoint verify s3://bucket/run1\n"
                "  mobula checkpoint verify ./checkpoints\n",
    .options = verify_options,
    .run = verify_run,
};
