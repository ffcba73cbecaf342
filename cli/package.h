/*
 * A working directory as Ray's clients upload it: hashed, zipped without compression, named by its
 * hash, so that an unchanged directory is never sent twice. (ray-project: _private/runtime_env/
 * packaging.py; the rule stands in docs/formats.md.) Blocking: reads every file twice.
 */
#ifndef MOBULA_CLI_PACKAGE_H
#define MOBULA_CLI_PACKAGE_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum { MB_PACKAGE_MAX_BYTES = 100 << 20 }; /* what a head accepts that says nothing else */

struct mb_package_file {
    char *path; /* owned; relative to the directory */
    int is_dir;
    uint64_t size_bytes;
};

struct mb_package {
    struct mb_package_file *files; /* owned; parents before children */
    size_t n_files;
    uint64_t total_bytes;
    char name[32]; /* "_ray_pkg_0123456789abcdef.zip" */
};

/*
 * Lists and hashes dir. Left out: .git, what .gitignore and .rayignore at any depth name, and the
 * patterns in excludes (NULL-terminated, may be NULL). MB_EFULL, with the largest files named, when
 * it holds more than max_bytes.
 */
int mb_package_scan(const char *dir, const char *const *excludes, uint64_t max_bytes,
                    struct mb_package *out, struct mb_err *err);
/* Writes the zip into fd. */
int mb_package_zip(const struct mb_package *p, const char *dir, int fd, struct mb_err *err);
void mb_package_close(struct mb_package *p);

#endif
