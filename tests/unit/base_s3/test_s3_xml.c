/* S3's XML, and what must not be taken for it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "base/buf.h"
#include "base/s3/s3_xml.h"

static int collect(void *arg, const char *parent, const char *name, const char *text)
{
    return mb_buf_printf(arg, "%s/%s=%s;", parent, name, text);
}

static void check(const char *xml, const char *want)
{
    struct mb_buf out = {0};
    struct mb_err err;
    assert_int_equal(mb_s3_xml_parse(xml, strlen(xml), collect, &out, &err), 0);
    assert_string_equal(mb_buf_str(&out), want);
    mb_buf_close(&out);
}

static void test_events(void **state)
{
    (void)state;
    check("<?xml version=\"1.0\"?>\n<R xmlns=\"http://s3\"> <A>x &amp; "
          "y</A>\n<B/><C><D>1</D></C></R>",
          "R/A=x & y;R/B=;C/D=1;R/C=;/R=;");
    check(" \n\t<R><ETag>&quot;e&quot;</ETag></R>", "R/ETag=\"e\";/R=;");
}

static void test_refused(void **state)
{
    static const char *const bad[] = {"",
                                      "<R>",
                                      "<R></Q>",
                                      "no xml",
                                      "<!DOCTYPE R [<!ENTITY a \"aaaaaaaaaa\">]><R>&a;</R>",
                                      "<a><a><a><a><a><a><a><a><a><a><a><a><a><a><a><a><a/></a></"
                                      "a></a></a></a></a></a></a></a></a>"
                                      "</a></a></a></a></a></a>"};
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct mb_buf out = {0};
        struct mb_err err;
        assert_int_equal(mb_s3_xml_parse(bad[i], strlen(bad[i]), collect, &out, &err), MB_EPROTO);
        assert_true(strstr(mb_buf_str(&out), "aaaaaaaaaa") == NULL);
        mb_buf_close(&out);
    }
}

static void test_error(void **state)
{
    struct mb_s3_xml_error e;
    static const char error[] = "\n<Error><Code>SlowDown</Code><Message>wait</Message>"
                                "<Region>eu-west-1</Region></Error>";
    static const char other[] = "<CompleteMultipartUploadResult><Code>x</Code>"
                                "</CompleteMultipartUploadResult>";
    (void)state;
    assert_int_equal(mb_s3_xml_error_parse(error, sizeof error - 1, &e), 1);
    assert_string_equal(e.code, "SlowDown");
    assert_string_equal(e.message, "wait");
    assert_string_equal(e.region, "eu-west-1");
    assert_int_equal(mb_s3_xml_error_parse(other, sizeof other - 1, &e), 0);
    assert_int_equal(mb_s3_xml_error_parse("", 0, &e), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_events),
                                       cmocka_unit_test(test_refused),
                                       cmocka_unit_test(test_error)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
