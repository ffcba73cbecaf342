/*
 * Who may call: token mode and the browser guard, as pure verdicts over header values.
 * Source: Ray 2.60 dashboard, token middleware and browser middleware; texts are Ray's.
 */
#ifndef MOBULA_BASE_HTTP_GUARD_H
#define MOBULA_BASE_HTTP_GUARD_H

/* Looks a request header up by name, case-insensitively; NULL if absent. */
typedef const char *(*mb_http_header_fn)(const void *arg, const char *name);

struct mb_http_verdict {
    int status;     /* 0: pass */
    char text[128]; /* the body of the refusal */
};

/* token NULL: open. */
void mb_http_guard_token(const char *token, mb_http_header_fn header, const void *arg,
                         struct mb_http_verdict *out);
/* 1 if the request looks like a browser's. */
int mb_http_guard_is_browser(mb_http_header_fn header, const void *arg);
/* guard_status 405: browsers may GET, HEAD and OPTIONS only; 403: nothing; 0: no guard. */
void mb_http_guard_browser(int guard_status, const char *method, mb_http_header_fn header,
                           const void *arg, struct mb_http_verdict *out);

#endif
