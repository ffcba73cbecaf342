/* A size, and then its bounds. What a node's hard limit allows is known there only. */
#include "base/joblimit.h"

#include "base/str.h"

enum { NOFILE_MIN = 16, NOFILE_MAX = 1 << 30, MEMORY_MIN_BYTES = 1 << 20 };

int mb_joblimit_memory(const char *s, const char *what, uint64_t *out_bytes, struct mb_err *err)
{
    uint64_t bytes;

    *out_bytes = 0;
    if (mb_parse_size(s, what, &bytes, err) != 0)
        return MB_EINVAL;
    if (bytes < MEMORY_MIN_BYTES || bytes > INT64_MAX)
        return mb_err_set(err, MB_EINVAL, "%s: at least 1MiB, not %s", what, s);
    *out_bytes = bytes;
    return 0;
}

int mb_joblimit_log(const char *s, const char *what, uint64_t *out_bytes, struct mb_err *err)
{
    uint64_t bytes;

    *out_bytes = 0;
    if (mb_parse_size(s, what, &bytes, err) != 0)
        return MB_EINVAL;
    if ((bytes != 0 && bytes < MB_JOBLIMIT_LOG_MIN_BYTES) || bytes > INT64_MAX)
        return mb_err_set(err, MB_EINVAL, "%s: 0 (no cap) or at least %dKiB, not %s", what,
                          MB_JOBLIMIT_LOG_MIN_BYTES >> 10, s);
    *out_bytes = bytes;
    return 0;
}

int mb_joblimit_nofile(const char *s, const char *what, uint64_t *out, struct mb_err *err)
{
    uint64_t files;

    *out = 0;
    if (mb_parse_size(s, what, &files, err) != 0)
        return MB_EINVAL;
    if (files < NOFILE_MIN || files > NOFILE_MAX)
        return mb_err_set(err, MB_EINVAL, "%s: %d to %d, not %s", what, NOFILE_MIN, NOFILE_MAX, s);
    *out = files;
    return 0;
}
