/* A node that does not know a driver: the job is lost, unless the node speaks of a former start.
 * Drivers on the head's own node that the head does not know. */
#include "loop.h"
#include <string.h>
#include "base/alloc.h"
#include "gcs/services.h"
#include "proto/mobula/head.pb-c.h"

static const char *const node = "00112233445566778899aabbccddeeff00112233445566778899aabb";

static const char *other_node(void *self)
{
    (void)self;
    return "";
}

static const struct mb_job_runner runner = {.node_id_hex = other_node};

struct fixture {
    uv_loop_t loop;
    struct mb_head head; /* as much of it as is needed */
};

static void put(struct fixture *f, const char *ns, const char *key, const char *value)
{
    struct mb_err err = {0};

    assert_int_equal(mb_tables_put(f->head.store, MB_TABLES_KV, mb_blob_str(ns), mb_blob_str(key),
                                   mb_blob_str(value), NULL, NULL, &err),
                     0);
}

/* Job "a" runs there, by start 7. */
static void begin(struct fixture *f)
{
    const struct mb_head_job_limits limits = {.max_ended = 10};
    struct mb_err err = {0};
    char start[100];

    memset(f, 0, sizeof *f);
    uv_loop_init(&f->loop);
    f->head.loop = &f->loop;
    f->head.runner = &runner;
    assert_int_equal(head_admission_create(&f->head, &limits, &err), 0);
    assert_int_equal(mb_tables_open_memory(&f->loop, &f->head.store, &err), 0);
    put(f, "job", "_ray_internal_job_info_a", "{\"status\": \"RUNNING\"}");
    snprintf(start, sizeof start, "{\"node\": \"%s\", \"number\": 7}", node);
    put(f, "mobula", "job_start:a", start);
    assert_int_equal(head_jobs_load(&f->head, &err), 0);
    assert_int_equal(head_job_find(&f->head, "a")->start_no, 7);
}

static void on_closed(void *arg)
{
    *(int *)arg = 1;
}

static void end(struct fixture *f)
{
    int closed = 0;

    f->head.stopping = 1;
    mb_tables_close(f->head.store, on_closed, &closed);
    loop_until(&f->loop, &closed);
    head_jobs_free(&f->head);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&f->loop), 0);
}

/* n_numbers 0: from an older agent. */
static enum mb_job_state after_unknown(uint64_t number, size_t n_numbers)
{
    Mobula__V1__ReportDriversRequest m = MOBULA__V1__REPORT_DRIVERS_REQUEST__INIT;
    char *ids[] = {(char *)(uintptr_t) "a"};
    enum mb_job_state state;
    struct fixture f;

    begin(&f);
    m.unknown = ids;
    m.n_unknown = 1;
    m.unknown_no = &number;
    m.n_unknown_no = n_numbers;
    head_drivers_take(&f.head, &m, node);
    state = head_job_find(&f.head, "a")->state;
    end(&f);
    return state;
}

static void an_unknown_driver(void **state)
{
    (void)state;
    assert_int_equal(after_unknown(7, 1), MB_JOB_FAILED);
    assert_int_equal(after_unknown(6, 1), MB_JOB_RUNNING);
    assert_int_equal(after_unknown(0, 1), MB_JOB_FAILED);
    assert_int_equal(after_unknown(6, 0), MB_JOB_FAILED);
}

/* That the start could not be made, said again of a job of the same id that was deleted. */
static void a_start_that_failed(void **state)
{
    static const struct {
        uint64_t number;
        enum mb_job_state state;
    } rows[] = {{6, MB_JOB_RUNNING}, {7, MB_JOB_FAILED}};

    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        Mobula__V1__ReportDriversRequest m = MOBULA__V1__REPORT_DRIVERS_REQUEST__INIT;
        Mobula__V1__DriverEvent e = MOBULA__V1__DRIVER_EVENT__INIT, *events[] = {&e};
        struct fixture f;

        begin(&f);
        e.submission_id = (char *)(uintptr_t) "a";
        e.kind = MB_JOB_EVENT_START_FAILED;
        e.start_no = rows[i].number;
        m.events = events;
        m.n_events = 1;
        head_drivers_take(&f.head, &m, node);
        assert_int_equal(head_job_find(&f.head, "a")->state, rows[i].state);
        end(&f);
    }
}

/* ---- drivers here ---- */

static void no_listener(void *self, mb_job_event_cb cb, void *arg)
{
    (void)self;
    (void)cb;
    (void)arg;
}

static enum mb_job_adopt adopt_all(void *self, const char *id)
{
    (void)self;
    (void)id;
    return MB_JOB_ADOPT_RUNNING;
}

static char wanted[64]; /* of those that run, the ids; and whether the runner was asked */
static int was_asked;

static void stop_unwanted(void *self, int (*is_wanted)(void *arg, const char *id), void *arg)
{
    static const char *const run[] = {"a", "ended", "unknown"};

    (void)self;
    was_asked = 1;
    for (size_t i = 0; i < sizeof run / sizeof run[0]; i++)
        if (is_wanted(arg, run[i]))
            strcat(wanted, run[i]);
}

/* A guest's records may be in Ray's KV, from where they are taken later. */
static void only_what_the_head_knows_is_wanted(void **state)
{
    static const struct mb_job_runner here = {.set_listener = no_listener,
                                              .adopt = adopt_all,
                                              .stop_unwanted = stop_unwanted,
                                              .node_id_hex = other_node};

    (void)state;
    for (int is_guest = 0; is_guest < 2; is_guest++) {
        struct mb_err err = {0};
        struct fixture f;

        *wanted = '\0';
        was_asked = 0;
        begin(&f);
        f.head.runner = &here;
        f.head.guest =
            is_guest ? (struct head_guest *)&f : NULL; /* only that there is one counts */
        assert_int_equal(head_jobs_take_record(&f.head, mb_blob_str("_ray_internal_job_info_ended"),
                                               mb_blob_str("{\"status\": \"SUCCEEDED\"}"), &err),
                         0);
        head_jobs_adopt(&f.head);
        assert_int_equal(was_asked, !is_guest);
        assert_string_equal(wanted, is_guest ? "" : "a");
        f.head.guest = NULL;
        end(&f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_unknown_driver),
        cmocka_unit_test(a_start_that_failed),
        cmocka_unit_test(only_what_the_head_knows_is_wanted),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
