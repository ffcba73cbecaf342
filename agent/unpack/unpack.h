/* Packages of a runtime_env: .zip, .whl, .tar.gz, .tgz, .tar.xz. Blocking. */
#ifndef MOBULA_AGENT_UNPACK_UNPACK_H
#define MOBULA_AGENT_UNPACK_UNPACK_H

#include <stdint.h>
#include "base/err.h"

/* What a package may become: the guard against an archive made to fill the disk. */
struct mb_unpack_limits {
    int entries;
    int64_t bytes;
};
extern const struct mb_unpack_limits mb_unpack_limits; /* 1 M entries, 64 GiB */

/*
 * Unpacks into dir, which must exist. An entry that would lie outside of dir (an absolute path, a
 * "..", a way through a link) or a package beyond the limits is refused with its name: MB_EDENIED,
 * MB_EFULL; MB_ECORRUPT for what is no such archive. What was unpacked before stays: the caller
 * removes dir.
 */
int mb_unpack(const char *package, const char *dir, const struct mb_unpack_limits *limits,
              struct mb_err *err);
/* 1 if the name of an entry (NULL: it has none) stays inside of the directory it is put into. */
int mb_unpack_is_inside(const char *name);

#endif
