/*
 * Amounts: each in Ray's order, under Ray's names; the first that cannot be is told. Ray looks at
 * some when it makes the actor, after all others.
 * Label selectors: Ray's two regular expressions, read by hand. A word is 1 to 63 of [A-Za-z0-9_.-]
 * that begins and ends with a letter or digit.
 */
#include "gcs/job_needs.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { UNITS_IN_ONE = 10000 }; /* Ray's RESOURCE_UNIT_SCALING */

static int check(const char *name, const json_t *amount, struct mb_err *err)
{
    double value = json_number_value(amount);

    if (value < 0)
        return mb_err_set(err, MB_EINVAL, "The quantity of resource %.100s cannot be negative",
                          name);
    if (json_is_real(amount) && value != 0 && value * UNITS_IN_ONE < 1)
        return mb_err_set(
            err, MB_EINVAL,
            "The precision of the fractional quantity of resource %.100s cannot go beyond 0.0001",
            name);
    return 0;
}

/* What has a field of its own is counted and given by that field alone. */
static int check_names(const json_t *resources, struct mb_err *err)
{
    if (json_object_get(resources, "CPU") || json_object_get(resources, "GPU"))
        return mb_err_set(err, MB_EINVAL,
                          "Use the 'num_cpus' and 'num_gpus' keyword instead of 'CPU' and 'GPU' in "
                          "'resources' keyword");
    if (json_object_get(resources, "mobula_gpu"))
        return mb_err_set(err, MB_EINVAL,
                          "Use the 'num_gpus' keyword instead of 'mobula_gpu' in 'resources' "
                          "keyword");
    return 0;
}

static int check_later(const json_t *info, const json_t *resources, struct mb_err *err)
{
    double gpus = json_number_value(json_object_get(info, "entrypoint_num_gpus"));
    char text[32];

    if (json_object_get(resources, "memory") || json_object_get(resources, "object_store_memory"))
        return mb_err_set(err, MB_EINVAL,
                          "The resources dictionary must not contain the key 'memory' or "
                          "'object_store_memory'");
    if (gpus <= 1 || gpus == floor(gpus))
        return 0;
    snprintf(text, sizeof text, "%.15g", gpus);
    return mb_err_set(err, MB_EINVAL,
                      "('GPU resource quantities >1 must', ' be whole numbers. The specified "
                      "quantity %s is invalid.')",
                      text);
}

int mb_job_needs_check(const json_t *info, struct mb_err *err)
{
    static const char *const fields[][2] = {{"entrypoint_num_cpus", "num_cpus"},
                                            {"entrypoint_num_gpus", "num_gpus"},
                                            {"entrypoint_memory", "memory"}};
    const json_t *resources = json_object_get(info, "entrypoint_resources");
    const char *name;
    json_t *amount;
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < sizeof fields / sizeof fields[0]; i++)
        rc = check(fields[i][1], json_object_get(info, fields[i][0]), err);
    if (rc == 0)
        rc = check_names(resources, err);
    json_object_foreach((json_t *)(uintptr_t)resources, name, amount)
    {
        if (rc == 0)
            rc = check(name, amount, err);
    }
    return rc == 0 ? check_later(info, resources, err) : rc;
}

/* One of "v, w)"; the closing bracket is the list's own. */
static int is_in_list(const char *list, const char *value)
{
    size_t n = strlen(value);

    while (*list != '\0' && *list != ')') {
        size_t item = strcspn(list, ",)");

        if (item == n && memcmp(list, value, n) == 0)
            return 1;
        list += item;
        list += strspn(list, ", ");
    }
    return 0;
}

int mb_job_label_matches(const char *selector, const char *value)
{
    int is_not = *selector == '!', found;

    selector += is_not;
    if (strncmp(selector, "in(", 3) == 0)
        found = value && is_in_list(selector + 3, value);
    else if (*selector == '(')
        found = value && is_in_list(selector + 1, value);
    else
        found = value && strcmp(selector, value) == 0;
    return found != is_not;
}

/* ---- the form of a selector ---- */

enum { WORD_MAX = 63, PREFIX_MAX = 253 };

static int is_alnum(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

static int is_word(const char *p, size_t n)
{
    if (n == 0 || n > WORD_MAX || !is_alnum(p[0]) || !is_alnum(p[n - 1]))
        return 0;
    for (size_t i = 0; i < n; i++)
        if (!is_alnum(p[i]) && p[i] != '_' && p[i] != '.' && p[i] != '-')
            return 0;
    return 1;
}

/* Words with dots between them; a word may be missing, and has dots of its own. begins[i]: what is
 * before i is such a list, and a word or a dot may follow. */
static int is_prefix(const char *p, size_t n)
{
    char begins[PREFIX_MAX + 2] = {1};

    if (n > PREFIX_MAX)
        return 0;
    for (size_t i = 0; i <= n; i++) {
        if (!begins[i])
            continue;
        if (i == n)
            return 1;
        begins[i + 1] |= p[i] == '.';
        for (size_t m = 1; m <= WORD_MAX && i + m <= n; m++) {
            if (!is_word(p + i, m))
                continue;
            if (i + m == n)
                return 1;
            begins[i + m + 1] |= p[i + m] == '.';
        }
    }
    return 0;
}

static int check_key(const char *key, struct mb_err *err)
{
    const char *slash = strrchr(key, '/'), *name = slash ? slash + 1 : key;

    if (slash && !is_prefix(key, (size_t)(slash - key)))
        return mb_err_set(err, MB_EINVAL,
                          "Invalid label key prefix `%.*s`. Prefix must be a series of DNS labels "
                          "separated by dots (.), not longer than 253 characters in total.",
                          (int)(slash - key), key);
    if (!is_word(name, strlen(name)))
        return mb_err_set(
            err, MB_EINVAL,
            "Invalid label key name `%s`. Name must be 63 chars or less beginning and "
            "ending with an alphanumeric character ([a-z0-9A-Z]) with dashes (-), "
            "underscores (_),dots (.), and alphanumerics between.",
            name);
    return 0;
}

/* "", "v", "!v", "in(v, w)", "!in(v,w)", "(v)". */
static int is_condition(const char *p)
{
    size_t n;

    if (*p == '\0')
        return 1;
    p += *p == '!';
    if (strncmp(p, "in(", 3) == 0)
        p += 2;
    if (*p != '(')
        return is_word(p, strlen(p));
    do {
        p++;
        p += p[-1] == ',' && *p == ' ';
        n = strcspn(p, ",)");
        if (!is_word(p, n))
            return 0;
        p += n;
    } while (*p == ',');
    return strcmp(p, ")") == 0;
}

int mb_job_selector_check(const json_t *selector, struct mb_err *err)
{
    const char *key;
    json_t *value;
    int rc = 0;

    json_object_foreach((json_t *)(uintptr_t)selector, key, value)
    {
        if (rc == 0)
            rc = check_key(key, err);
        if (rc == 0 && !is_condition(json_string_value(value)))
            rc = mb_err_set(
                err, MB_EINVAL,
                "Invalid label selector value `%s`. The label selector value should contain "
                "optional operators and a label value. Supported operators are: ! and {'in'}. "
                "Value must be 63 chars or less beginning and ending with an alphanumeric "
                "character ([a-z0-9A-Z]) with dashes (-), underscores (_),dots (.), and "
                "alphanumerics between.",
                json_string_value(value));
    }
    return rc;
}
