/* cli/client/link: which addresses the client takes, and where it would have to use a proxy. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "cli/client/link.h"

static void forget_proxies(void)
{
    static const char *const names[] = {"http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy",
                                        "ALL_PROXY",  "no_proxy",    "NO_PROXY",    "HTTP_PROXY"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        unsetenv(names[i]);
}

static void test_addresses(void **state)
{
    static const struct {
        const char *url, *host, *port, *path, *header;
        int is_tls;
    } rows[] = {
        {"http://head:8265/api/jobs/?a=b", "head", "8265", "/api/jobs/?a=b", "head:8265", 0},
        {"http://head", "head", "80", "", "head", 0},
        {"https://head/x", "head", "443", "/x", "head", 1},
        {"https://head:80", "head", "80", "", "head:80", 1},
        {"http://[::1]:8265/x", "::1", "8265", "/x", "[::1]:8265", 0},
        {"https://[fd00::7]", "fd00::7", "443", "", "[fd00::7]", 1},
        {"http://head:8265?x", "head", "8265", "?x", "head:8265", 0},
        {"head:8265", NULL, NULL, NULL, NULL, 0},
        {"ftp://head", NULL, NULL, NULL, NULL, 0},
        {"http://", NULL, NULL, NULL, NULL, 0},
        {"http://:80", NULL, NULL, NULL, NULL, 0},
        {"http://head:", NULL, NULL, NULL, NULL, 0},
        {"http://head:0", NULL, NULL, NULL, NULL, 0},
        {"http://head:65536", NULL, NULL, NULL, NULL, 0},
        {"http://head:123456789", NULL, NULL, NULL, NULL, 0},
        {"http://head:80x", NULL, NULL, NULL, NULL, 0},
        {"http://[::1", NULL, NULL, NULL, NULL, 0},
        {"http://head:1/\r\nX: y", NULL, NULL, NULL, NULL, 0},
        {"http://head /", NULL, NULL, NULL, NULL, 0},
        {"http://[::1]x", NULL, NULL, NULL, NULL, 0},
        {"http://user:secret@head:80", NULL, NULL, NULL, NULL, 0},
    };
    (void)state;
    forget_proxies();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct mb_link_target t;
        struct mb_buf host = {0};
        struct mb_err err = {0};
        int rc = mb_link_target(rows[i].url, &t, &err);
        if (rc != (rows[i].host != NULL ? 0 : MB_EINVAL))
            fail_msg("%s: %d %s", rows[i].url, rc, err.text);
        assert_null(strstr(err.text, "secret"));
        if (rc != 0)
            continue;
        assert_string_equal(t.host, rows[i].host);
        assert_string_equal(t.port, rows[i].port);
        assert_string_equal(t.path, rows[i].path);
        assert_int_equal(t.is_tls, rows[i].is_tls);
        assert_int_equal(mb_link_host(&t, &host), 0);
        assert_string_equal(mb_buf_str(&host), rows[i].header);
        mb_buf_close(&host);
    }
}

static void test_a_long_host(void **state)
{
    char url[600] = "http://";
    struct mb_link_target t;
    struct mb_err err;
    (void)state;
    forget_proxies();
    memset(url + 7, 'a', 255);
    assert_int_equal(mb_link_target(url, &t, &err), 0);
    memset(url + 7, 'a', 256);
    assert_int_equal(mb_link_target(url, &t, &err), MB_EINVAL);
}

static void test_proxies(void **state)
{
    static const struct {
        const char *variable, *no_proxy, *url;
        int code;
    } rows[] = {
        {"http_proxy", "", "http://head:1", MB_EUNSUPPORTED},
        {"http_proxy", "", "https://head:1", 0},
        {"HTTP_PROXY", "", "http://head:1", 0}, /* what a web server would set from a request */
        {"https_proxy", "", "https://head:1", MB_EUNSUPPORTED},
        {"HTTPS_PROXY", "", "https://head:1", MB_EUNSUPPORTED},
        {"all_proxy", "", "http://head:1", MB_EUNSUPPORTED},
        {"ALL_PROXY", "", "https://head:1", MB_EUNSUPPORTED},
        {"http_proxy", "head", "http://head:1", 0},
        {"http_proxy", "a, HEAD ,b", "http://head:1", 0},
        {"http_proxy", "*", "http://head:1", 0},
        {"http_proxy", "svc.local", "http://head.svc.local:1", 0},
        {"http_proxy", ".svc.local", "http://head.svc.local:1", 0},
        {"http_proxy", "vc.local", "http://head.svc.local:1", MB_EUNSUPPORTED},
        {"http_proxy", "ahead", "http://head:1", MB_EUNSUPPORTED},
        {"http_proxy", ",,. ,", "http://head:1", MB_EUNSUPPORTED},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct mb_link_target t;
        struct mb_err err;
        forget_proxies();
        setenv(rows[i].variable, "http://user:secret@proxy:3128", 1);
        setenv("NO_PROXY", rows[i].no_proxy, 1);
        int rc = mb_link_target(rows[i].url, &t, &err);
        if (rc != rows[i].code)
            fail_msg("row %zu: %d", i, rc);
        if (rc != 0)
            assert_null(strstr(err.text, "secret"));
    }
    forget_proxies();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_addresses),
        cmocka_unit_test(test_a_long_host),
        cmocka_unit_test(test_proxies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
