/* mobula checkpoint ls URL: which iterations a store has, and which of them are whole. */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include "base/printable.h"
#include "agent/upload/inventory.h"
#include "base/alloc.h"
#include "base/str.h"
#include "cli/checkpoint.h"

struct ls_args {
    int json;
    uint64_t retry_for_ms;
};

static const struct mb_option ls_options[] = {
    {"retry-for", 0, "TIME", MB_OPTION_DURATION, offsetof(struct ls_args, retry_for_ms),
     "how long a store that does not answer is asked again; default 10s", 0, 0},
    {"json", 0, NULL, MB_OPTION_FLAG, offsetof(struct ls_args, json), "print JSON, errors too", 0,
     0},
    {0},
};

struct run {
    struct mb_checkpoint_loop l;
    struct mb_store *store;
    struct mb_err err;
    struct mb_inventory inv;
};

static void on_inventory(void *arg, const struct mb_err *err, struct mb_inventory *inv)
{
    struct run *r = arg;

    r->err = *err;
    r->inv = *inv;
    mb_checkpoint_loop_stop(&r->l);
    mb_store_close(r->store, NULL, NULL);
}

static int print_json(const char *url, const struct mb_inventory *inv, struct mb_err *err)
{
    json_t *list = json_array();
    json_t *j = json_pack("{s:s, s:o}", "url", url, "iterations", list);
    int failed = j == NULL ||
                 json_object_set_new(
                     j, "latest", inv->latest >= 0 ? json_integer(inv->latest) : json_null()) != 0;

    for (size_t i = 0; i < inv->n && !failed; i++) {
        const struct mb_inventory_iteration *it = &inv->iterations[i];

        failed = json_array_append_new(
                     list,
                     json_pack("{s:I, s:s, s:I, s:I, s:I, s:I, s:s*, s:I, s:b, s:s*}", "iteration",
                               (json_int_t)it->iteration, "state",
                               mb_inventory_state_name(it->state), "files", (json_int_t)it->n_files,
                               "bytes", (json_int_t)it->total_bytes, "stored_objects",
                               (json_int_t)it->n_keys, "stored_bytes", (json_int_t)it->stored_bytes,
                               "job", it->job_id, "attempt", (json_int_t)it->attempt, "latest",
                               it->iteration == inv->latest, "bad", it->bad)) != 0;
    }
    if (failed) { /* a list that lacks one would be taken for all */
        json_decref(j);
        return mb_err_set(
            err, MB_ENOMEM,
            "the list cannot be written as JSON: no memory, or a name that is no UTF-8");
    }
    return mb_checkpoint_print_json(j, JSON_INDENT(2), err);
}

static void print_table(const char *url, const struct mb_inventory *inv)
{
    struct mb_buf line = {0};
    char size[16];

    if (inv->n == 0)
        printf("no checkpoint in %s\n", url);
    else
        printf("%-18s %-11s %8s %10s  %s\n", "ITERATION", "STATE", "FILES", "SIZE", "JOB");
    for (size_t i = 0; i < inv->n; i++) {
        const struct mb_inventory_iteration *it = &inv->iterations[i];
        int is_unfinished = it->state == MB_INVENTORY_UNFINISHED;

        mb_buf_reset(&line);
        if (it->job_id)
            mb_printable(it->job_id, &line);
        if (it->job_id && it->attempt > 1)
            mb_buf_printf(&line, ", attempt %u", it->attempt);
        if (it->is_claimed)
            mb_buf_puts(&line, ", is writing it or was");
        if (it->bad) {
            mb_buf_puts(&line, line.len > 0 ? ": " : "");
            mb_printable(it->bad, &line);
            if (it->n_bad > 1)
                mb_buf_printf(&line, ", and %zu more", it->n_bad - 1);
        }
        printf("%-9" PRId64 "%-9s %-11s %8zu %10s  %s\n", it->iteration,
               it->iteration == inv->latest ? " latest" : "", mb_inventory_state_name(it->state),
               is_unfinished ? it->n_keys : it->n_files,
               mb_human_bytes(is_unfinished ? it->stored_bytes : it->total_bytes, size),
               mb_buf_str(&line));
    }
    if (inv->latest == -2)
        printf("the pointer " MB_LATEST_KEY " is damaged\n");
    else if (inv->latest == -1 && inv->n > 0)
        printf("there is no pointer: no reader takes any of these by itself\n");
    else if (inv->latest >= 0 && !mb_inventory_find(inv, inv->latest))
        printf("the pointer names iteration %" PRId64 ", which is not there\n", inv->latest);
    mb_buf_close(&line);
}

static void cancel(void *arg)
{
    mb_store_close(((struct run *)arg)->store, NULL, NULL);
}

static void no_facts(void *arg, struct mb_transfer_facts *out)
{
    (void)arg;
    out->verb = "ls";
    out->phase = "listing";
}

int mb_checkpoint_inventory(const char *url, uint64_t retry_for_ms, struct mb_inventory *out,
                            struct mb_err *err)
{
    struct run r = {0};
    int rc = mb_checkpoint_loop_init(&r.l, 0, &r.err);

    r.l.view.is_terminal = 0;
    if (rc == 0) {
        rc = mb_store_open(&r.l.loop, url, &r.store, &r.err);
        if (rc == 0) {
            mb_store_set_outage(r.store, retry_for_ms);
            rc = mb_inventory_start(r.store, on_inventory, &r, &r.err);
            if (rc != 0)
                mb_store_close(r.store, NULL, NULL);
        }
        mb_checkpoint_loop_run(&r.l, rc == 0 ? no_facts : NULL, cancel, &r);
    }
    *out = r.inv;
    *err = r.err;
    return err->code;
}

static int ls_run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct ls_args args = {.retry_for_ms = MB_CHECKPOINT_ASK_FOR_MS};
    struct mb_inventory inv = {0};
    struct mb_err err = {0};
    int n_words = 0, rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &err);

    if (rc == 1)
        return 0;
    if (!rc && n_words != 1)
        rc = mb_err_set(&err, MB_EINVAL, "which store? mobula checkpoint ls URL");
    if (args.retry_for_ms == 0) /* as push has it */
        args.retry_for_ms = MB_CHECKPOINT_ASK_FOR_MS;
    if (!rc && args.json)
        rc = mb_checkpoint_json_name(argv[1], &err);
    if (!rc)
        rc = mb_checkpoint_inventory(argv[1], args.retry_for_ms, &inv, &err);
    if (!rc && args.json)
        rc = print_json(argv[1], &inv, &err);
    else if (!rc)
        print_table(argv[1], &inv);
    mb_inventory_close(&inv);
    return rc ? mb_checkpoint_fail(cli, args.json, &err) : 0;
}

const struct mb_verb mb_verb_checkpoint_ls = {
    .name = "ls",
    .summary = "which iterations a store has, and which of them are whole",
    .synopsis = "[--retry-for TIME] [--json] URL",
    .examples = "  mobula checkpoint ls s3://bucket/run1\n",
    .options = ls_options,
    .run = ls_run,
};
