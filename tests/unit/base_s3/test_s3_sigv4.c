/*
 * The examples of AWS's S3 API reference, "Signature Calculations for the Authorization Header:
 * Transferring Payload in a Single Chunk", and the encoding rules of object keys.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "base/alloc.h"
#include "base/err.h"
#include "base/s3/sigv4.h"
#include "base/str.h"

#define EMPTY "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
#define HOST  "examplebucket.s3.amazonaws.com"
#define DATE  "20130524T000000Z"

static struct mb_sigv4_request request(const char *method, const char *path, const char *query,
                                       const struct mb_sigv4_header *headers, size_t n,
                                       const char *hash)
{
    return (struct mb_sigv4_request){.method = method,
                                     .path = path,
                                     .query = query,
                                     .headers = headers,
                                     .n_headers = n,
                                     .payload_hash = hash,
                                     .amz_date = DATE,
                                     .region = "us-east-1",
                                     .access_key = "AKIAIOSFODNN7EXAMPLE",
                                     .secret_key = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"};
}

static void check(struct mb_sigv4_request r, const char *signed_headers, const char *signature)
{
    struct mb_buf out = {0};
    struct mb_buf want = {0};
    assert_int_equal(mb_sigv4_authorization(&r, &out), 0);
    mb_buf_printf(&want,
                  "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/"
                  "aws4_request,SignedHeaders=%s,Signature=%s",
                  signed_headers, signature);
    assert_string_equal(mb_buf_str(&out), mb_buf_str(&want));
    mb_buf_close(&out);
    mb_buf_close(&want);
}

static void test_get_object(void **state)
{
    const struct mb_sigv4_header h[] = {{"host", HOST},
                                        {"range", "bytes=0-9"},
                                        {"x-amz-content-sha256", EMPTY},
                                        {"x-amz-date", DATE}};
    (void)state;
    check(request("GET", "/test.txt", "", h, 4, EMPTY),
          "host;range;x-amz-content-sha256;x-amz-date",
          "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41");
}

static void test_put_object(void **state)
{
    static const char hash[] = "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072";
    const struct mb_sigv4_header h[] = {{"date", "Fri, 24 May 2013 00:00:00 GMT"},
                                        {"host", HOST},
                                        {"x-amz-content-sha256", hash},
                                        {"x-amz-date", DATE},
                                        {"x-amz-storage-class", "REDUCED_REDUNDANCY"}};
    (void)state;
    check(request("PUT", "/test%24file.text", "", h, 5, hash),
          "date;host;x-amz-content-sha256;x-amz-date;x-amz-storage-class",
          "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd");
}

static void test_queries(void **state)
{
    const struct mb_sigv4_header h[] = {
        {"host", HOST}, {"x-amz-content-sha256", EMPTY}, {"x-amz-date", DATE}};
    (void)state;
    check(request("GET", "/", "lifecycle=", h, 3, EMPTY), "host;x-amz-content-sha256;x-amz-date",
          "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543");
    check(request("GET", "/", "max-keys=2&prefix=J", h, 3, EMPTY),
          "host;x-amz-content-sha256;x-amz-date",
          "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7");
}

static void test_encoding(void **state)
{
    struct mb_buf out = {0};
    (void)state;
    assert_int_equal(mb_buf_url(&out, "a/b c+d=e:f@g~h\xc3\xa9*'", 1), 0);
    assert_string_equal(mb_buf_str(&out), "a/b%20c%2Bd%3De%3Af%40g~h%C3%A9%2A%27");
    mb_buf_reset(&out);
    assert_int_equal(mb_buf_url(&out, "a/b", 0), 0);
    assert_string_equal(mb_buf_str(&out), "a%2Fb");
    mb_buf_close(&out);
}

static void test_date(void **state)
{
    char date[17];
    (void)state;
    mb_sigv4_date(1369353600000, date);
    assert_string_equal(date, DATE);
}

static void test_allocation_failures(void **state)
{
    const struct mb_sigv4_header h[] = {
        {"host", HOST}, {"x-amz-content-sha256", EMPTY}, {"x-amz-date", DATE}};
    (void)state;
    for (unsigned long nth = 1;; nth++) {
        struct mb_sigv4_request r = request("GET", "/", "", h, 3, EMPTY);
        struct mb_buf out = {0};
        mb_alloc_fail_nth(nth);
        int rc = mb_sigv4_authorization(&r, &out);
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        assert_int_equal(rc, failed ? MB_ENOMEM : 0);
        assert_true(!failed || out.len == 0);
        mb_buf_close(&out);
        if (!failed)
            return;
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_get_object), cmocka_unit_test(test_put_object),
        cmocka_unit_test(test_queries),    cmocka_unit_test(test_encoding),
        cmocka_unit_test(test_date),       cmocka_unit_test(test_allocation_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
