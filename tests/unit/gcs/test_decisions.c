/* The small pure modules: job states, health, job requests, plans. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "base/alloc.h"
#include "base/str.h"
#include "gcs/guest_owner.h"
#include "gcs/health.h"
#include "gcs/job_needs.h"
#include "gcs/job_list.h"
#include "gcs/job_request.h"
#include "gcs/job_states.h"
#include "gcs/log_source.h"
#include "gcs/placement.h"
#include "gcs/placement_plan.h"

/* ---- job states ---- */

static enum mb_job_state after(enum mb_job_state s, enum mb_job_input input)
{
    enum mb_job_state to = s;
    struct mb_err err = {0};

    if (mb_job_next(s, input, &to, &err) != 0)
        return MB_JOB_STATES;
    return to;
}

static void job_paths(void **state)
{
    (void)state;
    assert_int_equal(after(MB_JOB_PENDING, MB_JOB_STARTED), MB_JOB_RUNNING);
    assert_int_equal(after(MB_JOB_RUNNING, MB_JOB_EXIT_ZERO), MB_JOB_SUCCEEDED);
    assert_int_equal(after(MB_JOB_RUNNING, MB_JOB_EXIT_NONZERO), MB_JOB_FAILED);
    assert_int_equal(after(MB_JOB_PENDING, MB_JOB_STOP), MB_JOB_STOPPED);
    assert_int_equal(after(MB_JOB_RUNNING, MB_JOB_STOP), MB_JOB_STOPPING);
    assert_int_equal(after(MB_JOB_STOPPING, MB_JOB_EXIT_ZERO), MB_JOB_STOPPED);
    assert_int_equal(after(MB_JOB_STOPPING, MB_JOB_LOST), MB_JOB_STOPPED);
    assert_int_equal(after(MB_JOB_RUNNING, MB_JOB_LOST), MB_JOB_FAILED);
    assert_int_equal(after(MB_JOB_PENDING, MB_JOB_NEVER_FITS), MB_JOB_FAILED);
    assert_int_equal(after(MB_JOB_PENDING, MB_JOB_START_TIMEOUT), MB_JOB_FAILED);
    assert_int_equal(after(MB_JOB_RUNNING, MB_JOB_NEVER_FITS), MB_JOB_STATES);
}

static void terminal_jobs_never_change(void **state)
{
    (void)state;
    for (int s = 0; s < MB_JOB_STATES; s++)
        for (int i = 0; i < MB_JOB_INPUTS; i++)
            if (mb_job_is_terminal((enum mb_job_state)s))
                assert_int_equal(after((enum mb_job_state)s, (enum mb_job_input)i), MB_JOB_STATES);
    assert_string_equal(mb_job_state_name(MB_JOB_STOPPING), "RUNNING");
}

static void a_driver_is_started_at_most_once(void **state)
{
    static const struct {
        enum mb_job_state state;
        enum mb_job_adopt found;
        enum mb_job_recovery due;
    } t[] = {
        {MB_JOB_PENDING, MB_JOB_ADOPT_UNKNOWN, MB_JOB_RECOVER_START},
        {MB_JOB_PENDING, MB_JOB_ADOPT_RUNNING, MB_JOB_RECOVER_WAIT},
        {MB_JOB_PENDING, MB_JOB_ADOPT_EXITED, MB_JOB_RECOVER_WAIT},
        {MB_JOB_RUNNING, MB_JOB_ADOPT_UNKNOWN, MB_JOB_RECOVER_LOST},
        {MB_JOB_RUNNING, MB_JOB_ADOPT_RUNNING, MB_JOB_RECOVER_WAIT},
        {MB_JOB_RUNNING, MB_JOB_ADOPT_EXITED, MB_JOB_RECOVER_WAIT},
        {MB_JOB_STOPPING, MB_JOB_ADOPT_UNKNOWN, MB_JOB_RECOVER_LOST},
        {MB_JOB_STOPPING, MB_JOB_ADOPT_RUNNING, MB_JOB_RECOVER_STOP},
        {MB_JOB_STOPPING, MB_JOB_ADOPT_EXITED, MB_JOB_RECOVER_WAIT},
        {MB_JOB_FAILED, MB_JOB_ADOPT_UNKNOWN, MB_JOB_RECOVER_WAIT},
    };

    (void)state;
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++)
        assert_int_equal(mb_job_recover(t[i].state, t[i].found), t[i].due);
}

static void what_a_runner_says(void **state)
{
    struct mb_job_event e = {.kind = MB_JOB_EVENT_EXITED, .exit_code = 0};
    struct mb_job_news news;

    (void)state;
    mb_job_on_event(MB_JOB_PENDING, &e, &news);
    assert_int_equal(news.n_inputs, 2);
    assert_int_equal(news.inputs[0], MB_JOB_STARTED);
    assert_int_equal(news.inputs[1], MB_JOB_EXIT_ZERO);
    e.exit_code = -9;
    mb_job_on_event(MB_JOB_RUNNING, &e, &news);
    assert_int_equal(news.n_inputs, 1);
    assert_int_equal(news.inputs[0], MB_JOB_EXIT_NONZERO);
    e.text = "child 1 failed";
    mb_job_on_event(MB_JOB_RUNNING, &e, &news);
    assert_int_equal(news.n_inputs, 1);
    e.kind = MB_JOB_EVENT_RUNNING;
    mb_job_on_event(MB_JOB_STOPPED, &e, &news);
    assert_int_equal(news.n_inputs, 0);
    assert_true(news.stop_driver);
    mb_job_on_event(MB_JOB_PENDING, &e, &news);
    assert_int_equal(news.inputs[0], MB_JOB_STARTED);
    assert_false(news.stop_driver);
    e.kind = MB_JOB_EVENT_START_FAILED;
    mb_job_on_event(MB_JOB_PENDING, &e, &news);
    assert_int_equal(news.inputs[0], MB_JOB_START_FAILED);
}

/* The wish may not have been stored: a disk was full, and the head that had heard it is gone. */
static void what_was_stopped_is_stopped(void **state)
{
    static const enum mb_job_state FROM[] = {MB_JOB_PENDING, MB_JOB_RUNNING, MB_JOB_STOPPING};
    static const char *const TEXTS[] = {MB_JOB_TEXT_STOPPED, MB_JOB_TEXT_STOPPED "; a log is lost"};
    struct mb_job_event e = {.kind = MB_JOB_EVENT_EXITED};

    (void)state;
    for (size_t i = 0; i < sizeof FROM / sizeof FROM[0]; i++)
        for (int k = 0; k < 4; k++) {
            enum mb_job_state s = FROM[i];
            struct mb_job_news news;

            e.text = TEXTS[k / 2];
            e.exit_code = k % 2 ? 0 : -15;

            mb_job_on_event(s, &e, &news);
            for (int n = 0; n < news.n_inputs; n++)
                assert_int_equal(mb_job_next(s, news.inputs[n], &s, NULL), 0);
            assert_int_equal(s, MB_JOB_STOPPED);
        }
}

/* A job is not over while a driver of it runs, or may be about to. */
static void a_stop_waits_for_the_driver(void **state)
{
    static const struct {
        enum mb_job_state from;
        int has_driver;
        enum mb_job_state to;
    } t[] = {
        {MB_JOB_PENDING, 0, MB_JOB_STOPPED},  {MB_JOB_PENDING, 1, MB_JOB_STOPPING},
        {MB_JOB_RUNNING, 0, MB_JOB_STOPPED},  {MB_JOB_RUNNING, 1, MB_JOB_STOPPING},
        {MB_JOB_STOPPING, 0, MB_JOB_STOPPED}, {MB_JOB_STOPPING, 1, MB_JOB_STOPPING},
        {MB_JOB_FAILED, 0, MB_JOB_FAILED},    {MB_JOB_FAILED, 1, MB_JOB_FAILED},
    };

    (void)state;
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++) {
        enum mb_job_state s = t[i].from;
        struct mb_job_news news;

        mb_job_on_stop(s, t[i].has_driver, &news);
        for (int n = 0; n < news.n_inputs; n++)
            assert_int_equal(mb_job_next(s, news.inputs[n], &s, NULL), 0);
        assert_int_equal(s, t[i].to);
    }
}

static void amounts_below_zero_are_told_as_ray_does(void **state)
{
    json_t *info =
        json_pack("{s:i, s:f, s:n, s:{s:i, s:i}}", "entrypoint_num_cpus", 1, "entrypoint_num_gpus",
                  0.5, "entrypoint_memory", "entrypoint_resources", "a", 0, "b", -1);
    struct mb_err err = {0};

    (void)state;
    assert_int_equal(mb_job_needs_check(info, &err), MB_EINVAL);
    assert_string_equal(err.text, "The quantity of resource b cannot be negative");
    json_object_set_new(info, "entrypoint_num_gpus", json_real(-0.5));
    assert_int_equal(mb_job_needs_check(info, &err), MB_EINVAL);
    assert_string_equal(err.text, "The quantity of resource num_gpus cannot be negative");
    json_object_set_new(info, "entrypoint_num_gpus", json_integer(0));
    json_object_set_new(info, "entrypoint_resources", json_null());
    assert_int_equal(mb_job_needs_check(info, &err), 0);
    json_decref(info);
}

/* Named so, GPUs would be waited for, and be booked for nobody. */
static void what_has_its_own_field_is_no_resource(void **state)
{
    static const struct {
        const char *name, *text;
        double amount, gpus;
    } t[] = {
        {"GPU",
         "Use the 'num_cpus' and 'num_gpus' keyword instead of 'CPU' and 'GPU' in 'resources' "
         "keyword",
         2, 0},
        {"CPU",
         "Use the 'num_cpus' and 'num_gpus' keyword instead of 'CPU' and 'GPU' in 'resources' "
         "keyword",
         1, 0},
        {"mobula_gpu", "Use the 'num_gpus' keyword instead of 'mobula_gpu' in 'resources' keyword",
         1, 0},
        {"memory",
         "The resources dictionary must not contain the key 'memory' or 'object_store_memory'", 1,
         0},
        {"object_store_memory",
         "The resources dictionary must not contain the key 'memory' or 'object_store_memory'", 1,
         0},
        {"a", "The precision of the fractional quantity of resource a cannot go beyond 0.0001",
         0.00009, 0},
        {"a",
         "('GPU resource quantities >1 must', ' be whole numbers. The specified quantity 1.5 is "
         "invalid.')",
         1, 1.5},
        {"a", NULL, 0.0001, 2},
        {"a", NULL, 1.5, 0.5},
        {"gpu", NULL, 1, 1},
    };

    (void)state;
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++) {
        json_t *info = json_pack("{s:f, s:{s:f}}", "entrypoint_num_gpus", t[i].gpus,
                                 "entrypoint_resources", t[i].name, t[i].amount);
        struct mb_err err = {0};

        assert_int_equal(mb_job_needs_check(info, &err), t[i].text ? MB_EINVAL : 0);
        assert_string_equal(err.text, t[i].text ? t[i].text : "");
        json_decref(info);
    }
}

static void label_selectors(void **state)
{
    static const struct {
        const char *selector, *value;
        int matches;
    } t[] = {
        {"a", "a", 1},        {"a", "b", 0},         {"a", NULL, 0},       {"!a", "a", 0},
        {"!a", "b", 1},       {"!a", NULL, 1},       {"in(a, b)", "b", 1}, {"in(a,b)", "b", 1},
        {"in(a, b)", "c", 0}, {"in(ab)", "a", 0},    {"(a)", "a", 1},      {"!in(a, b)", "b", 0},
        {"!in(a)", NULL, 1},  {"in(a, b)", NULL, 0}, {"in(a, b)", "", 0},  {"", "", 1},
    };

    (void)state;
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++)
        assert_int_equal(mb_job_label_matches(t[i].selector, t[i].value), t[i].matches);
}

static void job_messages_are_rays(void **state)
{
    struct mb_job_facts f = {.asks_resources = 1, .exit_code = -9, .log_tail = "boom"};
    struct mb_buf b = {0};

    (void)state;
    assert_int_equal(mb_job_message(MB_JOB_PENDING, MB_JOB_STARTED, &f, &b), 0);
    assert_string_equal(mb_buf_str(&b),
                        "Job has not started yet. It may be waiting for resources (CPUs, GPUs, "
                        "memory, custom resources) to become available.");
    mb_buf_reset(&b);
    assert_int_equal(mb_job_message(MB_JOB_FAILED, MB_JOB_EXIT_NONZERO, &f, &b), 0);
    assert_string_equal(mb_buf_str(&b),
                        "Job entrypoint command failed with exit code -9, last available logs "
                        "(truncated to 20,000 chars):\nboom");
    mb_buf_reset(&b);
    f.text = "killed: memory limit of 2 GiB"; /* ours: why it was ended */
    assert_int_equal(mb_job_message(MB_JOB_FAILED, MB_JOB_EXIT_NONZERO, &f, &b), 0);
    assert_string_equal(mb_buf_str(&b),
                        "Job entrypoint command failed with exit code -9 (killed: memory limit of "
                        "2 GiB), last available logs (truncated to 20,000 chars):\nboom");
    mb_buf_close(&b);
    assert_string_equal(
        mb_job_error_type(MB_JOB_FAILED, MB_JOB_START_FAILED, "runtime_env setup failed: x"),
        "RUNTIME_ENV_SETUP_FAILURE");
    assert_string_equal(mb_job_error_type(MB_JOB_FAILED, MB_JOB_NEVER_FITS, ""),
                        "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE");
    assert_string_equal(mb_job_error_type(MB_JOB_FAILED, MB_JOB_START_TIMEOUT, ""),
                        "JOB_SUPERVISOR_ACTOR_START_TIMEOUT");
    assert_null(mb_job_error_type(MB_JOB_STOPPED, MB_JOB_EXIT_NONZERO, ""));
}

/* ---- health ---- */

static void a_node_that_sends_is_never_asked(void **state)
{
    struct mb_health h;

    (void)state;
    mb_health_init(&h, 1, 0);
    for (uint64_t t = 0; t < 100000; t += 500) {
        if (t % 2000 == 0)
            mb_health_heard(&h, t);
        assert_int_equal(mb_health_tick(&h, t), MB_HEALTH_WAIT);
    }
}

/* A node that fell silent at 0, the head's tick at any phase: what its two channels answer, after
 * how long (1500: not at all). */
struct patient {
    int has_second, grpc_ms, second_ms;
    uint64_t phase_ms, until_ms;
    unsigned asked, asked_second;
    struct mb_health h;
};

/* When it was declared dead; 0: not at all. */
static uint64_t watch(struct patient *p)
{
    uint64_t answer_ms = 0, second_answer_ms = 0;

    mb_health_init(&p->h, p->has_second, 0);
    for (uint64_t t = 0; t < p->until_ms; t += 10) {
        if (p->h.asking && t >= answer_ms)
            mb_health_result(&p->h, 0, t);
        if (p->h.asking_second && t >= second_answer_ms)
            mb_health_second(&p->h, p->second_ms < MB_HEALTH_TIMEOUT_MS);
        for (enum mb_health_action a = MB_HEALTH_CHECK;
             t % 500 == p->phase_ms && a != MB_HEALTH_WAIT;) {
            a = mb_health_tick(&p->h, t);
            if (a == MB_HEALTH_DEAD)
                return t;
            p->asked += a == MB_HEALTH_CHECK;
            p->asked_second += a == MB_HEALTH_SECOND;
            if (a == MB_HEALTH_CHECK)
                answer_ms = t + (uint64_t)p->grpc_ms;
            if (a == MB_HEALTH_SECOND)
                second_answer_ms = t + (uint64_t)p->second_ms;
        }
    }
    return 0;
}

static void a_hung_node_is_dead_in_time(void **state)
{
    (void)state;
    for (uint64_t phase_ms = 0; phase_ms < 500; phase_ms += 10) {
        struct patient hung = {1, 1500, 1500, phase_ms, 60000, 0, 0, {0}};
        struct patient gone = {1, 0, 0, phase_ms, 60000, 0, 0, {0}};
        struct patient alone = {0, 1500, 1500, phase_ms, 60000, 0, 0, {0}};
        uint64_t t = watch(&hung);

        assert_true(t >= MB_HEALTH_SILENCE_MS && t <= 8000);
        assert_true(hung.asked >= MB_HEALTH_FAILURES);
        assert_true(hung.asked_second >= MB_HEALTH_SECOND_FAILURES);
        assert_non_null(strstr(mb_health_reason(&hung.h), "heartbeats"));
        assert_int_equal(mb_health_tick(&hung.h, t + 100), MB_HEALTH_WAIT); /* said once */
        gone.second_ms = 1500;
        t = watch(&gone); /* refused at once: the agent may be starting again */
        assert_true(t >= MB_HEALTH_SILENCE_MS && t <= 8000);
        t = watch(&alone);
        assert_true(alone.asked == MB_HEALTH_FAILURES_ALONE && alone.asked_second == 0);
        assert_true(t >= MB_HEALTH_SILENCE_MS && t <= MB_HEALTH_BOUND_MS);
    }
}

static void a_second_channel_keeps_it_alive_for_a_minute(void **state)
{
    struct patient p = {1, 1500, 1400, 0, 600000, 0, 0, {0}};
    uint64_t t;

    (void)state;
    t = watch(&p);
    assert_true(t >= MB_HEALTH_DOUBT_MAX_MS && t < MB_HEALTH_DOUBT_MAX_MS + 500);
    assert_non_null(strstr(mb_health_reason(&p.h), "although its HTTP port answers"));
    p = (struct patient){1, 1500, 1400, 0, MB_HEALTH_DOUBT_MAX_MS - 500, 0, 0, {0}};
    assert_int_equal(watch(&p), 0);
    /* It answers gRPC again, and nothing of the doubt is left. */
    mb_health_heard(&p.h, 70000);
    assert_int_equal(p.h.failures + p.h.second_failures, 0);
    mb_health_second(&p.h, 0); /* asked in the doubt, answered after it */
    assert_int_equal(p.h.second_failures, 0);
}

/* So the reader of a log on it, who found it silent at the same time, finds it dead, and the log in
 * the store, before the reader gives up. */
static void a_doubt_is_over_before_a_reader_of_its_log_gives_up(void **state)
{
    (void)state;
    for (uint64_t phase_ms = 0; phase_ms < 500; phase_ms += 10) {
        struct patient p = {1, 1500, 1400, phase_ms, 600000, 0, 0, {0}};
        uint64_t t = watch(&p);

        assert_true(t > 0 && t < LOG_SILENT_MAX_MS);
    }
}

/* However many failures were counted between two answers of the second channel. */
static void a_doubt_is_told_once(void **state)
{
    struct mb_health h;

    (void)state;
    mb_health_init(&h, 1, 0);
    for (int round = 0; round < 2; round++) {
        assert_int_equal(mb_health_second(&h, 1), 0);
        for (int i = 0; i < MB_HEALTH_FAILURES + 2; i++)
            mb_health_result(&h, 0, 100);
        assert_int_equal(mb_health_second(&h, 0), 0);
        assert_int_equal(mb_health_second(&h, 1), 1);
        assert_int_equal(mb_health_second(&h, 1), 0);
        mb_health_heard(&h, 200);
    }
}

static void one_success_clears_the_failures(void **state)
{
    struct mb_health h;
    unsigned asked = 0;

    (void)state;
    mb_health_init(&h, 1, 0);
    for (uint64_t t = 0; t < 100000; t += 100) {
        enum mb_health_action a = mb_health_tick(&h, t);
        assert_int_not_equal(a, MB_HEALTH_DEAD);
        if (a == MB_HEALTH_SECOND)
            mb_health_second(&h, 0);
        if (a == MB_HEALTH_CHECK)
            mb_health_result(&h, ++asked % MB_HEALTH_FAILURES == 0, t + 50);
    }
    assert_true(asked > 20);
}

/* ---- job requests ---- */

#define NO_JSON "the request is no JSON object"

/* What is JSON to Python and cannot be kept here is told from what is none. */
static void job_bodies(void **state)
{
    static const struct {
        const char *body, *error; /* NULL: taken */
    } t[] = {
        {"{\"entrypoint\": \"a\\ud83d\\ude00\"}", NULL},
        {"{\"entrypoint\": \"\\uffff\", \"n\": 9223372036854775807}", NULL},
        {"{\"entrypoint\": \"a\\u0000b\"}",
         "\\u0000 can be in no command, no variable and no name: line 1, column 25 of the request"},
        {"{\"a\\u0000\": 1}", "\\u0000 can be in no command"},
        {"{\"entrypoint\": \"\\ud800\"}", "half a surrogate pair is no character: line 1"},
        {"{\"entrypoint\": \"\\ud800\\u0041\"}", "half a surrogate pair is no character"},
        {"{\"\\udc00\": 1}", "half a surrogate pair is no character"},
        {"{\n\"n\": 9223372036854775808}", "a number must be one of 64 bits: line 2, column"},
        {"{\"n\": -9223372036854775809}", "a number must be one of 64 bits"},
        {"{\"n\": [1e400]}", "a number must be one of 64 bits"},
        {"", NO_JSON},
        {"[]", NO_JSON},
        {"null", NO_JSON},
        {"{\"a\": \"\\u12x4\"}", NO_JSON},
        {"{\"a\": NaN}", NO_JSON},
        {"{\"a\": \"\xff\"}", NO_JSON},
        {"{} {}", NO_JSON},
    };

    (void)state;
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++) {
        struct mb_err err = {0};
        json_t *o;
        int rc = mb_job_request_parse(t[i].body, strlen(t[i].body), &o, &err);
        int want = !t[i].error ? 0 : strcmp(t[i].error, NO_JSON) == 0 ? MB_EPROTO : MB_EINVAL;

        if (rc != want || (rc == 0) != (o != NULL) ||
            (rc != 0 && !mb_starts_with(err.text, t[i].error)))
            fail_msg("%s: %d %s", t[i].body, rc, err.text);
        json_decref(o);
    }
    json_t *none;
    assert_int_equal(mb_job_request_parse(NULL, 0, &none, NULL), MB_EPROTO);
}

static void expect_request(const char *text, const char *error)
{
    json_t *o = json_loads(text, 0, NULL);
    struct mb_err err = {0};
    int rc = mb_job_request_check(o, &err);

    assert_non_null(o);
    if (error) {
        assert_int_equal(rc, MB_EINVAL);
        assert_string_equal(err.text, error);
    } else {
        assert_int_equal(rc, 0);
    }
    json_decref(o);
}

static void job_requests(void **state)
{
    (void)state;
    expect_request("{\"entrypoint\": \"true\", \"job_id\": null, \"metadata\": {\"a\": \"b\"}, "
                   "\"entrypoint_num_gpus\": 0.5, \"entrypoint_resources\": {\"x\": 1}}",
                   NULL);
    expect_request("{}", "JobSubmitRequest.__init__() missing 1 required positional argument: "
                         "'entrypoint'");
    expect_request("{\"entrypoint\": 1}", "entrypoint must be a string, got <class 'int'>");
    expect_request("{\"entrypoint\": \"x\", \"bogus\": 1}",
                   "JobSubmitRequest.__init__() got an unexpected keyword argument 'bogus'");
    expect_request("{\"entrypoint\": \"x\", \"metadata\": {\"a\": 1}}",
                   "metadata values must be strings, got <class 'int'>");
    expect_request("{\"entrypoint\": \"x\", \"runtime_env\": []}",
                   "runtime_env must be a dict, got <class 'list'>");
    expect_request("{\"entrypoint\": \"x\", \"entrypoint_memory\": 1.5}",
                   "entrypoint_memory must be an integer, got <class 'float'>");
    expect_request("{\"entrypoint\": \"x\", \"submission_id\": 7}",
                   "submission_id must be a string if provided, got <class 'int'>");
    expect_request("{\"entrypoint\": \"x\", \"submission_id\": \"../etc\"}",
                   "submission_id must be 1 to 200 bytes without '/' and control characters, and "
                   "not start with '.'");
    expect_request("{\"entrypoint\": \"x\", \"submission_id\": \"a\\u001b[2J\"}",
                   "submission_id must be 1 to 200 bytes without '/' and control characters, and "
                   "not start with '.'");
    expect_request("{\"entrypoint\": \"x\", \"submission_id\": \"run..2\"}", NULL);
    expect_request("{\"entrypoint\": \"x\", \"metadata\": {\"mobula_pipefail\": \"0\"}}", NULL);
    expect_request("{\"entrypoint\": \"x\", \"metadata\": {\"mobula_pipefail\": \"1\"}}", NULL);
    expect_request("{\"entrypoint\": \"x\", \"metadata\": {\"mobula_pipefail\": \"2\"}}",
                   "metadata mobula_pipefail must be '0' or '1', got '2'");
    expect_request("{\"entrypoint\": \"x\", \"metadata\": {\"mobula_pipefail\": \"\"}}",
                   "metadata mobula_pipefail must be '0' or '1', got ''");
}

/* ---- plans ---- */

static const struct mb_gcs_resource four[] = {{"gpu", 4}}, two[] = {{"gpu", 2}};

static void a_plan_moves_bundles_to_make_room(void **state)
{
    /* The big bundle comes last and fits one node only, which the first one would take. */
    struct mb_gcs_bundle small = {.resources = two, .n_resources = 1};
    struct mb_gcs_bundle big = {.resources = four, .n_resources = 1};
    const struct mb_gcs_bundle *bundles[] = {&small, &big};
    struct mb_gcs_resource f0[] = {{"gpu", 4}}, f1[] = {{"gpu", 2}};
    struct mb_plan_node nodes[] = {{f0, 1, 0}, {f1, 1, 0}};
    size_t out[2];

    (void)state;
    assert_int_equal(mb_plan_bundles(MB_PG_STRICT_SPREAD, bundles, 2, nodes, 2, out), 1);
    assert_int_equal(out[0], 1);
    assert_int_equal(out[1], 0);
}

static void strategies(void **state)
{
    struct mb_gcs_bundle b = {.resources = two, .n_resources = 1};
    const struct mb_gcs_bundle *bundles[] = {&b, &b, &b};
    size_t out[3];

    (void)state;
    for (int s = 0; s < 4; s++) {
        struct mb_gcs_resource f0[] = {{"gpu", 4}}, f1[] = {{"gpu", 4}};
        struct mb_plan_node nodes[] = {{f0, 1, 0}, {f1, 1, 0}};
        int rc = mb_plan_bundles((enum mb_pg_strategy)s, bundles, 3, nodes, 2, out);
        assert_int_equal(rc, s == MB_PG_PACK || s == MB_PG_SPREAD);
        f0[0].amount = f1[0].amount = 4;
        rc = mb_plan_bundles((enum mb_pg_strategy)s, bundles, 2, nodes, 2, out);
        assert_int_equal(rc, 1);
        if (s == MB_PG_PACK || s == MB_PG_STRICT_PACK)
            assert_int_equal(out[0], out[1]);
        else
            assert_int_not_equal(out[0], out[1]);
    }
}

/* ---- placement: the walks that the simulation does not name ---- */

static struct mb_gcs_pg group_of(struct mb_gcs_bundle *bundles, size_t n, uint8_t id)
{
    struct mb_gcs_pg pg = {.bundles = bundles, .n_bundles = n, .strategy = MB_PG_STRICT_SPREAD};

    pg.id[0] = id;
    for (size_t i = 0; i < n; i++)
        bundles[i] = (struct mb_gcs_bundle){.resources = two, .n_resources = 1};
    return pg;
}

/* Answers everything with yes until there is nothing to do. */
static void agree(struct mb_placement *p, uint64_t now_ms)
{
    struct mb_place_action a;

    while (mb_placement_next(p, now_ms, &a))
        if (a.kind != MB_PLACE_CHANGED)
            mb_placement_result(p, a.pg_id, a.ticket, MB_PLACE_OK, now_ms);
}

static void a_hung_node_holds_up_nobody_else(void **state)
{
    struct mb_placement *p = mb_placement_create(1);
    uint8_t hung[MB_NODE_ID_BYTES] = {1}, fine[MB_NODE_ID_BYTES] = {2};
    struct mb_gcs_bundle b1[1], b2[1];
    struct mb_gcs_pg g1 = group_of(b1, 1, 1), g2 = group_of(b2, 1, 2);
    struct mb_place_action a;
    struct mb_err err = {0};

    (void)state;
    assert_int_equal(mb_placement_node_up(p, hung, two, 1, &err), 0);
    assert_int_equal(mb_placement_add(p, &g1, &err), 0);
    while (mb_placement_next(p, 0, &a))
        continue; /* the Prepare is never answered */
    assert_int_equal(mb_placement_node_up(p, fine, two, 1, &err), 0);
    assert_int_equal(mb_placement_add(p, &g2, &err), 0);
    agree(p, 1);
    assert_int_equal(mb_placement_get(p, g2.id, NULL)->state, MB_PG_CREATED);
    assert_int_equal(mb_placement_get(p, g1.id, NULL)->state, MB_PG_PENDING);
    mb_placement_node_dead(p, hung);
    mb_placement_remove(p, g2.id);
    agree(p, 2);
    assert_int_equal(mb_placement_get(p, g1.id, NULL)->state, MB_PG_CREATED);
    mb_placement_destroy(p);
}

static void names_are_unique_and_ids_repeatable(void **state)
{
    struct mb_placement *p = mb_placement_create(1);
    struct mb_gcs_bundle b[1];
    struct mb_gcs_pg g = group_of(b, 1, 1), other = group_of(b, 1, 2), none = {.id = {3}};
    struct mb_err err = {0};

    (void)state;
    g.name = other.name = "det";
    assert_int_equal(mb_placement_add(p, &g, &err), 0);
    assert_int_equal(mb_placement_add(p, &g, &err), 0);
    assert_int_equal(mb_placement_count(p), 1);
    assert_int_equal(mb_placement_add(p, &other, &err), MB_EEXIST);
    assert_int_equal(mb_placement_add(p, &none, &err), MB_EINVAL);
    mb_placement_remove(p, g.id);
    assert_int_equal(mb_placement_add(p, &other, &err), 0);
    mb_placement_destroy(p);
}

static void why_a_group_waits(void **state)
{
    struct mb_placement *p = mb_placement_create(1);
    uint8_t id[MB_NODE_ID_BYTES] = {1};
    struct mb_gcs_bundle b[1], b2[1];
    struct mb_gcs_pg g = group_of(b, 1, 1), g2 = group_of(b2, 1, 2);
    struct mb_place_info info;
    struct mb_err err = {0};

    (void)state;
    assert_int_equal(mb_placement_add(p, &g, &err), 0);
    agree(p, 0);
    mb_placement_get(p, g.id, &info);
    assert_int_equal(info.wait, MB_PLACE_INFEASIBLE);
    assert_int_equal(mb_placement_node_up(p, id, two, 1, &err), 0);
    agree(p, 0);
    assert_int_equal(mb_placement_add(p, &g2, &err), 0);
    agree(p, 0);
    mb_placement_get(p, g2.id, &info);
    assert_int_equal(info.wait, MB_PLACE_NO_RESOURCES);
    mb_placement_destroy(p);
}

static void a_restored_group_keeps_its_places(void **state)
{
    struct mb_placement *p = mb_placement_create(1);
    uint8_t here[MB_NODE_ID_BYTES] = {1}, gone[MB_NODE_ID_BYTES] = {2};
    struct mb_gcs_bundle b[2];
    struct mb_gcs_pg g = group_of(b, 2, 1);
    struct mb_err err = {0};

    (void)state;
    g.state = MB_PG_CREATED;
    b[0].has_node = b[1].has_node = 1;
    memcpy(b[0].node_id, here, sizeof here);
    memcpy(b[1].node_id, gone, sizeof gone);
    assert_int_equal(mb_placement_node_up(p, here, two, 1, &err), 0);
    assert_int_equal(mb_placement_restore(p, &g, &err), 0);
    assert_int_equal(mb_placement_check(p, &err), 0);
    const struct mb_gcs_pg *now = mb_placement_get(p, g.id, NULL);
    assert_int_equal(now->state, MB_PG_RESCHEDULING);
    assert_true(now->bundles[0].has_node);
    assert_false(now->bundles[1].has_node);
    mb_placement_destroy(p);
}

/* ---- pages of jobs ---- */

static void a_query_of_jobs(void **state)
{
    static const char *const bad[][3] = {
        {"DONE", NULL, NULL},  {"FAILED,,", NULL, NULL}, {NULL, "0", NULL},
        {NULL, "10001", NULL}, {NULL, NULL, ""},         {NULL, NULL, "-61"},
        {NULL, NULL, "12"},    {NULL, NULL, "12-"},      {NULL, NULL, "1x-61"},
        {NULL, NULL, "12-6"},  {NULL, NULL, "12-6x"},    {NULL, NULL, "12-616"}};
    char *token = mb_job_list_token(12, "a:\xc3\xbc b");
    struct mb_job_list_query q;
    struct mb_err err = {0};

    (void)state;
    assert_int_equal(mb_job_list_parse("RUNNING,FAILED", "7", "12-613a62", &q, &err), 0);
    assert_int_equal(q.limit, 7);
    assert_string_equal(q.after_id, "a:b");
    assert_true(mb_job_list_has(&q, MB_JOB_STOPPING, 13, "a")); /* RUNNING to its users */
    assert_true(mb_job_list_has(&q, MB_JOB_FAILED, 12, "a:c"));
    assert_false(mb_job_list_has(&q, MB_JOB_FAILED, 12, "a:b"));
    assert_false(mb_job_list_has(&q, MB_JOB_FAILED, 11, "z"));
    assert_false(mb_job_list_has(&q, MB_JOB_PENDING, 13, "a"));
    assert_string_equal(token, "12-613ac3bc2062");
    assert_int_equal(mb_job_list_parse(NULL, NULL, token, &q, &err), 0);
    assert_string_equal(q.after_id, "a:\xc3\xbc b");
    mb_free(token);
    assert_int_equal(mb_job_list_parse(NULL, NULL, NULL, &q, &err), 0);
    assert_true(mb_job_list_has(&q, MB_JOB_PENDING, 0, ""));
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        err = (struct mb_err){0};
        assert_int_equal(mb_job_list_parse(bad[i][0], bad[i][1], bad[i][2], &q, &err), MB_EINVAL);
        assert_true(err.text[0] != '\0');
    }
}

/* ---- a record of another job agent ---- */

static const char *owner(const char *record, json_t *alive)
{
    return head_guest_other_owner(record, strlen(record), "aa", alive);
}

static void a_job_is_of_the_node_that_is_alive(void **state)
{
    json_t *alive = json_pack("{s:b, s:b}", "aa", 1, "bb", 1);

    (void)state;
    assert_string_equal(owner("{\"status\": \"RUNNING\", \"driver_node_id\": \"bb\"}", alive),
                        "bb");
    assert_null(owner("{\"driver_node_id\": \"aa\"}", alive)); /* ours: its directory was lost */
    assert_null(owner("{\"driver_node_id\": \"cc\"}", alive)); /* dead */
    assert_null(owner("{\"driver_node_id\": null}", alive));
    assert_null(owner("{\"driver_node_id\": 7}", alive));
    assert_null(owner("no record", alive));
    json_decref(alive);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_job_is_of_the_node_that_is_alive),
        cmocka_unit_test(a_query_of_jobs),
        cmocka_unit_test(job_paths),
        cmocka_unit_test(terminal_jobs_never_change),
        cmocka_unit_test(a_driver_is_started_at_most_once),
        cmocka_unit_test(what_a_runner_says),
        cmocka_unit_test(what_was_stopped_is_stopped),
        cmocka_unit_test(a_stop_waits_for_the_driver),
        cmocka_unit_test(label_selectors),
        cmocka_unit_test(amounts_below_zero_are_told_as_ray_does),
        cmocka_unit_test(what_has_its_own_field_is_no_resource),
        cmocka_unit_test(job_messages_are_rays),
        cmocka_unit_test(a_node_that_sends_is_never_asked),
        cmocka_unit_test(a_hung_node_is_dead_in_time),
        cmocka_unit_test(a_second_channel_keeps_it_alive_for_a_minute),
        cmocka_unit_test(a_doubt_is_over_before_a_reader_of_its_log_gives_up),
        cmocka_unit_test(a_doubt_is_told_once),
        cmocka_unit_test(one_success_clears_the_failures),
        cmocka_unit_test(job_bodies),
        cmocka_unit_test(job_requests),
        cmocka_unit_test(a_plan_moves_bundles_to_make_room),
        cmocka_unit_test(strategies),
        cmocka_unit_test(a_hung_node_holds_up_nobody_else),
        cmocka_unit_test(names_are_unique_and_ids_repeatable),
        cmocka_unit_test(why_a_group_waits),
        cmocka_unit_test(a_restored_group_keeps_its_places),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
