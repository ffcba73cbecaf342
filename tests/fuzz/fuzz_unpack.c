/*
 * Any bytes as a package: refused, or unpacked below its directory and nowhere else. The first byte
 * lets one of both bounds be small.
 */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "agent/unpack/unpack.h"
#include "base/fs.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* root/in is the package, root/dir where it goes; a step out of dir shows as a third name. */
static void check_root(const char *root)
{
    DIR *d = opendir(root);

    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 &&
            strcmp(e->d_name, "in") != 0 && strcmp(e->d_name, "dir") != 0)
            abort();
    if (d == NULL)
        abort();
    closedir(d);
}

/* Not synced: a thousand of them a second. */
static int write_package(const char *path, const uint8_t *p, size_t n)
{
    FILE *f = fopen(path, "wbe");
    int done = f != NULL && fwrite(p, 1, n, f) == n;

    return f != NULL && fclose(f) == 0 && done;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char root[] = "/tmp/mb-fuzz-unpack-XXXXXX", in[64], dir[64];
    struct mb_unpack_limits limits = {64, 1 << 20};
    struct mb_err err = {0};

    if (size == 0 || mkdtemp(root) == NULL)
        return 0;
    if (data[0] & 1)
        limits.entries = 1;
    if (data[0] & 2)
        limits.bytes = 1;
    snprintf(in, sizeof(in), "%s/in", root);
    snprintf(dir, sizeof(dir), "%s/dir", root);
    if (write_package(in, data + 1, size - 1) && mb_fs_mkdir_p(dir, 0700, &err) == 0)
        mb_unpack(in, dir, &limits, &err);
    check_root(root);
    if (mb_fs_remove_tree(root, &err) != 0)
        abort();
    return 0;
}
