/* One pass from left to right; every field has its bound, percent codes are decoded in user and
 * password. */
#include "gcs/redis_url.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/str.h"

#define EXPECTED "expected redis://[user:password@]host[:port][/db][?prefix=NAME]"

static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* 0, or -1: too long, or a broken percent code. */
static int decode(const char *from, size_t n, char *out, size_t size)
{
    size_t len = 0;

    for (size_t i = 0; i < n; i++) {
        char c = from[i];
        if (c == '%') {
            int hi = i + 2 < n ? hex_digit(from[i + 1]) : -1;
            int lo = hi >= 0 ? hex_digit(from[i + 2]) : -1;
            if (lo < 0 || (hi == 0 && lo == 0))
                return -1;
            c = (char)(hi * 16 + lo);
            i += 2;
        }
        if (len + 1 >= size)
            return -1;
        out[len++] = c;
    }
    out[len] = '\0';
    return 0;
}

static int parse_login(const char *p, size_t n, struct mb_redis_url *out)
{
    const char *colon = memchr(p, ':', n);

    if (!colon) /* redis://password@host is what some tools write; Redis's own form has the colon */
        return -1;
    return decode(p, (size_t)(colon - p), out->user, sizeof out->user) != 0 ||
                   decode(colon + 1, n - (size_t)(colon + 1 - p), out->password,
                          sizeof out->password) != 0
               ? -1
               : 0;
}

static int parse_number(const char *p, size_t n, int max, int *out)
{
    int value = 0;

    if (n == 0 || n > 5)
        return -1;
    for (size_t i = 0; i < n; i++) {
        if (p[i] < '0' || p[i] > '9')
            return -1;
        value = value * 10 + (p[i] - '0');
    }
    *out = value;
    return value <= max ? 0 : -1;
}

static int parse_host(const char *p, size_t n, struct mb_redis_url *out)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
    const char *end = p + n, *colon;
    int is_v6 = n > 0 && *p == '[';

    if (n > 0 && *p == '[') { /* [::1]:6379 */
        const char *close = memchr(p, ']', n);
        if (!close || (close + 1 < end && close[1] != ':'))
            return -1;
        colon = close + 1 < end ? close + 1 : NULL;
        p++;
        n = (size_t)(close - p);
    } else {
        colon = memchr(p, ':', n);
        n = colon ? (size_t)(colon - p) : n;
    }
    if (n == 0 || n >= sizeof out->host)
        return -1;
    memcpy(out->host, p, n);
    out->host[n] = '\0';
    for (const char *c = out->host; *c; c++) /* it is printed, and parsed again */
        if (!strchr(letters, *c) && !strchr(is_v6 ? ":.%" : "._-", *c))
            return -1;
    if (is_v6 && !strchr(out->host, ':'))
        return -1;
    return colon ? parse_number(colon + 1, (size_t)(end - colon - 1), 65535, &out->port) : 0;
}

static int parse_prefix(const char *query, struct mb_redis_url *out)
{
    size_t n;

    if (!mb_starts_with(query, "prefix="))
        return -1;
    query += strlen("prefix=");
    n = strspn(query, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:");
    if (n == 0 || query[n] != '\0' || n >= sizeof out->prefix)
        return -1;
    memcpy(out->prefix, query, n + 1);
    return 0;
}

int mb_redis_url_parse(const char *text, struct mb_redis_url *out, struct mb_err *err)
{
    const char *p, *at, *query;
    size_t n_host, n_db;
    int bad = 0;

    memset(out, 0, sizeof *out);
    if (mb_starts_with(text, "rediss://"))
        return mb_err_set(
            err, MB_EUNSUPPORTED,
            "rediss:// (TLS) is not supported: put a TLS proxy such as stunnel beside "
            "the head and name that");
    if (!mb_starts_with(text, "redis://"))
        return mb_err_set(err, MB_EINVAL, "the store's address: " EXPECTED);
    out->port = 6379;
    memcpy(out->prefix, "mobula", sizeof "mobula");
    p = text + strlen("redis://");
    query = strchr(p, '?');
    at = NULL;
    for (const char *q = p; *q != '\0' && q != query; q++)
        if (*q == '@')
            at = q;
    if (at)
        bad = parse_login(p, (size_t)(at - p), out);
    p = at ? at + 1 : p;
    n_host = strcspn(p, "/?");
    bad = bad || parse_host(p, n_host, out);
    if (p[n_host] == '/' && (n_db = strcspn(p + n_host + 1, "?")) > 0)
        bad = bad || parse_number(p + n_host + 1, n_db, 9999, &out->db);
    if (query)
        bad = bad || parse_prefix(query + 1, out);
    if (!bad)
        return 0;
    memset(out, 0, sizeof *out);
    return mb_err_set(err, MB_EINVAL, "the store's address: " EXPECTED);
}

void mb_redis_url_public(const struct mb_redis_url *u, char out[512])
{
    int is_v6 = strchr(u->host, ':') != NULL;

    snprintf(out, 512, "redis://%s%s%s:%d/%d?prefix=%s", is_v6 ? "[" : "", u->host,
             is_v6 ? "]" : "", u->port, u->db, u->prefix);
}
