/*
 * mobula job logs: a driver's log, a rank's, or all ranks' as one; from any place in it, with -f
 * until the job ends.
 *
 *  1. --since becomes a time; --grep is compiled before anything is asked;
 *  2. a head that knows no offsets (Ray's): its whole log at once, or its own stream with -f;
 *  3. --merge of a job without ranks: its own log.
 *  4. -f: the exit status is the job's. Without: 0 when the log was shown to its end.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/str.h"
#include "cli/job.h"

struct logs_args {
    struct mb_job_common common;
    const char *grep, *since;
    int64_t rank, attempt, tail;
    int follow, merge;
};

/* 10m, 30s: before now; or a moment: 2026-11-21T08:00:00, with Z in UTC. */
static int parse_since(const char *text, uint64_t *out, struct mb_err *err)
{
    struct mb_err ignored;
    uint64_t ago_ms;
    struct tm tm = {.tm_isdst = -1};
    const char *end;
    time_t t;

    if (mb_parse_duration_ms(text, "--since", &ago_ms, &ignored) == 0) {
        uint64_t now_ms = mb_unix_ms();

        *out = ago_ms < now_ms ? now_ms - ago_ms : 1;
        return 0;
    }
    end = strptime(text, "%Y-%m-%dT%H:%M:%S", &tm);
    if (end == NULL || (*end != '\0' && strcmp(end, "Z") != 0))
        return mb_err_set(err, MB_EINVAL, "--since %s: expected 10m, 30s or 2026-11-21T08:00:00[Z]",
                          text);
    t = *end == 'Z' ? timegm(&tm) : mktime(&tm);
    *out = t > 0 ? (uint64_t)t * 1000 : 1;
    return 0;
}

/* 1: the head knows offsets; 0: it does not, and *whole is what it has (NULL when following). */
static int knows_offsets(struct mb_rest *rest, const char *id, json_t **whole, struct mb_err *err)
{
    char *path = mb_job_path(id, "/logs?limit=0");
    int rc = path != NULL ? mb_rest_json(rest, "GET", path, NULL, whole, err)
                          : mb_err_set(err, MB_ENOMEM, "out of memory");

    mb_free(path);
    return rc != 0 ? rc : json_object_get(*whole, "next_offset") != NULL;
}

static int show(struct mb_rest *rest, const char *id, const struct logs_args *args,
                struct mb_log_view *view, json_t **job, struct mb_err *err)
{
    struct mb_log_lines lines = {.view = view, .rank = args->rank};
    struct mb_follow_opts opts = {.lines = &lines,
                                  .rank = args->rank,
                                  .attempt = args->attempt,
                                  .tail_lines = args->tail,
                                  .has_start = args->tail >= 0 || args->since != NULL,
                                  .once = !args->follow};
    json_t *whole = NULL;
    int rc = args->since != NULL ? parse_since(args->since, &opts.since_unix_ms, err) : 0;

    view->json = args->common.json;
    view->tag_ranks = args->merge;
    if (rc == 0 && args->merge) {
        rc = mb_job_merge(rest, id, &opts, job, err);
        if (rc <= 0)
            return rc;
        fprintf(stderr, "mobula: job %s has no ranks: this is its own log\n", id);
        view->tag_ranks = 0;
        rc = 0;
    }
    if (rc == 0 && !args->follow) {
        rc = knows_offsets(rest, id, &whole, err);
        if (rc == 0) {
            const json_t *text = json_object_get(whole, "logs");

            rc = mb_log_lines_add(&lines, json_string_value(text), json_string_length(text), err);
            rc = rc != 0 ? rc : mb_log_lines_end(&lines, err);
            json_decref(whole);
            return rc;
        }
        json_decref(whole);
    }
    return rc < 0 ? rc : mb_job_follow(rest, id, &opts, job, err);
}

static int run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct logs_args args = {.rank = -1, .tail = -1};
    struct mb_log_view view = {0};
    struct mb_rest rest;
    struct mb_err err;
    json_t *job = NULL;
    int n_words, status = 0;
    int rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &err);

    if (rc == 1)
        return 0;
    if (rc == 0 && n_words != 1)
        rc = mb_err_set(&err, MB_EINVAL, "job logs: expected one submission id");
    if (rc == 0 && args.merge && args.rank >= 0)
        rc = mb_err_set(&err, MB_EINVAL, "job logs: --merge shows all ranks, --rank one");
    if (rc == 0 && args.attempt > 0 && !args.merge && args.rank < 0)
        rc = mb_err_set(&err, MB_EINVAL, "job logs: --attempt goes with --rank or --merge");
    if (rc == 0)
        rc = mb_log_view_init(&view, args.grep, &err);
    if (rc == 0)
        rc = mb_rest_open(&rest, cli, args.common.address, &err);
    if (rc != 0) {
        mb_log_view_close(&view);
        return mb_cli_fail(cli, &err);
    }
    rc = show(&rest, argv[1], &args, &view, &job, &err);
    if (rc == 0 && args.follow && job != NULL) {
        if (!args.common.json)
            mb_job_print_end(argv[1], job);
        status = cli->ray_mode ? 0 : mb_job_exit_status(cli, job);
    }
    json_decref(job);
    mb_log_view_close(&view);
    mb_rest_close(&rest);
    return rc != 0 ? mb_cli_fail(cli, &err) : mb_cli_printed(cli, status);
}

static const struct mb_option options[] = {
    MB_JOB_COMMON_OPTIONS(struct logs_args),
    MB_JOB_OPTION("follow", 'f', NULL, MB_OPTION_FLAG, struct logs_args, follow,
                  "until the job ends; the exit status is the job's"),
    {"rank", 0, "N", MB_OPTION_INT, offsetof(struct logs_args, rank),
     "the log of this rank, whichever node it is on", 0, INT32_MAX},
    MB_JOB_OPTION("merge", 0, NULL, MB_OPTION_FLAG, struct logs_args, merge,
                  "the logs of all ranks, tagged, in the order of time (to a second)"),
    {"attempt", 0, "N", MB_OPTION_INT, offsetof(struct logs_args, attempt),
     "of ranks: this attempt's logs, with -f from it on (the newest)", 1, INT32_MAX},
    MB_JOB_OPTION("grep", 0, "PATTERN", MB_OPTION_STRING, struct logs_args, grep,
                  "only lines that match this extended regular expression"),
    MB_JOB_OPTION("since", 0, "TIME", MB_OPTION_STRING, struct logs_args, since,
                  "what was written since 10m ago, or since 2026-11-21T08:00:00[Z]"),
    {"tail", 0, "N", MB_OPTION_INT, offsetof(struct logs_args, tail),
     "from the last N lines on, of each rank", 0, INT32_MAX},
    {0}};

const struct mb_verb mb_verb_job_logs = {
    .name = "logs",
    .summary = "print the output of a job",
    .synopsis =
        "[-f] [--rank N | --merge] [--attempt N] [--grep PATTERN] [--since TIME] [--tail N] ID",
    .examples = "  mobula job logs -f raysubmit_x\n"
                "  mobula job logs --merge --since 10m --grep 'loss|error' raysubmit_x\n",
    .options = options,
    .run = run};
