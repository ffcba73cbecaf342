/* Any bytes, cut anywhere, become the same valid UTF-8. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "base/buf.h"
#include "base/http/ws_text.h"
#include "base/str.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int collect(void *arg, const uint8_t *p, size_t n)
{
    if (n == 0 || n > MB_WS_FRAME_BYTES || !mb_utf8_valid(p, n))
        abort();
    return mb_buf_add(arg, p, n);
}

static void feed(const uint8_t *data, size_t size, size_t step, struct mb_buf *out)
{
    struct mb_ws_text t = {0};
    for (size_t i = 0; i < size; i += step)
        mb_ws_text_feed(&t, data + i, size - i < step ? size - i : step, collect, out);
    mb_ws_text_flush(&t, collect, out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_buf whole = {0};
    struct mb_buf cut = {0};
    if (size < 1)
        return 0;
    feed(data + 1, size - 1, size, &whole);
    feed(data + 1, size - 1, 1 + data[0] % 7, &cut);
    if (whole.len != cut.len || (whole.len > 0 && memcmp(whole.data, cut.data, whole.len) != 0))
        abort();
    mb_buf_close(&whole);
    mb_buf_close(&cut);
    return 0;
}
