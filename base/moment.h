/* Points in time as people write them. Pure; any thread. */
#ifndef MOBULA_BASE_MOMENT_H
#define MOBULA_BASE_MOMENT_H

#include <stdint.h>
#include "base/err.h"

/* "90m", "30s": so long after now. "@1764000000": seconds since the epoch, with a fraction if need
 * be. "2026-11-22T10:00:00Z", "...+01:00": RFC 3339, its offset is a must, since machines differ in
 * their time zones. Milliseconds since the epoch; what names the flag or variable in the error.
 * MB_EINVAL: none of these. */
int mb_moment_parse(const char *s, uint64_t now_unix_ms, const char *what, uint64_t *out,
                    struct mb_err *err);

#endif
