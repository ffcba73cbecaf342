/* Any runtime_env: refused with a text, or references whose parts are what they say. */
#include <jansson.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "gcs/runtime_env.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    json_t *env = json_loadb((const char *)data, size, 0, NULL);
    struct mb_runtime_env out;
    struct mb_err err = {0};

    if (json_is_object(env)) {
        if (mb_runtime_env_parse(env, &out, &err) != 0) {
            if (err.text[0] == '\0')
                abort();
        } else {
            for (size_t i = 0; i < out.n_refs; i++) {
                const struct mb_runtime_env_ref *r = &out.refs[i];

                if (r->rest < r->uri || r->rest > r->uri + strlen(r->uri) ||
                    (r->place == MB_RUNTIME_ENV_IN_PLACE && r->rest[0] != '/'))
                    abort();
            }
        }
    }
    json_decref(env);
    return 0;
}
