/* mobula checkpoint verify URL: read the newest checkpoint of a store back and check every byte. */
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>
#include "agent/upload/verify.h"
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"
#include "cli/options.h"

struct verify_args {
    int json;
};

static const struct mb_option verify_options[] = {
    {"json", 0, NULL, MB_OPTION_FLAG, offsetof(struct verify_args, json), "print JSON", 0, 0},
    {0},
};

struct outcome {
    struct mb_err err;
    struct mb_verify_result result;
    struct mb_store *store;
};

static void on_verified(void *arg, const struct mb_err *err, const struct mb_verify_result *result)
{
    struct outcome *o = arg;

    o->err = *err;
    o->result = *result;
    mb_store_close(o->store, NULL, NULL);
}

/* Runs the loop until the verdict is there. */
static int verify(const char *url, const char *scratch, struct outcome *o)
{
    uv_loop_t loop;
    int rc;

    if (uv_loop_init(&loop) < 0)
        return mb_err_set(&o->err, MB_ENOMEM, "out of memory");
    rc = mb_store_open(&loop, url, &o->store, &o->err);
    if (rc == 0) {
        rc = mb_verify_start(o->store, scratch, on_verified, o, &o->err);
        if (rc < 0)
            mb_store_close(o->store, NULL, NULL);
        uv_run(&loop, UV_RUN_DEFAULT);
        rc = o->err.code;
        if (rc != 0 && strstr(o->err.text, url) == NULL)
            mb_err_wrap(&o->err, "%s", url);
    }
    uv_loop_close(&loop);
    return rc;
}

static void print_json(const char *url, const struct outcome *o)
{
    json_t *j = json_pack("{s:s, s:b, s:I, s:I, s:I, s:s}", "url", url, "verified",
                          o->err.code == 0, "iteration", (json_int_t)o->result.iteration, "files",
                          (json_int_t)o->result.n_files, "bytes", (json_int_t)o->result.total_bytes,
                          "error", o->err.text);
    char *text = j ? json_dumps(j, JSON_INDENT(2)) : NULL;

    puts(text ? text : "{}");
    mb_free(text);
    json_decref(j);
}

static int verify_run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    const char *tmp = getenv("TMPDIR");
    char *scratch = mb_asprintf("%s/mobula-verify-XXXXXX", tmp ? tmp : "/tmp");
    struct outcome o = {0};
    struct verify_args args = {0};
    int n_words = 0, rc;
    char bytes[16];

    rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &o.err);
    if (rc == 1) {
        mb_free(scratch);
        return 0;
    }
    if (!rc && n_words != 1)
        rc = mb_err_set(&o.err, MB_EINVAL, "which checkpoint? mobula checkpoint verify URL");
    if (!rc && (!scratch || !mkdtemp(scratch)))
        rc = mb_err_sys(&o.err, errno, "making a scratch directory below %s", tmp ? tmp : "/tmp");
    if (!rc) {
        rc = verify(argv[1], scratch, &o);
        if (mb_fs_remove_tree(scratch, NULL) < 0)
            fprintf(stderr, "mobula: %s could not be removed\n", scratch);
        if (args.json)
            print_json(argv[1], &o);
        else if (!rc)
            printf("verified: iteration %" PRId64 " in %s, %" PRIu64 " files, %s\n",
                   o.result.iteration, argv[1], o.result.n_files,
                   mb_human_bytes(o.result.total_bytes, bytes));
    }
    mb_free(scratch);
    return rc ? mb_cli_fail(cli, &o.err) : 0;
}

static const struct mb_verb verb_verify = {
    .name = "verify",
    .summary = "read the newest checkpoint back from its store and check every file",
    .synopsis = "[--json] URL",
    .examples = "  mobula checkpoint verify s3://bucket/run1\n",
    .options = verify_options,
    .run = verify_run,
};

static const struct mb_verb *const subverbs[] = {&verb_verify, NULL};

const struct mb_verb mb_verb_checkpoint = {
    .name = "checkpoint",
    .summary = "look after checkpoints in a store",
    .synopsis = "verify URL",
    .examples = "  mobula checkpoint verify file:///ckpt/run1\n",
    .subverbs = subverbs,
};
