/* What a RayJob says to its pods; what a pod's environment says of its RayJob. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>
#include "agent/deadline.h"
#include "agent/rayjob.h"
#include "agent/rayjob_watch.h"

static const uint64_t START = 1000000000000u; /* 2001-09-09T01:46:40Z */
#define STARTED "\"startTime\": \"2001-09-09T01:46:40Z\""
#define ENDED   "\"endTime\": \"2001-09-09T01:48:20Z\""

static int read_job(const char *metadata, const char *spec, const char *status,
                    struct mb_rayjob *job, struct mb_err *err)
{
    char text[1024];
    int n = snprintf(text, sizeof(text),
                     "{\"kind\": \"RayJob\", \"metadata\": {\"uid\": \"u1\"%s}, \"spec\": {%s}, "
                     "\"status\": {%s}}",
                     metadata, spec, status);

    return mb_rayjob_read(text, (size_t)n, job, err);
}

static struct mb_rayjob_verdict judge(const char *metadata, const char *spec, const char *status,
                                      const struct mb_rayjob_self *self)
{
    struct mb_rayjob_verdict v;
    struct mb_rayjob job;
    struct mb_err err = {0};

    if (read_job(metadata, spec, status, &job, &err) != MB_OK)
        fail_msg("%s", err.text);
    mb_rayjob_judge(&job, self, &v);
    return v;
}

static void test_the_deadline(void **state)
{
    struct mb_rayjob_self self = {.cluster = "c1", .uid = "", .delete_after_ms = -1};
    struct mb_rayjob_verdict v =
        judge("", "\"activeDeadlineSeconds\": 100", STARTED ", \"rayClusterName\": \"c1\"", &self);

    (void)state;
    assert_int_equal(v.deadline_unix_ms, START + 100000);
    assert_null(v.leaves);
    assert_int_equal(v.delete_at_unix_ms, 0);
    assert_true(v.is_ours);
    assert_true(judge("", "", STARTED, &self).deadline_unix_ms == MB_DEADLINE_NEVER);
    assert_true(judge("", "\"activeDeadlineSeconds\": null", "", &self).deadline_unix_ms ==
                MB_DEADLINE_NEVER);
    /* Not started: nobody knows. */
    assert_int_equal(judge("", "\"activeDeadlineSeconds\": 100", "", &self).deadline_unix_ms, 0);
}

static void test_the_margin(void **state)
{
    static const char running[] = STARTED ", \"rayClusterName\": \"c1\"";
    struct mb_rayjob_self self = {.cluster = "c1", .delete_after_ms = 60000, .uid = "u1"};

    (void)state;
    self.margin_ms = 30000;
    assert_int_equal(judge("", "\"activeDeadlineSeconds\": 100", running, &self).deadline_unix_ms,
                     START + 70000);
    /* Half of the time is left. */
    self.margin_ms = 50000;
    assert_int_equal(judge("", "\"activeDeadlineSeconds\": 100", running, &self).deadline_unix_ms,
                     START + 50000);
    self.margin_ms = 50001;
    assert_int_equal(judge("", "\"activeDeadlineSeconds\": 100", running, &self).deadline_unix_ms,
                     START + 50000);
    self.margin_ms = (uint64_t)INT32_MAX * 1000;
    assert_int_equal(judge("", "\"activeDeadlineSeconds\": 1", running, &self).deadline_unix_ms,
                     START + 500);
    /* What is no deadline stays none, and no other clock is changed. */
    assert_true(judge("", "", running, &self).deadline_unix_ms == MB_DEADLINE_NEVER);
    assert_int_equal(judge("", "\"activeDeadlineSeconds\": 100", "", &self).deadline_unix_ms, 0);
    assert_int_equal(judge("", "\"activeDeadlineSeconds\": 100",
                           STARTED ", " ENDED ", \"jobDeploymentStatus\": \"Failed\"", &self)
                         .delete_at_unix_ms,
                     1000000100000 + 60000);
}

static void test_pods_that_go(void **state)
{
    struct mb_rayjob_self self = {.cluster = "c1", .uid = "u1", .delete_after_ms = -1};
    struct mb_rayjob_verdict v;

    (void)state;
    assert_non_null(judge("", "\"suspend\": true", "", &self).leaves);
    assert_null(judge("", "\"suspend\": false", "", &self).leaves);
    v = judge(", \"deletionTimestamp\": \"2001-09-09T01:46:40Z\"", "", "", &self);
    assert_non_null(v.leaves);
    assert_true(v.is_ours);
    /* It is tried again: the other cluster's deadline is none of ours, and its job not to delete.
     */
    self.delete_after_ms = 0;
    v = judge("", "\"activeDeadlineSeconds\": 100",
              STARTED ", " ENDED
                      ", \"jobDeploymentStatus\": \"Failed\", \"rayClusterName\": \"c2\"",
              &self);
    assert_non_null(v.leaves);
    assert_false(v.is_ours);
    assert_int_equal(v.deadline_unix_ms, 0);
    assert_int_equal(v.delete_at_unix_ms, 0);
    self.uid = "u0";
    v = judge("", "", "\"rayClusterName\": \"c1\"", &self);
    assert_non_null(v.leaves);
    assert_false(v.is_ours);
    self = (struct mb_rayjob_self){.cluster = NULL, .uid = "", .delete_after_ms = -1};
    assert_true(judge("", "", "\"rayClusterName\": \"c2\"", &self).is_ours);
}

static void test_when_it_is_deleted(void **state)
{
    static const struct {
        const char *status;
        uint64_t at_ms;
    } cases[] = {
        {STARTED ", " ENDED ", \"jobDeploymentStatus\": \"Complete\"", 1000000100000 + 60000},
        {STARTED ", " ENDED ", \"jobDeploymentStatus\": \"Failed\"", 1000000100000 + 60000},
        {STARTED ", " ENDED ", \"jobDeploymentStatus\": \"Retrying\"", 0},
        {STARTED ", \"jobDeploymentStatus\": \"Complete\"", 0},
        {STARTED ", \"jobDeploymentStatus\": \"Running\"", 0},
    };
    struct mb_rayjob_self self = {.cluster = NULL, .uid = "u1", .delete_after_ms = 60000};

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        assert_int_equal(judge("", "", cases[i].status, &self).delete_at_unix_ms, cases[i].at_ms);
    self.delete_after_ms = -1;
    assert_int_equal(judge("", "", cases[0].status, &self).delete_at_unix_ms, 0);
}

static void test_nonsense(void **state)
{
    static const char *const bad[] = {"",
                                      "[]",
                                      "{}",
                                      "{\"metadata\": {\"uid\": \"u\"}}",
                                      "{\"metadata\": {}, \"spec\": {}}",
                                      "{\"metadata\": {\"uid\": 3}, \"spec\": {}}",
                                      "{\"metadata\": 3, \"spec\": {}}",
                                      "<html>"};
    static const char *const specs[] = {
        "\"activeDeadlineSeconds\": -1", "\"activeDeadlineSeconds\": \"10\"",
        "\"activeDeadlineSeconds\": 1e9", "\"activeDeadlineSeconds\": 99999999999"};
    static const char *const statuses[] = {
        "\"startTime\": 3", "\"startTime\": \"yesterday\"", "\"rayClusterName\": []",
        "\"jobDeploymentStatus\": \"Complete\", \"endTime\": \"\""};
    struct mb_rayjob job, untouched;
    struct mb_err err;
    char name[MB_RAYJOB_NAME_MAX + 32];

    (void)state;
    memset(&job, 7, sizeof(job));
    untouched = job;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(mb_rayjob_read(bad[i], strlen(bad[i]), &job, &err), MB_EPROTO);
    for (size_t i = 0; i < sizeof(specs) / sizeof(specs[0]); i++)
        assert_int_equal(read_job("", specs[i], "", &job, &err), MB_EPROTO);
    for (size_t i = 0; i < sizeof(statuses) / sizeof(statuses[0]); i++)
        assert_int_equal(read_job("", "", statuses[i], &job, &err), MB_EPROTO);
    snprintf(name, sizeof(name), "\"rayClusterName\": \"%0*d\"", MB_RAYJOB_NAME_MAX, 1);
    assert_int_equal(read_job("", "", name, &job, &err), MB_EPROTO);
    assert_memory_equal(&job, &untouched, sizeof(job));
}

static const char *const *variables; /* name, value, ..., NULL */

static const char *get(const char *name)
{
    for (size_t i = 0; variables[i] != NULL; i += 2)
        if (strcmp(variables[i], name) == 0)
            return variables[i + 1];
    return NULL;
}

static int environment(const char *const *list, struct mb_rayjob_watch_opts *o)
{
    struct mb_err err;

    variables = list;
    return mb_rayjob_watch_environment(get, o, &err);
}

static void test_the_environment(void **state)
{
    struct mb_rayjob_watch_opts o;

    (void)state;
    assert_int_equal(environment((const char *[]){NULL}, &o), 0);
    assert_int_equal(environment((const char *[]){"MOBULA_RAYJOB", "", NULL}, &o), 0);
    assert_null(o.name);
    assert_int_equal(
        environment(
            (const char *[]){"MOBULA_RAYJOB", "mini", "RAY_CLUSTER_NAME", "mini-abcde", NULL}, &o),
        1);
    assert_string_equal(o.dir, "/var/run/secrets/kubernetes.io/serviceaccount");
    assert_string_equal(o.cluster, "mini-abcde");
    assert_int_equal(o.look_ms, 15000);
    assert_int_equal(o.delete_after_ms, -1);
    assert_int_equal(o.margin_ms, 0);
    assert_int_equal(
        environment((const char *[]){"MOBULA_RAYJOB", "mini", "MOBULA_RAYJOB_DELETE_AFTER_SECONDS",
                                     "0", "MOBULA_RAYJOB_LOOK_SECONDS", "1", NULL},
                    &o),
        1);
    assert_int_equal(o.look_ms, 1000);
    assert_int_equal(o.delete_after_ms, 0);
    assert_int_equal(environment((const char *[]){"MOBULA_RAYJOB", "mini",
                                                  "MOBULA_DEADLINE_MARGIN_SECONDS", "300", NULL},
                                 &o),
                     1);
    assert_int_equal(o.margin_ms, 300000);
    assert_int_equal(environment((const char *[]){"MOBULA_RAYJOB", "mini",
                                                  "MOBULA_DEADLINE_MARGIN_SECONDS", "-1", NULL},
                                 &o),
                     MB_EINVAL);
    /* Names become parts of a URL. */
    assert_int_equal(environment((const char *[]){"MOBULA_RAYJOB", "a/../b", NULL}, &o), MB_EINVAL);
    assert_int_equal(
        environment(
            (const char *[]){"MOBULA_RAYJOB", "mini", "MOBULA_RAYJOB_LOOK_SECONDS", "0", NULL}, &o),
        MB_EINVAL);
}

static void test_what_cannot_be_owned(void **state)
{
    static const char *const bad[] = {"configmaps",   "/a",
                                      "configmaps/",  "configmaps/a/../b",
                                      "a/b/c",        "a/v1/roles/..",
                                      "a//b/c",       "a/v1/roles/x/y",
                                      "configmaps/A", "a/1 a/2 a/3 a/4 a/5 a/6 a/7 a/8 a/9"};
    struct mb_rayjob_watch *w;
    struct mb_err err = {0};

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct mb_rayjob_watch_opts o = {.name = "mini", .owns = bad[i], .host = "h", .port = "1"};

        assert_int_equal(mb_rayjob_watch_start(NULL, &o, NULL, NULL, &w, &err), MB_EINVAL);
        assert_non_null(strstr(err.text, "MOBULA_RAYJOB_OWNS"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_deadline),
        cmocka_unit_test(test_the_margin),
        cmocka_unit_test(test_pods_that_go),
        cmocka_unit_test(test_when_it_is_deleted),
        cmocka_unit_test(test_nonsense),
        cmocka_unit_test(test_the_environment),
        cmocka_unit_test(test_what_cannot_be_owned),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
