/* Where credentials come from, by the environment and the shared files; INI as AWS's tools read it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/s3/source.h"

/* An environment: "NAME=value", NULL at the end. */
static const char *get(void *arg, const char *name)
{
    size_t n = strlen(name);
    for (const char *const *e = arg; *e; e++) {
        if (strncmp(*e, name, n) == 0 && (*e)[n] == '=')
            return *e + n + 1;
    }
    return NULL;
}

#define ENV(...) ((void *)(const char *const[]){__VA_ARGS__, NULL})

static int choose(void *env, struct mb_s3_source *out, struct mb_err *err)
{
    return mb_s3_source_choose(get, env, "eu-west-1", out, err);
}

static void test_order(void **state)
{
    struct mb_s3_source s;
    struct mb_err err;
    (void)state;
    assert_int_equal(
        choose(ENV("BUCKET_STORAGE_ACCESS_KEY=a", "BUCKET_STORAGE_SECRET_KEY=b",
                   "AWS_ACCESS_KEY_ID=c", "AWS_SECRET_ACCESS_KEY=d", "AWS_SESSION_TOKEN=t"),
               &s, &err),
        0);
    assert_int_equal(s.kind, MB_S3_FROM_KEYS);
    assert_string_equal(s.keys.access_key, "a");
    assert_string_equal(mb_secret_text(s.keys.secret_key), "b");
    assert_null(s.keys.session_token); /* the token belongs to the other pair */
    mb_s3_source_close(&s);
    assert_int_equal(
        choose(ENV("BUCKET_STORAGE_ACCESS_KEY=", "AWS_ACCESS_KEY_ID=c", "AWS_SECRET_ACCESS_KEY=d",
                   "AWS_SESSION_TOKEN=t", "AWS_ROLE_ARN=r", "AWS_WEB_IDENTITY_TOKEN_FILE=/f"),
               &s, &err),
        0);
    assert_int_equal(s.kind, MB_S3_FROM_KEYS);
    assert_string_equal(s.keys.access_key, "c");
    assert_string_equal(mb_secret_text(s.keys.session_token), "t");
    mb_s3_source_close(&s);
    assert_int_equal(
        choose(ENV("AWS_ROLE_ARN=r", "AWS_WEB_IDENTITY_TOKEN_FILE=/f", "AWS_PROFILE=p"), &s, &err),
        0);
    assert_int_equal(s.kind, MB_S3_FROM_ROLE);
    assert_string_equal(s.url, "https://sts.eu-west-1.amazonaws.com");
    assert_string_equal(s.session_name, "mobula");
    mb_s3_source_close(&s);
    assert_int_equal(choose(ENV("HOME=/h", "AWS_ROLE_ARN=r"), &s, &err), 0);
    assert_int_equal(s.kind, MB_S3_FROM_FILES);
    assert_string_equal(s.profile, "default");
    assert_int_equal(s.is_named, 0);
    assert_string_equal(s.credentials_file, "/h/.aws/credentials");
    assert_string_equal(s.config_file, "/h/.aws/config");
    mb_s3_source_close(&s);
}

static void test_halves(void **state)
{
    struct mb_s3_source s;
    struct mb_err err;
    (void)state;
    assert_int_equal(choose(ENV("BUCKET_STORAGE_SECRET_KEY=b-secret"), &s, &err), MB_EDENIED);
    assert_non_null(strstr(err.text, "BUCKET_STORAGE_ACCESS_KEY is not"));
    assert_null(strstr(err.text, "b-secret"));
    assert_int_equal(choose(ENV("AWS_ACCESS_KEY_ID=c"), &s, &err), MB_EDENIED);
    assert_int_equal(choose(ENV("AWS_WEB_IDENTITY_TOKEN_FILE=/f"), &s, &err), MB_EDENIED);
}

/* A line break at the end, as `echo` leaves it in a file that a secret is made of. */
static void test_odd_keys(void **state)
{
    struct mb_s3_source s;
    struct mb_err err;
    (void)state;
    assert_int_equal(
        choose(ENV("BUCKET_STORAGE_ACCESS_KEY=a", "BUCKET_STORAGE_SECRET_KEY=hush\n"), &s, &err),
        MB_EINVAL);
    assert_non_null(strstr(err.text, "BUCKET_STORAGE_SECRET_KEY"));
    assert_null(strstr(err.text, "hush"));
    assert_int_equal(choose(ENV("AWS_ACCESS_KEY_ID=a", "AWS_SECRET_ACCESS_KEY=b",
                                "AWS_SESSION_TOKEN=x\r\nHost: y"),
                            &s, &err),
                     MB_EINVAL);
    assert_non_null(strstr(err.text, "AWS_SESSION_TOKEN"));
}

static void test_sts_endpoints(void **state)
{
    struct mb_s3_source s;
    struct mb_err err;
    (void)state;
    assert_int_equal(choose(ENV("AWS_ROLE_ARN=r", "AWS_WEB_IDENTITY_TOKEN_FILE=/f",
                                "AWS_ENDPOINT_URL=http://all", "AWS_ENDPOINT_URL_STS=http://sts",
                                "BUCKET_STORAGE_HOST=http://minio"),
                            &s, &err),
                     0);
    assert_string_equal(s.url, "http://sts");
    mb_s3_source_close(&s);
    assert_string_equal(mb_s3_aws_domain("us-east-1"), "amazonaws.com");
    assert_string_equal(mb_s3_aws_domain("cn-north-1"), "amazonaws.com.cn");
}

static void check_container(const char *uri, int rc, const char *url)
{
    char variable[200];
    struct mb_s3_source s;
    struct mb_err err;
    snprintf(variable, sizeof variable, "AWS_CONTAINER_CREDENTIALS_%s", uri);
    assert_int_equal(mb_s3_source_after_files(get, ENV(variable), &s, &err), rc);
    if (rc == 0) {
        assert_int_equal(s.kind, MB_S3_FROM_CONTAINER);
        assert_string_equal(s.url, url);
    }
    mb_s3_source_close(&s);
}

static void test_containers(void **state)
{
    (void)state;
    check_container("RELATIVE_URI=/v2/x", 0, "http://169.254.170.2/v2/x");
    check_container("FULL_URI=http://169.254.170.23/v1/credentials", 0,
                    "http://169.254.170.23/v1/credentials");
    check_container("FULL_URI=http://[fd00:ec2::23]/v1", 0, "http://[fd00:ec2::23]/v1");
    check_container("FULL_URI=http://localhost:80/x", 0, "http://localhost:80/x");
    check_container("FULL_URI=http://127.1.2.3:80/x", 0, "http://127.1.2.3:80/x");
    check_container("FULL_URI=https://anywhere/x", 0, "https://anywhere/x");
    check_container("FULL_URI=http://anywhere/x", MB_EINVAL, NULL);
    check_container("FULL_URI=http://127.0.0.1.example.com/x", MB_EINVAL, NULL);
    check_container("FULL_URI=http://169.254.170.2.example.com/x", MB_EINVAL, NULL);
    check_container("FULL_URI=http://localhost@example.com/x", MB_EINVAL, NULL);
    check_container("FULL_URI=ftp://127.0.0.1/x", MB_EINVAL, NULL);
}

static void check_metadata(void *env, enum mb_s3_source_kind kind, const char *url)
{
    struct mb_s3_source s;
    struct mb_err err;
    assert_int_equal(mb_s3_source_after_files(get, env, &s, &err), 0);
    assert_int_equal(s.kind, kind);
    if (url)
        assert_string_equal(s.url, url);
    mb_s3_source_close(&s);
}

static void test_metadata(void **state)
{
    (void)state;
    check_metadata(ENV("X=1"), MB_S3_FROM_METADATA, "http://169.254.169.254");
    check_metadata(ENV("AWS_EC2_METADATA_DISABLED=True"), MB_S3_FROM_NOWHERE, NULL);
    check_metadata(ENV("BUCKET_STORAGE_HOST=http://minio"), MB_S3_FROM_NOWHERE, NULL);
    check_metadata(ENV("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE=IPv6"), MB_S3_FROM_METADATA,
                   "http://[fd00:ec2::254]");
    check_metadata(ENV("AWS_EC2_METADATA_SERVICE_ENDPOINT=http://x:1/"), MB_S3_FROM_METADATA,
                   "http://x:1");
}

static int read_files(void *env, const char *credentials, const char *config,
                      struct mb_s3_source *s, struct mb_err *err)
{
    int rc = mb_s3_source_choose(get, env, "us-east-1", s, err);
    return rc != 0 ? rc
                   : mb_s3_source_read_files(s, get, env, "us-east-1", credentials,
                                             credentials ? strlen(credentials) : 0, config,
                                             config ? strlen(config) : 0, err);
}

#define PAIR "aws_access_key_id = A\naws_secret_access_key=S\n"

static void test_profiles(void **state)
{
    struct mb_s3_source s;
    struct mb_err err;
    void *none = ENV("HOME=/h");
    (void)state;
    assert_int_equal(read_files(none,
                                "[other]\n" PAIR "[default]\r\nAWS_ACCESS_KEY_ID = B ; x\r\n"
                                "aws_secret_access_key = T#1 # our own\r\n",
                                "[default]\nregion=r\n s3 =\n  region = wrong\n", &s, &err),
                     0);
    assert_int_equal(s.kind, MB_S3_FROM_KEYS);
    assert_string_equal(s.keys.access_key, "B");
    assert_string_equal(mb_secret_text(s.keys.secret_key), "T#1");
    assert_string_equal(s.region, "r");
    mb_s3_source_close(&s);
    assert_int_equal(read_files(none, NULL, NULL, &s, &err), 0);
    assert_int_equal(s.kind, MB_S3_FROM_FILES); /* nothing there: the next source */
    mb_s3_source_close(&s);
    void *named = ENV("AWS_PROFILE=p q");
    assert_int_equal(read_files(named, PAIR, "[profile p q]\n" PAIR, &s, &err), 0);
    assert_int_equal(s.kind, MB_S3_FROM_KEYS);
    mb_s3_source_close(&s);
    /* In the config file only "default" stands without the word. */
    assert_int_equal(read_files(named, NULL, "[p q]\n" PAIR, &s, &err), MB_EDENIED);
    assert_non_null(strstr(err.text, "p q"));
    mb_s3_source_close(&s);
    assert_int_equal(read_files(named, "[p q]\naws_access_key_id=A\n", NULL, &s, &err), MB_EDENIED);
    mb_s3_source_close(&s);
    assert_int_equal(read_files(named, NULL,
                                "[profile p q]\nrole_arn=r\nweb_identity_token_file=/t\nregion=x\n",
                                &s, &err),
                     0);
    assert_int_equal(s.kind, MB_S3_FROM_ROLE);
    assert_string_equal(s.url, "https://sts.x.amazonaws.com");
    mb_s3_source_close(&s);
}

static void test_refused_by_name(void **state)
{
    static const char *const configs[][2] = {
        {"source_profile", "[profile p]\nrole_arn=r\nsource_profile=default\n" PAIR},
        {"credential_source", "[profile p]\nrole_arn=r\ncredential_source=Environment\n"},
        {"credential_process", "[profile p]\ncredential_process=/bin/x\n"},
        {"sso_session", "[profile p]\nsso_session=x\n"}};
    struct mb_s3_source s;
    struct mb_err err;
    (void)state;
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(read_files(ENV("AWS_PROFILE=p"), NULL, configs[i][1], &s, &err),
                         MB_EUNSUPPORTED);
        assert_non_null(strstr(err.text, configs[i][0]));
        mb_s3_source_close(&s);
    }
}

static void test_allocation_failures(void **state)
{
    (void)state;
    for (unsigned long nth = 1;; nth++) {
        struct mb_s3_source s;
        struct mb_err err;
        mb_alloc_fail_nth(nth);
        int rc = read_files(ENV("AWS_PROFILE=p"), "[p]\n" PAIR "aws_session_token=t\n",
                            "[profile p]\nregion=r\n", &s, &err);
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        mb_s3_source_close(&s);
        if (!failed) {
            assert_int_equal(rc, 0);
            break;
        }
        assert_int_equal(rc, MB_ENOMEM);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_odd_keys),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_halves),
        cmocka_unit_test(test_sts_endpoints),
        cmocka_unit_test(test_containers),
        cmocka_unit_test(test_metadata),
        cmocka_unit_test(test_profiles),
        cmocka_unit_test(test_refused_by_name),
        cmocka_unit_test(test_allocation_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
