/*
 * The rules of gitignore(5): a pattern without a slash inside matches a name at any depth below its
 * file; one with a slash is anchored there; "x/" matches directories only; "!" takes back; "**"
 * spans directories.
 */
#include "cli/ignore.h"

#include <fnmatch.h>
#include <string.h>
#include "base/alloc.h"
#include "base/err.h"

int mb_ignore_add(struct mb_ignore *ig, const char *base, const char *line)
{
    struct mb_ignore_rule rule = {0};
    struct mb_ignore_rule *grown;
    size_t n = strcspn(line, "\r\n");

    while (n > 0 && line[n - 1] == ' ' && (n < 2 || line[n - 2] != '\\'))
        n--;
    if (n == 0 || line[0] == '#')
        return 0;
    if (line[0] == '!') {
        rule.negated = 1;
        line++;
        n--;
    }
    if (n > 0 && line[n - 1] == '/') {
        rule.only_dirs = 1;
        n--;
    }
    rule.anchored = n > 0 && memchr(line, '/', n) != NULL;
    if (n > 0 && line[0] == '/') {
        line++;
        n--;
    }
    if (n == 0)
        return 0;
    rule.base = mb_strdup(base);
    rule.pattern = mb_strndup(line, n);
    grown = mb_reallocarray(ig->rules, ig->n_rules + 1, sizeof(*grown));
    if (grown != NULL)
        ig->rules = grown;
    if (rule.base == NULL || rule.pattern == NULL || grown == NULL) {
        mb_free(rule.base);
        mb_free(rule.pattern);
        return MB_ENOMEM;
    }
    ig->rules[ig->n_rules++] = rule;
    return 0;
}

/* What of path is left below the part that matches the first n bytes of pattern, which end with a
 * slash; NULL: it does not match. */
static const char *skip_head(const char *pattern, size_t n, const char *path)
{
    const char *rest = path;
    char *head = mb_strndup(pattern, n), *prefix = NULL;

    for (size_t i = 0; i < n && rest != NULL; i++) {
        if (pattern[i] == '/') {
            rest = strchr(rest, '/');
            rest = rest != NULL ? rest + 1 : NULL;
        }
    }
    if (rest != NULL)
        prefix = mb_strndup(path, (size_t)(rest - path));
    if (head == NULL || prefix == NULL || fnmatch(head, prefix, FNM_PATHNAME) != 0)
        rest = NULL;
    mb_free(head);
    mb_free(prefix);
    return rest;
}

/* An anchored pattern; two stars stand for any number of directories. */
static int match_path(const char *pattern, const char *path)
{
    const char *stars = strstr(pattern, "**");

    if (stars == NULL)
        return fnmatch(pattern, path, FNM_PATHNAME) == 0;
    path = skip_head(pattern, (size_t)(stars - pattern), path);
    if (path == NULL)
        return 0;
    stars += 2;
    if (*stars == '\0')
        return 1;
    stars += *stars == '/';
    for (const char *at = path; at != NULL; at = strchr(at, '/')) {
        at += *at == '/';
        if (match_path(stars, at))
            return 1;
    }
    return 0;
}

static int rule_matches(const struct mb_ignore_rule *rule, const char *path, int is_dir)
{
    size_t base_len = strlen(rule->base);
    const char *below = path, *name;

    if (rule->only_dirs && !is_dir)
        return 0;
    if (base_len > 0) {
        if (strncmp(path, rule->base, base_len) != 0 || path[base_len] != '/')
            return 0;
        below = path + base_len + 1;
    }
    if (rule->anchored)
        return match_path(rule->pattern, below);
    name = strrchr(below, '/');
    return fnmatch(rule->pattern, name != NULL ? name + 1 : below, 0) == 0;
}

int mb_ignore_matches(const struct mb_ignore *ig, const char *path, int is_dir)
{
    for (size_t i = ig->n_rules; i > 0; i--) {
        if (rule_matches(&ig->rules[i - 1], path, is_dir))
            return !ig->rules[i - 1].negated;
    }
    return 0;
}

void mb_ignore_close(struct mb_ignore *ig)
{
    for (size_t i = 0; i < ig->n_rules; i++) {
        mb_free(ig->rules[i].base);
        mb_free(ig->rules[i].pattern);
    }
    mb_free(ig->rules);
    *ig = (struct mb_ignore){0};
}
