/* Any bytes as a request target: parsing and matching end, and what they hand out is text. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "base/http/route.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const patterns[] = {"/", "/api/jobs/{id}/logs", "/{a}/{b}/{rest*}", "/{x}/"};
    struct mb_http_target t = {0};
    char *uri = malloc(size + 1);
    if (!uri)
        return 0;
    memcpy(uri, data, size);
    uri[size] = '\0';
    if (mb_http_target_parse(uri, &t) == 0) {
        size_t sum = strlen(t.path);
        for (size_t i = 0; i < t.n_query; i++)
            sum += strlen(t.query[i].name) + strlen(t.query[i].value);
        for (size_t p = 0; p < sizeof patterns / sizeof *patterns; p++) {
            if (mb_http_target_match(&t, patterns[p]) == 1) {
                for (size_t i = 0; i < t.n_params; i++)
                    sum += strlen(t.params[i].value);
            }
        }
        if (sum > 8 * size + 64)
            abort();
    }
    mb_http_target_close(&t);
    free(uri);
    return 0;
}
