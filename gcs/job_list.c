/* A token is "START_MS-ID", the id in hex: it goes through headers and URLs as it is. */
#include "gcs/job_list.h"

#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"

static int parse_states(const char *text, unsigned *out, struct mb_err *err)
{
    while (*text != '\0') {
        size_t n = strcspn(text, ",");
        unsigned found = 0;

        for (int s = 0; s < MB_JOB_STATES; s++) {
            const char *name = mb_job_state_name((enum mb_job_state)s);
            if (strlen(name) == n && strncmp(name, text, n) == 0)
                found |= 1u << s;
        }
        if (found == 0)
            return mb_err_set(
                err, MB_EINVAL,
                "status: %.*s is none of PENDING, RUNNING, SUCCEEDED, FAILED, STOPPED",
                (int)(n < 32 ? n : 32), text);
        *out |= found;
        text += n + (text[n] == ',');
    }
    return 0;
}

static int parse_token(const char *token, struct mb_job_list_query *out, struct mb_err *err)
{
    size_t n_ms = strcspn(token, "-"),
           n_id = token[n_ms] != '\0' ? strlen(token + n_ms + 1) / 2 : 0;
    char ms[24] = "";

    if (n_ms < sizeof ms && n_id > 0 && n_id <= MB_JOB_LIST_ID_MAX) {
        memcpy(ms, token, n_ms);
        out->after_id[n_id] = '\0';
        if (mb_parse_i64(ms, 0, INT64_MAX, "page_token", &out->after_ms, NULL) == 0 &&
            mb_unhex(token + n_ms + 1, out->after_id, n_id) == 0)
            return 0;
    }
    return mb_err_set(err, MB_EINVAL, "page_token: it must be one that a page before gave");
}

int mb_job_list_parse(const char *status, const char *limit, const char *page_token,
                      struct mb_job_list_query *out, struct mb_err *err)
{
    int64_t n = 0;
    int rc = 0;

    *out = (struct mb_job_list_query){0};
    if (status)
        rc = parse_states(status, &out->states, err);
    if (rc == 0 && limit)
        rc = mb_parse_i64(limit, 1, MB_JOB_LIST_LIMIT_MAX, "limit", &n, err);
    out->limit = (size_t)n;
    if (rc == 0 && page_token)
        rc = parse_token(page_token, out, err);
    return rc;
}

char *mb_job_list_token(int64_t start_ms, const char *id)
{
    size_t n = strlen(id);
    char *hex = mb_alloc(2 * n + 1);
    char *token = hex ? mb_asprintf("%lld-%s", (long long)start_ms, mb_hex(id, n, hex)) : NULL;

    mb_free(hex);
    return token;
}

int mb_job_list_compare(int64_t a_ms, const char *a_id, int64_t b_ms, const char *b_id)
{
    return a_ms != b_ms ? (a_ms > b_ms) - (a_ms < b_ms) : strcmp(a_id, b_id);
}

int mb_job_list_has(const struct mb_job_list_query *q, enum mb_job_state state, int64_t start_ms,
                    const char *id)
{
    if (q->states != 0 && !(q->states & 1u << state))
        return 0;
    return *q->after_id == '\0' || mb_job_list_compare(start_ms, id, q->after_ms, q->after_id) > 0;
}
