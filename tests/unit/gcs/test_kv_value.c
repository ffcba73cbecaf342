/* An InternalKVGetReply in every division into two pieces, and what is none. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "gcs/kv_value.h"

#define WHOLE(text) (const uint8_t *)(text), sizeof(text) - 1

struct sunk {
    char bytes[64];
    size_t len;
    int fails;
};

static int sink(void *arg, const void *p, size_t n, struct mb_err *err)
{
    struct sunk *s = arg;

    if (s->fails)
        return mb_err_set(err, MB_EIO, "a full disk");
    assert_true(n > 0 && s->len + n <= sizeof(s->bytes));
    memcpy(s->bytes + s->len, p, n);
    s->len += n;
    return 0;
}

static int read_in_two(const uint8_t *p, size_t n, size_t first, struct sunk *s, struct mb_err *err)
{
    struct mb_kv_value v;
    int rc;

    mb_kv_value_init(&v);
    rc = mb_kv_value_feed(&v, p, first, sink, s, err);
    if (rc == 0)
        rc = mb_kv_value_feed(&v, p + first, n - first, sink, s, err);
    return rc == 0 ? mb_kv_value_end(&v, err) : rc;
}

/* want NULL: nothing is asked of the value. */
static void check(const uint8_t *p, size_t n, int code, const char *want)
{
    for (size_t first = 0; first <= n; first++) {
        struct sunk s = {{0}, 0, 0};
        struct mb_err err = {0};

        assert_int_equal(read_in_two(p, n, first, &s, &err), code);
        if (want != NULL) {
            assert_int_equal(s.len, strlen(want));
            assert_memory_equal(s.bytes, want, s.len);
        }
    }
}

static void values(void **state)
{
    (void)state;
    check(WHOLE("\x0a\x00\x12\x05hello"), 0, "hello");
    check(WHOLE("\x12\x05hello\x0a\x00"), 0, "hello"); /* another order */
    check(WHOLE("\x12\x05hello"), 0, "hello");
    check(WHOLE("\x0a\x00"), 0, "");
    check(WHOLE(""), 0, "");
    check(WHOLE("\x12\x00"), 0, "");
    check(WHOLE("\x12\x85\x80\x00hello"), 0, "hello"); /* a length that is longer than it must be */
    check(WHOLE("\x0a\x02\x08\x00\x18\xff\x01\x21"
                "12345678\x2d"
                "1234\x32\x03new\x12\x02hi\xfa\x7f\x01x"),
          0, "hi"); /* fields of another version */
}

static void what_the_head_says(void **state)
{
    struct sunk s = {{0}, 0, 0};
    struct mb_err err = {0};

    (void)state;
    check(WHOLE("\x0a\x06\x08\x11\x12\x02no"), MB_ENOENT, "");
    check(WHOLE("\x0a\x02\x08\x11\x0a\x04\x12\x02no"), MB_ENOENT, ""); /* in two parts */
    assert_int_equal(read_in_two(WHOLE("\x0a\x06\x08\x01\x12\x02no"), 3, &s, &err), MB_ESTATE);
    assert_string_equal(err.text, "no (GCS status 1)");
}

static void no_value(void **state)
{
    uint8_t large[MB_KV_STATUS_MAX + 4] = "\x0a\x81\x20";

    (void)state;
    check(WHOLE("\x12\x06hello"), MB_EPROTO, "hello"); /* cut short */
    check(WHOLE("\x12\x05hello\x12"), MB_EPROTO, "hello");
    check(WHOLE("\x12\x05hello\x0a\x80"), MB_EPROTO, "hello");
    check(WHOLE("\x12\x02no\x12\x03two"), MB_EPROTO, "no");
    check(WHOLE("\x00\x01"), MB_EPROTO, ""); /* no field */
    check(WHOLE("\x0b\x0c"), MB_EPROTO, ""); /* a group */
    check(WHOLE("\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02"), MB_EPROTO, "");
    check(WHOLE("\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), MB_EPROTO, "");
    check(WHOLE("\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01x"), MB_EPROTO, "x");
    check(WHOLE("\x0a\x02\x08\x80"), MB_EPROTO, ""); /* a status that is none */
    check(large, sizeof(large), MB_EPROTO, "");
}

static void a_sink_that_fails(void **state)
{
    struct sunk s = {{0}, 0, 1};
    struct mb_err err = {0};

    (void)state;
    assert_int_equal(read_in_two(WHOLE("\x0a\x00\x12\x05hello"), 0, &s, &err), MB_EIO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values),
        cmocka_unit_test(what_the_head_says),
        cmocka_unit_test(no_value),
        cmocka_unit_test(a_sink_that_fails),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
