/*
 * Which submissions a GET /api/jobs/?status=&limit=&page_token= asks for. Pure.
 * Pages are in the order of submission (start time, then id), and a page's token names its last
 * job: jobs that come or go meanwhile shift nothing.
 */
#ifndef MOBULA_GCS_JOB_LIST_H
#define MOBULA_GCS_JOB_LIST_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"
#include "gcs/job_states.h"

enum {
    MB_JOB_LIST_LIMIT_MAX = 10000,
    MB_JOB_LIST_ID_MAX = 200 /* bytes, as job_request.c has it */
};

struct mb_job_list_query {
    unsigned states;                       /* a bit for each, 0: all */
    size_t limit;                          /* 0: no limit */
    int64_t after_ms;                      /* with after_id: what follows this job */
    char after_id[MB_JOB_LIST_ID_MAX + 1]; /* "": from the beginning */
};

/* Each may be NULL. status: names of states with commas between. MB_EINVAL says which is wrong. */
int mb_job_list_parse(const char *status, const char *limit, const char *page_token,
                      struct mb_job_list_query *out, struct mb_err *err);
/* What names this job in a page_token: letters and digits, whatever the id holds. NULL without
 * memory; the caller frees it. */
char *mb_job_list_token(int64_t start_ms, const char *id);
int mb_job_list_has(const struct mb_job_list_query *q, enum mb_job_state state, int64_t start_ms,
                    const char *id);
/* The order of the pages: negative, 0, positive. */
int mb_job_list_compare(int64_t a_ms, const char *a_id, int64_t b_ms, const char *b_id);

#endif
