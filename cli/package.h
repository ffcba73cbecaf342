/*
 * A working directory as Ray's clients upload it: hashed, zipped without compression, named by its
 * hash, so that an unchanged directory is never sent twice. (ray-project: _private/runtime_env/
 * packaging.py; the rule stands in docs/formats.md.) Modules the same, below their own name; files
 * that are packages already as they are. Blocking: reads every file twice.
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
    char *left_out; /* owned; the first of what is neither file nor directory; NULL: none */
    size_t n_left_out;
    size_t skip;    /* bytes in front of each path that are not in the directory */
    int is_archive; /* sent as it is; it has no files */
    char name[208]; /* "_ray_pkg_0123456789abcdef.zip" */
};

/*
 * Lists and hashes dir, through links. What is neither a file nor a directory, also a link that
 * leads to nothing or too often to a link, is counted in left_out; its name is in the hash, as in
 * Ray's. Left out: .git, what .gitignore and .rayignore at any depth name, and the
 * patterns in excludes (NULL-terminated, may be NULL). MB_EFULL, with the largest files named, when
 * it holds more than max_bytes.
 */
int mb_package_scan(const char *dir, const char *const *excludes, uint64_t max_bytes,
                    struct mb_package *out, struct mb_err *err);
/*
 * A module of py_modules: a directory, or one .py file, which is in the package below its own name.
 * That name counts, unlike in Ray's hash: a package of the same files without it is another one.
 */
int mb_package_scan_module(const char *path, const char *const *excludes, uint64_t max_bytes,
                           struct mb_package *out, struct mb_err *err);
/* A file whose name ends as one of a package: .zip, .tar.gz, .tgz, .tar.xz; with is_module also
 * .whl, which keeps its name. */
int mb_package_is_archive(const char *path, int is_module);
int mb_package_scan_archive(const char *path, uint64_t max_bytes, struct mb_package *out,
                            struct mb_err *err);
/* Writes the zip into fd. dir: what was scanned. */
int mb_package_zip(const struct mb_package *p, const char *dir, int fd, struct mb_err *err);
void mb_package_close(struct mb_package *p);

#endif
