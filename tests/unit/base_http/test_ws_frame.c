/* base/http/ws_frame: what servers may send is handed out, whole or in pieces; the rest is refused.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>
#include "base/http/ws_frame.h"

static char seen[4096];

static void on_data(void *arg, int opcode, const uint8_t *p, size_t n)
{
    size_t len = strlen(seen);
    (void)arg;
    for (size_t i = 0; i < n; i++)
        len += (size_t)snprintf(seen + len, sizeof seen - len, "%c%c",
                                opcode == MB_WS_OP_TEXT ? 't' : 'b', p[i]);
}

static void on_control(void *arg, int opcode, const uint8_t *p, size_t n)
{
    size_t len = strlen(seen);
    (void)arg;
    snprintf(seen + len, sizeof seen - len, "[%d:%.*s]", opcode, (int)n, (const char *)p);
}

static const struct mb_ws_frame_ops ops = {.on_data = on_data, .on_control = on_control};

struct row {
    const char *in;
    size_t n;
    const char *out;
    int code;
};
#define ROW(in, out, code)                                                                         \
    {                                                                                              \
        in, sizeof(in) - 1, out, code                                                              \
    }

static const struct row rows[] = {
    ROW("\x81\x02hi", "thti", 0),
    ROW("\x82\x02hi\x81\x00", "bhbi", 0),
    ROW("\x01\x01h\x89\x01p\x80\x01i\x88\x04\x03\xe8ok", "th[9:p]ti[8:\x03\xe8ok]", 0),
    ROW("\x02\x01h\x00\x00\x8a\x00\x80\x01i", "bh[10:]bi", 0),
    ROW("\x82\x7e\x00\x03"
        "abc",
        "babbbc", 0),
    ROW("\x82\x7f\x00\x00\x00\x00\x00\x00\x00\x03"
        "abc",
        "babbbc", 0),
    ROW("\x82\x7f\x80\x00\x00\x00\x00\x00\x00\x00", "",
        MB_EPROTO),                                   /* longer than there are bytes */
    ROW("\x81\x82\x00\x00\x00\x00hi", "", MB_EPROTO), /* masked */
    ROW("\xc1\x02hi", "", MB_EPROTO),                 /* a reserved bit */
    ROW("\x83\x00", "", MB_EPROTO),                   /* an unknown kind */
    ROW("\x8b\x00", "", MB_EPROTO),
    ROW("\x09\x00", "", MB_EPROTO),         /* a control frame in pieces */
    ROW("\x89\x7e\x00\x7e", "", MB_EPROTO), /* and one that is too long */
    ROW("\x80\x01x", "", MB_EPROTO),        /* goes on with nothing */
    ROW("\x81\x01x\x80\x01x", "tx", MB_EPROTO),
    ROW("\x01\x01x\x81\x01x", "tx", MB_EPROTO), /* a message inside of one */
};

static void test_rows(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        for (size_t step = 1; step <= rows[i].n; step++) {
            struct mb_ws_frames f = {0};
            struct mb_err err;
            int rc = 0;
            seen[0] = '\0';
            for (size_t at = 0; at < rows[i].n && rc == 0; at += step) {
                size_t left = rows[i].n - at;
                rc = mb_ws_frames_feed(&f, rows[i].in + at, left < step ? left : step, &ops, NULL,
                                       &err);
            }
            if (rc != rows[i].code || strcmp(seen, rows[i].out) != 0)
                fail_msg("row %zu step %zu: %d %s", i, step, rc, seen);
        }
    }
}

static void test_control_frames_are_masked(void **state)
{
    static const uint8_t mask[4] = {1, 2, 3, 4};
    uint8_t out[MB_WS_CONTROL_FRAME_MAX];
    (void)state;
    assert_int_equal(mb_ws_frame_control(MB_WS_OP_PONG, "abcde", 5, mask, out), 11);
    assert_memory_equal(out, "\x8a\x85\x01\x02\x03\x04``````", 7);
    for (int i = 0; i < 5; i++)
        assert_int_equal(out[6 + i] ^ mask[i % 4], "abcde"[i]);
    assert_int_equal(mb_ws_frame_control(MB_WS_OP_PING, "", 0, mask, out), 6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_control_frames_are_masked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
