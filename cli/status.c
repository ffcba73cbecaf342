/*
 * mobula status: nodes, resources, gangs that wait and jobs of the cluster, from the head's GET
 * /api/mobula/status. --json prints the head's answer as it is; --watch goes on (status_watch.h).
 */
#include <stdio.h>
#include <string.h>
#include "base/printable.h"
#include "cli/options.h"
#include "cli/rest.h"
#include "cli/status_view.h"
#include "cli/status_watch.h"

struct status_args {
    const char *address;
    int json, watch;
};

static const struct mb_option options[] = {
    {"address", 0, "URL", MB_OPTION_STRING, offsetof(struct status_args, address),
     "Jobs API of the head (http://127.0.0.1:8265)", 0, 0},
    {"json", 0, NULL, MB_OPTION_FLAG, offsetof(struct status_args, json), "print JSON, errors too",
     0, 0},
    {"watch", 'w', NULL, MB_OPTION_FLAG, offsetof(struct status_args, watch),
     "redraw every second; on a pipe: a block, with --json a line, per change", 0, 0},
    {0},
};

static int fetch(struct mb_rest *rest, json_t **out, struct mb_err *err)
{
    int rc = mb_rest_json(rest, "GET", "/api/mobula/status", NULL, out, err);

    if (rc == MB_ENOENT)
        mb_err_set(err, rc, "this head is not mobula's own: use `mobula job list` there");
    return rc;
}

static int print_once(const json_t *status, int json, struct mb_err *err)
{
    struct mb_buf text = {0};
    int rc = 0;

    if (json) {
        mb_printable_json(status, JSON_INDENT(2), stdout);
        putchar('\n');
        return 0;
    }
    rc = mb_status_view(status, 0, &text);
    if (rc == 0)
        fputs(mb_buf_str(&text), stdout);
    mb_buf_close(&text);
    return rc == 0 ? 0 : mb_err_set(err, rc, "out of memory");
}

static int run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct status_args args = {0};
    struct mb_rest rest;
    struct mb_err err;
    json_t *status = NULL;
    int n_words, rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &err);

    if (rc == 1)
        return 0;
    if (rc == 0)
        rc = mb_rest_open(&rest, cli, args.address, &err);
    if (rc != 0)
        return mb_cli_fail(cli, &err);
    if (args.watch) {
        rc = mb_status_watch(&rest, fetch, args.json, &err);
    } else {
        rc = fetch(&rest, &status, &err);
        if (rc == 0)
            rc = print_once(status, args.json, &err);
        json_decref(status);
    }
    mb_rest_close(&rest);
    return rc != 0 ? mb_cli_fail(cli, &err) : mb_cli_printed(cli, 0);
}

const struct mb_verb mb_verb_status = {
    .name = "status",
    .summary = "show nodes, resources, gangs that wait and jobs",
    .synopsis = "[--address URL] [--watch] [--json]",
    .examples = "  mobula status\n  mobula status --watch\n"
                "  mobula status --address http://head:8265 --json\n",
    .options = options,
    .no_words = 1,
    .run = run,
};
