/* Any body of POST /api/jobs/: refused with a text, or a request whose fields have their types. */
#include <jansson.h>
#include <stdint.h>
#include <stdlib.h>
#include "gcs/job_request.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_err err = {0};
    json_t *request;
    int rc = mb_job_request_parse((const char *)data, size, &request, &err);

    if ((rc == 0) != json_is_object(request) || (rc != 0 && err.text[0] == '\0'))
        abort();
    if (rc == 0) {
        if (mb_job_request_check(request, &err) == 0) {
            json_t *metadata = json_object_get(request, "metadata"), *value;
            const char *name;

            if (!json_is_string(json_object_get(request, "entrypoint")))
                abort();
            json_object_foreach(metadata, name, value)
            {
                if (!json_is_string(value))
                    abort();
            }
        } else if (err.text[0] == '\0') {
            abort();
        }
    }
    json_decref(request);
    return 0;
}
