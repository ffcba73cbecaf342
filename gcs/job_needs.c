/* 1. Each amount in Ray's order, under Ray's names; 2. the first that is negative is told. */
#include "gcs/job_needs.h"

#include <string.h>

static int check(const char *name, const json_t *amount, struct mb_err *err)
{
    if (json_number_value(amount) < 0)
        return mb_err_set(err, MB_EINVAL, "The quantity of resource %.100s cannot be negative",
                          name);
    return 0;
}

int mb_job_needs_check(const json_t *info, struct mb_err *err)
{
    static const char *const fields[][2] = {{"entrypoint_num_cpus", "num_cpus"},
                                            {"entrypoint_num_gpus", "num_gpus"},
                                            {"entrypoint_memory", "memory"}};
    const char *name;
    json_t *amount;
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < sizeof fields / sizeof fields[0]; i++)
        rc = check(fields[i][1], json_object_get(info, fields[i][0]), err);
    json_object_foreach(json_object_get(info, "entrypoint_resources"), name, amount)
    {
        if (rc == 0)
            rc = check(name, amount, err);
    }
    return rc;
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
