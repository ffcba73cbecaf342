#include "tests/unit/worker/args_line.h"

#include <string.h>
#include "base/alloc.h"

int parse_line(const char *line, struct mb_args *args, struct mb_err *err)
{
    char *text = mb_strdup(line);
    const char *argv[128];
    int argc = 0;
    for (char *w = strtok(text, " "); w != NULL; w = strtok(NULL, " ")) {
        argv[argc++] = w;
    }
    mb_err_clear(err);
    int rc = mb_args_parse(args, argc, argv, err);
    mb_free(text);
    return rc;
}

int validate_line(const char *line, uint32_t world, struct mb_args *args, struct mb_err *err)
{
    int rc = parse_line(line, args, err);
    return rc == 0 ? mb_args_validate(args, 0, world, err) : rc;
}
