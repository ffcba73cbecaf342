/* The agent's flags and its metrics writer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "agent/log_service.h"
#include "agent/metrics.h"
#include "agent/options.h"
#include "agent/prepare.h"
#include "base/alloc.h"

static int parse(struct mb_agent_options *o, struct mb_err *err, char *const *argv)
{
    int argc = 0;

    while (argv[argc] != NULL)
        argc++;
    return mb_agent_options_parse(argc, (char **)argv, o, err);
}

static void refuse(char *const *argv, const char *text)
{
    struct mb_agent_options o;
    struct mb_err err = {0};

    assert_int_equal(parse(&o, &err, argv), MB_EINVAL);
    assert_string_equal(err.text, text);
    mb_agent_options_close(&o);
}

#define ARGS(...) ((char *const[]){"mobula-agent", __VA_ARGS__, NULL})

static void test_good(void **state)
{
    struct mb_agent_options o;
    struct mb_err err;

    (void)state;
    assert_int_equal(
        parse(&o, &err,
              ARGS("--head", "--port=0", "--node-dir", "/d", "--num-gpus", "2", "--labels",
                   "{\"a\": \"b\"}", "--store-sync=full", "--launch-timeout=90")),
        MB_OK);
    assert_true(o.is_head);
    assert_int_equal(o.port, 0);
    assert_int_equal(o.dashboard_port, 8265);
    assert_int_equal(o.num_gpus, 2);
    assert_int_equal(o.n_labels, 1);
    assert_string_equal(o.labels[0].value, "b");
    assert_null(o.ray_version);
    assert_int_equal(o.launch_timeout_s, 90);
    mb_agent_options_close(&o);
}

/* The flag is stronger than the environment; an empty one is none. */
static void test_ray_version(void **state)
{
    struct mb_agent_options o;
    struct mb_err err;

    (void)state;
    setenv("MOBULA_RAY_VERSION", "2.9.3", 1);
    setenv("MOBULA_RAY_COMMIT", "", 1);
    assert_int_equal(parse(&o, &err, ARGS("--head", "--node-dir", "/d")), MB_OK);
    assert_string_equal(o.ray_version, "2.9.3");
    assert_null(o.ray_commit);
    mb_agent_options_close(&o);
    assert_int_equal(parse(&o, &err,
                           ARGS("--head", "--node-dir", "/d", "--ray-version", "3.0.0.dev0",
                                "--ray-commit", "{{RAY_COMMIT_SHA}}")),
                     MB_EINVAL);
    assert_int_equal(parse(&o, &err,
                           ARGS("--head", "--node-dir", "/d", "--ray-version", "3.0.0.dev0",
                                "--ray-commit", "0a1b")),
                     MB_OK);
    assert_string_equal(o.ray_version, "3.0.0.dev0");
    assert_string_equal(o.ray_commit, "0a1b");
    mb_agent_options_close(&o);
    unsetenv("MOBULA_RAY_VERSION");
    unsetenv("MOBULA_RAY_COMMIT");
    refuse(ARGS("--head", "--node-dir", "/d", "--ray-version", "latest"),
           "--ray-version latest: expected a version, e.g. 2.60.0");
    refuse(ARGS("--head", "--node-dir", "/d", "--ray-version", "2.\""),
           "--ray-version 2.\": expected at most 64 letters, digits and . + - _");
}

static void test_bad(void **state)
{
    (void)state;
    refuse(ARGS("--haed"), "unknown option --haed, did you mean --head?");
    refuse(ARGS("x"), "unknown option x");
    refuse(ARGS("--head", "--node-dir", "/d", "--launch-timeout", "0"),
           "--launch-timeout: 0 is outside 1..3600");
    refuse(ARGS("--node-dir"), "--node-dir needs a value");
    refuse(ARGS("--head"), "--node-dir: an absolute directory is needed");
    refuse(ARGS("--node-dir", "/d"), "give exactly one of --head and --address HOST:PORT");
    refuse(ARGS("--node-dir", "/d", "--address", "h"),
           "--address h: expected HOST:PORT of the head's GCS, e.g. 10.0.0.1:6379");
    refuse(ARGS("--node-dir", "/d", "--head", "--node-ip-address", "0.0.0.0"),
           "--node-ip-address 0.0.0.0 is a wildcard: expected the address of this machine that "
           "other nodes dial");
    refuse(ARGS("--node-dir", "/d", "--head", "--labels", "[]"),
           "--labels: expected a JSON object of strings");
    refuse(ARGS("--node-dir", "/d", "--head", "--labels", "{\"x\": 1}"),
           "--labels: \"x\" is not a string");
    refuse(ARGS("--node-dir", "/d", "--head", "--labels", "{\"ray.io/node-id\": \"00\"}"),
           "--labels: \"ray.io/node-id\" is said by the node itself");
    refuse(ARGS("--node-dir", "/d", "--head", "--labels", "{\"mobula.io/version\": \"9\"}"),
           "--labels: \"mobula.io/version\" is said by the node itself");
    refuse(ARGS("--node-dir", "/d", "--head", "--node-name", "a\xff"), "--node-name is no UTF-8");
    refuse(ARGS("--node-dir", "/d", "--head", "--store-sync", "often"),
           "--store-sync often: expected normal or full");
}

static void test_numbers(void **state)
{
    struct mb_agent_options o;
    struct mb_err err;

    (void)state;
    assert_int_equal(parse(&o, &err, ARGS("--port", "70000")), MB_EINVAL);
    assert_non_null(strstr(err.text, "--port"));
}

static void test_metrics(void **state)
{
    const char *labels[] = {"a", "x\"y\\z\n", "b", "", NULL};
    struct mb_buf out = {0};

    (void)state;
    assert_int_equal(mb_metric_family(&out, "m_total", MB_METRIC_COUNTER, "Help."), MB_OK);
    assert_int_equal(mb_metric_sample(&out, "m_total", labels, 3), MB_OK);
    assert_int_equal(mb_metric_sample(&out, "m_total", NULL, 9007199254740991.0), MB_OK);
    assert_int_equal(mb_metric_sample(&out, "m_total", NULL, 0.25), MB_OK);
    assert_int_equal(mb_metric_sample(&out, "m_total", NULL, (double)-INFINITY), MB_OK);
    assert_int_equal(mb_metric_sample(&out, "m_total", NULL, (double)NAN), MB_OK);
    assert_string_equal(mb_buf_str(&out), "# HELP m_total Help.\n# TYPE m_total counter\n"
                                          "m_total{a=\"x\\\"y\\\\z\\n\",b=\"\"} 3\n"
                                          "m_total 9007199254740991\nm_total 0.25\n"
                                          "m_total -Inf\nm_total NaN\n");
    mb_buf_close(&out);
}

static void test_metrics_without_memory(void **state)
{
    const char *labels[] = {"key", "a value that is long enough to need more memory", NULL};
    unsigned long n = 0;

    (void)state;
    do {
        struct mb_buf out = {0};

        mb_alloc_fail_nth(++n);
        if (mb_metric_sample(&out, "name", labels, 1) != MB_OK)
            assert_int_equal(out.len, 0);
        mb_buf_close(&out);
    } while (mb_alloc_did_fail());
    mb_alloc_fail_nth(0);
}

static void test_log_names(void **state)
{
    (void)state;
    assert_true(mb_log_name_is_safe("agent.log"));
    assert_true(mb_log_name_is_safe("gangs/1-1/rank-0.log"));
    assert_false(mb_log_name_is_safe("/etc/a.log"));
    assert_true(mb_log_name_is_safe("logs/job-driver-run..2.log")); /* an id may hold dots */
    assert_false(mb_log_name_is_safe("../a.log"));
    assert_false(mb_log_name_is_safe("gangs/../../a.log"));
    assert_false(mb_log_name_is_safe("..//a.log"));
    assert_false(mb_log_name_is_safe("gangs/.."));
    assert_false(mb_log_name_is_safe("jobs/x/spec"));
    assert_false(mb_log_name_is_safe(""));
}

/* The address of this machine on the way to the head, whose host may stand in brackets. */
static void test_own_ip(void **state)
{
    static const struct {
        const char *head, *ip;
    } cases[] = {{"127.0.0.1:6379", "127.0.0.1"},
                 {"127.0.0.1:6379,127.0.0.9:1", "127.0.0.1"},
                 {"[127.0.0.1]:6379", "127.0.0.1"},
                 {"localhost:6379", "127.0.0.1"},
                 {"[::1]:6379", "::1"}};

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct mb_agent_options o = {.address = cases[i].head};
        struct mb_err err = {0};
        char ip[64] = "";
        int rc = mb_agent_find_ip(&o, ip, &err);

        if (rc == MB_EUNAVAIL && cases[i].ip[0] == ':')
            continue; /* a machine without IPv6 */
        if (rc != MB_OK)
            fail_msg("%s", err.text);
        assert_string_equal(ip, cases[i].ip);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good),      cmocka_unit_test(test_ray_version),
        cmocka_unit_test(test_bad),       cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_metrics),   cmocka_unit_test(test_metrics_without_memory),
        cmocka_unit_test(test_log_names), cmocka_unit_test(test_own_ip)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
