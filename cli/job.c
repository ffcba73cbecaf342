/* mobula job: what `ray job` does, over the same REST API, with exit statuses that tell the truth.
 */
#include "cli/job.h"

#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/printable.h"
#include "cli/status_view.h"

enum { STATUS_FAILED = 1, STATUS_STOPPED = 130, POLL_MS = 200, LOST_MS = 300 * 1000 };

/* ---- shared ---- */

const char *mb_job_text(const json_t *job, const char *name)
{
    const char *s = json_string_value(json_object_get(job, name));

    return s != NULL ? s : "";
}

int mb_job_is_terminal(const json_t *job)
{
    const char *status = mb_job_text(job, "status");

    return strcmp(status, "SUCCEEDED") == 0 || strcmp(status, "FAILED") == 0 ||
           strcmp(status, "STOPPED") == 0;
}

int mb_job_exit_status(const struct mb_cli *cli, const json_t *job)
{
    const char *status = mb_job_text(job, "status");

    if (strcmp(status, "SUCCEEDED") == 0)
        return 0;
    if (strcmp(status, "STOPPED") == 0)
        return cli->ray_mode ? 0 : STATUS_STOPPED;
    return STATUS_FAILED;
}

void mb_job_print_end(const char *id, const json_t *job)
{
    const char *status = mb_job_text(job, "status");

    if (strcmp(status, "SUCCEEDED") == 0) {
        mb_printable_say(stdout, "\nJob '", id, "' succeeded\n");
    } else if (strcmp(status, "STOPPED") == 0) {
        mb_printable_say(stdout, "\nJob '", id, "' was stopped\n");
    } else {
        mb_printable_say(stdout, "\nJob '", id, "' failed: ");
        mb_printable_say(stdout, "", mb_job_text(job, "message"), "\n");
    }
    fflush(stdout);
}

void mb_job_print_json(const json_t *j)
{
    mb_printable_json(j, JSON_INDENT(2), stdout);
    putchar('\n');
}

void mb_job_say_source(const json_t *answer, int64_t rank)
{
    char whose[40] = "this log", before[120], after[120];

    if (mb_job_text(answer, "source")[0] == '\0')
        return;
    if (rank >= 0)
        snprintf(whose, sizeof(whose), "the log of rank %" PRId64, rank);
    snprintf(before, sizeof(before),
             "mobula: the node of %s does not have it any more: it is read from ", whose);
    snprintf(after, sizeof(after),
             ", which has it up to byte %" JSON_INTEGER_FORMAT
             "; what was written after that is lost\n",
             json_integer_value(json_object_get(answer, "complete_to")));
    mb_printable_say(stderr, before, mb_job_text(answer, "source"), after);
}

char *mb_job_path(const char *id, const char *suffix)
{
    struct mb_buf b = {0};

    if (mb_buf_puts(&b, "/api/jobs/") == 0 && mb_buf_url(&b, id, 0) == 0 &&
        mb_buf_puts(&b, suffix) == 0)
        return mb_buf_take(&b);
    mb_buf_close(&b);
    return NULL;
}

static int call(struct mb_rest *rest, const char *method, const char *id, const char *suffix,
                json_t **out, struct mb_err *err)
{
    char *path = mb_job_path(id, suffix);
    int rc = path != NULL ? mb_rest_json(rest, method, path, NULL, out, err)
                          : mb_err_set(err, MB_ENOMEM, "out of memory");

    mb_free(path);
    return rc;
}

int mb_job_get(struct mb_rest *rest, const char *id, json_t **out, struct mb_err *err)
{
    return call(rest, "GET", id, "", out, err);
}

/* ---- subverbs: parse, open, act, close ---- */

struct job_args {
    struct mb_job_common common;
    int no_wait;
};

typedef int (*act_fn)(struct mb_cli *cli, struct mb_rest *rest, const struct job_args *args,
                      const char *id, int *status, struct mb_err *err);

/* id: the one word that the verb takes; NULL when it takes none. */
static int run_with(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv,
                    act_fn act)
{
    struct job_args args = {.no_wait = 0};
    struct mb_rest rest;
    struct mb_err err;
    int n_words, status = 0;
    int rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &err);

    if (rc == 1)
        return 0;
    if (rc == 0 && !verb->no_words && n_words != 1)
        rc = mb_err_set(&err, MB_EINVAL, "job %s: expected one submission id", verb->name);
    if (rc == 0)
        rc = mb_rest_open(&rest, cli, args.common.address, &err);
    if (rc != 0)
        return mb_cli_fail(cli, &err);
    rc = act(cli, &rest, &args, verb->no_words ? NULL : argv[1], &status, &err);
    mb_rest_close(&rest);
    return rc != 0 ? mb_cli_fail(cli, &err) : mb_cli_printed(cli, status);
}

/* What somebody else wrote has no power over the terminal and is one line, of bearable length. */
static void print_row(const char *status, const char *id, const char *entrypoint)
{
    size_t n = strlen(entrypoint);
    char *head = mb_strndup(entrypoint, n < MB_ENTRYPOINT_SHOWN_MAX ? n : MB_ENTRYPOINT_SHOWN_MAX);
    struct mb_buf name = {0}, line = {0};

    if (head == NULL || mb_printable(id, &name) != 0 || mb_printable(head, &line) != 0)
        printf("%-10s %-28s (out of memory)\n", status, "");
    else
        printf("%-10s %-28s %s%s\n", status, mb_buf_str(&name), mb_buf_str(&line),
               n > MB_ENTRYPOINT_SHOWN_MAX ? "..." : "");
    mb_free(head);
    mb_buf_close(&name);
    mb_buf_close(&line);
}

static int act_list(struct mb_cli *cli, struct mb_rest *rest, const struct job_args *args,
                    const char *id, int *status, struct mb_err *err)
{
    json_t *jobs, *job;
    size_t i;
    int rc = mb_rest_json(rest, "GET", "/api/jobs/", NULL, &jobs, err);

    (void)cli;
    (void)id;
    (void)status;
    if (rc != 0)
        return rc;
    if (args->common.json) {
        mb_job_print_json(jobs);
    } else {
        printf("%-10s %-28s %s\n", "STATUS", "SUBMISSION ID", "ENTRYPOINT");
        json_array_foreach(jobs, i, job)
        {
            const char *submission = mb_job_text(job, "submission_id");

            print_row(mb_job_text(job, "status"),
                      *submission != '\0' ? submission : mb_job_text(job, "job_id"),
                      mb_job_text(job, "entrypoint"));
        }
    }
    json_decref(jobs);
    return 0;
}

/* How the driver and each rank of the newest attempt ended, as far as anybody knows: the record of
 * the gang is part of the cluster's status. Real Ray has none. */
static void add_exits(struct mb_rest *rest, const char *id, json_t *job)
{
    json_t *all = NULL, *one;
    struct mb_err err;
    size_t i;

    if (mb_rest_json(rest, "GET", "/api/mobula/status", NULL, &all, &err) != 0)
        return;
    json_array_foreach(json_object_get(all, "jobs"), i, one)
    {
        json_t *exits = json_object_get(json_object_get(one, "gang"), "exits");

        if (strcmp(mb_job_text(one, "submission_id"), id) == 0 && exits != NULL)
            json_object_set(job, "rank_exits", exits);
    }
    json_decref(all);
}

static void print_exit(const char *who, json_int_t code, json_int_t signal, const char *cause)
{
    if (signal != 0)
        printf("%s: signal %" JSON_INTEGER_FORMAT " (%s)", who, signal, strsignal((int)signal));
    else
        printf("%s: exit code %" JSON_INTEGER_FORMAT, who, code);
    mb_printable_say(stdout, *cause != '\0' ? ", " : "", cause, "\n");
}

static void print_exits(const json_t *job)
{
    const json_t *driver = json_object_get(job, "driver_exit_code"), *x;
    json_int_t code = json_integer_value(driver);
    size_t i;

    if (json_is_integer(driver)) /* negative: the signal */
        print_exit("driver", code, code < 0 ? -code : 0, "");
    json_array_foreach(json_object_get(job, "rank_exits"), i, x)
    {
        char who[32];

        snprintf(who, sizeof(who), "rank %" JSON_INTEGER_FORMAT,
                 json_integer_value(json_object_get(x, "rank")));
        print_exit(who, json_integer_value(json_object_get(x, "exit_code")),
                   json_integer_value(json_object_get(x, "signal")), mb_job_text(x, "cause"));
    }
}

static int act_status(struct mb_cli *cli, struct mb_rest *rest, const struct job_args *args,
                      const char *id, int *status, struct mb_err *err)
{
    json_t *job;
    int rc = mb_job_get(rest, id, &job, err);

    (void)status; /* it exists: 0, also when it failed, as KubeRay expects */
    if (rc != 0)
        return rc;
    if (!cli->ray_mode)
        add_exits(rest, id, job);
    if (args->common.json) {
        mb_job_print_json(job);
    } else if (mb_job_is_terminal(job)) {
        mb_job_print_end(id, job);
        if (!cli->ray_mode)
            print_exits(job);
    } else {
        mb_printable_say(stdout, "Status for job '", id, "': ");
        mb_printable_say(stdout, "", mb_job_text(job, "status"), "\n");
        mb_printable_say(stdout, "Status message: ", mb_job_text(job, "message"), "\n");
    }
    json_decref(job);
    return 0;
}

/* Until it has ended. The stop goes on while its head restarts, or another one takes over: that is
 * waited for, up to LOST_MS without an answer. */
static int wait_for_end(struct mb_rest *rest, const char *id, json_t **job, struct mb_err *err)
{
    uint64_t heard_ms = mb_mono_ms();

    for (;;) {
        int rc = mb_job_get(rest, id, job, err);

        if (rc == 0 && mb_job_is_terminal(*job))
            return 0;
        if (rc == 0) {
            json_decref(*job);
            heard_ms = mb_mono_ms();
        } else if (rc == MB_ENOENT || rc == MB_EDENIED || mb_mono_ms() - heard_ms > LOST_MS) {
            return rc;
        }
        poll(NULL, 0, POLL_MS); /* the head's stop grace bounds this */
    }
}

static int act_stop(struct mb_cli *cli, struct mb_rest *rest, const struct job_args *args,
                    const char *id, int *status, struct mb_err *err)
{
    json_t *answer, *job = NULL;
    int rc = call(rest, "POST", id, "/stop", &answer, err);

    (void)cli;
    (void)status;
    if (rc != 0)
        return rc;
    if (args->no_wait && args->common.json)
        mb_job_print_json(answer);
    else if (args->no_wait)
        printf("Attempting to stop job '%s'\n", id);
    json_decref(answer);
    if (args->no_wait)
        return 0;
    rc = wait_for_end(rest, id, &job, err);
    if (rc != 0)
        return rc;
    if (args->common.json)
        mb_job_print_json(job);
    else
        mb_job_print_end(id, job);
    json_decref(job);
    return 0;
}

static int act_delete(struct mb_cli *cli, struct mb_rest *rest, const struct job_args *args,
                      const char *id, int *status, struct mb_err *err)
{
    json_t *answer;
    int rc = call(rest, "DELETE", id, "", &answer, err);

    (void)cli;
    (void)status;
    if (rc != 0)
        return rc;
    if (args->common.json)
        mb_job_print_json(answer);
    else
        printf("Job '%s' deleted successfully\n", id);
    json_decref(answer);
    return 0;
}

#define SUBVERB_RUN(name_)                                                                         \
    static int run_##name_(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)  \
    {                                                                                              \
        return run_with(cli, verb, argc, argv, act_##name_);                                       \
    }

SUBVERB_RUN(list)
SUBVERB_RUN(status)
SUBVERB_RUN(stop)
SUBVERB_RUN(delete)

static const struct mb_option plain_options[] = {MB_JOB_COMMON_OPTIONS(struct job_args), {0}};
static const struct mb_option stop_options[] = {
    MB_JOB_COMMON_OPTIONS(struct job_args),
    MB_JOB_OPTION("no-wait", 0, NULL, MB_OPTION_FLAG, struct job_args, no_wait,
                  "return at once, the job may still be saving"),
    {0}};

static const struct mb_verb verb_list = {.name = "list",
                                         .summary = "list the jobs",
                                         .synopsis = "[--json]",
                                         .examples = "  mobula job list\n",
                                         .options = plain_options,
                                         .no_words = 1,
                                         .run = run_list};
static const struct mb_verb verb_job_status = {.name = "status",
                                               .summary = "show the state of a job",
                                               .synopsis = "[--json] ID",
                                               .examples = "  mobula job status raysubmit_x\n",
                                               .options = plain_options,
                                               .run = run_status};
static const struct mb_verb verb_job_stop = {.name = "stop",
                                             .summary = "end a job; it may save first",
                                             .synopsis = "[--no-wait] [--json] ID",
                                             .examples = "  mobula job stop raysubmit_x\n",
                                             .options = stop_options,
                                             .run = run_stop};
static const struct mb_verb verb_delete = {.name = "delete",
                                           .summary = "forget a job that has ended",
                                           .synopsis = "[--json] ID",
                                           .examples = "  mobula job delete raysubmit_x\n",
                                           .options = plain_options,
                                           .run = run_delete};

static const struct mb_verb *const subverbs[] = {
    &mb_verb_job_submit, &verb_list, &verb_job_status, &mb_verb_job_logs, &verb_job_stop,
    &verb_delete,        NULL};

const struct mb_verb mb_verb_job = {
    .name = "job",
    .summary = "submit jobs and look after them",
    .synopsis = "VERB [OPTIONS]",
    .examples = "  mobula job submit -- mobula train --num-nodes 2 ...\n  mobula job list\n",
    .subverbs = subverbs,
};
