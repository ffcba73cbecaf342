/* Token mode and the browser guard. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include <strings.h>
#include "base/http/guard.h"

/* Headers of a request: name, value, ..., NULL. */
static const char *lookup(const void *arg, const char *name)
{
    for (const char *const *h = arg; *h; h += 2) {
        if (strcasecmp(h[0], name) == 0)
            return h[1];
    }
    return NULL;
}

static int token_status(const char *const *headers, const char *token)
{
    struct mb_http_verdict v = {-1, ""};
    mb_http_guard_token(token, lookup, headers, &v);
    if (v.status == 401)
        assert_string_equal(v.text, "Unauthorized: Missing authentication token");
    if (v.status == 403)
        assert_string_equal(v.text, "Forbidden: Invalid authentication token");
    return v.status;
}

#define HEADERS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void test_token(void **state)
{
    (void)state;
    const char *const *none = (const char *const[]){NULL};
    assert_int_equal(token_status(none, NULL), 0);
    assert_int_equal(token_status(none, "s3cret"), 401);
    assert_int_equal(token_status(HEADERS("Authorization", "Bearer s3cret"), "s3cret"), 0);
    assert_int_equal(token_status(HEADERS("Authorization", "Bearer s3cre"), "s3cret"), 403);
    assert_int_equal(token_status(HEADERS("Authorization", "s3cret"), "s3cret"), 403);
    assert_int_equal(token_status(HEADERS("X-Ray-Authorization", "Bearer s3cret"), "s3cret"), 0);
    /* The first header that is not empty decides, as in Ray. */
    assert_int_equal(
        token_status(HEADERS("Authorization", "Bearer x", "X-Ray-Authorization", "Bearer s3cret"),
                     "s3cret"),
        403);
    assert_int_equal(
        token_status(HEADERS("Cookie", "a=b; ray-authentication-token=s3cret; c=d"), "s3cret"), 0);
    assert_int_equal(
        token_status(HEADERS("Cookie", "ray-authentication-token=\"s3cret\""), "s3cret"), 0);
    assert_int_equal(token_status(HEADERS("Cookie", "ray-authentication-token=no"), "s3cret"), 403);
    assert_int_equal(token_status(HEADERS("Cookie", "xray-authentication-token=s3cret"), "s3cret"),
                     401);
}

static int browser_status(int guard, const char *method, const char *const *headers)
{
    struct mb_http_verdict v = {-1, ""};
    mb_http_guard_browser(guard, method, lookup, headers, &v);
    if (v.status == 405)
        assert_string_equal(v.text, "'POST' method not allowed for browser traffic.");
    if (v.status == 403)
        assert_string_equal(v.text, "Browser requests not allowed.");
    return v.status;
}

static void test_browser(void **state)
{
    (void)state;
    const char *const *mozilla = HEADERS("User-Agent", "Mozilla/5.0 (X11)");
    const char *const *origin = HEADERS("Origin", "http://evil.example");
    const char *const *plain = HEADERS("User-Agent", "python-requests/2");
    assert_int_equal(browser_status(405, "POST", mozilla), 405);
    assert_int_equal(browser_status(405, "POST", origin), 405);
    assert_int_equal(browser_status(405, "GET", mozilla), 0);
    assert_int_equal(browser_status(405, "POST", plain), 0);
    assert_int_equal(browser_status(403, "GET", origin), 403);
    assert_int_equal(browser_status(403, "POST", plain), 0);
    assert_int_equal(browser_status(0, "POST", mozilla), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_token),
                                       cmocka_unit_test(test_browser)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
