/* Any bytes as a runtime_env in YAML: refused with a line, or JSON that is not deeper than the
 * bound and comes back the same from its own text. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "cli/yaml_json.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int depth_of(const json_t *v)
{
    const char *key;
    json_t *item;
    size_t i;
    int deepest = 0;

    json_array_foreach((json_t *)(uintptr_t)v, i, item)
    {
        int d = depth_of(item);
        deepest = d > deepest ? d : deepest;
    }
    json_object_foreach((json_t *)(uintptr_t)v, key, item)
    {
        int d = depth_of(item);
        deepest = d > deepest ? d : deepest;
    }
    return deepest + 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_err err = {0};
    json_t *made, *again;
    char *text;
    int rc = mb_yaml_json((const char *)data, size, &made, &err);

    if (rc != 0) {
        if (made != NULL || err.text[0] == '\0')
            abort();
        return 0;
    }
    if (made == NULL || depth_of(made) > MB_YAML_DEPTH_MAX + 1)
        abort();
    text = json_dumps(made, JSON_ENCODE_ANY);
    again = text != NULL ? json_loads(text, JSON_DECODE_ANY, NULL) : NULL;
    if (again == NULL || !json_equal(made, again))
        abort();
    free(text);
    json_decref(again);
    json_decref(made);
    return 0;
}
