/* Any bytes as a part or manifest from a store: refused, or paths that stay below their directory,
 * and an encoding that reads back as itself. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "agent/upload/manifest.h"
#include "base/alloc.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_paths(const struct mb_manifest *m)
{
    for (size_t i = 0; i < m->n_files; i++) {
        const char *path = m->files[i].path;

        if (path[0] == '/' || path[0] == '\0' || strcmp(path, "..") == 0 ||
            strncmp(path, "../", 3) == 0 || strstr(path, "/../") != NULL)
            abort();
        if (i > 0 && strcmp(m->files[i - 1].path, path) >= 0)
            abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_manifest m = {0}, again = {0};
    struct mb_err err;
    int64_t iteration;
    char *first = NULL, *second = NULL;

    if (mb_latest_parse(data, size, &iteration, &err) == 0 && iteration < 0)
        abort();
    if (mb_manifest_decode(data, size, "fuzz", &m, &err) != 0)
        return 0;
    check_paths(&m);
    if (mb_manifest_encode(&m, &first, &err) != 0 ||
        mb_manifest_decode(first, strlen(first), "fuzz", &again, &err) != 0 ||
        mb_manifest_encode(&again, &second, &err) != 0 || strcmp(first, second) != 0)
        abort();
    mb_free(first);
    mb_free(second);
    mb_manifest_close(&m);
    mb_manifest_close(&again);
    return 0;
}
