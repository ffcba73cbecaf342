/* mobula version: what is installed here. */
#include <stdio.h>
#include "cli/options.h"

struct version_args {
    int json;
};

static const struct mb_option options[] = {
    {"json", 0, NULL, MB_OPTION_FLAG, offsetof(struct version_args, json), "print JSON, errors too",
     0, 0},
    {0},
};

static int run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct version_args args = {0};
    struct mb_err err;
    int n_words, rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &err);

    if (rc != 0)
        return rc == 1 ? 0 : mb_cli_fail(cli, &err);
    if (args.json)
        puts("{\"version\": \"" MOBULA_VERSION "\", \"ray_protocol\": \"2.60\"}");
    else
        puts("mobula " MOBULA_VERSION " (speaks the protocol of Ray 2.60)");
    return mb_cli_printed(cli, 0);
}

const struct mb_verb mb_verb_version = {
    .name = "version",
    .summary = "print the version",
    .synopsis = "[--json]",
    .examples = "  mobula version\n",
    .options = options,
    .no_words = 1,
    .run = run,
};
