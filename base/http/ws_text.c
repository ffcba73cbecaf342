/*
 * UTF-8 repair and splitting for text frames.
 *
 * 1. A half character kept from the last feed is completed with the first new bytes.
 * 2. Whole characters are copied into a frame-sized piece; a full piece is emitted.
 * 3. Broken bytes are replaced by U+FFFD; a half character at the end is kept for the next feed.
 * Failure: emit refuses; its code is returned and the rest of the feed is dropped.
 */
#include "base/http/ws_text.h"

#include <string.h>
#include "base/str.h"

static const uint8_t replacement[3] = {0xef, 0xbf, 0xbd};

struct piece {
    uint8_t data[MB_WS_FRAME_BYTES];
    size_t len;
    mb_ws_text_emit emit;
    void *arg;
};

static int piece_flush(struct piece *out)
{
    int rc = out->len > 0 ? out->emit(out->arg, out->data, out->len) : 0;
    out->len = 0;
    return rc;
}

static int piece_add(struct piece *out, const uint8_t *p, size_t n)
{
    if (out->len + n > sizeof out->data) {
        int rc = piece_flush(out);
        if (rc < 0)
            return rc;
    }
    memcpy(out->data + out->len, p, n);
    out->len += n;
    return 0;
}

static size_t ascii_run(const uint8_t *p, size_t n, size_t max)
{
    size_t i = 0;
    if (n > max)
        n = max;
    while (n - i >= 8) { /* eight at a time: logs are mostly ASCII */
        uint64_t word;
        memcpy(&word, p + i, 8);
        if (word & 0x8080808080808080u)
            break;
        i += 8;
    }
    while (i < n && p[i] < 0x80)
        i++;
    return i;
}

/* Completes a kept half character from p; *used says how many bytes of p went into it. */
static int finish_carry(struct mb_ws_text *t, const uint8_t *p, size_t n, size_t *used,
                        struct piece *out)
{
    uint8_t s[8];
    size_t len = 0;
    size_t take = n < sizeof t->carry - t->n_carry ? n : sizeof t->carry - t->n_carry;
    memcpy(s, t->carry, t->n_carry);
    memcpy(s + t->n_carry, p, take);
    enum mb_utf8 v = mb_utf8_look(s, t->n_carry + take, &len);
    if (v == MB_UTF8_PARTIAL) {
        memcpy(t->carry, s, t->n_carry + take);
        t->n_carry += take;
        *used = take;
        return 0;
    }
    /* What was kept is a valid beginning, so a broken part is at least as long as it. */
    *used = len - t->n_carry;
    t->n_carry = 0;
    return v == MB_UTF8_WHOLE ? piece_add(out, s, len)
                              : piece_add(out, replacement, sizeof replacement);
}

int mb_ws_text_feed(struct mb_ws_text *t, const void *p, size_t n, mb_ws_text_emit emit, void *arg)
{
    struct piece out;
    const uint8_t *s = p;
    size_t i = 0;
    int rc = 0;
    out.len = 0;
    out.emit = emit;
    out.arg = arg;
    if (t->n_carry > 0 && n > 0)
        rc = finish_carry(t, s, n, &i, &out);
    while (rc >= 0 && i < n) {
        size_t len = ascii_run(s + i, n - i, sizeof out.data);
        if (len > 0) {
            size_t room = sizeof out.data - out.len;
            if (room > 0 && len > room)
                len = room;
            rc = piece_add(&out, s + i, len);
            i += len;
            continue;
        }
        enum mb_utf8 v = mb_utf8_look(s + i, n - i, &len);
        if (v == MB_UTF8_PARTIAL) {
            t->n_carry = n - i;
            memcpy(t->carry, s + i, t->n_carry);
            break;
        }
        if (v == MB_UTF8_WHOLE)
            rc = piece_add(&out, s + i, len);
        else
            rc = piece_add(&out, replacement, sizeof replacement);
        i += len;
    }
    return rc < 0 ? rc : piece_flush(&out);
}

int mb_ws_text_flush(struct mb_ws_text *t, mb_ws_text_emit emit, void *arg)
{
    if (t->n_carry == 0)
        return 0;
    t->n_carry = 0;
    return emit(arg, replacement, sizeof replacement);
}
