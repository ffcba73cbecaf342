/*
 * 1. Two bytes of a head say how many more belong to it; 2. they are judged; 3. the payload is
 * handed out where it lies, but a control frame's is gathered: it comes as one.
 */
#include "base/http/ws_frame.h"

#include <string.h>

enum { FIN = 0x80, RSV = 0x70, OPCODE = 0x0f, MASKED = 0x80, LENGTH = 0x7f, LENGTH_16 = 126 };

static int is_control(int opcode)
{
    return opcode >= MB_WS_OP_CLOSE;
}

static size_t head_size(const struct mb_ws_frames *f)
{
    int length = f->n_head < 2 ? 0 : f->head[1] & LENGTH;
    return length < LENGTH_16 ? 2 : length == LENGTH_16 ? 4 : 10;
}

static int judge_head(struct mb_ws_frames *f, struct mb_err *err)
{
    int fin = f->head[0] & FIN;
    int opcode = f->head[0] & OPCODE;
    uint64_t n = f->head[1] & LENGTH;
    if (f->n_head > 2) {
        n = 0;
        for (size_t i = 2; i < f->n_head; i++)
            n = n << 8 | f->head[i];
    }
    if ((f->head[0] & RSV) || (f->head[1] & MASKED) || n >> 63)
        return mb_err_set(err, MB_EPROTO, "a WebSocket frame has bits that a server may not set");
    if (is_control(opcode) ? opcode > MB_WS_OP_PONG || !fin || n > MB_WS_CONTROL_MAX
                           : opcode > MB_WS_OP_BINARY || (opcode == 0) != (f->message != 0))
        return mb_err_set(err, MB_EPROTO, "a WebSocket frame of kind %d is out of place", opcode);
    if (!is_control(opcode)) {
        f->opcode = opcode ? opcode : f->message;
        f->message = fin ? 0 : f->opcode;
    } else {
        f->opcode = opcode;
        f->n_control = 0;
    }
    f->left = n;
    f->in_payload = 1;
    return 0;
}

int mb_ws_frames_feed(struct mb_ws_frames *f, const void *bytes, size_t n,
                      const struct mb_ws_frame_ops *ops, void *arg, struct mb_err *err)
{
    const uint8_t *p = bytes;
    while (n > 0 || (f->in_payload && f->left == 0)) {
        size_t take;
        if (!f->in_payload) {
            f->head[f->n_head++] = *p++;
            n--;
            if (f->n_head >= 2 && f->n_head == head_size(f) && judge_head(f, err) != 0)
                return MB_EPROTO;
            continue;
        }
        take = n < f->left ? n : (size_t)f->left;
        if (is_control(f->opcode)) {
            if (take > 0)
                memcpy(f->control + f->n_control, p, take);
            f->n_control += take;
        } else if (take > 0) {
            ops->on_data(arg, f->opcode, p, take);
        }
        p += take;
        n -= take;
        f->left -= take;
        if (f->left > 0)
            return 0;
        f->in_payload = 0;
        f->n_head = 0;
        if (is_control(f->opcode))
            ops->on_control(arg, f->opcode, f->control, f->n_control);
    }
    return 0;
}

size_t mb_ws_frame_control(int opcode, const void *p, size_t n, const uint8_t mask[4],
                           uint8_t out[MB_WS_CONTROL_FRAME_MAX])
{
    const uint8_t *in = p;
    out[0] = (uint8_t)(FIN | opcode);
    out[1] = (uint8_t)(MASKED | n);
    memcpy(out + 2, mask, 4);
    for (size_t i = 0; i < n; i++)
        out[6 + i] = in[i] ^ mask[i % 4];
    return n + 6;
}
