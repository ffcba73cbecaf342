/* Packages of a runtime_env: .zip, .whl, .tar.gz, .tgz, .tar.xz. Blocking; call from a thread. */
#ifndef MOBULA_AGENT_UNPACK_H
#define MOBULA_AGENT_UNPACK_H

#include "base/err.h"

/*
 * Unpacks into dir, which must exist. An entry that would lie outside of dir (an absolute path, a
 * "..", a way through a link) or a package beyond the bounds (1 M entries, 64 GiB unpacked) is
 * refused with its name: MB_EDENIED, MB_EFULL; MB_ECORRUPT for what is no archive. What was
 * unpacked before stays: the caller removes dir.
 */
int mb_unpack(const char *package, const char *dir, struct mb_err *err);

#endif
