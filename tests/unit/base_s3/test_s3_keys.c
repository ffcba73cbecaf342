/* Answers with credentials, their age, and that a secret's pages are marked as what they are. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/s3/keys.h"

static int json(const char *text, struct mb_s3_keys *k, struct mb_err *err)
{
    return mb_s3_keys_from_json(text, strlen(text), k, err);
}

static void test_json(void **state)
{
    struct mb_s3_keys k;
    struct mb_err err;
    (void)state;
    assert_int_equal(json("{\"Code\": \"Success\", \"AccessKeyId\": \"A\", \"SecretAccessKey\": "
                          "\"S/+=\", \"Token\": \"T\", \"Expiration\": \"2026-11-22T09:50:00Z\"}",
                          &k, &err),
                     0);
    assert_string_equal(k.access_key, "A");
    assert_string_equal(mb_secret_text(k.secret_key), "S/+=");
    assert_string_equal(mb_secret_text(k.session_token), "T");
    assert_true(k.expires_unix_ms == 1795341000000ull);
    mb_s3_keys_close(&k);
    assert_int_equal(json("{\"Code\": \"AssumeRoleUnauthorizedAccess\"}", &k, &err), MB_EDENIED);
    assert_non_null(strstr(err.text, "AssumeRoleUnauthorizedAccess"));
    static const char *const bad[] = {
        "",
        "[]",
        "{",
        "{}",
        "{\"AccessKeyId\": \"A\"}",
        "{\"AccessKeyId\": \"A\", \"SecretAccessKey\": 5}",
        "{\"AccessKeyId\": \"A\", \"SecretAccessKey\": \"\"}",
        "{\"AccessKeyId\": \"A\\r\\nX: y\", \"SecretAccessKey\": \"hush\"}",
        "{\"AccessKeyId\": \"A\", \"SecretAccessKey\": \"hush\", \"Token\": \"a\\nb\"}",
        "{\"AccessKeyId\": \"A\", \"SecretAccessKey\": \"hush\", \"Expiration\": \"soon\"}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(json(bad[i], &k, &err), MB_EPROTO);
        assert_null(strstr(err.text, "hush"));
        assert_null(k.access_key);
    }
}

#define STS(inner)                                                                                 \
    "<AssumeRoleWithWebIdentityResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\">"      \
    "<AssumeRoleWithWebIdentityResult><Credentials>" inner                                         \
    "</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"

static int sts(const char *text, struct mb_s3_keys *k, struct mb_err *err)
{
    return mb_s3_keys_from_sts(text, strlen(text), k, err);
}

static void test_sts(void **state)
{
    static const char good[] =
        STS("<AccessKeyId>A</AccessKeyId><SecretAccessKey>S</SecretAccessKey><SessionToken>T"
            "</SessionToken><Expiration>2026-11-22T09:50:00.123Z</Expiration>");
    struct mb_s3_keys k;
    struct mb_err err;
    (void)state;
    assert_int_equal(sts(good, &k, &err), 0);
    assert_string_equal(mb_secret_text(k.session_token), "T");
    assert_true(k.expires_unix_ms == 1795341000000ull);
    mb_s3_keys_close(&k);
    assert_int_equal(sts(STS("<AccessKeyId>A</AccessKeyId>"), &k, &err), MB_EPROTO);
    assert_int_equal(sts("<html>", &k, &err), MB_EPROTO);
    for (unsigned long nth = 1;; nth++) {
        mb_alloc_fail_nth(nth);
        int rc = sts(good, &k, &err);
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        mb_s3_keys_close(&k);
        if (!failed)
            break;
        assert_int_equal(rc, MB_ENOMEM);
    }
}

static void test_age(void **state)
{
    const uint64_t minute = 60000, hour = 60 * minute, end = 1000 * hour;
    (void)state;
    assert_int_equal(mb_s3_keys_age(0, 0, 0, end), MB_S3_KEYS_FRESH);
    assert_int_equal(mb_s3_keys_age(end, hour, 0, end - hour), MB_S3_KEYS_FRESH);
    assert_int_equal(mb_s3_keys_age(end, hour, 0, end - 5 * minute - 1), MB_S3_KEYS_FRESH);
    assert_int_equal(mb_s3_keys_age(end, hour, 0, end - 5 * minute), MB_S3_KEYS_AGING);
    assert_int_equal(mb_s3_keys_age(end, hour, 59999, end - 6 * minute + 1), MB_S3_KEYS_AGING);
    assert_int_equal(mb_s3_keys_age(end, hour, 59999, end - 6 * minute), MB_S3_KEYS_FRESH);
    assert_int_equal(mb_s3_keys_age(end, hour, 0, end), MB_S3_KEYS_EXPIRED);
    /* Keys of four minutes: not fetched anew with each request. */
    assert_int_equal(mb_s3_keys_age(end, 4 * minute, 0, end - 4 * minute), MB_S3_KEYS_FRESH);
    assert_int_equal(mb_s3_keys_age(end, 4 * minute, 0, end - 2 * minute), MB_S3_KEYS_AGING);
}

/* The flags of the mapping that holds p: "dd" is one that core dumps leave out. */
static int has_flag(const void *p, const char *flag)
{
    char line[512];
    int inside = 0, found = 0;
    FILE *f = fopen("/proc/self/smaps", "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        unsigned long from, to;
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2)
            inside = (uintptr_t)p >= from && (uintptr_t)p < to;
        else if (inside && strncmp(line, "VmFlags:", 8) == 0)
            found = strstr(line, flag) != NULL;
    }
    fclose(f);
    return found;
}

static void test_secret_pages(void **state)
{
    int status;
    struct mb_secret *s = mb_secret_create("hush", 4);
    (void)state;
    assert_string_equal(mb_secret_text(s), "hush");
    assert_true(has_flag(mb_secret_text(s), " dd "));
    assert_false(has_flag(&status, " dd "));
    pid_t pid = fork(); /* a child that is not exec'd finds nothing */
    if (pid == 0)
        _exit(mb_secret_text(s)[0] == '\0' ? 0 : 1);
    waitpid(pid, &status, 0);
    assert_int_equal(status, 0);
    mb_secret_destroy(s);
    mb_secret_destroy(NULL);
    assert_null(mb_secret_create(NULL, 0));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_json),
        cmocka_unit_test(test_sts),
        cmocka_unit_test(test_age),
        cmocka_unit_test(test_secret_pages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
