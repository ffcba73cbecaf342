/*
 * Any bytes as the frames of a server, in two cuts: the same pieces of messages and control frames
 * come out, of bytes that were there, and none after a refusal.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "base/checksum.h"
#include "base/http/ws_frame.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct sum {
    uint32_t crc;
    size_t bytes;
};

static void add(struct sum *s, int opcode, const uint8_t *p, size_t n)
{
    uint8_t kind = (uint8_t)opcode;

    for (size_t i = 0; i < n; i++) {
        s->crc = mb_crc32c(s->crc, &kind, 1);
        s->crc = mb_crc32c(s->crc, p + i, 1);
    }
    s->bytes += n;
}

static void on_data(void *arg, int opcode, const uint8_t *p, size_t n)
{
    if (n == 0 || (opcode != MB_WS_OP_TEXT && opcode != MB_WS_OP_BINARY))
        abort();
    add(arg, opcode, p, n);
}

static void on_control(void *arg, int opcode, const uint8_t *p, size_t n)
{
    struct sum *s = arg;

    if (n > MB_WS_CONTROL_MAX)
        abort();
    s->crc = mb_crc32c(s->crc, "c", 1);
    add(s, opcode, p, n);
}

static int feed(const uint8_t *data, size_t size, size_t step, struct sum *s)
{
    static const struct mb_ws_frame_ops ops = {.on_data = on_data, .on_control = on_control};
    struct mb_ws_frames f = {0};
    struct mb_err err;
    int rc = 0;

    for (size_t at = 0; at < size && rc == 0; at += step)
        rc = mb_ws_frames_feed(&f, data + at, size - at < step ? size - at : step, &ops, s, &err);
    return rc;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct sum a = {0, 0}, b = {0, 0};

    if (size < 2)
        return 0;
    int ra = feed(data + 1, size - 1, data[0] ? data[0] : 1, &a);
    int rb = feed(data + 1, size - 1, size, &b);
    if (ra != rb || a.crc != b.crc || a.bytes != b.bytes || a.bytes > size)
        abort();
    return 0;
}
