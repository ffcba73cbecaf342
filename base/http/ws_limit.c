/*
 * 1. Two bytes of a head say how many more of them are the length; 2. the length is judged; 3. mask
 * and payload are passed over.
 */
#include "base/http/ws_limit.h"

enum { CONTROL = 0x08, MASKED = 0x80, LENGTH = 0x7f, LENGTH_16 = 126, CONTROL_MAX = 125 };
enum { PROTOCOL_ERROR = 1002, TOO_BIG = 1009 };

static size_t head_size(const struct mb_ws_limit *l)
{
    int length = l->n_head < 2 ? 0 : l->head[1] & LENGTH;

    return length < LENGTH_16 ? 2 : length == LENGTH_16 ? 4 : 10;
}

static int judge(struct mb_ws_limit *l, uint64_t max_bytes)
{
    uint64_t n = l->head[1] & LENGTH;

    if (l->n_head > 2) {
        n = 0;
        for (size_t i = 2; i < l->n_head; i++)
            n = n << 8 | l->head[i];
    }
    if ((l->head[0] & CONTROL) && n > CONTROL_MAX)
        return PROTOCOL_ERROR;
    if (n > max_bytes)
        return TOO_BIG;
    l->left = n + ((l->head[1] & MASKED) ? 4 : 0);
    l->n_head = 0;
    return 0;
}

int mb_ws_limit_feed(struct mb_ws_limit *l, const uint8_t *p, size_t n, uint64_t max_bytes)
{
    while (n > 0) {
        size_t take = 1;

        if (l->left > 0) {
            take = n < l->left ? n : (size_t)l->left;
            l->left -= take;
        } else {
            l->head[l->n_head++] = *p;
            int status = l->n_head >= 2 && l->n_head == head_size(l) ? judge(l, max_bytes) : 0;
            if (status != 0)
                return status;
        }
        p += take;
        n -= take;
    }
    return 0;
}
