/* Has a package unpacked by mobula-unpack. */
#ifndef MOBULA_AGENT_UNPACK_RUN_H
#define MOBULA_AGENT_UNPACK_RUN_H

#include "base/err.h"

/*
 * As mb_unpack() with its usual limits, in a process of its own: program is the path of
 * mobula-unpack. Blocking; call from a thread that lives on. MB_ECORRUPT also for a package at
 * which the program dies.
 */
int mb_unpack_run(const char *program, const char *package, const char *dir, struct mb_err *err);

#endif
