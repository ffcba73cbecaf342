/*
 * A request target against a route pattern.
 *
 * 1. parse: copy the target once, cut scheme and fragment, split path and query, decode the pairs.
 * 2. match: walk pattern and raw path segment by segment; literals compare after decoding,
 *    parameters are copied decoded into one block that lives until the next match.
 * Failures: no leading slash, a decoded NUL or too many query pairs is MB_EINVAL (the server
 * answers 400); a broken percent escape stays as the text it is, as common servers do.
 */
#include "base/http/route.h"

#include <string.h>
#include "base/alloc.h"
#include "base/str.h"

/* Decodes n bytes of src into dst (room for n + 1). Returns the length; a NUL may be among it. */
static size_t decode(const char *src, size_t n, char *dst, int plus_is_space)
{
    size_t len = 0;
    for (size_t i = 0; i < n; i++) {
        char c = src[i];
        if (c == '%' && i + 2 < n && mb_hex_digit(src[i + 1]) >= 0 &&
            mb_hex_digit(src[i + 2]) >= 0) {
            c = (char)(mb_hex_digit(src[i + 1]) * 16 + mb_hex_digit(src[i + 2]));
            i += 2;
        } else if (c == '+' && plus_is_space) {
            c = ' ';
        }
        dst[len++] = c;
    }
    dst[len] = '\0';
    return len;
}

static int parse_query(struct mb_http_target *t, char *query, char *out)
{
    while (query && *query) {
        char *next = strchr(query, '&');
        size_t n = next ? (size_t)(next - query) : strlen(query);
        char *eq = memchr(query, '=', n);
        size_t name_len = eq ? (size_t)(eq - query) : n;
        if (n > 0) {
            if (t->n_query == MB_HTTP_MAX_QUERY)
                return MB_EINVAL;
            struct mb_http_pair *pair = &t->query[t->n_query++];
            pair->name = out;
            size_t len = decode(query, name_len, out, 1);
            if (memchr(out, '\0', len))
                return MB_EINVAL;
            out += len + 1;
            pair->value = out;
            len = eq ? decode(eq + 1, n - name_len - 1, out, 1) : decode("", 0, out, 1);
            if (memchr(out, '\0', len))
                return MB_EINVAL;
            out += len + 1;
        }
        query = next ? next + 1 : NULL;
    }
    return 0;
}

int mb_http_target_parse(const char *uri, struct mb_http_target *out)
{
    const char *start = uri;
    const char *scheme_end = strstr(uri, "://");
    const char *question = strchr(uri, '?');
    if (uri[0] != '/' && scheme_end && (!question || scheme_end < question)) {
        start = strchr(scheme_end + 3, '/');
        if (!start)
            start = "/";
    }
    if (start[0] != '/')
        return MB_EINVAL;
    size_t n = strcspn(start, "#");
    /* raw copy, decoded path, decoded query: each no longer than the raw text and its NULs, where
     * a query pair may need one NUL more than it has separators. */
    struct mb_http_target t = {0};
    t.memory = mb_alloc(3 * (n + 2) + MB_HTTP_MAX_QUERY);
    if (!t.memory)
        return MB_ENOMEM;
    memcpy(t.memory, start, n);
    t.memory[n] = '\0';
    t.raw_path = t.memory;
    char *query = strchr(t.memory, '?');
    if (query)
        *query++ = '\0';
    t.path = t.memory + n + 1;
    size_t raw_len = strlen(t.raw_path);
    size_t path_len = decode(t.raw_path, raw_len, t.path, 0);
    if (memchr(t.path, '\0', path_len) || parse_query(&t, query, t.path + path_len + 1) != 0) {
        mb_free(t.memory);
        return MB_EINVAL;
    }
    *out = t;
    return 0;
}

void mb_http_target_close(struct mb_http_target *t)
{
    mb_free(t->memory);
    mb_free(t->param_memory);
    memset(t, 0, sizeof *t);
}

int mb_http_pattern_check(const char *pattern, struct mb_err *err)
{
    size_t n_params = 0;
    if (pattern[0] != '/')
        return mb_err_set(err, MB_EINVAL, "route \"%s\" must start with /", pattern);
    for (const char *seg = pattern; seg; seg = strchr(seg, '/')) {
        seg++;
        size_t n = strcspn(seg, "/");
        if (n == 0 || (seg[0] != '{' && !memchr(seg, '{', n) && !memchr(seg, '}', n)))
            continue;
        int rest = n > 2 && seg[n - 2] == '*';
        if (n < 3 || seg[0] != '{' || seg[n - 1] != '}' || (rest && seg[n] != '\0') ||
            ++n_params > MB_HTTP_MAX_PARAMS)
            return mb_err_set(err, MB_EINVAL, "route \"%s\": a parameter is a whole segment {name}",
                              pattern);
    }
    return 0;
}

/* Names of parameters stay inside the pattern; they end at '}' or '*', which lookups respect. */
static void add_param(struct mb_http_target *t, const char *seg, const char *raw, size_t raw_len,
                      char **memory)
{
    struct mb_http_pair *pair = &t->params[t->n_params++];
    pair->name = seg + 1;
    pair->value = *memory;
    *memory += decode(raw, raw_len, *memory, 0) + 1;
}

static int literal_equal(const char *seg, size_t seg_len, const char *raw, size_t raw_len,
                         char *scratch)
{
    size_t len = decode(raw, raw_len, scratch, 0);
    return len == seg_len && memcmp(scratch, seg, len) == 0;
}

int mb_http_target_match(struct mb_http_target *t, const char *pattern)
{
    size_t size = strlen(t->raw_path) + MB_HTTP_MAX_PARAMS + 2;
    if (!t->param_memory && !(t->param_memory = mb_alloc(size)))
        return MB_ENOMEM;
    t->n_params = 0;
    char *memory = t->param_memory;
    const char *seg = pattern;
    const char *raw = t->raw_path;
    while (*seg == '/' && *raw == '/') {
        seg++;
        raw++;
        size_t seg_len = strcspn(seg, "/");
        size_t raw_len = strcspn(raw, "/");
        if (seg_len > 3 && seg[0] == '{' && seg[seg_len - 2] == '*') {
            add_param(t, seg, raw, strlen(raw), &memory);
            return 1;
        }
        if (seg_len > 2 && seg[0] == '{') {
            if (raw_len == 0)
                return 0;
            add_param(t, seg, raw, raw_len, &memory);
        } else if (!literal_equal(seg, seg_len, raw, raw_len, memory)) {
            return 0;
        }
        seg += seg_len;
        raw += raw_len;
    }
    return *seg == '\0' && *raw == '\0';
}

const char *mb_http_target_param(const struct mb_http_target *t, const char *name)
{
    size_t n = strlen(name);
    for (size_t i = 0; i < t->n_params; i++) {
        const char *p = t->params[i].name;
        if (strncmp(p, name, n) == 0 && (p[n] == '}' || p[n] == '*'))
            return t->params[i].value;
    }
    return NULL;
}

const char *mb_http_target_query_at(const struct mb_http_target *t, const char *name, size_t nth)
{
    for (size_t i = 0; i < t->n_query; i++) {
        if (strcmp(t->query[i].name, name) == 0 && nth-- == 0)
            return t->query[i].value;
    }
    return NULL;
}

const char *mb_http_target_query(const struct mb_http_target *t, const char *name)
{
    return mb_http_target_query_at(t, name, 0);
}
