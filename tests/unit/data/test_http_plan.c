/* What a broken download does next, without a server and without time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "worker/data/input/http_plan.h"

enum { OUTAGE_MS = 60000 };

static struct mb_http_plan_head ok(const char *etag, const char *length)
{
    return (struct mb_http_plan_head){.status = 200, .etag = etag, .content_length = length};
}

static struct mb_http_plan_head part(const char *etag, const char *range)
{
    return (struct mb_http_plan_head){.status = 206, .etag = etag, .content_range = range};
}

static enum mb_http_plan_next done(struct mb_http_plan *p, int code, long status, uint64_t now_ms,
                                   uint64_t *delay_ms, struct mb_err *err)
{
    struct mb_http_plan_head h = {.status = status};

    return mb_http_plan_done(p, code, "detail", &h, 0, now_ms, UINT64_MAX, delay_ms, err);
}

static void test_resume(void **state)
{
    struct mb_http_plan p;
    struct mb_http_plan_head h = ok("\"a\"", "100");
    struct mb_err err = {0};
    uint64_t delay_ms;
    char range[64];

    (void)state;
    mb_http_plan_init(&p, 0, OUTAGE_MS);
    assert_string_equal(mb_http_plan_range(&p, range), "");
    assert_int_equal(mb_http_plan_answer(&p, &h, &err), 0);
    assert_int_equal(mb_http_plan_bytes(&p, 40), 0);
    assert_int_equal(done(&p, MB_EUNAVAIL, 0, 1000, &delay_ms, &err), MB_HTTP_PLAN_RETRY);
    assert_string_equal(mb_http_plan_range(&p, range), "Range: bytes=40-");
    /* The part that was asked for. */
    h = part("\"a\"", "bytes 40-99/100");
    assert_int_equal(mb_http_plan_answer(&p, &h, &err), 0);
    assert_int_equal(mb_http_plan_bytes(&p, 10), 0);
    /* Well ended for the transport, and still too short. */
    assert_int_equal(done(&p, 0, 206, 2000, &delay_ms, &err), MB_HTTP_PLAN_RETRY);
    assert_non_null(strstr(err.text, "too early"));
    /* A server that ignores the range: what is known is dropped. */
    h = ok("\"a\"", "100");
    assert_int_equal(mb_http_plan_answer(&p, &h, &err), 0);
    assert_int_equal(mb_http_plan_bytes(&p, 30), 30);
    assert_int_equal(mb_http_plan_bytes(&p, 30), 20);
    assert_int_equal(p.offset, 60);
    assert_int_equal(mb_http_plan_bytes(&p, 40), 0);
    assert_int_equal(done(&p, 0, 200, 3000, &delay_ms, &err), MB_HTTP_PLAN_END);
}

static void test_changed(void **state)
{
    static const struct {
        const char *etag, *modified, *range;
        int code;
        const char *text;
    } cases[] = {
        {"\"a\"", "Mon", "bytes 40-99/100", 0, ""},
        {"\"b\"", "Mon", "bytes 40-99/100", MB_ESTATE, "ETag"},
        {"\"a\"", "Tue", "bytes 40-99/100", 0, ""}, /* the ETag decides */
        {NULL, "Tue", "bytes 40-99/100", MB_ESTATE, "date"},
        {NULL, "Mon", "bytes 40-99/101", MB_ESTATE, "length"},
        {NULL, NULL, "bytes 40-99/*", 0, ""},
        {"\"a\"", "Mon", "bytes 41-99/100", MB_EPROTO, "begins at 41"},
        {"\"a\"", "Mon", "bytes 30-99/100", 0, ""},
        {"\"a\"", "Mon", "bytes 40-", MB_EPROTO, "Content-Range"},
        {"\"a\"", "Mon", NULL, MB_EPROTO, "Content-Range"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct mb_http_plan p;
        struct mb_http_plan_head h = ok("\"a\"", "100");
        struct mb_err err = {0};

        h.modified = "Mon";
        mb_http_plan_init(&p, 0, OUTAGE_MS);
        assert_int_equal(mb_http_plan_answer(&p, &h, &err), 0);
        mb_http_plan_bytes(&p, 40);
        h = part(cases[i].etag, cases[i].range);
        h.modified = cases[i].modified;
        assert_int_equal(mb_http_plan_answer(&p, &h, &err), cases[i].code);
        assert_non_null(strstr(err.text, cases[i].text));
    }
}

static void test_nothing_to_compare(void **state)
{
    struct mb_http_plan p;
    struct mb_http_plan_head h = {.status = 200};
    struct mb_err err = {0};
    uint64_t delay_ms;

    (void)state;
    mb_http_plan_init(&p, 0, OUTAGE_MS);
    assert_int_equal(mb_http_plan_answer(&p, &h, &err), 0);
    mb_http_plan_bytes(&p, 40);
    assert_int_equal(mb_http_plan_answer(&p, &h, &err), MB_ESTATE);
    assert_non_null(strstr(err.text, "download it first"));
    /* Without a length the end is where the transport ends, or where 416 says so. */
    assert_int_equal(done(&p, 0, 200, 0, &delay_ms, &err), MB_HTTP_PLAN_END);
    assert_int_equal(done(&p, 0, 416, 0, &delay_ms, &err), MB_HTTP_PLAN_END);
}

static void test_tries(void **state)
{
    struct mb_http_plan p;
    struct mb_http_plan_head h = ok("\"a\"", "100");
    struct mb_err err = {0};
    uint64_t delay_ms;
    uint64_t now_ms = 5;
    unsigned n = 0;

    (void)state;
    /* Never reached: a few tries. */
    mb_http_plan_init(&p, 0, OUTAGE_MS);
    for (int i = 1; i < MB_HTTP_PLAN_FIRST_TRIES; i++)
        assert_int_equal(done(&p, MB_EUNAVAIL, 0, now_ms, &delay_ms, &err), MB_HTTP_PLAN_RETRY);
    assert_int_equal(done(&p, MB_EUNAVAIL, 0, now_ms, &delay_ms, &err), MB_HTTP_PLAN_FAIL);
    assert_int_equal(err.code, MB_EUNAVAIL);
    assert_non_null(strstr(err.text, "check the address"));
    /* In the middle: for the whole outage, and not much longer. */
    mb_http_plan_init(&p, 0, OUTAGE_MS);
    assert_int_equal(mb_http_plan_answer(&p, &h, &err), 0);
    mb_http_plan_bytes(&p, 1);
    while (done(&p, 0, 503, now_ms, &delay_ms, &err) == MB_HTTP_PLAN_RETRY) {
        now_ms += delay_ms;
        n++;
    }
    assert_true(n >= 4 && n < 30 && now_ms <= 5 + OUTAGE_MS && now_ms > OUTAGE_MS / 2);
    assert_non_null(strstr(err.text, "HTTP 503 after 1 bytes"));
    /* A byte begins the count again. */
    mb_http_plan_bytes(&p, 1);
    assert_int_equal(done(&p, MB_ETIMEOUT, 0, now_ms, &delay_ms, &err), MB_HTTP_PLAN_RETRY);
}

static void test_final(void **state)
{
    static const struct {
        int code;
        long status;
        int expected;
    } cases[] = {{0, 404, MB_ENOENT},       {0, 410, MB_ENOENT},      {0, 401, MB_EDENIED},
                 {0, 403, MB_EDENIED},      {0, 400, MB_EPROTO},      {0, 501, MB_EUNAVAIL},
                 {0, 304, MB_EPROTO},       {0, 416, MB_EPROTO},      {MB_EDENIED, 0, MB_EDENIED},
                 {MB_EINVAL, 0, MB_EINVAL}, {MB_ENOMEM, 0, MB_ENOMEM}};
    uint64_t delay_ms;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct mb_http_plan p;
        struct mb_err err = {0};

        mb_http_plan_init(&p, 0, OUTAGE_MS);
        assert_int_equal(done(&p, cases[i].code, cases[i].status, 0, &delay_ms, &err),
                         MB_HTTP_PLAN_FAIL);
        assert_int_equal(err.code, cases[i].expected);
        assert_true(err.text[0] != '\0');
    }
}

static void test_content_range(void **state)
{
    static const char *const bad[] = {"",
                                      "bytes",
                                      "bytes ",
                                      "bytes 1-0/5",
                                      "bytes 0-5/5",
                                      "bytes 0-4/",
                                      "bytes 0-4/5x",
                                      "bytes -4/5",
                                      "bytes 0-/5",
                                      "items 0-4/5",
                                      "bytes 0-99999999999999999999/*",
                                      "bytes */5"};
    uint64_t first, total;
    int has_total;

    (void)state;
    assert_int_equal(mb_http_content_range("bytes 7-99/100", &first, &has_total, &total), 0);
    assert_true(first == 7 && has_total && total == 100);
    assert_int_equal(mb_http_content_range("bytes 0-0/*", &first, &has_total, &total), 0);
    assert_true(first == 0 && !has_total);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(mb_http_content_range(bad[i], &first, &has_total, &total), MB_EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_changed),
        cmocka_unit_test(test_nothing_to_compare),
        cmocka_unit_test(test_tries),
        cmocka_unit_test(test_final),
        cmocka_unit_test(test_content_range),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
