/*
 * Request targets and route patterns: pure text work, no I/O. A target is split at its raw slashes
 * first and each segment is percent-decoded after, so that "%2F" inside a segment is data.
 * Source: RFC 3986 sections 2.1 and 3.3; "+" means space in the query only, as browsers send it.
 */
#ifndef MOBULA_BASE_HTTP_ROUTE_H
#define MOBULA_BASE_HTTP_ROUTE_H

#include <stddef.h>
#include "base/err.h"

enum { MB_HTTP_MAX_PARAMS = 8, MB_HTTP_MAX_QUERY = 32 };

struct mb_http_pair {
    const char *name;  /* borrowed from the pattern, or from the target's own memory */
    const char *value; /* decoded */
};

/* A parsed request target. Zero-initialise; end with mb_http_target_close(). */
struct mb_http_target {
    char *memory;   /* owned: everything below points into it */
    char *raw_path; /* undecoded, starts with '/' */
    char *path;     /* percent-decoded */
    struct mb_http_pair query[MB_HTTP_MAX_QUERY];
    size_t n_query;
    struct mb_http_pair params[MB_HTTP_MAX_PARAMS]; /* of the last successful match */
    size_t n_params;
    char *param_memory; /* owned: values of params */
};

/* Parses "/path?query" or "http://host/path?query". MB_EINVAL: no path, a decoded NUL, or more than
 * MB_HTTP_MAX_QUERY query pairs. */
int mb_http_target_parse(const char *uri, struct mb_http_target *out);
void mb_http_target_close(struct mb_http_target *t);

/* 0 when every "{name}" of the pattern is well-formed ("{rest*}" only at the end). */
int mb_http_pattern_check(const char *pattern, struct mb_err *err);
/* 1 when the target matches; its params are then filled, with names inside `pattern`. 0 when not;
 * MB_ENOMEM. A {name} matches one segment that is not empty, {rest*} everything left. */
int mb_http_target_match(struct mb_http_target *t, const char *pattern);
/* Value of a parameter of the last match, or NULL. */
const char *mb_http_target_param(const struct mb_http_target *t, const char *name);
const char *mb_http_target_query(const struct mb_http_target *t, const char *name);
/* Of several pairs of that name, from 0 on. */
const char *mb_http_target_query_at(const struct mb_http_target *t, const char *name, size_t nth);

#endif
