/*
 * All ranks' logs as one, each line with its rank, by time as far as that is known: the nodes note
 * once a second how long a log was, so lines of one second come rank by rank.
 *
 *  1. how many ranks: the gang's record; 2. per rank, which bytes were written before which time;
 *  3. always the piece that was written first, in whole lines; 4. what has no time yet: last;
 *  5. following: round after round what is new, until the job has ended and a round brings nothing.
 *  A head that does not answer is asked again for LOST_MS; a rank whose node is gone
 *     comes from the job's store, without times, and that is said; no store: that ends the view.
 */
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "cli/job.h"

enum { LIMIT_BYTES = 1 << 20, ROUND_MS = 200, LOST_MS = 300 * 1000, RETRY_MS = 500 };

struct rank_log {
    struct mb_log_lines lines;
    uint64_t offset; /* shown up to here */
    json_t *times;   /* [[offset, unix_ms], ...], the page that is being used */
    size_t at;       /* in it */
    int no_more;     /* times */
};

struct merge {
    struct mb_rest *rest;
    const char *id;
    struct rank_log *ranks;
    int64_t n;
};

static int ask(struct merge *m, const char *path, json_t **out, struct mb_err *err)
{
    uint64_t until_ms = mb_mono_ms() + LOST_MS;

    for (;;) {
        int rc = mb_rest_json(m->rest, "GET", path, NULL, out, err);

        if (rc == 0 || (rc != MB_EUNAVAIL && rc != MB_ETIMEOUT) || mb_mono_ms() > until_ms)
            return rc;
        poll(NULL, 0, RETRY_MS);
    }
}

static int ask_rank(struct merge *m, int64_t rank, const char *query, json_t **out,
                    struct mb_err *err)
{
    char suffix[200];
    char *path;
    int rc;

    snprintf(suffix, sizeof(suffix), "/logs?rank=%" PRId64 "%s", rank, query);
    path = mb_job_path(m->id, suffix);
    rc = path != NULL ? ask(m, path, out, err) : mb_err_set(err, MB_ENOMEM, "out of memory");
    mb_free(path);
    return rc;
}

static int64_t number(const json_t *o, const char *name)
{
    return json_integer_value(json_object_get(o, name));
}

static int world_size(struct merge *m, struct mb_err *err)
{
    json_t *status, *job;
    size_t i;
    int rc = ask(m, "/api/mobula/status", &status, err);

    if (rc != 0)
        return rc;
    json_array_foreach(json_object_get(status, "jobs"), i, job)
    {
        if (strcmp(mb_job_text(job, "submission_id"), m->id) == 0)
            m->n = number(json_object_get(job, "gang"), "world_size");
    }
    json_decref(status);
    return 0;
}

/* Following: until there are ranks, or the job has ended without any. */
static int wait_for_ranks(struct merge *m, const char *job_path, int once, struct mb_err *err)
{
    for (;;) {
        json_t *job;
        int ended, rc = ask(m, job_path, &job, err);

        if (rc != 0)
            return rc;
        ended = mb_job_is_terminal(job);
        json_decref(job);
        rc = world_size(m, err);
        if (rc != 0 || m->n > 0)
            return rc;
        if (once || ended)
            return mb_err_set(err, MB_ENOENT, "job %s has no ranks%s", m->id, ended ? "" : " yet");
        poll(NULL, 0, ROUND_MS);
    }
}

/* Shows a rank's log up to `end`, at most what is there; *grew says whether there was anything. */
static int show_until(struct merge *m, int64_t rank, uint64_t end, int *grew, struct mb_err *err)
{
    struct rank_log *r = &m->ranks[rank];
    int rc = 0;

    while (rc == 0 && r->offset < end) {
        uint64_t limit = end - r->offset < LIMIT_BYTES ? end - r->offset : LIMIT_BYTES;
        char query[80];
        json_t *piece, *text;
        uint64_t next;

        snprintf(query, sizeof(query), "&offset=%" PRIu64 "&limit=%" PRIu64, r->offset, limit);
        rc = ask_rank(m, rank, query, &piece, err);
        if (rc != 0)
            return rc;
        text = json_object_get(piece, "logs");
        next = (uint64_t)number(piece, "next_offset");
        if (next > r->offset)
            rc =
                mb_log_lines_add(&r->lines, json_string_value(text), json_string_length(text), err);
        json_decref(piece);
        if (next <= r->offset)
            break;
        r->offset = next;
        *grew = 1;
    }
    return rc;
}

/* The next time of a rank's log; 0 with no_more when the rest has none. */
static int next_time(struct merge *m, int64_t rank, struct mb_err *err)
{
    struct rank_log *r = &m->ranks[rank];
    char query[64];
    json_t *page;
    int rc;

    if (r->no_more || r->at < json_array_size(r->times))
        return 0;
    snprintf(query, sizeof(query), "&times=1&offset=%" PRIu64, r->offset);
    rc = ask_rank(m, rank, query, &page, err);
    if (rc != 0)
        return rc;
    json_decref(r->times);
    r->times = json_incref(json_object_get(page, "times"));
    json_decref(page);
    r->at = 0;
    r->no_more = json_array_size(r->times) == 0;
    return 0;
}

static uint64_t of_pair(const struct rank_log *r, size_t i)
{
    return (uint64_t)json_integer_value(json_array_get(json_array_get(r->times, r->at), i));
}

/* Everything that has a time, in its order. */
static int show_timed(struct merge *m, struct mb_err *err)
{
    for (;;) {
        int64_t first = -1;
        int grew, rc;

        for (int64_t i = 0; i < m->n; i++) {
            rc = next_time(m, i, err);
            if (rc != 0)
                return rc;
            if (!m->ranks[i].no_more &&
                (first < 0 || of_pair(&m->ranks[i], 1) < of_pair(&m->ranks[first], 1)))
                first = i;
        }
        if (first < 0)
            return 0;
        rc = show_until(m, first, of_pair(&m->ranks[first], 0), &grew, err);
        if (rc != 0)
            return rc;
        m->ranks[first].at++;
    }
}

static int show_rest(struct merge *m, int *grew, struct mb_err *err)
{
    int rc = 0;

    for (int64_t i = 0; rc == 0 && i < m->n; i++)
        rc = show_until(m, i, UINT64_MAX, grew, err);
    return rc;
}

static int begin(struct merge *m, const char *job_path, const struct mb_follow_opts *opts,
                 struct mb_err *err)
{
    int rc = wait_for_ranks(m, job_path, opts->once, err);

    m->ranks = rc == 0 ? mb_calloc((size_t)m->n, sizeof(*m->ranks)) : NULL;
    if (rc == 0 && m->ranks == NULL)
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    for (int64_t i = 0; rc == 0 && i < m->n; i++) {
        char query[64];
        json_t *at;

        m->ranks[i].lines.view = opts->lines->view;
        m->ranks[i].lines.rank = i;
        if (opts->since_unix_ms > 0)
            snprintf(query, sizeof(query), "&limit=0&since_ms=%" PRIu64, opts->since_unix_ms);
        else if (opts->tail_lines >= 0)
            snprintf(query, sizeof(query), "&limit=0&tail=%" PRId64, opts->tail_lines);
        else
            snprintf(query, sizeof(query), "&limit=0");
        rc = ask_rank(m, i, query, &at, err);
        if (rc != 0)
            break;
        mb_job_say_source(at, i);
        m->ranks[i].offset = (uint64_t)number(at, "offset");
        json_decref(at);
    }
    return rc;
}

int mb_job_merge(struct mb_rest *rest, const char *id, const struct mb_follow_opts *opts,
                 json_t **job, struct mb_err *err)
{
    struct merge m = {.rest = rest, .id = id};
    char *path = mb_job_path(id, "");
    int grew = 1, rc = path != NULL ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");

    *job = NULL;
    if (rc == 0)
        rc = begin(&m, path, opts, err);
    if (rc == 0)
        rc = show_timed(&m, err);
    while (rc == 0) { /* the job is asked before the round that may be the last one */
        json_decref(*job);
        rc = ask(&m, path, job, err);
        grew = 0;
        if (rc == 0)
            rc = show_rest(&m, &grew, err);
        if (rc != 0 || opts->once || (mb_job_is_terminal(*job) && !grew))
            break;
        if (!grew)
            poll(NULL, 0, ROUND_MS);
    }
    for (int64_t i = 0; m.ranks != NULL && i < m.n; i++) {
        struct mb_err late;
        int end = mb_log_lines_end(&m.ranks[i].lines, &late);

        if (rc == 0 && end != 0)
            *err = late;
        rc = rc == 0 ? end : rc;
        json_decref(m.ranks[i].times);
    }
    mb_free(m.ranks);
    mb_free(path);
    if (rc != 0) {
        json_decref(*job);
        *job = NULL;
    }
    return rc;
}
