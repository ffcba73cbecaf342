/*
 * mobula health-check: is the GCS at an address alive? A handshake, nothing else. Exit status 0 if
 * it answers, 1 if not: probes of Kubernetes call it as `ray health-check`.
 */
#include <stdlib.h>
#include <string.h>
#include "cli/gcs_ask.h"
#include "cli/options.h"

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

static int run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct health_args args = {.timeout_ms = 5000};
    const char *from_env = getenv("RAY_ADDRESS");
    const char *address = "127.0.0.1:6379";
    struct mb_err err = {0};
    int n_words;
    int rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &err);

    if (rc != 0)
        return rc == 1 ? 0 : mb_cli_fail(cli, &err);
    if (args.address != NULL)
        address = args.address;
    else if (from_env != NULL && *from_env != '\0' && strcmp(from_env, "auto") != 0)
        address = from_env;
    if (mb_gcs_ask_alive(address, args.timeout_ms, &err) == 0)
        return 0;
    mb_cli_fail(cli, &err);
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
