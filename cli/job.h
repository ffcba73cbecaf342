/* What the subverbs of `mobula job` share. Blocking; the main thread of a verb. */
#ifndef MOBULA_CLI_JOB_H
#define MOBULA_CLI_JOB_H

#include <jansson.h>
#include "cli/log_view.h"
#include "cli/options.h"
#include "cli/rest.h"

/* Options that every subverb has; the first member of each subverb's struct. */
struct mb_job_common {
    const char *address;
    int json;
    /* Of `ray job`, without a meaning here. */
    const char *verify, *headers, *log_style, *log_color;
    int verbose;
};

#define MB_JOB_OPTION(name_, letter_, arg_, kind_, type_, field_, help_)                           \
    {                                                                                              \
        name_, letter_, arg_, kind_, offsetof(type_, field_), help_, 0, 0                          \
    }
#define MB_JOB_COMMON_OPTIONS(type)                                                                \
    MB_JOB_OPTION("address", 0, "URL", MB_OPTION_STRING, type, common.address,                     \
                  "Jobs API (RAY_API_SERVER_ADDRESS, RAY_ADDRESS, http://127.0.0.1:8265)"),        \
        MB_JOB_OPTION("json", 0, NULL, MB_OPTION_FLAG, type, common.json,                          \
                      "print JSON, errors too"),                                                   \
        MB_JOB_OPTION("verify", 0, "X", MB_OPTION_STRING, type, common.verify, NULL),              \
        MB_JOB_OPTION("headers", 0, "X", MB_OPTION_STRING, type, common.headers, NULL),            \
        MB_JOB_OPTION("log-style", 0, "X", MB_OPTION_STRING, type, common.log_style, NULL),        \
        MB_JOB_OPTION("log-color", 0, "X", MB_OPTION_STRING, type, common.log_color, NULL),        \
        MB_JOB_OPTION("verbose", 'v', NULL, MB_OPTION_FLAG, type, common.verbose, NULL)

/* A string field of an answer; "" when absent or null. */
const char *mb_job_text(const json_t *job, const char *name);
int mb_job_is_terminal(const json_t *job);
/* 0 SUCCEEDED; 1 FAILED; 130 STOPPED, but 0 as `ray` says it. */
int mb_job_exit_status(const struct mb_cli *cli, const json_t *job);
/* "Job 'ID' succeeded", "... failed: MESSAGE", "... was stopped". */
void mb_job_print_end(const char *id, const json_t *job);
void mb_job_print_json(const json_t *j);

/* GET of one job. The caller owns *out. */
int mb_job_get(struct mb_rest *rest, const char *id, json_t **out, struct mb_err *err);

struct mb_follow_opts {
    struct mb_log_lines *lines; /* where the bytes go */
    int64_t rank;               /* -1: the driver's log */
    int64_t attempt;            /* of ranks; 0: the newest. Following: later ones come after it */
    uint64_t since_unix_ms;     /* 0: not said */
    int64_t tail_lines;         /* -1: not said */
    int has_start;              /* one of the two above: what lies before is not missed */
    int once;                   /* only to the log's present end */
};

/*
 * Shows the log as it grows, until the job has ended; a lost connection is made again where it
 * broke. The end of the stream is never taken for the end of the job: that is asked. *job (owned by
 * the caller) is the job then. MB_EUNAVAIL after 5 minutes without the head; MB_ESTATE: the log
 * cannot be read.
 */
int mb_job_follow(struct mb_rest *rest, const char *id, const struct mb_follow_opts *opts,
                  json_t **job, struct mb_err *err);
/* The same for the logs of all ranks; rank of opts is passed over. Another attempt of the gang,
 * with however many ranks, begins on stderr with its number, and at the first byte of its logs.
 * 1: the job has no ranks (yet, unless it is followed), nothing was shown. */
int mb_job_merge(struct mb_rest *rest, const char *id, const struct mb_follow_opts *opts,
                 json_t **job, struct mb_err *err);

/* On stderr, if the answer's "source" says that the log comes from a store. rank -1: not said. */
void mb_job_say_source(const json_t *answer, int64_t rank);

/* Percent-encodes an id for a path; owned by the caller, NULL when memory is out. */
char *mb_job_path(const char *id, const char *suffix);

extern const struct mb_verb mb_verb_job_submit, mb_verb_job_logs;

#endif
