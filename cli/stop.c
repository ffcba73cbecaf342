/*
 * mobula stop: ends every node that was started here (below the temporary directory), together with
 * the jobs and ranks on it. All are asked first, then waited for one by one; logs are kept, the
 * password of a store is not.
 */
#include <errno.h>
#include <stdio.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "cli/local.h"
#include "cli/options.h"

struct stop_args {
    const char *temp_dir;
    uint64_t grace_ms;
    int force;
};

static const struct mb_option options[] = {
    {"temp-dir", 0, "DIR", MB_OPTION_STRING, offsetof(struct stop_args, temp_dir),
     "where the nodes were started (MOBULA_TEMP_DIR, /tmp/mobula)", 0, 0},
    {"grace", 0, "TIME", MB_OPTION_DURATION, offsetof(struct stop_args, grace_ms),
     "for saving and uploading before the rest is killed (70s)", 0, 0},
    {"grace-period", 'g', "TIME", MB_OPTION_DURATION, offsetof(struct stop_args, grace_ms), NULL, 0,
     0},
    {"force", 'f', NULL, MB_OPTION_FLAG, offsetof(struct stop_args, force),
     "no grace: kill everything now", 0, 0},
    {0},
};

static int run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    /* mobula-init hears of it with the signal and uses it up but for an eighth. */
    struct stop_args args = {.grace_ms = 70 * 1000};
    struct mb_local_node *nodes;
    struct mb_err err;
    size_t n, n_orphans = 0;
    int n_words, status = 0;
    int rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &err);

    if (rc == 1)
        return 0;
    if (rc == 0)
        rc = mb_local_nodes(mb_local_temp_dir(args.temp_dir), &nodes, &n, &err);
    if (rc != 0)
        return mb_cli_fail(cli, &err);
    for (size_t i = 0; i < n; i++) {
        if (mb_local_ask_to_end(&nodes[i], args.force ? 0 : args.grace_ms, &err) != 0)
            status = mb_cli_fail(cli, &err);
    }
    for (size_t i = 0; i < n; i++) {
        rc = mb_local_wait_end(&nodes[i], args.force ? 0 : args.grace_ms, &err);
        if (rc == 0 || (rc == MB_ETIMEOUT && args.force))
            printf("stopped %s\n", nodes[i].dir);
        else
            status = mb_cli_fail(cli, &err);
    }
    if (mb_local_end_orphans(mb_local_temp_dir(args.temp_dir), &n_orphans, &err) != 0)
        status = mb_cli_fail(cli, &err);
    if (n_orphans > 0)
        printf("killed %zu processes that nobody owned any more\n", n_orphans);
    if (n == 0 && n_orphans == 0)
        printf("nothing runs below %s\n", mb_local_temp_dir(args.temp_dir));
    mb_local_nodes_free(nodes, n);
    return status;
}

const struct mb_verb mb_verb_stop = {
    .name = "stop",
    .summary = "end the nodes that were started on this machine",
    .synopsis = "[--temp-dir DIR] [--grace TIME] [--force]",
    .examples = "  mobula stop\n  mobula stop --grace 5m     # let a large checkpoint finish\n",
    .options = options,
    .no_words = 1,
    .run = run,
};
