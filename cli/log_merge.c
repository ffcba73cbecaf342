/*
 * All ranks' logs as one, each line with its rank, by time as far as that is known: the nodes note
 * once a second how long a log was, so lines of one second come rank by rank.
 *
 *  1. how many ranks: the gang's record; 2. per rank, which bytes were written before which time;
 *  3. always the piece that was written first, in whole lines; 4. what has no time yet: last;
 *  5. following: round after round what is new, until the job has ended and a round brings nothing;
 *  6. there is a newer attempt: after a round that brought nothing of this one the next one begins,
 *     with as many ranks as it has, at the first byte of its logs.
 *  A head that does not answer is asked again for LOST_MS; a rank whose node is gone
 *     comes from the job's store, without times, and that is said; no store: passed over, with a
 * word, if there is a newer attempt, else it ends the view.
 */
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "cli/job.h"
#include "gcs/text.h"

enum { LIMIT_BYTES = 1 << 20, ROUND_MS = 200, LOST_MS = 300 * 1000, RETRY_MS = 500 };

struct rank_log {
    struct mb_log_lines lines;
    uint64_t offset; /* shown up to here */
    json_t *times;   /* [[offset, unix_ms], ...], the page that is being used */
    size_t at;       /* in it */
    int no_more;     /* times */
    int is_lost;     /* what is not shown yet */
};

struct merge {
    struct mb_rest *rest;
    const char *id;
    const struct mb_follow_opts *opts;
    struct rank_log *ranks;
    int64_t n;
    int64_t attempt, newest; /* that is shown; that is known of */
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

static int64_t number(const json_t *o, const char *name)
{
    return json_integer_value(json_object_get(o, name));
}

/* ---- attempts ---- */

/* Of those whose nodes are known the newest (from 0), or the first one from number `from` on; NULL:
 * none. Borrowed from the gang's record, which is the present attempt itself. */
static const json_t *find_attempt(const json_t *gang, int64_t from)
{
    const json_t *former = json_object_get(gang, "attempts"), *found = NULL;

    for (size_t i = 0; i <= json_array_size(former); i++) {
        const json_t *o = i < json_array_size(former) ? json_array_get(former, i) : gang;
        int64_t n = number(o, "attempt");

        if (json_array_size(json_object_get(o, "nodes")) > 0 && n >= from &&
            (found == NULL ||
             (from == 0 ? n > number(found, "attempt") : n < number(found, "attempt"))))
            found = o;
    }
    return found;
}

/* One question: which attempts there are. *n and *attempt stay when there is none from `from` on.
 */
static int look_for_attempt(struct merge *m, int64_t from, int64_t *attempt, int64_t *n,
                            struct mb_err *err)
{
    json_t *status, *job;
    size_t i;
    int rc = mb_rest_json(m->rest, "GET", "/api/mobula/status", NULL, &status, err);

    if (rc != 0)
        return rc;
    json_array_foreach(json_object_get(status, "jobs"), i, job)
    {
        const json_t *gang = json_object_get(job, "gang"), *found = find_attempt(gang, from);

        if (strcmp(mb_job_text(job, "submission_id"), m->id) != 0)
            continue;
        m->newest = number(find_attempt(gang, 0), "attempt");
        if (found != NULL) {
            *attempt = number(found, "attempt");
            *n = number(found, "world_size");
        }
    }
    json_decref(status);
    return 0;
}

/* The same until the head answers. */
static int ask_for_attempt(struct merge *m, int64_t from, int64_t *attempt, int64_t *n,
                           struct mb_err *err)
{
    uint64_t until_ms = mb_mono_ms() + LOST_MS;

    for (;;) {
        int rc = look_for_attempt(m, from, attempt, n, err);

        if (rc == 0 || (rc != MB_EUNAVAIL && rc != MB_ETIMEOUT) || mb_mono_ms() > until_ms)
            return rc;
        poll(NULL, 0, RETRY_MS);
    }
}

/* Following: until there are ranks, or the job has ended without any: 1, as without following. */
static int wait_for_ranks(struct merge *m, const char *job_path, struct mb_err *err)
{
    int64_t wanted = m->opts->attempt;
    int said = 0;

    for (;;) {
        json_t *job;
        int ended, rc = ask(m, job_path, &job, err);

        if (rc != 0)
            return rc;
        ended = mb_job_is_terminal(job);
        json_decref(job);
        rc = ask_for_attempt(m, wanted, &m->attempt, &m->n, err);
        if (rc != 0)
            return rc;
        if (wanted > 0 && m->newest > 0 && m->newest >= wanted && m->attempt != wanted)
            return mb_err_set(err, MB_ENOENT,
                              "job %s has no logs of attempt %" PRId64 ", the newest is %" PRId64,
                              m->id, wanted, m->newest);
        if (m->n > 0)
            return 0;
        if ((m->opts->once || ended) && wanted == 0)
            return 1;
        if (m->opts->once || ended)
            return mb_err_set(err, MB_ENOENT, "job %s has no ranks%s", m->id, ended ? "" : " yet");
        if (!said)
            fprintf(stderr, "mobula: job %s has no ranks yet; without --merge: its own log\n",
                    m->id);
        said = 1;
        poll(NULL, 0, ROUND_MS);
    }
}

/* ---- a rank ---- */

/* The rank's log is nowhere, or its node does not answer: 1 if that is past, and is passed over. */
static int is_past(struct merge *m, int64_t rank, const struct mb_err *why)
{
    int64_t attempt, n;
    struct mb_err ignored;

    if (look_for_attempt(m, 0, &attempt, &n, &ignored) != 0 || m->newest <= m->attempt)
        return 0;
    fprintf(stderr, "mobula: rank %" PRId64 " of attempt %" PRId64 ": %s\n", rank, m->attempt,
            why->text);
    m->ranks[rank].is_lost = m->ranks[rank].no_more = 1;
    return 1;
}

/* *out is NULL when the rank was given up. */
static int ask_rank(struct merge *m, int64_t rank, const char *query, json_t **out,
                    struct mb_err *err)
{
    uint64_t until_ms = mb_mono_ms() + LOST_MS;
    char suffix[200];
    char *path;
    int rc;

    *out = NULL;
    snprintf(suffix, sizeof(suffix), "/logs?rank=%" PRId64 "&attempt=%" PRId64 "%s", rank,
             m->attempt, query);
    path = mb_job_path(m->id, suffix);
    if (path == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    while ((rc = mb_rest_json(m->rest, "GET", path, NULL, out, err)) != 0) {
        if ((rc != MB_EUNAVAIL && rc != MB_ETIMEOUT) || mb_mono_ms() > until_ms)
            break;
        if (rc == MB_EUNAVAIL && is_past(m, rank, err)) {
            rc = 0;
            break;
        }
        poll(NULL, 0, RETRY_MS);
    }
    mb_free(path);
    if (rc == 0 && number(*out, "newest_attempt") > m->newest)
        m->newest = number(*out, "newest_attempt");
    return rc;
}

/* The bytes of a piece; an older head gives text, in which what is no
 * UTF-8 is replaced. */
static int add_piece(struct mb_log_lines *lines, const json_t *piece, struct mb_err *err)
{
    const json_t *text = json_object_get(piece, "logs");
    struct mb_buf bytes = {0};
    int rc;

    if (strcmp(mb_job_text(piece, "format"), "bytes") != 0)
        return mb_log_lines_add(lines, json_string_value(text), json_string_length(text), err);
    rc = mb_text_bytes(json_string_value(text), json_string_length(text), &bytes);
    if (rc != 0)
        mb_err_set(err, rc, rc == MB_ENOMEM ? "out of memory" : "the log's bytes are none");
    else
        rc = mb_log_lines_add(lines, bytes.data, bytes.len, err);
    mb_buf_close(&bytes);
    return rc;
}

/* Shows a rank's log up to `end`, at most what is there; *grew says whether there was anything. */
static int show_until(struct merge *m, int64_t rank, uint64_t end, int *grew, struct mb_err *err)
{
    struct rank_log *r = &m->ranks[rank];
    int rc = 0;

    while (rc == 0 && !r->is_lost && r->offset < end) {
        uint64_t limit = end - r->offset < LIMIT_BYTES ? end - r->offset : LIMIT_BYTES;
        char query[80];
        json_t *piece;
        uint64_t next;

        snprintf(query, sizeof(query), "&format=bytes&offset=%" PRIu64 "&limit=%" PRIu64, r->offset,
                 limit);
        rc = ask_rank(m, rank, query, &piece, err);
        if (rc != 0 || piece == NULL)
            return rc;
        next = (uint64_t)number(piece, "next_offset");
        if (next > r->offset)
            rc = add_piece(&r->lines, piece, err);
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
    if (rc != 0 || page == NULL)
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

/* ---- from one attempt to the next ---- */

/* Where the view begins; in an attempt that came later at its first byte. */
static int begin_rank(struct merge *m, int64_t rank, struct mb_err *err)
{
    const struct mb_follow_opts *opts = m->opts;
    char query[64];
    json_t *at;
    int rc;

    if (opts->since_unix_ms > 0)
        snprintf(query, sizeof(query), "&limit=0&since_ms=%" PRIu64, opts->since_unix_ms);
    else if (opts->tail_lines >= 0)
        snprintf(query, sizeof(query), "&limit=0&tail=%" PRId64, opts->tail_lines);
    else
        snprintf(query, sizeof(query), "&limit=0");
    rc = ask_rank(m, rank, query, &at, err);
    if (rc != 0 || at == NULL)
        return rc;
    mb_job_say_source(at, rank);
    m->ranks[rank].offset = (uint64_t)number(at, "offset");
    json_decref(at);
    return 0;
}

static int begin_attempt(struct merge *m, int is_first, struct mb_err *err)
{
    int rc = 0;

    m->ranks = mb_calloc((size_t)m->n, sizeof(*m->ranks));
    if (m->ranks == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    for (int64_t i = 0; rc == 0 && i < m->n; i++) {
        m->ranks[i].lines.view = m->opts->lines->view;
        m->ranks[i].lines.rank = i;
        if (is_first)
            rc = begin_rank(m, i, err);
    }
    return rc;
}

/* Lines without an end are shown as they are. */
static int end_attempt(struct merge *m, struct mb_err *err)
{
    int rc = 0;

    for (int64_t i = 0; m->ranks != NULL && i < m->n; i++) {
        struct mb_err late;
        int end = mb_log_lines_end(&m->ranks[i].lines, &late);

        if (rc == 0 && end != 0)
            *err = late;
        rc = rc == 0 ? end : rc;
        json_decref(m->ranks[i].times);
    }
    mb_free(m->ranks);
    m->ranks = NULL;
    return rc;
}

static int next_attempt(struct merge *m, struct mb_err *err)
{
    int rc = end_attempt(m, err);

    if (rc == 0)
        rc = ask_for_attempt(m, m->attempt + 1, &m->attempt, &m->n, err);
    if (rc != 0)
        return rc;
    fprintf(stderr, "mobula: attempt %" PRId64 " begins, with %" PRId64 " ranks\n", m->attempt,
            m->n);
    return begin_attempt(m, 0, err);
}

/* To the end of the attempt: 1: another one follows; 0: that is all. */
static int show_attempt(struct merge *m, const char *job_path, json_t **job, struct mb_err *err)
{
    int rc = show_timed(m, err);

    while (rc == 0) { /* the job is asked before the round that may be the last one */
        int grew = 0, is_over = m->newest > m->attempt;

        json_decref(*job);
        *job = NULL;
        rc = ask(m, job_path, job, err);
        if (rc == 0)
            rc = show_rest(m, &grew, err);
        if (rc != 0 || m->opts->once)
            return rc;
        if (is_over && !grew)
            return 1;
        if (!grew && mb_job_is_terminal(*job) && m->newest <= m->attempt)
            return 0;
        if (!grew)
            poll(NULL, 0, ROUND_MS);
    }
    return rc;
}

int mb_job_merge(struct mb_rest *rest, const char *id, const struct mb_follow_opts *opts,
                 json_t **job, struct mb_err *err)
{
    struct merge m = {.rest = rest, .id = id, .opts = opts};
    char *path = mb_job_path(id, "");
    struct mb_err late;
    int end, rc = path != NULL ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");

    *job = NULL;
    if (rc == 0)
        rc = wait_for_ranks(&m, path, err);
    if (rc == 0)
        rc = begin_attempt(&m, 1, err);
    while (rc == 0 && (rc = show_attempt(&m, path, job, err)) == 1)
        rc = next_attempt(&m, err);
    end = end_attempt(&m, &late);
    if (rc == 0 && end != 0)
        *err = late;
    rc = rc == 0 ? end : rc;
    mb_free(path);
    if (rc != 0) {
        json_decref(*job);
        *job = NULL;
    }
    return rc;
}
