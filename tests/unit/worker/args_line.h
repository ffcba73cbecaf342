/* Command lines of the trainer as one text, its words apart by spaces. */
#ifndef MOBULA_TESTS_ARGS_LINE_H
#define MOBULA_TESTS_ARGS_LINE_H

#include <stdint.h>
#include "worker/args.h"

/* As mb_args_parse(); err is cleared before. At most 128 words. */
int parse_line(const char *line, struct mb_args *args, struct mb_err *err);

/* ... and what it says checked as rank 0 of so many. */
int validate_line(const char *line, uint32_t world, struct mb_args *args, struct mb_err *err);

#endif
