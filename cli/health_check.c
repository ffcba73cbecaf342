/*
 * mobula health-check: is the GCS at an address alive? A handshake, nothing else. Exit status 0 if
 * it answers, 1 if not: probes of Kubernetes call it as `ray health-check`.
 */
#include <stdlib.h>
#include <string.h>
#include <uv.h>
#include "base/alloc.h"
#include "base/grpc/grpc.h"
#include "cli/options.h"
#include "gcs/client.h"
#include "gcs/token.h"

enum { STATUS_NOT_ALIVE = 1 };

struct health_args {
    const char *address, *component;
    uint64_t timeout_ms;
    int skip_version_check;
};

static const struct mb_option options[] = {
    {"address", 0, "HOST:PORT", MB_OPTION_STRING, offsetof(struct health_args, address),
     "of the GCS (RAY_ADDRESS, 127.0.0.1:6379)", 0, 0},
    {"timeout", 0, "TIME", MB_OPTION_DURATION, offsetof(struct health_args, timeout_ms),
     "to wait for an answer (5s)", 0, 0},
    {"component", 0, "NAME", MB_OPTION_STRING, offsetof(struct health_args, component), NULL, 0, 0},
    {"skip-version-check", 0, NULL, MB_OPTION_FLAG,
     offsetof(struct health_args, skip_version_check), NULL, 0, 0},
    {0},
};

struct verdict {
    int alive, done;
    struct mb_err err;
};

static void on_event(void *arg, struct mb_gcs *c, enum mb_gcs_event event, const struct mb_err *err)
{
    struct verdict *v = arg;

    (void)c;
    v->done |= event == MB_GCS_CONNECTED || event == MB_GCS_CONNECT_FAILED;
    v->alive |= event == MB_GCS_CONNECTED;
    if (event == MB_GCS_CONNECT_FAILED)
        v->err = *err;
}

static void on_closed(void *arg)
{
    *(int *)arg = 1;
}

static void ask(uv_loop_t *loop, struct mb_grpc *grpc, const struct mb_gcs_opts *opts,
                struct verdict *v)
{
    struct mb_gcs *gcs;
    int closed = 0;

    if (mb_gcs_create(loop, grpc, opts, on_event, v, &gcs, &v->err) != 0)
        return;
    if (mb_gcs_connect(gcs, &v->err) == 0) {
        while (!v->done)
            uv_run(loop, UV_RUN_ONCE);
    }
    mb_gcs_close(gcs, on_closed, &closed);
    while (!closed)
        uv_run(loop, UV_RUN_ONCE);
}

static int run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct health_args args = {.timeout_ms = 5000};
    const char *from_env = getenv("RAY_ADDRESS");
    struct mb_gcs_opts opts = {.address = "127.0.0.1:6379"};
    struct verdict v = {0};
    char *token = NULL;
    struct mb_grpc *grpc;
    uv_loop_t loop;
    int n_words, closed = 0;
    int rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &v.err);

    if (rc != 0)
        return rc == 1 ? 0 : mb_cli_fail(cli, &v.err);
    if (args.address != NULL)
        opts.address = args.address;
    else if (from_env != NULL && *from_env != '\0' && strcmp(from_env, "auto") != 0)
        opts.address = from_env;
    opts.connect_timeout_ms = args.timeout_ms;
    if (mb_token_load(NULL, &token, &v.err) != 0)
        return mb_cli_fail(cli, &v.err);
    opts.token = token;
    uv_loop_init(&loop);
    if (mb_grpc_create(&loop, &grpc, &v.err) == 0) {
        ask(&loop, grpc, &opts, &v);
        mb_grpc_stop(grpc, on_closed, &closed);
        while (!closed)
            uv_run(&loop, UV_RUN_ONCE);
        mb_grpc_destroy(grpc);
    }
    uv_loop_close(&loop);
    mb_free(token);
    if (v.alive)
        return 0;
    mb_cli_fail(cli, &v.err);
    return STATUS_NOT_ALIVE;
}

const struct mb_verb mb_verb_health_check = {
    .name = "health-check",
    .summary = "exit 0 if the GCS answers, 1 if not",
    .synopsis = "[--address HOST:PORT] [--timeout TIME]",
    .examples = "  mobula health-check --address head:6379 && echo alive\n",
    .options = options,
    .no_words = 1,
    .run = run,
};
