/*
 * mobula stop: ends every node that was started here (below the temporary directory), together with
 * the jobs and ranks on it. All are asked first, then waited for one by one; logs are kept, the
 * password of a store is not.
 */
#include <errno.h>
#include <stdio.h>
#include <unistd.h>
#include <jansson.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/printable.h"
#include "cli/local.h"
#include "cli/options.h"

struct stop_args {
    const char *temp_dir;
    uint64_t grace_ms;
    int force, json;
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
    {"json", 0, NULL, MB_OPTION_FLAG, offsetof(struct stop_args, json), "print JSON, errors too", 0,
     0},
    {0},
};

/* {"ok", "nodes": [{"dir", "stopped", "error"}], "killed_processes": N} */
static void print_json(json_t *list, size_t n_orphans, int status)
{
    json_t *o = json_pack("{s:b, s:O, s:I}", "ok", status == 0, "nodes", list, "killed_processes",
                          (json_int_t)n_orphans);

    mb_printable_json(o, JSON_INDENT(2), stdout);
    putchar('\n');
    json_decref(o);
}

static void print_rest(const struct stop_args *args, size_t n, size_t n_orphans)
{
    if (n_orphans > 0)
        printf("killed %zu processes that nobody owned any more\n", n_orphans);
    if (n == 0 && n_orphans == 0)
        printf("nothing runs below %s\n", mb_local_temp_dir(args->temp_dir));
}

static int run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    /* mobula-init hears of it with the signal and uses it up but for an eighth. */
    struct stop_args args = {.grace_ms = 70 * 1000};
    struct mb_local_node *nodes;
    struct mb_err err;
    size_t n, n_orphans = 0;
    json_t *list;
    int n_words, status = 0;
    int rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &err);

    if (rc == 1)
        return 0;
    if (rc == 0)
        rc = mb_local_nodes(mb_local_temp_dir(args.temp_dir), &nodes, &n, &err);
    if (rc != 0)
        return mb_cli_fail(cli, &err);
    list = json_array();
    for (size_t i = 0; i < n; i++) {
        if (mb_local_ask_to_end(&nodes[i], args.force ? 0 : args.grace_ms, &err) != 0)
            status = mb_cli_fail(cli, &err);
    }
    for (size_t i = 0; i < n; i++) {
        rc = mb_local_wait_end(&nodes[i], args.force ? 0 : args.grace_ms, &err);
        int stopped = rc == 0 || (rc == MB_ETIMEOUT && args.force);
        if (!stopped)
            status = mb_cli_fail(cli, &err);
        else if (!args.json)
            printf("stopped %s\n", nodes[i].dir);
        json_array_append_new(list, json_pack("{s:s, s:b, s:s}", "dir", nodes[i].dir, "stopped",
                                              stopped, "error", stopped ? "" : err.text));
    }
    if (mb_local_end_orphans(mb_local_temp_dir(args.temp_dir), &n_orphans, &err) != 0)
        status = mb_cli_fail(cli, &err);
    if (args.json)
        print_json(list, n_orphans, status);
    else
        print_rest(&args, n, n_orphans);
    json_decref(list);
    mb_local_nodes_free(nodes, n);
    return mb_cli_printed(cli, status);
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
