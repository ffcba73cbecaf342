/*
 * mobula status: nodes, resources and jobs of the cluster, from the head's GET /api/mobula/status.
 * One table for each; --json prints the head's answer as it is.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "base/str.h"
#include "cli/options.h"
#include "cli/rest.h"

struct status_args {
    const char *address;
    int json;
};

static const struct mb_option options[] = {
    {"address", 0, "URL", MB_OPTION_STRING, offsetof(struct status_args, address),
     "Jobs API of the head (http://127.0.0.1:8265)", 0, 0},
    {"json", 0, NULL, MB_OPTION_FLAG, offsetof(struct status_args, json), "print JSON", 0, 0},
    {0},
};

static const char *text(const json_t *j, const char *name)
{
    const char *s = json_string_value(json_object_get(j, name));

    return s != NULL ? s : "";
}

static void print_resources(const json_t *node)
{
    json_t *total = json_object_get(node, "resources_total"), *amount;
    json_t *free_now = json_object_get(node, "resources_available");
    const char *name;

    json_object_foreach(total, name, amount)
    {
        double all = json_number_value(amount);

        if (mb_starts_with(name, "mobula_"))
            printf("  %s %g/%g used", name + strlen("mobula_"),
                   all - json_number_value(json_object_get(free_now, name)), all);
    }
}

static void print_nodes(const json_t *nodes)
{
    size_t i, k;
    json_t *node, *gpu;

    printf("nodes: %zu\n", json_array_size(nodes));
    json_array_foreach(nodes, i, node)
    {
        printf("  %-6s %.12s  %-15s %-16s%s", text(node, "state"), text(node, "node_id"),
               text(node, "ip"), text(node, "node_name"),
               json_is_true(json_object_get(node, "is_head")) ? " head" : "");
        print_resources(node);
        putchar('\n');
        json_array_foreach(json_object_get(node, "gpu_quarantine"), k, gpu)
            printf("         quarantine: %s\n", text(gpu, "reason"));
    }
}

static void print_checkpoint(const json_t *gang)
{
    json_t *c = json_object_get(gang, "checkpoint");
    json_int_t saved = json_integer_value(json_object_get(c, "saved_iteration"));
    json_int_t durable = json_integer_value(json_object_get(c, "durable_iteration"));
    json_int_t total = json_integer_value(json_object_get(c, "total_bytes"));
    json_int_t uploading = json_integer_value(json_object_get(c, "uploading_bytes"));
    char a[16], b[16];

    if (!json_is_object(c) || (saved < 0 && durable < 0 && *text(c, "url") == '\0'))
        return; /* none was asked for */
    if (saved < 0 && durable < 0)
        printf("      checkpoint: none yet");
    else if (durable < 0)
        printf("      checkpoint: saved iteration %" JSON_INTEGER_FORMAT ", none durable yet",
               saved);
    else
        printf("      checkpoint: saved iteration %" JSON_INTEGER_FORMAT
               ", durable iteration %" JSON_INTEGER_FORMAT,
               saved, durable);
    if (*text(c, "url") != '\0')
        printf(" in %s", text(c, "url"));
    if (total > 0 && durable < saved)
        printf(", uploading %s of %s", mb_human_bytes((uint64_t)uploading, a),
               mb_human_bytes((uint64_t)total, b));
    putchar('\n');
}

static void print_gang(const json_t *gang)
{
    json_int_t iteration = json_integer_value(json_object_get(gang, "iteration"));
    double loss = json_number_value(json_object_get(gang, "loss"));
    double validation = json_number_value(json_object_get(gang, "validation_loss"));

    printf("      gang: %s, %" JSON_INTEGER_FORMAT " ranks on %" JSON_INTEGER_FORMAT
           " nodes, attempt %" JSON_INTEGER_FORMAT,
           text(gang, "state"), json_integer_value(json_object_get(gang, "world_size")),
           json_integer_value(json_object_get(gang, "num_nodes")),
           json_integer_value(json_object_get(gang, "attempt")));
    if (iteration > 0)
        printf(", iteration %" JSON_INTEGER_FORMAT "/%" JSON_INTEGER_FORMAT
               ", loss %.4f, %.0f tokens/s",
               iteration, json_integer_value(json_object_get(gang, "train_iters")), loss,
               json_number_value(json_object_get(gang, "tokens_per_s")));
    if (validation > 0)
        printf(", validation loss %.4f", validation);
    putchar('\n');
    print_checkpoint(gang);
}

static void print_jobs(const json_t *jobs)
{
    size_t i;
    json_t *job;

    printf("jobs: %zu\n", json_array_size(jobs));
    json_array_foreach(jobs, i, job)
    {
        const char *id = text(job, "submission_id");
        json_t *gang = json_object_get(job, "gang");

        printf("  %-9s %s  %s\n", text(job, "status"), *id != '\0' ? id : text(job, "job_id"),
               text(job, "entrypoint"));
        if (strcmp(text(job, "status"), "FAILED") == 0)
            printf("      %.*s\n", (int)strcspn(text(job, "message"), "\n"), text(job, "message"));
        if (json_is_object(gang) && *text(gang, "error") != '\0')
            printf("      cause: %s\n", text(gang, "error"));
        if (json_is_object(gang))
            print_gang(gang);
    }
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
    rc = mb_rest_json(&rest, "GET", "/api/mobula/status", NULL, &status, &err);
    mb_rest_close(&rest);
    if (rc == MB_ENOENT)
        mb_err_set(&err, rc, "this head is not mobula's own: use `mobula job list` there");
    if (rc != 0)
        return mb_cli_fail(cli, &err);
    if (args.json) {
        json_dumpf(status, stdout, JSON_INDENT(2));
        putchar('\n');
    } else {
        print_nodes(json_object_get(status, "nodes"));
        print_jobs(json_object_get(status, "jobs"));
    }
    json_decref(status);
    return 0;
}

const struct mb_verb mb_verb_status = {
    .name = "status",
    .summary = "show nodes, resources and jobs",
    .synopsis = "[--address URL] [--json]",
    .examples = "  mobula status\n  mobula status --address http://head:8265 --json\n",
    .options = options,
    .no_words = 1,
    .run = run,
};
