/*
 * Log bytes to lines on stdout: filtered, tagged, as JSON if asked. One thread.
 */
#ifndef MOBULA_CLI_LOG_VIEW_H
#define MOBULA_CLI_LOG_VIEW_H

#include <regex.h>
#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/err.h"

struct mb_log_view { /* shared by all logs that are shown */
    int has_grep, json, tag_ranks;
    regex_t grep;
};

/* pattern: a POSIX extended regular expression, NULL: everything is shown. MB_EINVAL names what is
 * wrong with it. */
int mb_log_view_init(struct mb_log_view *v, const char *pattern, struct mb_err *err);
void mb_log_view_close(struct mb_log_view *v);

struct mb_log_lines { /* of one log; zero-initialise, then set view and rank */
    const struct mb_log_view *view;
    int64_t rank;          /* -1: a driver's */
    struct mb_buf partial; /* a line whose end has not come yet, at most 1 MiB */
};

/* 0; MB_EIO: stdout is closed; MB_ENOMEM. Lines are shown when they are whole, all bytes at once
 * when nothing is filtered or tagged. A line beyond 1 MiB is taken apart. */
int mb_log_lines_add(struct mb_log_lines *l, const void *p, size_t n, struct mb_err *err);
/* Shows what is left and forgets it. */
int mb_log_lines_end(struct mb_log_lines *l, struct mb_err *err);

#endif
