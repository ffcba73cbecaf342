/* Any bytes on the report socket: refused, incomplete, or a message that encodes again. */
#include <stdint.h>
#include <stdlib.h>
#include "worker/report.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_buf in = {0}, out = {0};
    struct mb_report r;
    struct mb_err err;
    if (mb_buf_add(&in, data, size) != 0) {
        return 0;
    }
    while (mb_report_decode(&in, &r, &err) == 1) {
        if (mb_report_encode(&r, &out, &err) == MB_EINVAL) {
            abort();
        }
        mb_buf_reset(&out);
        mb_report_close(&r);
    }
    mb_buf_close(&in);
    mb_buf_close(&out);
    return 0;
}
