/* Any lines NAME=value as a job's environment, and each as a number of a query: refused with a
 * reason, or within the bounds that the header promises. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "agent/job_limits.h"
#include "agent/log_keeper.h"
#include "agent/log_plan.h"
#include "base/str.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { VARS_MAX = 64 };

static void check_number(const char *text)
{
    struct mb_err err = {0};
    int64_t n = -1, cap = 0;
    uint64_t bytes = 0;

    if (mb_parse_i64(text, 0, INT64_MAX / 4, "offset", &n, &err) == 0
            ? n < 0 || n > INT64_MAX / 4
            : n != -1 || err.text[0] == '\0')
        abort();
    if (mb_log_cap_parse(text, &cap, &err) == 0 ? cap != 0 && cap < MB_LOG_PLAN_CAP_MIN : cap != -1)
        abort();
    if (mb_parse_size(text, "size", &bytes, &err) != 0 && bytes != 0)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_job_limits limits = {.nofile = 7}, before = limits;
    struct mb_err err = {0};
    char *vars[VARS_MAX + 1] = {NULL}, *text = malloc(size + 1), *save = NULL;
    size_t n = 0;

    if (text == NULL)
        return 0;
    memcpy(text, data, size);
    text[size] = '\0';
    for (char *v = strtok_r(text, "\n", &save); v != NULL && n < VARS_MAX;
         v = strtok_r(NULL, "\n", &save)) {
        char *value = strchr(v, '=');

        vars[n++] = v;
        check_number(value != NULL ? value + 1 : v);
    }
    if (mb_job_limits_read(vars, &limits, &err) != 0) {
        if (memcmp(&limits, &before, sizeof(limits)) != 0 || err.text[0] == '\0')
            abort();
    } else if ((limits.memory_bytes != 0 && limits.memory_bytes < 1 << 20) ||
               limits.memory_bytes > INT64_MAX || (limits.nofile != 0 && limits.nofile < 16) ||
               limits.nofile > 1 << 30 || (limits.core_files & ~1) != 0) {
        abort();
    }
    free(text);
    return 0;
}
