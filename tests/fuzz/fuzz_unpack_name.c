/* Any name of an archive's entry: one that is let in never climbs above its directory. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "agent/unpack/unpack.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *name = malloc(size + 1), *save = NULL;
    long depth = 0;

    if (name == NULL)
        return 0;
    memcpy(name, data, size);
    name[size] = '\0';
    if (mb_unpack_is_inside(name)) {
        if (name[0] == '/')
            abort();
        for (char *part = strtok_r(name, "/", &save); part != NULL;
             part = strtok_r(NULL, "/", &save)) {
            depth += strcmp(part, "..") == 0 ? -1 : strcmp(part, ".") == 0 ? 0 : 1;
            if (depth < 0)
                abort();
        }
    }
    free(name);
    return 0;
}
