/* Strings are passed over whole, so a bracket inside one does not count. Nothing here recurses. */
#include "agent/upload/manifest_cut.h"

#include <string.h>

static int is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

static size_t skip_space(const char *json, size_t n, size_t at)
{
    while (at < n && is_space(json[at]))
        at++;
    return at;
}

/* Behind the string that begins at `at`; n: it does not end. */
static size_t skip_string(const char *json, size_t n, size_t at)
{
    for (at++; at < n && json[at] != '"'; at++)
        at += json[at] == '\\';
    return at < n ? at + 1 : n;
}

/* Behind the value that begins at `at`: at a comma or a closing bracket that is not its own, or
 * n. */
static size_t skip_value(const char *json, size_t n, size_t at)
{
    size_t depth = 0;

    while (at < n) {
        char c = json[at];

        if (c == '"') {
            at = skip_string(json, n, at);
            continue;
        }
        if (depth == 0 && (c == ',' || c == ']' || c == '}'))
            return at;
        depth += c == '[' || c == '{';
        depth -= c == ']' || c == '}';
        at++;
    }
    return n;
}

int mb_manifest_cut(const char *json, size_t n, struct mb_manifest_cut *out)
{
    static const char key[] = "\"files\"";
    size_t at = skip_space(json, n, 0), n_found = 0;

    if (at == n || json[at] != '{')
        return 0;
    while (at < n && json[at] != '}') {
        size_t name = skip_space(json, n, at + 1), begin, end;

        if (name == n || json[name] != '"')
            return 0;
        at = skip_string(json, n, name);
        begin = skip_space(json, n, at);
        if (begin == n || json[begin] != ':')
            return 0;
        begin = skip_space(json, n, begin + 1);
        end = skip_value(json, n, begin);
        if (at - name == sizeof(key) - 1 && memcmp(json + name, key, sizeof(key) - 1) == 0) {
            n_found++;
            *out = (struct mb_manifest_cut){begin, end};
        }
        at = end;
        if (at < n && json[at] == ']')
            return 0;
    }
    if (at == n || n_found != 1)
        return 0;
    while (out->end > out->begin && is_space(json[out->end - 1]))
        out->end--;
    return out->end - out->begin >= 2 && json[out->begin] == '[' && json[out->end - 1] == ']';
}

int mb_manifest_cut_next(const char *json, const struct mb_manifest_cut *cut, size_t *at,
                         size_t *begin, size_t *end)
{
    size_t stop = cut->end - 1;

    if (*at > stop || (*at == cut->begin + 1 && skip_space(json, stop, *at) == stop))
        return 0;
    *begin = *at;
    *end = skip_value(json, stop, *at);
    *at = *end + 1; /* behind the comma, or behind the end */
    return 1;
}
