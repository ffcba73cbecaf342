/* Any bytes as a compressed input: an error or some output, and never more than was asked for. The
 * first byte picks how much is handed over at a time. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "worker/data/input/codec.h"

enum { OUT_BYTES = 1000, MAX_OUT_BYTES = 1 << 22 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void run(const struct mb_codec_ops *ops, const uint8_t *data, size_t size, size_t step)
{
    uint8_t out[OUT_BYTES];
    struct mb_codec *codec = NULL;
    struct mb_codec_io io = {.in = data};
    size_t given = 0;
    size_t made = 0;
    struct mb_err err;
    int rc = ops->create(&codec, &err);

    while (rc >= 0 && made < MAX_OUT_BYTES) {
        size_t before = io.in_bytes;

        io.out = out;
        io.out_bytes = OUT_BYTES;
        io.at_end = given == size;
        rc = ops->step(codec, &io, &err);
        if (io.out_bytes > OUT_BYTES || io.in_bytes > before)
            abort();
        made += OUT_BYTES - io.out_bytes;
        if (io.in_bytes == before && io.out_bytes == OUT_BYTES) { /* it wants more */
            if (given == size)
                break;
            size_t more = size - given < step ? size - given : step;
            given += more;
            io.in_bytes += more;
        }
    }
    if (codec != NULL)
        ops->destroy(codec);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const struct mb_codec_ops *ops;
    struct mb_err err;

    if (size < 1 || mb_codec_find(data + 1, size - 1, &ops, &err) != 0 || ops == NULL)
        return 0;
    run(ops, data + 1, size - 1, data[0] == 0 ? size : data[0]);
    return 0;
}
